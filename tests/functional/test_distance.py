"""Positions as int32, and distances between them: exact, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional.additive import binary_encoding
from rope_jax.functional.alibi import alibi_bias
from rope_jax.functional.distance import distances, relative_positions


@pytest.mark.parametrize("far", [2**40 + 3, -(2**31) - 1, 2**31])
def test_a_host_position_beyond_int32_is_never_wrapped(far):
    """2**40 + 3 would be position 3."""
    at = np.array([0, far], np.int64)
    for call in (
        lambda: distances(at, jnp.arange(3)),
        lambda: alibi_bias(np.float32([0.5]), at, jnp.arange(3)),
        lambda: binary_encoding(at, 4),
        lambda: binary_encoding([0, far], 4),
    ):
        with pytest.raises(ValueError, match=rf"positions must fit int32.*{far}"):
            call()


def test_the_ends_of_int32_are_positions():
    ends = np.array([-(2**31), 2**31 - 1], np.int64)
    assert distances(ends, ends).tolist() == [[0.0, 2.0**32], [2.0**32, 0.0]]
    near = relative_positions(ends, ends - np.array([-5, 5]))
    assert np.diagonal(near).tolist() == [5, -5]


def test_a_list_may_hold_traced_positions():
    traced = jax.jit(lambda t: distances([t, t + 2], [0]))(jnp.int32(7))
    assert traced.tolist() == [[7.0], [9.0]]


def test_leading_axes_that_do_not_fit_are_named():
    query, key = jnp.zeros((2, 3), int), jnp.zeros((5, 3), int)
    for function in (distances, relative_positions):
        with pytest.raises(ValueError, match=r"leading axes of query_pos.*\(5, 1"):
            function(query, key)
