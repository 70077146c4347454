"""Means over seeds, what their intervals join, and differences seed by seed."""

import math

import pytest

from rope_jax.experiment.aggregate import aggregate, paired_differences, t_half_width


def test_the_t_interval():
    # Student's table: t(0.975) is 12.706 with 1, 4.303 with 2, 2.776 with 4 degrees.
    assert t_half_width([0.0, 2.0]) == pytest.approx(12.7062, abs=1e-4)
    assert t_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265 / 3**0.5, abs=1e-5)
    assert t_half_width([0, 0, 0, 0, 5.0]) == pytest.approx(2.77645, abs=1e-5)
    assert t_half_width([1.0]) is None


def test_a_mean_joins_the_intervals_of_bytes_and_of_seeds(rows_of):
    rows = []
    for seed, bpc in enumerate([2.0, 2.1, 2.6]):
        rows += rows_of("rope", [bpc] * 5, seed=seed)
    rows += rows_of("alibi", [3.0] * 5)
    rope, alibi = (r for r in aggregate(rows) if r["length"] == 512)
    assert rope["bpc"] == pytest.approx(6.7 / 3) and rope["seeds"] == 3
    assert rope["bpc_sd"] == pytest.approx(0.3214550254)  # ddof 1
    half = 4.302652730 * 0.3214550254 / math.sqrt(3)
    low = 6.7 / 3 - math.hypot(0.06, half)
    assert rope["bpc_low"] == pytest.approx(low, abs=1e-7)
    high = 6.7 / 3 + math.hypot(0.08, half)
    assert rope["bpc_high"] == pytest.approx(high, abs=1e-7)
    assert alibi["bpc"] == 3.0 and alibi["bpc_sd"] is None and alibi["seeds"] == 1
    # One seed: its own interval.
    assert (alibi["bpc_low"], alibi["bpc_high"]) == (2.94, 3.08)


def test_seeds_that_refuse_do_not_count(rows_of):
    rows = rows_of("rope", [2.0, None, None, None, None])
    rows += rows_of("rope", [3.0, 4.0, None, None, None], seed=1)
    means = {row["length"]: row for row in aggregate(rows)}
    assert (means[256]["bpc"], means[256]["seeds"]) == (4.0, 1)
    assert means[256]["bpc_sd"] is None
    assert means[512]["bpc"] is None and means[512]["seeds"] == 0


def test_what_is_not_the_same_is_not_mixed(rows_of):
    rows = rows_of("rope", [2.0] * 5) + rows_of("rope", [3.0] * 5, train_length=256)
    rows += rows_of("rope", [4.0] * 5, scaling="ntk:4")
    rows += rows_of("rope", [5.0] * 5, trained_bytes=7, seed=1)
    rows += rows_of("rope", [6.0] * 5, corpus="another")
    rows += rows_of("rope", [7.0] * 5, distance=64)
    found = {(r["train_length"], r["scaling"], r["bpc"]) for r in aggregate(rows)}
    assert found == {
        (128, "", 6.0),
        (128, "", 7.0),
        (128, "", 2.0),
        (256, "", 3.0),
        (128, "ntk:4", 4.0),
        (128, "", 5.0),
    }


def test_differences_are_of_the_same_seed(rows_of):
    """Seeds differ by far more than the encodings do."""
    rows = []
    for seed, level in enumerate([2.0, 3.0, 4.0]):
        rows += rows_of("rope", [level] * 5, seed=seed)
        rows += rows_of("alibi", [level + 0.1 * (seed + 1)] * 5, seed=seed)
    rows += rows_of("alibi", [9.0] * 5, seed=3)  # no partner
    rows += rows_of("none", [5.0, None, None, None, None])
    found = {(r["encoding"], r["length"]): r for r in paired_differences(rows)}
    one = found["alibi", 512]
    assert one["difference"] == pytest.approx(0.2) and one["seeds"] == 3
    assert one["difference_sd"] == pytest.approx(0.1)
    half = 4.302652730 * 0.1 / math.sqrt(3)
    assert one["difference_low"] == pytest.approx(0.2 - half)
    assert one["difference_high"] == pytest.approx(0.2 + half)
    assert found["none", 128]["difference_low"] is None
    assert {key for key in found if key[0] == "none"} == {("none", 128)}
    assert ("rope", 512) not in found
