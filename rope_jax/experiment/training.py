"""Train runs, each in its own directory, from whatever state is there."""

import collections
import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from rope_jax.experiment import distributed, init_from, run_directory
from rope_jax.experiment.abstract_step import abstract_batch, train_step
from rope_jax.experiment.checkpoint import Checkpoints
from rope_jax.experiment.config import Config, resolve, to_dict
from rope_jax.experiment.data import pipeline, sources
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.mesh import batch_sharding, check_mesh, make_mesh
from rope_jax.experiment.stop_signal import StopSignal
from rope_jax.experiment.training_run import Run

# Steps that the host may be ahead of the device: enough to keep it busy, few enough
# that a signal to stop is acted upon at once.
_AHEAD = 4

# Tokens that the model has to know: of a task only ASCII (`data.tasks`).
_BYTES, _ASCII = 256, 128


@dataclass(frozen=True)
class FitResult:
    """Where a run stands: `step` updates are done; `finished` if that is all."""

    run_dir: pathlib.Path
    step: int
    finished: bool


def check_workdir(config: Config, workdir: str | os.PathLike) -> None:
    """Raise ValueError, naming the fields, if a run cannot begin or go on there.

    Another config made the directory, or the run is to start from parameters that
    are not there or do not fit.
    """
    _resolve(config, run_directory.absolute(workdir))


def _resolve(config: Config, run_dir: pathlib.Path) -> Config:
    config = resolve(init_from.inherit(config, run_dir))
    run_directory.check_config(config, run_dir)
    if config.init_from and not run_directory.complete_steps(run_dir):
        init_from.check(config)
    return config


def check(config: Config, corpus: sources.Corpus | Task) -> None:
    """Raise ValueError where a run could not take its first step.

    Args:
      config: a resolved one; `config.resolve` has checked what needs no data.
      corpus: what it would be trained on.
    """
    _check_vocabulary(config, corpus)
    _check_kernel(config)
    check_mesh(config)
    pipeline.process_slice(batch_sharding(make_mesh(config.mesh)))
    if isinstance(corpus, Task):  # it has as many rows as are asked for
        return
    pipeline.check(
        corpus.train, length=config.data.length, batch_size=config.train.batch_size
    )


def _check_vocabulary(config: Config, corpus: sources.Corpus | Task) -> None:
    of_task = isinstance(corpus, Task)
    least, what = (_ASCII, "the ASCII of a task") if of_task else (_BYTES, "bytes")
    if config.model.vocab_size < least:
        raise ValueError(
            f"--config.model.vocab_size must be at least {least} for {what}, got "
            f"{config.model.vocab_size}"
        )


def _check_kernel(config: Config) -> None:
    name = config.model.attention_implementation
    if name == "splash" and jax.default_backend() == "cpu":
        raise ValueError(
            "--config.model.attention_implementation must not be splash on a CPU, "
            f"which interprets it, for tests; got {name!r}"
        )


def check_together(configs: Sequence[Config]) -> None:
    """Raise ValueError where runs cannot be trained in one step.

    Every axis of the mesh splits the arrays of each run as it does for one; only
    several processes are not served.

    Args:
      configs: resolved ones.
    """
    first = configs[0]
    for other in configs[1:]:
        for difference in run_directory.conflicts(first, other):
            if not difference.startswith("train.seed:"):
                raise ValueError(
                    "runs that train together may differ in train.seed only, got "
                    f"{difference}"
                )
    if len(configs) > 1 and jax.process_count() > 1:
        raise ValueError(
            "--config.sweep.together needs the mesh (--config.mesh.data, fsdp, "
            f"tensor, sequence) on one process, got {jax.process_count()} processes"
        )


def fit(
    config: Config,
    workdir: str | os.PathLike,
    corpus: sources.Corpus | Task | None = None,
) -> FitResult:
    """Train the run that a config describes, resuming what `workdir` holds.

    The same config, on the same kind and number of devices, gives the same bits
    whether or not it was interrupted: parameters, optimizer, random key, data
    position and the sums for the next log row come back together.

    SIGTERM, or Ctrl-C once, saves a checkpoint and returns; a second signal acts as
    it did before.

    Args:
      config: `config.model.encoding` and `config.train.seed` say which run.
      workdir: the run's directory; relative paths and `~` are understood. Nothing is
        written there until the run is ready for its first step.
      corpus: what to train on; None loads what `config.data` asks for.

    Returns:
      Where the run stands. A run that was finished before returns at once.

    Raises:
      ValueError: before any work, for a config that cannot work or that differs
        from the one that made `workdir`.
      RunError: the loss stopped being finite; the message names the step and
        the last good checkpoint.
    """
    (result,) = fit_together([config], [workdir], corpus)
    if isinstance(result, RunError):
        raise result
    return result


def fit_together(
    configs: Sequence[Config],
    workdirs: Sequence[str | os.PathLike],
    corpus: sources.Corpus | Task | None = None,
) -> list[FitResult | RunError]:
    """Train several runs that differ in their seed alone, in one compiled step.

    Each run has its own directory, data order, dropout and files, as if it were
    alone, and any of them may be resumed alone or together. Its numbers are those of
    `fit` but for rounding: products over all runs add up in another order.

    A run that fails is named on stderr, and the others go on.

    Args:
      configs: one for each run.
      workdirs: one directory for each run, as for `fit`.
      corpus: as for `fit`; one for all.

    Returns:
      For each run where it stands, or the error that ended it.

    Raises:
      ValueError: as `fit`; or the configs differ in more than their seed.
    """
    run_dirs = [run_directory.absolute(workdir) for workdir in workdirs]
    configs = [_resolve(*one) for one in zip(configs, run_dirs, strict=True)]
    check_together(configs)
    results: dict[pathlib.Path, FitResult | RunError] = {}
    open_runs = []
    saved = [run_directory.complete_steps(run_dir) for run_dir in run_dirs]
    same = repr([*map(to_dict, configs), saved])
    distributed.require_same("--config, and the checkpoints in --workdir,", same)
    for config, run_dir, done in zip(configs, run_dirs, saved, strict=True):
        if done and done[-1] >= config.train.steps:
            _save_config(config, run_dir)
            results[run_dir] = FitResult(run_dir, done[-1], finished=True)
        else:
            open_runs.append((config, run_dir))
    if open_runs:
        corpus = sources.load(configs[0].data) if corpus is None else corpus
        distributed.require_same("the data", corpus.sha256)
        results |= _train(open_runs, corpus)
    return [results[run_dir] for run_dir in run_dirs]


def _train(
    open_runs: list[tuple[Config, pathlib.Path]], corpus: sources.Corpus | Task
) -> dict[pathlib.Path, FitResult | RunError]:
    for config, _ in open_runs:
        check(config, corpus)
    mesh = make_mesh(open_runs[0][0].mesh)
    with (
        jax.set_mesh(mesh),
        StopSignal(mesh) as stop,
        contextlib.ExitStack() as stack,
    ):
        runs = [Run(config, path, mesh, corpus) for config, path in open_runs]
        step = _compile(runs, mesh, corpus)
        for run in runs:
            if not run_directory.complete_steps(run.run_dir):
                run.begin(corpus.sha256)
        for run in runs:
            stack.enter_context(contextlib.closing(run.iterator))
            checkpoints = stack.enter_context(
                Checkpoints(run.run_dir, run.config, corpus.sha256)
            )
            if checkpoints.latest is not None:
                _resume(run, checkpoints, corpus.sha256)
            _save_config(run.config, run.run_dir)
            run_directory.clear_failure(run.run_dir)
            label = run.run_dir.name if len(runs) > 1 else ""
            stack.enter_context(run.report_to(checkpoints, label=label))
        _loop(runs, step, stop)
    for run in runs:
        if run.error and jax.process_index() == 0:
            run_directory.save_failure(run.run_dir, run.error.what)
    distributed.sync("training ended")
    return {
        run.run_dir: run.error
        or FitResult(run.run_dir, run.step, run.step == run.config.train.steps)
        for run in runs
    }


def _resume(run: Run, checkpoints: Checkpoints, corpus_sha256: str) -> None:
    _guarded(run, run.resume, checkpoints)
    if run.error and jax.process_count() > 1:
        raise run.error  # the others may have read their part
    if run.error:  # it fills its place in the step, and nothing of it counts
        run.begin(corpus_sha256)


def _loop(runs: list[Run], step: Callable, stop: StopSignal) -> None:
    """Update every run until all have ended, or `stop` asks for it."""
    ahead = collections.deque()
    while (going := [run for run in runs if run.going]) and not stop.requested():
        states, sums = step(
            [run.state for run in runs], [run.next_batch() for run in runs]
        )
        for run, state, one in zip(runs, states, sums, strict=True):
            run.take(state, one)
        ahead.append(sums)
        # Only now, with the next step on its way, look at the ones before.
        for run in going:
            _guarded(run, run.report_pending)
        if len(ahead) > _AHEAD:
            jax.block_until_ready(ahead.popleft())
        for run in going:
            if run.error is None:
                _guarded(run, run.report)
    for run in runs:
        if run.error is None:
            _guarded(run, run.save)


def _guarded(run: Run, action: Callable, *arguments) -> None:
    """Let an error end the run that it is of, aloud, and no other."""
    try:
        action(*arguments)
    except RunError as error:
        run.error = error
        distributed.say(f"{run.run_dir.name} failed: {error}")


def _compile(runs: list[Run], mesh, corpus: sources.Corpus | Task) -> Callable:
    """`(states, batches) -> (states, sums)`, lists over the runs.

    Compiled before the clock starts, and unable to compile a second time.
    """
    config, state = runs[0].config, runs[0].abstract
    names = ("inputs", "targets")
    names = (*names, "weights") if isinstance(corpus, Task) else names
    batch = abstract_batch(config, mesh, names)
    began = time.monotonic()
    if len(runs) == 1:
        alone = train_step(config, state).lower(state, batch).compile()

        def step(states, batches):
            state, sums = alone(*states, *batches)
            return [state], [sums]

    else:
        joint_step = train_step(config, state, together=len(runs))
        step = joint_step.lower([state] * len(runs), [batch] * len(runs)).compile()
    distributed.say(f"compiled the step in {time.monotonic() - began:.1f} s")
    return step


def _save_config(config: Config, run_dir: pathlib.Path) -> None:
    if jax.process_index() == 0:
        run_directory.save_config(config, run_dir)
