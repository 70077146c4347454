"""Frequencies that depend on the length of the call.

Letters as in `frequencies`: d rotary width, i a pair, f_i = theta ** (-2i / d) its
plain inverse frequency, s the extension `factor`, L0 the original context length in
positions. A length that is an int gives float64 frequencies; a `jax.Array` length,
traced or not, gives float32 ones without recompiling when it changes.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional.frequency_set import (
    ORIGINAL,
    Frequencies,
    check_number,
    check_width,
    ladder,
)


def _check_length(seq_len: int | jax.Array) -> int | float | jax.Array:
    """Return a static length as a number and a JAX scalar as it is."""
    if not isinstance(seq_len, jax.Array):
        return check_number("seq_len", seq_len, at_least=1)
    if seq_len.ndim:
        raise ValueError(f"seq_len must be a scalar, got shape {seq_len.shape}")
    return seq_len


def dynamic_ntk(
    dim: int,
    *,
    theta: float = 10_000.0,
    factor: float,
    max_position_embeddings: int,
    seq_len: int | jax.Array,
) -> Frequencies:
    """Return NTK-aware frequencies whose base follows the length of this call.

    With L = max(seq_len, max_position_embeddings) and
    m = s * L / max_position_embeddings - (s - 1):
    theta' = theta * m ** (d / (d - 2)); f'_i = theta' ** (-2i / d). Up to the original
    length the frequencies are the plain ones.

    There is no state: the result depends on the arguments only. Keys that were cached
    at another length can be moved with `rerotate`.

    Args:
      dim: rotary width d, even and at least 4.
      theta: base of the ladder, greater than 0.
      factor: extension factor s, at least 1.
      max_position_embeddings: the length the model was trained at, in positions.
      seq_len: length of this call in positions, cache included. An int gives exact
        float64 frequencies; a `jax.Array` scalar, traced or not, gives float32 ones
        and needs no recompilation when it changes.

    Returns:
      `Frequencies` with inv_freq [dim/2], radians per position: float64 on the host,
      or a float32 `jax.Array` where `seq_len` is a `jax.Array`.

    Raises:
      ValueError: when `factor` is below 1, `dim` is odd or below 4, or a length or
        `theta` is not positive.

    >>> dynamic_ntk(4, factor=2, max_position_embeddings=100, seq_len=200).inv_freq
    array([1.        , 0.00333333])

    Source: emozilla 2023, "Dynamically Scaled RoPE"; Peng et al. 2023, "YaRN"
    (arXiv 2309.00071), section 3.3.
    """
    dim = check_width("dim", dim)
    check_number("dim", dim, at_least=4)
    theta = check_number("theta", theta, above=0)
    factor = check_number("factor", factor, at_least=1)
    trained = check_number(
        "max_position_embeddings", max_position_embeddings, at_least=1
    )
    seq_len = _check_length(seq_len)
    if isinstance(seq_len, jax.Array):
        length = jnp.maximum(seq_len.astype(jnp.float32), trained)
        multiplier = factor * (length / trained) - (factor - 1)
        # theta' ** (-2i/d) = f_i * m ** (-2i / (d - 2)): the part that is known on the
        # host stays float64 until the last product.
        exponent = jnp.asarray(-np.arange(0, dim, 2) / (dim - 2), jnp.float32)
        stretch = jnp.exp(exponent * jnp.log(multiplier))
        return Frequencies(jnp.asarray(ladder(dim, theta), jnp.float32) * stretch)
    multiplier = factor * max(seq_len, trained) / trained - (factor - 1)
    return Frequencies(ladder(dim, theta * multiplier ** (dim / (dim - 2))))


def longrope(
    dim: int,
    *,
    theta: float = 10_000.0,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    max_position_embeddings: int | None = None,
    factor: float | None = None,
    attention_factor: float | None = None,
    seq_len: int | jax.Array | None = None,
) -> Frequencies:
    """Return LongRoPE frequencies: a searched divisor for each pair, by length.

    f'_i = f_i / lambda_i, where lambda is `long_factor` when seq_len > L0 (strictly)
    and `short_factor` otherwise. The attention factor is the same for both:
    `attention_factor` verbatim where given, else sqrt(1 + ln s / ln L0), 1 for s = 1,
    with s = `factor` or max_position_embeddings / L0.

    Args:
      dim: rotary width d, even.
      theta: base of the ladder, greater than 0.
      short_factor: dim/2 divisors, each greater than 0, for lengths up to L0.
      long_factor: dim/2 divisors, each greater than 0, for longer ones.
      original_max_position_embeddings: original context length L0 in positions.
      max_position_embeddings: extended context length in positions, at least L0.
      factor: extension factor s, at least 1, where it is not given by the lengths.
      attention_factor: explicit factor on cosine and sine.
      seq_len: length of this call in positions, cache included. None chooses
        `short_factor`. An int gives exact float64 frequencies; a `jax.Array` scalar,
        traced or not, gives float32 ones and needs no recompilation when it changes.

    Returns:
      `Frequencies` with inv_freq [dim/2], radians per position: float64 on the host,
      or a float32 `jax.Array` where `seq_len` is a `jax.Array`.

    Raises:
      ValueError: when a list has not dim/2 positive entries; when `factor` is below 1
        or contradicts the lengths; when neither `factor`, `max_position_embeddings` nor
        `attention_factor` is given; or as for `default`.

    >>> options = dict(short_factor=[1, 1], long_factor=[1, 4], factor=4,
    ...                original_max_position_embeddings=4096)
    >>> longrope(4, seq_len=4096, **options).inv_freq
    array([1.  , 0.01])
    >>> longrope(4, seq_len=4097, **options).inv_freq
    array([1.    , 0.0025])

    Source: Ding et al. 2024, "LongRoPE" (arXiv 2402.13753), section 3; the attention
    factor as in github.com/microsoft/LongRoPE and the Phi-3 checkpoints.
    """
    plain = ladder(dim, theta)
    length = check_number(ORIGINAL, original_max_position_embeddings, at_least=1)
    short = _divisors("short_factor", short_factor, plain)
    long = _divisors("long_factor", long_factor, plain)
    if attention_factor is None:
        extension = _extension(factor, max_position_embeddings, length)
        attention_factor = 1.0
        if extension > 1:
            check_number(ORIGINAL, length, above=1)
            attention_factor = math.sqrt(1 + math.log(extension) / math.log(length))
    elif factor is not None or max_position_embeddings is not None:
        _extension(factor, max_position_embeddings, length)
    if seq_len is None:
        return Frequencies(plain / short, attention_factor)
    seq_len = _check_length(seq_len)
    if isinstance(seq_len, jax.Array):
        inv_freq = jnp.where(
            seq_len > length,
            jnp.asarray(plain / long, jnp.float32),
            jnp.asarray(plain / short, jnp.float32),
        )
        return Frequencies(inv_freq, attention_factor)
    return Frequencies(plain / (long if seq_len > length else short), attention_factor)


def _divisors(name: str, values: Sequence[float], plain: np.ndarray) -> np.ndarray:
    divisors = np.asarray(values, dtype=np.float64)
    if divisors.shape != plain.shape:
        raise ValueError(
            f"{name} must have dim/2 = {plain.size} entries, got shape {divisors.shape}"
        )
    if not (divisors > 0).all():
        raise ValueError(f"{name} must be greater than 0, got {values}")
    return divisors


def _extension(
    factor: float | None, max_position_embeddings: int | None, length: float
) -> float:
    """Return the extension s from either source, and raise where they disagree."""
    ratio = None
    if max_position_embeddings is not None:
        ratio = (
            check_number(
                "max_position_embeddings", max_position_embeddings, at_least=length
            )
            / length
        )
    if factor is None:
        if ratio is None:
            raise ValueError(
                "longrope needs factor, max_position_embeddings or attention_factor, "
                "got None for all three"
            )
        return ratio
    factor = check_number("factor", factor, at_least=1)
    if ratio is not None and not math.isclose(factor, ratio, rel_tol=1e-6):
        raise ValueError(
            f"factor must agree with max_position_embeddings / {ORIGINAL} = {ratio}, "
            f"got {factor}"
        )
    return factor
