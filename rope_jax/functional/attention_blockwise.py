"""Attention by blocks of keys with a running softmax: memory linear in the length.

The forward pass is Milakov & Gimelshein, "Online normalizer calculation for softmax"
(2018), in the arrangement of Rabe & Staats, "Self-attention Does Not Need O(n^2)
Memory" (2021); the backward pass recomputes each block's weights from the saved peak
and normalizer of each row, as Dao et al., "FlashAttention" (2022), algorithm 4.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.attention_request import (
    Request,
    mix,
    mix_back,
    products,
    take,
)
from rope_jax.functional.attention_target import target_platform

# Rows and columns of one block. A CPU wants blocks that stay in its cache (64 to 1024
# were timed), other devices as much work as possible for each step of the loop.
_BLOCK_ON_CPU, _BLOCK = 128, 512


def blockwise(request: Request) -> jax.Array:
    """Softmax attention in O(T + S) memory, forward and backward.

    Args:
        request: what to compute.

    Returns:
        `[..., K, G, T, V]` in `request.dtype`.
    """
    *_, num_queries, num_keys = request.shape
    block = _BLOCK_ON_CPU if target_platform() == "cpu" else _BLOCK
    rows, columns = min(num_queries, block), min(num_keys, block)
    padded = request.padded(rows, columns)
    if padded.bias_function is not None:
        padded = _lift_bias(padded, rows, columns)
    padded = _vary_alike(padded)

    @jax.custom_vjp
    def attend(request):
        return _forward(request, rows, columns)[0]

    def forward(request):
        out, stats = _forward(request, rows, columns)
        return out, (request, out, stats)

    def backward(saved, gradient):
        return (_backward(*saved, gradient, rows, columns),)

    attend.defvjp(forward, backward)
    return take(attend(padded), 0, num_queries, axis=-2)


def _lift_bias(request, rows, columns):
    """Turn the traced arrays that the bias function closes over into `tables`.

    A custom derivative sees only its arguments; what a function closes over, be it a
    learned table or the positions of a packed batch, has to become one.
    """
    block = request.rows(0, rows).columns(0, columns)
    closed = jax.make_jaxpr(request.bias_function)(
        request.tables, block.query_positions, block.key_positions
    )
    jaxpr, consts = closed.jaxpr, closed.consts
    traced = [i for i, const in enumerate(consts) if isinstance(const, jax.core.Tracer)]
    fixed = [None if i in traced else const for i, const in enumerate(consts)]

    def bias_function(tables, query_positions, key_positions):
        values = list(fixed)
        for i, table in zip(traced, tables, strict=True):
            values[i] = table
        (bias,) = jax.core.eval_jaxpr(jaxpr, values, query_positions, key_positions)
        return bias

    tables = tuple(consts[i] for i in traced)
    return dataclasses.replace(request, bias_function=bias_function, tables=tables)


def _vary_alike(request):
    """Let the float arrays vary over the shard_map axes that any array varies over.

    Loops and custom derivatives there want the same axes going in and coming out;
    the sum's own derivative adds up what a replicated array gets from each device.
    """
    zero = sum(
        jnp.zeros_like(x, shape=(), dtype=bool) for x in jax.tree.leaves(request)
    )
    names = ("query", "key", "value", "bias")
    arrays = {name: getattr(request, name) for name in names}
    varying = jax.tree.map(lambda array: array + zero.astype(array.dtype), arrays)
    return dataclasses.replace(request, **varying)


def _key_blocks(request, i, rows, columns):
    """The first block of keys that the i-th block of queries can see, and the end."""
    count = request.shape[-1] // columns
    if not request.by_index:
        return 0, count
    last = request.query_positions[(i + 1) * rows - 1]
    stop = jnp.minimum(last // columns + 1, count)
    if request.window is None:
        return 0, stop
    oldest = request.query_positions[i * rows] - (request.window - 1)
    return jnp.maximum(oldest, 0) // columns, stop


def _forward(request, rows, columns):
    *heads, num_queries, _ = request.shape

    def query_block(i):
        queries = request.rows(i * rows, rows)

        def key_block(j, carry):
            block = queries.columns(j * columns, columns)
            return absorb(carry, block.logits(), block.value)

        shape = (*heads, rows, request.value.shape[-1])
        mixed = jnp.zeros_like(request.value, shape=shape, dtype=request.dtype)
        total = jnp.zeros_like(mixed[..., :1])
        start = total - jnp.inf, total, mixed
        blocks = _key_blocks(request, i, rows, columns)
        peak, total, mixed = lax.fori_loop(*blocks, key_block, start)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        # Apart, because one number, peak + log(total), loses the total where the
        # peak is large, and with it the gradient's weights.
        peak = jnp.where(empty, 0, peak)
        return mixed / total, jnp.concatenate([peak, total], axis=-1)

    blocks = lax.map(query_block, jnp.arange(num_queries // rows))
    return jax.tree.map(join_rows, blocks)


def absorb(softmax, logits, value):
    """A running softmax with one more block of keys in it.

    Args:
        softmax: `(peak, total, mixed)` of the keys so far: the largest logit of each
            row `[..., T, 1]`, and, relative to it, the sum of the weights `[..., T, 1]`
            and of the weighted values `[..., T, V]`. It starts at (-inf, 0, 0).
        logits: `[..., K, G, T, s]` of the block, -inf where masked.
        value: `[..., K, s, V]`.
    """
    peak, total, mixed = softmax
    new_peak = jnp.maximum(peak, logits.max(-1, keepdims=True))
    base = jnp.where(new_peak == -jnp.inf, 0, new_peak)
    weights = jnp.exp(logits - base)
    decay = jnp.exp(peak - base)
    total = total * decay + weights.sum(-1, keepdims=True)
    return new_peak, total, mixed * decay + mix(weights, value)


def join_rows(blocks: jax.Array) -> jax.Array:
    """`[blocks, ..., rows, V]` as `[..., blocks * rows, V]`."""
    blocks = jnp.moveaxis(blocks, 0, -3)
    *heads, count, rows, width = blocks.shape
    return blocks.reshape(*heads, count * rows, width)


def _backward(request, out, stats, gradient, rows, columns):
    """The gradient of every array of the request, as a request."""
    delta = (gradient * out).sum(-1, keepdims=True)

    def query_block(sums, i):
        def key_block(j, carry):
            d_query, sums = carry
            block = queries.columns(j * columns, columns)
            weights = jnp.exp(block.logits() - peak) / total
            d_weights = products(block_gradient, block.value)
            d_logits = weights * (d_weights - block_delta)
            d_products = d_logits * request.scale
            at_keys, at_both = {-2: j * columns}, {-2: i * rows, -1: j * columns}
            d_key = mix_back(d_products, block.query)
            d_value = mix_back(weights, block_gradient)
            sums = {
                "key": _add_at(sums["key"], d_key, at_keys),
                "value": _add_at(sums["value"], d_value, at_keys),
                "bias": _add_at(sums["bias"], d_logits, at_both),
                "tables": _add_tables(sums["tables"], block, d_logits),
            }
            return d_query + mix(d_products, block.key), sums

        queries = request.rows(i * rows, rows)
        block_gradient, block_stats, block_delta = (
            take(x, i * rows, rows, axis=-2) for x in (gradient, stats, delta)
        )
        peak, total = block_stats[..., :1], block_stats[..., 1:]
        d_query = jnp.zeros_like(queries.query, dtype=request.dtype)
        blocks = _key_blocks(request, i, rows, columns)
        d_query, sums = lax.fori_loop(*blocks, key_block, (d_query, sums))
        return sums, d_query

    blocks = jnp.arange(request.shape[-2] // rows)
    sums, d_query = lax.scan(query_block, _zero_sums(request), blocks)
    return _as_gradient(request, {"query": join_rows(d_query), **sums})


def _zero_sums(request):
    """Accumulators for what several blocks contribute to; None for integers."""

    def zeros(array):
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return None
        dtype = jnp.promote_types(array.dtype, jnp.float32)
        return jnp.zeros_like(array, dtype=dtype)

    names = ("key", "value", "bias", "tables")
    return jax.tree.map(zeros, {name: getattr(request, name) for name in names})


def _add_at(total, part, starts):
    """Add a block to its place in the whole, summed over axes that are 1 there."""
    if total is None:
        return None
    broadcast = [
        axis
        for axis, (size, whole) in enumerate(zip(part.shape, total.shape, strict=True))
        if whole == 1 and size > 1
    ]
    part = part.sum(broadcast, keepdims=True)
    corner = [starts.get(axis, 0) for axis in range(-total.ndim, 0)]
    there = lax.dynamic_slice(total, corner, part.shape)
    return lax.dynamic_update_slice(total, there + part, corner)


def _add_tables(totals, block, d_logits):
    """Add what one block contributes to the arrays behind the bias function."""
    if all(total is None for total in totals):
        return totals

    def function_bias(tables):
        # Zero, but varying over the same shard_map axes as the cotangent.
        return block.function_bias(tables) + jnp.zeros_like(d_logits, shape=())

    bias, pull_back = jax.vjp(function_bias, block.tables)
    d_bias = _add_at(jnp.zeros_like(bias), d_logits, {})
    (d_tables,) = pull_back(d_bias)
    return tuple(
        None if total is None else total + d_table
        for total, d_table in zip(totals, d_tables, strict=True)
    )


def _as_gradient(request, sums):
    """Sums as the cotangent of a request: its types, None for what has none."""

    def cast(total, array):
        return None if total is None else total.astype(array.dtype)

    arrays = {name: getattr(request, name) for name in sums}
    grads = jax.tree.map(cast, sums, arrays, is_leaf=lambda total: total is None)
    grads |= dict.fromkeys(("query_positions", "query_segments"))
    grads |= dict.fromkeys(("key_positions", "key_segments", "key_mask"))
    return dataclasses.replace(request, **grads)
