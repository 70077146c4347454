"""Attention of new tokens over a cache, segment of slots by segment of slots.

A segment is an array of its own, because a dot reads such an array where it lies, and
a part of a larger one is copied first. One that holds nothing which a query may see is
not read, so a long capacity costs nothing while rows are short.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rope_jax.functional.attention_blockwise import absorb
from rope_jax.functional.attention_request import align_bias, products
from rope_jax.functional.attention_target import target_platform
from rope_jax.functional.distance import relative_positions
from rope_jax.nn.cache import (
    Memory,
    Rolling,
    View,
    located,
    read_extras,
    segment_sizes,
    write_layer,
)
from rope_jax.nn.encoding import Encoding, Side

# Slots of the first segment. A CPU gains by reading no more than is held; elsewhere to
# ask whether there is something to read costs more than the reading.
_SEGMENT_ON_CPU, _SEGMENT = 256, 4096


def init_memory(attention, encoding, batch: int, capacity: int, dtype) -> Memory:
    """What a layer of softmax attention keeps, empty.

    Args:
      attention: the layer's `Attention`; its parameters may be shapes alone.
      encoding: of this layer.
      batch: B.
      capacity: S.
      dtype: of keys and values; what the encoding adds is float32.

    Returns:
      Segments, each with "key" and "value" `[B, K, s, H]`, and "extras", a tree of
      `[B, s, W]`. There is one alone where the encoding needs whole rows.
    """
    width, compute = attention.query.kernel.shape[0], attention.query.dtype
    x = jax.ShapeDtypeStruct((batch, 1, width), compute)
    at = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def one_token(attention, encoding, x, at):
        return _rows(attention, x, encoding, at, None)[1]

    rows = jax.eval_shape(one_token, attention, encoding, x, at)

    def empty(row, dtype, size):
        return jnp.zeros((*row.shape[:-2], size, row.shape[-1]), dtype)

    first = _SEGMENT_ON_CPU if target_platform() == "cpu" else _SEGMENT
    whole = encoding.whole_rows
    sizes = [capacity] if whole else segment_sizes(capacity, first)
    return tuple(
        {
            "key": empty(rows["key"], dtype, size),
            "value": empty(rows["value"], dtype, size),
            "extras": jax.tree.map(
                lambda row, size=size: empty(row, row.dtype, size), rows["extras"]
            ),
        }
        for size in sizes
    )


def extend_softmax(attention, x, encoding, memory, view, rolling):
    """Softmax attention of new tokens over a cache; see `Attention.extend`."""
    before = read_extras(memory, view.before)
    query, rows = _rows(attention, x, encoding, view.turns, before)
    query = attention.sharpened(query, view.positions)
    memory = write_layer(memory, view.slots, rows)
    to_sinks = None
    if rolling is not None and rolling.sinks:
        query_alone, key_alone, _ = attention.heads(x)
        to_sinks, _ = encoding.rotate_alone(query_alone, key_alone, view.positions)
        to_sinks = attention.sharpened(to_sinks, view.positions)
    mixed = attend(
        Queries(query, to_sinks, rows["extras"]),
        memory,
        view,
        encoding,
        rolling=rolling,
        window=attention.window,
        scale=attention.scale,
    )
    return attention.out(mixed), memory


def _rows(attention, x, encoding, positions, before):
    """The queries, and what a cache keeps of these tokens, `[B, ..., T, W]`."""
    query, key, value = attention.heads(x)
    query, key = encoding.rotate_alone(query, key, positions)
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    extras = encoding.extras(x, before)
    return query, {"key": key, "value": value, "extras": extras}


class Queries(NamedTuple):
    """The new tokens of a layer, `[B, T, N, H]`, turned alone.

    Attributes:
      vectors: by the positions of their own.
      to_sinks: by their positions in a rolling cache, to meet its sinks; else None.
      extras: what the encoding keeps beside them.
    """

    vectors: jax.Array
    to_sinks: jax.Array | None
    extras: Any


def attend(
    queries: Queries,
    memory: Memory,
    view: View,
    encoding: Encoding,
    *,
    rolling: Rolling | None,
    window: int,
    scale: float,
) -> jax.Array:
    """Softmax attention over what one layer of the cache holds.

    Args:
      queries: of the new tokens, whose own keys are in the cache already.
      memory: the segments of the layer.
      view: what each query sees.
      encoding: of this layer.
      rolling: what the cache holds; None for every token.
      window: tokens that a query sees, its own included; 0 for all.
      scale: factor on the products.

    Returns:
      `[B, T, N, V]`. A query that sees nothing gives zeros.
    """
    batch, length, heads, _ = queries.vectors.shape
    _, groups, _, width = memory[0]["value"].shape
    in_order = encoding.whole_rows and rolling is not None
    # Outside of a cond XLA's CPU backend writes the rows of one sequence twice, for the
    # reading and for the cache, with a copy of all before each.
    asked = len(memory) > 1 or target_platform() == "cpu"

    def add(softmax, block):
        rest = queries.extras, block, view, encoding, scale
        logits = _logits(queries.vectors, *rest)
        if queries.to_sinks is not None:
            near = _logits(queries.to_sinks, *rest)
            sinks = block.index < rolling.sinks
            logits = jnp.where(sinks[:, None, None, None], near, logits)
        lag = relative_positions(view.index, block.index)
        seen = (lag <= 0) & (lag > -window) if window else lag <= 0
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
        return absorb(softmax, logits, block.value.astype(queries.vectors.dtype))

    def pass_on(softmax, block):
        del block
        return softmax

    rows = (batch, groups, heads // groups, length)
    softmax = (
        jnp.full((*rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        jnp.zeros((*rows, width), jnp.float32),
    )
    for start, stop, segment in located(memory):
        block = _block(segment, view, start, stop)
        block = _sorted(block) if in_order else block
        if asked:
            seen = (view.start < stop) & (start < view.stop)
            softmax = jax.lax.cond(seen, add, pass_on, softmax, block)
        else:
            softmax = add(softmax, block)
    _, total, mixed = softmax
    mixed = mixed / jnp.where(total == 0, 1, total)
    mixed = mixed.reshape(batch, heads, length, width)
    return jnp.swapaxes(mixed, 1, 2).astype(queries.vectors.dtype)


class _Block(NamedTuple):
    """A segment and what the view says of it: heads before time, as in the cache."""

    key: jax.Array
    value: jax.Array
    extras: Any
    positions: jax.Array
    index: jax.Array


def _block(segment, view, start, stop):
    """The segment of the slots from `start` to `stop`."""
    return _Block(
        **segment,
        positions=view.key_positions[:, start:stop],
        index=view.key_index[:, start:stop],
    )


def _sorted(block):
    """The block in the order of its tokens; only a rolling cache has another."""
    order = jnp.argsort(block.index, axis=-1, stable=True)

    def rows(array):
        at = order.reshape(order.shape[0], *[1] * (array.ndim - 3), -1, 1)
        return jnp.take_along_axis(array, at, axis=-2)

    return _Block(
        *jax.tree.map(rows, (block.key, block.value, block.extras)),
        positions=jnp.take_along_axis(block.positions, order, axis=-1),
        index=jnp.take_along_axis(block.index, order, axis=-1),
    )


def _logits(query, extras, block, view, encoding, scale):
    """Scaled products and the encoding's term, `[B, K, G, T, s]`, not masked."""
    key = jnp.swapaxes(block.key.astype(query.dtype), 1, 2)
    query, key = encoding.rotate_together(query, key, view.positions, block.positions)
    batch, length, _, width = query.shape
    grouped = jnp.swapaxes(query, 1, 2).reshape(batch, key.shape[2], -1, length, width)
    logits = products(grouped, jnp.swapaxes(key, 1, 2)) * scale
    term = encoding.scores(
        Side(query, view.positions, view.index, extras),
        Side(key, block.positions, block.index, block.extras),
    )
    if term is None:
        return logits
    whole = slice(None)
    return logits + align_bias(term(whole, whole), logits.shape, "the term of scores")
