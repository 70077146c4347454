"""Softmax attention: one entry point, several implementations of one meaning."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.alibi import AlibiBias
from rope_jax.functional.attention_blockwise import blockwise, join_rows
from rope_jax.functional.attention_choice import Implementation, choose, log_choice
from rope_jax.functional.attention_cudnn import cudnn, cudnn_refusal
from rope_jax.functional.attention_request import Request, align_bias, mix
from rope_jax.functional.attention_splash import splash, splash_refusal
from rope_jax.functional.distance import fitting

BiasFunction = Callable[[jax.Array, jax.Array], jax.Array]


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    bias: jax.Array | BiasFunction | None = None,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    key_mask: jax.Array | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    r"""Softmax attention over positions, with a bias given whole or by blocks.

    .. math::
        o_t = \sum_s \frac{m_{ts} e^{l_{ts}}}{\sum_u m_{tu} e^{l_{tu}}} v_s, \qquad
        l_{ts} = \text{scale} \cdot q_t \cdot k_s + b_{ts}

    where :math:`m_{ts}` is 1 if query t may attend to key s and 0 otherwise. A query
    that may attend to no key gets zeros, and a zero gradient. Logits, weights and sums
    are float32 for 16-bit inputs; only the result is rounded.

    B is the batch (any number of axes, or none), T the query length, S the key length,
    N the number of heads, K the number of key heads (query head n uses key head
    n // (N / K)), H the head dim and V that of the values.

    Args:
        query: `[..., T, N, H]`, floating point.
        key: `[..., S, K, H]`, where K divides N.
        value: `[..., S, K, V]`.
        query_positions: integers `[T]` or `[..., T]`, may be traced. None means the
            indices, where T queries are the last T of S keys: `arange(T) + S - T`.
        key_positions: integers `[S]` or `[..., S]`. None means `arange(S)`.
        bias: added to the logits. An array that broadcasts to `[..., N, T, S]`, or a
            function `(query_positions, key_positions) -> [..., N, t, s]` of the
            positions of a block, `[t]` and `[s]` or with the leading axes they were
            given. Gradients reach the array, and whatever the function closes over.
            Kernels that take no function know `AlibiBias` and fold it.
        causal: a key is attended to only where its position is not beyond the query's.
        window: a key is attended to only where it is fewer than so many positions
            before the query; needs `causal`. None for no end.
        segment_ids: integers `[T]` or `[..., T]` if T is S, else a pair for queries and
            keys. Attention stays between equal ids; no id is special.
        key_mask: booleans `[S]` or `[..., S]`, True where a key may be attended to.
        scale: factor on the products; None means `H**-0.5`.
        implementation: `"xla"`, one softmax over all the keys; `"chunked"`, queries in
            a few chunks, each of which leaves out the keys beyond it if positions are
            the indices, and is a loop over smaller ones where it is large;
            `"blockwise"`, a running softmax over blocks of keys, linear memory forward
            and backward, for one reverse-mode derivative only; `"cudnn"` and
            `"splash"`, the fused kernels of an NVIDIA GPU and of a TPU; `"auto"`,
            chosen by platform, size, type and bias, and logged once.

    Returns:
        `[..., T, N, V]` in the type of `query`.

    Raises:
        ValueError: a shape, type or name that does not fit, or host integers beyond
            int32, named with what was given;
            or an implementation that cannot serve the call, with those that can.

    Example:
        Four queries and keys, the keys all alike, so that each query takes the mean of
        the values up to its own:

        >>> import jax.numpy as jnp
        >>> x = jnp.ones((4, 1, 2))
        >>> value = jnp.arange(4.0)[:, None, None]
        >>> attention(x, x, value)[:, 0, 0].tolist()
        [0.0, 0.5, 1.0, 1.5]

    References:
        Vaswani et al., "Attention Is All You Need" (2017), equation 1; Ainslie et al.,
        "GQA" (2023), for grouped heads.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    check_heads(query, key, value)
    *batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_groups, value_dim = value.shape[-3:]
    by_index = causal and query_positions is None and key_positions is None
    if isinstance(bias, AlibiBias):
        _check_alibi(bias, num_keys, query_positions is None, key_positions is None)
    if query_positions is None:
        needed = causal or callable(bias)
        query_positions = _last_indices(num_queries, num_keys, needed)
    if key_positions is None:
        key_positions = jnp.arange(num_keys)
    query_segments, key_segments = _segment_pair(segment_ids, num_queries, num_keys)
    rows = functools.partial(per_entry, batch=batch, length=num_queries)
    columns = functools.partial(per_entry, batch=batch, length=num_keys)
    grouped = (*batch, num_groups, num_heads // num_groups, num_queries)
    request = Request(
        query=jnp.swapaxes(query, -2, -3).reshape(*grouped, head_dim),
        key=jnp.swapaxes(key, -2, -3),
        value=jnp.swapaxes(value, -2, -3),
        query_positions=rows("query_positions", query_positions),
        key_positions=columns("key_positions", key_positions),
        query_segments=rows("segment_ids", query_segments),
        key_segments=columns("segment_ids", key_segments),
        key_mask=columns("key_mask", key_mask, kind="bool"),
        causal=causal,
        window=_checked_window(window, causal),
        by_index=by_index,
        scale=_checked_scale(scale, head_dim),
    )
    out = _run(_with_bias(request, bias), implementation)
    out = out.reshape(*batch, num_heads, num_queries, value_dim)
    return jnp.swapaxes(out, -2, -3).astype(query.dtype)


def _whole(request: Request) -> jax.Array:
    """One softmax over all keys: `[..., K, G, T, V]` in `request.dtype`."""
    logits = request.logits()
    # The peak cancels in the quotient, so its gradient is left out. Dividing after
    # the product with the values is a smaller division, and its gradient needs no
    # sum over the keys.
    peak = lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0, peak))
    total = weights.sum(-1, keepdims=True)
    return mix(weights, request.value) / jnp.where(total == 0, 1, total)


def _chunked(request: Request) -> jax.Array:
    """`_whole` for a few chunks of queries, without the keys that none can see."""
    num_queries = request.shape[-2]
    size = max(_SMALLEST_CHUNK, math.ceil(num_queries / _MOST_CHUNKS))
    parts = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        part = request.rows(start, stop - start)
        if request.by_index:
            part = part.columns(*_seen(request, start, stop))
        parts.append(_by_rows(part))
    return jnp.concatenate(parts, axis=-2)


def _by_rows(request: Request) -> jax.Array:
    """`_whole`, by a loop over equal chunks of queries where the logits are many."""
    *_, num_queries, num_keys = request.shape
    size = max(1, _CHUNK_LOGITS // num_keys)
    if num_queries <= size:
        return _whole(request)

    @jax.checkpoint  # or the loop would keep the logits of all chunks
    def chunk(start):
        return _whole(request.rows(start, size))

    count, left = divmod(num_queries, size)
    parts = [join_rows(lax.map(chunk, jnp.arange(count) * size))]
    if left:
        parts.append(_whole(request.rows(count * size, left)))
    return jnp.concatenate(parts, axis=-2)


def _seen(request, start, stop):
    """The first key that these queries can see, and how many there are on from it."""
    *_, num_queries, num_keys = request.shape
    more = num_keys - num_queries
    first = 0 if request.window is None else max(0, start + more - request.window + 1)
    return first, stop + more - first


# More and smaller chunks leave out more of the masked triangle, but compile longer.
_SMALLEST_CHUNK, _MOST_CHUNKS = 64, 4
# Logits per head that one turn of a loop over chunks holds; `auto` has its own limits.
_CHUNK_LOGITS = 1024 * 1024

# Adding an implementation is one entry here.
IMPLEMENTATIONS = MappingProxyType(
    {
        "xla": Implementation(_whole),
        "chunked": Implementation(_chunked),
        "blockwise": Implementation(blockwise),
        "cudnn": Implementation(cudnn, cudnn_refusal, folds_alibi=True),
        "splash": Implementation(splash, splash_refusal, folds_alibi=True),
    }
)


def _run(request, name):
    """`[..., K, G, T, V]` by the implementation of that name, or by the choice."""
    name, reason = choose(request, name, IMPLEMENTATIONS)
    log_choice(name, reason)
    implementation = IMPLEMENTATIONS[name]
    if request.alibi is not None and not implementation.folds_alibi:
        alibi = request.alibi
        request = dataclasses.replace(
            request, alibi=None, bias_function=lambda _, *places: alibi(*places)
        )
    return implementation.run(request)


def check_heads(query, key, value):
    """Raise ValueError, naming the array, unless query, key and value fit."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 3 or 0 in array.shape:
            raise ValueError(
                f"{name} must be [..., length, heads, width] with no empty axis, "
                f"got shape {list(array.shape)}"
            )
        floating = jnp.isdtype(array.dtype, "real floating")
        if not floating or array.dtype != query.dtype:
            raise ValueError(
                f"{name} must be floating point and of the type of query, "
                f"{query.dtype}; got {array.dtype}"
            )
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have the leading axes of query, "
                f"{list(query.shape[:-3])}; got shape {list(array.shape)}"
            )
    if key.shape[-1] != query.shape[-1] or query.shape[-2] % key.shape[-2]:
        raise ValueError(
            "key must have the head dim of query and a number of heads that divides "
            f"its; got shapes {list(query.shape)} and {list(key.shape)}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            "value must have the length and the heads of key; got shapes "
            f"{list(key.shape)} and {list(value.shape)}"
        )


def _last_indices(num_queries, num_keys, needed):
    if needed and num_queries > num_keys:
        raise ValueError(
            "query_positions is needed where there are more queries than keys, "
            f"got None with {num_queries} queries and {num_keys} keys"
        )
    return jnp.arange(num_queries) + (num_keys - num_queries)


def _check_alibi(bias, num_keys, queries_by_default, keys_by_default):
    """Raise ValueError where the last default place is beyond an array of the bias."""
    for name, by_default in (
        ("query_positions", queries_by_default),
        ("key_positions", keys_by_default),
    ):
        array = getattr(bias, name)
        if array is None or not by_default:
            continue
        shape = jnp.shape(array)
        if not shape or shape[-1] < num_keys:
            raise ValueError(
                f"AlibiBias.{name} is indexed by place, and places end at "
                f"{num_keys - 1} with {num_keys} keys; its last axis must be at least "
                f"{num_keys}, got shape {list(shape)}"
            )


def _segment_pair(segment_ids, num_queries, num_keys):
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(
                "segment_ids must be an array or a pair for queries and keys, "
                f"got a tuple of {len(segment_ids)}"
            )
        return segment_ids
    if num_queries != num_keys:
        raise ValueError(
            "segment_ids must be a pair for queries and keys where their lengths "
            f"differ, got one array for {num_queries} queries and {num_keys} keys"
        )
    return segment_ids, segment_ids


def per_entry(name, array, *, batch, length, kind="integral"):
    """Check an array with one entry for each query or key, of each row or of all."""
    if array is None:
        return None
    array = jnp.asarray(fitting(array, name))
    if not jnp.isdtype(array.dtype, kind):
        raise ValueError(f"{name} must be of {kind} type, got {array.dtype}")
    full = (*batch, length)
    fits = array.ndim in (1, len(full)) and array.shape[-1] == length
    if not fits or any(
        size not in (1, wanted)
        for size, wanted in zip(array.shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(
            f"{name} must be [{length}] or {list(full)}, got shape {list(array.shape)}"
        )
    return array


def _checked_scale(scale, head_dim):
    if scale is None:
        return head_dim**-0.5
    if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(
            f"scale must be a finite number, got {scale!r}; "
            "multiply query by a scale that is an array"
        )
    return float(scale)


def _checked_window(window, causal):
    if window is None:
        return None
    if not isinstance(window, numbers.Integral) or window < 1:
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")
    if not causal:
        raise ValueError(f"window needs causal=True, got {window} with causal=False")
    return int(window)


def _with_bias(request, bias):
    if bias is None:
        return request
    if isinstance(bias, AlibiBias):
        return dataclasses.replace(request, alibi=bias)
    if callable(bias):
        return dataclasses.replace(
            request, bias_function=lambda _, *positions: bias(*positions)
        )
    bias = align_bias(jnp.asarray(bias), request.shape, "bias")
    return dataclasses.replace(request, bias=bias)
