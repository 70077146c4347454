"""Starting a run from the parameters of another one: `--config.init_from`.

The new run has a fresh optimizer, its own data and step 0. What follows from a training
length (the length that a rotary scaling is relative to, the size of a learned table)
follows from the one that the parameters were trained at. Once the new run has a
checkpoint, the other is not needed any more.
"""

import dataclasses
import pathlib

from rope_jax.experiment import checkpoint, distributed, run_directory
from rope_jax.experiment.config import Config, with_lengths_of

_FLAG = "--config.init_from"


def inherit(config: Config, run_dir: pathlib.Path) -> Config:
    """A run's config with the lengths of its source, and an absolute path to that.

    Args:
      config: of one run, not resolved or resolved; without `init_from` it comes back
        as it is.
      run_dir: of the new run. Where it has a checkpoint, the lengths are its own.

    Raises:
      ValueError: naming the flag; the path leads to no run.
    """
    if not config.init_from:
        return config
    path = run_directory.absolute(config.init_from, _FLAG)
    config = dataclasses.replace(config, init_from=str(path))
    begun = run_directory.complete_steps(run_dir)
    return with_lengths_of(
        config, run_directory.load_config(run_dir if begun else source(config))
    )


def source(config: Config) -> pathlib.Path:
    """The run that a run starts from: `init_from`, or the one of its name in there.

    That is ENCODING-seedN or, in a sweep of several budgets, ENCODING-stepsS-seedN of
    as many steps as the new run.

    Raises:
      ValueError: naming the flag; neither is a run.
    """
    path = run_directory.absolute(config.init_from, _FLAG)
    names = [run_directory.name_of(config, by_steps=some) for some in (False, True)]
    for run in (path, *(path / name for name in names)):
        if (run / "config.json").exists():
            return run
    raise ValueError(
        f"{_FLAG} must be the directory of a run, which holds config.json and "
        f"checkpoints/, or hold one named {' or '.join(names)}; got {path}"
    )


def check(config: Config) -> None:
    """Raise ValueError, naming the flag, where the source has other parameters."""
    run, (_, params) = source(config), checkpoint.abstract_model(config.model)
    try:
        checkpoint.check_fit(run, params)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{_FLAG}: {error}") from error


def load(config: Config, params, corpus_sha256: str) -> dict:
    """The parameters that a run starts from, said aloud.

    Args:
      config: of the new run.
      params: abstract arrays with shardings.
      corpus_sha256: hash of the bytes that the new run is trained on.
    """
    run = source(config)
    loaded, step = checkpoint.load_into(run, params)
    distributed.say(f"starting from step {step} of {run}")
    if checkpoint.corpus_sha256(run) != corpus_sha256:
        distributed.say(
            "which was trained on other bytes; what is held out here may be among them"
        )
    return loaded
