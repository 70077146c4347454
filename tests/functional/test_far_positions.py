"""Scores of ReRoPE and Self-Extend against float64 rotations by each distance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax import frequencies, rerotate, rope
from rope_jax.functional.far_positions import (
    far_bias,
    rerope_positions,
    self_extend_positions,
)

HEADS, GROUPS, WIDTH = 4, 2, 8
RULES = {
    "rerope": {"window": 5},
    "self_extend": {"window": 5, "group_size": 3},
    "self_extend_even": {"window": 8, "group_size": 4},
}


def far_distance(distance, i, j, rule):
    """The distance that the score is taken at, by the papers' words."""
    if distance < rule["window"]:
        return distance
    group = rule.get("group_size")
    if group is None:
        return rule["window"]
    return i // group - j // group + rule["window"] - rule["window"] // group


def reference(query, key, rows, columns, rule, scale):
    """Float64 logits [B, N, T, S], pair by pair with complex numbers."""
    half = WIDTH // 2
    theta = 10_000.0 ** (-np.arange(half) / half)
    q = query.astype(np.float64)
    q = q[..., :half] + 1j * q[..., half:]
    k = key.astype(np.float64)
    k = k[..., :half] + 1j * k[..., half:]
    k = np.repeat(k, HEADS // GROUPS, axis=2)
    out = np.zeros((len(q), HEADS, q.shape[1], k.shape[1]))
    for b, i, j in np.ndindex(len(q), q.shape[1], k.shape[1]):
        row, column = int(rows[b, i]), int(columns[b, j])
        distance = far_distance(row - column, row, column, rule)
        turned = np.exp(1j * distance * theta)
        out[b, :, i, j] = (q[b, i] * turned * k[b, j].conj()).real.sum(-1)
    return out * scale


def logits(query, key, rows, columns, rule, scale):
    """Near scores, as attention makes them, plus the bias."""
    table = frequencies.default(WIDTH)
    name = self_extend_positions if "group_size" in rule else rerope_positions
    far_rows, far_columns = name(rows, columns, **rule)
    near = rope(query, rows, table), rope(key, columns, table)
    far = (
        rerotate(near[0], rows, far_rows, table),
        rerotate(near[1], columns, far_columns, table),
    )
    keys = jnp.repeat(near[1], HEADS // GROUPS, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", near[0], keys) * scale
    window = rule["window"]
    return scores + far_bias(near, far, rows, columns, window=window, scale=scale)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("offset", [0, 100_000])
def test_scores_are_those_of_the_replaced_distances(rule, offset):
    """Any positions: in disorder, far along the line, packed, and grouped heads."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 9, HEADS, WIDTH)).astype(np.float32)
    key = rng.normal(size=(2, 14, GROUPS, WIDTH)).astype(np.float32)
    rows = rng.integers(0, 40, (2, 9)) + offset
    columns = rng.integers(0, 40, (2, 14)) + offset
    columns[1] = np.r_[np.arange(7), np.arange(7)] + offset  # two documents
    right = reference(query, key, rows, columns, rule, 0.3)
    made = jax.jit(functools.partial(logits, rule=rule, scale=0.3))(
        query, key, rows, columns
    )
    np.testing.assert_allclose(made, right, atol=3e-5)
    plain = reference(query, key, rows, columns, {"window": 10**9}, 0.3)
    assert np.abs(right - plain).max() > 0.1  # the rule does something


def test_positions_of_the_row_alone():
    """[T] positions for all rows; groups of 1 leave every distance as it is."""
    ones = jnp.ones((2, 6, 1, 4))
    at = jnp.arange(6)
    bias = far_bias((ones, ones), (ones, 3 * ones), at, at, window=4, scale=0.5)
    assert bias.shape == (2, 1, 6, 6)
    right = np.where(np.subtract.outer(np.arange(6), np.arange(6)) >= 4, 4.0, 0.0)
    np.testing.assert_array_equal(bias[1, 0], right)
    rows, columns = self_extend_positions(at, at, window=3, group_size=1)
    np.testing.assert_array_equal(rows, at)
    np.testing.assert_array_equal(columns, at)


def test_wrong_arguments_are_named():
    at = jnp.arange(3)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        rerope_positions(at, at, window=0)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        self_extend_positions(at, at, window=2, group_size=0)
    with pytest.raises(ValueError, match="key_positions must be integers"):
        rerope_positions(at, at.astype(float), window=2)
