"""The names and arguments that users of `import rope_jax` call."""

import inspect

import pytest

import rope_jax
from rope_jax import frequencies

# One line for each function: its arguments as written, without annotations.
SIGNATURES = {
    rope_jax.rope: (
        "x, positions=None, frequencies=None, *, layout='half', inverse=False"
    ),
    rope_jax.rope_angles: "positions, inv_freq",
    rope_jax.apply_rope: "x, cos, sin, *, layout='half', inverse=False",
    rope_jax.rerotate: (
        "x, from_positions, to_positions, frequencies, to_frequencies=None, *, "
        "layout='half'"
    ),
    rope_jax.convert_layout: "x, *, source, target, rotary_dim=None",
    rope_jax.convert_projection: (
        "kernel, *, num_heads, source, target, rotary_dim=None"
    ),
    rope_jax.multi_axis_angles: "positions, inv_freq, *, sections, style",
    rope_jax.xpos_scale: "positions, dim, *, scale_base=512.0, center=0",
    rope_jax.alibi_slopes: "num_heads",
    rope_jax.alibi_bias: (
        "slopes, query_positions, key_positions, *, form='symmetric'"
    ),
    rope_jax.AlibiBias: "slopes, query_positions=None, key_positions=None",
    rope_jax.alibi_fold: (
        "query, key, slopes, query_positions, key_positions, *, scale=None"
    ),
    rope_jax.sinusoidal: (
        "positions, dim, *, max_timescale=10000.0, order='interleaved', spacing='paper'"
    ),
    rope_jax.integer_encoding: "positions, dim",
    rope_jax.binary_encoding: "positions, dim",
    rope_jax.positions_from_segments: "segment_ids",
    rope_jax.positions_from_mask: "mask",
    rope_jax.random_positions: "key, length, max_length",
    rope_jax.grid_positions: "*shape",
    rope_jax.attention: (
        "query, key, value, *, query_positions=None, key_positions=None, bias=None, "
        "causal=True, window=None, segment_ids=None, key_mask=None, scale=None, "
        "implementation='auto'"
    ),
    rope_jax.rope_from_hf: "config, *, layer_type=None, layer_index=None, seq_len=None",
    frequencies.default: "dim, *, theta=10000.0",
    frequencies.linear: "dim, *, theta=10000.0, factor",
    frequencies.ntk: "dim, *, theta=10000.0, factor",
    frequencies.dynamic_ntk: (
        "dim, *, theta=10000.0, factor, max_position_embeddings, seq_len"
    ),
    frequencies.yarn: (
        "dim, *, theta=10000.0, factor, original_max_position_embeddings, "
        "beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=None, "
        "mscale=None, mscale_all_dim=None"
    ),
    frequencies.longrope: (
        "dim, *, theta=10000.0, short_factor, long_factor, "
        "original_max_position_embeddings, max_position_embeddings=None, factor=None, "
        "attention_factor=None, seq_len=None"
    ),
    frequencies.llama3: (
        "dim, *, theta=500000.0, factor=8.0, low_freq_factor=1.0, "
        "high_freq_factor=4.0, original_max_position_embeddings=8192"
    ),
    frequencies.proportional: "head_dim, *, theta=10000.0, proportion, factor=1.0",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_arguments(function):
    signature = inspect.signature(function)
    bare = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in signature.parameters.values()
    ]
    shown = inspect.Signature(bare)
    assert str(shown) == f"({SIGNATURES[function]})"


def test_every_public_name_is_documented():
    for name in rope_jax.__all__:
        assert getattr(rope_jax, name).__doc__, name
    for name in frequencies.__all__:
        assert getattr(frequencies, name).__doc__, name
