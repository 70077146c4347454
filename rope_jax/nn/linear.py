"""Linear attention in the decoder, and which random features each layer has."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.functional.feature_maps import (
    FeatureFunction,
    elu_plus_one,
    favor_projection,
    favor_relu,
    favor_softmax,
)
from rope_jax.functional.linear_attention import (
    LinearState,
    init_linear_state,
    linear_attention_step,
)
from rope_jax.nn import sharding
from rope_jax.nn.encoding import Encoding
from rope_jax.nn.encodings import ENCODINGS
from rope_jax.nn.projections import Projections
from rope_jax.nn.rotations import Rope

_RANDOM = {"favor_softmax": favor_softmax, "favor_relu": favor_relu}
_FEATURES = (*_RANDOM, "elu")


@dataclass
class LinearOptions:
    """Linear attention: its features, and how the random ones are drawn.

    `num_features` 0 is head_dim * ceil(ln head_dim), the number that FAVOR+ needs by
    theory (H log H) in whole orthogonal blocks: 96 for 24, 128 for 32, 320 for 64. The
    features "elu" are head_dim in number and not random.

    Evaluation, decoding and sampling use the first draw. Where nothing is redrawn that
    is the one of training; with `redraw_every` it is one that the parameters have not
    met since the first interval, so that what is measured holds for any draw.
    """

    features: str = "favor_softmax"  # or "favor_relu", "elu"
    num_features: int = 0  # of each head
    redraw_every: int = 0  # training steps; 0 keeps the first draw
    seed: int = 0  # of the random features, apart from that of the parameters


def check_linear(config) -> None:
    """Raise ValueError, naming the field, for what linear attention cannot do."""
    options = config.linear
    if options.features not in _FEATURES:
        raise ValueError(
            f"model.linear.features must be one of {', '.join(_FEATURES)}; got "
            f"{options.features!r}"
        )
    for name in ("num_features", "redraw_every", "seed"):
        value = getattr(options, name)
        if value < 0:
            raise ValueError(f"model.linear.{name} must not be negative, got {value}")
        if value and options.features == "elu":
            raise ValueError(
                f"model.linear.{name} must be 0 for features 'elu', which are head_dim "
                f"in number and not random; got {value}"
            )
    if config.window:
        raise ValueError(
            "model.window must be 0 for model.attention 'linear': it keeps a sum over "
            f"all tokens, from which none can be taken; got {config.window}"
        )
    if config.attention_implementation != "auto":
        raise ValueError(
            "model.attention_implementation must be auto for model.attention 'linear', "
            f"which has one implementation; got {config.attention_implementation!r}"
        )
    reason = _refusal(ENCODINGS[config.encoding])
    if reason:
        raise ValueError(
            f"model.encoding {config.encoding!r} does not go with model.attention "
            f"'linear': {reason}"
        )


def _refusal(kind: type[Encoding]) -> str:
    """Why linear attention cannot have an encoding; "" if it can."""
    # RoPE adds to scores under some of its scalings alone, and refuses those itself.
    scores = kind.scores not in (Encoding.scores, Rope.scores)
    if kind.bias is not None or scores:
        return "it adds to the score of each pair of tokens, and no pair has a score"
    return kind.not_linear


@dataclass(frozen=True)
class FeatureDraws:
    """The random projections of all layers, as a function of the training step.

    They come from a seed in the config: nothing trains them, and no checkpoint holds
    them.
    """

    num_layers: int
    num_features: int
    head_dim: int
    redraw_every: int
    seed: int

    def __call__(self, step: jax.Array | None) -> jax.Array:
        """Projections `[L, M, H]` at a step; None is the first draw, that of step 0."""
        draw = 0 if step is None or not self.redraw_every else step // self.redraw_every
        key = jax.random.fold_in(jax.random.key(self.seed), draw)
        layers = jnp.arange(self.num_layers)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, layers)
        draw_one = functools.partial(
            favor_projection, head_dim=self.head_dim, num_features=self.num_features
        )
        return jax.vmap(draw_one)(keys)


def make_draws(config) -> FeatureDraws | None:
    """The random features of a decoder; None where it has none."""
    if config.attention != "linear" or config.linear.features == "elu":
        return None
    return FeatureDraws(
        num_layers=config.num_layers,
        num_features=count_features(config),
        head_dim=config.head_dim,
        redraw_every=config.linear.redraw_every,
        seed=config.linear.seed,
    )


class LinearAttention(Projections):
    """Causal linear attention; RoPE turns the features, as in RoFormer's equation 19.

    A layer's memory of the tokens before is a `LinearState`, of one size at any length.
    """

    window = 0  # it has none, see check_linear

    def __init__(self, config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.features = config.linear.features
        self.num_features = count_features(config)

    def __call__(self, x, positions, encoding, segment_ids, key_mask, projection):
        """Attend over `x` `[B, T, D]`; arguments as for `advance`."""
        state = self.init_state(x.shape[0])
        mixed, _ = self._mixed(
            state, x, positions, encoding, segment_ids, key_mask, projection
        )
        return self.out(sharding.tokens(mixed))

    def init_state(self, batch: int) -> LinearState:
        """The state before the first token of `batch` rows."""
        heads, width = self.key.out_features
        return init_linear_state(
            (batch,), num_heads=heads, num_features=self.num_features, value_dim=width
        )

    def advance(
        self, state, x, positions, encoding, segment_ids, key_mask, projection
    ) -> tuple[jax.Array, LinearState]:
        """Attend from the next tokens to themselves and all that is in the state.

        However a row is cut into calls, the result is that of one call, but for an
        encoding whose frequencies depend on the length of the row (dynamic NTK).

        Args:
          state: after the tokens before.
          x: `[B, T, D]`, the next tokens.
          positions: integers `[T]` or `[B, T]`, of these tokens.
          encoding: the decoder's.
          segment_ids: integers `[B, T]`; a token attends within the run of equal ids
            around it. None carries on the segment of the state.
          key_mask: bool `[B, T]`, False where a token is padding.
          projection: `[M, H]`, the layer's random features; None for features "elu".

        Returns:
          `[B, T, D]`, and the state after these tokens.
        """
        mixed, state = self._mixed(
            state, x, positions, encoding, segment_ids, key_mask, projection
        )
        return self.out(mixed), state

    def _mixed(
        self, state, x, positions, encoding, segment_ids, key_mask, projection
    ) -> tuple[jax.Array, LinearState]:
        """What `advance` gives, by heads `[B, T, N, H]`."""
        query, key, value = map(sharding.rows_of_heads, self.heads(x))
        return linear_attention_step(
            state,
            query,
            key,
            value,
            feature_map=self._feature_map(projection),
            segment_ids=segment_ids,
            key_mask=key_mask,
            **encoding.rotate_features(positions, self.num_features, x.shape[1]),
        )

    def init_memory(self, encoding, batch: int, capacity: int, dtype, rolling):
        """What `extend` keeps: the state, whose size no capacity changes."""
        del encoding, capacity, dtype
        if rolling is not None:
            raise ValueError(
                "linear attention keeps a sum over all tokens, from which none can be "
                f"taken, so its cache cannot be rolling; got {rolling}"
            )
        return self.init_state(batch)

    def extend(self, x, encoding, memory, view, rolling, projection):
        """Attend from new tokens to all before; arguments as for `Attention.extend`."""
        del rolling
        return self.advance(
            memory, x, view.positions, encoding, None, view.real, projection
        )

    def _feature_map(self, projection: jax.Array | None) -> FeatureFunction:
        if self.features == "elu":
            return elu_plus_one
        return _RANDOM[self.features](projection)


def count_features(config) -> int:
    """Features of each head, derived where `linear.num_features` is 0."""
    width = config.head_dim
    if config.linear.features == "elu":
        return width
    return config.linear.num_features or width * max(1, math.ceil(math.log(width)))
