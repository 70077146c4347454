"""A function of each token's logits, without the logits of all tokens at once.

The logits of T tokens over V bytes are V / D times their activations, and a softmax
holds them more than once. Here the head, and what is made of its logits, run over some
of the tokens at a time, which are cut out of the whole and put back where they were.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

Head = Callable[[jax.Array], jax.Array]  # [B, t, D] -> logits [B, t, V]

# Of one chunk on one device: 2**20 logits are 4 MiB, and a head over many bytes has to
# be read again for each chunk, which some tokens must pay for.
_LOGITS, _TOKENS = 2**20, 1024


@dataclass(frozen=True)
class Chunks:
    """The tokens of a row in equal chunks; the last one overlaps the one before it.

    Where the mesh splits a row into S shards, a chunk has as many tokens of each, so
    that every device has its share of every chunk and none moves.

    Attributes:
      shards: S.
      length: tokens of a shard.
      size: of those, tokens of a chunk.
    """

    shards: int
    length: int
    size: int

    @classmethod
    def of(
        cls, head: Head, hidden: jax.Array, most_tokens: int | None = None
    ) -> "Chunks":
        """Chunks of `hidden` `[B, T, D]`, of all rows.

        Args:
          head: gives the logits.
          hidden: what is cut.
          most_tokens: of a chunk on each device of the mesh that is set, if any; None
            goes by the width of the logits.
        """
        mesh = jax.sharding.get_abstract_mesh()
        batch, tokens, _ = hidden.shape
        if most_tokens is None:
            width = jax.eval_shape(head, hidden).shape[-1]
            most_tokens = max(_TOKENS, _LOGITS // width)
        shards = mesh.shape.get("sequence", 1)
        shards = 1 if tokens % shards else shards
        length, most = tokens // shards, most_tokens * max(1, mesh.size)
        count = min(length, math.ceil(batch * tokens / most))
        return cls(shards, length, math.ceil(length / count))

    @property
    def count(self) -> int:
        """How many there are."""
        return math.ceil(self.length / self.size)

    def start(self, i: jax.Array) -> jax.Array:
        """The first token of chunk i in each shard."""
        return jnp.minimum(i * self.size, self.length - self.size)

    def new(self, i: jax.Array) -> jax.Array:
        """Which tokens of chunk i none before it had, bool `[S * size]`."""
        first = i * self.size - self.start(i)
        return jnp.tile(jnp.arange(self.size) >= first, self.shards)

    def take(self, x: jax.Array, i: jax.Array) -> jax.Array:
        """Chunk i of `[B, T, ...]`, `[B, S * size, ...]`."""
        split = x.reshape(x.shape[0], self.shards, self.length, *x.shape[2:])
        part = lax.dynamic_slice_in_dim(split, self.start(i), self.size, axis=2)
        return part.reshape(x.shape[0], self.shards * self.size, *x.shape[2:])

    def put(self, x: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
        """`[B, T, ...]` with another chunk i."""
        split = x.reshape(x.shape[0], self.shards, self.length, *x.shape[2:])
        part = part.reshape(x.shape[0], self.shards, self.size, *x.shape[2:])
        return lax.dynamic_update_slice_in_dim(
            split, part, self.start(i), axis=2
        ).reshape(x.shape)


def by_chunks(
    function: Callable[..., jax.Array],
    head: Head,
    hidden: jax.Array,
    *arrays: jax.Array,
    most_tokens: int | None = None,
) -> jax.Array:
    """`function(head(hidden), *arrays)`, some tokens at a time.

    Args:
      function: of logits `[B, t, V]` and the arrays `[B, t, ...]` of the same tokens;
        gives `[B, t, ...]`.
      head: gives the logits `[B, t, V]` of `[B, t, D]`.
      hidden: `[B, T, D]`.
      *arrays: `[B, T, ...]`.
      most_tokens: as for `Chunks.of`. If all are no more, there is one chunk.

    Returns:
      `[B, T, ...]`, what the function gives for all tokens.
    """
    chunks = Chunks.of(head, hidden, most_tokens)
    if chunks.count == 1:
        return function(head(hidden), *arrays)

    def add(i, values):
        logits = head(chunks.take(hidden, i))
        part = function(logits, *(chunks.take(x, i) for x in arrays))
        return chunks.put(values, part, i)

    shape = jax.eval_shape(lambda x: function(head(x), *arrays), hidden)
    start = jnp.zeros(shape.shape, shape.dtype)
    return lax.fori_loop(0, chunks.count, add, start)
