"""Position arrays: for packed, padded, randomized, gridded and reordered sequences.

Every encoding of this library takes positions as an argument, so none of these cases
needs more than the right array. Letters: T query time, S key time.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.distance import (
    fitting,
    relative_positions,
    time_positions,
)
from rope_jax.functional.frequency_set import check_count


def positions_from_segments(segment_ids: jax.Array) -> jax.Array:
    """Count positions from 0 again wherever the segment id changes.

    For rows into which several documents are packed. An id that comes back later in
    the row starts a new count; no id stands for padding, which counts like the rest.

    Args:
      segment_ids: integer or boolean, [T] or [..., T], compared along the last axis.

    Returns:
      int32 positions of the same shape.

    Raises:
      ValueError: when `segment_ids` is floating point, has no time axis, or is a host
        array that leaves int32.

    >>> positions_from_segments(jnp.array([1, 1, 1, 2, 2, 3, 0]))
    Array([0, 1, 2, 0, 1, 0, 0], dtype=int32)

    Source: packing several sequences into a row is as in Raffel et al. 2020, T5 (arXiv
    1910.10683), section 3.1.2; the count is this library's.
    """
    segment_ids = jnp.asarray(fitting(segment_ids, "segment_ids"))
    if jnp.issubdtype(segment_ids.dtype, jnp.inexact) or segment_ids.ndim < 1:
        # Neighbouring ids can be one number in a 16-bit float.
        raise ValueError(
            "segment_ids must be integers with a time axis, got "
            f"{segment_ids.dtype} {segment_ids.shape}"
        )
    index = lax.broadcasted_iota(jnp.int32, segment_ids.shape, segment_ids.ndim - 1)
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    starts = jnp.where(changes, index[..., 1:], 0)
    starts = jnp.concatenate([jnp.zeros_like(index[..., :1]), starts], axis=-1)
    return index - lax.cummax(starts, axis=segment_ids.ndim - 1)


def positions_from_mask(mask: jax.Array) -> jax.Array:
    """Number the tokens that are there: 0, 1, 2, ... whatever padding lies between.

    The position of a token is the number of tokens before it, counted in int32
    whatever the type of the mask. Padding gets the number of the next token; it has to
    be masked in attention all the same.

    Args:
      mask: [T] or [..., T] of any type, nonzero (or True) where there is a token.

    Returns:
      int32 positions of the same shape.

    Raises:
      ValueError: when `mask` has no time axis.

    >>> positions_from_mask(jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
    Array([[0, 0, 0, 1, 2],
           [0, 1, 2, 3, 4]], dtype=int32)

    Source: the cumulative count by which Hugging Face transformers numbers left-padded
    batches; there padding itself gets a fixed 1.
    """
    mask = jnp.asarray(mask)
    if mask.ndim < 1:
        raise ValueError(f"mask must have a time axis, got shape {mask.shape}")
    present = (mask != 0).astype(jnp.int32)
    return jnp.cumsum(present, axis=-1, dtype=jnp.int32) - present


def random_positions(key: jax.Array, length: int, max_length: int) -> jax.Array:
    """Draw positions for training: `length` of them out of `max_length`, in order.

    A uniform sample of range(max_length) without replacement, sorted. A model trained
    on such positions has seen all those of a context of `max_length`. At evaluation
    the paper draws them anew; one draw serves a batch, or map over keys for rows.

    Args:
      key: a JAX random key.
      length: number of positions T.
      max_length: positions are below it; at least `length`.

    Returns:
      int32 [T], strictly increasing.

    Raises:
      ValueError: when `length` is not positive or exceeds `max_length`.

    >>> positions = random_positions(jax.random.key(0), 4, 1000)
    >>> bool((positions[1:] > positions[:-1]).all())
    True

    Source: Ruoss et al. 2023, "Randomized Positional Encodings Boost Length
    Generalization of Transformers" (arXiv 2305.16843), section 3.
    """
    length = check_count("length", length)
    max_length = check_count("max_length", max_length, at_least=length)
    return jnp.sort(
        jax.random.permutation(key, jnp.arange(max_length, dtype=jnp.int32))[:length]
    )


def grid_positions(*shape: int) -> jax.Array:
    """Number the cells of a grid, the last axis fastest, for multi-axis rotary.

    Args:
      *shape: cells along each axis, for instance height and width in patches.

    Returns:
      int32 [prod(shape), len(shape)]: the coordinates of every cell.

    Raises:
      ValueError: when there is no axis or one is not positive.

    >>> grid_positions(2, 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]

    Source: the raster order of patches in Dosovitskiy et al. 2021, ViT (arXiv
    2010.11929), appendix D.4.
    """
    if not shape:
        raise ValueError("shape must have at least one axis, got none")
    shape = tuple(check_count("shape", size) for size in shape)
    axes = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape)))
    return jnp.stack([axis.reshape(math.prod(shape)) for axis in axes], axis=-1)


def zigzag_positions(length: int, num_shards: int) -> jax.Array:
    """Order a sequence so that contiguous shards share causal work equally.

    The sequence is cut into 2n chunks; shard r of n holds chunk r and chunk 2n-1-r.
    Under a causal mask each shard then has the same number of pairs to score, where
    contiguous order gives the last shard most of the work. The result is the positions
    and also the gather that reorders: `tokens[..., positions]`; `jnp.argsort` of it
    undoes that.

    Args:
      length: length of the sequence T, a multiple of `2 * num_shards`.
      num_shards: number of shards n along the sequence.

    Returns:
      int32 [T]: the positions, of which shard r holds the r-th T/n.

    Raises:
      ValueError: when a size is not positive or `length` is no multiple.

    >>> zigzag_positions(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]

    Source: Llama Team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), section
    3.3.2, context parallelism; github.com/zhuzilin/ring-flash-attention names it.
    """
    num_shards = check_count("num_shards", num_shards)
    length = check_count("length", length)
    if length % (2 * num_shards):
        raise ValueError(
            f"length must be a multiple of 2 * num_shards = {2 * num_shards}, got "
            f"{length}"
        )
    shard = jnp.arange(num_shards, dtype=jnp.int32)
    chunks = jnp.stack([shard, 2 * num_shards - 1 - shard], axis=-1).reshape(-1, 1)
    size = length // (2 * num_shards)
    return (chunks * size + jnp.arange(size, dtype=jnp.int32)[None, :]).reshape(length)


def rerope_distances(
    query_positions: jax.Array, key_positions: jax.Array, *, window: int
) -> jax.Array:
    """Return the distances of ReRoPE: query minus key, clipped at the window.

    min(i - j, w), so that no distance exceeds what the model was trained on. Keys
    after the query are clipped at -w alike. With a rotary encoding this takes two
    scores per pair: the plain one where the distance is below w, and elsewhere that of
    a query rotated to w against a key at 0.

    Args:
      query_positions: integer, [T] or [..., T].
      key_positions: integer, [S] or [..., S]; leading axes broadcast.
      window: w, in positions, at least 1.

    Returns:
      int32 [..., T, S] in -w .. w, positive for keys before the query.

    Raises:
      ValueError: when positions are not integers with a time axis or `window` is not
        positive.

    >>> rerope_distances(jnp.array([5]), jnp.arange(6), window=3).tolist()
    [[3, 3, 3, 2, 1, 0]]

    Source: Su 2023, "Rectified Rotary Position Embeddings"
    (github.com/bojone/rerope).
    """
    window = check_count("window", window)
    distance = -relative_positions(query_positions, key_positions)
    return jnp.clip(distance, -window, window)


def self_extend_distances(
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    window: int,
    group_size: int,
) -> jax.Array:
    """Return the distances of Self-Extend: exact near by, grouped beyond the window.

    With w the window and g the group size::

        i - j                                   where i - j < w
        i // g - j // g + w - w // g            elsewhere

    so that a model trained on L positions reaches about (L - w) * g + w. With a rotary
    encoding this takes two scores per pair, from raw and from grouped positions: the
    grouped query sits at `i // g + w - w // g` and the grouped key at `j // g`.

    Args:
      query_positions: integer, [T] or [..., T].
      key_positions: integer, [S] or [..., S]; leading axes broadcast.
      window: w, in positions, at least 1.
      group_size: g, positions that share one number, at least 1.

    Returns:
      int32 [..., T, S], positive for keys before the query.

    Raises:
      ValueError: when positions are not integers with a time axis, or `window` or
        `group_size` is not positive.

    >>> self_extend_distances(
    ...     jnp.array([9]), jnp.arange(10), window=4, group_size=2
    ... ).tolist()
    [[6, 6, 5, 5, 4, 4, 3, 2, 1, 0]]

    Source: Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without
    Tuning" (arXiv 2401.01325), section 3 and algorithm 1.
    """
    window = check_count("window", window)
    group_size = check_count("group_size", group_size)
    query = time_positions(query_positions, "query_positions")
    key = time_positions(key_positions, "key_positions")
    near = -relative_positions(query, key)
    grouped = -relative_positions(query // group_size, key // group_size)
    return jnp.where(near < window, near, grouped + window - window // group_size)
