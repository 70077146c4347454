"""ALiBi slopes and bias: cases A01-A12 that concern them, exactness, and forms."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from rope_jax.functional.alibi import AlibiBias, alibi_bias, alibi_slopes
from rope_jax.functional.attention import attention
from rope_jax.functional.positions import positions_from_mask

POWERS = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
SIX = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
# 2 ** (-1 / 2) and its successors, which a bias for 12 heads interleaves.
HALVES = [
    0.7071067811865476,
    0.3535533905932738,
    0.1767766952966369,
    0.0883883476483184,
]

BAD_HEADS = [0, -1, 2.5, 8.0, True, "8", None]


def recursive_slopes(num_heads):
    """The rule as the paper's code has it: a recursion over geometric sequences."""
    if math.log2(num_heads).is_integer():
        first = 2 ** -(2 ** -(math.log2(num_heads) - 3))
        return [first * first**i for i in range(num_heads)]
    below = 2 ** math.floor(math.log2(num_heads))
    return (
        recursive_slopes(below) + recursive_slopes(2 * below)[0::2][: num_heads - below]
    )


def bias64(slopes, query_positions, key_positions):
    """The bias in float64, from Python integers."""
    distance = np.abs(
        np.array(query_positions, object)[:, None] - np.array(key_positions, object)
    )
    return -np.float64(slopes)[:, None, None] * distance.astype(np.float64)


def softmax64(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_a01_first_head_of_eight_has_slope_half():
    slopes = alibi_slopes(8)
    assert slopes.dtype == np.float32 and isinstance(slopes, np.ndarray)
    assert slopes.tolist() == POWERS


def test_a02_head_counts_that_are_no_power_of_two_keep_the_original_order():
    assert alibi_slopes(6).tolist() == SIX
    twelve = alibi_slopes(12)
    assert twelve[:8].tolist() == POWERS
    np.testing.assert_allclose(twelve[8:], HALVES, rtol=6e-8, atol=0)


def test_a02_every_head_count_up_to_128_agrees_with_the_recursion():
    for num_heads in range(1, 129):
        expected = np.array(recursive_slopes(num_heads))
        slopes = alibi_slopes(num_heads)
        assert slopes.shape == (num_heads,)
        # The recursion rounds each product: one float32 unit at the most.
        np.testing.assert_allclose(slopes, expected, rtol=2**-23, atol=0)


@pytest.mark.parametrize("num_heads", BAD_HEADS)
def test_slopes_of_a_bad_head_count_raise(num_heads):
    with pytest.raises(ValueError, match="num_heads"):
        alibi_slopes(num_heads)


def test_slopes_take_numpy_integers():
    assert alibi_slopes(np.int32(6)).tolist() == SIX


def test_a03_full_bias_and_the_weights_it_gives():
    positions = jnp.arange(4)
    bias = np.asarray(alibi_bias(np.float32([0.5]), positions, positions))
    assert bias.shape == (1, 4, 4)
    row, column = np.tril_indices(4)
    assert (bias[0][row, column] == -0.5 * (row - column)).all()
    last = softmax64(np.float64(bias[0, 3]))
    np.testing.assert_allclose(
        last, [0.101536324, 0.167405097, 0.276004345, 0.455054234], atol=1e-9
    )
    # The shortcut: one row of slope * key position, by shift invariance of softmax.
    shortcut = softmax64(0.5 * np.arange(4))
    np.testing.assert_allclose(shortcut, last, atol=1e-6)


def test_a03_attention_gives_the_same_weights():
    zeros, value = jnp.zeros((4, 1, 8)), jnp.eye(4)[:, None, :]
    bias = functools.partial(alibi_bias, np.float32([0.5]))
    weights = attention(zeros, zeros, value, bias=bias)[-1, 0]
    np.testing.assert_allclose(
        weights, [0.101536324, 0.167405097, 0.276004345, 0.455054234], atol=1e-6
    )


def test_a05_every_device_uses_its_own_part_of_the_slopes():
    mesh = jax.make_mesh((4,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:4])
    heads = PartitionSpec("tensor")
    positions = jnp.arange(6)

    @jax.shard_map(
        mesh=mesh,
        in_specs=(heads, PartitionSpec(), PartitionSpec()),
        out_specs=(heads, heads),
    )
    def per_device(slopes, query_positions, key_positions):
        return slopes[None], alibi_bias(slopes, query_positions, key_positions)

    slopes, bias = jax.jit(per_device)(alibi_slopes(8), positions, positions)
    assert slopes.tolist() == [
        [0.5, 0.25],
        [0.125, 0.0625],
        [0.03125, 0.015625],
        [0.0078125, 0.00390625],
    ]
    np.testing.assert_array_equal(
        bias, alibi_bias(alibi_slopes(8), positions, positions)
    )


def test_a06_nearest_keys_do_not_tie_in_bfloat16():
    length = 4096
    query = jnp.zeros((1, 1, 8), jnp.bfloat16)
    key = jnp.zeros((length, 1, 8), jnp.bfloat16)
    value = jnp.zeros((length, 1, 3), jnp.bfloat16)
    value = value.at[-3:, 0].set(jnp.eye(3, dtype=jnp.bfloat16))
    bias = functools.partial(alibi_bias, jnp.bfloat16([0.5]))
    weights = attention(query, key, value, bias=bias)
    assert weights.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.float32(weights[0, 0]), [0.144749281, 0.238651219, 0.393469340], atol=1e-3
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a06_bias_is_float32_whatever_the_slopes_are(dtype):
    positions = jnp.arange(4090, 4096)
    bias = alibi_bias(jnp.asarray(POWERS, dtype), positions, jnp.arange(4096))
    assert bias.dtype == jnp.float32
    expected = bias64(POWERS, range(4090, 4096), range(4096))
    np.testing.assert_array_equal(bias, expected)


def test_a07_left_padding_changes_no_weight():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(5, 4, 8)), jnp.float32) for _ in range(3)
    )
    mask = jnp.array([0, 0, 1, 1, 1])
    bias = functools.partial(alibi_bias, alibi_slopes(4))
    bare = jax.jit(functools.partial(attention, bias=bias))(
        query[2:], key[2:], value[2:]
    )

    @jax.jit
    def padded(key, value):
        positions = positions_from_mask(mask)
        return attention(
            query,
            key,
            value,
            query_positions=positions,
            key_positions=positions,
            key_mask=mask != 0,
            bias=bias,
        )[2:]

    np.testing.assert_allclose(padded(key, value), bare, atol=1e-5)
    # A weight of exactly 0: no content of the padding can change a bit.
    noise = jnp.float32([1e4, -1e4, 0, 0, 0])[:, None, None]
    np.testing.assert_array_equal(
        padded(key + noise, value + noise), padded(key, value)
    )


def test_a08_two_queries_at_the_end_of_five_keys():
    bias = alibi_bias(np.float32([0.25]), jnp.array([3, 4]), jnp.arange(5))
    assert bias[0, 0, :4].tolist() == [-0.75, -0.5, -0.25, 0]
    assert bias[0, 1].tolist() == [-1, -0.75, -0.5, -0.25, 0]
    bias = alibi_bias(
        np.float32([0.25]), jnp.array([3, 4]), jnp.arange(5), form="causal"
    )
    assert bias.tolist() == [
        [[-0.75, -0.5, -0.25, 0, -math.inf], [-1, -0.75, -0.5, -0.25, 0]]
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("form", ["symmetric", "causal", "split_heads"])
def test_a10_bias_on_a_masked_key_makes_no_nan(dtype, form):
    zeros, value = jnp.zeros((4, 2, 8), dtype), jnp.eye(4, dtype=dtype)[:, None, :]
    bias = functools.partial(alibi_bias, np.float32([0.5, 0.5]), form=form)
    weights = attention(
        zeros,
        zeros,
        jnp.broadcast_to(value, (4, 2, 4)),
        key_mask=jnp.array([False, True, True, True]),
        bias=bias,
    )
    weights = np.float64(weights)
    last = [0, *softmax64(np.array([-1, -0.5, 0]))]
    np.testing.assert_allclose(weights[3, 0], last, atol=2**-8, rtol=0)
    assert (weights[:, :, 0] == 0).all()
    assert (np.triu(weights[:, 0], 1) == 0).all()
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a10_bias_added_to_a_mask_of_the_smallest_number_stays_finite(dtype):
    bias = alibi_bias(alibi_slopes(8), jnp.array([0, 131_071]), jnp.arange(8))
    smallest = jnp.full((8, 2, 8), jnp.finfo(dtype).min, dtype)
    assert np.isfinite(np.float32(bias.astype(dtype) + smallest)).all()


def test_a12_calls_in_any_order_give_the_result_of_a_fresh_one():
    calls = [(8, 4), (16, 6), (8, 4)]
    expected = {
        (8, 4): bias64([0.25, 0.0625, 0.015625, 0.00390625], range(8), range(8)),
        (16, 6): bias64(SIX, range(16), range(16)),
    }
    for dtype in (jnp.float32, jnp.bfloat16):
        for length, num_heads in calls:
            positions = jnp.arange(length)
            slopes = jnp.asarray(alibi_slopes(num_heads), dtype)
            bias = alibi_bias(slopes, positions, positions)
            np.testing.assert_array_equal(bias, expected[length, num_heads])


@pytest.mark.parametrize("offset", [0, 2**24 + 1, 2**30, 2**31 - 8, -(2**31)])
def test_bias_is_exact_at_any_offset(offset):
    positions = jnp.asarray(np.arange(8) + offset, jnp.int32)
    bias = alibi_bias(alibi_slopes(12), positions, positions)
    expected = alibi_bias(alibi_slopes(12), jnp.arange(8), jnp.arange(8))
    np.testing.assert_array_equal(bias, expected)


def test_bias_is_right_over_the_whole_range_of_int32():
    query, key = [2**31 - 1, 0, -5], [-(2**31), -1, 2**31 - 1]
    bias = alibi_bias(
        np.float32([1.0]), jnp.array(query, jnp.int32), jnp.array(key, jnp.int32)
    )
    expected = bias64([1.0], query, key)
    np.testing.assert_allclose(bias, expected, rtol=2**-24)
    assert bias[0, 0, 0] == -(2.0**32)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
def test_positions_may_be_of_any_integer_type(dtype):
    positions = jnp.arange(100, dtype=dtype)
    bias = alibi_bias(np.float32([0.5]), positions[:3], positions)
    np.testing.assert_array_equal(bias, bias64([0.5], range(3), range(100)))


def test_leading_axes_of_positions_broadcast():
    query = jnp.array([[0, 1], [5, 9]])
    bias = alibi_bias(alibi_slopes(4), query, jnp.arange(3))
    assert bias.shape == (2, 4, 2, 3)
    for row in range(2):
        expected = alibi_bias(alibi_slopes(4), query[row], jnp.arange(3))
        np.testing.assert_array_equal(bias[row], expected)
    mapped = jax.vmap(alibi_bias, in_axes=(None, 0, None))(
        alibi_slopes(4), query, jnp.arange(3)
    )
    np.testing.assert_array_equal(mapped, bias)


def test_r28_one_compilation_serves_all_offsets():
    traces = 0

    @jax.jit
    def bias_at(offset):
        nonlocal traces
        traces += 1
        query = offset + jnp.arange(2)
        return alibi_bias(alibi_slopes(8), query, jnp.arange(10))

    for offset in range(10):
        expected = bias64(POWERS, range(offset, offset + 2), range(10))
        np.testing.assert_array_equal(bias_at(offset), expected)
    assert traces == 1


def test_gradient_reaches_the_slopes():
    positions = jnp.arange(5)
    for form, total in (("symmetric", -40.0), ("causal", -20.0)):

        def loss(slopes, form=form):
            bias = alibi_bias(slopes, positions, positions, form=form)
            return jnp.where(jnp.isfinite(bias), bias, 0).sum()

        grads = jax.grad(loss)(jnp.float32([0.5, 0.25]))
        assert grads.tolist() == [total, total]


def test_split_heads_look_one_way_each():
    slopes = np.tile(alibi_slopes(1), 2) * 128  # 0.5, 0.5
    positions = jnp.arange(3)
    bias = alibi_bias(slopes, positions, positions, form="split_heads")
    inf = math.inf
    assert bias.tolist() == [
        [[0, -inf, -inf], [-0.5, 0, -inf], [-1, -0.5, 0]],
        [[0, -0.5, -1], [-inf, 0, -0.5], [-inf, -inf, 0]],
    ]
    batched = alibi_bias(slopes, positions[None], positions[None], form="split_heads")
    np.testing.assert_array_equal(batched, bias[None])


def test_bad_input_raises_with_the_name_and_the_value():
    positions = jnp.arange(3)
    slopes = alibi_slopes(3)
    with pytest.raises(ValueError, match=r"form must be one of .*'left'"):
        alibi_bias(slopes, positions, positions, form="left")
    with pytest.raises(ValueError, match=r"even length .* got 3"):
        alibi_bias(slopes, positions, positions, form="split_heads")
    with pytest.raises(ValueError, match=r"slopes must be \[N\], got shape \(1, 3\)"):
        alibi_bias(slopes[None], positions, positions)
    with pytest.raises(ValueError, match=r"query_positions must be integers.*bfloat16"):
        alibi_bias(slopes, positions.astype(jnp.bfloat16), positions)
    with pytest.raises(ValueError, match="key_positions must have a time axis"):
        alibi_bias(slopes, positions, jnp.int32(3))
    with pytest.raises(ValueError, match=r"\(2, 3, 1\).*\(5, 1, 3\)"):
        alibi_bias(slopes, jnp.zeros((2, 3), int), jnp.zeros((5, 3), int))


def test_fault_14_distances_never_become_bfloat16():
    """In bfloat16, 257 is 256; slopes of 16 bits do not narrow the distance either."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        slopes = jnp.array([0.5], dtype)
        bias = alibi_bias(slopes, jnp.array([4095]), 4095 - jnp.arange(4096))
        assert bias.dtype == jnp.float32
        np.testing.assert_array_equal(bias[0, 0], -0.5 * np.arange(4096))
    with pytest.raises(ValueError, match=r"key_positions must be integers.*bfloat16"):
        alibi_bias(slopes, jnp.arange(3), jnp.arange(3, dtype=jnp.bfloat16))


def test_the_bias_object_is_the_bias_at_the_positions_that_it_counts():
    slopes = np.float32([0.5, 0.25])
    rows, columns = jnp.array([2, 3]), jnp.arange(4)
    right = -slopes[:, None, None] * [[2, 1, 0, 1], [3, 2, 1, 0]]
    np.testing.assert_array_equal(AlibiBias(slopes)(rows, columns), right)
    # Two documents of two tokens: what the bias counts begins again.
    counted = jnp.array([[0, 1, 0, 1]])
    packed = AlibiBias(slopes, counted, counted)
    right = -slopes[:, None, None] * [[0, 1, 0, 1], [1, 0, 1, 0]]
    np.testing.assert_array_equal(packed(rows, columns)[0], right)
    everything = slice(None)
    np.testing.assert_array_equal(packed(everything, everything)[0, :, 2:], right)


def test_the_bias_object_is_an_argument_like_any_array():
    bias = AlibiBias(jnp.float32([0.5, 0.25]), jnp.arange(3) + 7)

    @jax.jit
    def total(bias):
        return bias(jnp.array([2]), jnp.array([4, 6])).sum()

    grad = jax.grad(total, allow_int=True)(bias)
    assert total(bias) == -0.75 * (5 + 3)
    np.testing.assert_array_equal(grad.slopes, [-8, -8])
    assert grad.key_positions is None


def test_the_bias_object_counts_each_row_at_its_own_places():
    counted = jnp.array([[0, 1, 0, 1], [5, 7, 9, 11]])
    places = jnp.array([[1, 3], [0, 2]])
    bias = AlibiBias(np.float32([0.5]), counted, counted)
    right = [[[[-0.0, -0.0], [-0.0, -0.0]]], [[[-0.0, -2.0], [-2.0, -0.0]]]]
    assert bias(places, places).tolist() == right
    shared = AlibiBias(np.float32([0.5]), counted[1], counted[1])
    right = [[[[-0.0, -2.0], [-2.0, -0.0]]], [[[-0.0, -2.0], [-2.0, -0.0]]]]
    assert shared(places, places).tolist() == right
    with pytest.raises(ValueError, match=r"AlibiBias.query_pos.*\(2, 4\).*\(3, 1\)"):
        bias(jnp.zeros((3, 1), int), places)


def test_the_bias_object_refuses_host_positions_beyond_int32():
    """As int32, 2**32 is position 0."""
    far, near = np.array([0, 2**32]), jnp.arange(2)
    with pytest.raises(ValueError, match=r"query_positions must fit int32.*4294967296"):
        AlibiBias(np.float32([0.5]), far)(near, near)
    with pytest.raises(ValueError, match=r"key_positions must fit int32.*4294967296"):
        AlibiBias(np.float32([0.5]), near, far)(near, near)


def test_fewer_queries_than_keys_are_counted_at_the_last_places():
    """Two queries of four keys are at places 2 and 3, which must be in the array."""
    query, key, value = jnp.ones((2, 1, 2)), jnp.ones((4, 1, 2)), jnp.eye(4)[:, None]
    slopes, counted = np.float32([np.log(2)]), jnp.array([0, 1, 5, 6])
    out = attention(query, key, value, bias=AlibiBias(slopes, counted, counted))
    # Distances 5 4 0 and 6 5 1 0, each position half the weight.
    wanted = np.array([[1, 2, 32, 0], [1, 2, 32, 64]], np.float64)
    wanted /= wanted.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[:, 0], wanted, atol=1e-6)
    message = r"AlibiBias\.{} is indexed by place.*end at 3 with 4 keys.*got shape \[2"
    with pytest.raises(ValueError, match=message.format("query_positions")):
        attention(query, key, value, bias=AlibiBias(slopes, counted[2:], counted))
    with pytest.raises(ValueError, match=message.format("key_positions")):
        attention(query, key, value, bias=AlibiBias(slopes, counted, counted[:2]))
    # Places that are given are the caller's: these two are in the array.
    given = attention(
        query,
        key,
        value,
        query_positions=jnp.array([0, 1]),
        bias=AlibiBias(slopes, counted[2:], counted),
        causal=False,
    )
    np.testing.assert_allclose(given[1, 0], wanted[1], atol=1e-6)
