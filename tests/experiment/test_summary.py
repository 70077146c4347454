"""The shortest table of a sweep, against rows with known means."""

import pytest

from rope_jax.experiment.summary import format_summary

ROW = {
    "encoding": "alibi",
    "protocol": "anchored",
    "split": "validation",
    "seed": 0,
    "train_length": 128,
    "trained_bytes": 2_000_000,
}


def rows_of(length, seeds, **changes):
    """Rows of one length; `seeds` holds (bpc, delta) of each."""
    return [
        ROW
        | {"length": length, "seed": seed, "bpc": bpc, "delta": delta}
        | {"bpc_low": bpc - 0.1, "bpc_high": bpc + 0.1}
        | {"delta_low": delta - 0.01, "delta_high": delta + 0.01}
        | changes
        for seed, (bpc, delta) in enumerate(seeds)
    ]


def test_a_line_is_the_level_and_the_differences_best_last_length_first():
    rows = rows_of(128, [(2.5, 0.0)], encoding="rope")
    rows += rows_of(256, [(4.0, 1.5)], encoding="rope")
    rows += rows_of(128, [(2.625, 0.0)])
    rows += rows_of(256, [(2.75, 0.125)])
    rows += rows_of(128, [(2.75, 0.25)], encoding="rope", scaling="yarn:2")
    rows += rows_of(256, [(2.875, 0.375)], encoding="rope", scaling="yarn:2")
    assert format_summary(rows).splitlines() == [
        "trained at 128 bytes of context on 2 MB; validation split, seeds: 1",
        "bits per byte at 128, then the difference to it",
        "encoding            at 128           256",
        "alibi          2.625±0.100  +0.125±0.010",
        "rope +yarn:2  +0.250±0.010  +0.375±0.010",
        "rope           2.500±0.100  +1.500±0.010",
    ]


def test_what_ends_comes_last_and_the_largest_budget_first():
    rows = rows_of(128, [(2.5, 0.0), (2.7, 0.0)], encoding="learned")
    nothing = dict.fromkeys(
        [f"{name}{end}" for name in ("bpc", "delta") for end in ("", "_low", "_high")]
    )
    rows += rows_of(256, [(0.0, 0.0)], encoding="learned", **nothing)
    rows += rows_of(128, [(3.0, 0.0)]) + rows_of(256, [(3.0, 0.0)])
    rows += rows_of(128, [(2.0, 0.0)], trained_bytes=8_000_000)
    first, second = format_summary(rows).split("\n\n")
    assert first.startswith("trained at 128 bytes of context on 8 MB; validation")
    lines = [line.split()[0] for line in second.splitlines()[3:]]
    assert lines == ["alibi", "learned"]
    # t(0.975, 1) * 0.1414 / sqrt(2) = 1.2706 over the seeds, 0.1 over the bytes.
    assert second.splitlines()[-1].split() == ["learned", "2.600±1.275", "-"]


def test_splits_are_not_mixed():
    rows = rows_of(128, [(2.5, 0.0)]) + rows_of(128, [(3.5, 0.0)], split="test")
    test, validation = format_summary(rows).split("\n\n")
    assert "test split" in test and "3.500" in test
    assert "validation split" in validation and "2.500" in validation


def test_other_protocols_alone_are_refused():
    with pytest.raises(ValueError, match="rows of the anchored protocol"):
        format_summary(rows_of(128, [(2.5, 0.0)], protocol="sliding"))
