"""What a positional encoding can do to a decoder: the hooks, all at their default.

* `place(positions, key)` may replace the positions of a row before all else;
* `embed(x, positions)` changes the token embeddings `[B, T, D]`;
* `rotate(query, key, query_positions, key_positions)` changes the queries and keys
  `[B, T, N, H]` of a layer;
* `rotate_features(positions, width, length)` is what `rotate` is to linear attention;
* `bias(query_positions, key_positions)` is a float32 term `[..., N, T, S]` of the
  scaled attention scores; None where an encoding has none;
* `scores(query, key)` is the same for encodings that read the data. It returns a
  function of row indices, so that attention can ask for any block;
* `extras(x, before)` is what a token leaves for `scores` beside its query and key.

Positions are always arguments, so offsets, packing and padding need no further code.
Nor does a cache, which keeps the keys as `rotate_alone` leaves them, and the extras:

* `rotate_alone(query, key, positions)` is as much of `rotate` as a token can have done
  without the others, and `rotate_together(...)` the rest, for queries and all keys;
* `check_cache(capacity, sinks)` refuses, with the reason, what a cache cannot do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

BlockBias = Callable[[jax.Array, jax.Array], jax.Array]


class Side(NamedTuple):
    """The queries of a layer, or its keys: what a term of the scores may read.

    Attributes:
      vectors: `[B, T, N, H]`, after `rotate`.
      positions: integers `[T]` or `[B, T]`.
      index: places in the row, integers `[T]` or `[B, T]`. They order the tokens: a
        query sees no key whose index is above its own.
      extras: what `Encoding.extras` gives, arrays `[B, T, ...]`.
    """

    vectors: jax.Array
    positions: jax.Array
    index: jax.Array
    extras: Any = None


class Encoding(nnx.Module):
    """No positional encoding: every hook at its default.

    Attributes:
      max_length: the longest row that can be encoded; None for no limit.
      per_layer: each layer has parameters of its own, instead of one set for all.
      whole_rows: `scores` needs all the keys of a query at once.
      own_positions: `place` makes positions from the length of the row, so that none
        can be given.
      options: the fields of DecoderConfig that it reads its options from.
      not_linear: why linear attention cannot have it; "" if it can. Those with a bias
        or scores cannot: they need not say so.
    """

    max_length: int | None = None
    per_layer = False
    whole_rows = False
    own_positions = False
    options: tuple[str, ...] = ()
    not_linear = ""
    bias = None

    def __init__(self, config, *, rngs: nnx.Rngs):
        del config, rngs

    def place(self, positions: jax.Array, key: jax.Array | None) -> jax.Array:
        """The positions that the other hooks are given; `key` is for training."""
        del key
        return positions

    def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Token embeddings `[B, T, D]` with the positions added."""
        del positions
        return x

    def rotate(self, query, key, query_positions, key_positions):
        """Queries and keys `[B, T, N, H]` turned by their positions."""
        del query_positions, key_positions
        return query, key

    def rotate_features(self, positions, width: int, length: int) -> dict:
        """Arguments of `linear_attention_step` that turn features by their positions.

        Args:
          positions: integers `[T]` or `[B, T]`.
          width: how many features a head has.
          length: of the row.
        """
        del positions, width, length
        return {}

    def rotate_alone(self, query, key, positions):
        """What `rotate` can do before it sees other tokens; a cache keeps this key."""
        return self.rotate(query, key, positions, positions)

    def rotate_together(self, query, key, query_positions, key_positions):
        """The rest of `rotate`, for queries and the keys that they meet."""
        del query_positions, key_positions
        return query, key

    def extras(self, x: jax.Array, before: Any = None) -> Any:
        """What `scores` reads of the tokens themselves, kept with their keys.

        Args:
          x: `[B, T, D]`, the input of the attention layer, normalized.
          before: extras `[B, ...]` of the token before these; None if there is none.

        Returns:
          A pytree of arrays `[B, T, W]`, zero before the first token; or None.
        """
        del x, before
        return None

    def scores(self, query: Side, key: Side) -> BlockBias | None:
        """The term of the scaled scores, as a function of entries of both sides.

        Args:
          query: T tokens.
          key: S tokens.

        Returns:
          None, or a function of places in `query` and in `key`, each an array or a
          slice, that gives float32 `[..., N, t, s]`, in nats.
        """
        if self.bias is None:
            return None
        return lambda t, s: self.bias(query.positions[..., t], key.positions[..., s])

    def check_cache(self, capacity: int, sinks: int | None) -> None:
        """Raise ValueError where decoding with a cache would not be right.

        Args:
          capacity: tokens that the cache has room for.
          sinks: None for a cache that holds every token; else the number of first
            tokens that a rolling one keeps beside the last ones.
        """
        del capacity, sinks
        if self.own_positions:
            raise ValueError(
                "the encoding spreads its positions over the whole row, so it cannot "
                "be decoded with a cache: every new token would move the others"
            )


def as_params(arrays: dict[str, jax.Array]) -> nnx.Dict:
    """The arrays of an `init_*` function as parameters."""
    return nnx.Dict({name: nnx.Param(array) for name, array in arrays.items()})


def as_arrays(params: nnx.Dict) -> dict[str, jax.Array]:
    """The parameters as the arrays that the pure functions take."""
    return {name: param[...] for name, param in params.items()}
