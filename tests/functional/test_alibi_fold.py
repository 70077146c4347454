"""The folded ALiBi bias: its error, at any offset and in any type, and its bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional.alibi import alibi_bias, alibi_fold, alibi_slopes
from rope_jax.functional.attention import attention

LENGTH = 16_384
ROWS = np.r_[0, 1, 255, 256, 4095, 8191, 12_345, LENGTH - 3 : LENGTH]
NUM_HEADS, KEY_HEADS, WIDTH = 12, 3, 64


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@functools.partial(jax.jit, static_argnames="scale")
def folded_logits(query, key, offset, scale):
    """What a kernel computes: float32 sums of products, then the scale."""
    rows, columns = jnp.asarray(ROWS, jnp.int32), jnp.arange(LENGTH)
    slopes = alibi_slopes(NUM_HEADS)
    # M is that of the last row, which ROWS has.
    query, key = alibi_fold(
        query, key, slopes, rows + offset, columns + offset, scale=scale
    )
    key = jnp.repeat(key, NUM_HEADS // KEY_HEADS, axis=1)
    logits = jnp.einsum("tnh,snh->nts", query, key, preferred_element_type=jnp.float32)
    return logits * jnp.float32(WIDTH**-0.5 if scale is None else scale)


def true_bias():
    distance = ROWS[:, None] - np.arange(LENGTH)
    return -np.float64(alibi_slopes(NUM_HEADS))[:, None, None] * distance


def causal_weights(logits):
    seen = ROWS[:, None] >= np.arange(LENGTH)
    logits = np.where(seen, np.float64(logits), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_folded_bias_is_the_bias_at_16k_keys_and_offset_2_to_the_30(dtype, scale):
    query = jnp.zeros((len(ROWS), NUM_HEADS, WIDTH), dtype)
    key = jnp.zeros((LENGTH, KEY_HEADS, WIDTH), dtype)
    folded = folded_logits(query, key, jnp.int32(2**30), scale)
    seen = ROWS[:, None] >= np.arange(LENGTH)
    error = np.where(seen, folded - true_bias(), 0)
    largest = np.abs(np.where(seen, true_bias(), 0)).max()
    assert largest > 11_000
    assert np.abs(error).max() <= 1e-6 * largest


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_weights_at_16k_keys(dtype, scale):
    query = draw(0, len(ROWS), NUM_HEADS, WIDTH, dtype=dtype)
    key = draw(1, LENGTH, KEY_HEADS, WIDTH, dtype=dtype)
    factor = WIDTH**-0.5 if scale is None else scale
    repeated = np.repeat(np.float64(key), NUM_HEADS // KEY_HEADS, axis=1)
    content = np.einsum("tnh,snh->nts", np.float64(query), repeated) * factor
    expected = causal_weights(content + true_bias())
    for offset in (0, 2**30):
        folded = folded_logits(query, key, jnp.int32(offset), scale)
        error = np.abs(causal_weights(folded) - expected).max()
        assert error <= 2**-10, (offset, error)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_offsets_change_no_bit_and_the_first_channels_stay(dtype):
    query, key = draw(2, 5, 6, 8, dtype=dtype), draw(3, 7, 2, 8, dtype=dtype)
    fold = jax.jit(functools.partial(alibi_fold, query, key, alibi_slopes(6)))
    rows, columns = np.arange(2, 7), np.arange(7)
    expected = fold(jnp.asarray(rows), jnp.asarray(columns))
    for folded, plain in zip(expected, (query, key), strict=True):
        assert folded.dtype == dtype
        assert folded.shape == (*plain.shape[:-1], 8 + 16)
        np.testing.assert_array_equal(folded[..., :8], plain)
    for offset in (2**24 + 1, 2**30, 2**31 - 7, -3, -(2**31)):
        result = fold(
            jnp.asarray(rows + offset, jnp.int32),
            jnp.asarray(columns + offset, jnp.int32),
        )
        for new, old in zip(result, expected, strict=True):
            np.testing.assert_array_equal(new, old)
    assert fold._cache_size() == 1


def test_extra_channels_survive_a_product_in_bfloat16():
    """As on a TPU, which rounds float32 factors to bfloat16 by default."""
    query, key = jnp.zeros((40, 12, 8)), jnp.zeros((50, 1, 8))
    positions = jnp.arange(50) * 331_337  # up to 16.2 M, below 2**24
    slopes = alibi_slopes(12)
    for folded in alibi_fold(query, key, slopes, positions[10:], positions):
        rounded = jax.lax.reduce_precision(folded, exponent_bits=8, mantissa_bits=7)
        np.testing.assert_array_equal(rounded, folded)
        assert len(np.unique(folded)) > 12


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_attention_over_the_fold_is_attention_with_the_bias(implementation):
    batch, length, num_heads, key_heads, width = 2, 33, 6, 2, 16
    query = draw(4, batch, length, num_heads, width)
    key, value = (draw(5 + i, batch, length, key_heads, width) for i in range(2))
    # Every row of the batch has an offset, and so a newest position, of its own.
    positions = jnp.array([[0], [2**30]]) + jnp.arange(length)[None, :]
    slopes = alibi_slopes(num_heads)

    @functools.partial(jax.jit, static_argnames="form")
    def attend(query, key, form):
        if form == "fold":
            query, key = alibi_fold(query, key, slopes, positions, positions)
        return attention(
            query,
            key,
            value,
            query_positions=positions,
            key_positions=positions,
            bias=functools.partial(alibi_bias, slopes) if form == "bias" else None,
            scale=width**-0.5,
            implementation=implementation,
        )

    expected = attend(query, key, "bias")
    folded = attend(query, key, "fold")
    np.testing.assert_allclose(folded, expected, atol=2e-5, rtol=0)
    assert np.abs(attend(query, key, "none") - expected).max() > 0.1


def test_a04_decode_step_with_unused_cache_slots():
    """Slots that are masked hold any position: the result is that of the bias."""
    query, key, value = draw(7, 1, 2, 8), draw(8, 8, 2, 8), draw(9, 8, 2, 8)
    slopes = np.float32([0.5, 0.25])
    # Beyond the newest query, far below it, and as far apart as int32 goes.
    junk = jnp.array([2**31 - 1, 9, -1, -(2**31)], jnp.int32)
    for start in (0, 2**30):
        positions = jnp.concatenate([start + jnp.arange(4), junk])
        now = jnp.array([start + 3])
        folded = alibi_fold(query, key, slopes, now, positions)
        assert all(np.isfinite(x).all() for x in folded)
        attend = functools.partial(
            attention,
            query_positions=now,
            key_positions=positions,
            key_mask=jnp.arange(8) < 4,
            scale=8**-0.5,
        )
        expected = attend(
            query,
            key,
            value,
            bias=jnp.float32(slopes)[:, None, None]
            * jnp.float32([-3, -2, -1, 0, 0, 0, 0, 0])[None, None, :],
        )
        np.testing.assert_allclose(attend(*folded, value), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_distances_beyond_the_limit_saturate_and_stay_finite(dtype):
    query, key = jnp.zeros((1, 128, 8), dtype), jnp.zeros((3, 1, 8), dtype)
    positions = jnp.array([-(2**31), 2**30 - 2**24, 2**30 - 2**24 + 1], jnp.int32)
    query, key = alibi_fold(
        query, key, alibi_slopes(128), jnp.array([2**30]), positions, scale=0.25
    )
    logits = 0.25 * jnp.einsum("tnh,skh->nts", np.float32(query), np.float32(key))
    limit = -np.float64(alibi_slopes(128)) * (2**24 - 1)
    expected = np.broadcast_to(limit[:, None, None], logits.shape)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


def test_gradients_of_slopes_query_and_key_are_those_of_the_bias():
    query, key, value = draw(10, 9, 2, 8), draw(11, 9, 2, 8), draw(12, 9, 2, 8)
    positions = 1000 + jnp.arange(9)
    attend = functools.partial(
        attention,
        value=value,
        query_positions=positions,
        key_positions=positions,
        scale=0.5,
    )

    def through_fold(query, key, slopes):
        pair = alibi_fold(query, key, slopes, positions, positions, scale=0.5)
        return jnp.sum(attend(*pair) ** 2)

    def through_bias(query, key, slopes):
        bias = alibi_bias(slopes, positions, positions)
        return jnp.sum(attend(query, key, bias=bias) ** 2)

    slopes = jnp.float32([0.3, 0.07])
    folded = jax.jit(jax.grad(through_fold, argnums=(0, 1, 2)))(query, key, slopes)
    expected = jax.jit(jax.grad(through_bias, argnums=(0, 1, 2)))(query, key, slopes)
    for new, old in zip(folded, expected, strict=True):
        assert np.abs(old).max() > 0.01
        np.testing.assert_allclose(new, old, atol=2e-5)


def test_keys_after_the_newest_query_get_the_channels_of_a_key_beside_it():
    query, key = jnp.zeros((2, 4, 8)), jnp.zeros((4, 1, 8))
    positions = jnp.array([4, 5, 6, 2**31 - 1], jnp.int32)
    _, key = alibi_fold(query, key, alibi_slopes(4), positions[:2], positions)
    np.testing.assert_array_equal(key[2:], jnp.stack([key[1], key[1]]))
    assert (key[0] != key[1]).any()


def test_positions_may_be_traced_and_mapped():
    query, key = draw(13, 2, 3, 4, 8), draw(14, 2, 5, 4, 8)
    slopes = alibi_slopes(4)
    rows, columns = jnp.arange(6).reshape(2, 3), jnp.arange(10).reshape(2, 5)
    expected = alibi_fold(query, key, slopes, rows, columns, scale=0.3)
    mapped = jax.jit(
        jax.vmap(
            lambda q, k, i, j: alibi_fold(q, k, slopes, i, j, scale=0.3),
        )
    )(query, key, rows, columns)
    for new, old in zip(mapped, expected, strict=True):
        np.testing.assert_array_equal(new, old)


def test_bad_input_raises_with_the_name_and_the_value():
    query, key = jnp.zeros((3, 4, 8)), jnp.zeros((5, 2, 8))
    slopes, rows, columns = alibi_slopes(4), jnp.arange(3), jnp.arange(5)
    for scale in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scale must be positive, got {scale}"):
            alibi_fold(query, key, slopes, rows, columns, scale=scale)
    with pytest.raises(ValueError, match=r"scale must be a number.*got Array\(0\.5"):
        alibi_fold(query, key, slopes, rows, columns, scale=jnp.float32(0.5))
    with pytest.raises(ValueError, match=r"slopes must be \[4\].*\(2,\)"):
        alibi_fold(query, key, slopes[:2], rows, columns)
    with pytest.raises(ValueError, match=r"heads of key must divide .* got 3 and 4"):
        alibi_fold(query, jnp.zeros((5, 3, 8)), slopes, rows, columns)
    with pytest.raises(ValueError, match=r"equally wide.*8\).*16\)"):
        alibi_fold(query, jnp.zeros((5, 2, 16)), slopes, rows, columns)
    with pytest.raises(ValueError, match=r"query must be floating point.*int32"):
        alibi_fold(query.astype(int), key, slopes, rows, columns)
    with pytest.raises(ValueError, match="query_positions must be integers"):
        alibi_fold(query, key, slopes, rows.astype(jnp.float32), columns)
    with pytest.raises(ValueError, match="key_positions must fit an array"):
        alibi_fold(query, key, slopes, rows, jnp.arange(4))
    with pytest.raises(ValueError, match="query_positions must fit an array"):
        alibi_fold(query, key, slopes, rows[None], columns)
