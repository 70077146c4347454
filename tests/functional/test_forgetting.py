"""The forget gate and CABLE against products of gates, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import contextual
from rope_jax.functional.attention import attention

B, T, N, D = 2, 9, 3, 5


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "kernel": rng.normal(size=(D, N)).astype(np.float32),
        "bias": rng.normal(size=N).astype(np.float32),
    }
    return params, rng.normal(size=(B, T, D)).astype(np.float32)


def fox_reference(params, x):
    """Logarithm of the product of the gates after the key, up to the query."""
    gates = 1 / (1 + np.exp(-(x @ params["kernel"] + params["bias"])))
    bias = np.zeros((*x.shape[:-2], N, x.shape[-2], x.shape[-2]))
    for t in range(x.shape[-2]):
        for s in range(t + 1):
            kept = gates[..., s + 1 : t + 1, :].prod(-2)
            bias[..., :, t, s] = np.log(kept)
    return bias


def cable_reference(params, x):
    """Minus the sum of the slopes after the key, up to the query."""
    slopes = np.log1p(np.exp(x @ params["kernel"] + params["bias"]))
    bias = np.zeros((*x.shape[:-2], N, x.shape[-2], x.shape[-2]))
    for t in range(x.shape[-2]):
        for s in range(t + 1):
            bias[..., :, t, s] = -slopes[..., s + 1 : t + 1, :].sum(-2)
    return bias


METHODS = {
    "fox": (contextual.fox_sums, fox_reference),
    "cable": (contextual.cable_sums, cable_reference),
}
SEEN = np.tril(np.ones((T, T), bool))


def _bias(name, params, x):
    sums = METHODS[name][0](params, x)
    return contextual.accumulated_bias(sums, sums)


JITTED = {name: jax.jit(lambda p, x, name=name: _bias(name, p, x)) for name in METHODS}


def _exact(params, x):
    return {k: v.astype(np.float64) for k, v in params.items()}, x.astype(np.float64)


@pytest.mark.parametrize("name", METHODS)
def test_bias_equals_float64_loops(name):
    params, x = _inputs()
    got = JITTED[name](params, x)
    assert got.dtype == jnp.float32 and got.shape == (B, N, T, T)
    expected = METHODS[name][1](*_exact(params, x))
    np.testing.assert_allclose(np.where(SEEN, got, 0), expected, atol=3e-6)


def test_golden_values():
    params = {"kernel": jnp.array([[1.0]]), "bias": jnp.array([0.0])}
    x = jnp.array([[0.0], [np.log(3.0)], [-np.log(4.0)]])
    # Gates 1/2, 3/4, 1/5.
    got = _bias("fox", params, x)[0]
    np.testing.assert_allclose(got[2, :2], np.log([0.15, 0.2]), rtol=1e-6)
    np.testing.assert_allclose(got[1, 0], np.log(0.75), rtol=1e-6)
    assert np.diagonal(got).tolist() == [0.0, 0.0, 0.0]
    # Slopes ln 2, ln 4, ln(5/4).
    got = _bias("cable", params, x)[0]
    np.testing.assert_allclose(got[2, :2], -np.log([5.0, 1.25]), rtol=1e-6)


def test_constant_slope_is_alibi_and_cable_is_fox_with_its_sign_turned():
    params, x = _inputs()
    slope = np.float32(0.25)
    constant = {
        "kernel": np.zeros((D, N), np.float32),
        "bias": np.full(N, np.log(np.expm1(slope)), np.float32),
    }
    lag = np.arange(T)[:, None] - np.arange(T)
    expected = np.broadcast_to(-0.25 * lag, (B, N, T, T))
    np.testing.assert_allclose(JITTED["cable"](constant, x), expected, atol=1e-6)
    turned = jax.tree.map(lambda p: -p, params)
    fox, cable = JITTED["fox"](turned, x), JITTED["cable"](params, x)
    np.testing.assert_allclose(fox, cable, atol=2e-6)


@pytest.mark.parametrize("name", METHODS)
def test_blocks_equal_the_whole(name):
    params, x = _inputs()
    sums = METHODS[name][0](params, x)
    whole = contextual.accumulated_bias(sums, sums)
    for t in (np.arange(3), np.array([4, 8])):
        for s in (np.arange(5), np.arange(5, 9)):
            queries, keys = (contextual.rows_at(sums, index) for index in (t, s))
            block = contextual.accumulated_bias(queries, keys)
            np.testing.assert_array_equal(block, whole[:, :, t][..., s])
    index = np.array([[0, 4], [8, 1]])
    rows = contextual.rows_at(sums, index)
    for b in range(B):
        np.testing.assert_array_equal(rows.high[b], sums.high[b][index[b]])
        np.testing.assert_array_equal(rows.low[b], sums.low[b][index[b]])


@pytest.mark.parametrize("name", METHODS)
def test_continuing_from_a_cache_equals_the_whole(name):
    params, x = _inputs()
    function = METHODS[name][0]
    whole = JITTED[name](params, x)
    sums = function(params, x[:, :4])
    for t in range(4, T):
        last = jax.tree.map(lambda part: part[:, -1], sums)
        new = function(params, x[:, t : t + 1], last)
        sums = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), sums, new)
    got = contextual.accumulated_bias(sums, sums)
    np.testing.assert_allclose(got, whole, atol=1e-6)


def test_64k_tokens_keep_the_bias_of_close_tokens():
    rng = np.random.default_rng(0)
    steps = np.asarray(jax.nn.log_sigmoid(rng.normal(size=(65_536, 2)).astype("f4")))
    exact = np.cumsum(steps.astype(np.float64), 0)
    assert exact[-1].max() < -50_000
    sums = jax.jit(contextual.running_sum)(steps)
    last = np.arange(65_536 - 32, 65_536)
    rows = contextual.rows_at(sums, last)
    got = contextual.accumulated_bias(rows, rows)
    expected = (exact[last][:, None] - exact[last]).transpose(2, 0, 1)
    np.testing.assert_allclose(got, expected, atol=4e-6)
    # What one float32 would make of it: the exact sum, rounded once.
    rounded = exact.astype(np.float32)[last]
    plain = (rounded[:, None] - rounded).transpose(2, 0, 1)
    assert np.abs(plain - expected).max() > 2e-3
    half = len(steps) // 2
    first = jax.jit(contextual.running_sum)(steps[:half])
    rest = contextual.running_sum(
        steps[half:], jax.tree.map(lambda part: part[-1], first)
    )
    total = np.float64(rest.high[-1]) + np.float64(rest.low[-1])
    np.testing.assert_allclose(total, exact[-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_running_sum_of_any_length(length):
    x = np.random.default_rng(length).normal(size=(2, length, 3)).astype(np.float32)
    sums = contextual.running_sum(x)
    total = np.float64(sums.high) + np.float64(sums.low)
    np.testing.assert_allclose(total, np.cumsum(np.float64(x), 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_bias_depends_on_the_tokens_after_the_key_up_to_the_query(name):
    params, x = _inputs()
    t, s = 6, 2

    def entry(x):
        return jnp.sum(_bias(name, params, x)[:, :, t, s])

    gradient = np.asarray(jax.jit(jax.grad(entry))(x))
    touched = np.abs(gradient).max((0, 2)) > 1e-5
    assert touched.tolist() == [s < u <= t for u in range(T)]
    assert np.abs(gradient[:, [*range(s + 1), *range(t + 1, T)]]).max() < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_gradients_equal_finite_differences(name):
    params, x = _inputs(3)
    weights = np.random.default_rng(4).normal(size=(B, N, T, T)) * SEEN

    @jax.jit
    def gradients(params, x):
        def loss(params, x):
            return jnp.sum(weights.astype(np.float32) * _bias(name, params, x))

        return jax.grad(loss, (0, 1))(params, x)

    in_params, in_x = gradients(params, x)
    exact, exact_x = _exact(params, x)

    def slope_along(change, change_x):
        ends = []
        for sign in (1e-6, -1e-6):
            moved = {k: v + sign * change.get(k, 0.0) for k, v in exact.items()}
            bias = METHODS[name][1](moved, exact_x + sign * change_x)
            ends.append(np.sum(weights * bias))
        return (ends[0] - ends[1]) / 2e-6

    rng = np.random.default_rng(5)
    for key, value in exact.items():
        assert np.isfinite(in_params[key]).all() and (in_params[key] != 0).all()
        along = rng.normal(size=value.shape)
        got = np.sum(in_params[key] * along)
        np.testing.assert_allclose(got, slope_along({key: along}, 0.0), rtol=1e-4)
    along = rng.normal(size=x.shape)
    np.testing.assert_allclose(np.sum(in_x * along), slope_along({}, along), rtol=1e-4)


def test_gradient_through_the_sums_before():
    params, x = _inputs()

    def loss(x, split):
        first = contextual.fox_sums(params, x[:, :split])
        rest = contextual.fox_sums(
            params, x[:, split:], jax.tree.map(lambda part: part[:, -1], first)
        )
        return jnp.sum(jnp.sin(rest.high))

    def whole(x, split):
        return jnp.sum(jnp.sin(contextual.fox_sums(params, x).high[:, split:]))

    gradients = [jax.jit(jax.grad(f), static_argnums=1) for f in (loss, whole)]
    got, expected = (gradient(x, 4) for gradient in gradients)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_attention_block_by_block_equals_attention_with_the_whole_bias():
    params, x = _inputs()
    rng = np.random.default_rng(7)
    query, key, value = (rng.normal(size=(B, T, N, 4)).astype("f4") for _ in range(3))

    def loss(params, implementation):
        sums = contextual.fox_sums(params, x)
        if implementation == "whole":
            bias = contextual.accumulated_bias(sums, sums)
            out = attention(query, key, value, bias=bias, implementation="xla")
        else:

            def bias(t, s):
                return contextual.accumulated_bias(
                    contextual.rows_at(sums, t), contextual.rows_at(sums, s)
                )

            out = attention(query, key, value, bias=bias, implementation="blockwise")
        return jnp.sum(jnp.sin(out))

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (whole, d_whole), (blocks, d_blocks) = grad(params, "whole"), grad(params, "blocks")
    np.testing.assert_allclose(blocks, whole, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(d_blocks[name], d_whole[name], atol=1e-5)


def test_vmap_and_half_precision():
    params, x = _inputs()
    together = JITTED["fox"](params, x)
    mapped = jax.vmap(JITTED["fox"], (None, 0))(params, x)
    np.testing.assert_allclose(mapped, together, atol=1e-6)
    half = jnp.asarray(x, jnp.bfloat16)
    got = JITTED["fox"](params, half)
    assert got.dtype == jnp.float32
    expected = fox_reference(*_exact(params, np.asarray(half, np.float32)))
    np.testing.assert_allclose(np.where(SEEN, got, 0), expected, atol=3e-6)


def test_shard_map_over_the_batch_and_its_gradient():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = _inputs()

    def bias(params, x):
        return _bias("fox", params, x)

    sharded = jax.shard_map(
        bias,
        mesh=mesh,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P("data"),
    )
    results = []
    for function in (sharded, bias):

        def loss(params, function=function):
            return jnp.sum(jnp.cos(function(params, x)))

        results.append(jax.jit(jax.value_and_grad(loss))(params))
    (got, slopes), (expected, whole) = results
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for name in params:
        np.testing.assert_allclose(slopes[name], whole[name], atol=1e-4)


def test_initial_parameters():
    params = contextual.init_fox(jax.random.key(0), 64, 8, bias=5.0)
    assert params["kernel"].shape == (64, 8) and (params["bias"] == 5).all()
    np.testing.assert_allclose(params["kernel"].std(), 0.02, rtol=0.1)
    assert not contextual.init_fox(jax.random.key(0), 64, 8)["bias"].any()
    cable = contextual.init_cable(jax.random.key(1), 64, 8)
    assert not cable["bias"].any()
    assert not np.array_equal(cable["kernel"], params["kernel"])
    leaves = jax.tree.leaves([params, cable])
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)


def test_bad_input_raises_with_its_name():
    params, x = _inputs()
    with pytest.raises(ValueError, match=r"params\['kernel'\] must have.*\(4, any"):
        contextual.fox_sums(params, x[..., :4])
    with pytest.raises(ValueError, match=r"params\['bias'\] must have shape \(3\)"):
        contextual.cable_sums(params | {"bias": jnp.zeros(2)}, x)
    with pytest.raises(ValueError, match=r"x must be \[..., T, N\], got shape \(3,\)"):
        contextual.running_sum(jnp.zeros(3))
    with pytest.raises(ValueError, match="index must be integers, got dtype float32"):
        contextual.rows_at(contextual.fox_sums(params, x), jnp.zeros(2))
