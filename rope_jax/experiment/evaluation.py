"""Evaluation of trained runs across context lengths.

A protocol (see `protocols`) plans windows as index arrays; `scoring.score` runs any
plan with any model and returns the nats of each scored byte; `measure` sums them in
float64 on the host and adds intervals. `evaluate_run` and `evaluate_workdir` do that
for what is on disk. bpc is sum(nats) / (bytes * ln 2), perplexity 2**bpc, per byte.
"""

import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rope_jax.experiment import (
    checkpoint,
    plots,
    report,
    run_directory,
    scalings,
    task_evaluation,
    task_plots,
    task_report,
)
from rope_jax.experiment.bootstrap import mean_interval, unit_values
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig
from rope_jax.experiment.data import sources
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.mesh import make_mesh, param_shardings
from rope_jax.experiment.protocols import PROTOCOLS, Cell, Windows, plan
from rope_jax.experiment.scoring import Apply, ModelApply, score

__all__ = [
    "PROTOCOLS",
    "check",
    "evaluate_run",
    "evaluate_workdir",
    "measure",
]


def measure(
    apply: Apply,
    params,
    cells: list[Cell],
    data: np.ndarray,
    config: EvalConfig,
    *,
    train_length: int,
    max_length: int | None = None,
    mesh: Mesh | None = None,
) -> list[dict]:
    """Run a plan and summarise it: one row for each cell.

    Args:
      apply: as for `scoring.score`.
      params: what `apply` takes.
      cells: the plan.
      data: uint8 `[N]`, the split.
      config: batch size, resamples and seed.
      train_length: the length that differences are to.
      max_length: the longest window that the model takes; None for any. A cell
        beyond it becomes a row without a value, and with a `reason`.
      mesh: as for `scoring.score`.

    Returns:
      Rows with length, bpc, bpc_low, bpc_high, standard_error, perplexity, delta,
      delta_low, delta_high, scored_bytes (a byte counts each time that it is scored),
      window, stride and reason. What is not known is None.
    """
    options = {"max_length": max_length, "mesh": mesh}
    measured = _values(apply, params, cells, data, config, **options)
    return _with_statistics(measured, _reference(measured, train_length), config)


Measured = list[tuple[dict, np.ndarray | None]]  # rows, and bits by unit of text


def _values(apply, params, cells, data, config, *, max_length, mesh) -> Measured:
    """What was scored, before statistics: a row and its units for each cell."""
    measured = []
    options = {"batch_tokens": config.batch_tokens, "mesh": mesh}
    for cell, sums, counts in _unit_sums(
        functools.partial(score, apply, params, data=data, **options), cells, max_length
    ):
        row, values = _row(cell, int(counts.sum())), None
        if sums is None:
            row["reason"] = f"the model's positions end at {max_length}"
        elif not np.isfinite(sums).all():
            row["reason"] = "the loss is not finite"
        else:
            values = unit_values(sums / math.log(2), counts)
        measured.append((row, values))
    return measured


def _row(cell: Cell, scored: int, reason: str | None = None) -> dict:
    return {
        "length": cell.length,
        "window": cell.windows.length,
        "stride": cell.stride or None,
        "scored_bytes": scored,
        "reason": reason,
    }


def _reference(measured: Measured, train_length: int) -> np.ndarray | None:
    """The units of the training length, which differences are to."""
    return {row["length"]: values for row, values in measured}.get(train_length)


def _with_statistics(measured: Measured, reference, config: EvalConfig) -> list[dict]:
    options = {"resamples": config.bootstrap, "seed": config.seed}
    return [row | _statistics(values, reference, options) for row, values in measured]


def _unit_sums(
    run: Callable[[Windows], np.ndarray], cells: list[Cell], max_length: int | None
) -> Iterator[tuple[Cell, np.ndarray | None, np.ndarray]]:
    """Nats summed over, and targets counted in, each unit of each cell's text."""
    planned = None  # the windows whose scores are at hand
    for cell in cells:
        if max_length is not None and cell.longest > max_length:
            yield cell, None, np.zeros(1)
            continue
        if planned is not cell.windows:
            planned, windows = cell.windows, cell.windows
            if max_length is not None and windows.length > max_length:
                windows = _shortened(windows, max_length)
            nats = run(windows).astype(np.float64)
            contexts, targets = windows.contexts(), windows.targets()
        kept = (cell.shortest <= contexts) & (contexts <= cell.longest)
        unit = np.searchsorted(cell.units, targets[kept], side="right") - 1
        size = len(cell.units)
        sums = np.bincount(unit, weights=nats[kept], minlength=size)
        yield cell, sums, np.bincount(unit, minlength=size)


def _shortened(windows: Windows, length: int) -> Windows:
    """The same windows without their end; causal, so their beginning is unchanged."""
    kept = windows.first < length
    return Windows(
        length,
        windows.starts[kept],
        windows.first[kept],
        np.minimum(windows.stop[kept], length),
    )


def _statistics(values, reference, options) -> dict:
    names = ["bpc", "bpc_low", "bpc_high", "standard_error", "perplexity"]
    names += ["delta", "delta_low", "delta_high"]
    row = dict.fromkeys(names)
    if values is None:
        return row
    mean, error, low, high, _ = mean_interval(values, **options)
    row |= {"bpc": mean, "bpc_low": low, "bpc_high": high, "standard_error": error}
    row["perplexity"] = 2.0**mean if mean < 1024 else None
    if reference is not None:
        mean, _, low, high, _ = mean_interval(values - reference, **options)
        row |= {"delta": mean, "delta_low": low, "delta_high": high}
    return {name: None if v is None or math.isnan(v) else v for name, v in row.items()}


def check(config: EvalConfig, corpus: sources.Corpus | Task, train_length: int) -> None:
    """Raise ValueError, naming the flag, where an evaluation could not be done."""
    scalings.check(config.scaling)
    if isinstance(corpus, Task):
        task_evaluation.check(config, corpus)
        if config.scaling:
            raise ValueError(
                "--scaling (in train.py --config.eval.scaling) must be empty for a "
                f"task, got {','.join(config.scaling)}"
            )
        return
    plan(len(_split(corpus, config)), config, train_length)


def _split(corpus: sources.Corpus, config: EvalConfig) -> np.ndarray:
    return corpus.test if config.split == "test" else corpus.validation


def evaluate_run(
    run_dir: str | pathlib.Path,
    eval_config: EvalConfig,
    corpus: sources.Corpus | Task | None = None,
    mesh: Mesh | None = None,
) -> list[dict]:
    """The rows of one run, from its last checkpoint and its own saved config.

    Args:
      run_dir: a directory with config.json and checkpoints/.
      eval_config: what to measure.
      corpus: None loads what `data` in the run's config asks for.
      mesh: None takes the run's own, or, where that does not fit the devices
        present, splits batches over all of them.

    Returns:
      Rows with the keys of `measure` (of a task, of `task_evaluation.measure`, and
      its lengths are in the task's units), and encoding, attention, scaling, seed,
      protocol, split, train_length, step, dtype and corpus. `scaling` is "" for the
      model as it was trained, and the text of the change otherwise; all differences
      are to the unchanged model at its training length, on the same bytes.

    Raises:
      FileNotFoundError: no checkpoint.
      ValueError: before the model is touched; naming the flag, or because the bytes
        are not those that the run was trained on.
    """
    config = run_directory.load_config(run_dir)
    corpus = sources.load(config.data) if corpus is None else corpus
    _check_bytes(run_dir, corpus)
    check(eval_config, corpus, config.data.train_length)
    mesh = _mesh_of(config) if mesh is None else mesh
    with jax.set_mesh(mesh):
        config, graphdef, params, step = checkpoint.load_params(run_dir, mesh=mesh)
        if isinstance(corpus, Task):
            model = ModelApply(graphdef), params
            longest = nnx.merge(graphdef, params).max_length
            limits = {"max_length": longest, "mesh": mesh}
            rows = task_evaluation.measure(*model, corpus, eval_config, **limits)
        else:
            data = _split(corpus, eval_config)
            rows = _with_changes(config, params, data, eval_config, mesh)
    about = _about(config, eval_config, corpus, step)
    return [about | row for row in rows]


def _with_changes(config, params, data, eval_config, mesh) -> list[dict]:
    """The rows of the model as it was trained, then those of each change of it."""
    cells = plan(len(data), eval_config, config.data.length)
    measured = {
        scaling: _scaled_values(config, scaling, params, cells, data, eval_config, mesh)
        for scaling in ("", *eval_config.scaling)
    }
    reference = _reference(measured[""], config.data.length)
    return [
        {"scaling": scaling} | row
        for scaling, values in measured.items()
        for row in _with_statistics(values, reference, eval_config)
    ]


def _scaled_values(config, scaling, params, cells, data, eval_config, mesh) -> Measured:
    """What a change of the model scores; one that does not apply gives a reason."""
    model, length = config.model, config.data.length
    try:
        if scaling:
            model = scalings.apply(model, scaling, train_length=length)
        graphdef, _ = checkpoint.abstract_model(model)
        apply = ModelApply(graphdef)
        tokens = jax.ShapeDtypeStruct((1, length), np.int32)
        jax.eval_shape(functools.partial(apply, last=1), params, tokens)
    except ValueError as error:
        return [(_row(cell, 0, reason=str(error)), None) for cell in cells]
    max_length = nnx.merge(graphdef, params).max_length
    options = {"max_length": max_length, "mesh": mesh}
    return _values(apply, params, cells, data, eval_config, **options)


def _check_bytes(run_dir, corpus: sources.Corpus) -> None:
    """Its validation split would be of another text, or hold training bytes."""
    trained = checkpoint.corpus_sha256(run_dir)
    if trained not in ("", corpus.sha256):
        raise ValueError(
            f"{run_dir} was trained on other bytes than {corpus.name}: sha256 "
            f"{trained!r} there, {corpus.sha256!r} here; evaluate with the file that "
            "it was trained on (the embedded corpus is another one in every version "
            "of Python)"
        )


def _mesh_of(config: Config) -> Mesh:
    """The run's own mesh, which its weights may need, if it fits the devices here."""
    try:
        mesh = make_mesh(config.mesh)
        param_shardings(mesh, checkpoint.abstract_model(config.model)[1])
    except ValueError:
        return make_mesh(MeshConfig())
    return mesh


def _about(config: Config, eval_config: EvalConfig, corpus, step: int) -> dict:
    return {
        "encoding": config.model.encoding,
        "attention": config.model.attention,
        "scaling": "",
        "seed": config.train.seed,
        "protocol": eval_config.protocol,
        "split": eval_config.split,
        "train_length": config.data.train_length,
        "step": step,
        "dtype": config.model.dtype,
        "corpus": corpus.name,
    }


def _order(item: tuple[pathlib.Path, Config]):
    run, config = item
    model = config.model
    return run.parent, model.attention, model.encoding, config.train.seed, run.name


def _corpora(
    runs: dict[pathlib.Path, Config], corpus: sources.Corpus | Task | None
) -> dict[pathlib.Path, sources.Corpus | Task]:
    """What each run was trained on; the same bytes are loaded once."""
    by_hash = {} if corpus is None else {corpus.sha256: corpus}
    by_config: dict[tuple, sources.Corpus | Task] = {}
    chosen = {}
    for run, config in runs.items():
        trained, key = checkpoint.corpus_sha256(run), dataclasses.astuple(config.data)
        if trained not in by_hash:
            loaded = by_config.get(key) or sources.load(config.data)
            by_config[key] = by_hash[loaded.sha256] = loaded
        chosen[run] = by_hash.get(trained) or by_config[key]
        _check_bytes(run, chosen[run])
    return chosen


def evaluate_workdir(
    workdir: str | pathlib.Path,
    eval_config: EvalConfig | None = None,
    corpus: sources.Corpus | Task | None = None,
    **changes,
) -> list[dict]:
    """Evaluate every run below a directory; print and write the results.

    Writes extrapolation.json, .csv and .png into the workdir.

    Args:
      workdir: a run, or a directory above runs.
      eval_config: what to measure; None takes what the first run was configured with.
      corpus: one that is loaded already; it serves the runs that were trained on it.
      **changes: fields of EvalConfig that replace those.

    Returns:
      The rows of all runs, as in extrapolation.json.

    Raises:
      FileNotFoundError: no checkpoint.
      ValueError: before any model is touched; as for `evaluate_run`.
    """
    found = run_directory.find_runs(workdir)
    runs = {run: run_directory.load_config(run) for run in found}
    runs = dict(sorted(runs.items(), key=_order))
    eval_config = eval_config or next(iter(runs.values())).eval
    eval_config = dataclasses.replace(eval_config, **changes)
    # Every run at every training length, so that all have the same columns.
    lengths = tuple(eval_config.lengths)
    trained = {c.data.train_length for c in runs.values()} - set(lengths)
    lengths += tuple(sorted(trained))
    eval_config = dataclasses.replace(eval_config, lengths=lengths)
    corpora = _corpora(runs, corpus)
    for run, config in runs.items():
        check(eval_config, corpora[run], config.data.train_length)
    rows = []
    for run in runs:
        begin = time.monotonic()
        rows += evaluate_run(run, eval_config, corpora[run])
        seconds = time.monotonic() - begin
        print(f"evaluated {run} in {seconds:.1f} s", file=sys.stderr)
    if jax.process_index() == 0:
        base = run_directory.absolute(workdir) / "extrapolation"
        report.write_json(base.with_suffix(".json"), rows)
        report.write_csv(base.with_suffix(".csv"), rows)
        of_task = eval_config.protocol == task_evaluation.PROTOCOL
        print((task_report if of_task else report).format_table(rows))
        if any(row["bpc"] is not None for row in rows):
            (task_plots if of_task else plots).plot(rows, base.with_suffix(".png"))
        print(f"\nwritten: {base}.json, .csv, .png")
    return rows
