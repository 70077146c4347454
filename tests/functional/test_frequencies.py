"""Frequency builders against published numbers and formulas written out in loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.frequencies import Frequencies
from rope_jax.functional.rotary import rope, rope_angles

PHI3 = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}


def plain(dim, theta=10_000.0):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


def yarn_in_a_loop(dim, theta, factor, length, fast=32.0, slow=1.0, truncate=True):
    """YaRN pair by pair, with the turns a pair makes as the unknown."""
    low = dim * math.log(length / (fast * 2 * math.pi)) / (2 * math.log(theta))
    high = dim * math.log(length / (slow * 2 * math.pi)) / (2 * math.log(theta))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    values = []
    for i in range(dim // 2):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        f = theta ** (-2 * i / dim)
        values.append(f * (1 - interpolated) + f / factor * interpolated)
    return np.array(values)


GOLDEN = [
    ("default", frequencies.default(64), [1, 0.1, 0.01, 0.001, 1.333521432e-4]),
    (
        "ntk",
        frequencies.ntk(64, factor=8),
        [1, 5.847153828e-2, 3.418920789e-3, 1.999095578e-4, 1.666901790e-5],
    ),
    (
        "dynamic",
        frequencies.dynamic_ntk(
            64, factor=2, max_position_embeddings=2048, seq_len=8192
        ),
        [1, 6.052156967e-2, 3.662860395e-3, 2.216820606e-4, 1.905030617e-5],
    ),
    (
        "llama3.2",
        frequencies.llama3(64, factor=32),
        [1, 3.760603093e-2, 4.295567966e-4, 1.661967468e-6, 9.418306725e-8],
    ),
    (
        "yarn",
        frequencies.yarn(64, factor=4, original_max_position_embeddings=2048),
        [1, 0.1, 5.38461538e-3, 2.5e-4, 3.33380358e-5],
    ),
    (
        "yarn, limits not rounded",
        frequencies.yarn(
            64, factor=4, original_max_position_embeddings=2048, truncate=False
        ),
        [1, 0.1, 5.05697152e-3, 2.5e-4, 3.33380358e-5],
    ),
    (
        "gpt-oss",
        frequencies.yarn(
            64,
            theta=150_000,
            factor=32,
            original_max_position_embeddings=4096,
            truncate=False,
        ),
        [1, 5.08132748e-2, 4.56483919e-4, 4.09997848e-6, 3.02351143e-7],
    ),
    (
        "DeepSeek-V3",
        frequencies.yarn(
            64,
            factor=40,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        [1, 0.1, 5.5e-3, 2.5e-5, 3.33380358e-6],
    ),
]


@pytest.mark.parametrize(
    ("name", "built", "golden"), GOLDEN, ids=[g[0] for g in GOLDEN]
)
def test_golden_values(name, built, golden):
    assert isinstance(built.inv_freq, np.ndarray)
    assert built.inv_freq.dtype == np.float64
    assert built.inv_freq.shape == (32,)
    np.testing.assert_allclose(built.inv_freq[[0, 8, 16, 24, 31]], golden, rtol=2e-9)


def test_golden_factors_of_yarn():
    length = {"original_max_position_embeddings": 2048}
    assert frequencies.yarn(64, factor=4, **length).attention_factor == pytest.approx(
        1.138629436, abs=1e-9
    )
    both = frequencies.yarn(64, factor=40, mscale=1.0, mscale_all_dim=1.0, **length)
    assert both.attention_factor == 1.0
    # DeepSeek-V2-Lite's own pair cancels as well; an unequal one gives the ratio.
    ratio = frequencies.yarn(64, factor=40, mscale=2.0, mscale_all_dim=0.5, **length)
    assert ratio.attention_factor == pytest.approx(
        (0.2 * math.log(40) + 1) / (0.05 * math.log(40) + 1), rel=1e-15
    )
    # One of the two alone does not act.
    alone = frequencies.yarn(64, factor=40, mscale=0.707, **length)
    assert alone.attention_factor == pytest.approx(0.1 * math.log(40) + 1, rel=1e-15)


def test_default_at_another_width_and_theta():
    built = frequencies.default(6, theta=500_000.0)
    np.testing.assert_allclose(
        built.inv_freq, [1.0, 0.012599210498948732, 0.00015874010519681994], rtol=1e-14
    )
    assert built.attention_factor == 1.0
    assert built.rotary_dim == 6


def test_r11_linear_factor_divides_the_angle():
    built = frequencies.linear(4, factor=4).inv_freq
    np.testing.assert_array_equal(built, plain(4) / 4)
    np.testing.assert_array_equal(
        rope_angles(jnp.array([8]), built),
        rope_angles(jnp.array([2]), frequencies.default(4).inv_freq),
    )
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    np.testing.assert_allclose(
        rope(x, jnp.array([1]), frequencies.linear(4, factor=4)).ravel(),
        [0.226700544, 1.989993760, 3.154141224, 4.004987495],
        atol=5e-7,
    )
    # No scaling is exactly the plain result.
    np.testing.assert_array_equal(
        rope(x, jnp.array([1]), frequencies.linear(4, factor=1)),
        rope(x, jnp.array([1])),
    )


@pytest.mark.parametrize(
    ("factor", "base"), [(4, 40889.94243248622), (2, 20221.26168973791)]
)
def test_r12_ntk_aware_base(factor, base):
    built = frequencies.ntk(128, factor=factor).inv_freq
    np.testing.assert_allclose(built, plain(128, base), rtol=1e-13)
    assert built[0] == 1.0
    np.testing.assert_allclose(built[-1], plain(128)[-1] / factor, rtol=1e-13)
    if factor == 4:
        assert built[-1] == pytest.approx(2.88695496e-05, rel=1e-8)


def test_r13_dynamic_ntk_follows_the_length_of_each_call():
    bases = {
        4096: 30527.7367488067,
        1024: 10000.0,
        2048: 10000.0,
        8192: 72195.86008650938,
    }
    for length, base in bases.items():
        built = frequencies.dynamic_ntk(
            128, factor=2, max_position_embeddings=2048, seq_len=length
        ).inv_freq
        np.testing.assert_allclose(built, plain(128, base), rtol=1e-13)
        if length <= 2048:
            np.testing.assert_array_equal(built, frequencies.default(128).inv_freq)
        if length == 4096:
            assert built[1] == pytest.approx(0.8509942913, rel=1e-9)
            assert built[63] == pytest.approx(3.849273282e-05, rel=1e-9)


def test_r14_yarn_magnitude_factor():
    length = {"original_max_position_embeddings": 2048}
    defaults = {
        1: 1.0,
        2: 1.0693147181,
        4: 1.1386294361,
        16: 1.2772588722,
        64: 1.4158883083,
        128: 1.4852030264,
    }
    for factor, magnitude in defaults.items():
        built = frequencies.yarn(64, factor=factor, **length)
        assert built.attention_factor == pytest.approx(magnitude, abs=1e-10)
    explicit = frequencies.yarn(64, factor=64, attention_factor=1.0, **length)
    assert explicit.attention_factor == 1.0
    explicit = frequencies.yarn(64, factor=128, attention_factor=1.4852030264, **length)
    assert explicit.attention_factor == 1.4852030264
    # Verbatim also beside the pair of mscales.
    explicit = frequencies.yarn(
        64, factor=4, attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0, **length
    )
    assert explicit.attention_factor == 1.5


def test_r15_yarn_frequency_blend():
    built = frequencies.yarn(
        128, factor=16, original_max_position_embeddings=4096
    ).inv_freq
    golden = {
        0: 1.0,
        20: 0.05623413252,
        21: 0.04694085999796,
        33: 0.00460043546785,
        45: 0.000151771604732,
        46: 8.33450895102e-05,
        63: 7.21738740431e-06,
    }
    for pair, value in golden.items():
        assert built[pair] == pytest.approx(value, rel=1e-9)
    base = frequencies.default(128).inv_freq
    np.testing.assert_array_equal(built[:21], base[:21])
    np.testing.assert_array_equal(built[46:], base[46:] / 16)
    np.testing.assert_allclose(built, yarn_in_a_loop(128, 1e4, 16, 4096), rtol=1e-13)


def test_r16_llama3_bands():
    built = frequencies.llama3(64, factor=32).inv_freq
    base = plain(64, 500_000.0)
    np.testing.assert_allclose(built[:15], base[:15], rtol=1e-14)
    np.testing.assert_allclose(built[18:], base[18:] / 32, rtol=1e-14)
    np.testing.assert_allclose(
        built[14:19],
        [
            3.211445995e-3,
            0.001290547928209,
            0.000429556796559,
            9.70828780263e-05,
            1.946163818e-5,
        ],
        rtol=1e-9,
    )
    # The defaults are those of Llama-3.1, whose slow end is divided by 8.
    assert frequencies.llama3(64).inv_freq[-1] == pytest.approx(base[-1] / 8, rel=1e-14)


def test_llama3_with_equal_factors_is_a_step():
    built = frequencies.llama3(
        64, factor=16, low_freq_factor=1.0, high_freq_factor=1.0
    ).inv_freq
    base = plain(64, 500_000.0)
    turns = 8192 * base / (2 * np.pi)
    np.testing.assert_allclose(built, np.where(turns > 1, base, base / 16), rtol=1e-14)


def test_r17_longrope_chooses_by_length():
    options = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, **PHI3}
    base = frequencies.default(96).inv_freq
    short = frequencies.longrope(96, seq_len=4096, **options)
    long = frequencies.longrope(96, seq_len=4097, **options)
    np.testing.assert_array_equal(short.inv_freq, base)
    np.testing.assert_array_equal(long.inv_freq, base / 2)
    np.testing.assert_array_equal(frequencies.longrope(96, **options).inv_freq, base)
    for built in (short, long):
        assert built.attention_factor == pytest.approx(1.1902380714, abs=1e-10)
    same = {**options, "max_position_embeddings": 4096}
    assert frequencies.longrope(96, **same).attention_factor == 1.0
    explicit = frequencies.longrope(96, attention_factor=1.25, **options)
    assert explicit.attention_factor == 1.25
    by_factor = {
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 4096,
        "factor": 32,
    }
    assert frequencies.longrope(96, **by_factor).attention_factor == pytest.approx(
        1.1902380714, abs=1e-10
    )


def test_longrope_divides_each_pair_by_its_own_entry():
    short, long = [1.0, 1.5, 2.0], [4.0, 8.0, 16.0]
    built = frequencies.longrope(
        6,
        theta=1e6,
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=32,
        factor=4,
        seq_len=33,
    )
    np.testing.assert_allclose(built.inv_freq, [0.25, 1e-2 / 8, 1e-4 / 16], rtol=1e-13)


def test_traced_lengths_share_one_compilation_and_follow_the_host():
    traces = []

    @jax.jit
    def both(seq_len):
        traces.append(None)
        dynamic = frequencies.dynamic_ntk(
            64, factor=4, max_position_embeddings=2048, seq_len=seq_len
        )
        long = frequencies.longrope(
            8,
            short_factor=[1, 1.1, 1.2, 1.3],
            long_factor=[2, 4, 8, 16],
            seq_len=seq_len,
            **PHI3,
        )
        return dynamic, long

    for length in (7, 2048, 2049, 4096, 4097, 8192, 131072):
        dynamic, long = both(length)
        assert dynamic.inv_freq.dtype == long.inv_freq.dtype == jnp.float32
        host = frequencies.dynamic_ntk(
            64, factor=4, max_position_embeddings=2048, seq_len=length
        )
        np.testing.assert_allclose(dynamic.inv_freq, host.inv_freq, rtol=1e-6)
        host = frequencies.longrope(
            8,
            short_factor=[1, 1.1, 1.2, 1.3],
            long_factor=[2, 4, 8, 16],
            seq_len=length,
            **PHI3,
        )
        np.testing.assert_allclose(long.inv_freq, host.inv_freq, rtol=1e-7)
        assert long.attention_factor == host.attention_factor
    assert len(traces) == 1


@pytest.mark.parametrize(("ntk_factor", "extrapolation_factor"), [(1, 1), (0.5, 0.25)])
def test_ntk_by_parts_against_a_loop(ntk_factor, extrapolation_factor):
    dim, theta, factor, length = 128, 10_000.0, 4.0, 2048
    built = frequencies.ntk_by_parts(
        dim,
        factor=factor,
        original_max_position_embeddings=length,
        ntk_factor=ntk_factor,
        extrapolation_factor=extrapolation_factor,
    ).inv_freq

    def band(fast, slow, i):
        low = dim * math.log(length / (2 * math.pi * fast)) / (2 * math.log(theta))
        high = dim * math.log(length / (2 * math.pi * slow)) / (2 * math.log(theta))
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        return min(max((i - low) / (high - low), 0), 1)

    for i in range(dim // 2):
        base = theta ** (-2 * i / dim)
        aware = (theta * factor ** (dim / (dim - 2))) ** (-2 * i / dim)
        m1 = (1 - band(1.25, 0.75, i)) * ntk_factor
        m2 = (1 - band(16, 2, i)) * extrapolation_factor
        value = (base / factor * (1 - m1) + aware * m1) * (1 - m2) + base * m2
        assert built[i] == pytest.approx(value, rel=1e-13)


def test_proportional_keeps_the_fast_end_and_stops_the_rest():
    built = frequencies.proportional(64, theta=1e6, proportion=0.25).inv_freq
    np.testing.assert_allclose(
        built[:8],
        [
            1,
            0.649381632,
            0.421696503,
            0.273841963,
            0.177827941,
            0.115478198,
            0.074989421,
            0.048696753,
        ],
        rtol=1e-8,
    )
    np.testing.assert_array_equal(built[8:], np.zeros(24))
    halved = frequencies.proportional(64, theta=1e6, proportion=0.25, factor=2)
    np.testing.assert_array_equal(halved.inv_freq, built / 2)
    whole = frequencies.proportional(64, proportion=1.0).inv_freq
    np.testing.assert_array_equal(whole, frequencies.default(64).inv_freq)
    # The pairs that stand still pass through bit for bit, pairing i with i + H/2.
    x = jnp.arange(64, dtype=jnp.float32).reshape(1, 1, 64) + 0.1
    turned = rope(x, jnp.array([12345]), Frequencies(built))
    for still in (slice(8, 32), slice(40, 64)):
        np.testing.assert_array_equal(turned[..., still], x[..., still])
    assert not np.any(turned[..., :8] == x[..., :8])


def test_hope_stops_pairs_that_never_turn_round_in_training():
    built = frequencies.hope(64, original_max_position_embeddings=512).inv_freq
    base = plain(64)
    kept = 2 * np.pi / base <= 512
    assert kept.sum() == 16  # 1e4 ** (i / 32) <= 512 / (2 pi)
    np.testing.assert_allclose(built, np.where(kept, base, 0), rtol=1e-14)
    assert built[15] > 0 and built[16] == 0


def test_axial_ladders():
    shared = frequencies.axial(64).inv_freq
    np.testing.assert_allclose(
        shared, [100.0 ** (-4 * j / 64) for j in range(16)], rtol=1e-14
    )
    strided = frequencies.axial(64, theta=1e4, strided=True).inv_freq
    base = plain(64)
    np.testing.assert_allclose(
        strided, np.concatenate([base[0::2], base[1::2]]), rtol=1e-14
    )
    three = frequencies.axial(48, axes=3).inv_freq
    np.testing.assert_allclose(three, plain(16, 100.0), rtol=1e-14)


def test_mixed_starts_on_two_orthogonal_directions_a_head():
    built = frequencies.mixed(jax.random.key(0), 32, num_heads=4)
    inv_freq = np.asarray(built.inv_freq, np.float64)
    assert inv_freq.shape == (2, 4, 16)
    magnitude = np.array([10.0 ** (-4 * j / 32) for j in range(8)])
    size = np.hypot(inv_freq[0], inv_freq[1])
    wanted = np.broadcast_to(np.concatenate([magnitude, magnitude]), (4, 16))
    np.testing.assert_allclose(size, wanted, rtol=1e-6)
    first, second = inv_freq[:, :, :8], inv_freq[:, :, 8:]
    np.testing.assert_allclose((first * second).sum(0), np.zeros((4, 8)), atol=1e-7)
    phi = np.arctan2(first[1], first[0])
    np.testing.assert_allclose(phi, np.broadcast_to(phi[:, :1], phi.shape), atol=1e-5)
    assert np.unique(phi[:, 0].round(3)).size == 4
    upright = frequencies.mixed(jax.random.key(0), 32, num_heads=1, rotate=False)
    np.testing.assert_allclose(
        upright.inv_freq[:, 0, :],
        np.stack([np.r_[magnitude, 0 * magnitude], np.r_[0 * magnitude, magnitude]]),
        rtol=1e-6,
    )


def test_fault_01_theta_is_never_forgotten():
    """Two sets of one width and another theta stay apart in one process."""
    x = jnp.ones((3, 1, 8))
    first = rope(x, None, frequencies.default(8, theta=1e4))
    second = rope(x, None, frequencies.default(8, theta=1e6))
    assert float(jnp.abs(first - second).max()) > 0.05
    np.testing.assert_array_equal(rope(x, None, frequencies.default(8)), first)


def test_fault_02_yarn_limits_come_from_the_whole_width():
    """The band is (16, 41) at this width, not the (8, 21) of half of it."""
    built = frequencies.yarn(
        128, factor=4, original_max_position_embeddings=2048
    ).inv_freq
    base = frequencies.default(128).inv_freq
    ratio = built / base
    np.testing.assert_array_equal(ratio[:17], np.ones(17))
    np.testing.assert_array_equal(built[41:], base[41:] / 4)
    assert 0.25 < ratio[40] < ratio[17] < 1
    np.testing.assert_allclose(built, yarn_in_a_loop(128, 1e4, 4, 2048), rtol=1e-13)


def test_yarn_upper_limit_may_lie_past_the_last_pair():
    """high = min(5, d - 1) and not R - 1: the last pair is a third interpolated."""
    built = frequencies.yarn(
        8, factor=4, original_max_position_embeddings=100_000
    ).inv_freq
    np.testing.assert_allclose(built, [1.0, 0.1, 0.01, 0.00075], rtol=1e-12)


def test_fault_04_dynamic_keeps_the_fastest_pair():
    built = frequencies.dynamic_ntk(
        64, factor=4, max_position_embeddings=2048, seq_len=8192
    ).inv_freq
    assert built[0] == 1.0


def test_fault_05_a_band_of_no_width_rises():
    """Equal limits split the ladder: kept below, interpolated above."""
    built = frequencies.yarn(
        64,
        factor=4,
        original_max_position_embeddings=2048,
        beta_fast=8,
        beta_slow=8,
        truncate=False,
    ).inv_freq
    limit = 64 * math.log(2048 / (8 * 2 * math.pi)) / (2 * math.log(1e4))
    share = np.where(np.arange(32) < limit, 1.0, 0.25)
    np.testing.assert_allclose(built, plain(64) * share, rtol=1e-13)


def test_fault_07_truncate_and_explicit_factor_are_honoured():
    options = {"factor": 32, "original_max_position_embeddings": 4096, "theta": 15e4}
    rounded = frequencies.yarn(64, **options).inv_freq
    exact = frequencies.yarn(64, truncate=False, **options).inv_freq
    np.testing.assert_allclose(
        exact, yarn_in_a_loop(64, 15e4, 32, 4096, truncate=False), rtol=1e-13
    )
    assert np.abs(rounded / exact - 1).max() > 0.05


WRONG = [
    (lambda: frequencies.default(9), "dim", "9"),
    (lambda: frequencies.default(0), "dim", "0"),
    (lambda: frequencies.default(-8), "dim", "-8"),
    (lambda: frequencies.default(8, theta=0), "theta", "0"),
    (lambda: frequencies.default(8, theta=-1.5), "theta", "-1.5"),
    (lambda: frequencies.default(8, theta=float("nan")), "theta", "nan"),
    (lambda: frequencies.linear(8, factor=0.5), "factor", "0.5"),
    (lambda: frequencies.ntk(8, factor=0.25), "factor", "0.25"),
    (lambda: frequencies.ntk(2, factor=2), "dim", "2"),
    (
        lambda: frequencies.dynamic_ntk(
            8, factor=0.9, max_position_embeddings=8, seq_len=8
        ),
        "factor",
        "0.9",
    ),
    (
        lambda: frequencies.dynamic_ntk(
            8, factor=2, max_position_embeddings=0, seq_len=8
        ),
        "max_position_embeddings",
        "0",
    ),
    (
        lambda: frequencies.dynamic_ntk(
            8, factor=2, max_position_embeddings=8, seq_len=0
        ),
        "seq_len",
        "0",
    ),
    (
        lambda: frequencies.dynamic_ntk(
            8, factor=2, max_position_embeddings=8, seq_len=jnp.array([3, 4])
        ),
        "seq_len",
        r"\(2,\)",
    ),
    (
        lambda: frequencies.yarn(8, factor=0.5, original_max_position_embeddings=8),
        "factor",
        "0.5",
    ),
    (
        lambda: frequencies.yarn(8, factor=2, original_max_position_embeddings=0),
        "original_max_position_embeddings",
        "0",
    ),
    (
        lambda: frequencies.yarn(
            8, factor=2, original_max_position_embeddings=64, beta_fast=1, beta_slow=2
        ),
        "beta_fast",
        "beta_slow=2",
    ),
    (
        lambda: frequencies.yarn(
            8, factor=2, original_max_position_embeddings=64, attention_factor=-1.0
        ),
        "attention_factor",
        "-1.0",
    ),
    (
        lambda: frequencies.yarn(
            8, theta=1.0, factor=2, original_max_position_embeddings=64
        ),
        "theta",
        "1.0",
    ),
    (
        lambda: frequencies.ntk_by_parts(
            8, factor=2, original_max_position_embeddings=64, beta=(1, 2)
        ),
        r"beta\[0\]",
        r"beta\[1\]=2",
    ),
    (
        lambda: frequencies.ntk_by_parts(
            8, factor=2, original_max_position_embeddings=64, ntk_factor=1.5
        ),
        "ntk_factor",
        "1.5",
    ),
    (
        lambda: frequencies.longrope(
            8, short_factor=[1] * 3, long_factor=[1] * 4, **PHI3
        ),
        "short_factor",
        r"\(3,\)",
    ),
    (
        lambda: frequencies.longrope(
            8, short_factor=[1] * 4, long_factor=[1] * 8, **PHI3
        ),
        "long_factor",
        r"\(8,\)",
    ),
    (
        lambda: frequencies.longrope(
            4, short_factor=[1, 0], long_factor=[1, 1], **PHI3
        ),
        "short_factor",
        r"\[1, 0\]",
    ),
    (
        lambda: frequencies.longrope(
            4,
            short_factor=[1, 1],
            long_factor=[1, 1],
            original_max_position_embeddings=4096,
        ),
        "factor",
        "None",
    ),
    (
        lambda: frequencies.longrope(
            4, short_factor=[1, 1], long_factor=[1, 1], factor=8, **PHI3
        ),
        "factor",
        "8",
    ),
    (
        lambda: frequencies.longrope(
            4,
            short_factor=[1, 1],
            long_factor=[1, 1],
            original_max_position_embeddings=4096,
            max_position_embeddings=1024,
        ),
        "max_position_embeddings",
        "1024",
    ),
    (lambda: frequencies.llama3(8, factor=0.5), "factor", "0.5"),
    (
        lambda: frequencies.llama3(8, low_freq_factor=4, high_freq_factor=1),
        "high_freq_factor",
        "low_freq_factor=4",
    ),
    (
        lambda: frequencies.llama3(8, low_freq_factor=0),
        "low_freq_factor",
        "0",
    ),
    (lambda: frequencies.proportional(8, proportion=1.5), "proportion", "1.5"),
    (lambda: frequencies.proportional(8, proportion=-0.1), "proportion", "-0.1"),
    (lambda: frequencies.proportional(7, proportion=0.5), "head_dim", "7"),
    (
        lambda: frequencies.proportional(8, proportion=0.5, factor=0.5),
        "factor",
        "0.5",
    ),
    (
        lambda: frequencies.hope(8, original_max_position_embeddings=0),
        "original_max_position_embeddings",
        "0",
    ),
    (lambda: frequencies.axial(6), "dim", "6"),
    (lambda: frequencies.axial(8, axes=0), "axes", "0"),
    (lambda: frequencies.mixed(jax.random.key(0), 6, num_heads=1), "dim", "6"),
    (lambda: frequencies.mixed(jax.random.key(0), 8, num_heads=0), "num_heads", "0"),
    (lambda: Frequencies(np.ones((2, 3, 4, 5))), "inv_freq", r"\(2, 3, 4, 5\)"),
    (lambda: Frequencies([]), "inv_freq", r"\(0,\)"),
    (lambda: Frequencies([1.0, np.inf]), "inv_freq", "inf"),
    (lambda: Frequencies([1.0], 0.0), "attention_factor", "0.0"),
    (lambda: Frequencies([1.0], jnp.ones(2)), "attention_factor", r"\(2,\)"),
]


@pytest.mark.parametrize(("call", "name", "value"), WRONG, ids=[w[1] for w in WRONG])
def test_r10_wrong_arguments_are_named_with_their_value(call, name, value):
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        call()
