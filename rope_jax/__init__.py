"""Positional encodings for JAX, as pure functions of arrays and positions.

Importing this package loads jax and numpy and nothing else. The Flax decoder is in
`rope_jax.nn`, training and evaluation in `rope_jax.experiment`.
"""

from rope_jax.functional import frequencies
from rope_jax.functional.additive import (
    binary_encoding,
    integer_encoding,
    interpolate_table,
    sinusoidal,
)
from rope_jax.functional.alibi import alibi_bias, alibi_fold, alibi_slopes
from rope_jax.functional.attention import attention
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.huggingface import RopeSpec, rope_from_hf
from rope_jax.functional.positions import (
    grid_positions,
    positions_from_mask,
    positions_from_segments,
    random_positions,
    zigzag_positions,
)
from rope_jax.functional.rotary import (
    apply_rope,
    convert_layout,
    convert_projection,
    mixed_angles,
    multi_axis_angles,
    rerotate,
    rope,
    rope_angles,
    xpos_block,
    xpos_scale,
)

__all__ = [
    "Frequencies",
    "RopeSpec",
    "alibi_bias",
    "alibi_fold",
    "alibi_slopes",
    "apply_rope",
    "attention",
    "binary_encoding",
    "convert_layout",
    "convert_projection",
    "frequencies",
    "grid_positions",
    "integer_encoding",
    "interpolate_table",
    "mixed_angles",
    "multi_axis_angles",
    "positions_from_mask",
    "positions_from_segments",
    "random_positions",
    "rerotate",
    "rope",
    "rope_angles",
    "rope_from_hf",
    "sinusoidal",
    "xpos_block",
    "xpos_scale",
    "zigzag_positions",
]
