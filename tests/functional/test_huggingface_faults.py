"""Faults of other libraries that a config can reach: none may occur here.

The numbers in the names are those of a list of fifteen faults found by reading and
running eleven JAX and PyTorch libraries.
"""

import copy
import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np

from rope_jax.functional import frequencies
from rope_jax.functional.huggingface import rope_from_hf
from rope_jax.functional.rotary import rope

CONFIGS = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "configs.json").read_text()
)
LLAMA = CONFIGS["tiny-llama"]
YARN = CONFIGS["tiny-llama-yarn"]["rope_scaling"]
LONG = CONFIGS["tiny-llama-longrope"]["rope_scaling"]


def plain(dim, theta=10_000.0):
    """The ladder of RoFormer, float64 [dim/2]."""
    return theta ** (-np.arange(0, dim, 2) / dim)


def inv_freq(config, **options):
    """The inverse frequencies of a config."""
    return np.asarray(rope_from_hf(config, **options).frequencies.inv_freq)


def with_block(block, **changes):
    """A small Llama with a rope block in the form of transformers 4."""
    return LLAMA | {"rope_scaling": block} | changes


def without(mapping, *names):
    """A copy that lacks some keys."""
    return {key: value for key, value in mapping.items() if key not in names}


def test_fault_01_two_configs_in_one_process_do_not_interact():
    """A cache keyed without the base gave the second model the first one's table."""
    x = jnp.ones((3, 1, 64))
    configs = [LLAMA, LLAMA | {"rope_theta": 1e6}, LLAMA]
    out = [rope(x, None, rope_from_hf(config).frequencies) for config in configs]
    assert float(jnp.abs(out[0] - out[1]).max()) > 0.1
    np.testing.assert_array_equal(out[0], out[2])


def test_fault_02_yarn_band_magnitude_and_single_division():
    """The band counts in channels of d, and positions are not divided again."""
    block = YARN | {"original_max_position_embeddings": 2048}
    spec = rope_from_hf(with_block(block, head_dim=128, max_position_embeddings=8192))
    found, ladder = np.asarray(spec.frequencies.inv_freq), plain(128)
    np.testing.assert_allclose(found[:17], ladder[:17], rtol=1e-14)
    assert found[17] < 0.99 * ladder[17]
    assert found[40] > 1.01 * ladder[40] / 4
    np.testing.assert_allclose(found[41:], ladder[41:] / 4, rtol=1e-14)
    factor = spec.frequencies.attention_factor
    assert math.isclose(factor, 1.138629436, rel_tol=1e-9)


def test_fault_03_llama3_scaling_reaches_the_rotation():
    """The scaled table was computed and the plain one used."""
    x = jnp.ones((1, 1, 64))
    position = jnp.array([100_000])
    scaled = rope(x, position, rope_from_hf(CONFIGS["llama-3.2-1b"]).frequencies)
    turned = math.cos(100_000 * 9.418306725e-8) - math.sin(100_000 * 9.418306725e-8)
    np.testing.assert_allclose(scaled[0, 0, 31], turned, rtol=1e-6)


def test_fault_04_dynamic_rescales_the_base_and_follows_the_length():
    """Not a division of all pairs: the fastest keeps its turn."""
    config = with_block({"rope_type": "dynamic", "factor": 2.0})
    found = inv_freq(config, seq_len=8192)
    expected = [1, 6.052156967e-2, 3.662860395e-3, 2.216820606e-4, 1.905030617e-5]
    np.testing.assert_allclose(found[[0, 8, 16, 24, 31]], expected, rtol=1e-9)
    np.testing.assert_allclose(inv_freq(config, seq_len=1024), plain(64))


def test_fault_05_a_band_of_no_width_is_a_step_the_right_way():
    """low == high: fast pairs stay, slow pairs are divided."""
    block = YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}
    found = inv_freq(with_block(block))
    turns = 512 * plain(64) / (2 * np.pi)
    expected = np.where(turns > 1, plain(64), plain(64) / 4)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_fault_06_positions_past_the_original_length_are_not_clamped():
    """A table of the original length gave every later position its last row."""
    spec = rope_from_hf(CONFIGS["llama-3.1-8b"])
    x = jnp.ones((1, 1, 128))
    rows = [
        rope(x, jnp.array([position]), spec.frequencies)
        for position in (8191, 8192, 131_071)
    ]
    assert float(jnp.abs(rows[0] - rows[1]).max()) > 0.1
    assert float(jnp.abs(rows[1] - rows[2]).max()) > 0.1


def test_fault_07_truncate_is_honoured():
    """gpt-oss asks for a band whose ends are not rounded."""
    found = inv_freq(CONFIGS["gpt-oss-20b"])
    expected = [5.08132748e-2, 4.56483919e-4, 4.09997848e-6, 3.02351143e-7]
    np.testing.assert_allclose(found[[8, 16, 24, 31]], expected, rtol=1e-8)
    rounded = copy.deepcopy(CONFIGS["gpt-oss-20b"])
    rounded["rope_scaling"]["truncate"] = True
    assert abs(inv_freq(rounded)[16] / found[16] - 1) > 0.01


def test_fault_07_attention_factor_is_kept():
    """It was dropped for a name that only one library uses; it is verbatim here."""
    spec = rope_from_hf(with_block(YARN | {"attention_factor": 1.4852030264}))
    assert spec.frequencies.attention_factor == 1.4852030264


def test_fault_09_llama3_parameters_come_from_the_config():
    """Constants of Llama-3.1 (factor 8) were used for Llama-3.2 (factor 32)."""
    found = inv_freq(CONFIGS["llama-3.2-1b"])
    expected = [3.211445995e-3, 1.290547928e-3, 4.295567966e-4, 9.708287803e-5]
    np.testing.assert_allclose(found[14:18], expected, rtol=1e-9)
    np.testing.assert_allclose(found[18:], plain(64, 5e5)[18:] / 32, rtol=1e-14)


def test_fault_10_nested_truncate_and_a_null_head_dim():
    """`truncate` is read from the block of the layer type, and head_dim may be null."""
    block = YARN | {"rope_theta": 10_000.0, "truncate": False}
    nested = {"full_attention": block, "sliding_attention": {"rope_theta": 100.0}}
    config = without(LLAMA, "rope_theta") | {"rope_parameters": nested}
    found = inv_freq(config | {"head_dim": None}, layer_type="full_attention")
    options = {"factor": 4, "original_max_position_embeddings": 512}
    exact = frequencies.yarn(64, truncate=False, **options).inv_freq
    np.testing.assert_array_equal(found, exact)
    assert np.abs(found - frequencies.yarn(64, **options).inv_freq).max() > 1e-4
    for block in (YARN, LONG, {"rope_type": "dynamic", "factor": 2.0}):
        assert rope_from_hf(with_block(block, head_dim=None)).rotary_dim == 64


def test_fault_11_phimoe_uses_its_long_factors():
    """They were computed without the length, so that only the magnitude changed."""
    config = CONFIGS["phi-3.5-moe"]
    long = np.array(config["rope_scaling"]["long_factor"])
    found = inv_freq(config, seq_len=4097)
    np.testing.assert_allclose(found, plain(128) / long)


def test_fault_12_the_default_type_honours_the_share():
    """Llama's plain frequencies ignored partial_rotary_factor."""
    spec = rope_from_hf(LLAMA | {"partial_rotary_factor": 0.5})
    np.testing.assert_allclose(spec.frequencies.inv_freq, plain(32))
    x = jnp.ones((2, 1, 64))
    turned = rope(x, None, spec.frequencies, layout=spec.layout)
    np.testing.assert_array_equal(turned[..., 32:], x[..., 32:])
