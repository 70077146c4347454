"""What kernels that are given, not written here, need around them.

They know no bias but an array, if any, and give numbers of no meaning for a query
that may attend to nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rope_jax.functional.alibi import alibi_fold
from rope_jax.functional.attention_request import Request


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
    visible = request.visible()
    return out if visible is None else jnp.where(visible, out, 0)


def by_rows(request: Request) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query `[B, N, T, H]`, key `[B, K, S, H]` and value, with one axis of rows B."""
    *_, groups, group_size, length, width = request.query.shape
    return (
        request.query.reshape(-1, groups * group_size, length, width),
        request.key.reshape(-1, *request.key.shape[-3:]),
        request.value.reshape(-1, *request.value.shape[-3:]),
    )
