"""Several processes as one job: how they meet, agree, and end together.

Each process runs the same command. They meet at an address that process 0 serves; after
that `jax.devices()` are those of all. Nothing here is done without `--distributed`.

A process that is gone is noticed at once by those that wait for its numbers, where the
connection breaks, and by all others after `HEARTBEAT` seconds.
"""

import faulthandler
import hashlib
import os
import re
import sys
import traceback
from typing import NoReturn

import jax
import numpy as np
from absl import flags
from jax._src import distributed as service  # barriers with a limit: nowhere else
from jax.experimental import multihost_utils

from rope_jax.experiment.errors import RunError

# Seconds in which all processes have to start.
_MEETING = 300
# Seconds of silence after which a process counts as dead: more than a pause of a
# virtual machine that is moved, less than anybody would wait.
HEARTBEAT = 60
# Seconds in which the others have to answer a process that has an error to report.
_ANSWER = 10
# Others wait as long as this at the end for process 0, which writes the reports.
_REPORTS = 3600

_COORDINATES = ("coordinator_address", "num_processes", "process_id")
_RESUME = (
    "the same command, in any number of processes, goes on from the last checkpoint"
)


def define_flags() -> None:
    """Define --distributed, and the flags that say where the processes meet."""
    flags.DEFINE_boolean(
        "distributed",
        False,
        "One process of several: on a TPU pod slice, under Slurm, Open MPI or "
        "Kubernetes by this flag alone, elsewhere with the three below.",
    )
    flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT of process 0, a free port of its host."
    )
    flags.DEFINE_integer("num_processes", None, "How many processes there are.")
    flags.DEFINE_integer("process_id", None, "Which this is, from 0.")


def start() -> None:
    """Join the job that the flags describe; nothing without --distributed.

    To be called before anything touches the devices.

    Raises:
      ValueError: naming the flags; a combination that cannot work, or no cluster.
      RunError: the processes did not find each other.
    """
    given = _coordinates()
    if not flags.FLAGS["distributed"].value:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself to the end of the process: see stop_signal.
    jax.config.update("jax_enable_preemption_service", False)
    # Before it: jax aborts where they do not come, and names no flag.
    where = given.get("coordinator_address", "the address that the cluster says")
    text = f"--distributed: waiting {_MEETING} s at most for all processes at {where}"
    print(text, file=sys.stderr, flush=True)
    # What is said here is meant; otherwise the cluster's environment is asked.
    detection = "deactivate" if given else None
    try:
        jax.distributed.initialize(
            **given,
            cluster_detection_method=detection,
            initialization_timeout=_MEETING,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=_REPORTS,
        )
    except (ValueError, RuntimeError) as error:
        _cannot_meet(given, error)
    print(
        f"{_me()} is here; should one be gone, all end within {HEARTBEAT} s, and "
        f"{_RESUME}",
        file=sys.stderr,
        flush=True,
    )


def _coordinates() -> dict[str, str | int]:
    """The three flags that belong together: all of them or none."""
    given = {name: flags.FLAGS[name].value for name in _COORDINATES}
    given = {name: value for name, value in given.items() if value is not None}
    shown = ", ".join(f"--{name}={value}" for name, value in given.items())
    if given and not flags.FLAGS["distributed"].value:
        raise ValueError(f"{shown}: needs --distributed as well")
    if given and len(given) < len(_COORDINATES):
        missing = " and ".join(f"--{n}" for n in _COORDINATES if n not in given)
        raise ValueError(
            f"{shown}: needs {missing} as well, or none of the three where a cluster's "
            "environment says it"
        )
    if not given:
        return {}
    address, count, index = (given[name] for name in _COORDINATES)
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"--coordinator_address must be HOST:PORT, got {address!r}")
    if count < 1:
        raise ValueError(f"--num_processes must be at least 1, got {count}")
    if not 0 <= index < count:
        raise ValueError(
            f"--process_id must be from 0 to {count - 1} with --num_processes={count}, "
            f"got {index}"
        )
    return given


def _cannot_meet(given: dict, error: Exception) -> NoReturn:
    if not given and isinstance(error, ValueError):
        wanted = ", ".join(f"--{name}" for name in _COORDINATES)
        raise ValueError(
            f"--distributed: the environment is that of no cluster ({error}); "
            f"give {wanted}"
        ) from error
    shown = ", ".join(f"--{name}={value}" for name, value in given.items())
    raise RunError(f"--distributed: no job with {shown or 'this cluster'}: {error}")


def _me() -> str:
    state = service.global_state
    return f"process {state.process_id} of {state.num_processes}"


def say(text: str) -> None:
    """Print a line on stderr, from process 0 alone."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def sync(name: str) -> None:
    """Wait until every process is here; what one has written, all can then read.

    Args:
      name: of the place, the same in all.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def require_same(what: str, text: str) -> None:
    """Raise ValueError unless every process has the same text; waits for all.

    Processes that differ in what they are about to do would wait for each other.

    Args:
      what: the text's name for the message.
      text: any.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    others = [i for i, d in enumerate(digests) if not np.array_equal(d, digests[0])]
    if others:
        raise ValueError(
            f"{what} must be the same in every process; process "
            f"{', '.join(map(str, others))} differs from process 0: give all the same "
            "flags, and a --workdir and data that all of them see"
        )


def finish() -> None:
    """Leave the job when every process has done its part."""
    jax.distributed.shutdown()


def fail(error: BaseException, message: str | None) -> NoReturn:
    """Say why this process of several ends, and end it so that the others do.

    Where all processes fail for one reason they leave together. Otherwise this one
    must not wait for the others, since they wait for it.

    Args:
      error: what happened.
      message: for the user; None for a fault, whose traceback is shown.
    """
    lost = _is_loss(error)
    if lost:
        first = str(error).splitlines()[0]
        message = f"another process is gone ({first}); {_RESUME}"
    if message is None:
        traceback.print_exception(error)
    else:
        _complain(message)
    # Should the service be gone as well, it ends the process with a dump of its own.
    faulthandler.disable()
    absent = _absent()
    if lost and absent:
        _complain(f"no answer from process {absent} within {_ANSWER} s")
    if not absent:
        jax.distributed.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if message and not lost else 1)


def _complain(message: str) -> None:
    print(f"error: {_me()}: {message}", file=sys.stderr, flush=True)


def _is_loss(error: BaseException) -> bool:
    """Whether it is what a broken connection between processes looks like."""
    text = str(error)
    if "Gloo" in text:  # a ValueError
        return True
    signs = ("UNAVAILABLE", "Barrier", "NCCL")
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(sign in text for sign in signs)
    return error.__cause__ is not None and _is_loss(error.__cause__)


def _absent() -> str:
    """The processes that do not come to the place where errors end, as '1, 3'."""
    try:
        service.global_state.client.wait_at_barrier("an error", 1000 * _ANSWER)
    except jax.errors.JaxRuntimeError as error:
        _, _, names = str(error).partition("timed out task names:")
        found = re.findall(r"^(?:.*task:)?(\d+)$", names, re.MULTILINE)
        own = str(service.global_state.process_id)
        return ", ".join(n for n in found if n != own) or "unknown"
    return ""
