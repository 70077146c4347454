"""CoPE and DAPE against float64 loops, and what each must keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import contextual

B, T, N, H, P = 2, 8, 2, 4, 4
POSITIONS = np.arange(10, 10 + T, dtype=np.int32)


def _cope_inputs(seed=0):
    rng = np.random.default_rng(seed)
    params = {"embedding": rng.normal(size=(P, H)).astype(np.float32)}
    query = rng.normal(size=(B, T, N, H)).astype(np.float32)
    logits = (2 * rng.normal(size=(B, N, T, T))).astype(np.float32)
    return params, query, logits


def cope_reference(params, query, logits, mask=None):
    """Positions and bias, pair by pair, from the definition."""
    places, bias = np.zeros(logits.shape), np.zeros(logits.shape)
    table = params["embedding"]
    for b, n, t, s in np.ndindex(logits.shape):
        p = sum(
            1 / (1 + np.exp(-logits[b, n, t, u]))
            for u in range(s, t + 1)
            if mask is None or mask[t, u]
        )
        places[b, n, t, s] = p
        p = min(p, P - 1)
        below, above = int(np.floor(p)), int(np.ceil(p))
        weight = p - below
        row = weight * table[above] + (1 - weight) * table[below]
        bias[b, n, t, s] = query[b, t, n] @ row
    return places, bias


def _cope(params, query, logits, queries=POSITIONS, keys=POSITIONS, mask=None):
    places = contextual.cope_positions(logits, queries, keys, mask=mask)
    return contextual.cope_bias(params, query, places)


cope = jax.jit(_cope)
cope_positions = jax.jit(contextual.cope_positions)
SEEN = np.tril(np.ones((T, T), bool))


@pytest.mark.parametrize("masked", [False, True])
def test_cope_equals_float64_loops(masked):
    params, query, logits = _cope_inputs()
    mask = np.random.default_rng(1).uniform(size=(T, T)) < 0.6 if masked else None
    places, bias = cope_reference(params, query, logits.astype(np.float64), mask)
    got = cope_positions(logits, POSITIONS, POSITIONS, mask=mask)
    np.testing.assert_allclose(got, places, atol=2e-6)
    got = cope(params, query, logits, mask=mask)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, bias, atol=2e-5)


def test_cope_golden_values():
    # Shut gates never count; open gates make positions of the distance.
    table = {"embedding": jnp.array([[0.0], [1.0], [10.0], [100.0]])}
    logits = jnp.array([[[-200.0, 200.0, 200.0, -200.0, 200.0, 0.0]]])
    keys = jnp.arange(6)
    places = contextual.cope_positions(logits, jnp.array([4]), keys)
    assert places.tolist() == [[[3.0, 3.0, 2.0, 1.0, 1.0, 0.0]]]
    bias = contextual.cope_bias(table, jnp.full((1, 1, 1), 2.0), places)
    assert bias.tolist() == [[[200.0, 200.0, 20.0, 2.0, 2.0, 0.0]]]
    half = contextual.cope_positions(0 * logits, jnp.array([5]), keys)
    assert half.tolist() == [[[3.0, 2.5, 2.0, 1.5, 1.0, 0.5]]]
    bias = contextual.cope_bias(table, jnp.ones((1, 1, 1)), half, scale=0.5)
    assert bias.tolist() == [[[50.0, 27.5, 5.0, 2.75, 0.5, 0.25]]]


def test_cope_never_sees_the_future():
    params, query, logits = _cope_inputs()
    future = np.broadcast_to(~SEEN, logits.shape)
    other = np.where(future, 50.0, logits).astype(np.float32)
    same = np.broadcast_to(SEEN, logits.shape)
    first, second = cope(params, query, logits), cope(params, query, other)
    np.testing.assert_array_equal(first[same], second[same])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(_cope(params, query, x)))))
    gradient = np.asarray(gradient(logits))
    assert (gradient[future] == 0).all()
    assert np.isfinite(gradient).all() and np.abs(gradient[same]).max() > 0


def test_cope_by_blocks_of_queries_and_keys():
    params, query, logits = _cope_inputs()
    whole = cope_positions(logits, POSITIONS, POSITIONS)
    bias = cope(params, query, logits)
    for rows in (slice(0, 4), slice(4, 8)):
        block = cope(params, query[:, rows], logits[:, :, rows], POSITIONS[rows])
        np.testing.assert_allclose(block, bias[:, :, rows], atol=1e-6)
    after = np.zeros((B, N, T), np.float32)
    for columns in (slice(4, 8), slice(0, 4)):
        block = cope_positions(
            logits[..., columns], POSITIONS, POSITIONS[columns], gates_after=after
        )
        np.testing.assert_allclose(block, whole[..., columns], atol=2e-6)
        after = block[..., 0]


def test_cope_gradients_equal_finite_differences():
    params, query, logits = _cope_inputs(4)
    weights = np.random.default_rng(5).normal(size=logits.shape) * SEEN
    arguments = params["embedding"], query, logits

    @jax.jit
    def gradients(embedding, query, logits):
        def loss(embedding, query, logits):
            bias = _cope({"embedding": embedding}, query, logits)
            return jnp.sum(weights.astype(np.float32) * bias)

        return jax.grad(loss, (0, 1, 2))(embedding, query, logits)

    got = gradients(*arguments)
    exact = [x.astype(np.float64) for x in arguments]
    for i, gradient in enumerate(got):
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
        along = np.random.default_rng(6 + i).normal(size=exact[i].shape)
        ends = []
        for sign in (1, -1):
            moved = list(exact)
            moved[i] = exact[i] + sign * 1e-7 * along
            table = {"embedding": moved[0]}
            ends.append(np.sum(weights * cope_reference(table, *moved[1:])[1]))
        slope = (ends[0] - ends[1]) / 2e-7
        np.testing.assert_allclose(np.sum(gradient * along), slope, rtol=2e-4)


def test_cope_starts_at_zero_and_still_learns():
    params = contextual.init_cope(H, num_positions=P)
    assert params["embedding"].shape == (P, H) and not params["embedding"].any()
    _, query, logits = _cope_inputs()
    seen = np.broadcast_to(SEEN, logits.shape)
    gradient = jax.grad(lambda p: jnp.sum(_cope(p, query, logits) * seen))(params)
    assert (np.abs(gradient["embedding"]).max(-1) > 0).all()


def test_cope_one_compilation_for_many_offsets():
    params, query, logits = _cope_inputs()
    traces = []

    @jax.jit
    def bias(positions):
        traces.append(1)
        return _cope(params, query, logits, positions, positions)

    here = bias(POSITIONS)
    for shift in (1, 10_000_000):
        np.testing.assert_array_equal(bias(POSITIONS + shift), here)
    assert len(traces) == 1


def test_cope_batched_positions_and_vmap():
    params, query, logits = _cope_inputs()
    queries = np.stack([POSITIONS, POSITIONS - 3])
    together = cope(params, query, logits, queries, POSITIONS)
    for b in range(B):
        alone = cope(params, query[b], logits[b], queries[b], POSITIONS)
        np.testing.assert_allclose(together[b], alone, atol=1e-6)
    mapped = jax.vmap(cope, (None, 0, 0, 0, None))(
        params, query, logits, queries, POSITIONS
    )
    np.testing.assert_allclose(mapped, together, atol=1e-6)


def test_cope_bad_input_raises_with_its_name():
    params, query, logits = _cope_inputs()
    with pytest.raises(ValueError, match=r"params\['embedding'\].*two rows.*\(1, 4\)"):
        _cope({"embedding": jnp.zeros((1, H))}, query, logits)
    with pytest.raises(ValueError, match=r"params\['embedding'\].*4\).*\(4, 3\)"):
        _cope({"embedding": params["embedding"][:, :3]}, query, logits)
    with pytest.raises(ValueError, match="query_positions must be integers"):
        _cope(params, query, logits, POSITIONS * 1.0)


def _dape_inputs(seed=0, heads=3):
    rng = np.random.default_rng(seed)
    params = contextual.init_dape(jax.random.key(seed), heads, width=5)
    logits = rng.normal(size=(B, heads, 4, 6)).astype(np.float32)
    bias = -rng.uniform(0, 5, size=(heads, 4, 6)).astype(np.float32)
    return params, logits, bias


def dape_reference(params, logits, bias):
    out = np.zeros(logits.shape)
    for b in range(logits.shape[0]):
        for t, s in np.ndindex(logits.shape[2:]):
            x = np.concatenate([logits[b, :, t, s], bias[:, t, s]])
            hidden = x @ params["kernel_in"] + params["bias_in"]
            hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
            change = hidden @ params["kernel_out"] + params["bias_out"]
            out[b, :, t, s] = logits[b, :, t, s] + bias[:, t, s] + change
    return out


dape = jax.jit(contextual.dape_logits)


def test_dape_equals_float64_loops():
    params, logits, bias = _dape_inputs()
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    got = dape(params, logits, bias)
    assert got.dtype == jnp.float32
    expected = dape_reference(exact, logits.astype(np.float64), bias)
    np.testing.assert_allclose(got, expected, atol=3e-6)
    batched = dape(params, logits, np.broadcast_to(bias, logits.shape))
    np.testing.assert_allclose(batched, got, atol=1e-6)
    alone = dape(params, logits[0], np.broadcast_to(bias, logits.shape))
    np.testing.assert_allclose(alone[1], got[0], atol=1e-6)


def test_dape_golden_values():
    params = {
        "kernel_in": jnp.array([[1.0, 0.0], [0.0, 2.0]]),
        "bias_in": jnp.array([0.5, 0.0]),
        "kernel_out": jnp.array([[10.0], [100.0]]),
        "bias_out": jnp.array([0.25]),
    }
    # logit 3, bias -4: 3 - 4 + 10 * 3.5 + 100 * (0.01 * -8) + 0.25
    logits = jnp.full((1, 1, 1), 3.0)
    got = contextual.dape_logits(params, logits, logits - 7)
    np.testing.assert_allclose(got, [[[26.25]]], rtol=1e-6)


def test_dape_without_its_network_is_the_bias():
    params, logits, bias = _dape_inputs()
    params = params | {
        "kernel_out": jnp.zeros_like(params["kernel_out"]),
        "bias_out": jnp.zeros(3),
    }
    np.testing.assert_array_equal(dape(params, logits, bias), logits + bias[None])


def test_dape_acts_on_each_pair_alone():
    params, logits, bias = _dape_inputs()
    whole = dape(params, logits, bias)
    block = dape(params, logits[..., 1:3, 2:5], bias[..., 1:3, 2:5])
    np.testing.assert_allclose(block, whole[..., 1:3, 2:5], atol=1e-6)


def test_dape_gradients_equal_finite_differences():
    params, logits, bias = _dape_inputs()
    weights = np.random.default_rng(1).normal(size=logits.shape)

    @jax.jit
    @jax.grad
    def gradient(params):
        out = contextual.dape_logits(params, logits, bias)
        return jnp.sum(weights.astype(np.float32) * out)

    got = gradient(params)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for i, name in enumerate(sorted(params)):
        assert np.isfinite(got[name]).all() and np.abs(got[name]).max() > 0, name
        along = np.random.default_rng(10 + i).normal(size=exact[name].shape)
        ends = []
        for sign in (1, -1):
            moved = exact | {name: exact[name] + sign * 1e-7 * along}
            ends.append(np.sum(weights * dape_reference(moved, logits, bias)))
        slope = (ends[0] - ends[1]) / 2e-7
        np.testing.assert_allclose(np.sum(got[name] * along), slope, rtol=2e-4)


def test_dape_bad_input_raises_with_its_name():
    params, logits, bias = _dape_inputs()
    with pytest.raises(ValueError, match=r"params\['kernel_out'\].*2\).*\(5, 3\)"):
        contextual.dape_logits(params, logits[:, :2], bias[:2])
    with pytest.raises(ValueError, match=r"params\['kernel_in'\].*\(6, 5\).*\(5, 5\)"):
        contextual.dape_logits(params | {"kernel_in": jnp.zeros((5, 5))}, logits, bias)


def test_dape_initial_network_is_float32_within_its_fan():
    params = contextual.init_dape(jax.random.key(0), 8)
    assert {k: v.shape for k, v in params.items()} == {
        "kernel_in": (16, 32),
        "bias_in": (32,),
        "kernel_out": (32, 8),
        "bias_out": (8,),
    }
    assert all(v.dtype == jnp.float32 for v in params.values())
    assert 0.9 * 16**-0.5 < np.abs(params["kernel_in"]).max() <= 16**-0.5
    assert 0.9 * 32**-0.5 < np.abs(params["kernel_out"]).max() <= 32**-0.5
