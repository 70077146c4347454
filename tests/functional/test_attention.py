"""Every implementation of attention against one float64 reference, with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax.functional.attention import attention

each_implementation = pytest.mark.parametrize(
    "implementation", ["xla", "chunked", "blockwise"]
)
GRADIENTS = ("query", "key", "value", "bias")


def reference(query, key, value, cotangent, mask, bias, scale):
    """Softmax attention and its gradients, [B, length, heads, width], in float64."""
    query, key, value, cotangent = (
        np.asarray(x, np.float64) for x in (query, key, value, cotangent)
    )
    batch, num_keys, num_groups, _ = key.shape
    group_size = query.shape[2] // num_groups
    keys, values = (np.repeat(x, group_size, axis=2) for x in (key, value))
    logits = scale * np.einsum("btnh,bsnh->bnts", query, keys) + bias
    weights = np.where(mask, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    d_weights = np.einsum("btnv,bsnv->bnts", cotangent, values)
    inner = (weights * d_weights).sum(-1, keepdims=True)
    d_logits = weights * (d_weights - inner)

    def per_group(x):
        return x.reshape(batch, num_keys, num_groups, group_size, -1).sum(3)

    return {
        "out": np.einsum("bnts,bsnv->btnv", weights, values),
        "query": scale * np.einsum("bnts,bsnh->btnh", d_logits, keys),
        "key": per_group(scale * np.einsum("bnts,btnh->bsnh", d_logits, query)),
        "value": per_group(np.einsum("bnts,btnv->bsnv", weights, cotangent)),
        "bias": d_logits,
    }


def slope_bias(slopes, query_positions, key_positions):
    """ALiBi with learned slopes, positions [T] or [B, T]."""
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    distance = jnp.abs(distance)[..., None, :, :].astype(jnp.float32)
    slopes = slopes.reshape((1,) * (distance.ndim - 3) + (-1, 1, 1))
    return -slopes * distance


def gate_bias(gates, query_positions, key_positions):
    """What a forget gate adds: the gates [B, N, T] summed from key to query."""
    sums = jnp.cumsum(gates, axis=-1)
    return sums[..., query_positions, None] - sums[..., None, key_positions]


def cases():
    """Name -> shape (T, S, N, K, H, V), arguments, mask [B, N, T, S], bias."""
    rng = np.random.default_rng(0)

    def by_index(t, s):
        return np.arange(t)[:, None] + s - t >= np.arange(s)

    def case(shape, mask, parameter=None, function=None, **arguments):
        return {
            "shape": shape,
            "mask": mask,
            "parameter": parameter,
            "function": function,
            "arguments": arguments,
        }

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    segments = np.sort(rng.integers(0, 4, (2, 150)), axis=-1)
    starts = (segments[:, :, None] > segments[:, None, :]).sum(-1)
    packed = np.arange(150) - starts
    same = segments[:, :, None] == segments[:, None, :]
    pair = rng.integers(0, 3, (2, 130)), rng.integers(0, 3, (2, 200))
    real = np.arange(150) >= np.array([[40], [150]])
    padded = np.maximum(np.cumsum(real, axis=-1) - 1, 0)
    per_row = rng.permuted(np.tile(np.arange(200), (2, 1)), axis=-1)
    return {
        "plain": case((150, 150, 4, 2, 8, 6), by_index(150, 150)),
        "one_query": case((1, 7, 2, 1, 4, 4), by_index(1, 7)),
        "short": case((7, 7, 3, 3, 4, 4), by_index(7, 7)),
        "offset": case((70, 300, 4, 1, 8, 6), by_index(70, 300), scale=0.5),
        "more_queries": case((150, 9, 2, 2, 8, 6), np.True_, causal=False),
        "packed": case(
            (150, 150, 4, 2, 8, 6),
            (same & (packed[:, :, None] >= packed[:, None, :]))[:, None],
            query_positions=packed,
            key_positions=packed,
            segment_ids=segments,
        ),
        "pair": case(
            (130, 200, 2, 2, 8, 6),
            (pair[0][:, :, None] == pair[1][:, None, :])[:, None],
            causal=False,
            segment_ids=pair,
        ),
        # The second row has no real token at all.
        "left_padded": case(
            (150, 150, 4, 4, 8, 6),
            ((padded[:, :, None] >= padded[:, None, :]) & real[:, None, :])[:, None],
            normal(4) ** 2,
            slope_bias,
            query_positions=padded,
            key_positions=padded,
            key_mask=real,
        ),
        "per_row_keys": case(
            (130, 200, 2, 1, 8, 6),
            (np.arange(40, 170)[:, None] >= per_row[:, None, :])[:, None],
            query_positions=np.arange(40, 170),
            key_positions=per_row,
        ),
        "array_bias": case(
            (130, 200, 4, 2, 8, 6), by_index(130, 200), normal(2, 4, 130, 200)
        ),
        "key_bias": case(
            (150, 150, 4, 2, 8, 6), by_index(150, 150), normal(2, 1, 1, 150)
        ),
        "head_bias": case(
            (130, 130, 4, 2, 8, 6), by_index(130, 130), normal(4, 130, 130)
        ),
        "slopes": case(
            (150, 300, 4, 2, 8, 6), by_index(150, 300), normal(4) ** 2, slope_bias
        ),
        "gates": case(
            (150, 150, 4, 2, 8, 6),
            by_index(150, 150),
            -(normal(2, 4, 150) ** 2),
            gate_bias,
        ),
    }


CASES = cases()


def inputs(shape, dtype=jnp.float32, batch=2):
    num_queries, num_keys, num_heads, num_groups, width, value_width = shape
    rng = np.random.default_rng(1)
    shapes = (
        (batch, num_queries, num_heads, width),
        (batch, num_keys, num_groups, width),
        (batch, num_keys, num_groups, value_width),
        (batch, num_queries, num_heads, value_width),
    )
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)


def expected(case, dtype=jnp.float32):
    """The reference for a case; its bias gradient as that of the case's parameter."""
    query, key, value, cotangent = inputs(case["shape"], dtype)
    batch, num_queries, num_heads, width = query.shape
    num_keys = key.shape[1]
    full = (batch, num_heads, num_queries, num_keys)
    arguments, parameter = case["arguments"], case["parameter"]
    if parameter is None:
        bias, pull_back = np.zeros(full), None
    else:
        rows = arguments.get("query_positions", np.arange(num_keys)[-num_queries:])
        columns = arguments.get("key_positions", np.arange(num_keys))
        bias, pull_back = BIASES[case["function"]](parameter, full, rows, columns)
    mask = np.broadcast_to(case["mask"], full)
    scale = arguments.get("scale", width**-0.5)
    right = reference(query, key, value, cotangent, mask, bias, scale)
    right["bias"] = pull_back(right["bias"]) if pull_back else None
    return right


def _array(parameter, full, rows, columns):
    bias = np.asarray(parameter, np.float64)
    lead = len(full) - bias.ndim
    ones = tuple(lead + i for i, size in enumerate(bias.shape) if size == 1)

    def pull_back(grad):
        summed = grad.sum(ones, keepdims=True).sum(tuple(range(lead)))
        return summed.reshape(bias.shape)

    return np.broadcast_to(bias, full), pull_back


def _slopes(parameter, full, rows, columns):
    distance = np.abs(rows[..., :, None] - columns[..., None, :])
    distance = np.broadcast_to(distance, (full[0], *full[2:]))[:, None]
    bias = -np.asarray(parameter, np.float64)[:, None, None] * distance
    return bias, lambda grad: -(grad * distance).sum((0, 2, 3))


def _gates(parameter, full, rows, columns):
    sums = np.cumsum(np.asarray(parameter, np.float64), axis=-1)

    def pull_back(grad):
        of_sums = grad.sum(3) - grad.sum(2)
        return of_sums[..., ::-1].cumsum(-1)[..., ::-1]

    return sums[..., :, None] - sums[..., None, :], pull_back


BIASES = {None: _array, slope_bias: _slopes, gate_bias: _gates}


@functools.cache
def compiled(name, implementation):
    """Values and gradients of a case as one jitted function."""
    case = CASES[name]

    def run(query, key, value, cotangent, parameter, arguments):
        def call(query, key, value, parameter):
            bias = parameter
            if case["function"]:
                bias = functools.partial(case["function"], parameter)
            return attention(
                query,
                key,
                value,
                bias=bias,
                implementation=implementation,
                causal=case["arguments"].get("causal", True),
                scale=case["arguments"].get("scale"),
                **arguments,
            )

        out, pull_back = jax.vjp(call, query, key, value, parameter)
        return dict(zip(GRADIENTS, pull_back(cotangent), strict=True), out=out)

    return jax.jit(run)


def measured(name, implementation, dtype=jnp.float32):
    case = CASES[name]
    static = ("causal", "scale")
    arrays = {k: v for k, v in case["arguments"].items() if k not in static}
    run = compiled(name, implementation)
    return run(*inputs(case["shape"], dtype), case["parameter"], arrays)


def assert_near(got, right, tolerance):
    """Largest error within `tolerance` of the largest value, or of 1 if larger."""
    got = np.asarray(got, np.float64)
    assert got.shape == right.shape
    size = max(1.0, np.abs(right).max())
    np.testing.assert_allclose(got, right, rtol=0, atol=tolerance * size)


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_float64(name, implementation):
    got, right = measured(name, implementation), expected(CASES[name])
    for part in ("out", *GRADIENTS):
        if right[part] is not None:
            assert_near(got[part], right[part], 1e-5)


@each_implementation
@pytest.mark.parametrize("name", ["plain", "left_padded"])
def test_bfloat16_result_is_rounded_once(name, implementation):
    got = measured(name, implementation, jnp.bfloat16)
    right = expected(CASES[name], jnp.bfloat16)
    assert got["out"].dtype == jnp.bfloat16
    # Half a unit in the last place of 8 bits, and the error of float32 sums.
    np.testing.assert_allclose(
        np.asarray(got["out"], np.float64), right["out"], rtol=2.0**-8, atol=2e-6
    )
    for part in ("query", "key", "value"):
        assert got[part].dtype == jnp.bfloat16
        assert_near(got[part], right[part], 2.0**-7)


@each_implementation
def test_no_batch_axis_and_two_batch_axes(implementation):
    query, key, value, _ = inputs((130, 130, 2, 1, 4, 4), batch=6)
    run = jax.jit(functools.partial(attention, implementation=implementation))
    right = run(query, key, value)
    np.testing.assert_allclose(run(query[5], key[5], value[5]), right[5], atol=1e-6)
    folded = (x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value))
    np.testing.assert_allclose(run(*folded)[1, 2], right[5], atol=1e-6)


@each_implementation
def test_vmap_over_everything_a_bias_closes_over(implementation):
    query, key, value, _ = inputs((130, 130, 2, 1, 4, 4), batch=3)
    slopes = jnp.asarray([[0.5, 0.25], [1.0, 2.0], [0.0, 0.1]])
    positions = jnp.arange(130)[None] * jnp.array([[1], [2], [3]])

    @functools.partial(jax.value_and_grad, argnums=(0, 4))
    def one(query, key, value, positions, slopes):
        out = attention(
            query,
            key,
            value,
            query_positions=positions,
            key_positions=positions,
            bias=functools.partial(slope_bias, slopes),
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(out))

    together = jax.jit(jax.vmap(one))(query, key, value, positions, slopes)
    arguments = query[2], key[2], value[2], positions[2], slopes[2]
    for got, right in zip(
        jax.tree.leaves(together),
        jax.tree.leaves(jax.jit(one)(*arguments)),
        strict=True,
    ):
        np.testing.assert_allclose(got[2], right, atol=2e-5)


@each_implementation
def test_traced_positions_compile_once(implementation):
    query, key, value, _ = inputs((5, 140, 2, 1, 4, 4))
    traces = []

    @jax.jit
    def run(offset):
        traces.append(offset)
        return attention(
            query,
            key,
            value,
            query_positions=jnp.arange(5) + offset,
            implementation=implementation,
        )

    for offset in (0, 3, 135):
        right = attention(query, key[:, : offset + 5], value[:, : offset + 5])
        np.testing.assert_allclose(run(offset), right, atol=1e-6)
    assert len(traces) == 1


@each_implementation
def test_bias_function_closes_over_traced_positions_in_a_scan(implementation):
    """Layers are scanned and rematerialised, and the bias knows the real positions."""
    query, key, value, _ = inputs((130, 130, 2, 2, 4, 4))
    positions = jnp.arange(130) % 50
    segments = jnp.arange(130) // 50
    slopes = jnp.asarray([[0.5, 0.1], [0.2, 0.3]])

    def loss(slopes, positions, segments):
        def bias(slopes, rows, columns):
            return slope_bias(slopes, positions[rows], positions[columns])

        def layer(x, slopes):
            return x + attention(
                x,
                key,
                value,
                bias=functools.partial(bias, slopes),
                segment_ids=segments,
                implementation=implementation,
            )

        layer = jax.checkpoint(layer)
        out, _ = jax.lax.scan(lambda x, s: (layer(x, s), None), query, slopes)
        return jnp.sum(out**2)

    def plain(slopes, query):
        for layer in slopes:
            bias = slope_bias(layer, positions, positions)
            query = query + attention(
                query, key, value, bias=bias, segment_ids=segments, implementation="xla"
            )
        return jnp.sum(query**2)

    grad = jax.jit(jax.grad(loss))
    right = jax.jit(jax.grad(plain))(slopes, query)
    np.testing.assert_allclose(grad(slopes, positions, segments), right, rtol=2e-5)


@each_implementation
def test_shard_map_adds_up_the_gradient_of_a_replicated_table(implementation):
    query, key, value, cotangent = inputs((130, 130, 2, 1, 4, 4), batch=4)
    segments = jnp.tile(jnp.arange(130) // 70, (4, 1))
    slopes = jnp.asarray([0.5, 0.1])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(slopes, query, key, value, segments):
        return attention(
            query,
            key,
            value,
            bias=functools.partial(slope_bias, slopes),
            segment_ids=segments,
            implementation=implementation,
        )

    data = P("data")
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), data, data, data, data), out_specs=data
    )

    def grads(function):
        def loss(slopes, query):
            return jnp.vdot(function(slopes, query, key, value, segments), cotangent)

        return jax.jit(jax.grad(loss, (0, 1)))(slopes, query)

    for got, right in zip(grads(sharded), grads(run), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-5, atol=1e-6)


@each_implementation
def test_no_gradient_reaches_a_later_token(implementation):
    query, key, value, _ = inputs((200, 200, 2, 1, 4, 4))

    def loss(key, value):
        return jnp.sum(
            attention(query, key, value, implementation=implementation)[:, :133]
        )

    for grad in jax.jit(jax.grad(loss, (0, 1)))(key, value):
        assert np.all(np.asarray(grad[:, 133:]) == 0)
        assert np.all(np.abs(np.asarray(grad[:, :133])).sum((0, 2, 3)) > 0)


def test_chunked_leaves_out_the_masked_triangle():
    query, key, value, _ = inputs((512, 512, 2, 2, 64, 64))

    def flops(implementation):
        run = jax.jit(functools.partial(attention, implementation=implementation))
        return run.lower(query, key, value).compile().cost_analysis()["flops"]

    # Four chunks compute 1/4, 2/4, 3/4 and 4/4 of their rows: 10/16 of the whole.
    assert flops("chunked") < 0.65 * flops("xla")


ONES = jnp.ones((2, 5, 4, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": jnp.ones((5, 8))}, r"query .*\[5, 8\]"),
        ({"query": jnp.ones((2, 5, 3, 8))}, r"key .*\[2, 5, 3, 8\]"),
        ({"query": jnp.ones((3, 5, 4, 8))}, r"key .*leading axes.*\[2, 5, 4, 8\]"),
        ({"query": jnp.ones((2, 0, 4, 8))}, r"query .*empty.*\[2, 0, 4, 8\]"),
        ({"query": jnp.ones((2, 5, 4, 8), int)}, "query .*int32"),
        ({"key": jnp.ones((2, 5, 4, 8), jnp.bfloat16)}, "key .*float32.*bfloat16"),
        ({"key": jnp.ones((2, 5, 4, 6))}, r"key .*head dim.*\[2, 5, 4, 6\]"),
        ({"value": jnp.ones((2, 4, 4, 8))}, r"value .*\[2, 4, 4, 8\]"),
        ({"value": jnp.ones((2, 5, 2, 8))}, r"value .*\[2, 5, 2, 8\]"),
        ({"query": jnp.ones((2, 6, 4, 8))}, "query_positions .*6 queries and 5 keys"),
        ({"query_positions": jnp.arange(4)}, r"query_positions .*\[5\].*\[4\]"),
        ({"query_positions": jnp.ones((3, 5), int)}, r"query_positions .*\[3, 5\]"),
        ({"key_positions": jnp.arange(5.0)}, "key_positions .*float32"),
        ({"segment_ids": jnp.ones((2, 4), int)}, r"segment_ids .*\[2, 4\]"),
        ({"segment_ids": (jnp.ones(5, int),) * 3}, "segment_ids .*3"),
        ({"key_mask": jnp.ones((2, 5), int)}, "key_mask .*int32"),
        ({"key_mask": jnp.ones((2, 6), bool)}, r"key_mask .*\[2, 6\]"),
        ({"bias": jnp.ones((3, 5, 5))}, r"bias .*\[2, 4, 5, 5\].*\[3, 5, 5\]"),
        ({"bias": jnp.ones((1, 2, 4, 5, 5))}, r"bias .*\[1, 2, 4, 5, 5\]"),
        ({"bias": jnp.ones((5, 5), bool)}, "bias .*bool.*key_mask"),
        ({"bias": lambda i, j: jnp.ones((4, 5))}, r"bias function .*\[4, 5\]"),
        ({"scale": float("nan")}, "scale .*nan"),
        ({"scale": jnp.ones(())}, "scale .*multiply query"),
        ({"implementation": "flash"}, "auto, xla, chunked, blockwise; got 'flash'"),
    ],
)
def test_wrong_input_is_named(change, message):
    arguments = {"query": ONES, "key": ONES, "value": ONES} | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: attention(**arguments))


def test_one_segment_array_for_two_lengths_is_refused():
    with pytest.raises(ValueError, match=r"segment_ids must be a pair.*2 queries"):
        attention(ONES[:, :2], ONES, ONES, segment_ids=jnp.ones((2, 2), int))
