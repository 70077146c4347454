"""Softmax attention as a layer: projections, encoding, and the devices of a mesh."""

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.functional.alibi import AlibiBias
from rope_jax.functional.attention import attention
from rope_jax.functional.distance import to_rank
from rope_jax.functional.temperature import logn_temperature
from rope_jax.nn import sharding
from rope_jax.nn.cached_attention import extend_softmax, init_memory
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.encoding import BlockBias, Side
from rope_jax.nn.encodings import ENCODINGS
from rope_jax.nn.projections import Projections


class Attention(Projections):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        # By the width of the projections: an encoding may hand on wider queries.
        self.scale = config.head_dim**-0.5
        self.implementation = _implementation(config)
        self.window = config.window
        self.temperature_length = config.temperature_length

    def __call__(self, x, positions, encoding, segment_ids, key_mask):
        """Attend over `x` `[B, T, D]`; `positions` feed the encoding alone.

        Tokens stand in order, so causality goes by index, which lets attention
        skip the masked half without looking at the positions.
        """
        query, key, value = self.heads(x)
        query, key = encoding.rotate(query, key, positions, positions)
        query = self.sharpened(query, positions)
        index, extras = jnp.arange(x.shape[1]), encoding.extras(x)
        side = Side(query, positions, index, extras)
        scores = encoding.scores(side, side._replace(vectors=key))
        heads, rest = (query, key, value), (segment_ids, key_mask)
        by_head = scores is None or isinstance(scores, AlibiBias)
        if by_head and sharding.splits_heads(key.shape[2]):
            return self.out(sharding.by_head(self._softmax, heads, rest, scores))
        if sharding.size("sequence") == 1:
            return self.out(self._softmax(heads, rest, scores))
        mixed = sharding.over_sequence(
            self._part,
            (side, segment_ids),
            (key, value),
            (encoding, positions, index, extras, segment_ids, key_mask),
        )
        return self.out(mixed)

    def _part(self, queries, keys, rest):
        """Attention `[B, t, N, H]` of some of the queries of a row to all keys."""
        (query, query_segments), (key, value) = queries, keys
        encoding, positions, index, extras, segments, key_mask = rest
        scores = encoding.scores(query, Side(key, positions, index, extras))
        if segments is not None:
            segments = query_segments, segments
        return self._softmax(
            (query.vectors, key, value),
            (segments, key_mask),
            _counted_from(query.index[0], scores),
            query_positions=query.index,
            key_positions=index,
        )

    def _softmax(self, heads, rest, scores, **where):
        """Attention `[B, t, N, H]`, with a term of the scores or without."""
        query, key, value = heads
        segment_ids, key_mask = rest
        return attention(
            query,
            key,
            value,
            bias=scores,
            window=self.window or None,
            segment_ids=segment_ids,
            key_mask=key_mask,
            scale=self.scale,
            implementation=self.implementation,
            **where,
        )

    def sharpened(self, query, positions):
        """Queries times their log-n temperature, if there is one."""
        if not self.temperature_length:
            return query
        factor = logn_temperature(positions, length=self.temperature_length)
        factor = to_rank(factor[..., None, None], query.ndim)
        return (query.astype(jnp.float32) * factor).astype(query.dtype)

    def init_memory(self, encoding, batch: int, capacity: int, dtype, rolling):
        """What this layer keeps of the tokens before, for `extend`; empty."""
        del rolling
        return init_memory(self, encoding, batch, capacity, dtype)

    def extend(self, x, encoding, memory, view, rolling):
        """Attend from new tokens `[B, T, D]` over a cache, after adding them to it.

        Args:
          x: `[B, T, D]`, the input of the layer, normalized.
          encoding: of this layer.
          memory: what the layer keeps, as of `init_memory`.
          view: where the tokens lie, see `rope_jax.nn.cache.View`.
          rolling: what the cache holds, None for every token.

        Returns:
          `[B, T, D]`, and what the layer keeps now.
        """
        return extend_softmax(self, x, encoding, memory, view, rolling)


def _counted_from(start: jax.Array, bias: BlockBias | None) -> BlockBias | None:
    """A bias of queries that are a part of a row, by their index in the row."""
    return None if bias is None else lambda t, s: bias(t - start, s)


def _implementation(config: DecoderConfig) -> str:
    """The attention to use: some encodings need all the keys of a query at once."""
    name = config.attention_implementation
    if not ENCODINGS[config.encoding].whole_rows:
        return name
    if name not in ("auto", "xla", "chunked"):
        raise ValueError(
            "model.attention_implementation must be auto, xla or chunked for encoding "
            f"{config.encoding!r}, which needs whole rows of scores; got {name!r}"
        )
    return "chunked" if name == "auto" else name
