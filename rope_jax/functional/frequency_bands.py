"""Frequencies of models whose context was extended band by band.

Letters as in `frequencies`: d rotary width, i a pair, f_i = theta ** (-2i / d) its
plain inverse frequency, s the extension `factor`, L0 the original context length in
positions. All formulas are evaluated in float64 on the host.
"""

import math

import numpy as np

from rope_jax.functional.frequency_set import (
    ORIGINAL,
    Frequencies,
    check_number,
    check_width,
    ladder,
)


def _ramp(low: float, high: float, pairs: int) -> np.ndarray:
    """Return a line over the pairs that is 0 up to `low` and 1 from `high` on."""
    if low == high:
        high += 0.001
    return np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)


def _band(
    fast: float, slow: float, *, dim: int, theta: float, length: float, truncate: bool
) -> np.ndarray:
    """Return the ramp [R] from pairs of more than `fast` turns in L0 to under `slow`.

    A pair with d ln(L0 / (2 pi n)) / (2 ln theta) = i makes n turns over the length.
    """

    def pair_with(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(fast), pair_with(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper limit is d - 1 and not R - 1, as in the original code.
    return _ramp(max(low, 0), min(high, dim - 1), dim // 2)


def _check_turns(names: tuple[str, str], fast: float, slow: float) -> None:
    check_number(names[0], fast, above=0)
    check_number(names[1], slow, above=0)
    if fast < slow:
        raise ValueError(
            f"{names[0]} must not be below {names[1]}, got {names[0]}={fast} and "
            f"{names[1]}={slow}"
        )


def ntk_by_parts(
    dim: int,
    *,
    theta: float = 10_000.0,
    factor: float,
    original_max_position_embeddings: int,
    beta: tuple[float, float] = (1.25, 0.75),
    gamma: tuple[float, float] = (16.0, 2.0),
    ntk_factor: float = 1.0,
    extrapolation_factor: float = 1.0,
) -> Frequencies:
    """Return NTK-by-parts frequencies: plain, NTK-aware and interpolated in bands.

    With ramp_b over the pairs that make beta[0] .. beta[1] turns within L0, limits
    rounded outward, and ramp_g likewise over gamma[0] .. gamma[1]:

    * m1 = (1 - ramp_b) * ntk_factor; g = (f / s) (1 - m1) + f_ntk m1
    * m2 = (1 - ramp_g) * extrapolation_factor; f' = g (1 - m2) + f m2

    Args:
      dim: rotary width d, even and at least 4.
      theta: base of the ladder, greater than 1.
      factor: extension factor s, at least 1.
      original_max_position_embeddings: original context length L0 in positions.
      beta: (fast, slow) turns between which NTK-aware becomes interpolated.
      gamma: (fast, slow) turns between which plain becomes the above.
      ntk_factor: share of the NTK-aware part, 0 to 1.
      extrapolation_factor: share of the plain part, 0 to 1.

    Returns:
      `Frequencies` with float64 inv_freq [dim/2], radians per position.

    Raises:
      ValueError: when `factor` is below 1, a fast limit is below its slow one, a share
        is outside 0..1, `dim` is odd or below 4, or `theta` or L0 is out of range.

    >>> ntk_by_parts(8, factor=4, original_max_position_embeddings=2048).inv_freq
    array([1.00000000e+00, 1.00000000e-01, 6.98425131e-03, 2.50000000e-04])

    Source: bloc97 2023, "NTK-by-parts" (github.com/jquesnelle/yarn,
    LlamaPartNTKScaledRotaryEmbedding); Peng et al. 2023, "YaRN" (arXiv 2309.00071),
    section 3.2.
    """
    dim = check_width("dim", dim)
    check_number("dim", dim, at_least=4)
    theta = check_number("theta", theta, above=1)
    factor = check_number("factor", factor, at_least=1)
    length = check_number(ORIGINAL, original_max_position_embeddings, at_least=1)
    _check_turns(("beta[0]", "beta[1]"), *beta)
    _check_turns(("gamma[0]", "gamma[1]"), *gamma)
    for name, share in [
        ("ntk_factor", ntk_factor),
        ("extrapolation_factor", extrapolation_factor),
    ]:
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {share}")
    band = {"dim": dim, "theta": theta, "length": length, "truncate": True}
    plain = ladder(dim, theta)
    aware = ladder(dim, theta * factor ** (dim / (dim - 2)))
    aware_share = (1 - _band(*beta, **band)) * ntk_factor
    plain_share = (1 - _band(*gamma, **band)) * extrapolation_factor
    slowed = plain / factor * (1 - aware_share) + aware * aware_share
    return Frequencies(slowed * (1 - plain_share) + plain * plain_share)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the magnitude of YaRN, g(s, m) = 0.1 m ln s + 1, and 1 for s <= 1.

    Args:
      factor: extension factor s.
      mscale: weight m; 1 in the paper, a key of DeepSeek's configs.

    Returns:
      The factor on cosine and sine, without unit.

    Raises:
      ValueError: when an argument is not finite.

    >>> round(yarn_magnitude(16), 9), yarn_magnitude(16, 0.0), yarn_magnitude(0.5)
    (1.277258872, 1.0, 1.0)

    Source: Peng et al. 2023, "YaRN" (arXiv 2309.00071), eq. 22.
    """
    factor = check_number("factor", factor)
    mscale = check_number("mscale", mscale)
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn(
    dim: int,
    *,
    theta: float = 10_000.0,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> Frequencies:
    """Return YaRN frequencies: fast pairs kept, slow pairs interpolated, and a factor.

    With r(n) = d ln(L0 / (2 pi n)) / (2 ln theta), the pair that makes n turns within
    L0, low = max(r(beta_fast), 0), high = min(r(beta_slow), d - 1) and
    ramp_i = clip((i - low) / (high - low), 0, 1):
    f'_i = f_i / s * ramp_i + f_i * (1 - ramp_i).

    The attention factor multiplies cosine and sine. It is, in this order:
    `attention_factor` verbatim where given; g(s, mscale) / g(s, mscale_all_dim) where
    both are given and not 0; else g(s, 1), with g(s, m) = 0.1 m ln s + 1 for s > 1.
    A checkpoint trained with mscale (DeepSeek) also scales its softmax by
    g(s, mscale_all_dim) ** 2; that is the attention's work and not part of this.

    Args:
      dim: rotary width d, even.
      theta: base of the ladder, greater than 1.
      factor: extension factor s, at least 1.
      original_max_position_embeddings: original context length L0 in positions, not
        the extended one.
      beta_fast: turns within L0 from which a pair is kept.
      beta_slow: turns within L0 up to which a pair is interpolated.
      truncate: whether low is rounded down and high up to whole pairs.
      attention_factor: explicit factor, not passed through g.
      mscale: m of the numerator; acts only together with `mscale_all_dim`.
      mscale_all_dim: m of the denominator; acts only together with `mscale`.

    Returns:
      `Frequencies` with float64 inv_freq [dim/2], radians per position, and the
      attention factor.

    Raises:
      ValueError: when `factor` is below 1, `beta_fast` below `beta_slow`,
        `attention_factor` not positive, `theta` not above 1, `dim` odd or not
        positive, or L0 below 1.

    >>> frequencies = yarn(8, factor=4, original_max_position_embeddings=2048)
    >>> frequencies.inv_freq
    array([1.00e+00, 1.00e-01, 6.25e-03, 2.50e-04])
    >>> round(frequencies.attention_factor, 9)
    1.138629436

    Source: Peng et al. 2023, "YaRN" (arXiv 2309.00071), eq. 19 to 22; rounding and
    limits as in github.com/jquesnelle/yarn, LlamaYaRNScaledRotaryEmbedding.
    """
    dim = check_width("dim", dim)
    theta = check_number("theta", theta, above=1)
    factor = check_number("factor", factor, at_least=1)
    length = check_number(ORIGINAL, original_max_position_embeddings, at_least=1)
    _check_turns(("beta_fast", "beta_slow"), beta_fast, beta_slow)
    ramp = _band(
        beta_fast, beta_slow, dim=dim, theta=theta, length=length, truncate=truncate
    )
    plain = ladder(dim, theta)
    if attention_factor is None:
        attention_factor = yarn_magnitude(factor)
        if mscale and mscale_all_dim:
            attention_factor = yarn_magnitude(factor, mscale)
            attention_factor /= yarn_magnitude(factor, mscale_all_dim)
    return Frequencies(plain / factor * ramp + plain * (1 - ramp), attention_factor)


def llama3(
    dim: int,
    *,
    theta: float = 500_000.0,
    factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
) -> Frequencies:
    """Return Llama-3.1 frequencies: long wavelengths divided by s, short ones kept.

    With w_i = 2 pi / f_i, a pair is kept where w_i < L0 / high_freq_factor and divided
    by s where w_i > L0 / low_freq_factor. Between them
    t = (L0 / w_i - low_freq_factor) / (high_freq_factor - low_freq_factor) and
    f'_i = (1 - t) f_i / s + t f_i. Equal factors (Llama-4) leave no band between.

    The defaults are those of Llama-3.1; Llama-3.2 1B and 3B use factor 32.

    Args:
      dim: rotary width d, even.
      theta: base of the ladder, greater than 0.
      factor: extension factor s, at least 1.
      low_freq_factor: turns within L0 below which a pair is divided by s.
      high_freq_factor: turns within L0 above which a pair is kept.
      original_max_position_embeddings: original context length L0 in positions.

    Returns:
      `Frequencies` with float64 inv_freq [dim/2], radians per position.

    Raises:
      ValueError: when `factor` is below 1, `high_freq_factor` below
        `low_freq_factor`, `low_freq_factor` not positive, L0 below 1, or as for
        `default`.

    >>> llama3(8).inv_freq
    array([1.00000000e+00, 3.76060309e-02, 5.24846161e-04, 6.64786987e-06])

    Source: Llama Team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783);
    github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """
    plain = ladder(dim, theta)
    factor = check_number("factor", factor, at_least=1)
    length = check_number(ORIGINAL, original_max_position_embeddings, at_least=1)
    low = check_number("low_freq_factor", low_freq_factor, above=0)
    high = check_number("high_freq_factor", high_freq_factor, above=0)
    if high < low:
        raise ValueError(
            "high_freq_factor must not be below low_freq_factor, got "
            f"high_freq_factor={high_freq_factor} and low_freq_factor={low_freq_factor}"
        )
    wavelength = 2 * np.pi / plain
    # A band of no width is a step: the only pair it could hold is one exactly on it.
    share = np.clip((length / wavelength - low) / ((high - low) or 1.0), 0.0, 1.0)
    blended = (1 - share) * plain / factor + share * plain
    inv_freq = np.where(wavelength > length / low, plain / factor, blended)
    return Frequencies(np.where(wavelength < length / high, plain, inv_freq))
