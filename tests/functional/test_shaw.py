"""Shaw's relative embeddings against loops over every pair, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import relative

B, T, S, N, H, CLIP = 2, 4, 6, 2, 8, 2
QUERIES = np.array([4, 5, 9, 100], np.int32)
KEYS = np.array([0, 3, 4, 5, 8, 99], np.int32)


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(B, T, N, H)).astype(np.float32)
    weights = rng.uniform(size=(B, N, T, S)).astype(np.float32)
    return query, weights


def _row(table, head, q, k):
    table = table[head] if table.ndim == 3 else table
    return table[max(-CLIP, min(CLIP, int(k) - int(q))) + CLIP]


def logits_reference(params, query, scale=H**-0.5):
    out = np.zeros((B, N, T, S))
    for b, n, t, s in np.ndindex(out.shape):
        row = _row(params["key"], n, QUERIES[t], KEYS[s])
        out[b, n, t, s] = scale * query[b, t, n] @ row
    return out


def values_reference(params, weights):
    out = np.zeros((B, T, N, H))
    for b, n, t, s in np.ndindex(B, N, T, S):
        row = _row(params["value"], n, QUERIES[t], KEYS[s])
        out[b, t, n] += weights[b, n, t, s] * row
    return out


def _params(per_head):
    heads = N if per_head else None
    return relative.init_shaw(jax.random.key(1), H, max_distance=CLIP, num_heads=heads)


def _exact(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


logits = jax.jit(relative.shaw_logits)
values = jax.jit(relative.shaw_values)


@pytest.mark.parametrize("per_head", [False, True])
def test_both_terms_equal_loops(per_head):
    params, (query, weights) = _params(per_head), _inputs()
    got = logits(params, query, QUERIES, KEYS)
    expected = logits_reference(_exact(params), query.astype(np.float64))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=2e-6)
    got = values(params, weights, QUERIES, KEYS)
    expected = values_reference(_exact(params), weights.astype(np.float64))
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_golden_values():
    table = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    params = {"key": table, "value": 10 * table}
    query = jnp.array([[[3.0, 5.0]]])
    positions = jnp.array([7]), jnp.array([0, 6, 7, 8, 9])
    got = relative.shaw_logits(params, query, *positions, scale=1.0)
    assert got.tolist() == [[[3.0, 3.0, 5.0, 16.0, 16.0]]]
    got = relative.shaw_logits(params, query, *positions)
    np.testing.assert_allclose(got[0, 0, 2], 5 / 2**0.5, rtol=1e-6)
    weights = jnp.array([[[0.5, 0.25, 0.125, 0.125, 0.0]]])
    got = relative.shaw_values(params, weights, *positions)
    assert got.tolist() == [[[10.0, 3.75]]]


def test_blocks_equal_the_whole():
    params, (query, weights) = _params(False), _inputs()
    whole = logits(params, query, QUERIES, KEYS)
    mixed = values(params, weights, QUERIES, KEYS)
    for t in (slice(0, 2), slice(2, 4)):
        added = 0
        for s in (slice(0, 3), slice(3, 6)):
            block = logits(params, query[:, t], QUERIES[t], KEYS[s])
            np.testing.assert_allclose(block, whole[:, :, t, s], atol=1e-6)
            added += values(params, weights[:, :, t, s], QUERIES[t], KEYS[s])
        np.testing.assert_allclose(added, mixed[:, t], atol=2e-6)


def test_no_array_of_pairs_times_channels_is_formed():
    length, dim = 64, 32
    params = relative.init_shaw(jax.random.key(0), dim, max_distance=4)
    query = jnp.zeros((length, N, dim))
    weights, positions = jnp.zeros((N, length, length)), jnp.arange(length)
    for function, x in ((relative.shaw_logits, query), (relative.shaw_values, weights)):
        jaxpr = jax.make_jaxpr(function)(params, x, positions, positions).jaxpr
        sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
        assert max(sizes) <= 9 * length * length < dim * length * length


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("per_head", [False, True])
def test_gradients_equal_finite_differences(name, per_head):
    params, (query, weights) = _params(per_head), _inputs()

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(params, x):
        function = relative.shaw_logits if name == "key" else relative.shaw_values
        return jnp.sum(jnp.sin(function(params, x, QUERIES, KEYS)))

    x = query if name == "key" else weights
    reference = logits_reference if name == "key" else values_reference
    exact, exact_x = _exact(params), x.astype(np.float64)
    in_params, in_x = gradient(params, x)
    rng = np.random.default_rng(2)
    along = rng.normal(size=exact[name].shape)
    ends = [
        np.sin(reference(exact | {name: exact[name] + sign * 1e-6 * along}, exact_x))
        for sign in (1, -1)
    ]
    slope = (ends[0] - ends[1]).sum() / 2e-6
    np.testing.assert_allclose(np.sum(in_params[name] * along), slope, rtol=1e-4)
    assert np.isfinite(in_params[name]).all()
    rows = np.abs(in_params[name]).max(-1)
    assert (rows > 0).all()
    along = rng.normal(size=x.shape)
    ends = [reference(exact, exact_x + sign * 1e-6 * along) for sign in (1, -1)]
    slope = (np.sin(ends[0]) - np.sin(ends[1])).sum() / 2e-6
    np.testing.assert_allclose(np.sum(in_x * along), slope, rtol=1e-4)


def test_one_compilation_and_shift_invariance():
    params, (query, weights) = _params(False), _inputs()
    traces = []

    @jax.jit
    def both(query_positions, key_positions):
        traces.append(1)
        return (
            relative.shaw_logits(params, query, query_positions, key_positions),
            relative.shaw_values(params, weights, query_positions, key_positions),
        )

    here = both(QUERIES, KEYS)
    for shift in (3, 10_000_000):
        there = both(QUERIES + shift, KEYS + shift)
        for a, b in zip(here, there, strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(traces) == 1


def test_batched_positions_and_vmap():
    params, (query, weights) = _params(True), _inputs()
    queries = np.stack([QUERIES, QUERIES + 2])
    keys = np.stack([KEYS, KEYS])
    for function, x in ((logits, query), (values, weights)):
        together = function(params, x, queries, keys)
        for b in range(B):
            alone = function(params, x[b], queries[b], keys[b])
            np.testing.assert_allclose(together[b], alone, atol=1e-6)
        mapped = jax.vmap(function, (None, 0, 0, 0))(params, x, queries, keys)
        np.testing.assert_allclose(mapped, together, atol=1e-6)


def test_half_precision_query_gives_float32_logits_and_values_keep_their_type():
    params, (query, weights) = _params(False), _inputs()
    half = jnp.asarray(query, jnp.bfloat16)
    got = logits(params, half, QUERIES, KEYS)
    assert got.dtype == jnp.float32
    expected = logits_reference(_exact(params), np.asarray(half, np.float64))
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert values(params, weights.astype(jnp.bfloat16), QUERIES, KEYS).dtype == (
        jnp.bfloat16
    )


def test_bad_input_raises_with_its_name():
    params, (query, weights) = _params(False), _inputs()
    even = {"key": jnp.zeros((4, H)), "value": jnp.zeros((4, H))}
    with pytest.raises(ValueError, match=r"params\['key'\].*odd number, got \(4, 8\)"):
        relative.shaw_logits(even, query, QUERIES, KEYS)
    with pytest.raises(ValueError, match=r"params\['value'\].*odd number"):
        relative.shaw_values(even, weights, QUERIES, KEYS)
    with pytest.raises(ValueError, match=r"params\['key'\] must have shape \(any, 4\)"):
        relative.shaw_logits(params, query[..., :4], QUERIES, KEYS)
    with pytest.raises(ValueError, match=r"params\['value'\] must have shape \(3, any"):
        relative.shaw_values(_params(True), jnp.zeros((3, T, S)), QUERIES, KEYS)
    with pytest.raises(ValueError, match="params must have 'key'"):
        relative.shaw_logits({}, query, QUERIES, KEYS)
    with pytest.raises(ValueError, match="key_positions must be integers"):
        relative.shaw_logits(params, query, QUERIES, KEYS / 2)
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        relative.init_shaw(jax.random.key(0), H, max_distance=0)
