"""Attention by cuDNN's fused kernel on NVIDIA GPUs, called through `jax.nn`."""

from typing import Any

import jax
import jax.numpy as jnp

from rope_jax.functional.attention_fused import (
    alibi_refusal,
    by_rows,
    fold_alibi,
    zero_unseeing,
)
from rope_jax.functional.attention_request import Request
from rope_jax.functional.attention_target import target_platform
from rope_jax.functional.bias_channels import EXTRA_CHANNELS

# What a masked logit gets: as in jax.nn, not the lowest number, whose differences
# overflow in the kernel.
_MASKED = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
# The widest head by compute capability, as jax checks it.
_WIDEST, _WIDEST_BEFORE_HOPPER, _HOPPER, _AMPERE = 256, 128, (9, 0), (8, 0)


def cudnn_refusal(request: Request) -> str:
    """Why cuDNN cannot serve a request; "" if it can."""
    dtype = request.query.dtype
    platforms = target_platform(), jax.default_backend()
    if platforms != ("gpu", "gpu"):
        return f"it needs an NVIDIA GPU, and to be traced beside it, got {platforms[0]}"
    capability = _compute_capability()
    if capability < _AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or more"
    if dtype.name not in _MASKED:
        return f"it takes bfloat16 and float16, got {dtype}"
    widest = _WIDEST if capability >= _HOPPER else _WIDEST_BEFORE_HOPPER
    if _width(request) > widest:
        return f"it takes heads of up to {widest} channels, got {_width(request)}"
    if request.bias is not None and request.bias.dtype != dtype:
        return f"it would round a bias of {request.bias.dtype} to {dtype}"
    if request.alibi is not None and request.scale <= 0:
        return f"AlibiBias is folded for a positive scale only, got {request.scale}"
    return alibi_refusal(request)


def cudnn(request: Request) -> jax.Array:
    """Softmax attention by one kernel forward and one backward.

    Memory is linear in the length unless `needs_pairs`.

    Args:
        request: what to compute; `cudnn_refusal` has nothing against it.

    Returns:
        `[..., K, G, T, V]` in the type of the queries.
    """
    out = jax.nn.dot_product_attention(
        **cudnn_arguments(request), implementation="cudnn"
    )
    *lead, num_queries, _ = request.query.shape
    out = out[:, :num_queries, :, : request.value.shape[-1]]
    out = jnp.swapaxes(out, 1, 2).reshape(*lead, num_queries, -1)
    return zero_unseeing(out, request)


def needs_pairs(request: Request) -> bool:
    """Whether cuDNN needs an array with an entry for each query and key.

    Its own masks are causality from the first key on, and a window; it is given any
    other, and a bias, as an array in the type of the queries, one for all heads if it
    is the same for all.
    """
    masked = request.key_mask is not None or request.query_segments is not None
    return request.bias is not None or masked or not _has_own_masks(request)


def cudnn_arguments(request: Request) -> dict[str, Any]:
    """What `jax.nn.dot_product_attention` is given for a request.

    Lengths are even where an array of pairs is needed, and widths a multiple of 8.
    """
    pairs = needs_pairs(request)
    width = _width(request)
    own_causal = request.by_index and request.shape[-2] == request.shape[-1]
    request = fold_alibi(request)
    if pairs:
        request = request.padded(2, 2)
    query, key, value = (jnp.swapaxes(_widen(x, width), 1, 2) for x in by_rows(request))
    window = None if pairs or request.window is None else (request.window - 1, 0)
    return {
        "query": query,
        "key": key,
        "value": value,
        "bias": _pairs(request) if pairs else None,
        "scale": request.scale,
        "is_causal": own_causal,
        "local_window_size": window,
    }


def _has_own_masks(request):
    """Whether causality and window, if any, are masks that cuDNN has."""
    *_, num_queries, num_keys = request.shape
    if not request.causal:
        return True
    if not request.by_index:
        return False
    # A single query is the last, and sees every key.
    return num_queries == num_keys or (num_queries == 1 and request.window is None)


def _pairs(request):
    """Bias and masks as one array, `[B or 1, N or 1, T, S]`."""
    dtype, shape = request.query.dtype, request.shape
    masked = jnp.float32(_MASKED[dtype.name])
    bias = jnp.zeros((1,) * len(shape), jnp.float32)
    if request.bias is not None:
        # In float32, so that its gradient is summed so over the axes it lacks.
        bias = jnp.maximum(request.bias.astype(jnp.float32), masked)
        bias = bias.reshape((1,) * (len(shape) - bias.ndim) + bias.shape)
    for mask in request.masks():
        bias = jnp.where(mask, bias, masked)
    *batch, groups, group_size, _, _ = bias.shape
    if any(size > 1 for size in batch):
        batch = shape[:-4]
    if groups * group_size > 1:
        groups, group_size = shape[-4:-2]
    bias = jnp.broadcast_to(bias, (*batch, groups, group_size, *shape[-2:]))
    return bias.reshape(-1, groups * group_size, *shape[-2:]).astype(dtype)


def _width(request):
    """Channels of a head for all of query, key and value, as the kernel takes them."""
    width = request.query.shape[-1]
    if request.alibi is not None:
        width += EXTRA_CHANNELS
    return -(-max(width, request.value.shape[-1]) // 8) * 8


def _widen(array, width):
    return jnp.pad(array, [(0, 0)] * 3 + [(0, width - array.shape[-1])])


def _compute_capability() -> tuple[int, ...]:
    """Of the GPU here; (0,) where it is another maker's, with a name for a number."""
    parts = jax.local_devices(backend="gpu")[0].compute_capability.split(".")
    return tuple(map(int, parts)) if all(map(str.isdigit, parts)) else (0,)
