"""Runs on disk, from their checkpoints to the rows and files of an evaluation."""

import csv
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from rope_jax.experiment import evaluation, run_directory
from rope_jax.experiment.checkpoint import abstract_model, load_params
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig
from rope_jax.experiment.data import sources
from rope_jax.experiment.evaluation import evaluate_run, evaluate_workdir
from rope_jax.experiment.measurement import measure
from rope_jax.experiment.mesh import make_mesh
from rope_jax.experiment.protocols import plan
from rope_jax.experiment.rows import read_json, write_json
from rope_jax.experiment.scoring import ModelApply
from rope_jax.experiment.training import fit
from rope_jax.nn.config import DecoderConfig

SMALL = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "bytes"
    words = np.random.default_rng(0).integers(97, 123, (2000, 6)).astype(np.uint8)
    words[:, 5] = 32
    path.write_bytes(words[np.random.default_rng(1).integers(0, 40, 4000)].tobytes())
    return path


def run_config(path, encoding, seed=0, length=32):
    config = Config()
    config.model = DecoderConfig(encoding=encoding, mlp="plain", **SMALL)
    config.data.path, config.data.length = str(path), length
    config.train.steps, config.train.batch_size, config.train.seed = 1, 8, seed
    config.train.warmup_steps = 0
    config.eval = EvalConfig(lengths=(32, 64), anchors=8, block=8, bootstrap=200)
    return config


@pytest.fixture(scope="module")
def workdir(corpus_file, tmp_path_factory):
    """Two encodings after one step, and one of them again as a second seed."""
    workdir = tmp_path_factory.mktemp("runs")
    for encoding in ("learned", "alibi"):
        fit(run_config(corpus_file, encoding), workdir / f"{encoding}-seed0")
    copy = shutil.copytree(workdir / "alibi-seed0", workdir / "alibi-seed1")
    config = run_directory.load_config(copy)
    config.train.seed = 1
    run_directory.save_config(config, copy)
    return workdir


def test_a_workdir_is_evaluated_from_its_own_configs(workdir, capsys):
    rows = evaluate_workdir(workdir)
    keys = [(row["encoding"], row["seed"], row["length"]) for row in rows]
    assert keys == [
        ("alibi", 0, 32),
        ("alibi", 0, 64),
        ("alibi", 1, 32),
        ("alibi", 1, 64),
        ("learned", 0, 32),
        ("learned", 0, 64),
    ]
    for row in rows[:-1]:
        assert row["protocol"] == "anchored" and row["split"] == "validation"
        assert (row["train_length"], row["step"]) == (32, 1)
        assert row["trained_bytes"] == 8 * 32
        assert row["dtype"] == "float32" and row["scored_bytes"] == 64
        assert row["bpc_low"] < row["bpc"] < row["bpc_high"]
        assert 0 < row["bpc"] < 8 and row["reason"] is None
        assert row["perplexity"] == pytest.approx(2 ** row["bpc"])
    assert rows[-1]["bpc"] is None
    assert rows[-1]["reason"] == "the model's positions end at 32"
    assert json.loads((workdir / "extrapolation.json").read_text()) == rows
    with (workdir / "extrapolation.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [float(r["bpc"]) for r in written[:-1]] == [r["bpc"] for r in rows[:-1]]
    assert written[-1]["bpc"] == "" and written[-1]["length"] == "64"
    assert (workdir / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "learned" in printed and "mean" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 100


def test_a_run_scores_as_its_model_does_alone(workdir, corpus_file):
    config, graphdef, params, _ = load_params(workdir / "alibi-seed1")
    data = sources.load(config.data).validation
    options = EvalConfig(lengths=(32, 64), anchors=8, block=8)
    bits = []
    for cell in plan(len(data), options, 32):
        nats = 0.0
        run = jax.jit(nnx.merge(graphdef, params))
        for start in cell.windows.starts:
            window = data[start : start + cell.length + 1].astype(np.int32)
            logits = np.asarray(run(window[None, :-1]))[0, -8:].astype(np.float64)
            picked = logits[np.arange(8), window[-8:]]
            nats += (np.log(np.exp(logits).sum(-1)) - picked).sum()
        bits.append(nats / (64 * np.log(2)))
    rows = evaluate_run(workdir / "alibi-seed1", options)
    np.testing.assert_allclose([row["bpc"] for row in rows], bits, rtol=1e-6)
    np.testing.assert_allclose(rows[1]["delta"], bits[1] - bits[0], atol=1e-6)


def test_a_run_is_evaluated_under_controls(workdir):
    options = EvalConfig(
        protocol="control", lengths=(32, 64), anchors=8, block=8, bootstrap=200
    )
    rows = evaluate_run(workdir / "alibi-seed0", options)
    assert [(row["length"], row["control"]) for row in rows] == [
        (32, "real"),
        (64, "real"),
        (64, "elsewhere"),
        (64, "shuffled"),
        (64, "masked"),
    ]
    for row in rows[2:]:
        assert row["gain"] != 0
        assert row["gain"] == pytest.approx(row["bpc"] - rows[1]["bpc"], abs=1e-9)
        assert (row["attention"], row["scaling"]) == ("softmax", "")
        assert row["trained_bytes"] == 1 * 8 * 32


def test_capped_attention_is_that_of_a_model_with_a_window(workdir):
    run = workdir / "alibi-seed0"
    config, _, params, _ = load_params(run)
    options = EvalConfig(
        protocol="window_cap", lengths=(32, 64), anchors=8, block=8, bootstrap=200
    )
    one = make_mesh(MeshConfig(data=1))
    rows = evaluate_run(run, options, mesh=one)
    assert [row["control"] for row in rows] == ["full", "full", "capped"]
    local = dataclasses.replace(config.model, window=32)
    data = sources.load(config.data).validation
    cells = plan(len(data), dataclasses.replace(options, protocol="anchored"), 32)
    apply = ModelApply(abstract_model(local)[0])
    _, right = measure(apply, params, cells, data, options, train_length=32, mesh=one)
    assert rows[2]["bpc"] == pytest.approx(right["bpc"], abs=1e-9)
    assert abs(rows[2]["gain"]) > 1e-8  # little, after a single step
    assert rows[2]["gain"] == pytest.approx(rows[2]["bpc"] - rows[1]["bpc"], abs=1e-9)


def test_options_replace_what_the_runs_were_configured_with(workdir, rows_of):
    run = workdir / "alibi-seed0"
    others = rows_of("alibi", [2.0], lengths=(32,), protocol="sliding", split="test")
    outdated = rows_of(
        "alibi", [9.0], lengths=(8,), protocol="nonoverlap", split="test"
    )
    write_json(run / "extrapolation.json", others + outdated)
    rows = evaluate_workdir(run, protocol="nonoverlap", split="test", lengths=(16,))
    # Rows of another protocol stay; those measured now replace all of their kind.
    assert read_json(run / "extrapolation.json") == others + rows
    # The training length is always measured: differences are to it.
    assert [row["length"] for row in rows] == [16, 32]
    assert {row["protocol"] for row in rows} == {"nonoverlap"}
    assert {row["split"] for row in rows} == {"test"}
    assert {row["scored_bytes"] for row in rows} == {1199}


def test_multiples_are_of_each_runs_own_length(workdir):
    run = workdir / "learned-seed0"
    rows = evaluate_workdir(run, lengths=(), multiples=(1, 3))
    assert [(row["length"], row["bpc"] is None) for row in rows] == [
        *((32, False), (96, True)),
    ]
    with pytest.raises(ValueError, match=r"--multiples .* must be different positive"):
        evaluate_workdir(run, lengths=(), multiples=(0, 1))
    with pytest.raises(ValueError, match=r"--lengths .* must be different positive"):
        evaluate_workdir(run, lengths=())


def test_c09_the_level_of_a_path_is_explained(workdir, tmp_path):
    run = workdir / "alibi-seed0"
    assert run_directory.find_runs(run) == [run]
    assert len(run_directory.find_runs(workdir)) == 3
    for inside in (run / "checkpoints" / "1", run / "checkpoints"):
        with pytest.raises(ValueError, match=f"inside a run; .*{run.name}"):
            evaluate_workdir(inside)
    with pytest.raises(FileNotFoundError, match="no checkpoint found in"):
        evaluate_workdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint found in"):
        evaluate_workdir(tmp_path / "missing")


def test_a_run_without_a_checkpoint_is_left_out_aloud(workdir, tmp_path, capsys):
    shutil.copytree(workdir / "alibi-seed0", tmp_path / "alibi-seed0")
    unfinished = tmp_path / "rope-seed0"
    (unfinished / "checkpoints").mkdir(parents=True)
    config = run_directory.load_config(workdir / "alibi-seed0")
    run_directory.save_config(config, unfinished)
    assert len(run_directory.find_runs(tmp_path)) == 1
    assert f"left out: {unfinished}" in capsys.readouterr().err


def test_d04_lengths_beyond_the_data_raise_before_any_model(workdir, monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluation.checkpoint, "load_params", touched)
    with pytest.raises(ValueError, match=r"--lengths .*must be at most 1136 .* 5000"):
        evaluate_workdir(workdir, lengths=(32, 5000))
    with pytest.raises(ValueError, match=r"--protocol .*must be one of anchored"):
        evaluate_workdir(workdir, protocol="anchor")


def test_two_runs_that_rows_would_not_tell_apart_are_refused(workdir, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(workdir / "alibi-seed0", tmp_path / name / "alibi-seed0")
    with pytest.raises(ValueError, match=r"two runs of .*/first/.* and .*/second/"):
        evaluate_workdir(tmp_path)


def test_an_option_that_the_protocol_does_not_read_is_refused(workdir):
    with pytest.raises(ValueError, match=r"--stride .* no effect on .* 'anchored'"):
        evaluate_workdir(workdir, stride=8)


def test_a_run_that_failed_has_a_row_for_each_of_its_neighbours_scalings(
    workdir, tmp_path
):
    shutil.copytree(workdir / "alibi-seed0", tmp_path / "alibi-seed0")
    config = run_directory.load_config(workdir / "learned-seed0")
    run_directory.save_config(config, tmp_path / "learned-seed0")
    run_directory.save_failure(tmp_path / "learned-seed0", "it was too hot")
    rows = evaluate_workdir(tmp_path, scaling=("window:16",))
    found = [
        (row["encoding"], row["scaling"], row["length"], row["bpc"] is None)
        for row in rows
    ]
    cells = [(scaling, n) for scaling in ("", "window:16") for n in (32, 64)]
    assert found == [
        *(("alibi", *cell, False) for cell in cells),
        *(("learned", *cell, True) for cell in cells),
    ]
    assert rows[-1]["reason"] == "training failed: it was too hot"


def test_a_run_is_evaluated_on_its_own_mesh(workdir, tmp_path, monkeypatch):
    """Sharded as it was trained, with the same numbers; or on what is there."""
    run = shutil.copytree(workdir / "alibi-seed0", tmp_path / "run")
    options = EvalConfig(lengths=(32, 64), anchors=8, block=8, bootstrap=200)
    one = make_mesh(MeshConfig(data=1))
    right = [row["bpc"] for row in evaluate_run(run, options, mesh=one)]
    seen = []
    load = evaluation.checkpoint.load_params

    def watched(run_dir, **arguments):
        loaded = load(run_dir, **arguments)
        seen.append(loaded[2]["head"])
        return loaded

    monkeypatch.setattr(evaluation.checkpoint, "load_params", watched)
    for mesh, shape in (
        (MeshConfig(fsdp=2, tensor=2), (8, 128)),
        (MeshConfig(fsdp=2, tensor=2, sequence=2), (8, 128)),
        (MeshConfig(data=1, fsdp=16), (16, 256)),  # more devices than there are
        (MeshConfig(data=1, tensor=8), (16, 256)),  # 8 do not divide the 2 heads
    ):
        config = run_directory.load_config(run)
        config.mesh = mesh
        run_directory.save_config(config, run)
        rows = evaluate_run(run, options)
        np.testing.assert_allclose([r["bpc"] for r in rows], right, rtol=1e-6)
        assert {s.data.shape for s in seen[-1].addressable_shards} == {shape}


def test_other_bytes_than_those_trained_on_are_refused(workdir, corpus_file, tmp_path):
    """As the embedded corpus is under another version of Python."""
    run = shutil.copytree(workdir / "alibi-seed0", tmp_path / "run")
    config = run_directory.load_config(run)
    config.data.path = str(tmp_path / "other")
    run_directory.save_config(config, run)
    (tmp_path / "other").write_bytes(corpus_file.read_bytes()[::-1])
    for evaluate in (evaluate_workdir, lambda run: evaluate_run(run, EvalConfig())):
        with pytest.raises(ValueError, match=r"trained on other bytes than other \("):
            evaluate(run)
    (tmp_path / "other").write_bytes(corpus_file.read_bytes())  # moved, but the same
    assert [row["corpus"] for row in evaluate_workdir(run)] == [
        "other (24,000 bytes)"
    ] * 2


def test_a_corpus_that_is_at_hand_is_not_loaded_again(workdir, monkeypatch):
    config = run_directory.load_config(workdir / "alibi-seed0")
    corpus, load, calls = sources.load(config.data), sources.load, []
    monkeypatch.setattr(sources, "load", lambda data: calls.append(data) or load(data))
    rows = evaluate_workdir(workdir, corpus=corpus)
    assert calls == []
    assert evaluate_workdir(workdir) == rows
    assert len(calls) == 1
