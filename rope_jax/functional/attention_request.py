"""What one call of attention asks for, and how it is cut into blocks.

Every implementation works on the same :class:`Request` and only decides how to cut
it: which rows (queries) meet which columns (keys), and how the parts are put together
again. The masks, the bias and the scale are applied in one place, `Request.logits`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.alibi import AlibiBias
from rope_jax.functional.distance import relative_positions, to_rank

# Fields with one entry per query or per key, and the axis that counts them.
_ROWS = {"query": -2, "bias": -2, "query_positions": -1, "query_segments": -1}
_COLUMNS = {
    "key": -2,
    "value": -2,
    "bias": -1,
    "key_positions": -1,
    "key_segments": -1,
    "key_mask": -1,
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[*dict.fromkeys([*_ROWS, *_COLUMNS]), "tables", "alibi"],
    meta_fields=["bias_function", "causal", "window", "by_index", "scale"],
)
@dataclasses.dataclass(frozen=True)
class Request:
    """Heads before time, N query heads split into K groups of G.

    The arithmetic type is float32, or float64 where the inputs are float64.

    Attributes:
        query: `[..., K, G, T, H]`.
        key: `[..., K, S, H]`.
        value: `[..., K, S, V]`.
        query_positions: integers `[..., T]`.
        key_positions: integers `[..., S]`.
        bias: `[..., K, G, T, S]`, any axis may be 1; or None.
        query_segments: integers `[..., T]`, or None.
        key_segments: integers `[..., S]`, or None.
        key_mask: booleans `[..., S]`, or None.
        tables: arrays that `bias_function` takes as its first argument.
        bias_function: `(tables, query_positions, key_positions) -> [..., N, t, s]`,
            or None.
        alibi: the bias, where an implementation folds it into query and key; the
            others find it in `bias_function`.
        causal: whether a key must not be later than its query.
        window: positions that a query sees, its own included; None for no end.
        by_index: whether positions are known to be the indices, T queries being the
            last of S keys, so that masked blocks can be left out before tracing.
        scale: factor on the products of queries and keys.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_positions: jax.Array
    key_positions: jax.Array
    bias: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key_mask: jax.Array | None = None
    tables: tuple[jax.Array, ...] = ()
    alibi: AlibiBias | None = None
    bias_function: Callable | None = None
    causal: bool = True
    window: int | None = None
    by_index: bool = False
    scale: float = 1.0

    @property
    def dtype(self) -> jnp.dtype:
        """Type of logits, weights and sums."""
        return _sum_type(self.query)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits, `[..., K, G, T, S]`."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    def rows(self, start: int | jax.Array, size: int) -> "Request":
        """The request of `size` queries from `start`, which may be traced."""
        return self._cut(_ROWS, start, size)

    def columns(self, start: int | jax.Array, size: int) -> "Request":
        """The request limited to `size` keys from `start`, which may be traced."""
        return self._cut(_COLUMNS, start, size)

    def _cut(self, axes, start, size):
        fields = {name: getattr(self, name) for name in axes}
        cut = {
            name: take(array, start, size, axes[name])
            for name, array in fields.items()
            if array is not None
        }
        return dataclasses.replace(self, **cut)

    def padded(self, rows: int, columns: int) -> "Request":
        """The same with T and S rounded up to multiples; new keys are masked."""
        *_, num_queries, num_keys = self.shape
        more_rows, more_columns = -num_queries % rows, -num_keys % columns
        request = self
        if more_columns and self.key_mask is None:
            mask = jnp.ones(num_keys, bool)
            request = dataclasses.replace(request, key_mask=mask)
        for axes, more in ((_ROWS, more_rows), (_COLUMNS, more_columns)):
            fields = {name: getattr(request, name) for name in axes}
            grown = {
                name: _extend(array, more, axes[name], name)
                for name, array in fields.items()
                if array is not None
            }
            request = dataclasses.replace(request, **grown)
        return request

    def function_bias(self, tables: tuple[jax.Array, ...]) -> jax.Array:
        """The bias function's values for these positions, `[..., K, G, T, S]`."""
        bias = self.bias_function(tables, self.query_positions, self.key_positions)
        return align_bias(
            jnp.asarray(bias), self.shape, "the result of the bias function"
        )

    def logits(self) -> jax.Array:
        """Scaled products plus bias, `[..., K, G, T, S]`, -inf where masked."""
        logits = products(self.query, self.key) * self.scale
        if self.bias is not None:
            logits += self.bias.astype(self.dtype)
        if self.bias_function is not None:
            logits += self.function_bias(self.tables).astype(self.dtype)
        for mask in self.masks():
            # Selected, never added: two "most negative" numbers overflow.
            logits = jnp.where(mask, logits, -jnp.inf)
        return logits

    def masks(self) -> Iterator[jax.Array]:
        """What restricts the attention, each True where a query may see a key.

        Each broadcasts to the logits and has their rank.
        """

        def row(array):
            return to_rank(array[..., None, None, :, None], len(self.shape))

        def column(array):
            return to_rank(array[..., None, None, None, :], len(self.shape))

        if self.causal:
            yield column(self.key_positions) <= row(self.query_positions)
        if self.window is not None:
            lag = relative_positions(self.query_positions, self.key_positions)
            yield to_rank(lag[..., None, None, :, :], len(self.shape)) > -self.window
        if self.query_segments is not None:
            yield column(self.key_segments) == row(self.query_segments)
        if self.key_mask is not None:
            yield column(self.key_mask)


def products(query: jax.Array, key: jax.Array) -> jax.Array:
    """`[..., K, G, T, S]` inner products over the last axis, in float32 or better."""
    *_, group_size, num_queries, _ = query.shape
    out = _multiply("...mh,...sh->...ms", _merge(query), key)
    return out.reshape(*out.shape[:-2], group_size, num_queries, out.shape[-1])


def pair_products(query: jax.Array, key: jax.Array) -> jax.Array:
    """`[..., N, T, S]` of queries `[..., T, N, H]` and keys `[..., S, K, H]`.

    The same numbers as attention has, where N heads share K key heads.
    """
    *batch, length, heads, width = query.shape
    groups = key.shape[-2]
    query = jnp.swapaxes(query, -2, -3)
    query = query.reshape(*batch, groups, heads // groups, length, width)
    out = products(query, jnp.swapaxes(key, -2, -3))
    return out.reshape(*batch, heads, length, key.shape[-3])


def mix(weights: jax.Array, value: jax.Array) -> jax.Array:
    """`[..., K, G, T, V]` sums over keys, in float32 or better."""
    *_, group_size, num_queries, _ = weights.shape
    out = _multiply("...ms,...sv->...mv", _merge(weights), value)
    return out.reshape(*out.shape[:-2], group_size, num_queries, out.shape[-1])


def mix_back(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """`[..., K, S, V]` sums over queries and the heads of a group: `mix` transposed."""
    return _multiply("...ms,...mv->...sv", _merge(weights), _merge(rows))


def _merge(array):
    """`[..., G, T, X]` as `[..., G * T, X]`.

    XLA's CPU backend is a quarter faster in gradients than with an axis of groups.
    """
    *heads, group_size, length, width = array.shape
    return array.reshape(*heads, group_size * length, width)


def _multiply(equation, left, right):
    dtype = _sum_type(right)
    return jnp.einsum(equation, left, right, preferred_element_type=dtype)


def take(array: jax.Array, start: int | jax.Array, size: int, axis: int) -> jax.Array:
    """`size` entries of an axis from `start`; an axis of 1 stays as it is."""
    axis %= array.ndim
    if array.shape[axis] == 1:
        return array
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, axis=axis)
    return lax.dynamic_slice_in_dim(array, start, size, axis)


def align_bias(bias: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
    """A bias `[..., N, T, S]` as `[..., K, G, T, S]`, missing axes as 1.

    Args:
        bias: any array whose axes are 1 or those of `shape`, leading ones optional.
        shape: of the logits, `[..., K, G, T, S]`.
        name: what the error message calls it.

    Raises:
        ValueError: the type is not real numbers, or the shape does not broadcast.
    """
    *batch, groups, group_size, num_queries, num_keys = shape
    full = (*batch, groups * group_size, num_queries, num_keys)
    aligned = (1,) * (len(full) - bias.ndim) + bias.shape
    if len(aligned) != len(full) or any(
        size not in (1, wanted) for size, wanted in zip(aligned, full, strict=True)
    ):
        raise ValueError(
            f"{name} must broadcast to [..., N, T, S] = {list(full)}, "
            f"got shape {list(bias.shape)}"
        )
    if not jnp.isdtype(bias.dtype, ("real floating", "integral")):
        raise ValueError(
            f"{name} must hold real numbers, got {bias.dtype}; masks are the arguments "
            "causal, segment_ids and key_mask"
        )
    heads = (1, 1) if aligned[-3] == 1 else (groups, group_size)
    return bias.reshape(*aligned[:-3], *heads, *aligned[-2:])


def _extend(array, more, axis, name):
    axis %= array.ndim
    if not more or (name == "bias" and array.shape[axis] == 1):
        return array
    widths = [(0, more if i == axis else 0) for i in range(array.ndim)]
    if name.endswith(("positions", "segments")):
        # Repeat real positions: a bias function may not be defined beyond them.
        return jnp.pad(array, widths, mode="edge")
    return jnp.pad(array, widths)


def _sum_type(array):
    return jnp.promote_types(array.dtype, jnp.float32)
