"""The grid: train every encoding with every seed and budget, then evaluate them all."""

import copy
import dataclasses
import itertools
import pathlib
from collections.abc import Collection

from rope_jax.experiment import (
    distributed,
    evaluation,
    init_from,
    protocols,
    run_directory,
    training,
)
from rope_jax.experiment.config import Config, SweepConfig, parse, resolve
from rope_jax.experiment.data import sources
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.mesh import make_mesh
from rope_jax.nn.encoding import Encoding
from rope_jax.nn.encodings import ENCODINGS


def runs(config: Config) -> dict[str, Config]:
    """One config for each point of a parsed config's grid, by folder name.

    The seeds of one encoding and budget follow each other. The folder is
    ENCODING-seedN, or ENCODING-stepsS-seedN where there are several budgets.
    """
    sweep, grid = config.sweep, {}
    for encoding, steps, seed in itertools.product(
        sweep.encodings, sweep.steps, sweep.seeds
    ):
        one = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, encoding=encoding),
            train=dataclasses.replace(config.train, seed=seed, steps=steps),
            sweep=SweepConfig((encoding,), (seed,), (steps,)),
        )
        grid[run_directory.name_of(one, by_steps=len(sweep.steps) > 1)] = one
    return grid


def select(config: Config, chosen: Collection[str]) -> Config:
    """A config in which a chosen encoding or seed replaces the config's own grid.

    `--config.model.encoding=none` on a config with a grid of encodings means that one
    encoding; without this it would be silently overruled by the grid. Chosen
    `eval.multiples` replace the config's `eval.lengths` in the same way.

    Args:
      config: not resolved; it is not changed.
      chosen: the fields that the user set, such as "model.encoding".

    Raises:
      ValueError: two fields that say the same thing were both chosen, an option of
        an encoding that is not in the grid, or one that the protocol does not read.
    """
    config = copy.deepcopy(config)
    for group, name, grid in (
        ("model", "encoding", "encodings"),
        ("train", "seed", "seeds"),
        ("train", "steps", "steps"),
    ):
        if f"{group}.{name}" not in chosen:
            continue
        if f"sweep.{grid}" in chosen:
            raise ValueError(
                f"--config.{group}.{name} and --config.sweep.{grid} say the same "
                "thing in two ways; give one of them"
            )
        setattr(config.sweep, grid, ())
    if "eval.multiples" in chosen:
        if "eval.lengths" in chosen:
            raise ValueError(
                "--config.eval.multiples and --config.eval.lengths both say at which "
                "lengths to evaluate; give one of them"
            )
        config.eval.lengths = ()
    of_eval = (name.removeprefix("eval.") for name in chosen if name[:5] == "eval.")
    protocols.check_options(config.eval.protocol, of_eval)
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
    goes on from that point when the command is given again. A run that fails is
    named at once and has rows without values; the others go on.

    Returns:
      The rows of the evaluation; none if the sweep was stopped.

    Raises:
      ValueError: naming the flag, before the first step, for anything that cannot
        work: see `config.resolve`, `init_from.inherit`, `sources.load`,
        `evaluation.check`, `training.check`, `training.check_together` and
        `training.check_workdir`.
      RunError: at the very end, when everything is written: runs failed; each is
        listed with its reason.
    """
    config, workdir = parse(config), run_directory.absolute(workdir)
    grid = {
        name: resolve(init_from.inherit(one, workdir / name))
        for name, one in runs(config).items()
    }
    corpus = sources.load(config.data)
    mesh = make_mesh(config.mesh)
    for one in grid.values():
        training.check(one, corpus)
    evaluation.check(config.eval, corpus, config.data.length, mesh)
    for name, one in grid.items():
        training.check_workdir(one, workdir / name)
    groups = _groups(grid, len(config.sweep.seeds) if config.sweep.together else 1)
    for group in groups:
        training.check_together(list(group.values()))
    failures = {}
    for number, group in enumerate(groups, 1):
        folders = [workdir / name for name in group]
        shown = ", ".join(map(str, folders))
        distributed.say(f"training {number} of {len(groups)}: {shown}")
        results = training.fit_together(list(group.values()), folders, corpus)
        for (name, one), result in zip(group.items(), results, strict=True):
            if isinstance(result, RunError):
                failures[name] = result
            elif not result.finished:
                distributed.say(
                    f"{name} stopped at step {result.step} of {one.train.steps}, "
                    "nothing evaluated; give the same command again to go on"
                )
                return []
    rows = evaluation.evaluate_workdir(workdir, config.eval, corpus)
    if failures:
        reasons = "".join(f"\n  {name}: {error}" for name, error in failures.items())
        raise RunError(f"{len(failures)} of {len(grid)} runs failed:{reasons}")
    return rows


def _groups(grid: dict[str, Config], size: int) -> list[dict[str, Config]]:
    """The grid in parts of `size` runs, in its order."""
    items = list(grid.items())
    return [dict(items[i : i + size]) for i in range(0, len(items), size)]
