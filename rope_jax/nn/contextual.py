"""Encodings whose term of the scores depends on the data, not on positions alone."""

from dataclasses import dataclass

import jax

from rope_jax.functional import alibi, contextual, shaw
from rope_jax.functional.attention_request import pair_products
from rope_jax.nn import sharding
from rope_jax.nn.encoding import Encoding, as_arrays, as_params


@dataclass
class ShawOptions:
    """Shaw: distances beyond `max_distance` share an embedding."""

    max_distance: int = 16


@dataclass
class CopeOptions:
    """CoPE: how many (fractional) positions are told apart."""

    num_positions: int = 64


@dataclass
class DapeOptions:
    """DAPE: hidden width of the network that corrects the ALiBi bias."""

    width: int = 32


class Shaw(Encoding):
    """Relative embeddings on the keys, Shaw et al. 2018, equation 4.

    Their embeddings on the values, which the paper found to add nothing (table 3),
    need the attention weights whole; they are in `rope_jax.functional.shaw`.
    """

    options = ("shaw",)
    per_layer = True

    def __init__(self, config, *, rngs):
        params = shaw.init_shaw(
            rngs.params(), config.head_dim, max_distance=config.shaw.max_distance
        )
        self.params = as_params({"key": params["key"]})

    def scores(self, query, key):
        """The queries' products with the embeddings of the distances."""
        params = as_arrays(self.params)
        return lambda t, s: shaw.shaw_logits(
            params,
            query.vectors[:, t],
            query.positions[..., t],
            key.positions[..., s],
        )


class Fox(Encoding):
    """The forget gate of the forgetting transformer, Lin et al. 2025."""

    per_layer = True
    init = staticmethod(contextual.init_fox)
    gates = staticmethod(contextual.fox_gates)

    def __init__(self, config, *, rngs):
        self.params = as_params(
            self.init(rngs.params(), config.model_dim, config.num_heads)
        )

    def extras(self, x, before=None):
        """The running sums of the gates, over rows that no device has in part."""
        gates = sharding.by_token(self.gates(as_arrays(self.params), x))
        return jax.tree.map(sharding.by_token, contextual.running_sum(gates, before))

    def scores(self, query, key):
        """What the gates between key and query have left, in nats."""
        return lambda t, s: contextual.accumulated_bias(
            _rows(query.extras, t), _rows(key.extras, s)
        )

    def check_cache(self, capacity, sinks):
        """Sinks would be forgotten by the gates of tokens that are not held."""
        super().check_cache(capacity, sinks)
        if sinks:
            raise ValueError(
                "the encoding forgets its first tokens by a gate of every token since, "
                f"so a rolling cache must keep none of them: sinks must be 0, got "
                f"{sinks}"
            )


class Cable(Fox):
    """Context-aware biases, Veisi et al. 2025: ALiBi whose slope reads the token."""

    init = staticmethod(contextual.init_cable)
    gates = staticmethod(contextual.cable_gates)


class Cope(Encoding):
    """Contextual positions, Golovneva et al. 2024: gates are counted, not tokens."""

    options = ("cope",)
    per_layer = True
    whole_rows = True

    def __init__(self, config, *, rngs):
        del rngs
        self.params = as_params(
            contextual.init_cope(
                config.head_dim, num_positions=config.cope.num_positions
            )
        )

    def scores(self, query, key):
        """The query's product with the embedding of a fractional position."""
        params = as_arrays(self.params)

        def bias(t, s):
            rows = query.vectors[:, t]
            logits = _logits(rows, key.vectors[:, s])
            places = contextual.cope_positions(
                logits, query.index[..., t], key.index[..., s]
            )
            return contextual.cope_bias(params, rows, places)

        return bias


class Dape(Encoding):
    """Data-adaptive positions, Zheng et al. 2024, over the biases of ALiBi."""

    options = ("dape",)
    per_layer = True

    def __init__(self, config, *, rngs):
        self.num_heads = config.num_heads
        self.params = as_params(
            contextual.init_dape(
                rngs.params(), config.num_heads, width=config.dape.width
            )
        )

    def scores(self, query, key):
        """ALiBi's bias and the network's correction of it."""
        params = as_arrays(self.params)
        slopes = alibi.alibi_slopes(self.num_heads)

        def bias(t, s):
            logits = _logits(query.vectors[:, t], key.vectors[:, s])
            base = alibi.alibi_bias(
                slopes, query.positions[..., t], key.positions[..., s]
            )
            return contextual.dape_logits(params, logits, base) - logits

        return bias


def _rows(sums, places):
    """Some rows of running sums `[B, T, N]`."""
    return jax.tree.map(lambda part: part[:, places], sums)


def _logits(query, key):
    """Scaled products `[B, N, t, s]` of grouped heads, float32."""
    return pair_products(query, key) * query.shape[-1] ** -0.5
