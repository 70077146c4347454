"""The next token from logits: pure functions, one key for each draw."""

import dataclasses
import math

import jax
import jax.numpy as jnp

# Float32 probabilities that meet a limit exactly may come out this much short of it.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The default is the model's own distribution.

    The order is that of Hugging Face transformers: the temperature, then `top_k`, then
    `top_p` of what is left, then `min_p`. Equal logits rank by their index, lower
    first. The most likely token is always kept.

    Attributes:
      temperature: the logits are divided by it; 0 takes the most likely token.
      top_k: keep that many of the most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose probabilities reach it; 1 keeps
        all.
      min_p: keep the tokens that are at least this times as likely as the most likely.

    Raises:
      ValueError: a value is out of its range or not finite.

    References:
      Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (arXiv
      1904.09751), for top_p; Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling"
      (arXiv 2407.01082).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        ranges = (
            ("temperature", 0.0 <= self.temperature < math.inf, "at least 0, finite"),
            ("top_k", type(self.top_k) is int and self.top_k >= 0, "an int, 0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
        )
        for name, fits, valid in ranges:
            if not fits:
                raise ValueError(f"{name} must be {valid}, got {getattr(self, name)}")


def next_token(key: jax.Array, logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Draw a token for each row.

    Args:
      key: a JAX random key, used once; each row draws on its own. At temperature 0 it
        is not looked at.
      logits: `[..., V]`.
      sampling: how.

    Returns:
      int32 `[...]`.

    Example:
      >>> logits = jnp.log(jnp.array([0.1, 0.6, 0.3]))
      >>> int(next_token(jax.random.key(0), logits, Sampling(temperature=0)))
      1
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = keep_likely(logits, sampling)
    return jax.random.categorical(key, kept).astype(jnp.int32)


def keep_likely(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits over the temperature, -inf for what the limits leave out.

    Args:
      logits: `[..., V]`.
      sampling: its temperature must be above 0.

    Returns:
      float32 `[..., V]`, the largest 0: the softmax of it is what is drawn from.

    Example:
      >>> logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
      >>> kept = jax.nn.softmax(keep_likely(logits, Sampling(top_p=0.8)))
      >>> [round(float(chance), 4) for chance in kept]
      [0.4444, 0.3333, 0.2222, 0.0]
    """
    logits = logits.astype(jnp.float32)
    gap = logits - logits.max(axis=-1, keepdims=True)
    # A tiny temperature divides by what float32 rounds to 0: still 0 or -inf.
    gap = jnp.where(gap == 0, 0.0, gap / sampling.temperature)
    if sampling.top_k or sampling.top_p < 1:
        order = jnp.argsort(-gap, axis=-1, stable=True)
        ranked = jnp.take_along_axis(gap, order, axis=-1)
        ranked = _first_ranks(ranked, sampling)
        gap = jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
    if sampling.min_p > 0:
        gap = jnp.where(gap < math.log(sampling.min_p) - _ROUNDING, -jnp.inf, gap)
    return gap


def _first_ranks(ranked, sampling):
    """The limits top_k and top_p on logits in descending order."""
    rank = jnp.arange(ranked.shape[-1]).reshape((1,) * (ranked.ndim - 1) + (-1,))
    if sampling.top_k:
        ranked = jnp.where(rank < sampling.top_k, ranked, -jnp.inf)
    if sampling.top_p < 1:
        likely = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(likely, axis=-1) - likely
        short = (rank == 0) | (before < sampling.top_p - _ROUNDING)
        ranked = jnp.where(short, ranked, -jnp.inf)
    return ranked
