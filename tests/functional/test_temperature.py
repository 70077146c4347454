"""The log-n temperature: its values, its clip and its range of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional.temperature import logn_temperature


def test_literal_values():
    """log 32 / log 16 is 5/4, and up to the trained length there is none."""
    values = logn_temperature(jnp.array([0, 7, 15, 31, 255, 4095]), length=16)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, [1, 1, 1, 1.25, 2, 3], rtol=1e-6)


def test_float64_reference_for_rows_of_their_own_under_jit():
    positions = np.random.default_rng(0).integers(0, 2**31 - 1, (2, 50))
    right = np.maximum(1.0, np.log(positions + 1.0) / np.log(512.0))
    values = jax.jit(lambda p: logn_temperature(p, length=512))(positions)
    np.testing.assert_allclose(values, right, rtol=1e-6)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        logn_temperature(jnp.arange(3), length=1)
    with pytest.raises(ValueError, match="positions must be integers"):
        logn_temperature(jnp.arange(3.0), length=4)
