"""Intervals that cover what they say, and the algebra under them."""

import math

import numpy as np
import pytest

from rope_jax.experiment.bootstrap import block_length, mean_interval, unit_values


def correlated(rng, draws, n, correlation, skewed):
    """AR(1) losses `[draws, n]` with mean 0, of normal or of exponential shocks."""
    shape = (draws, n + 100)
    shocks = rng.exponential(1, shape) - 1 if skewed else rng.normal(0, 1, shape)
    values = shocks[:, 0]
    series = []
    for shock in shocks.T[1:]:
        values = correlation * values + shock
        series.append(values)
    return np.stack(series[-n:], axis=1)


def articles(rng, draws, n, correlation, skewed):
    """Losses that share a part over an article, of 6 anchors on average."""
    new = rng.random((draws, n)) < 1 / 6
    article = np.cumsum(new, axis=1)
    shared = rng.normal(0, 0.7, (draws, n + 1))
    return np.take_along_axis(shared, article, axis=1) + rng.normal(0, 1, (draws, n))


@pytest.mark.parametrize(
    ("process", "n", "correlation", "skewed"),
    [
        (correlated, 256, 0.0, False),
        (correlated, 256, 0.5, False),
        (correlated, 256, 0.5, True),
        (correlated, 512, 0.7, False),
        (articles, 512, None, False),
    ],
)
def test_the_95_percent_interval_covers_95_percent(process, n, correlation, skewed):
    rng = np.random.default_rng(0)
    losses = 2.5 + process(rng, 1000, n, correlation, skewed)
    intervals = [mean_interval(x, resamples=500, seed=i) for i, x in enumerate(losses)]
    below = sum(i.high < 2.5 for i in intervals)
    above = sum(i.low > 2.5 for i in intervals)
    assert 930 <= 1000 - below - above <= 970
    assert max(below, above) <= 50  # and neither side is missed much more often


def test_an_interval_of_independent_values_would_not_cover():
    """The simulation can tell a wrong interval: this one ignores the correlation."""
    losses = correlated(np.random.default_rng(0), 1000, 256, 0.5, False)
    error = losses.std(axis=1, ddof=1) / math.sqrt(256)
    covered = np.abs(losses.mean(axis=1)) < 1.96 * error
    assert covered.sum() < 800


def test_standard_error_agrees_with_the_spread_of_the_means():
    # AR(1) with coefficient a: n var(mean) -> 1 / (1 - a)^2, here 4 for a = 1/2.
    losses = correlated(np.random.default_rng(1), 200, 512, 0.5, False)
    errors = [mean_interval(x, resamples=1).standard_error for x in losses]
    right = math.sqrt(4 / 512)
    assert np.mean(errors) == pytest.approx(right, rel=0.05)
    assert losses.mean(axis=1).std() == pytest.approx(right, rel=0.15)


def test_width_falls_with_the_confidence_and_the_root_of_the_sample():
    values = np.random.default_rng(0).normal(0, 1, 1024)
    wide, narrow = mean_interval(values), mean_interval(values, confidence=0.5)
    # Quantiles 0.975 and 0.75 of a normal are 1.960 and 0.674.
    ratio = (wide.high - wide.low) / (narrow.high - narrow.low)
    assert ratio == pytest.approx(1.960 / 0.674, rel=0.15)
    assert wide.high - wide.low == pytest.approx(2 * 1.96 / 32, rel=0.25)


def test_blocks_grow_with_the_correlation():
    rng = np.random.default_rng(0)
    lengths = [
        np.mean([block_length(x) for x in correlated(rng, 20, 1024, a, False)])
        for a in (0.0, 0.6, 0.9)
    ]
    assert lengths[0] < 90 and lengths[0] <= lengths[1] < lengths[2] <= 128


def test_same_seed_same_interval():
    values = np.random.default_rng(0).exponential(1, 300)
    assert mean_interval(values, seed=3) == mean_interval(values, seed=3)
    assert mean_interval(values, seed=3) != mean_interval(values, seed=4)


def test_equal_values_have_no_uncertainty():
    assert mean_interval(np.full(64, 8.0)) == (8.0, 0.0, 8.0, 8.0, 1)


def test_a_single_value_that_differs_still_gives_limits():
    values = np.where(np.arange(64) == 10, 8.0, 4.0)
    interval = mean_interval(values)
    assert interval.low < values.mean() < interval.high < 5


def test_too_few_values_and_no_numbers_have_no_limits():
    for values in ([1.0], [1.0, 2.0, 3.0], [1.0, 2.0, math.inf, 4.0, 5.0]):
        interval = mean_interval(np.array(values))
        assert math.isnan(interval.low) and math.isnan(interval.high)
    assert mean_interval(np.array([1.0, 2.0, 3.0])).mean == 2.0
    small = mean_interval(np.array([1.0, 2.0, 3.0, 5.0]))
    assert small.low < 2.75 < small.high


def test_unit_values_average_to_the_ratio_of_sums():
    values = unit_values(np.array([100.0, 21.0]), np.array([100, 7]))
    assert values.mean() == pytest.approx(1.1308411215, abs=1e-10)
    equal = unit_values(np.array([2.0, 3.0, 7.0]), np.array([4, 4, 4]))
    np.testing.assert_allclose(equal, [0.5, 0.75, 1.75], rtol=1e-15)


def test_unit_values_vary_as_the_ratio_does():
    """The delta method, against the ratio of many simulated samples."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 20, (2000, 100))
    sums = counts * rng.normal(2.5, 1, counts.shape)
    ratios = sums.sum(axis=1) / counts.sum(axis=1)
    errors = [
        unit_values(s, c).std(ddof=1) / 10 for s, c in zip(sums, counts, strict=True)
    ]
    assert np.mean(errors) == pytest.approx(ratios.std(), rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval(np.zeros((2, 3))), r"values must be \[n\].*\(2, 3\)"),
        (lambda: mean_interval(np.zeros(0)), "values must be"),
        (lambda: mean_interval(np.zeros(9), confidence=1.0), "confidence .* 1.0"),
        (lambda: mean_interval(np.zeros(9), resamples=0), "resamples .* 0"),
        (lambda: mean_interval(np.arange(9.0), block=5), "block .* got 5"),
        (lambda: unit_values(np.zeros(3), np.zeros(2)), "sums and counts"),
        (lambda: unit_values(np.zeros(3), np.zeros(3)), "counts must hold a target"),
    ],
)
def test_wrong_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
