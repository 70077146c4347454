"""Linear attention chunk by chunk: what is summed, and how it is read.

Keys enter with weights exp(log_scale), which may differ by hundreds of nats. As in an
online softmax, every sum is kept relative to the largest weight in it so far; this
maximum cancels in the quotient. It looks at the past alone, never at a later token, so
the chunked, the recurrent and the quadratic form are one function.

Letters: C length of a chunk, K key heads, G query heads for each of them, M number of
features, V value dim.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.attention_request import mix, products
from rope_jax.functional.feature_maps import FeatureFunction, Features
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.rotary import rope


class LinearState(NamedTuple):
    """All that linear attention keeps of the tokens before: its size is constant.

    Sums over the keys of the current segment, each with its weight divided by
    exp(peak). A pytree of arrays with the batch in front, to be stored, sharded and
    indexed like any other.

    Attributes:
      mixed: `[..., K, M, V]`, sum of rotated key features times values.
      total: `[..., K, M]`, sum of key features, not rotated.
      peak: `[..., K]`, the largest log weight in the sums; -inf where they are empty.
      segment: int32 `[...]`, the segment id of the last token.
    """

    mixed: jax.Array
    total: jax.Array
    peak: jax.Array
    segment: jax.Array


def init_linear_state(
    batch: tuple[int, ...] = (),
    *,
    num_heads: int,
    num_features: int,
    value_dim: int,
    dtype: jnp.dtype = jnp.float32,
) -> LinearState:
    """The state before the first token.

    Args:
        batch: shape of the batch axes.
        num_heads: number of key heads, K.
        num_features: M.
        value_dim: V.
        dtype: float32, or float64 for inputs of that type.

    Returns:
        `LinearState` of K * M * (V + 1) + K numbers for each row, at any length.

    Raises:
        ValueError: when a size is not positive.

    >>> state = init_linear_state((2,), num_heads=4, num_features=64, value_dim=32)
    >>> state.mixed.shape, state.total.shape, state.peak.shape, state.segment.shape
    ((2, 4, 64, 32), (2, 4, 64), (2, 4), (2,))
    """
    sizes = {
        "num_heads": num_heads,
        "num_features": num_features,
        "value_dim": value_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    total = jnp.zeros((*batch, num_heads, num_features), dtype)
    return LinearState(
        jnp.zeros((*total.shape, value_dim), dtype),
        total,
        jnp.full((*batch, num_heads), -jnp.inf, dtype),
        jnp.zeros(batch, jnp.int32),
    )


class Queries(NamedTuple):
    """Queries `[..., C, N, H]` and positions `[..., C]`, None without rotation."""

    query: jax.Array
    positions: jax.Array | None


class Keys(NamedTuple):
    """Keys `[..., C, K, H]`, values `[..., C, K, V]`, and `[..., C]` for each token."""

    key: jax.Array
    value: jax.Array
    positions: jax.Array | None
    segments: jax.Array
    mask: jax.Array


class Parts(NamedTuple):
    """Numerators `[..., K, G, C, V]` and denominators `[..., K, G, C]`.

    Both relative to the weight exp(peak), `[..., K, C]`; -inf where nothing is seen.
    """

    mixed: jax.Array
    total: jax.Array
    peak: jax.Array


class _KeyRows(NamedTuple):
    """Keys of a chunk, heads in front: features, rotated ones, log weights, values."""

    plain: jax.Array
    turned: jax.Array
    log_scale: jax.Array
    value: jax.Array


@dataclasses.dataclass(frozen=True)
class Rules:
    """How queries and keys become features, in `dtype`, and how these turn."""

    feature_map: FeatureFunction
    frequencies: Frequencies | None
    layout: str
    dtype: Any

    def queries(self, queries: Queries, groups: int) -> tuple[jax.Array, jax.Array]:
        """Features `[..., K, G, C, M]`, as they are and rotated."""
        features = self.feature_map(queries.query, True)
        # A factor on a query cancels in the quotient.
        values = features.values if isinstance(features, Features) else features
        values = values.astype(self.dtype)
        turned = self._turn(values, queries.positions)
        return _grouped(values, groups), _grouped(turned, groups)

    def keys(self, keys: Keys) -> _KeyRows:
        """Features `[..., K, C, M]`, log weights `[..., K, C]`, values."""
        features = self.feature_map(keys.key, False)
        if isinstance(features, Features):
            values, log_scale = features
        else:
            values, log_scale = features, jnp.zeros_like(features[..., 0])
        values, log_scale = values.astype(self.dtype), log_scale.astype(self.dtype)
        turned = self._turn(values, keys.positions)
        by_head = [jnp.swapaxes(x, -2, -3) for x in (values, turned)]
        value = jnp.swapaxes(keys.value, -2, -3).astype(self.dtype)
        return _KeyRows(*by_head, jnp.swapaxes(log_scale, -1, -2), value)

    def _turn(self, features, positions):
        if self.frequencies is None:
            return features
        return rope(features, positions, self.frequencies, layout=self.layout)


def advance(
    state: LinearState, queries: Queries, keys: Keys, rules: Rules, *, strict: bool
) -> tuple[Parts, LinearState]:
    """What the queries of a chunk see, and the state after its keys.

    Query t sees the keys s <= t of its segment, s < t where `strict`: those in the
    state, if its segment began before this chunk, and those in this chunk.
    """
    rows = rules.keys(keys)
    plain, turned = rules.queries(queries, rows.plain.shape[-3])
    run = _runs(state, keys)
    length = run.shape[-1]
    seen = run[..., :, None] == run[..., None, :]
    seen &= keys.mask[..., None, :]
    order = jnp.tril(jnp.ones((length, length), bool), -1 if strict else 0)
    seen &= lax.expand_dims(order, range(seen.ndim - 2))
    logs = jnp.where(seen[..., None, :, :], rows.log_scale[..., None, :], -jnp.inf)
    before = _carried(state, run == 0)
    peak = lax.stop_gradient(jnp.maximum(logs.max(-1), before))
    base = _finite(peak)
    weights = jnp.exp(logs - base[..., None])[..., None, :, :]
    past = jnp.exp(before - base)[..., None, :]
    scores = products(plain, rows.plain) * weights
    total = scores.sum(-1) + past * _read_total(plain, state)
    if rules.frequencies is not None:
        scores = products(turned, rows.turned) * weights
    mixed = mix(scores, rows.value) + past[..., None] * mix(turned, state.mixed)
    return Parts(mixed, total, peak), _absorbed(state, keys, rows, run)


def absorb(state: LinearState, keys: Keys, rules: Rules) -> LinearState:
    """The state after the keys of a chunk."""
    return _absorbed(state, keys, rules.keys(keys), _runs(state, keys))


def read(state: LinearState, queries: Queries, rules: Rules) -> Parts:
    """What queries see where each sees all that is in the state."""
    plain, turned = rules.queries(queries, state.peak.shape[-1])
    total = _read_total(plain, state)
    peak = jnp.broadcast_to(state.peak[..., None], (*total.shape[:-2], total.shape[-1]))
    return Parts(mix(turned, state.mixed), total, peak)


def merge(one: Parts, other: Parts) -> Parts:
    """The parts of two disjoint sets of keys as those of their union."""
    peak = jnp.maximum(one.peak, other.peak)
    base = _finite(peak)

    def relative(part):
        factor = jnp.exp(part.peak - base)[..., None, :]
        return part.mixed * factor[..., None], part.total * factor

    (mixed, total), (more_mixed, more_total) = relative(one), relative(other)
    return Parts(mixed + more_mixed, total + more_total, peak)


def quotient(parts: Parts) -> jax.Array:
    """Numerator over denominator `[..., C, N, V]`; zeros where nothing is seen."""
    seen = (parts.total > 0)[..., None]
    out = jnp.where(seen, parts.mixed / jnp.where(seen, parts.total[..., None], 1), 0)
    *batch, groups, size, length, width = out.shape
    return jnp.swapaxes(out.reshape(*batch, groups * size, length, width), -2, -3)


def _read_total(features, state):
    return jnp.einsum("...kgtm,...km->...kgt", features, state.total)


def _absorbed(state, keys, rows, run):
    """The sums of the segment of the last token, which is all that later ones see."""
    last = run[..., -1:]
    kept = (run == last) & keys.mask
    logs = jnp.where(kept[..., None, :], rows.log_scale, -jnp.inf)
    before = _carried(state, last == 0)
    peak = lax.stop_gradient(jnp.maximum(logs.max(-1, keepdims=True), before))
    base = _finite(peak)
    weights, past = jnp.exp(logs - base), jnp.exp(before - base)
    mixed = jnp.einsum(
        "...ksm,...ksv->...kmv", rows.turned * weights[..., None], rows.value
    )
    total = jnp.einsum("...ksm,...ks->...km", rows.plain, weights)
    return LinearState(
        past[..., None] * state.mixed + mixed,
        past * state.total + total,
        peak[..., 0],
        keys.segments[..., -1],
    )


def _runs(state, keys):
    """How many segments began since the state, at each token: `[..., C]`."""
    ids = jnp.concatenate([state.segment[..., None], keys.segments], axis=-1)
    return jnp.cumsum(ids[..., 1:] != ids[..., :-1], axis=-1)


def _carried(state, continues):
    """Log weight of the sums in the state, `[..., K, C]`, -inf where out of sight.

    The peak is a choice that no result depends on, so no gradient goes through it.
    """
    peak = lax.stop_gradient(state.peak)[..., None]
    return jnp.where(continues[..., None, :], peak, -jnp.inf)


def _finite(peak):
    return jnp.where(peak == -jnp.inf, 0, peak)


def _grouped(array, groups):
    """`[..., C, N, M]` as `[..., K, G, C, M]`."""
    *batch, length, heads, width = array.shape
    array = jnp.swapaxes(array, -2, -3)
    return array.reshape(*batch, groups, heads // groups, length, width)
