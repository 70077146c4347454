"""Exact angles against long-integer arithmetic, and positions on several axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.rotary import (
    mixed_angles,
    multi_axis_angles,
    rope,
    rope_angles,
)

BITS = 400


def _inverse_tangent(inverse):
    """Arctangent of 1/inverse as an integer of BITS fractional bits, by its series."""
    total = term = (1 << BITS) // inverse
    odd, sign = 3, -1
    while term:
        term //= inverse * inverse
        total += sign * (term // odd)
        odd, sign = odd + 2, -sign
    return total


TURN = 8 * (4 * _inverse_tangent(5) - _inverse_tangent(239))  # 2 pi, Machin's formula


def exact_angle(position, inv_freq):
    """The product reduced to (-pi, pi] without rounding, as a float."""
    numerator, denominator = float(inv_freq).as_integer_ratio()
    angle = ((int(position) * numerator << BITS) // denominator) % TURN
    return (angle if angle <= TURN // 2 else angle - TURN) / (1 << BITS)


def exact_angles(positions, inv_freq):
    return np.array([[exact_angle(p, f) for f in inv_freq] for p in positions])


def distance(angles, wanted):
    """Largest difference modulo one turn, in radians."""
    difference = np.asarray(angles, np.float64) - wanted
    return np.abs((difference + np.pi) % (2 * np.pi) - np.pi).max()


LADDERS = {
    "default 128": frequencies.default(128).inv_freq[::7],
    "theta 5e5": frequencies.default(64, theta=5e5).inv_freq[::3],
    "a quarter": frequencies.linear(8, factor=4).inv_freq,
    "more than a turn": np.array([6.5, 100.25, 1e9, 2 * np.pi]),
    "negative and zero": np.array([-1.0, -0.37, 0.0, -8.5]),
}
POSITIONS = np.array(
    [
        0,
        1,
        4095,
        131071,
        2**24,
        2**24 + 1,
        2**31 - 1,
        -1,
        -4095,
        -131071,
        -(2**24) - 1,
        -(2**31),
    ]
)


def test_the_reference_knows_pi():
    assert 2 * np.pi == TURN / (1 << BITS)
    assert exact_angle(1, 0.1) == 0.1
    assert exact_angle(7, 1.0) == pytest.approx(7 - 2 * np.pi, abs=1e-15)


@pytest.mark.parametrize("name", LADDERS)
def test_angles_are_exact_at_every_position(name):
    inv_freq = LADDERS[name]
    wanted = exact_angles(POSITIONS, inv_freq)
    positions = jnp.asarray(POSITIONS, jnp.int32)
    angles = rope_angles(positions, inv_freq)
    assert angles.dtype == jnp.float32 and angles.shape == wanted.shape
    assert distance(angles, wanted) <= 4e-7
    assert np.abs(angles).max() <= np.float32(np.pi)
    traced = jax.jit(lambda p: rope_angles(p, inv_freq))(positions)
    np.testing.assert_array_equal(traced, angles)


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
)
def test_angles_of_every_integer_type(dtype):
    info = np.iinfo(dtype)
    some = np.random.default_rng(0).integers(info.min, info.max, 40, endpoint=True)
    positions = np.r_[info.min, info.max, 0, 1, some].astype(dtype)
    inv_freq = frequencies.default(16).inv_freq
    wanted = exact_angles(positions, inv_freq)
    assert distance(rope_angles(positions, inv_freq), wanted) <= 4e-7
    traced = jax.jit(lambda p: rope_angles(p, inv_freq))(jnp.asarray(positions))
    assert distance(traced, wanted) <= 4e-7


def test_host_positions_of_64_bits_are_not_cut_to_32():
    positions = np.array([2**40, -(2**40), 2**33 + 5, 3])
    inv_freq = frequencies.default(16).inv_freq
    wanted = exact_angles(positions, inv_freq)
    assert distance(rope_angles(positions, inv_freq), wanted) <= 1e-6
    unsigned = positions[[0, 2, 3]].astype(np.uint64)
    assert distance(rope_angles(unsigned, inv_freq), wanted[[0, 2, 3]]) <= 1e-6
    # The magnitude of the lowest int64 wraps to itself, below any limit.
    for far in (2**40 + 1, -(2**40) - 1, -(2**63)):
        with pytest.raises(ValueError, match=rf"positions.*2\*\*40.*got {far} to"):
            rope_angles(np.array([far, far]), inv_freq)


def test_angles_in_x64_mode():
    inv_freq = frequencies.default(16).inv_freq
    with jax.enable_x64(True):
        positions = jnp.array([2**35 + 11, -(2**35) - 11, 7, -7])
        assert positions.dtype == jnp.int64
        angles = jax.jit(lambda p: rope_angles(p, inv_freq))(positions)
        assert angles.dtype == jnp.float32
    assert distance(angles, exact_angles(np.asarray(positions), inv_freq)) <= 1e-6


def test_r02_frequencies_are_never_rounded_to_16_bits():
    inv_freq = frequencies.default(32).inv_freq
    angles = rope_angles(jnp.array([1857]), inv_freq)
    assert distance(angles[:, 1], np.array([1044.2678408785])) <= 1e-6
    assert float(jnp.cos(angles)[0, 1]) == pytest.approx(0.3066928098, abs=1e-6)
    assert float(jnp.sin(angles)[0, 1]) == pytest.approx(0.9518085524, abs=1e-6)
    half = jnp.asarray(inv_freq, jnp.float16)
    with pytest.raises(ValueError, match=r"inv_freq.*float16"):
        rope_angles(jnp.array([1857]), half)


def test_r03_phase_does_not_become_bfloat16():
    angles = rope_angles(jnp.array([4095]), frequencies.default(128).inv_freq)
    assert angles.dtype == jnp.float32
    cos, sin = np.cos(angles)[0], np.sin(angles)[0]
    assert cos[1] == pytest.approx(-0.7423658176, abs=1e-6)
    assert sin[1] == pytest.approx(0.6699947708, abs=1e-6)
    assert cos[2] == pytest.approx(-0.0899100886, abs=1e-6)


def test_r04_angles_do_not_drift_with_position():
    inv_freq = frequencies.default(128).inv_freq
    spots = {
        131071: {
            0: -0.8179834994,
            1: -0.9782709129,
            2: 0.0546179309,
            63: -0.8407548928,
        },
        1048576: {
            0: 0.9438083939,
            1: -0.6776024203,
            2: 0.7510188030,
            63: -0.1359281768,
        },
    }
    for position, pairs in spots.items():
        cos = jnp.cos(rope_angles(jnp.array([position]), inv_freq))[0]
        for pair, value in pairs.items():
            assert float(cos[pair]) == pytest.approx(value, abs=5e-7)
    for position in (4096, 32768, 131071, 1048576):
        angles = rope_angles(jnp.array([position]), inv_freq)
        wanted = np.array([[exact_angle(position, f) for f in inv_freq]])
        np.testing.assert_allclose(jnp.cos(angles), np.cos(wanted), atol=1e-6)
        np.testing.assert_allclose(jnp.sin(angles), np.sin(wanted), atol=1e-6)


def test_r01_positions_of_16_bits_are_refused():
    inv_freq = frequencies.default(8).inv_freq
    for dtype in (jnp.bfloat16, jnp.float16):
        with pytest.raises(ValueError, match=rf"positions.*{jnp.dtype(dtype)}"):
            rope_angles(jnp.arange(4, dtype=dtype), inv_freq)


def test_a_jax_ladder_gives_the_plain_float32_product():
    inv_freq = jnp.asarray(frequencies.default(8).inv_freq, jnp.float32)
    positions = jnp.array([0, 7, 131071])
    wanted = np.float32(positions)[:, None] * np.asarray(inv_freq)[None, :]
    np.testing.assert_array_equal(rope_angles(positions, inv_freq), wanted)
    assert wanted.max() > 1e5  # not reduced


def test_float_positions_give_the_plain_float32_product():
    inv_freq = frequencies.default(8).inv_freq
    positions = jnp.array([0.5, -1.25, 1000.0])
    wanted = np.float32(positions)[:, None] * np.float32(inv_freq)[None, :]
    np.testing.assert_array_equal(rope_angles(positions, inv_freq), wanted)


def test_batches_of_positions_and_one_ladder_a_head():
    ladders = np.stack([frequencies.default(8).inv_freq, 0.5 * np.ones(4)])
    positions = jnp.array([[0, 1, 2], [100, 7, 131071]])
    angles = rope_angles(positions, ladders)
    assert angles.shape == (2, 3, 2, 4)
    for head in range(2):
        np.testing.assert_array_equal(
            angles[:, :, head], rope_angles(positions, ladders[head])
        )


def test_angles_refuse_wrong_arguments():
    inv_freq = frequencies.default(8).inv_freq
    with pytest.raises(ValueError, match=r"positions.*bool"):
        rope_angles(jnp.array([True]), inv_freq)
    with pytest.raises(ValueError, match=r"inv_freq.*\(2, 3, 4\)"):
        rope_angles(jnp.array([1]), np.ones((2, 3, 4)))
    with pytest.raises(ValueError, match=r"inv_freq.*Frequencies"):
        rope_angles(jnp.array([1]), frequencies.default(8))
    with pytest.raises(ValueError, match=r"inv_freq.*nan"):
        rope_angles(jnp.array([1]), np.array([np.nan]))
    with pytest.raises(ValueError, match=r"inv_freq.*1\.e\+30"):
        rope_angles(jnp.array([1]), np.array([1e30]))


def test_r26_chunked_sections_of_qwen2_vl():
    inv_freq = frequencies.default(8).inv_freq
    positions = jnp.array([[3, 5, 7]])
    angles = multi_axis_angles(positions, inv_freq, sections=(1, 1, 2), style="chunked")
    np.testing.assert_allclose(angles, [[3, 0.5, 0.07, 0.007]], atol=5e-7)
    equal = jnp.full((4, 3), 1) * jnp.arange(4)[:, None] * 1000
    for style, sections in [("chunked", (1, 1, 2)), ("interleaved", (2, 1, 1))]:
        np.testing.assert_array_equal(
            multi_axis_angles(equal, inv_freq, sections=sections, style=style),
            rope_angles(equal[:, 0], inv_freq),
        )


@pytest.mark.parametrize("style", ["axial", "chunked", "interleaved"])
def test_r26_bad_sections_are_refused(style):
    inv_freq = frequencies.default(8).inv_freq
    with pytest.raises(ValueError, match=r"sections.*4 pairs.*\(1, 1, 1\)"):
        multi_axis_angles(
            jnp.array([[3, 5, 7]]), inv_freq, sections=(1, 1, 1), style=style
        )
    with pytest.raises(ValueError, match=r"sections.*\(2, 2\)"):
        multi_axis_angles(
            jnp.array([[3, 5, 7]]), inv_freq, sections=(2, 2), style=style
        )


def test_interleaved_sections_of_qwen3_vl():
    """Pair by pair: h and w take every third pair, t what is left (24, 20, 20)."""
    inv_freq = frequencies.default(128, theta=5e6).inv_freq
    positions = np.array([[1000, 20, 3], [7, 8, 9]])
    angles = multi_axis_angles(
        positions, inv_freq, sections=(24, 20, 20), style="interleaved"
    )
    of_pair = [i % 3 if i < 60 else 0 for i in range(64)]
    assert [of_pair.count(axis) for axis in range(3)] == [24, 20, 20]
    wanted = [
        [exact_angle(row[of_pair[i]], inv_freq[i]) for i in range(64)]
        for row in positions
    ]
    assert distance(angles, np.array(wanted)) <= 4e-7


def test_chunked_sections_cycle_through_the_axes():
    inv_freq = frequencies.default(16).inv_freq
    positions = np.array([[10, 20]])
    angles = multi_axis_angles(
        positions, inv_freq, sections=(3, 2, 1, 2), style="chunked"
    )
    axes = [0, 0, 0, 1, 1, 0, 1, 1]
    wanted = [[exact_angle(positions[0, a], inv_freq[i]) for i, a in enumerate(axes)]]
    assert distance(angles, np.array(wanted)) <= 4e-7


def test_axial_shares_a_ladder_or_follows_one_for_each_axis():
    positions = np.array([[3, 5], [100, -7]])
    shared = frequencies.axial(16).inv_freq
    angles = multi_axis_angles(positions, shared, sections=(4, 4), style="axial")
    wanted = np.concatenate(
        [positions[:, :1] * shared[None], positions[:, 1:] * shared[None]], axis=1
    )
    assert distance(angles, wanted) <= 4e-7
    own = frequencies.axial(16, theta=1e4, strided=True).inv_freq
    angles = multi_axis_angles(positions, own, sections=(4, 4), style="axial")
    whole = frequencies.default(16).inv_freq
    wanted = np.concatenate(
        [positions[:, :1] * whole[None, ::2], positions[:, 1:] * whole[None, 1::2]],
        axis=1,
    )
    assert distance(angles, wanted) <= 4e-7
    uneven = multi_axis_angles(positions, shared, sections=(4, 2), style="axial")
    np.testing.assert_array_equal(uneven[:, :4], rope_angles(positions[:, 0], shared))
    np.testing.assert_array_equal(
        uneven[:, 4:], rope_angles(positions[:, 1], shared[:2])
    )


def test_multi_axis_refuses_wrong_arguments():
    inv_freq = frequencies.default(8).inv_freq
    one = jnp.array([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"style.*'spiral'"):
        multi_axis_angles(one, inv_freq, sections=(1, 1, 2), style="spiral")
    with pytest.raises(ValueError, match=r"positions.*\(3,\)"):
        multi_axis_angles(one[0], inv_freq, sections=(1, 1, 2), style="axial")
    with pytest.raises(ValueError, match=r"sections.*\(5, -1, 0\)"):
        multi_axis_angles(one, inv_freq, sections=(5, -1, 0), style="chunked")
    with pytest.raises(ValueError, match=r"sections.*\(0, 2, 2\)"):
        multi_axis_angles(one, inv_freq, sections=(0, 2, 2), style="interleaved")


def test_multi_axis_traced_and_batched():
    inv_freq = frequencies.default(8).inv_freq
    positions = np.random.default_rng(0).integers(0, 10**6, (2, 5, 3))
    turn = jax.jit(
        lambda p: multi_axis_angles(p, inv_freq, sections=(1, 1, 2), style="chunked")
    )
    angles = turn(positions)
    assert angles.shape == (2, 5, 4)
    for pair, axis in enumerate([0, 1, 2, 2]):
        wanted = rope_angles(positions[..., axis], inv_freq[pair : pair + 1])
        np.testing.assert_array_equal(angles[..., pair], wanted[..., 0])


def test_mixed_angles_add_up_over_the_axes():
    learned = frequencies.mixed(jax.random.key(1), 8, num_heads=3).inv_freq
    positions = jnp.array([[0, 0], [1, 0], [0, 1], [5, -2]])
    angles = mixed_angles(positions, learned)
    assert angles.shape == (4, 3, 4)
    wanted = np.einsum("ta,anr->tnr", positions, np.asarray(learned, np.float64))
    np.testing.assert_allclose(angles, wanted, atol=1e-5)
    host = np.asarray(learned, np.float64)
    far = np.array([[10**6, -(10**6) + 1]])
    exact = [
        [
            exact_angle(far[0, 0], host[0, n, r])
            + exact_angle(far[0, 1], host[1, n, r])
            for r in range(4)
        ]
        for n in range(3)
    ]
    assert distance(mixed_angles(far, host), np.array([exact])) <= 4e-7
    with pytest.raises(ValueError, match=r"positions.*\(4, 3\)"):
        mixed_angles(jnp.zeros((4, 3), jnp.int32), learned)


def test_no_table_so_no_position_is_clamped():
    """Fault 6 and 9: every position has its own rotation, also past any length."""
    x = jnp.ones((4, 1, 64))
    built = frequencies.llama3(64)
    turned = rope(x, jnp.array([8191, 8192, 163_840, 10**9]), built)
    rows = np.asarray(turned).reshape(4, -1)
    for first in range(4):
        for second in range(first):
            assert np.abs(rows[first] - rows[second]).max() > 0.1


def test_jit_cuts_host_positions_to_32_bits():
    """What the docstring of `rope` says; 2**32 + 3 turns by other than 3 does."""
    x, far = jnp.array([[[1.0, 0.0]]]), np.array([2**32 + 3])
    # cos and sin of 4294967299, and of 3.
    np.testing.assert_allclose(rope(x, far)[0, 0], [0.9432069, 0.3322058], atol=1e-6)
    cut = jax.jit(rope)(x, far)[0, 0]
    np.testing.assert_allclose(cut, [-0.9899925, 0.1411200], atol=1e-6)
