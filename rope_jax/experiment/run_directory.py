"""The directory of a run: which config made it, and which checkpoints count.

    RUN/config.json             the run's config, written just before the first step
    RUN/metrics.jsonl           a row for each logged step
    RUN/events.*                the same for TensorBoard
    RUN/checkpoints/STEP/       one checkpoint: the state after STEP updates
    RUN/failure.txt             why training ended early, if it failed

Orbax lists every directory that is named as a step. Here one counts only if its
save ran to the end, so that a run which was killed goes on from a state that is
whole.
"""

import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

from absl import logging

from rope_jax.experiment import atomic
from rope_jax.experiment.config import Config, differences, from_dict, to_dict

TREES = ("params", "opt_state", "progress")
_MARKER, _COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"
_FAILURE = "failure.txt"

# Fields that a run may be continued with another value of: they say where and how
# often, or choose between ways to compute the same numbers.
_FREE = (
    "data.data_dir",
    "eval.",
    "mesh.",
    "model.attention_implementation",
    "model.remat",
    "sweep.",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.log_every",
)


def absolute(path: str | os.PathLike, flag: str = "--workdir") -> pathlib.Path:
    """An absolute path, with `~` expanded, whatever the current directory.

    Raises:
      ValueError: naming the flag; the path is a URL, or leads to a file.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{flag} must be a path of the file system, got {path!r}")
    path = pathlib.Path(path).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag} must be a directory, got the file {path}")
    return path


def name_of(config: Config, *, by_steps: bool = False) -> str:
    """The name of a run's directory in a sweep's: ENCODING-seedN.

    With `by_steps` it is ENCODING-stepsS-seedN, as in a sweep of several budgets.
    """
    budget = f"-steps{config.train.steps}" if by_steps else ""
    return f"{config.model.encoding}{budget}-seed{config.train.seed}"


def save_config(config: Config, run_dir: pathlib.Path) -> None:
    """Write config.json, at once or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_dict(config), indent=2) + "\n"
    atomic.write_text(run_dir / "config.json", text)


def save_failure(run_dir: pathlib.Path, reason: str) -> None:
    """Write why training failed, for the table of an evaluation."""
    atomic.write_text(run_dir / _FAILURE, reason + "\n")


def clear_failure(run_dir: pathlib.Path) -> None:
    """Forget a failure: the run is tried again from its last good checkpoint."""
    (run_dir / _FAILURE).unlink(missing_ok=True)


def failure(run_dir: pathlib.Path) -> str:
    """Why training failed; "" where it did not."""
    path = run_dir / _FAILURE
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def load_config(run_dir: str | os.PathLike) -> Config:
    """The config that a run was made with.

    Raises:
      FileNotFoundError: nothing there, or nothing that looks like a run.
      ValueError: the directory lies inside a run, or config.json is damaged.
    """
    run_dir = absolute(run_dir)
    for outer in _enclosing_runs(run_dir):
        raise ValueError(f"{run_dir} lies inside a run; give its directory, {outer}")
    path = run_dir / "config.json"
    if not path.exists():
        raise FileNotFoundError(
            f"no checkpoint found in {run_dir}: expected the directory of a run, "
            "which holds config.json and checkpoints/"
        )
    try:
        return from_dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error


def _enclosing_runs(path: pathlib.Path) -> list[pathlib.Path]:
    """The run that owns RUN/checkpoints or RUN/checkpoints/STEP, in a list."""
    levels = (path, path.parent)
    owners = [level.parent for level in levels if level.name == "checkpoints"]
    return [owner for owner in owners if (owner / "config.json").exists()]


def find_runs(workdir: str | os.PathLike) -> list[pathlib.Path]:
    """The workdir itself if it is a run, else every run below it, by name.

    A run that failed counts without a checkpoint: it has a place in the table.

    Raises:
      FileNotFoundError: there is no run with a checkpoint, nor one that failed.
      ValueError: the path is a file, or lies inside a run.
    """
    workdir = absolute(workdir)
    if (workdir / "config.json").exists() or "checkpoints" in workdir.parts[-2:]:
        load_config(workdir)  # says which level is expected
        found = [workdir]
    else:
        found = sorted(_directories_with_config(workdir))
    runs = []
    for run in found:
        if complete_steps(run) or failure(run):
            runs.append(run)
        elif (run / "checkpoints").exists():
            print(f"no checkpoint yet, left out: {run}", file=sys.stderr)
    if not runs:
        raise FileNotFoundError(
            f"no checkpoint found in {workdir}: --workdir must be a run's directory, "
            "which holds config.json and checkpoints/, or one above it"
        )
    return runs


def find_run(workdir: str | os.PathLike) -> pathlib.Path:
    """The workdir itself if it is a run, else the only run below it.

    Raises:
      FileNotFoundError: there is no run with a checkpoint.
      ValueError: as for `find_runs`, or there are several: all of them are named.
    """
    runs = find_runs(workdir)
    if len(runs) > 1:
        names = "".join(f"\n  --workdir={run}" for run in runs)
        raise ValueError(f"--workdir must hold one run, got {len(runs)}:{names}")
    return runs[0]


def _directories_with_config(workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    for directory, below, files in os.walk(workdir):
        if "config.json" in files:
            below.clear()  # nothing but checkpoints lies inside a run
            yield pathlib.Path(directory)


def check_config(config: Config, run_dir: pathlib.Path) -> None:
    """Raise ValueError where a directory belongs to a run of another config.

    Fields that do not change the result may differ: how often to log or to save,
    the mesh, evaluation, memory against speed. `train.steps` may not, because the
    learning rate of every step depends on it. A directory without a row or a
    checkpoint is nobody's: its config.json was never worked by.
    """
    if not _has_work(run_dir):
        return
    if not (run_dir / "config.json").exists():
        if complete_steps(run_dir):
            raise ValueError(f"{run_dir} has checkpoints but no config.json")
        return
    found = conflicts(load_config(run_dir), config)
    if found:
        raise ValueError(
            f"--workdir {run_dir} holds a run of another config "
            f"({'; '.join(found)}, there and here); give another --workdir"
        )


def _has_work(run_dir: pathlib.Path) -> bool:
    return bool(_step_directories(run_dir)) or _has_content(run_dir / "metrics.jsonl")


def conflicts(saved: Config, config: Config) -> list[str]:
    """The differences between two configs that make them two different runs."""
    return [d for d in differences(saved, config) if not d.startswith(_FREE)]


def complete_steps(run_dir: pathlib.Path) -> list[int]:
    """Steps of the checkpoints whose saves ran to the end, ascending.

    Others are named in a warning and passed over.
    """
    steps = []
    for path, complete in _step_directories(run_dir):
        if complete:
            steps.append(int(path.name))
        else:
            logging.warning("ignoring the unfinished checkpoint %s", path)
    return sorted(steps)


def clear_unfinished(run_dir: pathlib.Path) -> None:
    """Make room for saving again the steps whose saves were interrupted.

    What never got the name of a step is removed; a step that is not whole is moved
    aside, since a copy from elsewhere that was cut short looks the same.
    """
    for path in (run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
        logging.warning("removing what an interrupted save left: %s", path)
        shutil.rmtree(path, ignore_errors=True)
    for path, complete in _step_directories(run_dir):
        if not complete:
            aside = path.with_name(path.name + ".unfinished")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            logging.warning("unfinished checkpoint %s moved to %s", path, aside.name)


def _step_directories(run_dir: pathlib.Path) -> list[tuple[pathlib.Path, bool]]:
    """`(path, complete)` of everything that is named as a step."""
    directory = run_dir / "checkpoints"
    paths = directory.iterdir() if directory.is_dir() else ()
    return [(p, _is_complete(p)) for p in paths if p.name.isdigit() and p.is_dir()]


def _is_complete(path: pathlib.Path) -> bool:
    """Whether a checkpoint has all of its parts and the marks of its completion."""
    try:
        marker = json.loads((path / _MARKER).read_text())
    except (OSError, ValueError):
        return False
    parts = all(_has_content(path / tree / "_METADATA") for tree in TREES)
    # Where orbax commits by file, it marks the parts first and the whole last.
    committed = _has_content(path / _COMMITTED) or not any(path.glob("*/" + _COMMITTED))
    data = (path / "data").is_dir()
    return bool(marker.get("commit_timestamp_nsecs")) and parts and committed and data


def _has_content(path: pathlib.Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
