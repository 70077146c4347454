"""Encodings that add a function of two positions to the attention scores."""

from dataclasses import dataclass

from rope_jax.functional import alibi, relative
from rope_jax.nn.encoding import Encoding, as_arrays, as_params


@dataclass
class T5Options:
    """T5: distances share a bucket, ever wider ones up to `max_distance`."""

    num_buckets: int = 32
    max_distance: int = 128


@dataclass
class KerpleOptions:
    """KERPLE: its kernel, "log" or "power"."""

    kernel: str = "log"


@dataclass
class FireOptions:
    """FIRE: hidden width, and the start of its threshold; 0: the training length."""

    width: int = 32
    length: int = 0


@dataclass
class SandwichOptions:
    """Sandwich: the width of the sinusoids whose inner product it is."""

    dim: int = 128


class Alibi(Encoding):
    """Attention with linear biases, Press et al. 2021."""

    def __init__(self, config, *, rngs):
        del rngs
        self.num_heads = config.num_heads

    def bias(self, query_positions, key_positions):
        """Minus slope times distance, for each head."""
        return self._bias()(query_positions, key_positions)

    def scores(self, query, key):
        """The bias as what it is, for kernels that fold it into queries and keys."""
        return self._bias(query.positions, key.positions)

    def _bias(self, *positions):
        return alibi.AlibiBias(alibi.alibi_slopes(self.num_heads), *positions)


class Sandwich(Encoding):
    """Sandwich, Chi et al. 2023: the inner product of two sinusoids, by head."""

    options = ("sandwich",)

    def __init__(self, config, *, rngs):
        del rngs
        self.num_heads, self.dim = config.num_heads, config.sandwich.dim

    def bias(self, query_positions, key_positions):
        """The inner product of the positions' sinusoids, scaled for each head."""
        return relative.sandwich_bias(
            query_positions, key_positions, num_heads=self.num_heads, dim=self.dim
        )


class T5(Encoding):
    """T5 buckets, Raffel et al. 2020; one table for all layers, as in T5."""

    options = ("t5",)

    def __init__(self, config, *, rngs):
        options = config.t5
        self.max_distance = options.max_distance
        self.params = as_params(
            relative.init_t5(
                rngs.params(), config.num_heads, num_buckets=options.num_buckets
            )
        )

    def bias(self, query_positions, key_positions):
        """The learned bias of the distance's bucket."""
        return relative.t5_bias(
            as_arrays(self.params),
            query_positions,
            key_positions,
            max_distance=self.max_distance,
        )


class Kerple(Encoding):
    """KERPLE, Chi et al. 2022: a kernel of the distance with learned parameters."""

    options = ("kerple",)
    per_layer = True

    def __init__(self, config, *, rngs):
        self.kernel = config.kerple.kernel
        self.params = as_params(
            relative.init_kerple(rngs.params(), config.num_heads, kernel=self.kernel)
        )

    def bias(self, query_positions, key_positions):
        """The kernel of each head."""
        return relative.kerple_bias(
            as_arrays(self.params), query_positions, key_positions, kernel=self.kernel
        )


class Fire(Encoding):
    """FIRE, Li et al. 2023: a small network of the distance over the position."""

    options = ("fire",)

    def __init__(self, config, *, rngs):
        options = config.fire
        if options.length < 1:
            raise ValueError(
                "model.fire.length must be at least 1 for encoding 'fire', got "
                f"{options.length}"
            )
        self.length = float(options.length)
        self.params = as_params(
            relative.init_fire(rngs.params(), config.num_heads, width=options.width)
        )

    def bias(self, query_positions, key_positions):
        """The network's output for each head."""
        return relative.fire_bias(
            as_arrays(self.params), query_positions, key_positions, length=self.length
        )
