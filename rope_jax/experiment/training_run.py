"""What one run holds while it is trained: its state, its data and its reports.

The loop in `training` drives one of these, or several beside each other.
"""

import pathlib
import sys
import time

import jax
import numpy as np

from rope_jax.experiment import init_from
from rope_jax.experiment import metrics as metrics_lib
from rope_jax.experiment.abstract_step import abstract_state, state_init
from rope_jax.experiment.checkpoint import Checkpoints, with_shardings
from rope_jax.experiment.config import Config
from rope_jax.experiment.data import pipeline, sources, task_source
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.mesh import batch_sharding, replicated
from rope_jax.experiment.optimizer import learning_rate


class Run:
    """A run's state between two updates, and the data that comes next.

    Attributes:
      config: the run's config, resolved.
      step: updates done.
      state: its `TrainState`.
      window: sums since the last logged row.
      error: what ended the run before its time; None while all is well.
    """

    def __init__(
        self,
        config: Config,
        run_dir: pathlib.Path,
        mesh: jax.sharding.Mesh,
        corpus: sources.Corpus | Task,
    ):
        """Prepare a run; nothing is computed or written."""
        self.config = config
        self.run_dir = run_dir
        self.error: RunError | None = None
        self._mesh = mesh
        self._init = state_init(config)
        self.abstract = abstract_state(config, mesh)
        window = jax.eval_shape(metrics_lib.empty_window)
        self._abstract_window = with_shardings(
            window, jax.tree.map(lambda _: replicated(mesh), window)
        )
        self.iterator = _batches(config, mesh, corpus)
        self._add = _on(self._abstract_window, metrics_lib.add_step)
        self._restart = _on(self._abstract_window, metrics_lib.restart_window)
        self._batch = None

    def _key(self):
        return jax.random.key(self.config.train.seed)

    @property
    def going(self) -> bool:
        """Whether there are updates to do, and nothing in their way."""
        return self.error is None and self.step < self.config.train.steps

    def begin(self, corpus_sha256: str) -> None:
        """Make the state before the first step.

        Args:
          corpus_sha256: of the bytes that it is trained on.
        """
        self.step = 0
        self.state = _on(self.abstract, self._init)(self._key())
        if self.config.init_from:
            loaded = init_from.load(self.config, self.abstract.params, corpus_sha256)
            self.state = self.state._replace(params=loaded)
        self.window = _on(self._abstract_window, metrics_lib.empty_window)()

    def resume(self, checkpoints: Checkpoints) -> None:
        """Take the state of the newest checkpoint."""
        self.step = checkpoints.latest
        self.state, self.window = checkpoints.restore(
            self.abstract, self._abstract_window, self.iterator
        )

    def report_to(self, checkpoints: Checkpoints, *, label: str) -> metrics_lib.Metrics:
        """Open the run's rows, and say on stderr that it begins.

        Args:
          checkpoints: where states are saved.
          label: stands before each line of progress; "" for none.

        Returns:
          The rows, to be closed when the run ends.
        """
        train, primary = self.config.train, jax.process_index() == 0
        if primary:
            size = sum(x.size for x in jax.tree.leaves(self.state.params))
            done = f"{self.step}/{train.steps} done"
            print(
                f"{self.run_dir.name}: {size:,} parameters, {done}",
                file=sys.stderr,
                flush=True,
            )
        rows = metrics_lib.Metrics(
            self.run_dir,
            start=self.step,
            steps=train.steps,
            primary=primary,
            label=label,
        )
        self._rows = rows
        self._reporter = _Reporter(self, rows, checkpoints)
        return rows

    def next_batch(self):
        """The batch of the next update; a run that has ended repeats its last."""
        if self.going or self._batch is None:
            self._batch = next(self.iterator)
        return self._batch

    def take(self, state, sums) -> None:
        """Put the result of an update in place, also where it does not count."""
        self.state = state
        if self.going:
            self.step += 1
            self.window = self._add(self.window, sums, state.step)

    def report_pending(self) -> None:
        """Write the row that waits, now that the next step is on its way."""
        self._reporter.report_pending()

    def report(self) -> None:
        """Do what is due after an update: move the bar, hold a row, save."""
        train = self.config.train
        self._rows.advance(self.step)
        if self.step % train.log_every == 0 or self.step == train.steps:
            self._reporter.hold(self.step, self.window)
            self.window = self._restart(self.window)
        if self.step % train.checkpoint_every == 0 or self.step == train.steps:
            self.save()

    def save(self) -> None:
        """Save a checkpoint of the newest step, if its numbers are finite."""
        self._reporter.save()


class _Reporter:
    """Reads sums off the device, one step late, and refuses to go on from a NaN."""

    def __init__(self, run: Run, rows: metrics_lib.Metrics, checkpoints: Checkpoints):
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
        raise RunError(f"the loss is not finite at step {bad_step}", good)


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
