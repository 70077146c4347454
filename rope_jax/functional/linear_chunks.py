"""Linear attention over whole rows: chunks of tokens through a state of constant size.

Within a chunk the scores are a small matrix; what came before is in the state. Memory
is that of the inputs, plus one state for each chunk where there is a gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.attention_request import take
from rope_jax.functional.linear_state import (
    Keys,
    LinearState,
    Parts,
    Queries,
    Rules,
    absorb,
    advance,
    merge,
    quotient,
    read,
)

# The axis that counts the tokens.
_TIME = {"query": -3, "key": -3, "value": -3}
_TIME |= dict.fromkeys(("positions", "segments", "mask"), -1)


def forward(
    state: LinearState, queries: Queries, keys: Keys, rules: Rules, chunk_size: int
) -> tuple[jax.Array, LinearState]:
    """Causal attention of T tokens after those in the state.

    Returns:
        `[..., T, N, V]` in `rules.dtype`, and the state after the last token.
    """

    def step(state, chunk):
        parts, state = advance(state, *chunk, rules, strict=False)
        return state, quotient(parts)

    length = queries.query.shape[-3]
    state, out = _over_chunks(step, state, (queries, keys), length, chunk_size)
    return _join(out, -3, length), state


def absorb_all(
    state: LinearState, keys: Keys, rules: Rules, chunk_size: int
) -> LinearState:
    """The state after all the keys."""

    def step(state, chunk):
        return absorb(state, chunk, rules), None

    return _over_chunks(step, state, keys, keys.key.shape[-3], chunk_size)[0]


def read_all(
    state: LinearState, queries: Queries, rules: Rules, chunk_size: int
) -> jax.Array:
    """What every query sees of the state, `[..., T, N, V]`."""

    def step(carry, chunk):
        return carry, quotient(read(state, chunk, rules))

    length = queries.query.shape[-3]
    _, out = _over_chunks(step, None, queries, length, chunk_size)
    return _join(out, -3, length)


def both_ways(
    state: LinearState, queries: Queries, keys: Keys, rules: Rules, chunk_size: int
) -> jax.Array:
    """Attention within segments, to earlier and later tokens, `[..., T, N, V]`.

    A pass forward that includes the token itself, one backward that does not.
    """
    length = queries.query.shape[-3]
    axes = Parts(mixed=-2, total=-1, peak=-1)

    def sweep(tokens, strict):
        def step(state, chunk):
            parts, state = advance(state, *chunk, rules, strict=strict)
            return state, parts

        _, parts = _over_chunks(step, state, tokens, length, chunk_size)
        return jax.tree.map(lambda x, axis: _join(x, axis, length), parts, axes)

    def flip(tokens):
        return _map_time(lambda x, axis: jnp.flip(x, axis), tokens)

    ahead = sweep((queries, keys), strict=False)
    back = sweep((flip(queries), flip(keys)), strict=True)
    return quotient(merge(ahead, jax.tree.map(jnp.flip, back, axes)))


def cut(tokens: Queries | Keys, start: int, size: int) -> Queries | Keys:
    """`size` tokens from `start`."""
    return _map_time(lambda x, axis: take(x, start, size, axis), tokens)


def _over_chunks(
    step: Callable, carry: Any, tokens: Any, length: int, chunk_size: int
) -> tuple[Any, Any]:
    """`lax.scan` of `step(carry, chunk)` over chunks of `length` tokens, of equal size.

    Features and scores are computed again in the backward pass. Where the chunks have
    more room than there are tokens, masked keys fill it.
    """
    count = -(-length // chunk_size)
    size = -(-length // count)
    if count == 1:
        carry, results = step(carry, tokens)
        return carry, jax.tree.map(lambda x: x[None], results)

    def split(x, axis):
        axis %= x.ndim
        widths = [(0, count * size - length if i == axis else 0) for i in range(x.ndim)]
        # Ids must not change at the end; the mask becomes False, the rest 0.
        ids = jnp.issubdtype(x.dtype, jnp.integer)
        x = jnp.pad(x, widths, mode="edge" if ids else "constant")
        x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    chunks = _map_time(split, tokens)
    return lax.scan(jax.checkpoint(step, prevent_cse=False), carry, chunks)


def _map_time(function, tokens):
    """Apply `function(array, axis of time)` to what there is for each token."""
    if not isinstance(tokens, Queries | Keys):
        return tuple(_map_time(function, part) for part in tokens)
    fields = tokens._asdict().items()
    return type(tokens)(
        **{name: None if x is None else function(x, _TIME[name]) for name, x in fields}
    )


def _join(chunks, axis, length):
    """`[chunks, ..., C, ...]`, with C at `axis`, as `[..., length, ...]`."""
    count, size = chunks.shape[0], chunks.shape[axis]
    axis += chunks.ndim - 1
    chunks = jnp.moveaxis(chunks, 0, axis)
    shape = (*chunks.shape[:axis], count * size, *chunks.shape[axis + 2 :])
    return take(chunks.reshape(shape), 0, length, axis)
