"""Frequencies and rotations against numbers that transformers made.

The peer keeps inverse frequencies in float32 (1e-6 relative, through a float32 power)
and forms the angle as a float32 product, so its angle p * f is off by up to
1.1e-6 * p * f radians where ours is exact. Each comparison allows just that, pair by
pair, and a second one gives `rope` the peer's own float32 frequencies, which leaves
rounding alone.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rope_jax.functional.frequencies import Frequencies
from rope_jax.functional.huggingface import rope_from_hf
from rope_jax.functional.huggingface_families import FAMILIES
from rope_jax.functional.rotary import (
    apply_rope,
    convert_layout,
    multi_axis_angles,
    rope,
)

HERE = pathlib.Path(__file__).resolve().parent
CONFIGS = json.loads((HERE / "configs.json").read_text())
with np.load(HERE / "transformers.npz") as archive:
    GOLDEN = dict(archive)
RUNS = [key.removesuffix("/positions") for key in GOLDEN if key.endswith("/positions")]
# These return the rotated channels in the other order than they take them.
REORDERED = ("deepseek-v3",)


def spec_of(run):
    """What `rope_from_hf` makes of the config of a run, and the head dim."""
    name, layer_type, length = run.rsplit("/", 2)
    return rope_from_hf(
        CONFIGS[name],
        layer_type=None if layer_type == "None" else layer_type,
        seq_len=None if length == "None" else int(length),
    )


def rotated(run, spec, frequencies, dtype, which="query"):
    """Our rotation of the input of a run: [1, T, 1, H], in float32 or bfloat16."""
    positions = jnp.asarray(GOLDEN[f"{run}/positions"], jnp.int32)
    head_dim = GOLDEN[f"{run}/float32/query"].shape[-1]
    x = GOLDEN[f"inputs/{which}"][:, : positions.shape[-1], :, :head_dim]
    x = jnp.asarray(x, dtype)
    if spec.sections is None:
        out = rope(x, positions, frequencies, layout=spec.layout)
    else:
        angles = multi_axis_angles(
            positions.T,
            frequencies.inv_freq,
            sections=spec.sections,
            style=spec.section_style,
        )
        out = apply_rope(x, jnp.cos(angles), jnp.sin(angles), layout=spec.layout)
    if run.startswith(REORDERED):
        out = convert_layout(
            out, source="interleaved", target="half", rotary_dim=spec.rotary_dim
        )
    return x, np.asarray(out, np.float64)


def pair_bound(run, spec, x, *, angle=0.0, value=0.0):
    """Allowed error [1, T, 1, H]: |pair| * factor * (angle * p * f + value)."""
    positions = GOLDEN[f"{run}/positions"]
    positions = np.abs(positions.reshape(-1, positions.shape[-1])).max(0)
    inv_freq = np.abs(np.asarray(spec.frequencies.inv_freq))
    layout = "half" if run.startswith(REORDERED) else spec.layout
    x = np.asarray(x, np.float64)
    if run.startswith(REORDERED):
        x = np.asarray(convert_layout(x, source="interleaved", target="half"))
    pairs = x[..., : spec.rotary_dim].reshape(
        *x.shape[:-1], *((2, -1) if layout == "half" else (-1, 2))
    )
    norm = np.linalg.norm(pairs, axis=-2 if layout == "half" else -1)
    error = angle * positions[:, None, None] * inv_freq + value
    bound = norm * float(spec.frequencies.attention_factor) * error
    if layout == "half":
        bound = np.concatenate([bound, bound], axis=-1)
    else:
        bound = np.repeat(bound, 2, axis=-1)
    rest = np.zeros((*x.shape[:-1], x.shape[-1] - spec.rotary_dim))
    return np.concatenate([bound, rest], axis=-1)


@pytest.mark.parametrize("run", RUNS)
def test_golden_frequencies(run):
    """inv_freq within the peer's float32, and the attention factor to float64."""
    spec = spec_of(run)
    if f"{run}/inv_freq" not in GOLDEN:
        pytest.skip("the peer holds a table of sines; the rotation is compared")
    expected = GOLDEN[f"{run}/inv_freq"]
    sign = -1 if run.startswith("nanochat") else 1  # its rotation turns the other way
    np.testing.assert_allclose(
        sign * spec.frequencies.inv_freq, expected, rtol=1e-6, atol=0
    )
    factor = GOLDEN[f"{run}/attention_factor"]
    if not run.startswith("phi-3.5-moe"):  # its forward replaces the factor
        np.testing.assert_allclose(
            spec.frequencies.attention_factor, factor, rtol=1e-12
        )


@pytest.mark.parametrize("run", RUNS)
def test_golden_rotation_in_float32(run):
    """Rotated queries and keys, by our exact angles and by the peer's own."""
    spec = spec_of(run)
    for which in ("query", "key"):
        if f"{run}/float32/{which}" not in GOLDEN:
            continue
        expected = GOLDEN[f"{run}/float32/{which}"]
        x, ours = rotated(run, spec, spec.frequencies, jnp.float32, which)
        bound = pair_bound(run, spec, x, angle=1.1e-6, value=5e-7)
        assert (np.abs(ours - expected) <= bound).all(), np.abs(ours - expected).max()
    if f"{run}/inv_freq" in GOLDEN and spec.sections is None:
        sign = -1 if run.startswith("nanochat") else 1
        peers = Frequencies(
            jnp.asarray(sign * GOLDEN[f"{run}/inv_freq"]),
            spec.frequencies.attention_factor,
        )
        expected = GOLDEN[f"{run}/float32/query"]
        x, ours = rotated(run, spec, peers, jnp.float32)
        bound = pair_bound(run, spec, x, value=5e-7)
        assert (np.abs(ours - expected) <= bound).all(), np.abs(ours - expected).max()


@pytest.mark.parametrize("run", RUNS)
def test_golden_rotation_in_bfloat16(run):
    """The peer rounds cosines, products and sum, we the sum: 4 * 2**-8 of the pair."""
    spec = spec_of(run)
    expected = GOLDEN[f"{run}/bfloat16/query"].view(ml_dtypes.bfloat16)
    x, ours = rotated(run, spec, spec.frequencies, jnp.bfloat16)
    bound = pair_bound(run, spec, x, angle=1.1e-6, value=2**-6)
    error = np.abs(ours - expected.astype(np.float64))
    assert (error <= bound).all(), error.max()


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_golden_softmax_scale_of_latent_attention(name):
    """The magnitude that MLA moves from the rotation into the softmax scale."""
    np.testing.assert_allclose(
        rope_from_hf(CONFIGS[name]).softmax_scale_factor,
        GOLDEN[f"{name}/softmax_scale_factor"],
        rtol=1e-12,
    )


LAYOUTS = json.loads((HERE / "layouts.json").read_text())


def test_golden_layouts_cover_the_table():
    """Every family of the table was run, but for one name of the same code."""
    assert set(FAMILIES) - set(LAYOUTS) == {"kimi_k2"}
    assert FAMILIES["kimi_k2"] == FAMILIES["deepseek_v3"]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_golden_layout_and_defaults_of_a_family(name):
    """The pairing seen on unit vectors, and the defaults of the config class."""
    family, seen = FAMILIES[name], LAYOUTS[name]
    turn = " reversed" if family.reversed else ""
    assert f"{family.layout}{turn}" == seen["layout"]
    if seen["head_dim"] != 64 and "deepseek" not in name and name != "minicpm3":
        assert family.head_dim == seen["head_dim"]
    blocks = seen["blocks"]
    if not blocks:
        return
    full = blocks.get("full_attention", blocks)
    assert family.needs_block == (
        full["rope_type"] != "default" or name == "mimo_v2_flash"
    )
    if not family.needs_block:
        assert family.theta == full["rope_theta"]
        share = full.get("partial_rotary_factor", 1.0)
        assert family.partial_rotary_factor == share
    if "sliding_attention" in blocks and family.flat_is_full:
        local = family.local_theta or family.theta
        assert local == blocks["sliding_attention"]["rope_theta"]


def test_golden_one_compilation_serves_every_length():
    """A traced length picks the same frequencies as the peer, without retracing."""
    traces = []

    @jax.jit
    def inverse_frequencies(length):
        traces.append(length)
        dynamic = rope_from_hf(CONFIGS["llama-2-7b-dynamic2"], seq_len=length)
        long = rope_from_hf(CONFIGS["phi-3-128k"], seq_len=length)
        return dynamic.frequencies.inv_freq, long.frequencies.inv_freq

    for length in (1024, 2048, 4096, 8192):
        dynamic, _ = inverse_frequencies(jnp.int32(length))
        expected = GOLDEN[f"llama-2-7b-dynamic2/None/{length}/inv_freq"]
        np.testing.assert_allclose(dynamic, expected, rtol=2e-6)
    for length in (4096, 4097):
        _, long = inverse_frequencies(jnp.int32(length))
        expected = GOLDEN[f"phi-3-128k/None/{length}/inv_freq"]
        np.testing.assert_allclose(long, expected, rtol=1e-6)
    assert len(traces) == 1
