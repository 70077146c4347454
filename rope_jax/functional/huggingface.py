"""From a checkpoint's config.json to the rotation its weights were trained with."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax

from rope_jax.functional.frequencies import Frequencies
from rope_jax.functional.frequency_bands import yarn_magnitude
from rope_jax.functional.frequency_set import ORIGINAL
from rope_jax.functional.huggingface_blocks import (
    QUERY_SCALING,
    block_of,
    nested_blocks,
)
from rope_jax.functional.huggingface_build import build_frequencies
from rope_jax.functional.huggingface_config import (
    SHARE,
    agree,
    find,
    flag,
    head_dim_of,
    layer_type_of,
    number,
    read_config,
    rotates,
    whole,
)
from rope_jax.functional.huggingface_families import FULL, SLIDING, Family, family_of

__all__ = ["RopeSpec", "rope_from_hf"]


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """The rotary encoding of one layer of a checkpoint.

    `rope(x, positions, spec.frequencies, layout=spec.layout)` rotates queries and keys
    [..., T, N, H] as the checkpoint expects, where `rotary_start` is 0.

    Attributes:
      frequencies: `Frequencies`, radians per position, and the attention factor.
      layout: "half" or "interleaved", the pairs of channels in the checkpoint's weights
        as Hugging Face holds them; None where the config does not determine it, and
        then the caller must say.
      rotary_dim: number of channels that turn, 2R.
      rotary_start: first of them in a query head. 0, except in latent attention (MLA:
        DeepSeek), whose query heads hold qk_nope_head_dim channels that never turn in
        front of the qk_rope_head_dim that do; rotate that slice.
      rope_type: the scaling after legacy names are resolved: "default", "linear",
        "dynamic", "ntk_alpha", "yarn", "longrope", "llama3" or "proportional".
      softmax_scale_factor: multiply the softmax scale by this. Other than 1 only in
        latent attention with YaRN's `mscale_all_dim`, where it is
        (0.1 * mscale_all_dim * ln(factor) + 1) ** 2.
      query_scaling_beta: b of `llama_4_scaling_beta` (Ministral 3), 0 elsewhere. Where
        it is not 0, multiply each rotated query at position p by
        1 + b * ln(1 + floor(p / query_scaling_length)); keys stay as they are.
      query_scaling_length: original context length for it in positions, or None.
      sections: M-RoPE pairs per axis (time, height, width) for `multi_axis_angles`, or
        None; with equal positions on all axes they change nothing.
      section_style: "chunked" or "interleaved", or None where the config does not
        determine it.

    >>> spec = RopeSpec(Frequencies([1.0, 0.01]), layout="half", rotary_dim=4)
    >>> spec.rotary_start, spec.softmax_scale_factor, spec.query_scaling_beta
    (0, 1.0, 0.0)

    Source: the attention classes of transformers 5.24.0; query scaling as in
    `get_llama_4_attn_scale` of its Ministral 3.
    """

    frequencies: Frequencies
    layout: str | None
    rotary_dim: int
    rotary_start: int = 0
    rope_type: str = "default"
    softmax_scale_factor: float = 1.0
    query_scaling_beta: float = 0.0
    query_scaling_length: float | None = None
    sections: tuple[int, ...] | None = None
    section_style: str | None = None


def rope_from_hf(
    config: Mapping[str, Any] | str | os.PathLike,
    *,
    layer_type: str | None = None,
    layer_index: int | None = None,
    seq_len: int | jax.Array | None = None,
) -> RopeSpec | None:
    """Read the rotary encoding of a checkpoint from its Hugging Face config.

    Configs of both generations are read: `rope_theta` and `rope_scaling` with `type` or
    `rope_type` (transformers 4), and `rope_parameters`, flat or one block per layer
    type, null for no rotation (transformers 5). A `text_config` is followed. A value
    that is given twice must agree. Unknown rope types and unknown keys about rotation
    raise; so do missing ones, except where the model type settles them.

    Args:
      config: the config as a dict, or the path of a config.json.
      layer_type: which layers are meant, where they differ: "full_attention",
        "sliding_attention", or a key of a nested `rope_parameters`.
      layer_index: index of the layer, from 0; stands in for `layer_type`, and finds the
        layers without rotation of Llama-4 and SmolLM3. Without either argument the
        result is for the layers that rotate, which must then agree.
      seq_len: length of the call in positions, cache included, for the types that
        follow it ("dynamic", "longrope"): an int, or a scalar `jax.Array`, traced or
        not. None means no longer than the original context.

    Returns:
      A `RopeSpec`, or None for a layer without rotation.

    Raises:
      ValueError: when a key is unknown, missing, malformed or contradicts another; when
        the layers differ and neither `layer_type` nor `layer_index` is given, or those
        name no layer of this model.

    >>> spec = rope_from_hf({"model_type": "llama", "head_dim": 8, "rope_theta": 1e4})
    >>> spec.frequencies.inv_freq, spec.layout, spec.rotary_dim
    (array([1.   , 0.1  , 0.01 , 0.001]), 'half', 8)

    Source: the configuration and modeling classes of transformers 5.24.0; the papers of
    the scalings are named in `rope_jax.functional.frequencies`.
    """
    config = read_config(config)
    family = family_of(config.get("model_type"))
    labels = nested_blocks(config)
    layer_type = layer_type_of(config, family, layer_type, layer_index, labels)
    if not rotates(config, family, layer_type, layer_index):
        return None
    choices = [layer_type]
    if layer_type is None:
        choices = list(labels) or ([FULL, SLIDING] if family.flat_is_full else [None])
        choices = [name for name in choices if rotates(config, family, name, None)]
    settings = {choice: _settings(config, family, choice) for choice in choices}
    settings = {choice: found for choice, found in settings.items() if found}
    if not settings:
        return None
    first = next(iter(settings.values()))
    if any(found != first for found in settings.values()):
        raise ValueError(
            "the layers differ: layer_type (or layer_index) must be given, one of "
            f"{sorted(settings)}, got None"
        )
    return _spec(config, family, first, seq_len)


def _settings(config: Mapping, family: Family, layer_type: str | None) -> dict | None:
    """Everything that the frequencies of one layer type are computed from."""
    block = block_of(config, family, layer_type)
    if block is None:
        return None
    head_dim = head_dim_of(config, family, layer_type)
    start, latent = 0, config.get("qk_rope_head_dim") is not None
    if latent and config.get("qk_nope_head_dim") is not None:
        start = whole("qk_nope_head_dim", config["qk_nope_head_dim"])
    share = agree(
        SHARE[0], block.pop("partial_rotary_factor", None), find(config, SHARE)
    )
    if share is not None and not 0 < number(SHARE[0], share) <= 1:
        raise ValueError(f"partial_rotary_factor must be in (0, 1], got {share}")
    if block["rope_type"] == "proportional":
        # The share counts pairs that turn in a ladder of the whole head.
        return block | {"dim": head_dim, "start": 0, "proportion": share}
    given = agree("rotary_dim", block.pop("rotary_dim", None), config.get("rotary_dim"))
    widths = [None if given is None else whole("rotary_dim", given)]
    if share is not None and not (latent and share == 1):
        widths.append(int((start + head_dim) * share))
    if latent:
        widths.append(head_dim)
    dim = agree("rotary_dim", *widths)
    if dim is None:
        dim = family.rotary_dim or int(head_dim * family.partial_rotary_factor)
    if dim > head_dim:
        raise ValueError(f"rotary_dim must be at most head_dim={head_dim}, got {dim}")
    return block | {"dim": dim, "start": start}


def _spec(config: Mapping, family: Family, settings: dict, seq_len: Any) -> RopeSpec:
    frequencies = build_frequencies(settings, seq_len)
    if family.reversed:
        frequencies = Frequencies(-frequencies.inv_freq, frequencies.attention_factor)
    sections, style = _sections(family, settings, frequencies.rotary_dim // 2)
    scale = 1.0
    if config.get("qk_rope_head_dim") is not None and settings["rope_type"] == "yarn":
        mscale = settings.get("mscale_all_dim") or 0.0
        scale = yarn_magnitude(settings["factor"], mscale) ** 2
    beta = number(QUERY_SCALING, settings.get(QUERY_SCALING, 0.0))
    return RopeSpec(
        frequencies=frequencies,
        layout=_layout(config, family),
        rotary_dim=frequencies.rotary_dim,
        rotary_start=settings["start"],
        rope_type=settings["rope_type"],
        softmax_scale_factor=scale,
        query_scaling_beta=beta,
        query_scaling_length=settings[ORIGINAL] if beta else None,
        sections=sections,
        section_style=style,
    )


def _layout(config: Mapping, family: Family) -> str | None:
    """Return the layout that a key states, or else that of the family."""
    name = "rope_interleave"
    stated = agree(
        name,
        flag(name, config.get(name)),
        flag("rotary_emb_interleaved", config.get("rotary_emb_interleaved")),
    )
    if stated is None:
        return family.layout
    return "interleaved" if stated else "half"


def _sections(
    family: Family, settings: dict, pairs: int
) -> tuple[tuple[int, ...] | None, str | None]:
    sections = settings.get("mrope_section")
    if sections is None:
        return None, None
    if not isinstance(sections, list | tuple):
        raise ValueError(f"mrope_section must be a list, got {sections!r}")
    sections = tuple(whole("mrope_section", section) for section in sections)
    if sum(sections) != pairs:
        raise ValueError(
            f"mrope_section must sum to the {pairs} rotary pairs, got {sections}"
        )
    name = "mrope_interleaved"
    stated = agree(
        name,
        flag(name, settings.get(name)),
        flag("interleaved", settings.get("interleaved")),
    )
    if stated is None:
        return sections, family.section_style
    style = "interleaved" if stated else "chunked"
    return sections, agree("the style of mrope_section", family.section_style, style)
