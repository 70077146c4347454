"""Scoring with models whose answers are known, and with small real ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rope_jax.experiment.compilation_cache import counted
from rope_jax.experiment.config import EvalConfig, MeshConfig
from rope_jax.experiment.mesh import make_mesh
from rope_jax.experiment.plans import Windows
from rope_jax.experiment.protocols import plan
from rope_jax.experiment.scoring import ModelApply, score
from rope_jax.experiment.train_step import TrainState, make_train_step
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.rotations import RandomRopeOptions


def windows_of(length, *rows):
    """Windows from (start, first, stop) triples."""
    return Windows(length, *np.array(rows).T)


def says(byte_after):
    """A model that is sure of byte_after(input byte)."""

    def apply(params, inputs, *, last):
        return 1e4 * jax.nn.one_hot(byte_after(inputs[:, -last:]), 256)

    return apply


def random_model(seed=0, **options):
    """A small decoder with random weights, as (apply, params)."""
    config = DecoderConfig(
        num_layers=1, model_dim=16, num_heads=2, head_dim=8, mlp="plain", **options
    )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(seed)))
    graphdef, shapes = nnx.split(model)
    rng = np.random.default_rng(seed)
    return ModelApply(graphdef), jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), shapes
    )


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def test_t08_inputs_are_all_but_the_last_byte_and_targets_all_but_the_first():
    data = np.array([10, 11, 12, 13], np.uint8)
    windows = windows_of(3, (0, 0, 3))
    seen = []

    def oracle(params, inputs, *, last):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), inputs)
        return says(lambda byte: byte + 1)(params, inputs, last=last)

    np.testing.assert_array_equal(score(oracle, (), windows, data), [0, 0, 0])
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, [[[10, 11, 12]]])
    np.testing.assert_array_equal(data[windows.targets()], [11, 12, 13])
    copied = score(says(lambda byte: byte), (), windows, data)
    np.testing.assert_array_equal(copied, [1e4, 1e4, 1e4])
    skipped = score(says(lambda byte: byte + 2), (), windows, data)
    np.testing.assert_array_equal(skipped, [1e4, 1e4, 1e4])


def test_t05_documents_score_the_same_alone_and_together():
    apply, params = random_model(encoding="rope")
    data = np.concatenate([random_bytes(3, 1), random_bytes(5, 2)])
    short, long = (0, 0, 2), (3, 0, 4)
    alone = [
        score(apply, params, windows_of(2, short), data[:3]),
        score(apply, params, windows_of(4, long), data),
    ]
    together = score(apply, params, windows_of(4, short, long), data)
    assert [len(nats) for nats in alone] == [2, 4] and len(together) == 6
    np.testing.assert_allclose(together[:2].sum(), alone[0].sum(), rtol=1e-6)
    np.testing.assert_allclose(together[2:].sum(), alone[1].sum(), rtol=1e-6)


def test_t05_what_lies_past_the_last_target_is_never_fed():
    data = np.full(8, 9, np.uint8)
    largest = []

    def apply(params, inputs, *, last):
        jax.debug.callback(lambda x: largest.append(np.asarray(x)), inputs)
        return jnp.zeros((*inputs[:, -last:].shape, 256))

    score(apply, (), windows_of(4, (0, 0, 2), (6, 0, 1)), data, batch_tokens=64)
    jax.effects_barrier()
    np.testing.assert_array_equal(largest, [[[9, 9, 9, 0], [9, 9, 0, 0]]])


@pytest.mark.parametrize("devices", [1, 8])
def test_t04_no_window_is_dropped(devices):
    data = np.arange(41).astype(np.uint8)
    (cell,) = plan(41, EvalConfig(protocol="nonoverlap", lengths=(4,)), 4)
    assert len(cell.windows.starts) == 10
    mesh = make_mesh(MeshConfig(data=devices))
    params = np.linspace(1, 2, 256)  # nats depend on the byte: none can be swapped

    def apply(params, inputs, *, last):
        return jnp.broadcast_to(params, (*inputs[:, -last:].shape, 256))

    nats = score(apply, params, cell.windows, data, batch_tokens=16, mesh=mesh)
    right = np.log(np.exp(params).sum()) - params[data[1:]]
    assert nats.dtype == np.float32
    np.testing.assert_allclose(nats, right, rtol=1e-6)


@pytest.mark.parametrize("protocol", ["anchored", "nonoverlap", "sliding"])
def test_t15_one_compilation_for_each_length(protocol):
    traced = []

    def apply(params, inputs, *, last):
        traced.append(inputs.shape)
        return jnp.broadcast_to(params, (*inputs[:, -last:].shape, 256))

    data, params = random_bytes(3000), np.zeros(256, np.float32)
    config = EvalConfig(protocol=protocol, lengths=(256, 512, 1024), anchors=19)
    cells = plan(len(data), config, 256)
    for _ in range(2):
        for cell in cells:
            nats = score(apply, params, cell.windows, data, batch_tokens=2048)
            assert len(nats) == len(cell.windows.targets())
    assert [length for _, length in traced] == [256, 512, 1024]
    filled = [
        len(c.windows.starts) % rows for c, (rows, _) in zip(cells, traced, strict=True)
    ]
    assert any(filled)  # some last batch was partial


def test_t15_runs_of_equal_structure_share_a_compilation():
    first, params = random_model(seed=0)
    second, _ = random_model(seed=1)
    assert first == second and hash(first) == hash(second)
    other, _ = random_model(encoding="alibi")
    assert first != other
    assert jax.tree.structure(params) == jax.tree.structure(random_model(1)[1])


def test_t15_seven_lengths_of_three_encodings_are_21_programs():
    """And the second seed of each is none: its parameters are arguments."""
    data, lengths = random_bytes(200), (4, 6, 8, 12, 16, 24, 32)
    config = EvalConfig(lengths=lengths, anchors=5, block=2)
    cells = plan(len(data), config, 8)
    counts = []
    for seed in range(2):
        models = [random_model(seed, encoding=e) for e in ("rope", "alibi", "none")]
        with counted() as compiled:
            for apply, params in models:
                for cell in cells:
                    score(apply, params, cell.windows, data, batch_tokens=32)
        counts.append(compiled.count)
    assert counts == [21, 0]


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_scores_are_those_of_the_whole_logits_one_window_at_a_time(encoding):
    apply, params = random_model(encoding=encoding)
    data = random_bytes(300)
    config = EvalConfig(lengths=(32,), anchors=5, block=8)
    (cell,) = plan(len(data), config, 32)
    nats = score(apply, params, cell.windows, data, batch_tokens=64)
    run = jax.jit(lambda tokens: nnx.merge(apply.graphdef, params)(tokens))
    right = []
    for start in cell.windows.starts:
        logits = np.asarray(run(data[None, start : start + 32].astype(np.int32)))[0]
        log_total = np.log(np.exp(logits.astype(np.float64)).sum(-1))
        targets = data[start + 1 : start + 33]
        right.append((log_total - logits[np.arange(32), targets])[-8:])
    np.testing.assert_allclose(nats, np.concatenate(right), atol=2e-5)


@pytest.mark.parametrize("encoding", ["rope", "sinusoidal", "random_rope"])
def test_hidden_bytes_are_as_good_as_none_and_positions_stay(encoding):
    """Against the bytes that are left, alone, at the positions that they had."""
    options = {"encoding": encoding, "random_rope": RandomRopeOptions(max_length=129)}
    apply, params = random_model(**options)
    data = random_bytes(100)
    rows = [(0, 56, 64), (30, 56, 64)]
    whole = score(apply, params, windows_of(64, *rows), data)
    hidden = dataclasses.replace(windows_of(64, *rows), hidden=0)
    np.testing.assert_allclose(score(apply, params, hidden, data), whole, rtol=1e-5)
    hidden = dataclasses.replace(hidden, hidden=32)
    positions = jnp.arange(32, 64)
    if encoding == "random_rope":  # 64 positions of 129 are every second one
        apply, positions = random_model(encoding="rope")[0], 2 * jnp.arange(32)

    def alone(params, inputs, *, last):
        model = nnx.merge(apply.graphdef, params)
        return model(inputs, positions=positions, last=last)

    right = score(alone, params, windows_of(32, (32, 24, 32), (62, 24, 32)), data)
    nats = score(random_model(**options)[0], params, hidden, data)
    np.testing.assert_allclose(nats, right, rtol=1e-4)
    assert np.abs(nats - whole).max() > 0.1


def test_scores_do_not_depend_on_batches_or_devices():
    apply, params = random_model(encoding="rope")
    data = random_bytes(700)
    (cell,) = plan(700, EvalConfig(protocol="nonoverlap", lengths=(32,)), 32)
    whole = score(apply, params, cell.windows, data)
    assert len(whole) == 699 and whole.std() > 0.5
    for mesh, batch_tokens in (
        (None, 1),
        (make_mesh(MeshConfig(data=1)), 96),
        (make_mesh(MeshConfig(data=8)), 96),
        (make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), 300),
    ):
        options = {"batch_tokens": batch_tokens, "mesh": mesh}
        nats = score(apply, params, cell.windows, data, **options)
        np.testing.assert_allclose(nats, whole, rtol=1e-6, atol=1e-6)


def test_a11_training_and_evaluation_give_one_loss():
    """The biases of ALiBi act in both: the same weights, windows and targets."""
    apply, params = random_model(encoding="alibi")
    params = nnx.to_pure_dict(params)
    data = random_bytes(8 * 32 + 1)
    windows = windows_of(32, *[(32 * k, 0, 32) for k in range(8)])
    evaluated = score(apply, params, windows, data)
    rows = data[windows.starts[:, None] + np.arange(33)].astype(np.int32)
    optimizer = optax.sgd(1.0)
    step = make_train_step(apply.graphdef, optimizer)

    def trained(weights):
        own = jax.tree.map(jnp.copy, params)  # the step gives its state away
        zero, key = jnp.zeros((), jnp.int32), jax.random.key(0)
        state = TrainState(zero, own, optimizer.init(own), key)
        batch = {"inputs": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}
        return float(step(state, batch)[1]["nats"])

    weights = np.ones((8, 32), np.float32)
    assert trained(weights) == pytest.approx(evaluated.sum(dtype=np.float64), rel=1e-6)
    # The sum of the last targets alone, which have the most context.
    weights[:, :-1] = 0
    last = evaluated.reshape(8, 32)[:, -1].sum(dtype=np.float64)
    assert trained(weights) == pytest.approx(last, rel=1e-6)
    # Without the biases the loss is another one, so that the equality says something.
    without = random_model(encoding="none")[0]
    assert abs(score(without, params, windows, data).sum() / evaluated.sum() - 1) > 1e-4
