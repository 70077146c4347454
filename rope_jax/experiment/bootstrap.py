"""95 % intervals for means of losses that are correlated along a text.

Neighbouring stretches of one article are hard or easy together, so the standard
error of independent values is too small. Here the text is cut into units in their
order (an anchor, a run of bytes), and the interval of the mean comes from a circular
block bootstrap: blocks of consecutive units are drawn, each draw is studentised
by its own standard error, and the quantiles of those ratios, not the normal's, give
the interval. That keeps the coverage where the losses are skewed and where only a
dozen blocks fit. Everything is float64 on the host, and a seed fixes the draws.

Sources: Politis & Romano 1992 (circular blocks); Goetze & Kuensch 1996 (studentised
block bootstrap); Politis & White 2004 with Patton, Politis & White 2009 (block
length); Vats & Flegal 2022 (the correction of the variance, "lugsail").
"""

from typing import NamedTuple

import numpy as np

# At least this long a share of the series is one block: a length estimated from
# the data alone is short by chance exactly where the variance is underestimated.
_BLOCKS_AT_MOST = 12
_BLOCKS_AT_LEAST = 8


class Interval(NamedTuple):
    """A mean, its standard error and its confidence limits; NaN where unknown."""

    mean: float
    standard_error: float
    low: float
    high: float
    block: int  # consecutive units drawn together


def unit_values(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """One value for each unit, so that their plain mean is sum(sums)/sum(counts).

    The ratio r of two sums is not the mean of the units' ratios when the counts
    differ. Its linearisation is: v_i = r + (sums_i - r counts_i) / mean(counts), and
    the v_i vary as r does (the delta method). With equal counts v_i is
    sums_i / counts_i.

    Args:
      sums: float `[n]`, the loss summed over each unit's targets.
      counts: `[n]`, the targets in each unit; some may be 0, not all.

    Returns:
      float64 `[n]`, in the unit of the loss per target.

    Raises:
      ValueError: the shapes differ, or there is no target.

    Example:
      >>> print(unit_values(np.array([4.0, 9.0]), np.array([2, 3])).mean().round(9))
      2.6
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if sums.ndim != 1 or sums.shape != counts.shape:
        raise ValueError(
            f"sums and counts must be [n] both, got {sums.shape} and {counts.shape}"
        )
    if not counts.sum() > 0:
        raise ValueError(f"counts must hold a target, got a total of {counts.sum()}")
    ratio = sums.sum() / counts.sum()
    return ratio + (sums - ratio * counts) / counts.mean()


def mean_interval(
    values: np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    block: int | None = None,
) -> Interval:
    """The mean of correlated values in text order, with a bootstrap interval.

    For a difference, give the differences of the paired values.

    Args:
      values: `[n]`, in the order of the text. Under about 50 the interval is rough,
        under 4 there is none.
      confidence: the coverage that is wanted, between 0 and 1.
      resamples: bootstrap draws.
      seed: fixes the draws.
      block: units per block; None estimates it from the values' autocorrelation.

    Returns:
      An Interval. Its error and limits are NaN where n < 4 or a value is not finite;
      the limits are the mean where all values are equal.

    Raises:
      ValueError: values are not `[n]`, n >= 1, or an option is out of its range.

    Example:
      >>> noise = np.random.default_rng(1).normal(2.5, 1.0, 400)
      >>> interval = mean_interval(noise)
      >>> interval.low < 2.5 < interval.high
      True
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"values must be [n] with n >= 1, got {values.shape}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    if block is not None and not 1 <= block <= max(1, values.size // 2):
        raise ValueError(f"block must be in [1, n/2] for n {len(values)}, got {block}")
    n, mean = len(values), float(values.mean())
    spread = np.ptp(values)
    if n < 4 or not np.isfinite(spread):
        return Interval(mean, np.nan, np.nan, np.nan, block or 1)
    if spread <= 1e-12 * max(1.0, abs(mean)):  # equal but for rounding
        return Interval(mean, 0.0, mean, mean, block or 1)
    block = block or block_length(values)
    error = _standard_error(values, block)
    tail = (1 - confidence) / 2
    means, errors = _draws(values, block, resamples, np.random.default_rng(seed))
    # One block drawn every time has no spread: infinitely far, but for rounding.
    errors[errors < 1e-6 * error] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        below, above = _quantiles(means / errors, tail)
    if not np.isfinite([below, above]).all():
        # Too few different blocks for a spread in every draw: without studentising.
        below, above = _quantiles(means / error, tail)
    low = min(mean, float(mean - above * error))
    high = max(mean, float(mean - below * error))
    return Interval(mean, error, low, high, block)


def _quantiles(ratios: np.ndarray, tail: float) -> np.ndarray:
    return np.quantile(ratios, [tail, 1 - tail], method="nearest")


def block_length(values: np.ndarray) -> int:
    """Units per block for a series, from its autocorrelation.

    Twice the length that Politis & White estimate as best for the variance alone
    (longer blocks cost little here, since the draws are studentised), and so that
    between 8 and 12 blocks or more fit: see `_BLOCKS_AT_MOST`.

    Args:
      values: float `[n]` in the order of the text.

    Returns:
      A length in [1, max(1, n/8)].
    """
    n = len(values)
    shortest = n / _BLOCKS_AT_MOST
    longest = max(1, n // _BLOCKS_AT_LEAST)
    return int(np.clip(np.ceil(max(2 * _politis_white(values), shortest)), 1, longest))


def _politis_white(values: np.ndarray) -> float:
    """The circular block length of least mean squared error for the variance."""
    n = len(values)
    centred = values - values.mean()
    spectrum = np.fft.rfft(centred, 2 * n)  # padded: no wrap-around
    covariance = np.fft.irfft(np.abs(spectrum) ** 2)[:n] / n
    quiet = max(5, int(np.sqrt(np.log10(n))))  # lags in a row without correlation
    largest = min(n - 1, int(np.ceil(np.sqrt(n))) + quiet)
    loud = np.abs(covariance[1:]) > 2 * np.sqrt(np.log10(n) / n) * covariance[0]
    lags = largest
    for lag in range(max(1, largest - quiet)):
        if not loud[lag : lag + quiet].any():
            lags = min(2 * lag, largest)
            break
    if lags == 0:
        return 1.0
    lag = np.arange(1, lags + 1)
    window = np.minimum(1.0, 2 * (1 - lag / lags))  # the flat-top lag window
    weighted = window * covariance[1 : lags + 1]
    slope = 2 * np.sum(lag * weighted)
    density = covariance[0] + 2 * np.sum(weighted)
    if density <= 0:
        return 1.0
    return float((1.5 * n * (slope / density) ** 2) ** (1 / 3))


def _block_means(values: np.ndarray, block: int) -> np.ndarray:
    """The mean of each of the n circular blocks, `[n]`, less the overall mean."""
    centred = values - values.mean()
    total = np.concatenate([[0.0], np.cumsum(np.append(centred, centred[:block]))])
    return (total[block : block + len(values)] - total[: len(values)]) / block


def _standard_error(values: np.ndarray, block: int) -> float:
    """Of the mean, from overlapping blocks of two lengths.

    Blocks of length l miss a part of the correlation that is of order 1/l; the
    difference to blocks of half the length takes that part out.
    """

    def variance(length):  # n/(n - l): the mean was estimated from the same values
        n = len(values)
        mean_square = np.mean(_block_means(values, length) ** 2)
        return mean_square * length / (n - length)

    whole = variance(block)
    if block > 1:
        half = block // 2
        corrected = (block * whole - half * variance(half)) / (block - half)
        whole = max(whole, corrected)
    return float(np.sqrt(whole))


def _draws(values, block, resamples, rng) -> tuple[np.ndarray, np.ndarray]:
    """For each draw of circular blocks: its mean, less the overall one, and error."""
    means = _block_means(values, block)
    blocks = max(2, -(-len(values) // block))
    drawn = means[rng.integers(0, len(means), (resamples, blocks))]
    error = drawn.std(axis=1, ddof=1) / np.sqrt(blocks)
    return drawn.mean(axis=1), error
