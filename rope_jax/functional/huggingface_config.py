"""The keys of a config.json that decide which layer rotates and how wide it is.

Nothing is guessed and nothing is dropped: a key about rotation that is not known
raises, and so does a value that two places give differently. The rope block itself is
read in `huggingface_blocks.py`.
"""

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

from rope_jax.functional.huggingface_families import (
    FULL,
    SLIDING,
    UNKNOWN,
    Family,
    Period,
)

Config = Mapping[str, Any]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of the config itself that speak of rotation. Any other that sounds so raises.
_TOP_LEVEL = _names("""
    rope_theta rope_scaling rope_parameters rope_local_base_freq
    global_rope_theta local_rope_theta rope_interleave rope_pct rotary_pct
    rotary_emb_base rotary_dim rotary_emb_fraction rotary_emb_interleaved
    partial_rotary_factor no_rope_layers no_rope_layer_interval qk_rope_head_dim
    qk_nope_head_dim use_rope use_rotary_pos_emb use_rotary_embedding
""")
_SOUNDS_ROTARY = re.compile(r"(^|_)(rope|rotary|mrope|xpos|yarn|ntk)")

# Switches that say whether the model rotates at all.
_SWITCHES = ("use_rope", "use_rotary_pos_emb", "use_rotary_embedding")

# Under one name, the names that configs use for it.
THETA = ("rope_theta", "rotary_emb_base")
SHARE = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

LAYER_TYPES = _names("""
    full_attention sliding_attention chunked_attention window_attention
    attention linear_attention conv mamba recurrent hybrid hybrid_sliding
    indexed_attention
""")
WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mamba", "recurrent"})


def read_config(config: Config | str | os.PathLike) -> dict[str, Any]:
    """Return the language model's config as a dict, `text_config` followed.

    Rotary keys that stand outside a `text_config` count as given inside it.
    """
    if isinstance(config, str | os.PathLike):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a dict or a path, got {config!r}")
    outer = dict(config)
    text = outer.pop("text_config", None)
    if text is None:
        _check_top_level(outer)
        return outer
    text = read_config(text) if isinstance(text, Mapping) else text
    if not isinstance(text, dict):
        raise ValueError(f"text_config must be a dict, got {text!r}")
    _check_top_level(outer)
    for key in sorted(_TOP_LEVEL & outer.keys()):
        if outer[key] is not None:
            text[key] = agree(key, text.get(key), outer[key])
    text.setdefault("model_type", outer.get("model_type"))
    return text


def _check_top_level(config: Config) -> None:
    for key, value in config.items():
        known = key in _TOP_LEVEL or not _SOUNDS_ROTARY.search(str(key))
        if not known and value is not None:
            raise ValueError(
                f"config key {key!r} is not known and may change the rotation, got "
                f"{value!r}"
            )


def agree(name: str, *values: Any) -> Any:
    """Return the one value among `values` that is not None, or raise if they differ."""
    found = None
    for value in values:
        if value is None:
            continue
        if found is not None and value != found:
            raise ValueError(f"{name} is given twice and differs: {found} and {value}")
        found = value
    return found


def number(name: str, value: Any) -> float:
    """Return `value` if it is a finite number (no bool, no string), or raise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def whole(name: str, value: Any) -> int:
    """Return `value` as a positive integer, or raise."""
    if number(name, value) != int(value) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def find(config: Config, names: Sequence[str]) -> Any:
    """Return what `config` gives under any of `names`, or None."""
    return agree(names[0], *(config.get(name) for name in names))


def flag(name: str, value: Any) -> bool | None:
    """Return a boolean or None, or raise."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def head_dim_of(config: Config, family: Family, layer_type: str | None) -> int:
    """Return the width that the rotary share is taken of: H, or MLA's rotary part."""
    if config.get("qk_rope_head_dim") is not None:
        return whole("qk_rope_head_dim", config["qk_rope_head_dim"])
    if family.full_head_dim is not None and layer_type == FULL:
        return whole(
            "global_head_dim", config.get("global_head_dim") or family.full_head_dim
        )
    if config.get("head_dim") is not None:
        return whole("head_dim", config["head_dim"])
    if family.head_dim is not None:
        return family.head_dim
    hidden, heads = find(config, _HIDDEN), find(config, _HEADS)
    if hidden is None or heads is None:
        raise ValueError(
            "head_dim is missing, and so are hidden_size and num_attention_heads to "
            f"derive it from; got {hidden} and {heads}"
        )
    hidden, heads = whole("hidden_size", hidden), whole("num_attention_heads", heads)
    if hidden % heads:
        raise ValueError(
            f"num_attention_heads must divide hidden_size, got {heads} and {hidden}"
        )
    return hidden // heads


def layer_type_of(
    config: Config,
    family: Family,
    layer_type: str | None,
    layer_index: int | None,
    labels: Collection[str],
) -> str | None:
    """Return the type of the layer asked for, checked, or None where none was asked.

    `labels` are the layer types that the rope blocks are nested by.
    """
    listed = config.get("layer_types")
    count = find(config, _LAYERS)
    if layer_index is not None:
        limit = len(listed) if listed is not None else count
        if layer_index != int(layer_index) or layer_index < 0:
            raise ValueError(f"layer_index must be from 0 up, got {layer_index}")
        if limit is not None and layer_index >= limit:
            raise ValueError(f"layer_index must be below {limit}, got {layer_index}")
        at_index = None
        if listed is not None:
            at_index = listed[layer_index]
        elif family.period is not None:
            at_index = _in_period(config, family.period, layer_index, count)
        layer_type = agree("layer_type", at_index, layer_type)
    if layer_type is not None:
        known = set(LAYER_TYPES if listed is None else listed) | set(labels)
        if layer_type not in known:
            raise ValueError(
                f"layer_type must be one of {sorted(known)}, got {layer_type!r}"
            )
    return layer_type


def _in_period(
    config: Config, period: Period, layer_index: int, count: int | None
) -> str:
    every = config.get(period.key) if period.key else None
    every = period.default if every is None else whole(period.key, every)
    if period.last_is_full and count is not None and layer_index == count - 1:
        return FULL
    return SLIDING if (layer_index + period.offset) % every else FULL


def rotates(
    config: Config, family: Family, layer_type: str | None, layer_index: int | None
) -> bool:
    """Say whether the layer asked for rotates at all, whatever its frequencies."""
    if not _rotary_kind(config, family) or flag("alibi", config.get("alibi")):
        return False
    if any(flag(name, config.get(name)) is False for name in _SWITCHES):
        return False
    if layer_type in WITHOUT_ATTENTION:
        return False
    if layer_type in family.unrotated and config.get("sliding_window", 1) is not None:
        return False
    return layer_index is None or _listed_to_rotate(config, family, layer_index)


def _rotary_kind(config: Config, family: Family) -> bool:
    """Read `position_embedding_type`, which most files carry without a meaning.

    Families in the table either rotate by it or do not look at it (ModernBERT's files
    say "absolute"). For an unknown family it counts.
    """
    kind = config.get("position_embedding_type")
    if family.rotary_kind is not None:
        return kind == family.rotary_kind
    rotary = kind is None or str(kind).startswith(("rope", "rotary"))
    if rotary or family is not UNKNOWN:
        return True
    given = sorted(key for key in _TOP_LEVEL if config.get(key) is not None)
    if given:
        raise ValueError(
            f"position_embedding_type is {kind!r}, which contradicts {given}"
        )
    return False


def _listed_to_rotate(config: Config, family: Family, layer_index: int) -> bool:
    """Read `no_rope_layers`, in which 1 means that the layer does rotate."""
    listed = config.get("no_rope_layers")
    if listed:
        if layer_index >= len(listed):
            raise ValueError(
                f"no_rope_layers has {len(listed)} entries, got layer_index "
                f"{layer_index}"
            )
        return bool(listed[layer_index])
    every = config.get("no_rope_layer_interval")
    every = family.unrotated_every if every is None else every
    if every is None:
        return True
    return (layer_index + 1) % whole("no_rope_layer_interval", every) != 0
