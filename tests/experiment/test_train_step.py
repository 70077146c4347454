"""One update: weighting of targets, masks, dropout keys, donation, golden numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rope_jax.experiment import token_chunks
from rope_jax.experiment.checkpoint import abstract_model
from rope_jax.experiment.config import MeshConfig, TrainConfig
from rope_jax.experiment.loss import cross_entropy
from rope_jax.experiment.mesh import batch_sharding, make_mesh, param_shardings
from rope_jax.experiment.optimizer import make_optimizer
from rope_jax.experiment.train_step import (
    TrainState,
    init_state,
    make_joint_step,
    make_train_step,
)
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.linear import LinearOptions

SGD = optax.sgd(1.0)


def small_model(**changes):
    sizes = {"num_layers": 2, "model_dim": 32, "num_heads": 2, "head_dim": 16}
    return DecoderConfig(**sizes | changes)


def split(model):
    graphdef, params = nnx.split(model)
    return graphdef, nnx.to_pure_dict(params)


@functools.cache
def random_params(**changes):
    """Parameters of the usual size, the head too, which is born zero."""
    abstract = abstract_model(small_model(**changes))[1]
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        norm = path[-1].key == "scale"
        values = norm + 0.2 * rng.normal(size=leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, abstract)


def decoder(dropout=0.0):
    return abstract_model(small_model(dropout=dropout))[0], random_params()


@functools.cache
def sgd_step(accumulate=1, dropout=0.0):
    return make_train_step(decoder(dropout)[0], SGD, accumulate=accumulate)


def state_of(params, optimizer=SGD):
    params = jax.tree.map(jnp.copy, params)
    return TrainState(
        jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(1)
    )


def random_batch(rows=4, length=32, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 256, (rows, length + 1))
    tokens = jnp.asarray(tokens, jnp.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": jnp.ones((rows, length)),
    }


def assert_close(left, right, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), left, right)


class TwoRates(nnx.Module):
    """Nats 2.0 with gradient 0.4 for token 0, nats 1.0 with gradient 0.1 for token 1.

    Two classes with the logits (offset + slope * w, 0) give target 0 the nats
    log(1 + exp(-offset)) and the gradient slope * (exp(-nats) - 1) at w = 0.
    """

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(()))

    def hidden(self, tokens, *, dropout_key, step):
        del dropout_key, step
        nats, gradient = jnp.array([2.0, 1.0]), jnp.array([0.4, 0.1])
        offset, slope = -jnp.log(jnp.expm1(nats)), gradient / jnp.expm1(-nats)
        logit = offset[tokens] + slope[tokens] * self.w[...]
        return jnp.stack([logit, jnp.zeros_like(logit)], -1)

    def logits(self, x):
        return x


@pytest.mark.parametrize("accumulate", [1, 2])
def test_t01_micro_batches_weigh_by_their_targets(accumulate):
    """10 targets at mean 2.0 and 100 at mean 1.0; the micro-batches are the rows."""
    tokens = jnp.array([[0] * 100, [1] * 100])
    weights = jnp.ones((2, 100)).at[0, 10:].set(0)
    batch = {"inputs": tokens, "targets": jnp.zeros_like(tokens), "weights": weights}
    graphdef, params = split(TwoRates())
    step = make_train_step(graphdef, SGD, accumulate=accumulate)
    state, sums = step(state_of(params), batch)
    assert float(sums["targets"]) == 110.0
    assert float(sums["nats"] / sums["targets"]) == pytest.approx(
        1.0909090909, abs=1e-6
    )
    assert float(sums["grad_norm"]) == pytest.approx(0.1272727273, abs=1e-6)
    assert float(state.params["w"]) == pytest.approx(-0.1272727273, abs=1e-6)


def test_t01_accumulation_equals_one_batch():
    batch = random_batch()
    keep = jax.random.uniform(jax.random.key(3), (4, 32))
    keep = keep < jnp.array([[0.1], [0.9], [1.0], [0.4]])
    batch["weights"] = keep.astype(jnp.float32)
    whole, whole_sums = sgd_step(1)(state_of(decoder()[1]), batch)
    parts, sums = sgd_step(2)(state_of(decoder()[1]), batch)
    assert_close(parts.params, whole.params)
    np.testing.assert_allclose(sums["nats"], whole_sums["nats"], rtol=1e-6)
    assert float(sums["targets"]) == float(whole_sums["targets"]) == keep.sum()
    changes = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), decoder()[1], whole.params
    )
    assert min(jax.tree.leaves(changes)) > 1e-4, "some parameter got no gradient"


def test_t10_a_row_of_padding_changes_nothing():
    batch = random_batch(rows=2)
    alone = {k: v[:1] for k, v in batch.items()}
    real = jnp.array([[True], [False]]) & jnp.ones((2, 32), bool)
    batch |= {"key_mask": real, "weights": real.astype(jnp.float32)}
    padded, padded_sums = sgd_step()(state_of(decoder()[1]), batch)
    single, single_sums = sgd_step()(state_of(decoder()[1]), alone)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(padded.params))
    assert_close(padded.params, single.params)
    assert_close(padded_sums, single_sums, atol=1e-4)


def test_t11_a_batch_without_targets_has_no_loss_and_no_gradient():
    batch = random_batch() | {"weights": jnp.zeros((4, 32))}
    for accumulate in (1, 2):
        state, sums = sgd_step(accumulate)(state_of(decoder()[1]), batch)
        assert (float(sums["nats"]), float(sums["targets"])) == (0.0, 0.0)
        assert float(sums["grad_norm"]) == 0.0
        assert_close(state.params, decoder()[1], atol=0)


def test_t11_an_empty_micro_batch_leaves_the_other_alone():
    """Micro-batch i holds the rows i, i + 2."""
    batch = random_batch()
    twice = {k: v[jnp.array([0, 0, 2, 2])] for k, v in batch.items()}
    batch["weights"] = jnp.ones((4, 32)).at[1::2].set(0)
    mixed, mixed_sums = sgd_step(2)(state_of(decoder()[1]), batch)
    alone, alone_sums = sgd_step(2)(state_of(decoder()[1]), twice)
    assert_close(mixed.params, alone.params)
    assert float(mixed_sums["targets"]) == 64
    assert float(mixed_sums["nats"]) == pytest.approx(float(alone_sums["nats"]) / 2)


def test_t12_dropout_acts_in_training_alone():
    batch = random_batch()

    @functools.partial(jax.jit, static_argnums=0)
    def evaluate(graphdef, params):
        return nnx.merge(graphdef, params)(batch["inputs"])

    with_dropout, params = decoder(0.5)
    without, _ = decoder(0.0)
    first, *others = [
        evaluate(g, params) for g in (without, without, with_dropout, with_dropout)
    ]
    for other in others:
        np.testing.assert_array_equal(first, other)
    _, trained = sgd_step(2, dropout=0.5)(state_of(params), batch)
    _, plain = sgd_step(2)(state_of(params), batch)
    assert abs(float(trained["nats"] - plain["nats"])) > 0.1


def test_dropout_depends_on_the_key_the_step_and_the_micro_batch():
    params = decoder(0.5)[1]
    batch = random_batch()

    def state(step=0, key=1):
        fresh = state_of(params)
        return fresh._replace(step=jnp.int32(step), key=jax.random.key(key))

    def nats(state, **changes):
        return float(sgd_step(2, dropout=0.5)(state, batch | changes)[1]["nats"])

    assert nats(state()) == nats(state())
    assert len({nats(state()), nats(state(step=1)), nats(state(key=2))}) == 3
    # The same rows in both micro-batches: under one key they would score the same.
    equal = {k: batch[k][jnp.array([0, 0, 2, 2])] for k in ("inputs", "targets")}
    even, odd = jnp.zeros((2, 4, 32)).at[0, ::2].set(1).at[1, 1::2].set(1)
    first, second = (nats(state(), **equal, weights=w) for w in (even, odd))
    assert first != second


def test_t13_accumulation_does_not_change_the_count_of_updates():
    config = TrainConfig(steps=1000, warmup_steps=100)
    optimizer = make_optimizer(config)
    graphdef, params = split(TwoRates())
    tokens = jnp.zeros((4, 8), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    for accumulate in (1, 4):
        step = make_train_step(graphdef, optimizer, accumulate=accumulate)
        state = state_of(params, optimizer)
        for _ in range(50):
            before, (state, _) = float(state.params["w"]), step(state, batch)
        counts = {
            int(x) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32
        }
        assert counts == {50} == {int(state.step)}
        # One gradient all along: Adam moves by the rate of update 50.
        assert before - float(state.params["w"]) == pytest.approx(5e-4, rel=2e-2)


def test_t14_the_old_state_is_given_away_and_tied_embeddings_train():
    tied = {"tied_output": True, "num_layers": 1}
    graphdef, params = abstract_model(small_model(**tied))[0], random_params(**tied)
    assert "head" not in params
    optimizer = make_optimizer(TrainConfig(warmup_steps=0))
    state = state_of(params, optimizer)
    step = make_train_step(graphdef, optimizer)
    batch = random_batch()
    evaluate = jax.jit(
        lambda params: nnx.merge(graphdef, params)(batch["inputs"]).sum()
    )
    losses = []
    for _ in range(3):
        old = state
        state, sums = step(state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(old.params))
        assert np.isfinite(float(evaluate(state.params)))
        losses.append(float(sums["nats"]))
    assert losses[0] > losses[1] > losses[2]


def test_t16_the_loss_by_chunks_gives_the_same_update(monkeypatch):
    """8 chunks of each micro-batch, for two runs in one step, with a tied head."""
    tied = {"tied_output": True, "num_layers": 1}
    graphdef, params = abstract_model(small_model(**tied))[0], random_params(**tied)
    weights = jnp.asarray(np.arange(128).reshape(4, 32) % 3, jnp.float32)
    batch = random_batch() | {"weights": weights}
    alone, sums = make_train_step(graphdef, SGD, accumulate=2)(state_of(params), batch)
    monkeypatch.setattr(token_chunks, "_LOGITS", 8 * 256)
    monkeypatch.setattr(token_chunks, "_TOKENS", 8)
    step = make_joint_step(graphdef, SGD, 2, accumulate=2)
    states, both = step([state_of(params), state_of(params)], [batch, batch])
    for state, found in zip(states, both, strict=True):
        assert_close(state.params, alone.params)
        assert float(found["targets"]) == float(sums["targets"]) == 127.0
        np.testing.assert_allclose(found["nats"], sums["nats"], rtol=1e-6)


def test_t19_an_untrained_model_is_uniform():
    graphdef, params = decoder()
    params = params | {"head": jnp.zeros_like(params["head"])}
    _, sums = sgd_step()(state_of(params), random_batch())
    losses = [float(sums["nats"] / sums["targets"])]
    for length in (8, 64):
        batch = random_batch(rows=1, length=length)
        logits = jax.jit(nnx.merge(graphdef, params))(batch["inputs"])
        np.testing.assert_allclose(jax.nn.softmax(logits).sum(-1), 1.0, rtol=1e-5)
        nats, count = cross_entropy(logits, batch["targets"])
        losses.append(float(nats / count))
    for loss in losses:
        assert loss == pytest.approx(5.5451774445, abs=1e-5)
        assert loss / math.log(2) == pytest.approx(8.0, abs=1e-5)
        assert math.exp(loss) == pytest.approx(256, rel=1e-5)


# nats, gradient norm before clipping, parameter norm after the update; CPU, float32.
# The first row's nats are 128 ln 256. This table is no reference: it notices changes.
# If the model's initialisation, the optimizer or the loss changed on purpose, check
# the change by the tests that have a reference, then paste the table that the failure
# shows. If nothing was to change the numbers, there is a bug to find.
GOLDEN = [
    [709.7826538, 0.4944974, 33.7710419],
    [692.8045044, 0.4952183, 33.8218651],
    [650.9392700, 0.4858103, 33.9419403],
    [611.6297607, 0.4842628, 34.0544624],
]


def test_golden_train_steps():
    model = small_model()
    config = TrainConfig(steps=10, warmup_steps=2, learning_rate=1e-2)
    optimizer = make_optimizer(config)
    build = functools.partial(Decoder, model)
    state = jax.jit(functools.partial(init_state, build, optimizer))(jax.random.key(0))
    step = make_train_step(decoder()[0], optimizer)
    tokens = jnp.arange(4 * 33).reshape(4, 33) ** 2 % 251
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    table = []
    for _ in GOLDEN:
        state, sums = step(state, batch)
        table.append([float(sums[k]) for k in ("nats", "grad_norm", "param_norm")])
    shown = "\n".join(f"    [{a:.7f}, {b:.7f}, {c:.7f}]," for a, b, c in table)
    np.testing.assert_allclose(table, GOLDEN, rtol=1e-5, err_msg=f"now:\n{shown}\n")


def test_one_trace_serves_every_step():
    traces = []

    class Counted(TwoRates):
        def hidden(self, tokens, **kwargs):
            traces.append(tokens.shape)
            return super().hidden(tokens, **kwargs)

    graphdef, params = split(Counted())
    step = make_train_step(graphdef, SGD)
    state = state_of(params)
    tokens = jnp.zeros((2, 8), jnp.int32)
    for _ in range(3):
        state, _ = step(state, {"inputs": tokens, "targets": tokens})
    assert traces == [(2, 8)]
    assert int(state.step) == 3


def test_a_mesh_of_eight_devices_gives_the_same_update():
    """2 data x 2 fsdp x 2 tensor; each device holds its part, before and after."""
    graphdef, params = decoder()
    batch = random_batch(rows=8)
    alone, alone_sums = sgd_step(2)(state_of(params), batch)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        shardings = param_shardings(mesh, state_of(params))
        step = make_train_step(graphdef, SGD, accumulate=2, state_shardings=shardings)
        state = jax.device_put(state_of(params), shardings)
        state, sums = step(state, jax.device_put(batch, batch_sharding(mesh)))
    assert_close(jax.device_get(state.params), alone.params, atol=2e-6)
    np.testing.assert_allclose(sums["nats"], alone_sums["nats"], rtol=1e-6)
    kernel = state.params["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.shape == (2, 32, 128)
    assert {s.data.shape for s in kernel.addressable_shards} == {(2, 16, 64)}


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_tokens_split_over_a_sequence_axis_give_the_same_update(encoding):
    """2 data x 2 tensor x 2 sequence; positions are those of the whole row."""
    small = {"encoding": encoding, "num_layers": 1}
    graphdef, params = abstract_model(small_model(**small))[0], random_params(**small)
    batch = random_batch()
    alone, alone_sums = make_train_step(graphdef, SGD)(state_of(params), batch)
    mesh = make_mesh(MeshConfig(data=2, tensor=2, sequence=2))
    with jax.set_mesh(mesh):
        shardings = param_shardings(mesh, state_of(params))
        step = make_train_step(graphdef, SGD, state_shardings=shardings)
        split_batch = jax.device_put(batch, batch_sharding(mesh))
        shards = split_batch["inputs"].addressable_shards
        assert {s.data.shape for s in shards} == {(2, 16)}
        state = jax.device_put(state_of(params), shardings)
        state, sums = step(state, split_batch)
    assert_close(jax.device_get(state.params), alone.params, atol=1e-5)
    for name in ("nats", "grad_norm"):
        np.testing.assert_allclose(sums[name], alone_sums[name], rtol=1e-5)


def test_wrong_batches_raise():
    step = sgd_step(2)
    state = state_of(decoder()[1])
    batch = random_batch(rows=3)
    with pytest.raises(ValueError, match="must divide the batch of 3 rows, got 2"):
        step(state, batch)
    with pytest.raises(ValueError, match="got inputs, targets, weight"):
        step(state, batch | {"weight": batch["inputs"]})
    with pytest.raises(ValueError, match="a batch holds inputs, targets"):
        step(state, {"inputs": batch["inputs"]})
    with pytest.raises(ValueError, match=r"one shape \[B, T\]"):
        step(state, batch | {"weights": jnp.ones((3, 1))})
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        make_train_step(decoder()[0], SGD, accumulate=0)


def test_random_features_are_those_of_the_step():
    """Redrawn every two steps: without learning, the loss changes with the draw."""
    options = LinearOptions(num_features=4, redraw_every=2)
    changes = {"attention": "linear", "linear": options}
    graphdef, _ = abstract_model(small_model(**changes))
    step = make_train_step(graphdef, optax.sgd(0.0))
    state, batch = state_of(random_params(), optax.sgd(0.0)), random_batch(length=6)
    nats = []
    for _ in range(4):
        state, sums = step(state, batch)
        nats.append(float(sums["nats"]))
    assert nats[0] == nats[1] != nats[2] == nats[3]
