"""Cosine and sine of exact phases, and how the rotation that uses them compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional.phases import cos_sin
from rope_jax.functional.rotary import rope


def test_quarter_turns_are_exact():
    cos, sin = cos_sin(jnp.array([0, 2**30, 2**31, 3 * 2**30], jnp.uint32))
    assert np.asarray(cos).tolist() == [1.0, 0.0, -1.0, 0.0]
    assert np.asarray(sin).tolist() == [0.0, 1.0, 0.0, -1.0]


def test_against_float64_over_the_whole_turn():
    # Evenly spread, at random, and around each of the eighths where quarters meet.
    even = np.arange(0, 2**32, 2**16)
    drawn = np.random.default_rng(0).integers(0, 2**32, 200_000)
    edges = (np.arange(0, 2**32, 2**29)[:, None] + np.arange(-3, 4)).ravel() % 2**32
    phases = np.concatenate([even, drawn, edges]).astype(np.uint32)
    cos, sin = jax.jit(cos_sin)(phases)
    angles = phases.astype(np.float64) * (2 * np.pi / 2**32)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=1.1e-7)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=1.1e-7)


def test_small_phases_keep_their_relative_precision():
    phases = np.array([1, 2, 3, 1000, 2**20 + 1], np.uint32)
    sin = cos_sin(jnp.asarray(phases))[1]
    expected = np.sin(phases.astype(np.float64) * (2 * np.pi / 2**32))
    np.testing.assert_allclose(sin, expected, rtol=2e-7)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("half", "float32"), ("half", "bfloat16"), ("interleaved", "float32")],
)
def test_a_rotation_has_no_pass_for_each_half(layout, dtype):
    x = jax.ShapeDtypeStruct((2, 16, 2, 8), dtype)
    compiled = jax.jit(lambda x: rope(x, layout=layout)).lower(x).compile()
    assert "concatenate(" not in compiled.as_text()
