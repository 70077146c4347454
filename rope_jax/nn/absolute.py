"""Encodings that add a vector for each position to the token embeddings."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.functional import additive
from rope_jax.nn import sharding
from rope_jax.nn.encoding import Encoding


@dataclass
class SinusoidalOptions:
    """Sinusoidal embedding, in the paper's form unless told otherwise."""

    max_timescale: float = 10_000.0
    order: str = "interleaved"
    spacing: str = "paper"


@dataclass
class LearnedOptions:
    """Learned table. Length 0 lets the experiment use the training length."""

    max_length: int = 0


class Absolute(Encoding):
    """What the encodings of this file share."""

    def check_cache(self, capacity, sinks):
        """Positions cannot change once they are part of a token's embedding."""
        super().check_cache(capacity, sinks)
        if sinks is not None:
            raise ValueError(
                "the encoding adds positions to the embedding, where they stay, so "
                "a rolling cache cannot count them from its own start"
            )


class Integer(Absolute):
    """The position itself, added to every channel."""

    def embed(self, x, positions):
        """Add the position to every channel."""
        return _add(x, additive.integer_encoding(positions, x.shape[-1]))


class Binary(Absolute):
    """The position's binary digits, one per channel."""

    def embed(self, x, positions):
        """Add bit c of the position to channel c."""
        return _add(x, additive.binary_encoding(positions, x.shape[-1]))


class Sinusoidal(Absolute):
    """Vaswani et al. 2017, section 3.5, computed for any position."""

    options = ("sinusoidal",)

    def __init__(self, config, *, rngs):
        del rngs
        options = config.sinusoidal
        self.max_timescale = options.max_timescale
        self.order = options.order
        self.spacing = options.spacing
        self._table(jnp.arange(1), config.model_dim)  # wrong options raise here

    def _table(self, positions, dim):
        return additive.sinusoidal(
            positions,
            dim,
            max_timescale=self.max_timescale,
            order=self.order,
            spacing=self.spacing,
        )

    def embed(self, x, positions):
        """Add the sinusoids of the positions."""
        return _add(x, self._table(positions, x.shape[-1]))


class Learned(Absolute):
    """One trained vector per position, up to a fixed length.

    Entries are drawn at 1/sqrt(D) and scaled by sqrt(D), as the token embedding
    is, so that both start at unit variance and learn at one speed.
    """

    options = ("learned",)

    def __init__(self, config, *, rngs):
        length = config.learned.max_length
        if length < 1:
            raise ValueError(
                "model.learned.max_length must be at least 1 for encoding 'learned', "
                f"got {length}"
            )
        self.max_length = length
        self.table = nnx.Param(
            nnx.initializers.normal(config.model_dim**-0.5)(
                rngs.params(), (length, config.model_dim), jnp.float32
            )
        )

    def check_cache(self, capacity, sinks):
        """The table must reach to the end of the cache."""
        super().check_cache(capacity, sinks)
        if capacity > self.max_length:
            raise ValueError(
                f"encoding 'learned' has a table of {self.max_length} positions, got a "
                f"cache of {capacity} tokens"
            )

    def embed(self, x, positions):
        """Add the rows of the table; a row length past its end is refused.

        A position past the end in a traced array cannot raise; it turns the whole
        row to NaN, so that it cannot pass for the table's last entry.
        """
        if x.shape[-2] > self.max_length:
            raise ValueError(
                f"encoding 'learned' has a table of {self.max_length} positions, got "
                f"a sequence of {x.shape[-2]}; evaluate shorter lengths or train with "
                "a larger model.learned.max_length"
            )
        rows = (
            sharding.whole(self.table[...])
            .at[positions]
            .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        )
        return _add(x, rows * self.table.shape[-1] ** 0.5)


def _add(x: jax.Array, encoding: jax.Array) -> jax.Array:
    """Add an encoding `[T, D]` or `[B, T, D]` in float32, and round once."""
    encoding = jnp.broadcast_to(encoding, x.shape)
    return (x.astype(jnp.float32) + encoding).astype(x.dtype)
