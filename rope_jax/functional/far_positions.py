"""Rotary scores with two rules: exact near by, other positions beyond a window.

ReRoPE and Self-Extend keep a distance below the window as it is and replace the ones
beyond it by some that were seen in training. No single rotation does that, so there
are two scores for each pair: that of queries and keys rotated to their own positions,
and that of the same rotated to the far ones (`rope_jax.rerotate` moves them).
`far_bias` is what turns the first kind of score into the second beyond the window, as
a bias, block by block.

Letters: T query time, S key time, N query heads, K key heads, H head dim.
"""

import jax
import jax.numpy as jnp

from rope_jax.functional.attention_request import pair_products
from rope_jax.functional.distance import relative_positions, time_positions, to_rank
from rope_jax.functional.frequency_set import check_count

Pair = tuple[jax.Array, jax.Array]


def rerope_positions(
    query_positions: jax.Array, key_positions: jax.Array, *, window: int
) -> Pair:
    """Return the far positions of ReRoPE: the window for queries, 0 for keys.

    Their distance is the window, whatever the true one; `rerope_distances` has both
    rules in one.

    Args:
      query_positions: integer, [T] or [..., T].
      key_positions: integer, [S] or [..., S].
      window: w, in positions, at least 1.

    Returns:
      int32 positions of the same shapes.

    Raises:
      ValueError: when positions are not integers with a time axis, or `window` is not
        positive.

    >>> [p.tolist() for p in rerope_positions(jnp.arange(3), jnp.arange(2), window=8)]
    [[8, 8, 8], [0, 0]]

    Source: Su 2023, "Rectified Rotary Position Embeddings"
    (github.com/bojone/rerope).
    """
    window = check_count("window", window)
    query = time_positions(query_positions, "query_positions")
    key = time_positions(key_positions, "key_positions")
    return jnp.full_like(query, window), jnp.zeros_like(key)


def self_extend_positions(
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    window: int,
    group_size: int,
) -> Pair:
    """Return the far positions of Self-Extend: `group_size` neighbours share one.

    A key at j stands at j // g and a query at i at i // g + w - w // g, so that the
    grouped distances go on about where the exact ones end; `self_extend_distances`
    has both rules in one.

    Args:
      query_positions: integer, [T] or [..., T].
      key_positions: integer, [S] or [..., S].
      window: w, in positions, at least 1.
      group_size: g, positions that share one number, at least 1.

    Returns:
      int32 positions of the same shapes.

    Raises:
      ValueError: when positions are not integers with a time axis, or `window` or
        `group_size` is not positive.

    >>> far = self_extend_positions(
    ...     jnp.arange(5, 9), jnp.arange(4), window=4, group_size=2
    ... )
    >>> [p.tolist() for p in far]
    [[4, 5, 5, 6], [0, 0, 1, 1]]

    Source: Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without
    Tuning" (arXiv 2401.01325), section 3 and algorithm 1.
    """
    window = check_count("window", window)
    group_size = check_count("group_size", group_size)
    query = time_positions(query_positions, "query_positions")
    key = time_positions(key_positions, "key_positions")
    return query // group_size + window - window // group_size, key // group_size


def far_bias(
    near: Pair,
    far: Pair,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    window: int,
    scale: float,
) -> jax.Array:
    """Return what added to the near scores gives the far ones beyond the window.

    scale * (far_q . far_k - near_q . near_k) where query minus key position is
    `window` or more, and 0 elsewhere.

    Args:
      near: queries [..., T, N, H] and keys [..., S, K, H] at their own positions.
      far: the same at the far positions.
      query_positions: integer, [T] or [..., T], the queries' own.
      key_positions: integer, [S] or [..., S], the keys' own.
      window: the least distance that is far.
      scale: what attention multiplies products by.

    Returns:
      [..., N, T, S], float32 or better.

    >>> ones = jnp.ones((3, 1, 2))
    >>> at = jnp.arange(3)
    >>> far_bias((ones, ones), (ones, 2 * ones), at, at, window=2, scale=1.0).tolist()
    [[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]]
    """
    change = (pair_products(*far) - pair_products(*near)) * scale
    beyond = relative_positions(query_positions, key_positions) <= -window
    if beyond.ndim > 2:  # positions of each row: the heads go between
        beyond = jnp.expand_dims(beyond, -3)
    return jnp.where(to_rank(beyond, change.ndim), change, 0.0)
