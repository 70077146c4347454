"""What a checkpoint's `model_type` settles that its config.json does not spell out.

One table, `FAMILIES`: which channels form a pair, the rotary base where the file
leaves it out, which layers do not rotate. Every layout here was read off the rotation
that transformers 5.24.0 runs for the family (`tests/golden/layouts.json` holds what it
does to unit vectors). A model type that is not in the table is no error: its layout is
then for the caller to say.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Period:
    """Which layers attend in full, where the file has no `layer_types`.

    Layer i (from 0) attends in full when (i + offset) % n == 0, with n the value of
    `key` in the config or else `default`; `last_is_full` adds the last layer.
    """

    default: int
    offset: int = 1
    key: str | None = None
    last_is_full: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """The rotary conventions of one model family.

    Attributes:
      layout: "half", "interleaved", or None where the model type does not say.
      theta: rotary base where the config has none; None: the config must have it.
      local_theta: base of the sliding layers, where they have one of their own.
      head_dim: head dim where the config has none; None: hidden size / heads.
      full_head_dim: head dim of the full-attention layers, where it differs.
      partial_rotary_factor: share of the head that turns, where the config is silent.
      rotary_dim: the same in channels.
      section_style: how M-RoPE sections are laid out, for `multi_axis_angles`.
      flat_is_full: a block that is not nested by layer type describes the
        full-attention layers only; sliding layers keep plain frequencies.
      unrotated: layer types that do not rotate.
      unrotated_every: every n-th layer does not rotate, unless the config lists them.
      period: which layers attend in full, where the config has no list.
      rename: rope types that this family means differently.
      needs_block: without a rope block the family is scaled all the same, by numbers
        that only its code has; so the config must have one.
      rotary_kind: the `position_embedding_type` with which the family rotates, where
        it looks at that key; otherwise it does not rotate.
      reversed: positions turn the other way.
    """

    layout: str | None = "half"
    theta: float | None = 10_000.0
    local_theta: float | None = None
    head_dim: int | None = None
    full_head_dim: int | None = None
    partial_rotary_factor: float = 1.0
    rotary_dim: int | None = None
    section_style: str | None = None
    flat_is_full: bool = False
    unrotated: tuple[str, ...] = ()
    unrotated_every: int | None = None
    period: Period | None = None
    rename: tuple[tuple[str, str], ...] = ()
    needs_block: bool = False
    rotary_kind: str | None = None
    reversed: bool = False


# An unknown model type: nothing is assumed.
UNKNOWN = Family(layout=None, theta=None)

_PLAIN = Family()
_GEMMA = Family(head_dim=256)
_GEMMA3 = Family(
    theta=1e6,
    local_theta=1e4,
    head_dim=256,
    flat_is_full=True,
    period=Period(6, key="sliding_window_pattern"),
)
_GEMMA4 = Family(
    theta=None,
    head_dim=256,
    full_head_dim=512,
    period=Period(6, last_is_full=True),
    needs_block=True,
)
_MODERNBERT = Family(
    theta=160_000.0,
    local_theta=1e4,
    flat_is_full=True,
    period=Period(3, offset=0, key="global_attn_every_n_layers"),
)
_PHI3 = Family(rename=(("su", "longrope"), ("yarn", "longrope")))
_QUARTER = Family(partial_rotary_factor=0.25)
_HALF_TURNED = Family(partial_rotary_factor=0.5)
_QWEN_VL = Family(theta=1e6, section_style="chunked")
_QWEN3_VL = Family(theta=5e5, head_dim=128, section_style="interleaved")
_QWEN3_NEXT = Family(partial_rotary_factor=0.25, head_dim=256)
_QWEN35 = dataclasses.replace(_QWEN3_NEXT, section_style="interleaved")
_HYBRID_NOPE = Family(unrotated=(FULL,))
_INTERLEAVED = Family(layout="interleaved")
_GLM = Family(layout="interleaved", partial_rotary_factor=0.5, head_dim=128)
_GLM_VL = Family(layout="interleaved", section_style="chunked")
_GPTJ = Family(layout="interleaved", rotary_dim=64)
_LLAMA4 = Family(layout="interleaved", theta=5e5, head_dim=128, unrotated_every=4)

_PLAIN_NAMES = """
    arcee chameleon diffllama doge dots1 eurobert falcon falcon_h1 granite
    granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe
    hyperclovax jais2 llama minicpm3 mistral moshi olmo olmo2 olmoe qwen2
    qwen2_moe qwen3_moe starcoder2
"""

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_PLAIN_NAMES.split(), _PLAIN),
    "afmoe": Family(
        head_dim=128,
        unrotated=(FULL,),
        period=Period(4, key="global_attn_every_n_layers"),
    ),
    "apertus": Family(theta=12e6, needs_block=True),
    "bamba": _HALF_TURNED,
    "bitnet": Family(theta=5e5),
    "codegen": _GPTJ,
    "cohere": Family(layout="interleaved", theta=5e5),
    "cohere2": Family(
        layout="interleaved",
        unrotated=(FULL,),
        period=Period(4, key="sliding_window_pattern"),
    ),
    "csm": Family(theta=5e5),
    "cwm": Family(theta=1e6, head_dim=128, needs_block=True),
    "deepseek_v2": _INTERLEAVED,
    "deepseek_v3": _INTERLEAVED,
    "deepseek_v32": _INTERLEAVED,
    "emu3_text_model": Family(theta=1e6),
    "ernie4_5": Family(layout="interleaved", theta=5e5, head_dim=128),
    "ernie4_5_moe": Family(layout="interleaved", theta=5e5),
    "esm": Family(rotary_kind="rotary"),
    "exaone4": _HYBRID_NOPE,
    "exaone_moe": _HYBRID_NOPE,
    "flex_olmo": Family(theta=5e5),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": dataclasses.replace(_GEMMA3, period=Period(5)),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": _HALF_TURNED,
    "glm4v_text": _GLM_VL,
    "glm_ocr_text": _GLM_VL,
    "gpt_neox": _QUARTER,
    "gpt_neox_japanese": _PLAIN,
    "gpt_oss": Family(theta=150_000.0, head_dim=64, needs_block=True),
    "gptj": _GPTJ,
    "granitemoehybrid": Family(rotary_kind="rope"),
    "gte": Family(theta=160_000.0),
    "helium": Family(layout="interleaved", theta=1e5, head_dim=128),
    "jetmoe": Family(head_dim=128),
    "jina_embeddings_v3": Family(theta=20_000.0),
    "kimi_k2": _INTERLEAVED,  # DeepSeek-V3's code under another name
    "lfm2": Family(theta=1e6),
    "lfm2_moe": Family(theta=1e6),
    "llama4_text": _LLAMA4,
    "longcat_flash": Family(layout="interleaved", theta=1e7),
    "mimo_v2_flash": Family(theta=None, head_dim=192, needs_block=True),
    "minimax": Family(theta=1e6),
    "minimax_m2": Family(theta=5e6, head_dim=128),
    "ministral": _PLAIN,
    "ministral3": Family(theta=None, head_dim=128, needs_block=True),
    "mixtral": Family(theta=1e6),
    "mllama_text_model": Family(theta=5e5),
    "modernbert": _MODERNBERT,
    "modernbert-decoder": _MODERNBERT,
    "nanochat": Family(reversed=True),
    "nemotron": _HALF_TURNED,
    "nomic_bert": Family(theta=1000.0),
    "olmo3": Family(theta=5e5, flat_is_full=True, period=Period(4)),
    "persimmon": _HALF_TURNED,
    "phi": _HALF_TURNED,
    "phi3": _PHI3,
    "phi4_multimodal": _PHI3,
    "phimoe": Family(theta=1e6),
    "qwen2_5_omni_text": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen3": Family(head_dim=128),
    "qwen3_5_moe_text": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_omni_moe_text": dataclasses.replace(_QWEN3_VL, theta=1e6, head_dim=None),
    "qwen3_vl_moe_text": dataclasses.replace(_QWEN3_VL, head_dim=None),
    "qwen3_vl_text": _QWEN3_VL,
    "recurrent_gemma": _HALF_TURNED,
    "seed_oss": Family(head_dim=128),
    "smollm3": Family(theta=2e6, unrotated_every=4),
    "solar_open": Family(theta=1e6, head_dim=128),
    "stablelm": _QUARTER,
    "vaultgemma": _GEMMA,
}


# Families whose rotation `RopeSpec` cannot describe.
REFUSED: Mapping[str, str] = {
    "deepseek_v4": "it turns the last channels of a head, and its outputs back",
    "ernie4_5_vl_moe_text": "its axes take turns along a reordered ladder",
}


def family_of(model_type: Any) -> Family:
    """Return the family of a `model_type`, or `UNKNOWN`.

    A multimodal model that keeps its language settings at the top level is looked up
    under the name of its language model, `NAME_text`, too.

    Raises:
      ValueError: when `model_type` is no string, or of a family that is refused.
    """
    if model_type is None:
        return UNKNOWN
    if not isinstance(model_type, str):
        raise ValueError(f"model_type must be a string, got {model_type!r}")
    for name in (model_type, f"{model_type}_text"):
        if name in REFUSED:
            raise ValueError(
                f"model_type {model_type!r} is not supported: {REFUSED[name]}"
            )
        if name in FAMILIES:
            return FAMILIES[name]
    return UNKNOWN
