"""Checks of what linear attention is given, each with the name of the argument."""

import jax
import jax.numpy as jnp

from rope_jax.functional.angles import check_positions, check_positions_fit
from rope_jax.functional.attention import per_entry
from rope_jax.functional.attention_target import target_platform
from rope_jax.functional.feature_maps import FeatureFunction, Features
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.layouts import check_layout
from rope_jax.functional.linear_state import (
    Keys,
    LinearState,
    Queries,
    Rules,
    init_linear_state,
)

# A CPU was timed with 32 to 256; other devices want fewer and larger steps.
_CHUNK_ON_CPU, _CHUNK = 64, 128


def check_lengths(
    num_queries: int, num_keys: int, causal: bool, segment_ids: jax.Array | None
) -> None:
    """Raise unless causality and segments mean something for these lengths."""
    if causal and num_queries > num_keys:
        raise ValueError(
            "query must be no longer than key where causal, since causality goes by "
            f"index; got {num_queries} queries and {num_keys} keys"
        )
    if not causal and num_queries != num_keys and segment_ids is not None:
        raise ValueError(
            "segment_ids needs as many queries as keys where not causal, got "
            f"{num_queries} and {num_keys}"
        )


def make_rules(
    feature_map: FeatureFunction,
    frequencies: Frequencies | None,
    layout: str,
    query: jax.Array,
    key: jax.Array,
) -> tuple[Rules, int]:
    """The rules of a call, and the number of features M."""
    check_layout(layout)
    width = _num_features(feature_map, query, True)
    if width != _num_features(feature_map, key, False):
        raise ValueError(
            "feature_map must give queries and keys as many features, got "
            f"{width} and {_num_features(feature_map, key, False)}"
        )
    if frequencies is not None:
        _check_frequencies(frequencies, width)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return Rules(feature_map, frequencies, layout, dtype), width


def _num_features(feature_map, x, is_query):
    if not callable(feature_map):
        raise ValueError(f"feature_map must be a function, got {feature_map!r}")
    out = jax.eval_shape(lambda x: feature_map(x, is_query), x)
    values = out.values if isinstance(out, Features) else out
    shape = getattr(values, "shape", None)
    fits = shape is not None and shape[:-1] == x.shape[:-1] and 0 not in shape
    if not fits or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            "feature_map must give floating point features [..., T, N, M] of x "
            f"[..., T, N, H] of shape {list(x.shape)}, got {out}"
        )
    if isinstance(out, Features) and out.log_scale.shape != x.shape[:-1]:
        raise ValueError(
            f"feature_map must give a log_scale of shape {list(x.shape[:-1])}, got "
            f"{list(out.log_scale.shape)}"
        )
    return shape[-1]


def _check_frequencies(frequencies, width):
    if not isinstance(frequencies, Frequencies):
        raise ValueError(f"frequencies must be a Frequencies, got {type(frequencies)}")
    if frequencies.rotary_dim > width:
        raise ValueError(
            "frequencies turn the features: they must be for at most the number of "
            f"features, {width}, got a rotary width of {frequencies.rotary_dim}"
        )
    factor = frequencies.attention_factor
    if isinstance(factor, jax.Array) or factor != 1.0:
        raise ValueError(
            "frequencies must have an attention factor of 1: a temperature of logits "
            f"would scale the result of linear attention; got {factor}"
        )


def checked_positions(
    name: str, positions: jax.Array | None, x: jax.Array, rules: Rules
) -> jax.Array | None:
    """The positions of `x` if they rotate; raise where they would be ignored."""
    if rules.frequencies is None:
        if positions is not None:
            raise ValueError(
                f"{name} is read by the rotation alone: give frequencies too, or leave "
                f"it out; got shape {list(jnp.shape(positions))}"
            )
        return None
    if positions is None:
        return None
    check_positions_fit(check_positions(positions, name=name), x, name)
    return jnp.asarray(positions)


def per_token(name: str, array: jax.Array | None, key: jax.Array) -> jax.Array:
    """One entry for each key `[..., S]`: a segment id, 0 if None, or a mask, True."""
    *batch, length = key.shape[:-2]
    if name == "segment_ids":
        kind, dtype, default = "integral", jnp.int32, 0
    else:
        kind, dtype, default = "bool", bool, True
    if array is None:
        return jnp.full((*batch, length), default, dtype)
    if isinstance(array, tuple):
        raise ValueError(f"{name} must be one array for the keys, got a tuple")
    array = per_entry(name, array, batch=batch, length=length, kind=kind)
    return jnp.broadcast_to(array, (*batch, length)).astype(dtype)


def empty_state(
    key: jax.Array, value: jax.Array, width: int, rules: Rules
) -> LinearState:
    """The state before the first of these keys, for `width` features."""
    return init_linear_state(
        key.shape[:-3],
        num_heads=key.shape[-2],
        num_features=width,
        value_dim=value.shape[-1],
        dtype=rules.dtype,
    )


def check_state(state: LinearState, empty: LinearState) -> None:
    """Raise unless the state has the shapes and types of the empty one."""
    if not isinstance(state, LinearState):
        raise ValueError(f"state must be a LinearState, got {type(state)}")
    for name, got, right in zip(LinearState._fields, state, empty, strict=True):
        if jnp.shape(got) != right.shape or got.dtype != right.dtype:
            raise ValueError(
                f"state.{name} must be {right.dtype} {list(right.shape)} for these "
                f"inputs, got {got.dtype} {list(got.shape)}"
            )


def vary_alike(
    state: LinearState, queries: Queries, keys: Keys, rules: Rules
) -> tuple[LinearState, Keys]:
    """Let what a loop carries vary over the shard_map axes that any input varies over.

    The loop wants the same axes going in and coming out. All that is carried depends
    on the segment ids.
    """
    everything = (state, queries, keys, rules.feature_map, rules.frequencies)
    arrays = [x for x in jax.tree.leaves(everything) if isinstance(x, jax.Array)]
    zero = sum(jnp.zeros_like(x, shape=(), dtype=jnp.int32) for x in arrays)
    state = jax.tree.map(lambda x: x + zero.astype(x.dtype), state)
    return state, keys._replace(segments=keys.segments + zero)


def checked_chunk(chunk_size: int | None) -> int:
    """Return the size, that of the platform if None, or raise unless positive."""
    if chunk_size is None:
        return _CHUNK_ON_CPU if target_platform() == "cpu" else _CHUNK
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise ValueError(f"chunk_size must be an integer or None, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return chunk_size
