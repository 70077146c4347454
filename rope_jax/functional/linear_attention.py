"""Linear attention: one pass over the tokens, rotated as in RoFormer's equation 19."""

import jax
import jax.numpy as jnp

from rope_jax.functional.attention import check_heads
from rope_jax.functional.feature_maps import FeatureFunction
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.linear_chunks import (
    absorb_all,
    both_ways,
    cut,
    forward,
    read_all,
)
from rope_jax.functional.linear_request import (
    check_lengths,
    check_state,
    checked_chunk,
    checked_positions,
    empty_state,
    make_rules,
    per_token,
    vary_alike,
)
from rope_jax.functional.linear_state import (
    Keys,
    LinearState,
    Queries,
    init_linear_state,
)

__all__ = [
    "LinearState",
    "init_linear_state",
    "linear_attention",
    "linear_attention_step",
]


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    feature_map: FeatureFunction,
    query_positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    frequencies: Frequencies | None = None,
    causal: bool = True,
    layout: str = "half",
    segment_ids: jax.Array | None = None,
    key_mask: jax.Array | None = None,
    chunk_size: int | None = None,
) -> jax.Array:
    r"""Attention with a kernel of features, in time and memory linear in the length.

    .. math::
        o_t = \frac{\sum_s m_{ts} \, (R_{p_t} \phi(q_t)) \cdot (R_{p_s} \phi(k_s)) \,
        v_s}{\sum_s m_{ts} \, \phi(q_t) \cdot \phi(k_s)}

    where R turns the features by their positions, :math:`p`, and :math:`m_{ts}` is 1 if
    query t may attend to key s and 0 otherwise. The denominator is not rotated: rotated
    features can be negative, so that their sums could be zero. It is positive wherever
    a query sees a key; a query that sees none gets zeros, and a zero gradient. The
    weights of a row sum to 1 without rotation only.

    All arithmetic is float32 whatever the type of the inputs (products of matrices in
    full precision on every device); only the result is rounded.

    B is the batch (any number of axes, or none), T the query length, S the key length,
    N the number of heads, K the number of key heads (query head n uses key head
    n // (N / K)), H the head dim, V that of the values and M the number of features.

    Args:
        query: `[..., T, N, H]`, floating point, not rotated.
        key: `[..., S, K, H]`, where K divides N.
        value: `[..., S, K, V]`.
        feature_map: function `(x, is_query) -> features` of queries or keys: see
            `favor_softmax`, `favor_relu`, `elu_plus_one`. An array `[..., M]` of
            positive numbers, or `Features`.
        query_positions: `[T]` or `[..., T]`, may be traced; read by the rotation
            alone. None means the indices, where T queries are the last T of S keys.
        key_positions: `[S]` or `[..., S]`. None means `arange(S)`.
        frequencies: how fast pairs of features turn, such as `default(M)`; the first
            2R of M features turn. None means no rotation.
        causal: query t sees the keys up to its own. Causality goes by index, not by
            position; T queries are the last T of S keys.
        layout: pairing of the features, "half" or "interleaved".
        segment_ids: integers `[S]` or `[..., S]`, of the keys and the queries among
            them. A token attends within the run of equal ids around it: an id that
            comes back later is a new segment.
        key_mask: booleans `[S]` or `[..., S]`, True where a key may be attended to.
        chunk_size: tokens to be computed at once, which changes the speed and not the
            result. None chooses by platform.

    Returns:
        `[..., T, N, V]` in the type of `query`.

    Raises:
        ValueError: a shape, type or name that does not fit, named with what was given.

    Example:
        Four tokens, all alike, so that each takes the mean of the values up to its own:

        >>> import jax.numpy as jnp
        >>> from rope_jax.functional.feature_maps import elu_plus_one
        >>> x = jnp.ones((4, 1, 2))
        >>> value = jnp.arange(4.0)[:, None, None]
        >>> linear_attention(x, x, value, feature_map=elu_plus_one)[:, 0, 0].tolist()
        [0.0, 0.5, 1.0, 1.5]

    References:
        Su et al., "RoFormer" (2021, arXiv 2104.09864), equation 19; Katharopoulos et
        al., "Transformers are RNNs" (2020, arXiv 2006.16236), equations 9 to 12. Some
        Performers rotate queries and keys before the feature map instead: for that,
        apply `rope` to them and leave out the frequencies.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    check_heads(query, key, value)
    num_queries, num_keys = query.shape[-3], key.shape[-3]
    check_lengths(num_queries, num_keys, causal, segment_ids)
    rules, width = make_rules(feature_map, frequencies, layout, query, key)
    if frequencies is not None:
        if query_positions is None:
            query_positions = jnp.arange(num_queries) + (num_keys - num_queries)
        if key_positions is None:
            key_positions = jnp.arange(num_keys)
    queries = Queries(
        query, checked_positions("query_positions", query_positions, query, rules)
    )
    keys = Keys(
        key,
        value,
        checked_positions("key_positions", key_positions, key, rules),
        per_token("segment_ids", segment_ids, key),
        per_token("key_mask", key_mask, key),
    )
    state = empty_state(key, value, width, rules)
    state, keys = vary_alike(state, queries, keys, rules)
    chunk_size = checked_chunk(chunk_size)
    with jax.default_matmul_precision("highest"):
        if causal:
            before = num_keys - num_queries
            if before:
                state = absorb_all(state, cut(keys, 0, before), rules, chunk_size)
                keys = cut(keys, before, num_queries)
            out, _ = forward(state, queries, keys, rules, chunk_size)
        elif segment_ids is None:
            state = absorb_all(state, keys, rules, chunk_size)
            out = read_all(state, queries, rules, chunk_size)
        else:
            out = both_ways(state, queries, keys, rules, chunk_size)
    return out.astype(query.dtype)


def linear_attention_step(
    state: LinearState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    feature_map: FeatureFunction,
    positions: jax.Array | None = None,
    frequencies: Frequencies | None = None,
    layout: str = "half",
    segment_ids: jax.Array | None = None,
    key_mask: jax.Array | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, LinearState]:
    """Causal linear attention of the next tokens, from a state of constant size.

    One token at a time this is the recurrent form, for decoding; with T tokens it
    fills the state from a prompt, or carries on a long row. However the tokens are
    cut, the results are those of `linear_attention` over all of them.

    Args:
        state: after the tokens before: `init_linear_state`, or what was returned last.
        query: `[..., T, N, H]`, as for `linear_attention`; T is 1 in decoding.
        key: `[..., T, K, H]`.
        value: `[..., T, K, V]`.
        feature_map: as for `linear_attention`, and the same at every step: with a new
            projection, the sums in the state mean nothing.
        positions: `[T]` or `[..., T]` of these tokens, needed with frequencies.
        frequencies: as for `linear_attention`.
        layout: as for `linear_attention`.
        segment_ids: integers `[T]` or `[..., T]`. Where the id differs from that of the
            token before, the sums start again. None carries on the segment of the
            state. That of an empty state is 0, which does not matter: it holds nothing.
        key_mask: booleans `[T]` or `[..., T]`; a masked token leaves no trace.
        chunk_size: as for `linear_attention`.

    Returns:
        `[..., T, N, V]` in the type of `query`, and the state after these tokens.

    Raises:
        ValueError: as for `linear_attention`, or for a state that does not fit.

    >>> from rope_jax.functional.feature_maps import elu_plus_one
    >>> state = init_linear_state(num_heads=1, num_features=2, value_dim=1)
    >>> x = jnp.ones((1, 1, 2))
    >>> for value in jnp.arange(3.0).reshape(3, 1, 1, 1):
    ...     out, state = linear_attention_step(
    ...         state, x, x, value, feature_map=elu_plus_one
    ...     )
    ...     print(out[0, 0, 0])
    0.0
    0.5
    1.0

    Source: Katharopoulos et al. 2020, "Transformers are RNNs" (arXiv 2006.16236),
    equations 16 to 20, with the rotation of RoFormer's equation 19.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    check_heads(query, key, value)
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            "key must be as long as query in a step, got "
            f"{key.shape[-3]} keys and {query.shape[-3]} queries"
        )
    rules, width = make_rules(feature_map, frequencies, layout, query, key)
    if frequencies is not None and positions is None:
        raise ValueError(
            "positions is needed with frequencies, since a state does not know how "
            "many tokens it has seen; got None"
        )
    check_state(state, empty_state(key, value, width, rules))
    if segment_ids is None:
        segments = jnp.broadcast_to(state.segment[..., None], key.shape[:-2])
    else:
        segments = per_token("segment_ids", segment_ids, key)
    queries = Queries(query, checked_positions("positions", positions, query, rules))
    keys = Keys(
        key, value, queries.positions, segments, per_token("key_mask", key_mask, key)
    )
    state, keys = vary_alike(state, queries, keys, rules)
    with jax.default_matmul_precision("highest"):
        out, state = forward(state, queries, keys, rules, checked_chunk(chunk_size))
    return out.astype(query.dtype), state
