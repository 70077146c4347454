"""Attention with linear biases: slopes, the bias, and the bias folded into q and k.

A head with slope s lowers the logit of a key by s for every position between the key
and the query. Letters: T query time, S key time, N heads, K key heads, H head width.
"""

import dataclasses
import functools
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional.bias_channels import (
    EXTRA_CHANNELS,
    MAX_DISTANCE,
    key_channels,
    query_channels,
)
from rope_jax.functional.distance import (
    distances,
    per_head,
    relative_positions,
    time_positions,
    to_rank,
)
from rope_jax.functional.frequency_set import check_count

FORMS = ("symmetric", "causal", "split_heads")


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slope of every head, in the order of the original code.

    For N a power of two the slopes are 2 ** (-8 (h+1) / N), h = 0 .. N-1. Otherwise,
    with c the largest power of two below N, they are the slopes of c heads followed by
    the 1st, 3rd, 5th ... slope of 2c heads. The list is then not monotone; models were
    trained with it, so the order is kept.

    Args:
      num_heads: number of heads N, at least 1. Under tensor parallelism the number of
        all heads: each device then takes its part of the list.

    Returns:
      float32 NumPy array [N], logits per position, in (0, 1).

    Raises:
      ValueError: when `num_heads` is not an integer of at least 1.

    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]

    Source: Press et al. 2021, "Train Short, Test Long" (arXiv 2108.12409), section 3,
    and `get_slopes` in ofirpress/attention_with_linear_biases for other head counts.
    """
    num_heads = check_count("num_heads", num_heads)
    power = 1 << (num_heads.bit_length() - 1)
    ladder = np.arange(1, power + 1) / power
    between = (2 * np.arange(num_heads - power) + 1) / (2 * power)
    return (2.0 ** (-8.0 * np.concatenate([ladder, between]))).astype(np.float32)


def alibi_bias(
    slopes: jax.Array | np.ndarray,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    form: str = "symmetric",
) -> jax.Array:
    """Return the bias that attention adds to its scaled logits.

    bias[n, i, j] = -slopes[n] * abs(query_positions[i] - key_positions[j])

    The distance is formed in integers, exactly, so that the bias depends on nothing
    but the distance, at any offset; it is then rounded once to float32. Masking is the
    work of attention. Only the rows and columns asked for are computed, so attention
    can call this block by block.

    Args:
      slopes: [N], for instance `alibi_slopes(N)`, or learned.
      query_positions: integer, [T] or [..., T].
      key_positions: integer, [S] or [..., S]. Leading axes broadcast with those of
        `query_positions`.
      form: "symmetric" is the formula above, for causal attention (which masks the
        future anyway) and for attention in both directions. "causal" puts -inf on
        keys after the query, for kernels that know no mask. "split_heads" is the
        two-directional form in which the first N/2 heads see keys up to the query
        and the other N/2 heads see keys from the query on, and the rest is -inf; give
        both halves one ladder with `np.tile(alibi_slopes(N // 2), 2)`.

    Returns:
      float32 [..., N, T, S].

    Raises:
      ValueError: when `form` is unknown, positions are not integers with a time axis or
        do not broadcast, `slopes` is not [N], or N is odd for "split_heads".

    >>> alibi_bias(np.float32([0.25]), jnp.array([3, 4]), jnp.arange(5)).tolist()
    [[[-0.75, -0.5, -0.25, -0.0, -0.25], [-1.0, -0.75, -0.5, -0.25, -0.0]]]

    Source: Press et al. 2021 (arXiv 2108.12409), section 3. The two-directional forms
    are those its first author gives in issue 5 of
    ofirpress/attention_with_linear_biases.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}; got {form!r}")
    slopes = _check_slopes(slopes)
    distance = distances(query_positions, key_positions)[..., None, :, :]
    bias = -per_head(slopes, distance.ndim) * distance
    if form == "symmetric":
        return bias
    lag = relative_positions(query_positions, key_positions)[..., None, :, :]
    back, ahead = lag <= 0, lag >= 0
    if form == "causal":
        return jnp.where(back, bias, -jnp.inf)
    num_heads = len(slopes)
    if num_heads % 2:
        raise ValueError(
            f"slopes must have an even length for form='split_heads', got {num_heads}"
        )
    first = per_head(jnp.arange(num_heads) < num_heads // 2, bias.ndim)
    return jnp.where((first & back) | (~first & ahead), bias, -jnp.inf)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slopes", "query_positions", "key_positions"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class AlibiBias:
    """ALiBi as the `bias` of `attention`, which then knows what it is.

    It is called like any bias function, `alibi_bias` with these slopes. Kernels that
    take no bias function fold it into query and key instead, see `alibi_fold`; that
    needs causal attention whose visible keys are not after the query, in the
    positions that ALiBi counts. Gradients of learned slopes are then rounded as those
    of queries and keys are, which in 16 bits leaves them a few percent off.

    Attributes:
      slopes: [N], for instance `alibi_slopes(N)`, or learned.
      query_positions: integers, where ALiBi counts other positions than those that
        order the attention, as in packed rows ordered by index: entry p of the last
        axis is the position of the query at place p. Places are the query positions
        of `attention`, by default S-T .. S-1, so that the axis is S long there even
        where T is less; in general it is longer than the largest place. Places are
        numbers, traced or not, so only a default is checked: beyond the end, JAX
        takes the last entry. Leading axes broadcast with those of the places. None
        means the places themselves.
      key_positions: integers, the same for keys, by default at places 0 .. S-1.

    Raises:
      ValueError: by a call or by `attention`, when these arrays do not fit the places
        or int32.

    >>> bias = AlibiBias(np.float32([0.25]))
    >>> bias(jnp.array([3]), jnp.arange(5)).tolist()
    [[[-0.75, -0.5, -0.25, -0.0, -0.25]]]
    """

    slopes: jax.Array | np.ndarray
    query_positions: jax.Array | None = None
    key_positions: jax.Array | None = None

    def __call__(self, query_places: jax.Array, key_places: jax.Array) -> jax.Array:
        """The bias [..., N, T, S] of queries and keys at these places."""
        return alibi_bias(self.slopes, *self.positions(query_places, key_places))

    def positions(self, query_places: jax.Array, key_places: jax.Array):
        """What ALiBi counts at these places: positions of the queries and the keys."""
        query, key = self.query_positions, self.key_positions
        return (
            _counted("query_positions", query, query_places),
            _counted("key_positions", key, key_places),
        )


def _counted(name, positions, places):
    """The positions `[..., T]` at places, each row's at its own where they differ."""
    if positions is None:
        return places
    positions = time_positions(positions, name)
    if isinstance(places, slice) or jnp.ndim(places) < 2 or positions.ndim == 1:
        return positions[..., places]
    rank = max(positions.ndim, places.ndim)
    try:
        lead = np.broadcast_shapes(positions.shape[:-1], places.shape[:-1])
    except ValueError:
        raise ValueError(
            f"the leading axes of AlibiBias.{name} {positions.shape} must fit those of "
            f"the places {places.shape}"
        ) from None
    return jnp.take_along_axis(
        jnp.broadcast_to(to_rank(positions, rank), (*lead, positions.shape[-1])),
        jnp.broadcast_to(to_rank(places, rank), (*lead, places.shape[-1])),
        axis=-1,
    )


def alibi_fold(
    query: jax.Array,
    key: jax.Array,
    slopes: jax.Array | np.ndarray,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Fold the causal ALiBi bias into extra channels of query and key.

    Causal attention over the returned pair, with the same `scale` and no bias, is
    causal attention with `alibi_bias`: any fused kernel runs ALiBi in O(T) memory.
    16 channels are appended, 12 that carry the bias and 4 zeros, so that a head width
    that is a multiple of 8 stays one. Kernels that want value as wide as key get value
    padded with zeros, and the result is cut back.

    With M the largest query position of the row and S = slopes / scale::

        q' . k' = q . k + S * (M - i) - S * (M - j),    d = M - j = a + 256 b + 65536 c

    The second term is the same for all the keys of a query. S is three terms of 8 bits
    and a, b, c are digits of 8 bits, so every product of these is exact in float32 even
    where the channels are bfloat16, or a TPU or a GPU rounds float32 factors to
    bfloat16 or TF32. Positions enter as differences only: an offset changes no bit.

    What is guaranteed, for a kernel that sums products in float32 and multiplies the
    sum by `scale`, where the largest distance D = M - j is below 2**24: the folded
    bias is -slope * (i - j) for every key j <= i, within 1e-6 of the largest bias,
    and a logit is off by a few float32 roundings of slope * D. Attention weights over
    16,384 keys are within 2**-10 of exact ones (2e-4 was the most seen) in float32 and
    bfloat16; the error grows in proportion to D. Distances from 2**24 on count as
    2**24 - 1. Float16 further needs slopes / scale below 255.

    Keys after the query carry a positive bias, and those after M the one that M has:
    finite, and of no effect as long as the mask is causal. M is that of this call,
    so fold again for every call rather than caching folded keys.

    Args:
      query: [..., T, N, H].
      key: [..., S, K, H], where K may be smaller than N (grouped heads).
      slopes: [N], one per query head.
      query_positions: integer, [T] or [..., T].
      key_positions: integer, [S] or [..., S].
      scale: what the kernel multiplies its dot products with, greater than 0; None
        means H ** -0.5 of the width before folding. Pass the same number to the
        kernel: its own default would be that of the wider head.

    Returns:
      (query', key'): [..., T, N, H + 16] and [..., S, K, H + 16], in the dtypes of
      `query` and `key`. Gradients reach `slopes`.

    Raises:
      ValueError: when the head counts or widths do not fit, positions are not integers
        or do not fit, or `scale` is not a positive number.

    >>> q = k = jnp.zeros((3, 1, 8))
    >>> slopes, positions = np.float32([0.5]), jnp.arange(3) + 1_000_000_000
    >>> q, k = alibi_fold(q, k, slopes, positions, positions, scale=0.25)
    >>> jnp.tril(0.25 * jnp.einsum("tnh,snh->nts", q, k)).tolist()
    [[[0.0, 0.0, 0.0], [-0.5, 0.0, 0.0], [-1.0, -0.5, 0.0]]]

    Source: Press et al. 2021 (arXiv 2108.12409), section 3, for the bias; the fold is
    this library's.
    """
    slopes = _check_slopes(slopes)
    query, key = jnp.asarray(query), jnp.asarray(key)
    _check_fold(query, key, slopes)
    ratio = slopes / _check_scale(scale, query.shape[-1])
    query_positions = time_positions(query_positions, "query_positions")
    key_positions = time_positions(key_positions, "key_positions")
    newest = jnp.max(query_positions, axis=-1, keepdims=True)
    query_extra = query_channels(ratio, _age(newest, query_positions))
    key_extra = key_channels(_age(newest, key_positions))
    return (
        _append(query, query_extra, "query_positions"),
        _append(key, key_extra[..., None, :], "key_positions"),
    )


def _append(x: jax.Array, extra: jax.Array, name: str) -> jax.Array:
    shape = (*x.shape[:-1], EXTRA_CHANNELS)
    if extra.ndim > x.ndim or not all(
        size in (1, want)
        for size, want in zip(extra.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(
            f"{name} must fit an array {x.shape}, got {extra.shape[:-2]} once the "
            "leading axes of query_positions are taken in"
        )
    extra = jnp.broadcast_to(extra, shape).astype(x.dtype)
    return jnp.concatenate([x, extra], axis=-1)


def _age(newest: jax.Array, positions: jax.Array) -> jax.Array:
    """Positions from `positions` up to `newest`, int32, within 0 .. 2**24 - 1."""
    lag = relative_positions(newest, positions)[..., 0, :]
    return jnp.clip(-lag, 0, MAX_DISTANCE)


def _check_slopes(slopes: jax.Array | np.ndarray) -> jax.Array:
    slopes = jnp.asarray(slopes, jnp.float32)
    if slopes.ndim != 1:
        raise ValueError(f"slopes must be [N], got shape {slopes.shape}")
    return slopes


def _check_scale(scale: float | None, width: int) -> float:
    if scale is None:
        return width**-0.5
    if not isinstance(scale, numbers.Real):
        # The kernel needs the same number, and `attention` takes no array either.
        raise ValueError(f"scale must be a number or None, got {scale!r}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive, got {scale}")
    return float(scale)


def _check_fold(query: jax.Array, key: jax.Array, slopes: jax.Array) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} must be floating point with axes time, heads and channels, "
                f"got {x.dtype} {x.shape}"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must be equally wide, got {query.shape} and {key.shape}"
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            "the heads of key must divide those of query, got "
            f"{key.shape[-2]} and {query.shape[-2]}"
        )
    if slopes.shape != (query.shape[-2],):
        raise ValueError(
            f"slopes must be [{query.shape[-2]}], one per query head, got shape "
            f"{slopes.shape}"
        )
