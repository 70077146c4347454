"""Every implementation of attention against one float64 reference, with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import attention_cudnn
from rope_jax.functional.alibi import AlibiBias
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


rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def by_index(num_queries, num_keys, window=None):
    last = np.arange(num_queries)[:, None] + num_keys - num_queries
    lag = last - np.arange(num_keys)
    return (lag >= 0) & (lag < (window or num_keys))


def case(shape, mask, parameter=None, function=None, **arguments):
    return {
        "shape": shape,  # T, S, N, K, H, V
        "mask": mask,  # broadcasts to [B, N, T, S]
        "parameter": parameter,  # the bias, or what a bias function takes
        "function": function,
        "arguments": arguments,
    }


segments = np.sort(rng.integers(0, 4, (2, 150)), axis=-1)
starts = (segments[:, :, None] > segments[:, None, :]).sum(-1)
packed = np.arange(150) - starts
same = segments[:, :, None] == segments[:, None, :]
pair = rng.integers(0, 3, (2, 200)), rng.integers(0, 3, (2, 130))
real = np.arange(150) >= np.array([[40], [150]])
padded = np.maximum(np.cumsum(real, axis=-1) - 1, 0)
odd_ids = np.sort(rng.integers(0, 3, (2, 151)), axis=-1)
odd_real = np.stack([rng.random(151) < 0.7, np.zeros(151, bool)])
per_row = rng.permuted(np.tile(np.arange(200), (2, 1)), axis=-1)
CASES = {
    "plain": case((150, 150, 4, 2, 8, 6), by_index(150, 150)),
    "one_query": case((1, 7, 2, 1, 4, 4), by_index(1, 7)),
    "short": case((7, 7, 3, 3, 4, 4), by_index(7, 7)),
    "offset": case((70, 300, 4, 1, 8, 6), by_index(70, 300), scale=0.5),
    "packed": case(
        (150, 150, 4, 2, 8, 6),
        (same & (packed[:, :, None] >= packed[:, None, :]))[:, None],
        query_positions=packed,
        key_positions=packed,
        segment_ids=segments,
    ),
    "more_queries_than_keys": case(
        (200, 130, 2, 2, 8, 6),
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
    # Ordered by index, as in the decoder. The second row has no real token, and in the
    # first one some queries see no key.
    "masked_segments": case(
        (151, 151, 4, 2, 8, 6),
        (
            by_index(151, 151)
            & (odd_ids[:, :, None] == odd_ids[:, None, :])
            & odd_real[:, None, :]
        )[:, None],
        segment_ids=odd_ids,
        key_mask=odd_real,
    ),
    "window": case((150, 150, 4, 2, 8, 6), by_index(150, 150, 9), window=9),
    # Lengths that are equal only once they are made even.
    "one_more_key": case((199, 200, 2, 1, 8, 6), by_index(199, 200, 140), window=140),
    "alibi": case(
        (150, 300, 4, 2, 8, 6), by_index(150, 300), normal(4) ** 2, AlibiBias
    ),
    # More than one block of any implementation, windowed and cut short.
    "blocks": case(
        (520, 600, 2, 1, 8, 6),
        by_index(520, 600, 50),
        normal(2) ** 2 / 8,
        AlibiBias,
        window=50,
    ),
    "array_bias": case((130, 200, 4, 2, 8, 6), by_index(130, 200), normal(4, 130, 200)),
    "key_bias": case((150, 150, 4, 2, 8, 6), by_index(150, 150), normal(2, 1, 1, 150)),
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
    case = {**case, "parameter": parameter_of(case, dtype)}
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


def parameter_of(case, dtype):
    """A bias array is in the type of the queries, which is all that cuDNN takes."""
    given = case["parameter"]
    is_array = given is not None and case["function"] is None
    return jnp.asarray(given, dtype) if is_array else given


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


BIASES = {None: _array, slope_bias: _slopes, gate_bias: _gates, AlibiBias: _slopes}
STATIC = ("causal", "scale", "window")


@functools.cache
def compiled(name, implementation):
    """Values and gradients of a case as one jitted function."""
    case = CASES[name]

    def run(query, key, value, cotangent, parameter, arguments):
        def call(query, key, value, parameter):
            bias = parameter
            if case["function"] is AlibiBias:
                bias = AlibiBias(parameter)
            elif case["function"]:
                bias = functools.partial(case["function"], parameter)
            static = {k: v for k, v in case["arguments"].items() if k in STATIC}
            return attention(
                query,
                key,
                value,
                bias=bias,
                implementation=implementation,
                **static,
                **arguments,
            )

        out, pull_back = jax.vjp(call, query, key, value, parameter)
        return dict(zip(GRADIENTS, pull_back(cotangent), strict=True), out=out)

    return jax.jit(run)


def measured(name, implementation, dtype=jnp.float32, compiled=compiled):
    case = CASES[name]
    arrays = {k: v for k, v in case["arguments"].items() if k not in STATIC}
    run = compiled(name, implementation)
    return run(*inputs(case["shape"], dtype), parameter_of(case, dtype), arrays)


def assert_near(got, right, tolerance):
    """Largest error within `tolerance` of the largest value, or of 1 if larger."""
    got = np.asarray(got, np.float64)
    assert got.shape == right.shape
    size = max(1.0, np.abs(right).max())
    np.testing.assert_allclose(got, right, rtol=0, atol=tolerance * size)


def assert_all_near(got, right, tolerance):
    for part in ("out", *GRADIENTS):
        if right[part] is not None:
            # Gradients of folded slopes pass through 16 bits themselves.
            slopes = right[part].ndim == 1 and got["out"].dtype == jnp.bfloat16
            assert_near(got[part], right[part], 2.0**-3 if slopes else tolerance)


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_float64(name, implementation):
    assert_all_near(measured(name, implementation), expected(CASES[name]), 1e-5)


@pytest.mark.parametrize("name", ["blocks", "gates"])
def test_large_chunks_are_loops_over_smaller_ones(name, monkeypatch):
    """No more than 4000 logits at once: 22 queries and fewer, and what is left over."""
    monkeypatch.setattr("rope_jax.functional.attention._CHUNK_LOGITS", 4000)
    got = measured(name, "chunked", compiled=compiled.__wrapped__)
    assert_all_near(got, expected(CASES[name]), 1e-5)


@pytest.mark.parametrize(
    "name",
    ["one_query", "more_queries_than_keys", "masked_segments", "alibi", "blocks"],
)
def test_splash_interpreted_matches_float64(name):
    assert_all_near(measured(name, "splash"), expected(CASES[name]), 1e-5)


def test_splash_interpreted_in_bfloat16():
    got = measured("alibi", "splash", jnp.bfloat16)
    right = expected(CASES["alibi"], jnp.bfloat16)
    assert got["out"].dtype == got["query"].dtype == jnp.bfloat16
    # Queries are rounded again with the scale in them, 8**-0.5.
    assert_all_near(got, right, 2.0**-6)


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


# What cuDNN serves: all masks, biases that are arrays, and ALiBi.
CUDNN_CASES = [
    name
    for name, case in CASES.items()
    if case["function"] in (None, AlibiBias) and name != "short"
]


@pytest.fixture
def handed_over(monkeypatch):
    """What `jax.nn` was asked to give cuDNN, computed in float32 by XLA instead."""
    calls = []
    computed = jax.nn.dot_product_attention

    def stand_in(query, key, value, *, bias, implementation, **arguments):
        assert implementation == "cudnn"
        calls.append({"arrays": (query, key, value), "bias": bias, **arguments})
        query_32, key_32, value_32 = (
            x.astype(jnp.float32) for x in (query, key, value)
        )
        bias = None if bias is None else bias.astype(jnp.float32)
        out = computed(query_32, key_32, value_32, bias, **arguments)
        return out.astype(query.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention_cudnn, "_compute_capability", lambda: (8, 0))
    return calls


@pytest.mark.parametrize("name", CUDNN_CASES)
def test_what_cudnn_is_given_is_right_and_within_its_limits(name, handed_over):
    got = measured(name, "cudnn", jnp.bfloat16)
    assert_all_near(got, expected(CASES[name], jnp.bfloat16), 2.0**-7)
    (call,) = handed_over
    (batch, num_queries, heads, width), (_, num_keys, groups, _), _ = (
        x.shape for x in call["arrays"]
    )
    assert heads % groups == 0 and width % 8 == 0 and width <= 128
    assert {x.shape[-1] for x in call["arrays"]} == {width}
    assert {x.dtype for x in call["arrays"]} == {jnp.dtype(jnp.bfloat16)}
    # cuDNN's causal mask begins at the first key, not at the last.
    assert not call["is_causal"] or num_queries == num_keys
    if (bias := call["bias"]) is not None:
        assert bias.dtype == jnp.bfloat16
        assert bias.shape[-2:] == (num_queries, num_keys)
        assert bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
        assert num_queries % 2 == num_keys % 2 == 0


@pytest.mark.skipif(
    jax.default_backend() != "gpu",
    reason="no GPU here; where one is: JAX_PLATFORMS=cuda pytest " + __file__,
)
@pytest.mark.parametrize("name", CUDNN_CASES)
def test_cudnn_on_a_gpu_matches_float64(name):
    got = measured(name, "cudnn", jnp.bfloat16)
    assert got["out"].dtype == jnp.bfloat16
    # It rounds the weights to bfloat16 before they meet the values.
    assert_all_near(got, expected(CASES[name], jnp.bfloat16), 2.0**-6)
