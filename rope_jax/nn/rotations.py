"""Encodings that turn queries and keys: RoPE with its scalings, and its relatives."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax.functional import (
    contextual,
    far_positions,
    frequencies,
    positions,
    rotary,
)
from rope_jax.functional.layouts import LAYOUTS
from rope_jax.functional.xpos import scale_channels, xpos_block
from rope_jax.nn.encoding import Encoding

# These change the positions beyond a window; the others change the frequencies.
_FAR_SCALINGS = ("rerope", "self_extend")
SCALINGS = (
    "none",
    "linear",
    "ntk",
    "dynamic_ntk",
    "ntk_by_parts",
    "yarn",
    "llama3",
    *_FAR_SCALINGS,
)
# xPos scales by at most 2**(0.9 * span / 512): float32 ends a little beyond this.
_XPOS_SPAN = 32_768


@dataclass
class RopeOptions:
    """Rotary embedding. `fraction` of the head's channels turn, the first ones.

    `scaling` names a builder of `rope_jax.frequencies`, with its `factor` and the
    length that was trained before it was scaled; 0 lets the experiment use its own
    training length. Two scalings leave the frequencies and replace the distances of
    `window` positions or more: "rerope" by `window`, "self_extend" by those between
    groups of `group` positions (`rope_jax.functional.far_positions`).
    """

    theta: float = 10_000.0
    fraction: float = 1.0
    layout: str = "half"
    scaling: str = "none"
    factor: float = 1.0
    original_length: int = 0
    window: int = 0
    group: int = 0


@dataclass
class XposOptions:
    """xPos: pair i decays by zeta_i every `scale_base` positions."""

    scale_base: float = 512.0


@dataclass
class PropeOptions:
    """p-RoPE: the share of the frequencies that is kept, the highest ones."""

    proportion: float = 0.75


@dataclass
class RandomRopeOptions:
    """Randomized positions: drawn below `max_length`; 0 is 16 training lengths."""

    max_length: int = 0


class Rope(Encoding):
    """Rotary position embedding, Su et al. 2021, equation 34."""

    options = ("rope",)

    def __init__(self, config, *, rngs):
        del rngs
        options = config.rope
        self.name = config.encoding
        self.fraction = options.fraction
        self.width = self._part("head_dim", config.head_dim)
        for name, value, valid in (
            ("layout", options.layout, LAYOUTS),
            ("scaling", options.scaling, SCALINGS),
        ):
            if value not in valid:
                raise ValueError(
                    f"model.rope.{name} must be one of {', '.join(valid)}; got "
                    f"{value!r}"
                )
        self.theta = options.theta
        self.layout = options.layout
        self.scaling = options.scaling
        self.factor = options.factor
        self.original_length = options.original_length
        self.window, self.group = options.window, options.group
        _check_scaling(options)
        self.frequencies(1)  # wrong options raise here, not in the first step

    def _part(self, field: str, size: int) -> int:
        """How many of the channels turn, which `model.FIELD` is the number of."""
        width = size * self.fraction
        if width != int(width) or int(width) % 2 or not 0 < width <= size:
            raise ValueError(
                f"model.{field} * model.rope.fraction must be an even number of "
                f"channels in (0, {field}] for encoding {self.name!r}, got {width:g} "
                f"from {field} {size} and fraction {self.fraction}"
            )
        return int(width)

    def frequencies(
        self, length: int, width: int | None = None
    ) -> frequencies.Frequencies:
        """The rotary frequencies for a row of `length` tokens.

        `width` channels turn; None is the part of the head dim that was chosen.
        """
        dim, theta, factor = width or self.width, self.theta, self.factor
        trained = self.original_length
        if self.scaling in ("none", *_FAR_SCALINGS):
            return frequencies.default(dim, theta=theta)
        if self.scaling in ("linear", "ntk"):
            return getattr(frequencies, self.scaling)(dim, theta=theta, factor=factor)
        if self.scaling == "dynamic_ntk":
            return frequencies.dynamic_ntk(
                dim,
                theta=theta,
                factor=factor,
                max_position_embeddings=trained,
                seq_len=length,
            )
        return getattr(frequencies, self.scaling)(
            dim, theta=theta, factor=factor, original_max_position_embeddings=trained
        )

    def rotate(self, query, key, query_positions, key_positions):
        """Turn queries and keys by their own positions."""
        table = self.frequencies(key.shape[-3])
        return (
            rotary.rope(query, query_positions, table, layout=self.layout),
            rotary.rope(key, key_positions, table, layout=self.layout),
        )

    def rotate_features(self, positions, width, length):
        """The same turning, of the features: their pairs have a ladder of their own."""
        if self.scaling == "yarn":
            raise ValueError(
                "model.rope.scaling must not be 'yarn' for model.attention 'linear': "
                "its temperature of the scores would not cancel in the denominator, "
                "which is not rotated; 'ntk_by_parts' has the same frequencies without"
            )
        if self.scaling in _FAR_SCALINGS:
            raise ValueError(
                f"model.rope.scaling must not be {self.scaling!r} for model.attention "
                "'linear': it replaces the distances of pairs, and no pair has a score"
            )
        turning = self._part("linear.num_features", width)
        return {
            "positions": positions,
            "frequencies": self.frequencies(length, turning),
            "layout": self.layout,
        }

    def scores(self, query, key):
        """Where distances are replaced: the score at the far positions, less this."""
        if self.scaling not in _FAR_SCALINGS:
            return super().scores(query, key)
        table, window = self.frequencies(key.vectors.shape[-3]), self.window
        near_at = query.positions, key.positions
        if self.scaling == "rerope":
            far_at = far_positions.rerope_positions(*near_at, window=window)
        else:
            far_at = far_positions.self_extend_positions(
                *near_at, window=window, group_size=self.group
            )
        near = query.vectors, key.vectors
        far = [
            rotary.rerotate(*moved, table, layout=self.layout)
            for moved in zip(near, near_at, far_at, strict=True)
        ]
        return lambda t, s: far_positions.far_bias(
            (near[0][:, t], near[1][:, s]),
            (far[0][:, t], far[1][:, s]),
            near_at[0][..., t],
            near_at[1][..., s],
            window=window,
            scale=near[0].shape[-1] ** -0.5,
        )

    def check_cache(self, capacity, sinks):
        """Frequencies must not depend on how far the row has come."""
        super().check_cache(capacity, sinks)
        if self.scaling == "dynamic_ntk" and capacity > self.original_length:
            raise ValueError(
                "model.rope.scaling 'dynamic_ntk' changes its frequencies with every "
                f"token past {self.original_length}, and what is cached was computed "
                f"with earlier ones: a cache of {capacity} tokens cannot give the "
                "logits of a full pass; 'ntk' and 'yarn' can"
            )


def _check_scaling(options: RopeOptions) -> None:
    """Raise ValueError for an option that the scaling needs, or takes no notice of."""
    scaling, factor = options.scaling, options.factor
    if scaling in ("none", *_FAR_SCALINGS) and factor != 1.0:
        taking = (name for name in SCALINGS[1:] if name not in _FAR_SCALINGS)
        raise ValueError(
            f"factor {factor:g} needs a scaling other than {scaling!r}, one of "
            f"{', '.join(taking)}"
        )
    if factor == 1.0 and scaling not in ("none", "dynamic_ntk", *_FAR_SCALINGS):
        raise ValueError(f"scaling {scaling!r} needs a factor above 1, got 1")
    for name, takers in (("window", _FAR_SCALINGS), ("group", ("self_extend",))):
        value = getattr(options, name)
        if scaling in takers and value < 1:
            raise ValueError(
                f"scaling {scaling!r} needs a {name} of at least 1, got {value}"
            )
        if scaling not in takers and value != 0:
            raise ValueError(
                f"{name} {value} needs the scaling {' or '.join(takers)}, got "
                f"{scaling!r}"
            )


class Prope(Rope):
    """p-RoPE, Barbero et al. 2024: the lowest frequencies are set to zero."""

    options = ("rope", "prope")

    def __init__(self, config, *, rngs):
        self.proportion = config.prope.proportion
        super().__init__(config, rngs=rngs)

    def frequencies(self, length, width=None):
        """The frequencies that are kept, then zeros."""
        del length
        if self.scaling != "none":
            raise ValueError(
                "model.rope.scaling must be 'none' for encoding 'prope', got "
                f"{self.scaling!r}"
            )
        return frequencies.proportional(
            width or self.width, theta=self.theta, proportion=self.proportion
        )


class Xpos(Rope):
    """xPos, Sun et al. 2022: RoPE whose scores decay with the distance.

    Queries shrink and keys grow with the position, counted from the middle of the
    positions of their row, so that only the distance remains in their product. The
    positions of a row may span `max_length`.
    """

    options = ("rope", "xpos")
    not_linear = (
        "its scales, exponential in the position, would not cancel in the denominator "
        "of equation 19, which is not rotated"
    )
    max_length = _XPOS_SPAN

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        if self.scaling in _FAR_SCALINGS:  # its decay would go by other distances
            raise ValueError(
                f"model.rope.scaling {self.scaling!r} does not fit encoding 'xpos'"
            )
        self.scale_base = config.xpos.scale_base
        self.max_length = int(_XPOS_SPAN * self.scale_base / 512)
        self._scale(jnp.arange(1), 0)

    def _scale(self, at, center):
        return rotary.xpos_scale(
            at, self.width, scale_base=self.scale_base, center=center
        )

    def rotate(self, query, key, query_positions, key_positions):
        """Turn, then scale: queries down and keys up with their positions."""
        if key.shape[-3] > self.max_length:
            raise ValueError(
                f"encoding 'xpos' with scale_base {self.scale_base:g} stays finite up "
                f"to {self.max_length} tokens, got a sequence of {key.shape[-3]}"
            )
        query, key = super().rotate(query, key, query_positions, key_positions)
        low = key_positions.min(axis=-1, keepdims=True)
        high = key_positions.max(axis=-1, keepdims=True)
        center = low + (high - low) // 2
        return (
            scale_channels(
                query, self._scale(query_positions, center), layout=self.layout
            ),
            scale_channels(
                key, 1.0 / self._scale(key_positions, center), layout=self.layout
            ),
        )

    def rotate_alone(self, query, key, positions):
        """Turn; the scale waits for the queries, around which it is centred."""
        return super().rotate(query, key, positions, positions)

    def rotate_together(self, query, key, query_positions, key_positions):
        """Scale, centred on the queries, so that a row of any length stays finite."""
        return xpos_block(
            query,
            key,
            query_positions,
            key_positions,
            rotary_dim=self.width,
            scale_base=self.scale_base,
            layout=self.layout,
        )


class RandomRope(Rope):
    """RoPE at randomized positions, Ruoss et al. 2023.

    In training the positions of a batch are a sorted sample without replacement of
    those below `max_length`. Elsewhere they are that sample's expectation, evenly
    spread: a row always gets the same positions, which depend on its length. So this
    is the one encoding for which a prefix, or a row with its padding taken off, is
    not encoded as before.
    """

    options = ("rope", "random_rope")
    own_positions = True

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        if config.random_rope.max_length < 1:
            raise ValueError(
                "model.random_rope.max_length must be at least 1 for encoding "
                f"'random_rope', got {config.random_rope.max_length}"
            )
        self.max_length = config.random_rope.max_length

    def place(self, positions_given, key):
        """Positions below `max_length`, looked up by the ones given."""
        length = positions_given.shape[-1]
        if length > self.max_length:
            raise ValueError(
                f"encoding 'random_rope' draws from {self.max_length} positions, got "
                f"a sequence of {length}; set a larger model.random_rope.max_length"
            )
        if key is None:
            # E of the i-th of n sorted draws below M is (i + 1)(M + 1)/(n + 1) - 1.
            step = (self.max_length + 1) / (length + 1)
            spread = jnp.asarray((np.arange(1, length + 1) * step).astype(np.int32) - 1)
        else:
            spread = positions.random_positions(key, length, self.max_length)
        return spread[positions_given]


class Pope(Encoding):
    """PoPE, Gopalakrishnan et al. 2025: magnitude for content, angle for position."""

    options = ("rope",)
    not_linear = (
        "it makes features of its own from queries and keys, which can be negative"
    )
    per_layer = True

    def __init__(self, config, *, rngs):
        heads, usual = config.num_kv_heads or config.num_heads, RopeOptions()
        for name in ("fraction", "layout", "scaling", "factor", "window", "group"):
            value, only = getattr(config.rope, name), getattr(usual, name)
            if value != only:
                raise ValueError(
                    f"model.rope.{name} must be {only!r} for encoding 'pope', which "
                    f"takes only theta of model.rope; got {value!r}"
                )
        self.theta = config.rope.theta
        params = contextual.init_pope(heads, config.head_dim, key=rngs.params())
        self.phase = nnx.Param(params["phase"])

    def rotate(self, query, key, query_positions, key_positions):
        """Features of twice the head dim; their products are the scores."""
        table = frequencies.default(2 * query.shape[-1], theta=self.theta)
        params = {"phase": self.phase[...]}
        return (
            contextual.pope_query(query, query_positions, table),
            contextual.pope_key(params, key, key_positions, table),
        )
