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
from rope_jax.functional.alibi import (
    AlibiBias,
    alibi_bias,
    alibi_fold,
    alibi_slopes,
)
from rope_jax.functional.attention import attention
from rope_jax.functional.feature_maps import (
    Features,
    RandomFeatures,
    elu_plus_one,
    favor_projection,
    favor_relu,
    favor_softmax,
)
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.huggingface import RopeSpec, rope_from_hf
from rope_jax.functional.linear_attention import (
    LinearState,
    init_linear_state,
    linear_attention,
    linear_attention_step,
)
from rope_jax.functional.positions import (
    grid_positions,
    positions_from_mask,
    positions_from_segments,
    random_positions,
    rerope_distances,
    self_extend_distances,
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
    "AlibiBias",
    "Features",
    "Frequencies",
    "LinearState",
    "RandomFeatures",
    "RopeSpec",
    "alibi_bias",
    "alibi_fold",
    "alibi_slopes",
    "apply_rope",
    "attention",
    "binary_encoding",
    "convert_layout",
    "convert_projection",
    "elu_plus_one",
    "favor_projection",
    "favor_relu",
    "favor_softmax",
    "frequencies",
    "grid_positions",
    "init_linear_state",
    "integer_encoding",
    "interpolate_table",
    "linear_attention",
    "linear_attention_step",
    "mixed_angles",
    "multi_axis_angles",
    "positions_from_mask",
    "positions_from_segments",
    "random_positions",
    "rerope_distances",
    "rerotate",
    "rope",
    "rope_angles",
    "rope_from_hf",
    "self_extend_distances",
    "sinusoidal",
    "xpos_block",
    "xpos_scale",
    "zigzag_positions",
]
