"""What decoding keeps of the tokens before: arrays of a fixed size, and their order.

A row of the cache holds the real tokens of one sequence, in order and without gaps:
padding, on whichever side, is never stored. So the place of a token follows from how
many came before it, the one counter that all layers read.

Letters: B rows, T new tokens, S slots (the capacity), K key heads, H width.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Memory = tuple[dict[str, Any], ...]  # what a layer of softmax attention keeps

NOT_HELD = np.int32(2**31 - 1)  # the index of an empty slot: after every query


@dataclasses.dataclass(frozen=True)
class Rolling:
    """A cache for rows without end: the first `sinks` tokens and the last `window`.

    Positions are counted in the cache, so a query is never further than
    `sinks + window - 1` from what it sees.

    Attributes:
      sinks: first tokens that stay; a trained model puts much weight on them.
      window: tokens after them, the query's own included.

    Raises:
      ValueError: `sinks` is negative or `window` is not positive.

    References:
      Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"
      (arXiv 2309.17453), section 3.2.
    """

    sinks: int
    window: int

    def __post_init__(self):
        if self.sinks < 0 or self.window < 1:
            raise ValueError(
                "a rolling cache needs sinks of at least 0 and a window of at least 1, "
                f"got {self.sinks} and {self.window}"
            )

    def slot(self, index: jax.Array) -> jax.Array:
        """Where token `index` of a row lies: behind the sinks, in a ring."""
        ring = self.sinks + (index - self.sinks) % self.window
        return jnp.where(index < self.sinks, index, ring)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "positions", "lengths"],
    meta_fields=["rolling"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of decoding, a pytree; `decoding.init_cache` makes an empty one.

    Attributes:
      layers: what each layer keeps, one after another; its attention says what. Softmax
        attention has segments of the slots, in order, each with "key" and "value"
        `[B, K, s, H]`, and "extras" of its encoding `[B, s, W]`; linear attention has a
        `LinearState`, of one size always. Arrays of their own can be read where they
        lie, slices of a common one are copied.
      positions: int32 `[B, S]`, the positions that the keys were turned by.
      lengths: int32 `[B]`, tokens that each row has taken in.
      rolling: None for a cache that holds every token of its rows.
    """

    layers: tuple[Any, ...]
    positions: jax.Array
    lengths: jax.Array
    rolling: Rolling | None = None

    @property
    def capacity(self) -> int:
        """How many tokens of a row it can hold."""
        return self.positions.shape[-1]

    def check_room(self, tokens: int | jax.Array) -> None:
        """Raise ValueError if rows have no room for so many more tokens.

        Lengths that are traced cannot be looked at; see `decoding.extend` for what
        happens to tokens past the end then.
        """
        known = not any(isinstance(x, jax.core.Tracer) for x in (self.lengths, tokens))
        if self.rolling is not None or not known:
            return
        total = np.max(np.asarray(self.lengths) + np.asarray(tokens))
        if total > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens a row, got "
                f"{np.max(np.asarray(self.lengths))} held and up to {total} after this"
            )


class View(NamedTuple):
    """Where the new tokens of one call lie, and what they see: for all layers alike.

    Attributes:
      slots: `[B, T]`, the slot of each new token; S where there is none to write.
      before: `[B]`, the slot of the last token before these; S for the first token.
      turns: `[B, T]`, the positions that keys are turned by.
      positions: `[B, T]`, of the new tokens, as encodings are given them.
      index: `[B, T]`, their places in the row, or in a rolling cache.
      key_positions: `[B, S]`, of what is held, these tokens included.
      key_index: `[B, S]`, `NOT_HELD` where a slot is empty.
      start: the first slot that a query may see.
      stop: the first slot from which on all are empty.
      real: bool `[B, T]`, False where a row has no more new tokens.
      lost: bool `[B, T]`, True for a token that found the cache full.
    """

    slots: jax.Array
    before: jax.Array
    turns: jax.Array
    positions: jax.Array
    index: jax.Array
    key_positions: jax.Array
    key_index: jax.Array
    start: jax.Array
    stop: jax.Array
    real: jax.Array
    lost: jax.Array


def admit(
    cache: Cache,
    counts: jax.Array,
    positions: jax.Array | None,
    *,
    length: int,
    window: int,
) -> tuple[View, Cache]:
    """Take in the first `counts[b]` of `length` new tokens of each row.

    Args:
      cache: what is held so far.
      counts: int32 `[B]`.
      positions: int32 `[B, T]`, or None to count along the row.
      length: T; 1 for a rolling cache.
      window: tokens that a query sees, its own included; 0 for all.

    Returns:
      The view for the layers, and the cache with positions and lengths brought up to
      date; its layers are still to be written.
    """
    steps = jnp.arange(length, dtype=jnp.int32)[None]
    real = steps < counts[:, None]
    # Padding repeats the last real token, so that nothing about it is out of the way.
    steps = jnp.minimum(steps, jnp.maximum(counts - 1, 0)[:, None])
    index = cache.lengths[:, None] + steps
    if positions is None:
        positions = index
    else:
        positions = jnp.take_along_axis(positions.astype(jnp.int32), steps, axis=1)
    slots = _slot(cache, index)
    kept = real & (slots < cache.capacity)
    slots = jnp.where(kept, slots, cache.capacity)
    held = write_rows(cache.positions[..., None], slots, positions[..., None])[..., 0]
    last = cache.lengths - 1
    after = dataclasses.replace(cache, positions=held, lengths=cache.lengths + counts)
    view = View(
        slots=slots,
        before=jnp.where(last < 0, cache.capacity, _slot(cache, last)),
        turns=positions,
        positions=positions,
        index=index,
        key_positions=held,
        key_index=_held(after),
        start=jnp.maximum(jnp.min(index) - window + 1, 0) if window else jnp.int32(0),
        stop=jnp.minimum(jnp.max(after.lengths), cache.capacity),
        real=real,
        lost=real & ~kept,
    )
    return (view if cache.rolling is None else _recounted(view, after)), after


def _recounted(view: View, cache: Cache) -> View:
    """The view with places counted in a rolling cache: sinks first, then the window."""
    dropped = jnp.maximum(cache.lengths - cache.capacity, 0)[:, None]
    sink = jnp.arange(cache.capacity)[None] < cache.rolling.sinks
    empty = view.key_index == NOT_HELD
    rank = jnp.where(sink | empty, view.key_index, view.key_index - dropped)
    index = view.index - dropped
    return view._replace(
        positions=index,
        index=index,
        key_positions=rank,
        key_index=rank,
        start=jnp.int32(0),
    )


def write_rows(leaf: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """`[B, ..., S, W]` with `rows` `[B, ..., T, W]` at `slots` `[B, T]`.

    A slot past the end is not written, nor is any other in its place.
    """

    def write(leaf, slots, rows):
        return leaf.at[..., slots, :].set(rows.astype(leaf.dtype), mode="drop")

    return jax.vmap(write)(leaf, slots, rows)


def segment_sizes(capacity: int, first: int) -> list[int]:
    """How many slots each segment of a layer's memory has.

    Attention reads a segment whole or not at all. So they are short at first and then
    a quarter of all those before: at most that much is read in vain, and there are few
    of them. What is left over at the end goes to the last one.

    Args:
      capacity: of all segments together.
      first: slots of the first one; the others have as many or a multiple.

    Example:
      >>> segment_sizes(257, 256), segment_sizes(5000, 256)
      ([257], [256, 256, 256, 256, 256, 512, 512, 768, 768, 1160])
    """
    sizes, total = [], 0
    while total < capacity:
        size = max(1, -(-total // (4 * first))) * first
        if 2 * (capacity - total) < 3 * size:
            size = capacity - total
        sizes.append(size)
        total += size
    return sizes


def located(memory: Memory) -> list[tuple[int, int, dict[str, Any]]]:
    """Segments with their first slot and the one after their last."""
    ends = np.cumsum([segment["value"].shape[-2] for segment in memory]).tolist()
    return list(zip([0, *ends], ends, memory, strict=False))


def write_layer(memory: Memory, slots: jax.Array, rows: dict[str, Any]) -> Memory:
    """What a layer keeps, with new rows `[B, ..., T, W]` in their slots.

    The batch is an index like the slots: mapped over, it would be moved to the front
    for the write, a copy of everything.
    """
    batch = jnp.arange(slots.shape[0])[:, None]

    def write(leaf, rows, at):
        rows = jnp.moveaxis(rows, -2, 1).astype(leaf.dtype)
        return leaf.at[batch, ..., at, :].set(rows, mode="drop")

    return tuple(
        jax.tree.map(
            functools.partial(write, at=_within(slots, start, stop)), segment, rows
        )
        for start, stop, segment in located(memory)
    )


def read_extras(memory: Memory, slots: jax.Array) -> Any:
    """The extras in one slot `[B]` of each row, `[B, W]`; zero past the end."""
    batch = jnp.arange(slots.shape[0])

    def read(leaf, at):
        return leaf.at[batch, ..., at, :].get(mode="fill", fill_value=0)

    parts = [
        jax.tree.map(
            functools.partial(read, at=_within(slots, start, stop)), segment["extras"]
        )
        for start, stop, segment in located(memory)
    ]
    # A slot is in one segment, and the others give zero.
    return jax.tree.map(lambda *parts: sum(parts), *parts)


def _within(slots, start, stop):
    """Slots counted from `start`; all that are not of this segment are past its end.

    Below zero, they would be taken to count from the end.
    """
    return jnp.where((slots >= start) & (slots < stop), slots - start, stop - start)


def _slot(cache, index):
    return index if cache.rolling is None else cache.rolling.slot(index)


def _held(cache):
    """The index of the token in each slot, `[B, S]`."""
    slots = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
    last = cache.lengths[:, None] - 1
    if cache.rolling is None:
        return jnp.where(slots <= last, slots, NOT_HELD)
    sinks, window = cache.rolling.sinks, cache.rolling.window
    newest = last - (last - slots) % window  # the last index that falls into the slot
    index = jnp.where(slots < sinks, slots, newest)
    empty = jnp.where(slots < sinks, slots > last, newest < sinks)
    return jnp.where(empty, NOT_HELD, index)
