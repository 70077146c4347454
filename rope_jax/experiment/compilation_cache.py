"""Compiled programs kept on disk, so that the next run does not compile them again.

JAX's own persistent cache, in the user's cache directory. JAX_COMPILATION_CACHE_DIR
names another place, and JAX_ENABLE_COMPILATION_CACHE=false switches it off.

On a CPU the compiled program holds instructions of the machine that compiled it, and
its name in the cache does not say which: one that another machine left in a shared home
directory may end the process with SIGILL. So each kind of machine has a directory of
its own. (Where XLA notes tuning preferences among a program's instructions, as for
processors with AVX-512, it complains on stderr about each program that it reads:
jax-ml/jax issue 38445.)
"""

import contextlib
import hashlib
import os
import pathlib
import platform
from collections.abc import Iterator

import jax
from absl import logging

# Small programs are quicker to compile than to look up.
_LEAST_SECONDS = 0.3
_EVENT = "/jax/core/compile/backend_compile_duration"


def enable() -> None:
    """Keep compiled programs in the user's cache directory, if that can be.

    Call it before the first compilation. What the user has set stays as it is. A place
    that cannot be written costs a warning and no more.
    """
    config = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        path = directory()
        # What is read there is run, so nobody else may write it.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logging.warning("compiled programs are not kept: %s", error)
        return
    config.update("jax_compilation_cache_dir", str(path))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        name = "jax_persistent_cache_min_compile_time_secs"
        config.update(name, _LEAST_SECONDS)


def directory() -> pathlib.Path:
    """Where the programs of machines like this one are kept by default."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    machine = hashlib.sha256(_instructions().encode()).hexdigest()[:12]
    return pathlib.Path(home) / "rope_jax" / f"{platform.machine()}-{machine}"


def _instructions() -> str:
    """What the processor can do, as far as it says."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name")
    return "\n".join(sorted({s for s in lines if s.startswith(names)}))


class Compilations:
    """What was compiled in a while.

    Attributes:
      count: programs, those that the persistent cache held among them.
      seconds: that took to compile or to read.
    """

    def __init__(self):
        self.count, self.seconds = 0, 0.0

    def __str__(self) -> str:
        return f"compiled {self.count} programs in {self.seconds:.1f} s"


@contextlib.contextmanager
def counted() -> Iterator[Compilations]:
    """Count what JAX compiles inside, in all threads."""
    found = Compilations()

    def listen(event, seconds, **about):
        del about
        if event == _EVENT:
            found.count, found.seconds = found.count + 1, found.seconds + seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
