"""Drawing tokens: what is kept, what is certain, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.nn.sampling import Sampling, keep_likely, next_token

KEY = jax.random.key(0)


def kept(probabilities, dtype=jnp.float32, **limits):
    """The probabilities that are drawn from."""
    logits = jnp.log(jnp.array(probabilities, jnp.float32)).astype(dtype)
    return np.asarray(jax.nn.softmax(keep_likely(logits, Sampling(**limits))))


@pytest.mark.parametrize(
    ("probabilities", "top_p", "count"),
    [
        ([0.4, 0.3, 0.2, 0.1], 0.8, 3),
        ([0.5, 0.41, 0.09], 0.9, 2),
        ([0.5, 0.3, 0.15, 0.05], 0.6, 2),
        ([0.5, 0.3, 0.15, 0.05], 0.85, 3),
    ],
)
def test_g01_top_p_keeps_the_token_that_reaches_it(probabilities, top_p, count):
    left = kept(probabilities, top_p=top_p)
    assert (left > 0).tolist() == [i < count for i in range(len(probabilities))]
    if top_p == 0.8:
        expected = [0.4444, 0.3333, 0.2222, 0]
        np.testing.assert_allclose(left, expected, atol=5e-5)


def test_g02_an_exact_hit_keeps_no_more():
    left = kept([0.3, 0.1, 0.1, 0.5], top_p=0.8)
    assert left.nonzero()[0].tolist() == [0, 3]
    ties = kept([0.1, 0.3, 0.3, 0.3], top_p=0.5)
    assert ties.nonzero()[0].tolist() == [1, 2]  # equal ones by their index
    assert kept([0.25] * 4, top_k=2).nonzero()[0].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_g03_extreme_top_p(dtype):
    likely = 2.0 ** -np.arange(1, 30)
    assert (kept(likely, dtype, top_p=1.0) > 0).all()
    assert kept(likely, dtype, top_p=1e-8).nonzero()[0].tolist() == [0]
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        Sampling(top_p=0.0)


def test_g05_temperature_zero_is_the_largest_logit():
    logits = jax.random.normal(jax.random.key(1), (64, 256))
    largest = logits.argmax(-1)
    for temperature in (0.0, 1e-6, 1e-45):
        drawn = next_token(KEY, logits, Sampling(temperature=temperature))
        np.testing.assert_array_equal(drawn, largest)
        assert drawn.dtype == jnp.int32
    assert (next_token(KEY, logits, Sampling(temperature=1.0)) != largest).mean() > 0.5
    for bad in (-1e-3, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature must be at least 0, finite"):
            Sampling(temperature=bad)


def test_limits_apply_in_their_order():
    """By hand, with temperature 1/2: squares, then two of them, then what reaches p."""
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(
        kept(probabilities, temperature=0.5), probabilities**2 / 0.3, atol=1e-6
    )
    # Of the first two 16 and 9, the first has 0.64; of all four it would have 0.533.
    limits = {"temperature": 0.5, "top_k": 2, "top_p": 0.6}
    assert kept(probabilities, **limits).nonzero()[0].tolist() == [0]
    assert kept(probabilities, temperature=0.5, top_p=0.6).nonzero()[0].tolist() == [
        0,
        1,
    ]
    assert kept(probabilities, min_p=0.5).nonzero()[0].tolist() == [0, 1, 2]
    assert kept(probabilities, min_p=0.51).nonzero()[0].tolist() == [0, 1]
    assert kept(probabilities, top_k=9).nonzero()[0].tolist() == [0, 1, 2, 3]


def test_draws_follow_the_distribution_row_by_row():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]] * 20_000))
    drawn = np.asarray(next_token(KEY, logits, Sampling()))
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125], atol=0.015)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\], got nan"),
        ({"top_k": -1}, "top_k must be an int, 0 or more, got -1"),
        ({"top_k": 2.5}, "top_k must be an int, 0 or more, got 2.5"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\], got 1.1"),
    ],
)
def test_wrong_limits_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**limits)
