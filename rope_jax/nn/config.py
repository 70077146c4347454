"""The decoder's architecture as data, and the check of its sizes and names.

It is filled by configs and flags, so it stays mutable; modules copy plain values out.
"""

from dataclasses import dataclass, field

from rope_jax.functional.attention import IMPLEMENTATIONS
from rope_jax.nn.absolute import LearnedOptions, SinusoidalOptions
from rope_jax.nn.biases import FireOptions, KerpleOptions, SandwichOptions, T5Options
from rope_jax.nn.contextual import CopeOptions, DapeOptions, ShawOptions
from rope_jax.nn.encodings import ENCODINGS
from rope_jax.nn.linear import LinearOptions, check_linear
from rope_jax.nn.rotations import (
    PropeOptions,
    RandomRopeOptions,
    RopeOptions,
    XposOptions,
)

# What the backward pass of a layer computes again: nothing; all but the products with
# weights, so attention, norms and activations; or all of it, from the layer's input.
REMAT = ("none", "dots", "full")


@dataclass
class DecoderConfig:
    """The architecture. Sizes of 0 are derived: see each field."""

    encoding: str = "rope"
    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 0  # 0: as many as num_heads
    head_dim: int = 32
    mlp: str = "gated"  # "gated" (SwiGLU) or "plain" (GELU)
    mlp_dim: int = 0  # 0: 4 model_dim plain, 8/3 model_dim gated, to multiples of 64
    qk_norm: bool = False
    dropout: float = 0.0
    tied_output: bool = False
    vocab_size: int = 256
    dtype: str = "float32"  # compute; parameters are float32
    remat: str = "none"  # what the backward pass computes again: see REMAT
    # Layers in one turn of the loop; 0: all of up to 8 on a CPU, else 1.
    unroll: int = 0
    attention: str = "softmax"  # or "linear": a kernel of features, constant state
    attention_implementation: str = "auto"  # of rope_jax.attention
    window: int = 0  # tokens attended to, the query's own included; 0 is all
    temperature: str = "none"  # "logn" sharpens the scores past temperature_length
    temperature_length: int = 0  # 0 lets the experiment use its training length
    linear: LinearOptions = field(default_factory=LinearOptions)
    sinusoidal: SinusoidalOptions = field(default_factory=SinusoidalOptions)
    learned: LearnedOptions = field(default_factory=LearnedOptions)
    rope: RopeOptions = field(default_factory=RopeOptions)
    prope: PropeOptions = field(default_factory=PropeOptions)
    xpos: XposOptions = field(default_factory=XposOptions)
    random_rope: RandomRopeOptions = field(default_factory=RandomRopeOptions)
    t5: T5Options = field(default_factory=T5Options)
    kerple: KerpleOptions = field(default_factory=KerpleOptions)
    fire: FireOptions = field(default_factory=FireOptions)
    sandwich: SandwichOptions = field(default_factory=SandwichOptions)
    shaw: ShawOptions = field(default_factory=ShawOptions)
    cope: CopeOptions = field(default_factory=CopeOptions)
    dape: DapeOptions = field(default_factory=DapeOptions)


def mlp_width(config: DecoderConfig) -> int:
    """Channels within a feed-forward layer.

    >>> mlp_width(DecoderConfig()), mlp_width(DecoderConfig(mlp="plain"))
    (384, 512)
    """
    dim, gated = config.model_dim, config.mlp == "gated"
    return config.mlp_dim or (-(-8 * dim // 192) * 64 if gated else 4 * dim)


def check_config(config: DecoderConfig) -> None:
    """Raise ValueError, naming the field, for a size or name that cannot work."""
    for name in ("num_layers", "model_dim", "num_heads", "head_dim", "vocab_size"):
        if getattr(config, name) < 1:
            raise ValueError(
                f"model.{name} must be at least 1, got {getattr(config, name)}"
            )
    kv_heads = config.num_kv_heads or config.num_heads
    if kv_heads < 0 or config.num_heads % kv_heads:
        raise ValueError(
            "model.num_kv_heads must divide model.num_heads, got "
            f"{config.num_kv_heads} and {config.num_heads}"
        )
    for name in ("mlp_dim", "unroll", "window"):
        if getattr(config, name) < 0:
            raise ValueError(
                f"model.{name} must not be negative, got {getattr(config, name)}"
            )
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"model.dropout must be in [0, 1), got {config.dropout}")
    choices = {
        "encoding": tuple(ENCODINGS),
        "mlp": ("gated", "plain"),
        "dtype": ("float32", "bfloat16"),
        "remat": REMAT,
        "attention": ("softmax", "linear"),
        "attention_implementation": ("auto", *IMPLEMENTATIONS),
        "temperature": ("none", "logn"),
    }
    for name, valid in choices.items():
        if getattr(config, name) not in valid:
            raise ValueError(
                f"model.{name} must be one of {', '.join(valid)}; got "
                f"{getattr(config, name)!r}"
            )
    if config.attention == "linear":
        check_linear(config)
    _check_temperature(config)


def _check_temperature(config: DecoderConfig) -> None:
    length = config.temperature_length
    if config.temperature == "none":
        if length:
            raise ValueError(
                "model.temperature_length needs model.temperature logn, got "
                f"{length} with 'none'"
            )
        return
    if length < 2:
        raise ValueError(f"model.temperature_length must be at least 2, got {length}")
    if config.attention == "linear":
        raise ValueError(
            "model.temperature must be 'none' for model.attention 'linear', which has "
            "no scores to sharpen; got 'logn'"
        )
    if ENCODINGS[config.encoding].own_positions:
        raise ValueError(
            "model.temperature 'logn' counts the tokens by their positions, and "
            f"encoding {config.encoding!r} makes positions of its own"
        )
