"""From a checked rope block to frequencies: one builder per rope type."""

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional import frequencies as builders
from rope_jax.functional.frequencies import Frequencies
from rope_jax.functional.frequency_set import ORIGINAL
from rope_jax.functional.huggingface_config import flag, number, whole


def build_frequencies(settings: dict, seq_len: int | jax.Array | None) -> Frequencies:
    """Call the builder of the rope type with the keys of its block."""
    rope_type, dim = settings["rope_type"], settings["dim"]
    theta = settings["rope_theta"]
    longest = settings["max_position_embeddings"]
    if rope_type == "default":
        return builders.default(dim, theta=theta)
    if rope_type == "linear":
        return builders.linear(dim, theta=theta, **_numbers(settings, "factor"))
    if rope_type == "ntk_alpha":
        return builders.ntk(dim, theta=theta, factor=number("alpha", settings["alpha"]))
    if rope_type == "dynamic":
        if longest is None:
            raise ValueError("max_position_embeddings is missing for rope type dynamic")
        return builders.dynamic_ntk(
            dim,
            theta=theta,
            max_position_embeddings=whole("max_position_embeddings", longest),
            seq_len=longest if seq_len is None else seq_len,
            **_numbers(settings, "factor"),
        )
    if rope_type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
        return builders.llama3(dim, theta=theta, **_numbers(settings, *names))
    if rope_type == "proportional":
        share = settings["proportion"]
        return builders.proportional(
            dim,
            theta=theta,
            proportion=1.0 if share is None else share,
            **_numbers(settings, "factor"),
        )
    if rope_type == "yarn":
        truncate = flag("truncate", settings.get("truncate"))
        names = ("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow")
        names += ("mscale", "mscale_all_dim")
        return builders.yarn(
            dim,
            theta=theta,
            truncate=True if truncate is None else truncate,
            **_numbers(settings, *names),
        )
    return _longrope(dim, theta, settings, seq_len)


def _numbers(settings: dict, *names: str) -> dict[str, float]:
    """Pick the settings that are there, each checked to be a number."""
    return {name: number(name, settings[name]) for name in names if name in settings}


def _longrope(
    dim: int, theta: float, settings: dict, seq_len: int | jax.Array | None
) -> Frequencies:
    """Build LongRoPE frequencies; Phi-3.5-MoE names a factor for either length."""
    options = _numbers(settings, "factor", "attention_factor", ORIGINAL)
    mscales = _numbers(settings, "short_mscale", "long_mscale")
    if mscales:
        if len(mscales) == 1 or "attention_factor" in options:
            raise ValueError(
                "short_mscale and long_mscale go together, without attention_factor, "
                f"got {mscales | options}"
            )
        options["attention_factor"] = 1.0
    if "factor" not in options and "attention_factor" not in options:
        options["max_position_embeddings"] = settings["max_position_embeddings"]
    frequencies = builders.longrope(
        dim,
        theta=theta,
        short_factor=_factor_list(settings, "short_factor"),
        long_factor=_factor_list(settings, "long_factor"),
        seq_len=seq_len,
        **options,
    )
    if not mscales:
        return frequencies
    short, long = mscales["short_mscale"], mscales["long_mscale"]
    if isinstance(seq_len, jax.Array):
        mscale = jnp.where(seq_len > options[ORIGINAL], long, short)
    else:
        mscale = long if (seq_len or 0) > options[ORIGINAL] else short
    return Frequencies(frequencies.inv_freq, mscale)


def _factor_list(settings: dict, name: str) -> np.ndarray:
    values = settings[name]
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} must be a list of numbers, got {values!r}")
    return np.array([number(name, value) for value in values], dtype=np.float64)
