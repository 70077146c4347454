"""Train one run in one directory, from whatever state is there."""

import collections
import contextlib
import functools
import os
import pathlib
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from rope_jax.experiment import init_from, run_directory
from rope_jax.experiment import metrics as metrics_lib
from rope_jax.experiment.checkpoint import Checkpoints, abstract_model, with_shardings
from rope_jax.experiment.config import Config, resolve
from rope_jax.experiment.data import pipeline, sources, task_source
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.mesh import (
    batch_sharding,
    check_mesh,
    make_mesh,
    param_shardings,
    replicated,
)
from rope_jax.experiment.optimizer import learning_rate, make_optimizer
from rope_jax.experiment.stop_signal import StopSignal
from rope_jax.experiment.train_step import init_state, make_train_step
from rope_jax.nn.decoder import Decoder

# Steps that the host may be ahead of the device: enough to keep it busy, few enough
# that a signal to stop is acted upon at once.
_AHEAD = 4


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
    check_mesh(config)
    if isinstance(corpus, Task):  # it has as many rows as are asked for
        return
    pipeline.check(
        corpus.train, length=config.data.length, batch_size=config.train.batch_size
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
    run_dir = run_directory.absolute(workdir)
    config = _resolve(config, run_dir)
    done = run_directory.complete_steps(run_dir)
    if done and done[-1] >= config.train.steps:
        _save_config(config, run_dir)
        return FitResult(run_dir, done[-1], finished=True)
    corpus = sources.load(config.data) if corpus is None else corpus
    check(config, corpus)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), StopSignal() as stop:
        run = _Run(config, mesh, corpus)
        if not done:
            run.begin(corpus.sha256)
        with Checkpoints(run_dir, config, corpus.sha256) as checkpoints:
            if done:
                run.resume(checkpoints)
            _save_config(config, run_dir)
            step = run.train(run_dir, checkpoints, stop)
    return FitResult(run_dir, step, finished=step == config.train.steps)


def _save_config(config: Config, run_dir: pathlib.Path) -> None:
    if jax.process_index() == 0:
        run_directory.save_config(config, run_dir)


class _Run:
    """The compiled step and everything that changes while a run goes on."""

    def __init__(self, config, mesh, corpus):
        self.config = config
        optimizer = make_optimizer(config.train)
        self._init = functools.partial(
            init_state, functools.partial(Decoder, config.model), optimizer
        )
        abstract = jax.eval_shape(self._init, self._key())
        shardings = param_shardings(mesh, abstract)
        abstract = with_shardings(abstract, shardings)
        window = jax.eval_shape(metrics_lib.empty_window)
        window = with_shardings(
            window, jax.tree.map(lambda _: replicated(mesh), window)
        )
        self.iterator = _batches(config, mesh, corpus)
        self._abstract = abstract, window
        self._add = _on(window, metrics_lib.add_step)
        self._restart = _on(window, metrics_lib.restart_window)
        graphdef, _ = abstract_model(config.model)
        train_step = make_train_step(
            graphdef,
            optimizer,
            accumulate=config.train.accumulate,
            state_shardings=shardings,
        )
        shape = (config.train.batch_size, config.data.length)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
        # Compiled before the clock starts, and unable to compile a second time.
        began = time.monotonic()
        names = ("inputs", "targets")
        if isinstance(corpus, Task):
            names += ("weights",)
        batch = dict.fromkeys(names, tokens)
        self._train_step = train_step.lower(abstract, batch).compile()
        logging.info("compiled the step in %.1f s", time.monotonic() - began)

    def _key(self):
        return jax.random.key(self.config.train.seed)

    def begin(self, corpus_sha256: str) -> None:
        """Make the state before the first step."""
        state, window = self._abstract
        self.step = 0
        self.state = _on(state, self._init)(self._key())
        if self.config.init_from:
            loaded = init_from.load(self.config, state.params, corpus_sha256)
            self.state = self.state._replace(params=loaded)
        self.window = _on(window, metrics_lib.empty_window)()

    def resume(self, checkpoints: Checkpoints) -> None:
        """Take the state of the newest checkpoint."""
        self.step = checkpoints.latest
        self.state, self.window = checkpoints.restore(*self._abstract, self.iterator)

    def train(self, run_dir: pathlib.Path, checkpoints: Checkpoints, stop) -> int:
        """Go on to the end, or to the step where `stop` asks for it."""
        train, primary = self.config.train, jax.process_index() == 0
        if primary:
            size = sum(x.size for x in jax.tree.leaves(self.state.params))
            begins = (
                f"{run_dir.name}: {size:,} parameters, {self.step}/{train.steps} done"
            )
            print(begins, file=sys.stderr, flush=True)
        rows = metrics_lib.Metrics(
            run_dir, start=self.step, steps=train.steps, primary=primary
        )
        with contextlib.closing(self.iterator), rows:
            reporter = _Reporter(self, rows, checkpoints)
            ahead = collections.deque()
            while self.step < train.steps and not stop.requested(self.step):
                ahead.append(self._dispatch())
                # Only now, with the next step on its way, look at the ones before.
                reporter.report_pending()
                if len(ahead) > _AHEAD:
                    jax.block_until_ready(ahead.popleft())
                rows.advance(self.step)
                if self.step % train.log_every == 0 or self.step == train.steps:
                    reporter.hold(self.step, self.window)
                    self.window = self._restart(self.window)
                if self.step % train.checkpoint_every == 0:
                    reporter.save()
            reporter.save()
        return self.step

    def _dispatch(self):
        batch = next(self.iterator)
        self.state, sums = self._train_step(self.state, batch)
        self.step += 1
        self.window = self._add(self.window, sums, self.state.step)
        return sums


class _Reporter:
    """Reads sums off the device, one step late, and refuses to go on from a NaN."""

    def __init__(self, run: _Run, rows: metrics_lib.Metrics, checkpoints: Checkpoints):
        self._run, self._rows, self._checkpoints = run, rows, checkpoints
        # All of them now: computed later, they would wait behind the step under way.
        updates = np.arange(run.config.train.steps + 1)
        self._rates = np.asarray(learning_rate(run.config.train)(updates))
        self._pending = None
        self._read_step, self._read_time = run.step, time.monotonic()

    def hold(self, step: int, window: metrics_lib.Window) -> None:
        """Remember a full window, to be read when another step is under way."""
        self._pending = (step, window)

    def report_pending(self) -> None:
        """Write the row of the window on hold, if there is one."""
        if self._pending is None:
            return
        (step, window), self._pending = self._pending, None
        window = jax.device_get(window)
        now = time.monotonic()
        config = self._run.config
        trained = (step - self._read_step) * config.train.batch_size
        row = {"step": step} | metrics_lib.summarize(window)
        row["learning_rate"] = float(self._rates[step])
        row["bytes_per_second"] = (
            trained * config.data.length / max(now - self._read_time, 1e-9)
        )
        self._read_step, self._read_time = step, now
        self._rows.write(row)
        self._check(window["bad_step"])

    def save(self) -> None:
        """Save a checkpoint of the newest step, if its numbers are finite."""
        self.report_pending()
        run = self._run
        if run.step == (self._checkpoints.latest or 0):
            return
        self._check(run.window["bad_step"])
        self._checkpoints.save(run.step, run.state, run.window, run.iterator)

    def _check(self, bad_step) -> None:
        bad_step = int(bad_step)
        if bad_step == 0:
            return
        checkpoints = self._checkpoints
        good = "there is no checkpoint before it"
        if checkpoints.latest is not None:
            checkpoints.wait()
            good = f"the last good checkpoint is {checkpoints.path(checkpoints.latest)}"
        raise RunError(f"the loss is not finite at step {bad_step}; {good}")


def _batches(config: Config, mesh, corpus):
    sharding = batch_sharding(mesh)
    index, count = pipeline.process_slice(sharding)
    options = {
        "batch_size": config.train.batch_size,
        "seed": config.train.seed,
        "process_index": index,
        "process_count": count,
    }
    if isinstance(corpus, Task):
        dataset = task_source.train_dataset(corpus, **options)
    else:
        dataset = pipeline.train_dataset(
            corpus.train, length=config.data.length, **options
        )
    return pipeline.to_device(dataset, sharding)


def _on(tree, function):
    """Jitted, with the result where the arrays of a tree lie."""
    return jax.jit(function, out_shardings=jax.tree.map(lambda x: x.sharding, tree))
