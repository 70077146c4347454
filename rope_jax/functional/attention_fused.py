"""What kernels that are given, not written here, need around them.

They know no bias but an array, if any, and give numbers of no meaning for a query
that may attend to nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.alibi import alibi_fold
from rope_jax.functional.attention_blockwise import join_rows
from rope_jax.functional.attention_request import Request, take

# Queries that are asked at once whether they see a key.
_ROWS = 512


def alibi_refusal(request: Request) -> str:
    """Why the bias cannot be folded or left out; "" if it can."""
    if request.bias_function is not None:
        return "it takes no bias function (AlibiBias is folded into query and key)"
    if request.alibi is not None and not request.causal:
        return "AlibiBias is folded for causal attention only, got causal=False"
    return ""


def fold_alibi(request: Request) -> Request:
    """The request with its ALiBi bias, if any, as channels of query and key."""
    if request.alibi is None:
        return request
    *batch, groups, group_size, length, width = request.query.shape
    query = request.query.reshape(*batch, groups * group_size, length, width)
    query, key = alibi_fold(
        jnp.swapaxes(query, -2, -3),
        jnp.swapaxes(request.key, -2, -3),
        request.alibi.slopes,
        *request.alibi.positions(request.query_positions, request.key_positions),
        scale=request.scale,
    )
    query = jnp.swapaxes(query, -2, -3)
    return dataclasses.replace(
        request,
        query=query.reshape(*request.query.shape[:-1], query.shape[-1]),
        key=jnp.swapaxes(key, -2, -3),
        alibi=None,
    )


def zero_unseeing(out: jax.Array, request: Request) -> jax.Array:
    """Zeros, with a zero gradient, for the queries that may attend to no key.

    Args:
        out: `[..., K, G, T, V]`, finite.
        request: what was computed.
    """
    alike = request.query_segments is request.key_segments
    sees_own_key = alike and (request.by_index or not request.causal)
    if sees_own_key and request.bias is None and request.key_mask is None:
        return out
    return jnp.where(_visible(request), out, 0)


def _visible(request):
    """Whether a query may attend to any key, `[..., T, 1]` in the rank of the result.

    By blocks of queries: XLA for TPUs else keeps a causal mask of all pairs.
    """
    num_queries = request.shape[-2]
    rows = min(num_queries, _ROWS)
    padded = request.padded(rows, 1)

    def any_key(i):
        block = padded.rows(i * rows, rows)
        masks = list(block.masks())
        if block.bias is not None:
            masks.append(block.bias > -jnp.inf)
        seen = functools.reduce(jnp.logical_and, masks).any(-1, keepdims=True)
        return jnp.broadcast_to(seen, (*seen.shape[:-2], rows, 1))

    blocks = lax.map(any_key, jnp.arange(padded.shape[-2] // rows))
    return take(join_rows(blocks), 0, num_queries, axis=-2)


def by_rows(request: Request) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query `[B, N, T, H]`, key `[B, K, S, H]` and value, with one axis of rows B."""
    *_, groups, group_size, length, width = request.query.shape
    return (
        request.query.reshape(-1, groups * group_size, length, width),
        request.key.reshape(-1, *request.key.shape[-3:]),
        request.value.reshape(-1, *request.value.shape[-3:]),
    )
