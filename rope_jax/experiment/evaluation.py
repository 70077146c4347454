"""Evaluation of trained runs across context lengths.

A protocol (see `protocols`) plans windows as index arrays; `scoring.score` runs any
plan with any model and returns the nats of each scored byte; `measurement.measure`
sums them and adds intervals. Here that is done for what is on disk.
"""

import dataclasses
import os
import pathlib
import time

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rope_jax.experiment import (
    checkpoint,
    compilation_cache,
    distributed,
    provenance,
    report,
    run_directory,
    scalings,
    task_evaluation,
    task_report,
)
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig
from rope_jax.experiment.data import pipeline, sources
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.measurement import (
    Scores,
    reference,
    score_cells,
    summarize,
)
from rope_jax.experiment.mesh import (
    batch_sharding,
    batch_shards,
    check_lengths,
    make_mesh,
    param_shardings,
)
from rope_jax.experiment.protocols import check_options, plan
from rope_jax.experiment.rows import complete, merge, read_json
from rope_jax.experiment.scoring import ModelApply
from rope_jax.nn.config import DecoderConfig


def check(
    config: EvalConfig,
    corpus: sources.Corpus | Task,
    train_length: int,
    mesh: Mesh,
) -> None:
    """Raise ValueError, naming the flag, where an evaluation could not be done."""
    scalings.check(config.scaling)
    if isinstance(corpus, Task):
        task_evaluation.check(config, corpus)
        lengths = {*config.lengths, corpus.options.max_length}
        check_lengths(mesh, map(corpus.row_length, lengths))
        return
    cells = plan(len(_split(corpus, config)), config, train_length)
    compared = [cell.versus for cell in cells if cell.versus is not None]
    check_lengths(mesh, [cell.windows.length for cell in (*cells, *compared)])


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
      Rows with the keys of `measurement.measure` (of a task, of
      `task_evaluation.measure`, and its lengths are in the task's units), and
      encoding, attention, scaling, seed, protocol, split, train_length, step,
      trained_bytes, dtype and corpus. `scaling`
      is "" for the model as it was trained, and the text of the change otherwise; all
      differences are to the unchanged model at its training length, on the same bytes.

    Raises:
      FileNotFoundError: no checkpoint.
      ValueError: before the model is touched; naming the flag, or because the bytes
        are not those that the run was trained on.
    """
    config = run_directory.load_config(run_dir)
    corpus = sources.load(config.data) if corpus is None else corpus
    _check_bytes(run_dir, corpus)
    mesh = _mesh_of(config) if mesh is None else mesh
    check(eval_config, corpus, config.data.train_length, mesh)
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
    about = _about(config, eval_config, corpus.name, step)
    return [about | row for row in rows]


def _with_changes(config, params, data, eval_config, mesh) -> list[dict]:
    """The rows of the model as it was trained, then those of each change of it."""
    cells = plan(len(data), eval_config, config.data.length)
    trained, rows = None, []
    for scaling in ("", *eval_config.scaling):
        scores = _scores(config, scaling, params, cells, data, eval_config, mesh)
        if not scaling:
            trained = reference(cells, scores, config.data.length)
        made = summarize(cells, scores, eval_config, trained=trained)
        rows += [{"scaling": scaling} | row for row in made]
    return rows


def _scores(config, scaling, params, cells, data, eval_config, mesh) -> Scores:
    """What a change of the model scores; one that does not apply gives a reason."""
    model, length = config.model, config.data.length
    capped = any(cell.capped for cell in cells)
    try:
        if scaling:
            model = scalings.apply(model, scaling, train_length=length)
        graphdef, _ = checkpoint.abstract_model(model)
        apply = ModelApply(graphdef)
        tokens = jax.ShapeDtypeStruct((batch_shards(mesh), length), np.int32)
        jax.eval_shape(lambda *args: apply(*args, last=1).hidden, params, tokens)
        options = {"capped": _capped(model, length) if capped else None}
    except ValueError as error:
        return Scores.without(cells, str(error))
    options["max_length"] = nnx.merge(graphdef, params).max_length
    return score_cells(apply, params, cells, data, eval_config, mesh=mesh, **options)


def _capped(model: DecoderConfig, length: int) -> ModelApply:
    """A model with attention to as many bytes as it was trained with."""
    if model.attention == "linear":
        raise ValueError("linear attention cannot leave out old bytes")
    window = min(model.window or length, length)
    model = dataclasses.replace(model, window=window)
    return ModelApply(checkpoint.abstract_model(model)[0])


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
    """The run's own mesh, which its weights may need, if it fits the devices here.

    It does not, either, if it has none for one of several processes.
    """
    try:
        mesh = make_mesh(config.mesh)
        pipeline.process_slice(batch_sharding(mesh))
        param_shardings(mesh, checkpoint.abstract_model(config.model)[1])
    except ValueError:
        return make_mesh(MeshConfig())
    return mesh


def _about(config: Config, eval_config: EvalConfig, corpus: str, step: int) -> dict:
    return {
        "encoding": config.model.encoding,
        "attention": config.model.attention,
        "scaling": "",
        "seed": config.train.seed,
        "protocol": eval_config.protocol,
        "split": eval_config.split,
        "train_length": config.data.train_length,
        "step": step,
        "trained_bytes": step * config.train.batch_size * config.data.length,
        "dtype": config.model.dtype,
        "corpus": corpus,
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

    Writes what `report.write` does into the workdir: extrapolation.json, .csv and
    .png, and a report. Rows that are there from other protocols and splits stay, and
    those of other scalings where the bytes are the same (see `rows.merge`); remove
    extrapolation.json to start afresh. A run whose training failed has rows without
    values, with the reason.

    Args:
      workdir: a run, or a directory above runs.
      eval_config: what to measure; None takes what the first run was configured with.
      corpus: one that is loaded already; it serves the runs that were trained on it.
      **changes: fields of EvalConfig that replace those; one that the protocol does
        not read is refused.

    Returns:
      The rows of this evaluation, as they stand in extrapolation.json.

    Raises:
      FileNotFoundError: no checkpoint.
      ValueError: before any model is touched; as for `evaluate_run`, or two runs
        differ in nothing that a row says.
    """
    found = run_directory.find_runs(workdir)
    runs = {run: run_directory.load_config(run) for run in found}
    runs = dict(sorted(runs.items(), key=_order))
    distributed.require_same("the runs below --workdir", repr(_state_of(found)))
    eval_config = eval_config or next(iter(runs.values())).eval
    eval_config = dataclasses.replace(eval_config, **changes)
    check_options(eval_config.protocol, changes)
    # Every run at every training length, so that all have the same columns.
    if lengths := tuple(eval_config.lengths):
        trained = {c.data.train_length for c in runs.values()} - set(lengths)
        lengths += tuple(sorted(trained))
        eval_config = dataclasses.replace(eval_config, lengths=lengths)
    failed = {run: runs.pop(run) for run in found if run_directory.failure(run)}
    _check_apart(runs)
    corpora = _corpora(runs, corpus)
    for run, config in runs.items():
        lengths = corpora[run], config.data.train_length
        check(eval_config, *lengths, _mesh_of(config))
    path = run_directory.absolute(workdir) / "extrapolation.json"
    old = _old_rows(path)  # now: what cannot be read or written would waste the work
    rows = []
    for run in runs:
        begin = time.monotonic()
        with compilation_cache.counted() as compiled:
            rows += evaluate_run(run, eval_config, corpora[run])
        seconds = time.monotonic() - begin
        distributed.say(f"evaluated {run} in {seconds:.1f} s; {compiled}")
    for run, config in failed.items():
        rows += _failed(run_directory.failure(run), config, eval_config, rows)
    rows = [complete(row) for row in rows]
    if jax.process_index() == 0:
        provenance.record(path.parent)
        report.write(merge(old, rows), path.parent)
        of_task = eval_config.protocol == task_evaluation.PROTOCOL
        print((task_report if of_task else report).format_table(rows))
        print(f"\nwritten: {path.with_suffix('')}.json, .csv, .png; report.html")
    distributed.sync("evaluation written")
    return rows


def _state_of(runs: list[pathlib.Path]) -> list[tuple]:
    """What decides which of the runs are evaluated, and with which parameters."""
    steps, failure = run_directory.complete_steps, run_directory.failure
    return [(run.name, steps(run), failure(run)) for run in runs]


def _old_rows(path: pathlib.Path) -> list[dict]:
    """The rows that are there already; raises if they, or the place, are unusable."""
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--workdir must be writable, got {path.parent}")
    return read_json(path) if path.exists() else []


def _check_apart(runs: dict[pathlib.Path, Config]) -> None:
    """Raise ValueError for two runs whose rows nothing would tell apart."""
    seen: dict[tuple, pathlib.Path] = {}
    for run, config in runs.items():
        about = _about(config, config.eval, "", config.train.steps) | {"step": 0}
        other = seen.setdefault((*about.values(), checkpoint.corpus_sha256(run)), run)
        if other != run:
            raise ValueError(
                f"--workdir holds two runs of one encoding, seed, budget and length: "
                f"{other} and {run}; evaluate them apart"
            )


def _failed(
    reason: str, config: Config, eval_config: EvalConfig, measured: list[dict]
) -> list[dict]:
    """Rows without values for a run that failed, wherever its neighbours have some."""
    trained = config.data.train_length
    cell = ("scaling", "control", "length", "distance")
    lengths = eval_config.lengths or [n * trained for n in eval_config.multiples]
    nobody = dict.fromkeys(task_evaluation.MEASURED) | {"corpus": "", "window": None}
    if eval_config.protocol == task_evaluation.PROTOCOL:
        nobody["examples"] = eval_config.examples
    kin = [complete(row) for row in measured if row["train_length"] == trained]
    kin = kin or [
        complete(nobody | {"length": length}) for length in sorted({*lengths, trained})
    ]
    corpus, steps = kin[0]["corpus"], config.train.steps
    about = _about(config, eval_config, corpus, steps) | {"step": 0, "scored_bytes": 0}
    about["reason"] = f"training failed: {reason}"
    like = {tuple(row[name] for name in cell): row for row in kin}
    return [
        dict.fromkeys(row) | about | {name: row[name] for name in cell}
        for row in like.values()
    ]
