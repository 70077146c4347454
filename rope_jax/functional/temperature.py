"""Temperature of the attention scores by how many keys there are to choose from."""

import math

import jax
import jax.numpy as jnp

from rope_jax.functional.distance import time_positions
from rope_jax.functional.frequency_set import check_count


def logn_temperature(positions: jax.Array, *, length: int) -> jax.Array:
    """Return what queries are multiplied by for log-n attention.

    max(1, log n / log L) for n = position + 1, the number of positions up to the query,
    and L the length that was trained. Softmax over n scores spreads as n grows;
    scores that grow as log n keep its entropy about where it was in training. Up to
    the training length nothing changes.

    Args:
      positions: integer, [T] or [..., T], of the queries, counted from 0 in each
        document; may be traced.
      length: L, at least 2.

    Returns:
      float32 of the shape of `positions`, 1 or more.

    Raises:
      ValueError: when positions are not integers with a time axis, or `length` is
        below 2.

    >>> logn_temperature(jnp.array([0, 15, 255]), length=16).tolist()
    [1.0, 1.0, 2.0]

    Source: Su 2021 ("scaled by log n", kexue.fm/archives/8823), in the form of
    github.com/bojone/rerope: clipped at 1, so that it needs no training.
    """
    length = check_count("length", length, at_least=2)
    count = time_positions(positions, "positions").astype(jnp.float32) + 1.0
    return jnp.log(jnp.maximum(count, length)) / math.log(length)
