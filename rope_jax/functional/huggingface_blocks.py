"""The rope block of a config.json: its type, its keys, and what other keys add to it.

A block is `rope_scaling` (transformers before version 5) or `rope_parameters` (from
version 5 on), flat or one per layer type. Here it is checked and brought into one form;
`huggingface.py` computes frequencies from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rope_jax.functional.frequency_set import ORIGINAL
from rope_jax.functional.huggingface_config import (
    LAYER_TYPES,
    THETA,
    Config,
    agree,
    find,
    number,
)
from rope_jax.functional.huggingface_families import SLIDING, Family

# Keys of a rope block that touch nothing: `finetuned` is a remark.
IGNORED_KEYS = frozenset({"finetuned"})
# Scales the queries of Ministral 3 by position; it needs the original length.
QUERY_SCALING = "llama_4_scaling_beta"
# HunYuan's blocks carry a whole YaRN parameter set beside `alpha`, which alone acts.
IGNORED_BESIDE_ALPHA = frozenset(
    {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
)

_SHARED_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "rotary_dim",
        "mrope_section",
        "mrope_interleaved",
        "interleaved",
        "max_position_embeddings",
        QUERY_SCALING,
    }
)
# rope type -> keys it must have, keys it may have.
ROPE_TYPES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(required.split()), frozenset(optional.split()))
    for name, required, optional in (
        ("default", "", ""),
        ("linear", "factor", ""),
        ("dynamic", "factor", ""),
        ("ntk_alpha", "alpha", ""),
        (
            "yarn",
            "factor original_max_position_embeddings",
            "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
        ),
        (
            "longrope",
            "short_factor long_factor original_max_position_embeddings",
            "factor attention_factor short_mscale long_mscale",
        ),
        (
            "llama3",
            "rope_theta factor low_freq_factor high_freq_factor "
            "original_max_position_embeddings",
            "",
        ),
        ("proportional", "rope_theta", "factor"),
    )
}
_BLOCK_KEYS = frozenset().union(
    _SHARED_KEYS,
    IGNORED_KEYS,
    IGNORED_BESIDE_ALPHA,
    {"alpha"},
    *sum(ROPE_TYPES.values(), ()),
)
_RENAMED = {"su": "longrope", "mrope": "default"}


def nested_blocks(config: Config) -> dict[str, dict[str, Any] | None]:
    """Return the rope block of each layer type, or {} where there is one block for all.

    Keys beside the nested blocks, which transformers can leave there, count as given in
    each of them.
    """
    for name in ("rope_parameters", "rope_scaling"):
        block = config.get(name)
        if not isinstance(block, Mapping):
            continue
        labels = [key for key, value in block.items() if isinstance(value, Mapping)]
        if labels or LAYER_TYPES & block.keys():
            null = [key for key, value in block.items() if value is None]
            labels += [key for key in null if key not in _BLOCK_KEYS]
            return _spread(name, block, labels)
    return {}


def _spread(
    name: str, block: Config, labels: Sequence[str]
) -> dict[str, dict[str, Any] | None]:
    """Join what stands beside nested blocks into each of them."""
    beside = {key: value for key, value in block.items() if key not in labels}
    unknown = sorted(beside.keys() - _BLOCK_KEYS)
    if unknown:
        raise ValueError(f"{name} mixes the layer types {labels} with {unknown}")
    for key in ("rope_type", "type"):
        if beside.get(key) == "default":
            del beside[key]
    return {
        label: None if block[label] is None else _merge([block[label], beside])
        for label in labels
    }


def block_of(
    config: Config, family: Family, layer_type: str | None
) -> dict[str, Any] | None:
    """Return the checked rope block of one layer type, every key in its v5 name.

    None where the config says that these layers do not rotate. `rope_type` is always
    there, `rope_theta` too; keys that are null in the file are absent.
    """
    nested = nested_blocks(config)
    blocks = [config.get("rope_scaling"), config.get("rope_parameters")]
    if nested:
        if sum(block is not None for block in blocks) > 1:
            raise ValueError("rope_parameters is nested, but rope_scaling is given too")
        if layer_type not in nested:
            raise ValueError(
                f"rope_parameters must have the layer type {layer_type!r}, got "
                f"{sorted(nested)}"
            )
        if nested[layer_type] is None:
            return None
        blocks = [nested[layer_type]]
    elif "rope_parameters" in config and blocks == [None, None]:
        base = find(config, THETA)
        if base is None:
            return None
        raise ValueError(
            f"rope_parameters is null (no rotation), but rope_theta is {base}"
        )
    plain = family.flat_is_full and not nested and layer_type == SLIDING
    merged = _merge(blocks)
    if family.needs_block and not merged:
        raise ValueError(
            "rope_parameters is missing: this model type is scaled by default"
        )
    return _checked(config, family, merged, layer_type, plain=plain)


def _merge(blocks: Sequence[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for block in blocks:
        if block is None:
            continue
        if not isinstance(block, Mapping):
            raise ValueError(f"rope_scaling must be a dict or null, got {block!r}")
        for key, value in block.items():
            merged[key] = agree(key, merged.get(key), value)
    return merged


def _checked(
    config: Config,
    family: Family,
    block: dict[str, Any],
    layer_type: str | None,
    *,
    plain: bool,
) -> dict[str, Any]:
    """Settle the type and the base of a block, and check its keys against the type.

    `plain` layers take only their base from the config (the sliding layers of
    Gemma-3, Olmo-3 and ModernBERT).
    """
    rope_type = _rope_type(family, block)
    stretched = rope_type == "yarn" and "factor" in block and block["factor"] is None
    block = {key: value for key, value in block.items() if value is not None}
    block.pop("type", None)
    if rope_type == "dynamic" and "alpha" in block:
        rope_type = "ntk_alpha"
    required, optional = ROPE_TYPES[rope_type]
    if ORIGINAL in required:
        given = agree(ORIGINAL, block.get(ORIGINAL), config.get(ORIGINAL))
        block.update({} if given is None else {ORIGINAL: given})
    longest = agree(
        "max_position_embeddings",
        block.pop("max_position_embeddings", None),
        config.get("max_position_embeddings"),
    )
    if rope_type == "dynamic":  # here the longest position is the original length
        agree(ORIGINAL, longest, config.get(ORIGINAL))
    if number(QUERY_SCALING, block.get(QUERY_SCALING, 0)) and ORIGINAL not in block:
        raise ValueError(f"{QUERY_SCALING} needs {ORIGINAL}, got {block}")
    if stretched and longest is not None and ORIGINAL in block:
        block["factor"] = longest / block[ORIGINAL]
    base = _theta(config, family, block, rope_type, layer_type)
    if base is not None:
        block["rope_theta"] = number("rope_theta", base)
    missing = sorted((required | {"rope_theta"}) - block.keys())
    if missing:
        raise ValueError(f"rope type {rope_type!r} needs {missing}, got {block}")
    ignored = IGNORED_KEYS | (
        IGNORED_BESIDE_ALPHA if rope_type == "ntk_alpha" else frozenset()
    )
    unknown = sorted(block.keys() - required - optional - _SHARED_KEYS - ignored)
    if unknown:
        raise ValueError(f"rope type {rope_type!r} does not know {unknown}")
    if plain:
        block = {"rope_theta": block["rope_theta"]}
        rope_type = "default"
    block = {key: value for key, value in block.items() if key not in ignored}
    return {**block, "rope_type": rope_type, "max_position_embeddings": longest}


def _rope_type(family: Family, block: Config) -> str:
    named = [block.get("rope_type"), block.get("type")]
    for name in named:
        if name is not None and not isinstance(name, str):
            raise ValueError(f"rope_type must be a string, got {name!r}")
    if "mrope" in named and block.get("mrope_section") is None:
        raise ValueError(f"rope type 'mrope' needs mrope_section, got {dict(block)}")
    # A file that transformers wrote itself can say "mrope" and "default" at once.
    named = [_RENAMED.get(name, name) for name in named]
    rope_type = agree("rope_type", *(dict(family.rename).get(n, n) for n in named))
    if rope_type is None:
        extra = sorted(block.keys() - _SHARED_KEYS - IGNORED_KEYS)
        if extra:
            raise ValueError(f"rope_type is missing beside {extra}, got {dict(block)}")
        return "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type must be one of {sorted(ROPE_TYPES)}, got {rope_type!r}"
        )
    return rope_type


def _theta(
    config: Config,
    family: Family,
    block: Config,
    rope_type: str,
    layer_type: str | None,
) -> float | None:
    """Return the rotary base of a layer type, all places that give it agreeing."""
    given, names = [block.get("rope_theta")], (*THETA, "global_rope_theta")
    local = layer_type == SLIDING and family.local_theta is not None
    if local:
        names = ("rope_local_base_freq", "local_rope_theta")
        # A flat block is about the other layers, and so is its base.
        given = given if nested_blocks(config) else []
    base = agree("rope_theta", *given, *(config.get(name) for name in names))
    if base is not None:
        return base
    if local:
        return family.local_theta
    return None if "rope_theta" in ROPE_TYPES[rope_type][0] else family.theta
