"""The grid: train every encoding with every seed, then evaluate them all."""

import copy
import dataclasses
import pathlib
import sys
from collections.abc import Collection

from rope_jax.experiment import evaluation, init_from, run_directory, training
from rope_jax.experiment.config import Config, parse, resolve
from rope_jax.experiment.data import sources
from rope_jax.nn.encoding import Encoding
from rope_jax.nn.encodings import ENCODINGS


def runs(config: Config) -> dict[str, Config]:
    """One config for each point of a parsed config's grid, by folder name."""
    grid = {}
    for encoding in config.sweep.encodings:
        for seed in config.sweep.seeds:
            one = dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, encoding=encoding),
                train=dataclasses.replace(config.train, seed=seed),
                sweep=type(config.sweep)((encoding,), (seed,)),
            )
            grid[run_directory.name_of(one)] = one
    return grid


def select(config: Config, chosen: Collection[str]) -> Config:
    """A config in which a chosen encoding or seed replaces the config's own grid.

    `--config.model.encoding=none` on a config with a grid of encodings means that one
    encoding; without this it would be silently overruled by the grid.

    Args:
      config: not resolved; it is not changed.
      chosen: the fields that the user set, such as "model.encoding".

    Raises:
      ValueError: a value and a grid of the same thing were both chosen, or an option
        of an encoding that is not in the grid.
    """
    config = copy.deepcopy(config)
    for group, name, grid in (
        ("model", "encoding", "encodings"),
        ("train", "seed", "seeds"),
    ):
        if f"{group}.{name}" not in chosen:
            continue
        if f"sweep.{grid}" in chosen:
            raise ValueError(
                f"--config.{group}.{name} and --config.sweep.{grid} say the same "
                "thing in two ways; give one of them"
            )
        setattr(config.sweep, grid, ())
    names = config.sweep.encodings or (config.model.encoding,)
    used = {group for name in names for group in _options(name)}
    used |= {"linear"} if config.model.attention == "linear" else set()
    for field in chosen:
        parts = field.split(".")
        if parts[0] == "model" and len(parts) == 3 and parts[1] not in used:
            raise ValueError(
                f"--config.{field} would have no effect: neither model.attention "
                f"{config.model.attention!r} nor any of the encodings "
                f"({', '.join(names)}) has options in model.{parts[1]}"
            )
    return config


def _options(encoding: str) -> tuple[str, ...]:
    # Names come unchecked here, perhaps several in one text; `resolve` refuses those.
    kinds = [ENCODINGS.get(name.strip(), Encoding) for name in encoding.split(",")]
    return tuple(group for kind in kinds for group in kind.options)


def run(config: Config, workdir: str | pathlib.Path) -> list[dict]:
    """Train each run of the grid below `workdir`, then evaluate them all.

    What is already there is resumed; a run that was stopped ends the sweep, which
    goes on from that point when the command is given again.

    Returns:
      The rows of extrapolation.json; none if the sweep was stopped.

    Raises:
      ValueError: naming the flag, before the first step, for anything that cannot
        work: see `config.resolve`, `init_from.inherit`, `sources.load`,
        `evaluation.check`, `training.check` and `training.check_workdir`.
    """
    config, workdir = parse(config), run_directory.absolute(workdir)
    grid = {
        name: resolve(init_from.inherit(one, workdir / name))
        for name, one in runs(config).items()
    }
    corpus = sources.load(config.data)
    evaluation.check(config.eval, corpus, config.data.length)
    for name, one in grid.items():
        training.check(one, corpus)
        training.check_workdir(one, workdir / name)
    for number, (name, one) in enumerate(grid.items(), 1):
        print(f"run {number} of {len(grid)}: {workdir / name}", file=sys.stderr)
        result = training.fit(one, workdir / name, corpus)
        if not result.finished:
            print(
                f"stopped at step {result.step} of {one.train.steps}, nothing "
                "evaluated; give the same command again to go on",
                file=sys.stderr,
            )
            return []
    return evaluation.evaluate_workdir(workdir, config.eval, corpus)
