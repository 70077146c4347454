"""PoPE against its definition in float64, and what it must keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import contextual, frequencies

B, T, N, H = 2, 6, 2, 8
POSITIONS = np.array([0, 1, 5, 100, 131_072, 10_000_000], np.int32)


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    query, key = (rng.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(2))
    return contextual.init_pope(N, H, key=jax.random.key(seed)), query, key


def features_reference(x, positions, phase=None, theta=10_000.0):
    out = np.zeros((*x.shape[:-1], 2 * H))
    for b, t, n, c in np.ndindex(x.shape):
        angle = int(positions[t]) * theta ** (-c / H)
        angle += 0 if phase is None else phase[n, c]
        magnitude = np.log1p(np.exp(x[b, t, n, c]))
        out[b, t, n, c] = magnitude * np.cos(angle)
        out[b, t, n, H + c] = magnitude * np.sin(angle)
    return out


pope_query = jax.jit(contextual.pope_query)
pope_key = jax.jit(contextual.pope_key)


def test_features_equal_the_definition_at_any_position():
    params, query, key = _inputs()
    got = pope_query(query, POSITIONS)
    expected = features_reference(query.astype(np.float64), POSITIONS)
    assert got.shape == (B, T, N, 2 * H) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=4e-6)
    got = pope_key(params, key, POSITIONS)
    phase = np.asarray(params["phase"], np.float64)
    expected = features_reference(key.astype(np.float64), POSITIONS, phase)
    np.testing.assert_allclose(got, expected, atol=4e-6)


def test_golden_values():
    query = jnp.full((1, 1, 2), np.log(np.e - 1))  # softplus is 1
    got = contextual.pope_query(query, jnp.array([3]))
    # Frequencies 1 and 10000 ** (-1/2) = 0.01.
    expected = [-0.9899924966, 0.9995500337, 0.1411200081, 0.0299955002]
    np.testing.assert_allclose(got[0, 0], expected, atol=3e-7)
    params = {"phase": jnp.array([[-np.pi / 2, -np.pi]])}
    got = contextual.pope_key(params, query, jnp.array([3]))
    expected = [0.1411200081, -0.9995500337, 0.9899924966, -0.0299955002]
    np.testing.assert_allclose(got[0, 0], expected, atol=3e-7)


def test_scores_are_magnitudes_times_the_cosine_of_lag_and_phase():
    params, query, key = _inputs()
    offset = 10_000_000
    positions = np.arange(T)
    expected = np.zeros((B, N, T, T))
    inv_freq = 10_000.0 ** (-np.arange(H) / H)
    softplus = [np.log1p(np.exp(x.astype(np.float64))) for x in (query, key)]
    for t, s in np.ndindex(T, T):
        cosine = np.cos((s - t) * inv_freq + np.float64(params["phase"]))
        product = softplus[0][:, t] * softplus[1][:, s] * cosine
        expected[:, :, t, s] = product.sum(-1)
    for shift in (0, offset):
        q = pope_query(query, positions + shift)
        k = pope_key(params, key, positions + shift)
        got = np.einsum("btnc,bsnc->bnts", np.float64(q), np.float64(k))
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_phase_out_of_range_acts_as_the_limit_and_can_return():
    _, _, key = _inputs()
    outside = np.zeros((N, H), np.float32)
    outside[0, 0], outside[1, 1] = 0.5, -7.0
    limit = {"phase": np.clip(outside, np.float32(-2 * np.pi), 0)}

    def total(params):
        return jnp.sum(contextual.pope_key(params, key, POSITIONS))

    value_and_grad = jax.jit(jax.value_and_grad(total))
    got, slope = value_and_grad({"phase": outside})
    expected, limit_slope = value_and_grad(limit)
    assert got == expected
    np.testing.assert_array_equal(slope["phase"], limit_slope["phase"])
    assert (slope["phase"] != 0).all()


def test_gradients_equal_finite_differences():
    params, _, key = _inputs(2)
    weights = np.random.default_rng(3).normal(size=(B, T, N, 2 * H))

    @jax.jit
    def gradients(params, key):
        def loss(params, key):
            out = contextual.pope_key(params, key, POSITIONS)
            return jnp.sum(weights.astype(np.float32) * out)

        return jax.grad(loss, (0, 1))(params, key)

    in_params, in_key = gradients(params, key)
    exact = [np.asarray(params["phase"], np.float64), key.astype(np.float64)]
    rng = np.random.default_rng(4)
    for i, gradient in enumerate((in_params["phase"], in_key)):
        assert np.isfinite(gradient).all() and (gradient != 0).all()
        along, ends = rng.normal(size=exact[i].shape), []
        for sign in (1e-6, -1e-6):
            moved = list(exact)
            moved[i] = exact[i] + sign * along
            out = features_reference(moved[1], POSITIONS, moved[0])
            ends.append(np.sum(weights * out))
        slope = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(np.sum(gradient * along), slope, rtol=1e-4)


def test_frequencies_and_their_attention_factor_are_used():
    _, query, _ = _inputs()
    scaled = frequencies.Frequencies(
        500.0 ** (-np.arange(H) / H), attention_factor=1.25
    )
    got = pope_query(query, POSITIONS, scaled)
    expected = features_reference(query.astype(np.float64), POSITIONS, theta=500.0)
    np.testing.assert_allclose(got, 1.25 * expected, atol=5e-6)


def test_one_compilation_batched_positions_and_vmap():
    params, query, key = _inputs()
    traces = []

    @jax.jit
    def both(positions):
        traces.append(1)
        return (
            contextual.pope_query(query, positions),
            contextual.pope_key(params, key, positions),
        )

    batch = np.stack([POSITIONS, POSITIONS[::-1]])
    for row in batch:
        got = both(row)
        np.testing.assert_allclose(
            got[0], features_reference(np.float64(query), row), atol=4e-6
        )
    assert len(traces) == 1
    together = pope_query(query, batch), pope_key(params, key, batch)
    for b in range(B):
        alone = both(batch[b])
        for whole, part in zip(together, alone, strict=True):
            np.testing.assert_allclose(whole[b], part[b], atol=1e-6)
    mapped = jax.vmap(contextual.pope_key, (None, 0, 0))(params, key, batch)
    np.testing.assert_allclose(mapped, together[1], atol=1e-6)


def test_half_precision_is_rounded_once():
    _, query, _ = _inputs()
    half = jnp.asarray(query, jnp.bfloat16)
    got = pope_query(half, POSITIONS)
    assert got.dtype == jnp.bfloat16
    expected = pope_query(half.astype(jnp.float32), POSITIONS)
    np.testing.assert_array_equal(got, expected.astype(jnp.bfloat16))


def test_initial_phase():
    zero = contextual.init_pope(N, H)["phase"]
    assert zero.dtype == jnp.float32 and not zero.any()
    drawn = contextual.init_pope(20, 50, key=jax.random.key(0))["phase"]
    assert -2 * np.pi <= drawn.min() < -6.2 and -0.1 < drawn.max() <= 0
    np.testing.assert_allclose(drawn.mean(), -np.pi, rtol=0.05)


def test_bad_input_raises_with_its_name():
    params, query, key = _inputs()
    with pytest.raises(ValueError, match=r"frequencies must be 8.*got shape \(4,\)"):
        contextual.pope_query(query, POSITIONS, frequencies.default(H))
    with pytest.raises(ValueError, match=r"params\['phase'\].*\(1, 8\), got \(2, 8\)"):
        contextual.pope_key(params, key[:, :, :1], POSITIONS)
    with pytest.raises(ValueError, match="positions must be integers"):
        contextual.pope_query(query, POSITIONS * 1.0)
