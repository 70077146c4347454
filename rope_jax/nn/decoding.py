"""Decoding with a cache: prefill, chunks of a prompt and single tokens in one call.

The two functions are the same for every encoding and both kinds of attention. What a
layer keeps is its attention's affair (`init_memory` and `extend`), and what a key is
when it is kept that of the encoding (see `rope_jax.nn.encoding`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.nn.cache import Cache, Rolling, admit
from rope_jax.nn.decoder import Decoder


def init_cache(
    model: Decoder,
    batch_size: int,
    capacity: int | None = None,
    *,
    dtype: jnp.dtype | None = None,
    rolling: Rolling | None = None,
) -> Cache:
    """An empty cache for `extend`.

    Args:
      model: the decoder.
      batch_size: number of rows.
      capacity: tokens that a row may grow to; None for a rolling cache.
      dtype: of the keys and values; None is the model's.
      rolling: keep the first and the last tokens only, for rows without end.

    Returns:
      The cache.

    Raises:
      ValueError: a size does not fit, or the encoding cannot be decoded so, and why.

    Example:
      >>> from rope_jax.nn.config import DecoderConfig
      >>> model = Decoder(DecoderConfig(num_layers=2), rngs=nnx.Rngs(0))
      >>> cache = init_cache(model, 3, 100)
      >>> [segment["key"].shape for memory in cache.layers for segment in memory]
      [(3, 4, 100, 32), (3, 4, 100, 32)]
    """
    if (capacity is None) == (rolling is None):
        raise ValueError(
            "a cache needs either a capacity or rolling, got "
            f"capacity={capacity} and rolling={rolling}"
        )
    if rolling is not None:
        capacity = rolling.sinks + rolling.window
    if batch_size < 1 or capacity < 1:
        sizes = f"{batch_size} and {capacity}"
        raise ValueError(f"batch_size and capacity must be at least 1, got {sizes}")
    own = model.blocks.encoding if model.encoding is None else model.encoding
    own.check_cache(capacity, None if rolling is None else rolling.sinks)
    graph, state = nnx.split(model.blocks)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state
    )
    first = nnx.merge(graph, shapes)
    one = first.attention.init_memory(
        first.encoding if model.encoding is None else model.encoding,
        batch_size,
        capacity,
        jnp.dtype(model.dtype if dtype is None else dtype),
        rolling,
    )
    depth = jax.tree.leaves(state)[0].shape[0]
    return Cache(
        layers=tuple(jax.tree.map(jnp.copy, one) for _ in range(depth)),
        positions=jnp.zeros((batch_size, capacity), jnp.int32),
        lengths=jnp.zeros((batch_size,), jnp.int32),
        rolling=rolling,
    )


def extend(
    model: Decoder,
    tokens: jax.Array,
    cache: Cache,
    *,
    key_mask: jax.Array | None = None,
    positions: jax.Array | None = None,
    last_only: bool = False,
) -> tuple[jax.Array, Cache]:
    """Logits of the byte after each new token, and the cache with them in it.

    Give it all the tokens of the prompts, some of them, or one: any split of a row
    gives the logits of a full pass. Donate the cache to the jitted function that calls
    this, and it is written in place.

    Args:
      model: the decoder.
      tokens: integers `[B, T]`, the next ones of each row.
      cache: of `init_cache`, or of the call before.
      key_mask: bool `[B, T]`, False where a token is padding, on either side. It is not
        stored, and its logits mean nothing.
      positions: integers `[T]` or `[B, T]`; None counts the real tokens of a row.
      last_only: give the logits after each row's last real token only.

    Returns:
      float32 logits `[B, T, V]`, or `[B, V]` with `last_only`, and a new cache. A token
      that finds the cache full is not stored and has NaN logits.

    Raises:
      ValueError: shapes do not fit; positions are given with a rolling cache; or,
        outside of jit, a row has no room for its tokens.

    Example:
      >>> from rope_jax.nn.config import DecoderConfig
      >>> model = Decoder(DecoderConfig(num_layers=2), rngs=nnx.Rngs(0))
      >>> cache = init_cache(model, 3, 100)
      >>> logits, cache = extend(model, jnp.ones((3, 8), jnp.int32), cache)
      >>> logits.shape, cache.lengths.tolist()
      ((3, 8, 256), [8, 8, 8])
    """
    x, cache, counts, order = _advance(model, tokens, cache, key_mask, positions)
    if last_only:
        last = jnp.maximum(counts - 1, 0)[:, None, None]
        return model.logits(jnp.take_along_axis(x, last, axis=1))[:, 0], cache
    return model.logits(_in_order(x, order)), cache


def extend_hidden(
    model: Decoder,
    tokens: jax.Array,
    cache: Cache,
    *,
    key_mask: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """`extend` without the head: `[B, T, D]`, which `model.logits` takes."""
    x, cache, _, order = _advance(model, tokens, cache, key_mask, positions)
    return _in_order(x, order), cache


def _advance(model, tokens, cache, key_mask, positions):
    """The last layer's output, real tokens first, and how many and in what order."""
    tokens, counts, positions, order = _real_first(tokens, cache, key_mask, positions)
    cache.check_room(counts)
    if cache.rolling is not None and tokens.shape[1] > 1:
        x, cache = _one_by_one(model, tokens, cache, counts)
    else:
        x, cache = _extend(model, tokens, cache, counts, positions)
    return x, cache, counts, order


def _in_order(x, order):
    return x if order is None else jnp.take_along_axis(x, order[..., None], axis=1)


def _extend(model, tokens, cache, counts, positions):
    """The last layer's output for new tokens, the real ones of which come first."""
    window, length = model.blocks.attention.window, tokens.shape[1]
    projections = None if model.draws is None else model.draws(None)
    view, cache = admit(cache, counts, positions, length=length, window=window)
    x = model.embed(tokens)
    if model.encoding is not None:
        x = model.encoding.embed(x, view.positions)
    graph, state = nnx.split(model.blocks)
    layers = []
    # Written out, so that each layer's memory is an array that stays in place.
    for index, memory in enumerate(cache.layers):
        of_layer, projection = jax.tree.map(
            lambda leaf, index=index: leaf[index], (state, projections)
        )
        features = {"projection": projection} if model.linear else {}
        block = nnx.merge(graph, of_layer)
        x, memory = block.extend(
            x, model.encoding, memory, view, cache.rolling, features
        )
        layers.append(memory)
    x = jnp.where(view.lost[..., None], jnp.nan, x)
    return x, dataclasses.replace(cache, layers=tuple(layers))


def _one_by_one(model, tokens, cache, counts):
    """A rolling cache drops a token for each that comes, so they come in turn."""

    def step(cache, column):
        token, number = column
        real = (number < counts).astype(jnp.int32)
        x, cache = _extend(model, token[:, None], cache, real, None)
        return cache, x[:, 0]

    columns = tokens.T, jnp.arange(tokens.shape[1])
    cache, x = jax.lax.scan(step, cache, columns)
    return jnp.swapaxes(x, 0, 1), cache


def _real_first(tokens, cache, key_mask, positions):
    """Real tokens first in each row, how many there are, and how to undo the order."""
    batch, length = tokens.shape
    if batch != cache.lengths.shape[0] or length < 1:
        raise ValueError(
            f"tokens must be [{cache.lengths.shape[0]}, T] for this cache, T at least "
            f"1, got {tokens.shape}"
        )
    if positions is not None:
        if cache.rolling is not None:
            raise ValueError(
                "positions must not be given with a rolling cache, which counts them "
                f"from its own start; got an array of shape {positions.shape}"
            )
        positions = jnp.broadcast_to(positions, tokens.shape)
    if key_mask is None:
        return tokens, jnp.full((batch,), length, jnp.int32), positions, None
    if key_mask.shape != tokens.shape:
        raise ValueError(
            f"key_mask must have the shape of tokens, {tokens.shape}, got "
            f"{key_mask.shape}"
        )
    counts = key_mask.astype(jnp.int32).sum(axis=-1, dtype=jnp.int32)
    if length == 1:
        return tokens, counts, positions, None
    order = jnp.argsort(~key_mask, axis=-1, stable=True)
    tokens = jnp.take_along_axis(tokens, order, axis=-1)
    if positions is not None:
        positions = jnp.take_along_axis(positions, order, axis=-1)
    return tokens, counts, positions, jnp.argsort(order, axis=-1)
