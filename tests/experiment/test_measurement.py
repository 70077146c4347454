"""Bits per byte, intervals and differences, for models with known answers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.experiment.config import EvalConfig, MeshConfig
from rope_jax.experiment.measurement import measure
from rope_jax.experiment.mesh import make_mesh
from rope_jax.experiment.protocols import PROTOCOLS, plan
from rope_jax.experiment.scoring import ModelApply
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder

SMALL = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8}


def measured_rows(apply, data, lengths, train_length=None, *, params=(), **options):
    """Rows in order; attention that is capped is by the same model if none is given."""
    names = {field.name for field in dataclasses.fields(EvalConfig)}
    config = EvalConfig(
        lengths=lengths, **{k: v for k, v in options.items() if k in names}
    )
    rest = {k: v for k, v in options.items() if k not in names}
    rest = {"capped": apply, "train_length": train_length or lengths[0]} | rest
    cells = plan(len(data), config, rest["train_length"])
    return measure(apply, params, cells, data, config, **rest)


def measured(*args, **options):
    """Rows by length, for protocols of one condition."""
    return {row["length"]: row for row in measured_rows(*args, **options)}


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


def context_reader(seed=0):
    """A model of all bytes before the target, and of which of them are hidden."""
    table = np.random.default_rng(seed).normal(0, 2, (251, 256))

    def apply(params, inputs, *, last, key_mask=None):
        seen = inputs if key_mask is None else jnp.where(key_mask, inputs, 0)
        places = jnp.arange(1, inputs.shape[1] + 1)[None]
        state = jnp.cumsum((seen + 1) * places, axis=1) % 251
        return jnp.asarray(table, jnp.float32)[state[:, -last:]]

    return apply


def pair_reader(logits):
    """A model of the byte before the target."""

    def apply(params, inputs, *, last, key_mask=None):
        return jnp.asarray(logits, jnp.float32)[inputs[:, -last:]]

    return apply


# One partial batch at least for every protocol and length, and a ragged last window.
SIZE, RAGGED = 803, {"anchors": 19, "block": 8, "batch_tokens": 320, "bootstrap": 20}
UNEDITED = [name for name in PROTOCOLS if name != "induction"]


@pytest.mark.parametrize("protocol", UNEDITED)
def test_t03_to_t07_bpc_is_the_sum_over_all_targets_by_their_number(protocol):
    """Against the pairs of bytes of the text itself, in float64."""
    data = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)
    logits = np.random.default_rng(1).normal(0, 2, (256, 256))
    nats = np.log(np.exp(logits).sum(axis=1, keepdims=True)) - logits
    options = {"protocol": protocol, **RAGGED}
    rows = measured_rows(pair_reader(logits), data, (32, 64), **options)
    cells = plan(SIZE, EvalConfig(lengths=(32, 64), **options), 32)
    for row, cell in zip(rows, cells, strict=True):
        ids = cell.targets()
        mean = nats[data[ids - 1], data[ids]].mean()
        assert row["scored_bytes"] == len(ids)
        assert row["bpc"] == pytest.approx(mean / np.log(2), abs=1e-6)
        assert row["perplexity"] == pytest.approx(np.exp(mean), rel=1e-6)
        assert row["perplexity"] == pytest.approx(2 ** row["bpc"], rel=1e-12)
        if cell.versus is not None:
            assert row["gain"] == row["gain_low"] == row["gain_high"] == 0


@pytest.mark.parametrize("protocol", UNEDITED)
def test_t08_targets_are_the_bytes_that_follow(protocol):
    data = np.arange(SIZE).astype(np.uint8)
    for step, bits in ((1, 0.0), (0, 100 / np.log(2)), (2, 100 / np.log(2))):
        logits = 100 * np.roll(np.eye(256), step, axis=1)
        options = {"protocol": protocol, **RAGGED}
        rows = measured_rows(pair_reader(logits), data, (32, 64), **options)
        for row in rows:
            assert row["bpc"] == pytest.approx(bits, abs=1e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_t04_t05_rows_do_not_depend_on_batches_or_devices(protocol):
    data = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)
    model = context_reader()
    options = {"protocol": protocol, **RAGGED, "capped": context_reader(1)}

    def on(devices, batch_tokens):
        mesh = make_mesh(MeshConfig(data=devices)) if devices else None
        changed = {"batch_tokens": batch_tokens, "mesh": mesh}
        return measured_rows(model, data, (32, 64), **options | changed)

    whole = on(1, 10**6)
    assert len({row["bpc"] for row in whole}) == len(
        whole
    )  # the model tells them apart
    for rows in (on(None, 150), on(8, 1)):
        for row, right in zip(rows, whole, strict=True):
            for name, value in right.items():
                near = isinstance(value, float)
                expected = pytest.approx(value, rel=1e-6, abs=1e-6) if near else value
                assert row[name] == expected, name


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_t15_one_compilation_for_each_length_and_model(protocol):
    traced = []

    def traces(name):
        def apply(params, inputs, *, last, key_mask=None):
            traced.append((name, inputs.shape[1]))
            return jnp.zeros((*inputs[:, -last:].shape, 256))

        return apply

    full, capped = traces("full"), traces("capped")
    for _ in range(2):
        measured_rows(
            full,
            np.zeros(SIZE, np.uint8),
            (32, 64, 128),
            protocol=protocol,
            capped=capped,
            **RAGGED,
        )
    lengths = [128] if protocol == "per_position" else [32, 64, 128]
    more = [("capped", n) for n in (64, 128)] if protocol == "window_cap" else []
    assert sorted(traced) == sorted([("full", n) for n in lengths] + more)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_s04_lengths_past_the_model_are_rows_with_a_reason(protocol):
    def apply(params, inputs, *, last, key_mask=None):
        assert inputs.shape[1] <= 32, "fed more than it can do"
        return jnp.zeros((*inputs[:, -last:].shape, 256))

    data = np.zeros(SIZE, np.uint8)
    options = {"protocol": protocol, "max_length": 32, **RAGGED}
    rows = measured_rows(apply, data, (32, 64), **options)
    assert {row["length"] for row in rows} >= {32, 64}
    for row in rows:
        if row["length"] <= 32:
            assert row["reason"] is None and row["bpc"] == pytest.approx(8.0)
        else:
            assert row["reason"] == "the model's positions end at 32"
            for name in ("bpc", "perplexity", "delta", "gain", "gain_low"):
                assert row[name] is None
            assert row["scored_bytes"] == 0


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
    rows = measured_rows(
        apply, data, (32, 64), params=params, protocol=protocol, anchors=8, block=8
    )
    assert {32, 64} <= {row["length"] for row in rows}
    for row in rows:
        for name in ("bpc", "bpc_low", "bpc_high"):
            assert row[name] == pytest.approx(8.0, abs=1e-6)
        assert row["perplexity"] == pytest.approx(256, rel=1e-6)
        for name in ("delta", "delta_low", "delta_high", "standard_error"):
            assert row[name] == pytest.approx(0.0, abs=1e-12)
        for name in ("gain", "gain_low", "gain_high"):
            assert row[name] in (None, 0.0)
    gains = [(row["length"], row["control"]) for row in rows if row["gain"] is not None]
    assert gains == {
        "control": [(64, "elsewhere"), (64, "shuffled"), (64, "masked")],
        "window_cap": [(64, "capped")],
        "induction": [(32, ""), (64, "")],
    }.get(protocol, [])


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
