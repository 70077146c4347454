"""Bits per byte, intervals and differences, for models with known answers and runs."""

import csv
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.experiment import evaluation, run_directory
from rope_jax.experiment.checkpoint import load_params
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig
from rope_jax.experiment.data import sources
from rope_jax.experiment.evaluation import evaluate_run, evaluate_workdir, measure
from rope_jax.experiment.mesh import make_mesh
from rope_jax.experiment.protocols import PROTOCOLS, plan
from rope_jax.experiment.scoring import ModelApply
from rope_jax.experiment.training import fit
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder

SMALL = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8}


def measured(apply, data, lengths, train_length=None, *, params=(), **options):
    """Rows by length."""
    names = {field.name for field in dataclasses.fields(EvalConfig)}
    config = EvalConfig(
        lengths=lengths, **{k: v for k, v in options.items() if k in names}
    )
    rest = {k: v for k, v in options.items() if k not in names}
    train_length = train_length or lengths[0]
    cells = plan(len(data), config, train_length)
    rows = measure(
        apply, params, cells, data, config, train_length=train_length, **rest
    )
    return {row["length"]: row for row in rows}


def nats_by_input(symbols, **nats):
    """A model that gives each of `symbols` the same nats, chosen by the input byte.

    The other bytes share what probability is left.
    """
    table = np.zeros((256, 256))
    for byte, value in nats.items():
        table[int(byte[1:])] = np.log(
            (1 - len(symbols) * np.exp(-value)) / (256 - len(symbols))
        )
        table[int(byte[1:]), symbols] = -value

    def apply(params, inputs, *, last):
        return jnp.asarray(table, jnp.float32)[inputs[:, -last:]]

    return apply


def nonoverlap(apply, data, length):
    data = np.array(data, np.uint8)
    return measured(apply, data, (length,), protocol="nonoverlap", block=1)[length]


def test_t03_every_target_counts_the_same():
    model = nats_by_input([0, 1], b0=1.0, b1=3.0)
    row = nonoverlap(model, [0] * 100 + [1] * 8, 100)  # windows of 100 and 7 targets
    assert row["scored_bytes"] == 107
    assert row["bpc"] == pytest.approx(1.6314588780, abs=1e-6)
    assert row["perplexity"] == pytest.approx(3.0982614187, abs=1e-6)


def test_t06_perplexity_is_of_the_mean_loss():
    model = nats_by_input([0, 1], b0=1.0, b1=3.0)
    row = nonoverlap(model, [0] * 20 + [1] * 21, 20)
    assert row["perplexity"] == pytest.approx(7.3890560989, abs=1e-5)


def test_t07_bits_per_byte_from_nats():
    text = list("aéb".encode())
    assert len(text) == 4
    model = nats_by_input(text, **{f"b{byte}": 2.0 for byte in [0, *text]})
    row = nonoverlap(model, [0, *text], 4)  # 8 nats over 4 bytes
    assert row["scored_bytes"] == 4
    assert row["bpc"] == pytest.approx(2.8853900818, abs=1e-6)
    assert row["perplexity"] == pytest.approx(np.exp(2), abs=1e-5)
    assert 2 ** row["bpc"] == pytest.approx(row["perplexity"], rel=1e-12)


def abstract(encoding="rope", **options):
    """A small decoder as (apply, shapes of its parameters)."""
    config = DecoderConfig(encoding, **SMALL, **options)
    config.learned.max_length = 64
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    return ModelApply(graphdef), params


def random_model(**options):
    """A small decoder with random weights, as (apply, params)."""
    apply, shapes = abstract(**options)
    rng = np.random.default_rng(0)
    return apply, jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_t19_a_zero_output_layer_is_8_bits_at_every_length(protocol):
    apply, params = random_model()
    params["head"][...] = jnp.zeros_like(params["head"][...])
    data = np.random.default_rng(0).integers(0, 256, 700).astype(np.uint8)
    rows = measured(
        apply, data, (16, 64), params=params, protocol=protocol, anchors=8, block=8
    )
    assert {16, 64} <= set(rows)
    for row in rows.values():
        for name in ("bpc", "bpc_low", "bpc_high"):
            assert row[name] == pytest.approx(8.0, abs=1e-6)
        assert row["perplexity"] == pytest.approx(256, rel=1e-6)
        for name in ("delta", "delta_low", "delta_high", "standard_error"):
            assert row[name] == pytest.approx(0.0, abs=1e-12)


def halves_what_is_left(params, inputs, *, last):
    """8 bits with up to 64 bytes of context, 4 bits with more (all bytes are 0)."""
    context = jnp.arange(1, inputs.shape[1] + 1)[-last:]
    excluded = (context[:, None] > 64) & (jnp.arange(256)[None] >= 16)
    logits = jnp.where(excluded, -1e9, 0.0)
    return jnp.broadcast_to(logits[None], (len(inputs), *logits.shape))


@pytest.mark.parametrize(
    ("protocol", "right"),
    [
        # Scored at the ends of the windows: all have their full context.
        ("anchored", {64: 8.0, 128: 4.0, 256: 4.0}),
        # A window's first 64 targets have little context, at any length.
        ("nonoverlap", {64: 8.0, 128: 6.0, 256: 5.0}),
        # Only the file's first 64 targets have, but for windows of 64.
        ("sliding", {64: 8.0, 128: 4 + 4 * 64 / 1024, 256: 4 + 4 * 64 / 1024}),
        ("per_position", {1: 8.0, 32: 8.0, 64: 8.0, 128: 4.0, 256: 4.0}),
    ],
)
def test_a_model_that_needs_context_shows_what_each_protocol_feeds_it(protocol, right):
    options = {"protocol": protocol, "stride": 32, "block": 16, "anchors": 32}
    if protocol == "nonoverlap":
        options["stride"] = 0
    data = np.zeros(1025, np.uint8)
    rows = measured(halves_what_is_left, data, (64, 128, 256), 128, **options)
    for length, bpc in right.items():
        row = rows[length]
        assert row["bpc"] == pytest.approx(bpc, abs=1e-6)
        assert row["bpc_low"] <= row["bpc"] <= row["bpc_high"]
        assert row["delta"] == pytest.approx(bpc - right[128], abs=1e-6)
        assert row["delta_low"] <= row["delta"] <= row["delta_high"]
    if protocol == "anchored":  # the same bytes, with no spread: no uncertainty
        assert rows[64]["delta_low"] == pytest.approx(4.0, abs=1e-6)
        assert rows[64]["delta_high"] == pytest.approx(4.0, abs=1e-6)
        assert [rows[n]["scored_bytes"] for n in (64, 128, 256)] == [512] * 3


def test_differences_are_paired():
    """Hard and easy anchors: the level is uncertain, the difference is not."""

    def apply(params, inputs, *, last):
        # Byte 1 costs 2 bits where the other costs 1, less 1/2 with more context.
        bits = jnp.where(inputs[:, -last:] == 1, 4.0, 2.0)
        bits -= 0.5 * (inputs.shape[1] > 16)
        certain = jax.nn.log_sigmoid(-bits)  # any two logits with a known gap
        other = jnp.log(-jnp.expm1(certain)) - jnp.log(254.0)
        logits = jnp.broadcast_to(other[..., None], (*bits.shape, 256))
        return logits.at[..., :2].set((certain - jnp.log(2.0))[..., None])

    data = np.repeat(np.random.default_rng(0).integers(0, 2, 200), 10).astype(np.uint8)
    rows = measured(apply, data, (16, 64), anchors=100, block=8)
    level = rows[64]["bpc_high"] - rows[64]["bpc_low"]
    difference = rows[64]["delta_high"] - rows[64]["delta_low"]
    assert rows[64]["delta"] == pytest.approx(rows[64]["bpc"] - rows[16]["bpc"])
    assert rows[64]["delta_low"] < rows[64]["delta"] < rows[64]["delta_high"]
    assert difference < level / 3
    assert rows[16]["delta"] == rows[16]["delta_low"] == rows[16]["delta_high"] == 0


def test_t12_dropout_is_off():
    data = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8)
    numbers = set()
    for dropout in (0.0, 0.5):
        apply, params = random_model(dropout=dropout)
        for _ in range(2):
            rows = measured(apply, data, (32,), params=params, anchors=8)
            numbers.add(rows[32]["bpc"])
    assert len(numbers) == 1 and abs(numbers.pop() - 8) > 1e-3


@pytest.mark.parametrize("protocol", ["anchored", "per_position"])
def test_s04_lengths_past_a_learned_table_are_refused_by_name(protocol):
    apply, params = random_model(encoding="learned")
    limit = 64
    data = np.random.default_rng(0).integers(0, 256, 700).astype(np.uint8)
    options = {"params": params, "protocol": protocol, "anchors": 8, "block": 8}
    rows = measured(apply, data, (32, 64, 128), max_length=limit, **options)
    free = measured(apply, data, (32, 64), max_length=None, **options)
    for length, row in rows.items():
        if length <= limit:
            assert row["reason"] is None and np.isfinite(row["bpc"])
        else:
            assert row["bpc"] is None and row["perplexity"] is None
            assert row["delta"] is None and row["scored_bytes"] == 0
            assert row["reason"] == "the model's positions end at 64"
    assert rows[128]["bpc"] is None and set(free) <= set(rows)


def test_a_loss_that_is_not_finite_is_a_reason_and_not_a_number():
    def apply(params, inputs, *, last):
        bad = jnp.where(inputs.shape[1] > 16, jnp.nan, 0.0)
        return jnp.broadcast_to(bad, (*inputs[:, -last:].shape, 256))

    rows = measured(apply, np.zeros(200, np.uint8), (16, 32), anchors=4, block=4)
    assert rows[16]["bpc"] == pytest.approx(8.0)
    assert rows[32]["bpc"] is None and rows[32]["delta"] is None
    assert rows[32]["reason"] == "the loss is not finite"


# Runs on disk.


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


def test_options_replace_what_the_runs_were_configured_with(workdir):
    run = workdir / "alibi-seed0"
    rows = evaluate_workdir(run, protocol="nonoverlap", split="test", lengths=(16,))
    # The training length is always measured: differences are to it.
    assert [row["length"] for row in rows] == [16, 32]
    assert {row["protocol"] for row in rows} == {"nonoverlap"}
    assert {row["split"] for row in rows} == {"test"}
    assert {row["scored_bytes"] for row in rows} == {1199}
    assert (run / "extrapolation.json").exists()


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
