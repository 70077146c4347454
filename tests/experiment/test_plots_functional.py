"""The numbers that are drawn of the functional library."""

import numpy as np
import pytest
from matplotlib.figure import Figure

import rope_jax
from rope_jax.experiment import plots_functional
from rope_jax.experiment.plots_functional import decay_bound


@pytest.fixture
def axes():
    return Figure().subplots()


def test_the_bound_of_roformer():
    """Term by term in float64: the mean over j of |sum of the first j phases|."""
    theta = 10_000.0 ** (-np.arange(8) / 8)
    for distance in (0, 1, 7, 100):
        partial, total = 0j, 0.0
        for frequency in theta:
            partial += np.exp(1j * distance * frequency)
            total += abs(partial)
        (bound,) = decay_bound(np.array([distance]), theta)
        assert bound == pytest.approx(total / 8, abs=1e-5)


def test_decay_draws_the_bound_and_the_mean_cosine(axes):
    plots_functional.long_term_decay(axes, dim=16, longest=50)
    bound, scores, _ = axes.lines
    theta = 10_000.0 ** (-np.arange(8) / 8)
    distance = np.arange(51)
    right = decay_bound(distance, theta) / 4.5
    np.testing.assert_allclose(bound.get_ydata(), right, atol=1e-6)
    cosines = np.cos(distance[:, None] * theta).mean(1)
    np.testing.assert_allclose(scores.get_ydata(), cosines, atol=1e-5)


def test_spectra_draw_each_scaling_over_the_default(axes):
    plots_functional.spectra(axes, dim=64, factor=8.0, length=2048)
    default, linear, ntk, yarn, llama3 = (line.get_ydata() for line in axes.lines)
    np.testing.assert_array_equal(default, 1)
    np.testing.assert_allclose(linear, 1 / 8)
    np.testing.assert_allclose(ntk, 8.0 ** (-np.arange(32) / 31))
    for scaled in (yarn, llama3):  # fast pairs untouched, slow ones interpolated
        assert (scaled[0], scaled[-1]) == pytest.approx((1, 1 / 8))
        assert (np.diff(scaled) <= 1e-12).all()


def test_slopes_are_a_column_for_each_number_of_heads(axes):
    plots_functional.slopes_by_heads(axes, (8, 12))
    eight, twelve = axes.lines
    np.testing.assert_allclose(eight.get_ydata(), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(twelve.get_ydata(), rope_jax.alibi_slopes(12))
    assert set(twelve.get_xdata()) == {1}
    assert eight.get_color() != twelve.get_color()


def test_the_sinusoidal_matrix(axes):
    plots_functional.sinusoidal_matrix(axes, length=40, dim=8)
    matrix = axes.images[0].get_array()
    right = np.sin(np.arange(40)[:, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose(matrix[:, ::2], right, atol=1e-6)
