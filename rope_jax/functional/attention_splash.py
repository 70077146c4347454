"""Attention by JAX's splash kernel for TPUs: a fused flash attention in Pallas.

On a CPU the kernel is interpreted, which is slow and for tests.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rope_jax.functional.attention_fused import (
    alibi_refusal,
    by_rows,
    fold_alibi,
    zero_unseeing,
)
from rope_jax.functional.attention_request import Request, take
from rope_jax.functional.attention_target import is_partitioned, target_platform
from rope_jax.functional.distance import to_rank

# Rows and columns of one block: whole registers of 128 lanes.
_LANES, _BLOCK = 128, 512


def splash_refusal(request: Request) -> str:
    """Why the kernel cannot serve a request; "" if it can."""
    platform, dtype = target_platform(), request.query.dtype
    if platform not in ("tpu", "cpu"):
        return f"it needs a TPU, got {platform}"
    if platform == "tpu" and is_partitioned():
        return "it needs a shard_map over a mesh of several devices"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"it takes float32 and bfloat16, got {dtype}"
    if request.bias is not None:
        return "it takes no array as bias"
    if request.causal and not request.by_index:
        return "its causal mask goes by index, and positions were given"
    ids = (request.query_segments, request.key_segments)
    if any(x is not None and x.dtype.itemsize > 4 for x in ids):
        return f"it takes segment ids of 32 bits, got {ids[0].dtype}"
    return alibi_refusal(request)


def splash(request: Request) -> jax.Array:
    """Softmax attention in O(T + S) memory, forward and backward, on a TPU.

    The scale is multiplied into the queries, which rounds them once more where they
    are bfloat16 and it is no power of two.

    Args:
        request: what to compute; `splash_refusal` has nothing against it.

    Returns:
        `[..., K, G, T, V]` in the type of the queries.
    """
    dtype = request.query.dtype
    query = (request.query.astype(jnp.float32) * request.scale).astype(dtype)
    scaled = dataclasses.replace(request, query=query, scale=1.0)
    *_, num_queries, num_keys = request.shape
    rows, columns = (
        min(_BLOCK, -(-length // _LANES) * _LANES) for length in (num_queries, num_keys)
    )
    padded = fold_alibi(scaled).padded(rows, columns)
    if request.by_index and request.key_mask is None:
        # The keys that padding added come after every query as it is.
        padded = dataclasses.replace(padded, key_mask=None)
    out = _attend(padded, num_keys - num_queries, rows, columns)
    out = out.reshape(*padded.query.shape[:-1], -1)
    return zero_unseeing(take(out, 0, num_queries, axis=-2), request)


def _attend(request, offset, rows, columns):
    """`[B, N, T, V]` of a request whose lengths are whole blocks."""
    # Imported here: it loads Pallas, which nothing else needs.
    from jax.experimental.pallas.ops.tpu import splash_attention as lib

    *_, groups, group_size, num_queries, num_keys = request.shape
    shape, num_heads = (num_queries, num_keys), groups * group_size
    if request.window is not None:
        mask = lib.LocalMask(shape, (request.window - 1, 0), offset)
    elif request.causal:
        mask = lib.CausalMask(shape, offset)
    else:
        mask = lib.FullMask(shape)
    kernel = lib.make_splash_mha(
        lib.MultiHeadMask([mask] * num_heads),
        block_sizes=lib.BlockSizes(
            block_q=rows,
            block_kv=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=target_platform() == "cpu",
    )
    query, key, value = by_rows(request)
    ids = _segment_ids(request, len(query))
    ids = None if ids is None else lib.SegmentIds(*ids)
    return jax.vmap(kernel)(query, key, value, ids)


def _segment_ids(request, batch):
    """Ids `[B, T]` and `[B, S]`, equal where a query may see a key; None for all.

    The kernel has no key mask: a masked key gets an id that no query has.
    """
    query, key, mask = request.query_segments, request.key_segments, request.key_mask
    if query is None and mask is None:
        return None
    lengths = request.shape[-2:]
    if query is None:
        query, key = (jnp.zeros(length, jnp.int32) for length in lengths)
    query, key = query.astype(jnp.int32), key.astype(jnp.int32)
    if mask is not None:
        lowest, highest = query.min(-1, keepdims=True), query.max(-1, keepdims=True)
        # One beyond all of them, which wraps only if both ends of int32 are in use.
        spare = jnp.where(highest < 2**31 - 1, highest + 1, lowest - 1)
        rank = max(query.ndim, key.ndim, mask.ndim)
        key = jnp.where(to_rank(mask, rank), to_rank(key, rank), to_rank(spare, rank))
    lead = request.query.shape[:-4]
    return tuple(
        jnp.broadcast_to(ids, (*lead, length)).reshape(batch, length)
        for ids, length in zip((query, key), lengths, strict=True)
    )
