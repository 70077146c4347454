"""Linear attention as it is used: decoding, transforms, long rows, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax.functional import frequencies
from rope_jax.functional.feature_maps import (
    Features,
    elu_plus_one,
    favor_projection,
    favor_relu,
    favor_softmax,
)
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.linear_attention import (
    init_linear_state,
    linear_attention,
    linear_attention_step,
)

SOFTMAX = favor_softmax(favor_projection(jax.random.key(3), 8, 16))
LADDER = frequencies.default(16)


def inputs(length, batch=(2,), num_heads=2, width=8):
    rng = np.random.default_rng(2)
    shape = (*batch, length, num_heads, width)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3))


@functools.partial(jax.jit, static_argnames=("causal", "chunk_size"))
def rotated(query, key, value, segments=None, *, causal=True, chunk_size=8):
    return linear_attention(
        query,
        key,
        value,
        feature_map=SOFTMAX,
        frequencies=LADDER,
        segment_ids=segments,
        causal=causal,
        chunk_size=chunk_size,
    )


def test_prompt_then_tokens_give_what_the_whole_row_gives():
    """The state is filled from a prompt, then one token at a time; segments go on."""
    query, key, value = inputs(30)
    segments = jnp.repeat(jnp.array([5, 0, 5]), jnp.array([12, 10, 8]))
    right = rotated(query, key, value, segments)

    @jax.jit
    def step(state, positions, segments, *arrays):
        return linear_attention_step(
            state,
            *arrays,
            feature_map=SOFTMAX,
            positions=positions,
            frequencies=LADDER,
            segment_ids=segments,
            chunk_size=8,
        )

    state = init_linear_state((2,), num_heads=2, num_features=16, value_dim=8)
    sizes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    out = []
    for start, stop in [(0, 25), *((t, t + 1) for t in range(25, 30))]:
        arrays = (x[:, start:stop] for x in (query, key, value))
        part, state = step(
            state, jnp.arange(start, stop), segments[start:stop], *arrays
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == sizes
        out.append(part)
    np.testing.assert_allclose(jnp.concatenate(out, axis=1), right, atol=1e-5)
    assert state.segment.tolist() == [5, 5]


PROMPT = slice(0, 4), slice(4, 6)


def test_a_step_without_segment_ids_carries_on_the_segment():
    query, key, value = inputs(6)
    state = init_linear_state((2,), num_heads=2, num_features=8, value_dim=8)
    step = jax.jit(functools.partial(linear_attention_step, feature_map=elu_plus_one))
    first, rest = ([x[:, part] for x in (query, key, value)] for part in PROMPT)
    _, state = step(state, *first, segment_ids=jnp.full(4, 7))
    out, state = step(state, *rest)
    whole = jax.jit(functools.partial(linear_attention, feature_map=elu_plus_one))
    right = whole(query, key, value)
    np.testing.assert_allclose(out, right[:, 4:], atol=1e-6)
    assert state.segment.tolist() == [7, 7]


@pytest.mark.parametrize("factor", [1.0, 300.0])
def test_later_tokens_and_other_segments_change_no_bit(factor):
    """Not even through the stabiliser: the later keys are far larger or smaller."""
    query, key, value = inputs(30)
    right = rotated(query, key, value)
    changed = [x.at[:, 13:].multiply(-factor) for x in (query, key, value)]
    np.testing.assert_array_equal(rotated(*changed)[:, :13], right[:, :13])
    shrunk = [x.at[:, 13:].multiply(0) for x in (query, key * 50, value)]
    large = rotated(query, key * 50, value)
    np.testing.assert_array_equal(rotated(*shrunk)[:, :13], large[:, :13])
    segments = jnp.arange(30) // 13
    packed = rotated(query, key, value, segments)
    other = [x.at[:, :13].multiply(-factor) for x in (query, key, value)]
    np.testing.assert_array_equal(rotated(*other, segments)[:, 13:26], packed[:, 13:26])


def test_packed_rows_are_the_rows_apart():
    query, key, value = inputs(30)
    segments = jnp.arange(30) // 13
    for causal in (True, False):
        packed = rotated(query, key, value, segments, causal=causal)
        apart = rotated(*(x[:, 13:26] for x in (query, key, value)), causal=causal)
        np.testing.assert_allclose(packed[:, 13:26], apart, atol=1e-5)


def test_the_chunk_size_changes_nothing():
    query, key, value = inputs(30)
    right = rotated(query, key, value)
    for chunk_size in (1, 7, 30, 1000):
        got = rotated(query, key, value, chunk_size=chunk_size)
        np.testing.assert_allclose(got, right, atol=1e-5)


def test_layouts_agree_on_permuted_features():
    """Half and interleaved pair other features; permuted projections undo that.

    A map may give the size of queries too: it cancels.
    """
    query, key, value = inputs(20)
    order = np.arange(16).reshape(2, 8).T.ravel()
    pairs = jnp.asarray(SOFTMAX.projection)[order]
    interleaved = functools.partial(
        linear_attention,
        feature_map=lambda x, is_query: favor_softmax(pairs)(x, False),
        frequencies=LADDER,
        layout="interleaved",
    )
    got = jax.jit(interleaved)(query, key, value)
    np.testing.assert_allclose(got, rotated(query, key, value), atol=1e-5)


def test_no_batch_axis_and_two_batch_axes():
    query, key, value = inputs(20, (6,))
    right = rotated(query, key, value)
    np.testing.assert_allclose(rotated(query[5], key[5], value[5]), right[5], atol=1e-6)
    folded = (x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value))
    np.testing.assert_allclose(rotated(*folded)[1, 2], right[5], atol=1e-6)


def test_vmap_over_projections_positions_and_masks():
    query, key, value = inputs(20, (3,))
    draw = functools.partial(favor_projection, head_dim=8, num_features=16)
    projections = jax.vmap(draw)(jax.random.split(jax.random.key(0), 3))
    positions = jnp.asarray(np.arange(20) * [[1], [3], [50]])
    masks = jnp.asarray(np.arange(20) != [[0], [5], [9]])

    @jax.value_and_grad
    def one(query, key, value, projection, positions, mask):
        out = linear_attention(
            query,
            key,
            value,
            feature_map=favor_softmax(projection),
            query_positions=positions,
            key_positions=positions,
            frequencies=LADDER,
            key_mask=mask,
            chunk_size=8,
        )
        return jnp.sum(jnp.sin(out))

    arguments = query, key, value, projections, positions, masks
    together = jax.jit(jax.vmap(one))(*arguments)
    alone = jax.jit(one)(*(x[2] for x in arguments))
    for got, right in zip(together, alone, strict=True):
        np.testing.assert_allclose(got[2], right, atol=2e-5)


def test_one_compilation_serves_all_offsets_and_projections():
    query, key, value = inputs(20)
    traces = []

    @jax.jit
    def run(offset, feature_map):
        traces.append(offset)
        positions = jnp.arange(20) + offset
        return linear_attention(
            query,
            key,
            value,
            feature_map=feature_map,
            query_positions=positions,
            key_positions=positions,
            frequencies=LADDER,
            chunk_size=8,
        )

    right = rotated(query, key, value)
    for offset in (0, 17, 2_000_000_000):
        # The result depends on distances of positions alone.
        np.testing.assert_allclose(run(offset, SOFTMAX), right, atol=1e-5)
    redrawn = favor_softmax(favor_projection(jax.random.key(4), 8, 16))
    assert not np.allclose(run(0, redrawn), right, atol=1e-2)
    assert len(traces) == 1


def test_shard_map_over_rows_equals_the_whole():
    query, key, value = inputs(20, (4,))
    segments = jnp.asarray(np.arange(20) // [[7], [20], [5], [9]])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = P("data")
    sharded = jax.shard_map(rotated, mesh=mesh, in_specs=(data,) * 4, out_specs=data)

    def gradients(function):
        def loss(query, key):
            return jnp.sum(jnp.sin(function(query, key, value, segments)))

        return jax.jit(jax.grad(loss, (0, 1)))(query, key)

    for got, right in zip(gradients(sharded), gradients(rotated), strict=True):
        np.testing.assert_allclose(got, right, atol=2e-5)


MAPS = {
    "softmax": SOFTMAX,
    "relu": favor_relu(SOFTMAX.projection),
    "elu": elu_plus_one,
}


def adversarial():
    """Queries and keys [1, 24, 1, 8] that break a naive quotient."""
    rng = np.random.default_rng(3)
    query, key = rng.standard_normal((2, 1, 24, 1, 8))
    one_large = np.where(np.arange(24)[:, None, None] == 11, 1e6, 1.0)
    return {
        "large": (1e4 * query, 1e4 * key),
        "larger than a square can be": (1e30 * query, 1e30 * key),
        "the largest": (3e38 * np.sign(query), 3e38 * np.sign(key)),
        "opposite": (100 * query, -100 * query),
        "one large key": (query, key * one_large),
        "one small key": (query, 1e4 * key / one_large),
        "zero": (0 * query, 0 * key),
        "tiny": (1e-30 * query, 1e-30 * key),
        "all negative": (-1e3 * abs(query), -1e3 * abs(key)),
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in MAPS] + [("softmax", "bfloat16")],
)
def test_adversarial_inputs_give_finite_values_and_gradients(name, dtype):
    value = jnp.asarray(np.random.default_rng(4).standard_normal((1, 24, 1, 8)), dtype)
    # Segments of one, one, five and seventeen tokens.
    segments = jnp.repeat(jnp.arange(4), jnp.array([1, 1, 5, 17]))
    width = 8 if name == "elu" else 16

    @jax.jit
    def run(query, key):
        def call(query, key, value):
            return linear_attention(
                query,
                key,
                value,
                feature_map=MAPS[name],
                frequencies=frequencies.default(width),
                segment_ids=segments,
                chunk_size=8,
            )

        out, pull_back = jax.vjp(call, query, key, value)
        return out, pull_back(jnp.ones_like(out))

    for label, pair in adversarial().items():
        out, gradients = run(*(jnp.asarray(x, dtype) for x in pair))
        for array in (out, *gradients):
            assert jnp.isfinite(array).all(), label
        # A token alone in its segment sees itself with weight 1. Where queries and keys
        # share no large feature, both products are near epsilon, and rounding counts.
        tolerance = 1e-2 if dtype == "bfloat16" or label == "opposite" else 1e-4
        np.testing.assert_allclose(
            *(np.asarray(x[:, :2], np.float32) for x in (out, value)),
            rtol=tolerance,
            atol=tolerance,
            err_msg=label,
        )


def test_products_are_in_full_float32_on_every_device():
    """Accelerators multiply float32 matrices in 16 bits or TF32 unless told not to."""
    arrays = inputs(20)
    grad = jax.grad(lambda *x: rotated(*x).sum(), (0, 1, 2))
    text = str(jax.make_jaxpr(grad)(*arrays))
    count = text.count("dot_general[")
    assert count > 10
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == count


def test_memory_is_linear_at_131072_tokens():
    """Compiled sizes: a T x M x H array would take 4 GiB, a T x T one 256 GiB."""

    def temporary(length, run):
        shape = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)
        compiled = jax.jit(run).lower(shape, shape, shape).compile()
        sizes = compiled.memory_analysis()
        return sizes.temp_size_in_bytes + sizes.output_size_in_bytes

    def run(query, key, value):
        projection = favor_projection(jax.random.key(0), 32, 64)
        return linear_attention(
            query,
            key,
            value,
            feature_map=favor_softmax(projection),
            frequencies=frequencies.default(64),
        )

    def gradient(*arrays):
        return jax.grad(lambda *x: run(*x).sum(), (0, 1, 2))(*arrays)

    at_131072 = temporary(131_072, run)
    assert at_131072 < 512 * 2**20
    assert at_131072 < 1.1 * 16 * temporary(8192, run)
    assert temporary(131_072, gradient) < 2 * 2**30


BAD = {
    "query must be no longer than key": {"query": jnp.ones((5, 2, 8))},
    "key must have the head dim": {"key": jnp.ones((4, 2, 6))},
    "key must be floating point": {"key": jnp.ones((4, 2, 8), jnp.bfloat16)},
    "value must have the length": {"value": jnp.ones((3, 2, 8))},
    "feature_map must be a function, got 'elu'": {"feature_map": "elu"},
    "feature_map must give floating point features": {
        "feature_map": lambda x, is_query: x[..., 0]
    },
    "feature_map must give queries and keys as many features, got 8 and 4": {
        "feature_map": lambda x, is_query: jnp.exp(x if is_query else x[..., :4])
    },
    "feature_map must give a log_scale of shape": {
        "feature_map": lambda x, is_query: Features(jnp.exp(x), x)
    },
    "frequencies must be a Frequencies": {"frequencies": jnp.ones(4)},
    "at most the number of features, 8, got a rotary width of 16": {
        "frequencies": LADDER
    },
    "attention factor of 1.*got 1.5": {"frequencies": Frequencies([1.0], 1.5)},
    "query_positions is read by the rotation alone": {"query_positions": jnp.arange(4)},
    "key_positions is read by the rotation alone": {"key_positions": jnp.arange(4)},
    r"query_positions must be \[T\]": {
        "query_positions": jnp.arange(5),
        "frequencies": frequencies.default(8),
    },
    "layout must be": {"layout": "halves"},
    "segment_ids must be of integral type": {"segment_ids": jnp.ones(4)},
    r"segment_ids must be \[4\]": {"segment_ids": jnp.arange(5)},
    "segment_ids must be one array": {"segment_ids": (jnp.arange(4), jnp.arange(4))},
    "segment_ids needs as many queries as keys": {
        "segment_ids": jnp.arange(4),
        "query": jnp.ones((2, 2, 8)),
        "causal": False,
    },
    "key_mask must be of bool type": {"key_mask": jnp.arange(4)},
    "chunk_size must be at least 1, got 0": {"chunk_size": 0},
    "chunk_size must be an integer or None, got 2.0": {"chunk_size": 2.0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    x = jnp.ones((4, 2, 8))
    arguments = {"query": x, "key": x, "value": x, "feature_map": elu_plus_one}
    with pytest.raises(ValueError, match=message):
        linear_attention(**arguments | BAD[message])


BAD_STEPS = {
    "state must be a LinearState": {"state": None},
    r"state.mixed must be float32 \[1, 8, 8\]": {
        "state": init_linear_state(num_heads=1, num_features=16, value_dim=8)
    },
    "state.mixed must be float32": {
        "state": init_linear_state(
            num_heads=1, num_features=8, value_dim=8, dtype=jnp.bfloat16
        )
    },
    "positions is needed with frequencies": {"frequencies": frequencies.default(8)},
    "positions is read by the rotation alone": {"positions": jnp.arange(1)},
    "key must be as long as query in a step": {"query": jnp.ones((2, 1, 8))},
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_bad_steps_are_named(message):
    x = jnp.ones((1, 1, 8))
    arguments = {
        "state": init_linear_state(num_heads=1, num_features=8, value_dim=8),
        "query": x,
        "key": x,
        "value": x,
        "feature_map": elu_plus_one,
    }
    with pytest.raises(ValueError, match=message):
        linear_attention_step(**arguments | BAD_STEPS[message])


def test_an_empty_size_is_named():
    with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
        init_linear_state(num_heads=1, num_features=0, value_dim=1)
