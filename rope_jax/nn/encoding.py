"""What a positional encoding can do to a decoder: the hooks, all at their default.

* `place(positions, key)` may replace the positions of a row before all else;
* `embed(x, positions)` changes the token embeddings `[B, T, D]`;
* `rotate(query, key, query_positions, key_positions)` changes the queries and keys
  `[B, T, N, H]` of a layer;
* `rotate_features(positions, width, length)` is what `rotate` is to linear attention;
* `bias(query_positions, key_positions)` is a float32 term `[..., N, T, S]` of the
  scaled attention scores; None where an encoding has none;
* `scores(x, query, key, positions)` is the same for encodings that read the data. It
  returns a function of row indices, so that attention can ask for any block.

Positions are always arguments, so offsets, packing and padding need no further code.
"""

from collections.abc import Callable

import jax
from flax import nnx

BlockBias = Callable[[jax.Array, jax.Array], jax.Array]


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

    def scores(self, x, query, key, positions) -> BlockBias | None:
        """The term of the scaled scores, as a function of query and key indices.

        Args:
          x: `[B, T, D]`, the input of the attention layer, normalized.
          query: `[B, T, N, H]`, after `rotate`.
          key: `[B, T, K, H]`, after `rotate`.
          positions: integers `[T]` or `[B, T]`.
        """
        del x, query, key
        if self.bias is None:
            return None
        return lambda t, s: self.bias(positions[..., t], positions[..., s])


def as_params(arrays: dict[str, jax.Array]) -> nnx.Dict:
    """The arrays of an `init_*` function as parameters."""
    return nnx.Dict({name: nnx.Param(array) for name, array in arrays.items()})


def as_arrays(params: nnx.Dict) -> dict[str, jax.Array]:
    """The parameters as the arrays that the pure functions take."""
    return {name: param[...] for name, param in params.items()}
