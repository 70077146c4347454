"""A decoder-only transformer over bytes, with its positional encoding by name.

Written tree-style: no shared modules, no state beside the parameters, keys and
positions passed in. `nnx.split(model)` gives a static graph and a tree of float32
parameters, which is all that jitted code needs to see. The layers are one stack
with a leading axis, run by `jax.lax.scan`, so that compile time does not grow
with depth; a few layers on a CPU are written out (`unrolled`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.functional.attention_target import target_platform
from rope_jax.functional.positions import positions_from_mask, positions_from_segments
from rope_jax.nn import sharding
from rope_jax.nn.attention import Attention
from rope_jax.nn.config import DecoderConfig, check_config, mlp_width
from rope_jax.nn.encodings import ENCODINGS, make_encoding
from rope_jax.nn.linear import LinearAttention, make_draws
from rope_jax.nn.products import widening
from rope_jax.nn.projections import residual_init, rms_norm

# Compile time grows with every layer that is written out.
_MOST_UNROLLED = 8

# What a layer keeps for its backward pass, by `remat`; None is its input alone.
_SAVED = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,
}


class Mlp(nnx.Module):
    """The feed-forward layer: SwiGLU or GELU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        dim, dtype = config.model_dim, jnp.dtype(config.dtype)
        gated = config.mlp == "gated"
        width = mlp_width(config)

        def project(inputs, outputs, init):
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=False,
                dtype=dtype,
                kernel_init=init,
                dot_general=widening if inputs == dim else jax.lax.dot_general,
                rngs=rngs,
            )

        init = nnx.initializers.normal(dim**-0.5)
        self.gate = project(dim, width, init) if gated else None
        self.up = project(dim, width, init)
        self.down = project(width, dim, residual_init(width, config.num_layers))

    def __call__(self, x):
        """Map `[..., D]` to `[..., D]`."""
        if self.gate is None:
            return self.down(sharding.hidden(jax.nn.gelu(self.up(x))))
        return self.down(sharding.hidden(jax.nn.silu(self.gate(x)) * self.up(x)))


class Block(nnx.Module):
    """One pre-norm layer: attention, then the feed-forward layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.attention_norm = rms_norm(config.model_dim, dtype, rngs)
        kind = LinearAttention if config.attention == "linear" else Attention
        self.attention = kind(config, rngs=rngs)
        self.mlp_norm = rms_norm(config.model_dim, dtype, rngs)
        self.mlp = Mlp(config, rngs=rngs)
        self.dropout = config.dropout
        own = ENCODINGS[config.encoding].per_layer
        self.encoding = make_encoding(config, rngs=rngs) if own else None

    def __call__(
        self, x, positions, encoding, segment_ids, key_mask, dropout_key, features
    ):
        """Map `[B, T, D]` to `[B, T, D]`; dropout acts where a key is given.

        `features` holds what linear attention takes besides; it is empty elsewhere.
        """
        encoding = encoding if self.encoding is None else self.encoding
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        mixed = self.attention(
            self.attention_norm(x),
            positions,
            encoding,
            segment_ids,
            key_mask,
            **features,
        )
        x = sharding.stream(x + _dropout(mixed, self.dropout, keys[0]))
        x = x + _dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[1])
        return sharding.stream(x)

    def extend(self, x, encoding, memory, view, rolling, features):
        """Map new tokens `[B, T, D]`, with what the layer keeps; see Attention."""
        encoding = encoding if self.encoding is None else self.encoding
        mixed, memory = self.attention.extend(
            self.attention_norm(x), encoding, memory, view, rolling, **features
        )
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), memory


class Decoder(nnx.Module):
    """A causal language model; see `DecoderConfig` for its parts.

    Example:
      >>> from flax import nnx
      >>> config = DecoderConfig(encoding="alibi", num_layers=1)
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> tokens = jnp.array([[82, 111, 80, 69]])
      >>> model(tokens).shape
      (1, 4, 256)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        check_config(config)
        dim = config.model_dim
        self.dtype = config.dtype
        self.dropout = config.dropout
        self.remat = config.remat
        self.unroll = config.unroll
        self.embedding = nnx.Param(
            nnx.initializers.normal(dim**-0.5)(
                rngs.params(), (config.vocab_size, dim), jnp.float32
            )
        )
        shared = not ENCODINGS[config.encoding].per_layer
        self.encoding = make_encoding(config, rngs=rngs) if shared else None
        self.linear = config.attention == "linear"
        self.draws = make_draws(config)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return Block(config, rngs=rngs)

        self.blocks = stack(rngs)
        self.norm = rms_norm(dim, jnp.dtype(config.dtype), rngs)
        # A zero head makes an untrained model exactly uniform: 8 bits per byte.
        self.head = (
            None
            if config.tied_output
            else nnx.Param(jnp.zeros((dim, config.vocab_size), jnp.float32))
        )

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the encoding can do; None for no limit."""
        return None if self.encoding is None else self.encoding.max_length

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key_mask: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        last: int | None = None,
        step: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the byte after each token.

        Args:
          tokens: integers `[B, T]`.
          positions: integers `[T]` or `[B, T]`. By default they count from 0 in
            each segment of `segment_ids`, over the real tokens of `key_mask`, or
            along the row.
          segment_ids: integers `[B, T]`; tokens attend within equal ids.
          key_mask: bool `[B, T]`, False where a token is padding.
          dropout_key: dropout acts exactly when a key is given.
          last: give logits for the last `last` tokens only.
          step: updates done, in training: random features (see `LinearOptions`) are
            those of this step. None, as in evaluation, is the first draw, which is
            the one of every step unless they are redrawn.

        Returns:
          float32 logits `[B, T, V]`, or `[B, last, V]`.

        Raises:
          ValueError: the row is longer than the encoding can do; positions are given
            to an encoding that makes its own; or they are missing where segments
            and a mask leave them open.
        """
        x = self.hidden(
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            key_mask=key_mask,
            dropout_key=dropout_key,
            step=step,
        )
        return self.logits(x if last is None else x[:, -last:])

    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key_mask: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        step: jax.Array | None = None,
    ) -> jax.Array:
        """The last layer's output, which `logits` takes, for some tokens or all.

        Args and errors are those of `__call__`.

        Returns:
          `[B, T, D]`.
        """
        if positions is None:
            positions = _default_positions(tokens, segment_ids, key_mask)
        elif self.encoding is not None and self.encoding.own_positions:
            raise ValueError(
                "positions must not be given: the encoding makes its own from the "
                f"length of the row, got an array of shape {positions.shape}"
            )
        keys = [None] * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        dropout_key, embed_key, place_key = keys
        x = self.embed(tokens)
        if self.encoding is not None:
            positions = self.encoding.place(positions, place_key)
            x = self.encoding.embed(x, positions)
        x = sharding.stream(_dropout(x, self.dropout, embed_key))
        return self._run_blocks(x, positions, segment_ids, key_mask, dropout_key, step)

    def embed(self, tokens):
        """Embeddings `[B, T, D]` of tokens, without positions."""
        table = sharding.whole(self.embedding[...])
        x = table.at[tokens].get(mode="promise_in_bounds")
        return (x * x.shape[-1] ** 0.5).astype(self.dtype)

    def logits(self, x):
        """Float32 logits `[B, T, V]` of the last layer's output."""
        tied = self.head is None
        head = sharding.whole(self.embedding[...]).T if tied else self.head[...]
        head = sharding.vocabulary(head.astype(self.dtype))
        return jnp.einsum(
            "btd,dv->btv", self.norm(x), head, preferred_element_type=jnp.float32
        )

    def _run_blocks(self, x, positions, segment_ids, key_mask, dropout_key, step):
        graph, state = nnx.split(self.blocks)
        # Drawn here, for all layers at once, so that no layer is recomputed for it.
        projections = None if self.draws is None else self.draws(step)

        def run(x, layer):
            state, index, projection = layer
            features = {"projection": projection} if self.linear else {}
            key = dropout_key
            if key is not None:
                key = jax.random.fold_in(key, index)
            block = nnx.merge(graph, state)
            args = (positions, self.encoding, segment_ids, key_mask, key, features)
            return block(x, *args), None

        num_layers = jax.tree.leaves(state)[0].shape[0]
        unroll = self.unrolled(num_layers)
        if self.remat != "none":
            # In a turn of several layers what is computed again could be shared with
            # what was computed first, and so be kept.
            run = jax.checkpoint(run, policy=_SAVED[self.remat], prevent_cse=unroll > 1)
        layers = (state, jnp.arange(num_layers), projections)
        return jax.lax.scan(run, x, layers, unroll=unroll)[0]

    def unrolled(self, num_layers: int) -> int:
        """How many layers one turn of the loop over them holds.

        On a CPU the loop's own work, stacking what the backward pass needs and taking
        it apart again, is a sixth of a training step.
        """
        if self.unroll:
            return min(self.unroll, num_layers)
        if self.remat != "none":  # for memory, of which a loop needs less
            return 1
        few = num_layers <= _MOST_UNROLLED and target_platform() == "cpu"
        return num_layers if few else 1


def _default_positions(tokens, segment_ids, key_mask):
    if segment_ids is not None and key_mask is not None:
        raise ValueError("positions must be given beside both segment_ids and key_mask")
    if segment_ids is not None:
        return positions_from_segments(segment_ids)
    if key_mask is not None:
        return positions_from_mask(key_mask)
    return jnp.arange(tokens.shape[-1])


def _dropout(x, rate, key):
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
