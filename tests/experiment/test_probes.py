"""A string planted twice: what is fed, and the bits that the second copy saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.measurement import measure
from rope_jax.experiment.protocols import plan

BLOCK = 8
LENGTHS = (24, 32, 64)
DATA = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)


def planned(lengths=LENGTHS, **options):
    options = {"anchors": 5, "block": BLOCK, "bootstrap": 50} | options
    config = EvalConfig(protocol="induction", lengths=lengths, **options)
    return config, plan(len(DATA), config, lengths[0])


def strings(seed=0):
    """The string of each of 5 anchors."""
    draws = [
        np.random.default_rng((seed, a)).integers(0, 1000, BLOCK) for a in range(5)
    ]
    return DATA[np.stack(draws)]


def test_the_string_stands_at_the_end_and_a_distance_before():
    _, cells = planned()
    assert [(c.length, c.distance) for c in cells] == [(24, 8), (32, 16), (64, 48)]
    for cell in cells:
        windows, length = cell.windows, cell.length
        tokens = DATA[windows.starts[:, None] + np.arange(length + 1)]
        fed = windows.edit(tokens, DATA, slice(0, 5))
        # One byte, a block of text, the first copy, the text between, the second.
        parts = np.split(fed, [9, 17, length + 1 - BLOCK], axis=1)
        was = np.split(tokens, [9, 17, length + 1 - BLOCK], axis=1)
        np.testing.assert_array_equal(parts[1], strings())
        np.testing.assert_array_equal(parts[3], strings())
        np.testing.assert_array_equal(parts[0], was[0])
        np.testing.assert_array_equal(parts[2], was[2])
        assert length + 1 - BLOCK - 9 == cell.distance
        part = windows.edit(tokens[3:], DATA, slice(3, 5))
        np.testing.assert_array_equal(part, fed[3:])
        # The scored bytes are the second copy's; those of the gain the first's.
        second = (cell.targets() - np.repeat(windows.starts, BLOCK)).reshape(5, BLOCK)
        first = cell.versus.targets() - np.repeat(windows.starts, BLOCK)
        np.testing.assert_array_equal(
            second[0], np.arange(length + 1 - BLOCK, length + 1)
        )
        np.testing.assert_array_equal(first.reshape(5, BLOCK)[2], np.arange(9, 17))
        assert cell.versus.windows is windows  # read from one pass
        np.testing.assert_array_equal(cell.versus.units + cell.distance, cell.units)


def test_another_seed_is_another_string():
    _, (cell, *_) = planned(seed=1)
    fed = cell.windows.edit(np.zeros((5, 25), np.uint8), DATA, slice(0, 5))
    np.testing.assert_array_equal(fed[:, -BLOCK:], strings(seed=1))
    assert np.all(np.any(strings(seed=1) != strings(), axis=1))


def copies(distance_of, reach):
    """1 bit for the byte that stood `distance` ago, as far as it sees; else 8."""

    def apply(params, inputs, *, last):
        length = inputs.shape[1]
        distance = distance_of(length)
        predicted = jnp.roll(inputs, distance - 1, axis=1)
        sure = (jnp.arange(length) >= length - BLOCK) & (distance <= reach)
        # log 255 against 255 zeros is a probability of 1/2.
        logits = np.log(255) * jax.nn.one_hot(predicted, 256)
        return jnp.where(sure[None, :, None], logits, 0.0)[:, -last:]

    return apply


def test_the_gain_is_what_an_oracle_saves_on_the_second_copy():
    config, cells = planned()
    model = copies(lambda length: length - 2 * BLOCK, reach=16)
    rows = measure(model, (), cells, DATA, config, train_length=LENGTHS[0])
    assert [row["distance"] for row in rows] == [8, 16, 48]
    for row, gain in zip(rows, (7.0, 7.0, 0.0), strict=True):
        assert row["scored_bytes"] == 5 * BLOCK and row["control"] == ""
        assert row["bpc"] == pytest.approx(8 - gain, abs=1e-5)
        for name in ("gain", "gain_low", "gain_high"):
            assert row[name] == pytest.approx(gain, abs=1e-5)
    assert rows[2]["delta"] == pytest.approx(7.0, abs=1e-5)


def test_both_copies_are_scored_as_they_are_planted():
    """A model of pairs of bytes, against the sums over the strings themselves."""
    logits = np.random.default_rng(1).normal(0, 2, (256, 256))
    nats = np.log(np.exp(logits).sum(axis=1, keepdims=True)) - logits

    def apply(params, inputs, *, last):
        return jnp.asarray(logits, jnp.float32)[inputs[:, -last:]]

    config, cells = planned()
    rows = measure(apply, (), cells, DATA, config, train_length=LENGTHS[0])
    string = strings()
    inside = nats[string[:, :-1], string[:, 1:]].sum()
    begins = cells[0].units
    for row, distance in zip(rows, (8, 16, 48), strict=True):
        before = DATA[begins - distance - 1]
        first = nats[before, string[:, 0]].sum() + inside
        # At distance 8 the second copy begins right behind the first.
        before = string[:, -1] if distance == 8 else DATA[begins - 1]
        second = nats[before, string[:, 0]].sum() + inside
        scale = 5 * BLOCK * np.log(2)
        assert row["bpc"] == pytest.approx(second / scale, abs=1e-5)
        assert row["gain"] == pytest.approx((first - second) / scale, abs=1e-5)
        assert row["gain_low"] <= row["gain"] <= row["gain_high"]
