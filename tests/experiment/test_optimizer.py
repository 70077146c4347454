"""The schedule's values, and whole updates against float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.experiment.checkpoint import abstract_model
from rope_jax.experiment.config import TrainConfig
from rope_jax.experiment.optimizer import decay_mask, learning_rate, make_optimizer
from rope_jax.nn.config import DecoderConfig

T13 = {50: 5e-4, 100: 1e-3, 550: 5.5e-4, 1000: 1e-4}


def t13_config(**changes):
    return TrainConfig(
        steps=1000,
        warmup_steps=100,
        learning_rate=1e-3,
        final_learning_rate=1e-4,
        **changes,
    )


def test_t13_schedule_values():
    schedule = learning_rate(t13_config())
    for update, right in T13.items():
        assert float(schedule(update)) == pytest.approx(right, rel=1e-6)
    assert float(schedule(1)) == pytest.approx(1e-5, rel=1e-5)
    assert float(schedule(325)) == pytest.approx(
        1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4)), rel=1e-6
    )
    assert float(schedule(5000)) == pytest.approx(1e-4, rel=1e-6)


def test_t13_each_update_uses_its_own_value():
    """A constant gradient makes Adam move by exactly the learning rate."""
    optimizer = make_optimizer(t13_config(weight_decay=0.0))

    def update(carry, _):
        params, state = carry
        gradient = {"kernel": jnp.full((1, 1), 0.5)}
        change, state = optimizer.update(gradient, state, params)
        return (params, state), change["kernel"][0, 0]

    params = {"kernel": jnp.zeros((1, 1))}
    start = (params, optimizer.init(params))
    _, changes = jax.lax.scan(update, start, None, length=1000)
    for number, right in T13.items():
        assert -float(changes[number - 1]) == pytest.approx(right, rel=1e-3)


def test_schedule_without_warmup_starts_at_the_peak():
    config = TrainConfig(steps=10, warmup_steps=0, learning_rate=1.0)
    assert float(learning_rate(config)(0)) == pytest.approx(1.0)
    assert 0.9 < float(learning_rate(config)(1)) < 1.0


def test_a_run_shorter_than_its_warmup_stays_on_the_line():
    schedule = learning_rate(TrainConfig(steps=20, warmup_steps=100))
    assert float(schedule(20)) == pytest.approx(2e-4, rel=1e-6)


def numpy_adamw(config, params, gradients):
    """Loshchilov and Hutter 2019, algorithm 2, with clipping, in float64."""
    schedule = learning_rate(config)
    moments = {k: (np.zeros(p.shape), np.zeros(p.shape)) for k, p in params.items()}
    params = {k: p.astype(np.float64) for k, p in params.items()}
    for n, gradient in enumerate(gradients, 1):
        norm = math.sqrt(
            sum((g.astype(np.float64) ** 2).sum() for g in gradient.values())
        )
        for name, p in params.items():
            g = gradient[name].astype(np.float64) * min(1.0, config.clip_norm / norm)
            m, v = moments[name]
            m = config.beta1 * m + (1 - config.beta1) * g
            v = config.beta2 * v + (1 - config.beta2) * g * g
            moments[name] = (m, v)
            step = m / (1 - config.beta1**n)
            step /= np.sqrt(v / (1 - config.beta2**n)) + 1e-8
            decay = config.weight_decay if name == "kernel" else 0.0
            params[name] = p - float(schedule(n)) * (step + decay * p)
    return params


def test_updates_match_float64_with_clipping_and_decay():
    config = TrainConfig(
        steps=20, warmup_steps=3, learning_rate=0.1, weight_decay=0.3, clip_norm=1.0
    )
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "scale": (3,)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    # Norms on both sides of the clip, so that a missing or constant clip shows.
    gradients = [
        {k: (f * rng.normal(size=s)).astype(np.float32) for k, s in shapes.items()}
        for f in (0.01, 10.0, 0.1, 3.0, 0.02)
    ]
    optimizer = make_optimizer(config)
    state, ours = optimizer.init(params), params
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, ours)
        ours = jax.tree.map(jnp.add, ours, updates)
    right = numpy_adamw(config, params, gradients)
    for name in shapes:
        np.testing.assert_allclose(ours[name], right[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("encoding", ["rope", "learned"])
def test_only_matrices_decay(encoding):
    model = DecoderConfig(encoding=encoding, num_layers=2, qk_norm=True)
    model.learned.max_length = 16
    _, params = abstract_model(model)
    mask = decay_mask(params)
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, decays in jax.tree_util.tree_leaves_with_path(mask)
        if decays
    }
    attention = {
        f"blocks/attention/{n}/kernel" for n in ("query", "key", "value", "out")
    }
    mlp = {f"blocks/mlp/{n}/kernel" for n in ("gate", "up", "down")}
    assert decayed == attention | mlp | {"head"}
    assert len(jax.tree.leaves(mask)) == 14 + (encoding == "learned")


def test_decay_moves_matrices_and_nothing_else():
    config = TrainConfig(steps=10, warmup_steps=0, learning_rate=0.5, weight_decay=0.1)
    params = {
        "kernel": jnp.ones((2, 2)),
        "scale": jnp.ones(2),
        "embedding": jnp.ones((3, 2)),
    }
    optimizer = make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    rate = float(learning_rate(config)(1))
    np.testing.assert_allclose(updates["kernel"], -0.1 * rate, rtol=1e-6)
    np.testing.assert_array_equal(updates["scale"], 0.0)
    np.testing.assert_array_equal(updates["embedding"], 0.0)
