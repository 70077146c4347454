"""xPos: rotary scores that decay with the distance, pair by pair.

A score is sum_i zeta_i ** ((m - n) / scale_base) * (pair i of the rotated query at m
and key at n). It depends on the distance alone, but written as a factor on the query
times one on the key it overflows float32 at distances of some 35,000. So the scale is
applied block by block, around a centre near the queries of the block.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional.angles import check_positions_fit
from rope_jax.functional.distance import integers, to_rank
from rope_jax.functional.frequency_set import check_number, check_width
from rope_jax.functional.layouts import (
    check_array,
    check_layout,
    check_rotary_dim,
)

# Factors stay within 2**-120 .. 2**120: finite in float32 and bfloat16, and a pair that
# reaches the limit adds nothing to a score that the other pairs do not drown.
_MAX_OCTAVES = 120.0
# With less, the fastest pair would reach the limit within one position.
_MIN_BASE = 2.0**-6


def _octaves(dim: int, scale_base: float) -> np.ndarray:
    """Return log2(zeta_i) / scale_base [dim/2], the decay of each pair per position."""
    dim = check_width("dim", dim)
    scale_base = check_number("scale_base", scale_base, at_least=_MIN_BASE)
    zeta = (np.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
    return np.log2(zeta) / scale_base


def _decay(distance: jax.Array, octaves: np.ndarray) -> jax.Array:
    """Return zeta_i ** (distance / scale_base), limited, as float32 [..., dim/2]."""
    octaves = jnp.asarray(octaves, jnp.float32).reshape((1,) * distance.ndim + (-1,))
    exponent = distance.astype(jnp.float32)[..., None] * octaves
    return jnp.exp2(jnp.clip(exponent, -_MAX_OCTAVES, _MAX_OCTAVES))


def scale_channels(x: jax.Array, scale: jax.Array, *, layout: str) -> jax.Array:
    """Multiply the two channels of each rotary pair by a factor of its own.

    A query is scaled by `xpos_scale(positions, ...)` and a key by its inverse; both
    channels of a pair get the same factor, so scaling and rotating commute.

    Args:
      x: [..., T, N, H], floating point. 16-bit input is scaled in float32 and only the
        result is rounded.
      scale: factors [..., T, R], for all heads; the first 2R channels are scaled and
        the rest pass through.
      layout: layout of the channels, "half" or "interleaved".

    Returns:
      array of the shape and dtype of `x`.

    Raises:
      ValueError: when the layout is unknown, 2R exceeds H, or `scale` does not fit.

    >>> x = jnp.ones((1, 1, 4))
    >>> scale_channels(x, jnp.array([[2.0, 3.0]]), layout="half").ravel().tolist()
    [2.0, 3.0, 2.0, 3.0]
    >>> scale_channels(x, jnp.array([[2.0]]), layout="half").ravel().tolist()
    [2.0, 2.0, 1.0, 1.0]

    Source: Sun et al. 2022, "A Length-Extrapolatable Transformer" (arXiv 2212.10554),
    section 2.2, eq. 13.
    """
    check_layout(layout)
    x = check_array(x, 2 * scale.shape[-1])
    check_positions_fit(scale[..., 0], x, "scale")
    width = 2 * scale.shape[-1]
    both = jnp.concatenate([scale, scale], axis=-1)
    if layout == "interleaved":
        both = jnp.repeat(scale, 2, axis=-1)
    both = to_rank(both[..., None, :], x.ndim)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scaled = (x[..., :width].astype(wide) * both.astype(wide)).astype(x.dtype)
    if width == x.shape[-1]:
        return scaled
    return jnp.concatenate([scaled, x[..., width:]], axis=-1)


def xpos_scale(
    positions: jax.Array,
    dim: int,
    *,
    scale_base: float = 512.0,
    center: int | jax.Array = 0,
) -> jax.Array:
    """Return the factors of xPos for positions near `center`.

    scale[..., t, i] = zeta_i ** ((positions[..., t] - center) / scale_base) with
    zeta_i = (2i + 0.4 d) / (1.4 d) < 1. A rotated query is multiplied by it and a
    rotated key divided by it; a score then depends on the distance only, whatever the
    centre, which must be the same for both. Exponents are limited so that a factor
    stays within 2**-120 .. 2**120; far from the centre use `xpos_block`.

    Args:
      positions: [..., T] integer positions; may be traced.
      dim: rotary width d, even.
      scale_base: positions over which pair i decays by zeta_i, at least 1/64.
      center: position at which the factor is 1; an int, or an integer array that
        broadcasts to `positions`, of the same rank.

    Returns:
      float32 factors [..., T, dim/2], without unit.

    Raises:
      ValueError: when `dim` is odd, `scale_base` is below 1/64 or `positions` are not
        integers.

    >>> print(np.asarray(xpos_scale(jnp.array([0, 512]), 4)).round(4))
    [[1.     1.    ]
     [0.2857 0.6429]]

    Source: Sun et al. 2022, "A Length-Extrapolatable Transformer" (arXiv 2212.10554),
    section 2.2, eq. 13; github.com/microsoft/torchscale, xpos_relative_position.py.
    """
    octaves = _octaves(dim, scale_base)
    return _decay(integers(positions, "positions") - center, octaves)


def xpos_block(
    query: jax.Array,
    key: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    rotary_dim: int | None = None,
    scale_base: float = 512.0,
    layout: str = "half",
) -> tuple[jax.Array, jax.Array]:
    """Scale one block of rotated queries, and the keys it looks at, for xPos scores.

    The centre is the first query position of the block, c. A query at m >= c gets
    zeta ** ((m - c) / scale_base) and a key at n gets zeta ** ((c - n) / scale_base):
    for earlier keys both are at most 1, so that scores of any distance are finite, and
    the product is the decay over m - n. Keys after the last query, which a causal mask
    hides, are treated as if at that query, which keeps them finite too.

    How attention applies it: rotate queries and keys once (`rope`), keep the keys in
    the cache rotated but not scaled, and for each block of queries call this with all
    keys, then take the product and mask. The spread of the query positions within a
    block should stay below 16,384 * scale_base / 512. For rows of packed documents pass
    indices into the row instead of positions that restart: within a document the
    distances are the same.

    Args:
      query: [..., T, N, H] rotated queries of one block.
      key: [..., S, N, H] rotated keys; the number of heads may differ.
      query_positions: [T] or [..., T] integer positions.
      key_positions: [S] or [..., S] integer positions.
      rotary_dim: number of channels 2R that were rotated; the rest are not scaled.
        None means all H.
      scale_base: positions over which pair i decays by zeta_i, at least 1/64.
      layout: layout of the channels, "half" or "interleaved".

    Returns:
      (query, key) scaled, of the shapes and dtypes given.

    Raises:
      ValueError: when the layout is unknown, the rotary width is odd or exceeds H, or
        positions are not integers, or `scale_base` is below 1/64.

    >>> one = jnp.ones((1, 1, 2))
    >>> query, key = xpos_block(one, one, jnp.array([131_072]), jnp.array([130_560]))
    >>> round(float((query * key).sum()), 4)   # 2 * 0.2857
    0.5714

    Source: Sun et al. 2022, "A Length-Extrapolatable Transformer" (arXiv 2212.10554),
    sections 2.2 and 2.3.
    """
    check_layout(layout)
    query = check_array(query, name="query")
    width = check_rotary_dim(rotary_dim, query.shape[-1])
    key = check_array(key, width, name="key")
    octaves = _octaves(width, scale_base)
    query_positions = integers(query_positions, "query_positions")
    key_positions = integers(key_positions, "key_positions")
    for name, x, positions in [
        ("query_positions", query, query_positions),
        ("key_positions", key, key_positions),
    ]:
        check_positions_fit(positions, x, name)
    rank = max(query_positions.ndim, key_positions.ndim)
    query_positions = to_rank(query_positions, rank)
    key_positions = to_rank(key_positions, rank)
    center = query_positions.min(axis=-1, keepdims=True)
    last = query_positions.max(axis=-1, keepdims=True)
    query_scale = _decay(query_positions - center, octaves)
    key_scale = _decay(center - jnp.minimum(key_positions, last), octaves)
    return (
        scale_channels(query, query_scale, layout=layout),
        scale_channels(key, key_scale, layout=layout),
    )
