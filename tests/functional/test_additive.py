"""Encodings added to the embedding: cases S01-S05, exactness, and table stretching."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from rope_jax.functional.additive import (
    binary_encoding,
    integer_encoding,
    interpolate_table,
    sinusoidal,
)

# Far positions, odd ones, and both ends of int32.
POSITIONS = [0, 1, 4095, 131_071, 2**24, 2**24 + 1, 2**31 - 1, -1, -4095, -(2**31)]
# sin and cos of a reduced angle lose at most the angle's own error of 1e-6, and an ulp.
EXACT = 1.1e-6


def sinusoidal64(positions, dim, max_timescale, order, spacing):
    """Float64 reference, one channel at a time, from the channel's definition."""
    num_sines = -(-dim // 2)
    positions = np.asarray(positions, np.float64)
    channels = {}
    for i in range(num_sines):
        power = 2 * i / dim if spacing == "paper" else i / max(num_sines - 1, 1)
        angle = positions / max_timescale**power
        columns = (2 * i, 2 * i + 1)
        if order == "concatenated":
            columns = (i, num_sines + i)
        channels[columns[0]] = np.sin(angle)
        channels[columns[1]] = np.cos(angle)
    return np.stack([channels[c] for c in range(dim)], axis=-1)


def test_s01_odd_width_keeps_the_extra_sine():
    expected = [
        [0, 1, 0, 1, 0],
        [0.8414709848, 0.5403023059, 0.0251162229, 0.9996845379, 0.0006309573],
    ]
    encoding = sinusoidal(jnp.arange(2), 5)
    assert encoding.shape == (2, 5)
    np.testing.assert_allclose(encoding, expected, atol=1e-7)


def test_s02_channel_order_is_a_named_option():
    one = jnp.array([1])
    np.testing.assert_allclose(
        sinusoidal(one, 4, order="interleaved")[0],
        [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004],
        atol=1e-7,
    )
    np.testing.assert_allclose(
        sinusoidal(one, 4, order="concatenated")[0],
        [0.8414709848, 0.0099998333, 0.5403023059, 0.9999500004],
        atol=1e-7,
    )
    np.testing.assert_array_equal(
        sinusoidal(one, 4), sinusoidal(one, 4, order="interleaved")
    )


@pytest.mark.parametrize(
    ("spacing", "angles"),
    [
        ("paper", [1, 0.1, 0.01, 0.001]),
        ("endpoint", [1, 0.0464158883, 0.0021544347, 0.0001]),
    ],
)
def test_s03_frequency_spacing_is_a_named_option(spacing, angles):
    encoding = sinusoidal(jnp.array([1]), 8, spacing=spacing)[0]
    np.testing.assert_allclose(encoding[0::2], np.sin(angles), atol=1e-7)
    np.testing.assert_allclose(encoding[1::2], np.cos(angles), atol=1e-7)
    if spacing == "paper":
        np.testing.assert_array_equal(encoding, sinusoidal(jnp.array([1]), 8)[0])


def test_s04_positions_past_a_training_length_are_computed():
    at_2048 = [
        -0.3130570128,
        0.9497343348,
        -0.5617317454,
        -0.8273194342,
        0.9982216002,
        -0.0596123883,
        0.8882827387,
        -0.4592970457,
    ]
    at_1023 = [-0.9164853723, 0.4000681972]
    encoding = sinusoidal(jnp.array([1023, 2048]), 8)
    np.testing.assert_allclose(encoding[1], at_2048, atol=1e-6)
    np.testing.assert_allclose(encoding[0, :2], at_1023, atol=1e-6)


def test_s05_first_row_is_position_0_and_decode_uses_its_own_position():
    full = sinusoidal(jnp.arange(8), 6)
    assert full[0].tolist() == [0, 1, 0, 1, 0, 1]
    decode = sinusoidal(jnp.array([5]), 6)
    np.testing.assert_array_equal(decode[0], full[5])
    np.testing.assert_allclose(
        decode, sinusoidal64([5], 6, 1e4, "interleaved", "paper"), atol=EXACT
    )


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
@pytest.mark.parametrize("spacing", ["paper", "endpoint"])
@pytest.mark.parametrize("dim", [1, 2, 3, 64])
def test_sinusoidal_is_exact_at_any_position(dim, spacing, order):
    options = {"order": order, "spacing": spacing, "max_timescale": 50_000.0}
    expected = sinusoidal64(POSITIONS, dim, 50_000.0, order, spacing)
    positions = jnp.array(POSITIONS, jnp.int32)
    encode = functools.partial(sinusoidal, dim=dim, **options)
    for encoding in (encode(positions), jax.jit(encode)(positions)):
        assert encoding.dtype == jnp.float32
        np.testing.assert_allclose(encoding, expected, atol=EXACT, rtol=0)


def test_r28_one_compilation_serves_all_offsets_and_batches_map():
    traces = 0

    @jax.jit
    def encode(offset):
        nonlocal traces
        traces += 1
        return sinusoidal(offset + jnp.arange(4), 6)

    full = sinusoidal(jnp.arange(14), 6)
    for offset in range(10):
        np.testing.assert_allclose(encode(offset), full[offset : offset + 4], atol=1e-7)
    assert traces == 1
    rows = jnp.array([[0, 1, 2], [7, 3, 2**30]])
    batch = sinusoidal(rows, 6)
    assert batch.shape == (2, 3, 6)
    mapped = jax.vmap(functools.partial(sinusoidal, dim=6))(rows)
    np.testing.assert_array_equal(mapped, batch)
    np.testing.assert_array_equal(batch[1, 1], full[3])


def test_r29_a_sharded_sequence_gets_the_positions_of_the_whole():
    mesh = jax.make_mesh((8,), ("sequence",), (AxisType.Auto,))
    spec = PartitionSpec("sequence")
    encode = functools.partial(sinusoidal, dim=6)
    positions = jnp.arange(64)
    sharded = jax.shard_map(encode, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(
        jax.jit(sharded)(positions), encode(positions), atol=1e-6
    )


def test_integer_encoding_is_the_position_in_every_channel():
    encoding = integer_encoding(jnp.array([[0, 5], [-3, 2**24]]), 3)
    assert encoding.dtype == jnp.float32
    expected = np.repeat([[[0.0], [5.0]], [[-3.0], [2.0**24]]], 3, axis=-1)
    np.testing.assert_array_equal(encoding, expected)
    # Beyond 2**24 the nearest float32.
    assert integer_encoding(jnp.array([2**24 + 1]), 1)[0, 0] == np.float32(2**24 + 1)


@pytest.mark.parametrize("dim", [1, 4, 31, 32, 40])
def test_binary_encoding_has_bit_c_in_channel_c(dim):
    positions = [*POSITIONS, 6, 2**30 + 5]
    # Python integers have the two's complement digits of any width.
    expected = [[(position >> c) & 1 for c in range(dim)] for position in positions]
    array = jnp.array(positions, jnp.int32)
    encode = functools.partial(binary_encoding, dim=dim)
    for encoding in (encode(array), jax.jit(encode)(array)):
        assert encoding.dtype == jnp.float32
        np.testing.assert_array_equal(encoding, expected)
    np.testing.assert_array_equal(jax.vmap(encode)(array[None]), encoding[None])


def test_binary_encoding_repeats_after_two_to_the_width():
    encoding = np.asarray(binary_encoding(jnp.arange(64), 5))
    assert len(np.unique(encoding[:32], axis=0)) == 32
    np.testing.assert_array_equal(encoding[32:], encoding[:32])


def test_interpolated_table_aligns_its_ends():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
    for length in (2, 5, 7, 13, 20):
        stretched = interpolate_table(table, length)
        at = np.linspace(0, 6, length)
        expected = np.stack(
            [np.interp(at, np.arange(7), np.float64(c)) for c in np.asarray(table).T],
            axis=-1,
        )
        np.testing.assert_allclose(stretched, expected, atol=1e-6)
        np.testing.assert_array_equal(stretched[0], table[0])
        np.testing.assert_array_equal(stretched[-1], table[-1])
    np.testing.assert_array_equal(interpolate_table(table, 7), table)
    # Every second row of 2L - 1 is a row of the table, bit for bit.
    np.testing.assert_array_equal(interpolate_table(table, 13)[::2], table)
    np.testing.assert_array_equal(interpolate_table(table, 1), table[:1])
    np.testing.assert_array_equal(
        interpolate_table(table[:1], 3), jnp.repeat(table[:1], 3, axis=0)
    )


def test_interpolated_table_keeps_its_type_and_gradient():
    table = jnp.asarray([[0], [1], [3]], jnp.bfloat16)
    stretched = interpolate_table(table, 5)
    assert stretched.dtype == jnp.bfloat16
    assert stretched[:, 0].tolist() == [0, 0.5, 1, 2, 3]
    grad = jax.grad(lambda t: interpolate_table(t, 5).sum())(jnp.zeros((3, 1)))
    assert grad[:, 0].tolist() == [1.5, 2, 1.5]


def test_bad_input_raises_with_the_name_and_the_value():
    positions = jnp.arange(3)
    for function in (sinusoidal, integer_encoding, binary_encoding):
        for dim in (0, -2, 2.5):
            with pytest.raises(ValueError, match=f"dim must be .*got {dim}"):
                function(positions, dim)
        with pytest.raises(ValueError, match="positions"):
            function(positions.astype(jnp.bfloat16), 4)
    with pytest.raises(ValueError, match=r"order must be one of .*'sin-cos'"):
        sinusoidal(positions, 4, order="sin-cos")
    with pytest.raises(ValueError, match=r"spacing must be one of .*'t2t'"):
        sinusoidal(positions, 4, spacing="t2t")
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"max_timescale must be .* got {value}"):
            sinusoidal(positions, 4, max_timescale=value)
    with pytest.raises(ValueError, match="positions must be integers, got dtype float"):
        integer_encoding(jnp.ones(3), 4)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        interpolate_table(jnp.ones((3, 2)), 0)
    with pytest.raises(ValueError, match=r"table must be .*\[L, D\].*\(3,\)"):
        interpolate_table(jnp.ones(3), 4)
    with pytest.raises(ValueError, match=r"table must be .*int32"):
        interpolate_table(jnp.ones((3, 2), jnp.int32), 4)
    with pytest.raises(ValueError, match=r"table must be .*\(0, 2\)"):
        interpolate_table(jnp.ones((0, 2)), 4)


def test_fault_14_positions_never_become_bfloat16():
    """In bfloat16, 257 is 256 and the first 4096 positions are 769 rows."""
    rows = sinusoidal(jnp.arange(4096), 64)
    assert len(np.unique(np.asarray(rows), axis=0)) == 4096
    near = [-0.5733571748, 0.8193055291]  # sin and cos of 257
    np.testing.assert_allclose(rows[257, :2], near, atol=1e-6)
    narrow = jnp.zeros((4096, 64), jnp.bfloat16) + rows.astype(jnp.bfloat16)
    np.testing.assert_array_equal(narrow[257, :2], jnp.array(near, jnp.bfloat16))
    for encoding in (sinusoidal, integer_encoding, binary_encoding):
        with pytest.raises(ValueError, match=r"positions .*bfloat16"):
            encoding(jnp.arange(4, dtype=jnp.bfloat16), 4)
