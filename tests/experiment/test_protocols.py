"""Plans: which bytes are fed and scored, as literal numbers and as properties."""

import numpy as np
import pytest

from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.protocols import PROTOCOLS, check_options, plan


def planned(protocol, size, lengths, train_length=None, **options):
    config = EvalConfig(protocol=protocol, lengths=lengths, **options)
    return plan(size, config, train_length or lengths[0])


def new_targets(windows):
    return windows.scored().sum(axis=1).tolist()


def test_t09_nonoverlapping_windows_score_every_byte_after_the_first_once():
    (cell,) = planned("nonoverlap", 13, (4,))
    assert new_targets(cell.windows) == [4, 4, 4]
    np.testing.assert_array_equal(cell.windows.targets(), np.arange(1, 13))
    np.testing.assert_array_equal(cell.windows.contexts(), [1, 2, 3, 4] * 3)


def test_t09_sliding_windows_score_only_what_is_new():
    (cell,) = planned("sliding", 21, (8,), stride=3)
    assert new_targets(cell.windows) == [8, 3, 3, 3, 3]
    np.testing.assert_array_equal(cell.windows.starts, [0, 3, 6, 9, 12])
    np.testing.assert_array_equal(cell.windows.targets(), np.arange(1, 21))
    np.testing.assert_array_equal(
        cell.windows.contexts(), [1, 2, 3, 4, 5, 6, 7, 8] + [6, 7, 8] * 4
    )


def test_t04_the_ragged_last_window_is_scored_too():
    (cell,) = planned("nonoverlap", 15, (4,))
    assert new_targets(cell.windows) == [4, 4, 4, 2]
    (cell,) = planned("sliding", 23, (8,), stride=3)
    assert new_targets(cell.windows) == [8, 3, 3, 3, 3, 2]


@pytest.mark.parametrize("size", [9, 10, 17, 64, 100])
@pytest.mark.parametrize("options", [{}, {"stride": 1}, {"stride": 5}, {"stride": 8}])
def test_sliding_scores_each_byte_once_with_the_context_it_promises(size, options):
    (cell,) = planned("sliding", size, (8,), **options)
    stride = options.get("stride", 2)
    np.testing.assert_array_equal(cell.windows.targets(), np.arange(1, size))
    contexts = cell.windows.contexts()[8:]
    assert np.all(contexts > 8 - stride) and np.all(contexts <= 8)


def test_the_training_length_is_planned_beside_those_asked_for():
    cells = planned("anchored", 5000, (256, 64), train_length=128, anchors=4)
    assert [cell.length for cell in cells] == [64, 128, 256]


def test_per_position_sees_the_same_bytes_in_every_wide_row():
    cells = planned("per_position", 1000, (32, 64), stride=8)
    assert [(c.shortest, c.longest) for c in cells] == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (9, 16),
        (17, 32),
        (33, 64),
    ]
    windows = cells[0].windows
    assert all(cell.windows is windows for cell in cells)  # fed once
    contexts, targets = windows.contexts(), windows.targets()
    # Each byte is seen once at every eighth context length, so rows of a width
    # that 8 divides hold each byte equally often.
    assert targets.min() == 64 and targets.max() <= 999
    for cell in cells[4:]:
        rows = (cell.shortest <= contexts) & (contexts <= cell.longest)
        ids, counts = np.unique(targets[rows], return_counts=True)
        np.testing.assert_array_equal(ids, np.arange(64, targets.max() + 1))
        assert set(counts) == {(cell.longest - cell.shortest + 1) // 8}


def test_units_are_stretches_of_text_that_hold_every_target():
    for protocol in PROTOCOLS:
        cells = planned(protocol, 40_000, (64, 128), anchors=100, block=16)
        for cell in cells:
            targets = cell.targets()
            unit = np.searchsorted(cell.units, targets, side="right") - 1
            assert unit.min() == 0 and unit.max() == len(cell.units) - 1
            assert np.all(np.diff(cell.units) >= 16)
            assert len(cell.units) in range(100, 257)


def test_max_bytes_limits_what_is_read():
    (cell,) = planned("nonoverlap", 1000, (4,), max_bytes=13)
    assert cell.windows.targets().max() == 12


@pytest.mark.parametrize(
    ("protocol", "options", "message"),
    [
        ("anchored", {"lengths": (64, 936)}, r"--lengths .*must be at most 680 .* 936"),
        ("anchored", {"lengths": (16, 64)}, r"--block .* shortest length 16, got 32"),
        ("anchored", {"anchors": 40}, r"--lengths .*: no length fits .* 40 anchors"),
        ("nonoverlap", {"lengths": (1000,)}, r"--lengths .*must be at most 999 "),
        ("sliding", {"lengths": (64, 1000)}, r"--lengths .*must be at most 999 "),
        ("sliding", {"stride": 65}, r"--stride .* shortest length 64, got 65"),
        (
            "per_position",
            {"lengths": (480,)},
            r"--lengths .*must be at most 470 .* 480",
        ),
        ("per_position", {"stride": 65}, r"--stride .* longest length 64, got 65"),
        ("anchored", {"lengths": ()}, r"--lengths .*must be different positive"),
        ("anchored", {"lengths": (64, 0)}, r"--lengths .* \(64, 0\)"),
        ("anchored", {"lengths": (64, 64)}, r"--lengths .* different"),
        ("last_token", {"lengths": (64, 991)}, r"--lengths .*be at most 990 .* 991"),
        ("anchored", {"reach": 681}, r"--reach .*must be at most 680 with 10 .* 681"),
        ("last_token", {"reach": 991}, r"--reach .*must be at most 990 with 10 .* 991"),
        ("induction", {"reach": -1}, r"--reach .*must be 0 or more, got -1"),
        ("control", {"lengths": (355,)}, r"--lengths .*be at most 354 for text from"),
        ("control", {"block": 65}, r"--block .* shortest length 64, got 65"),
        ("window_cap", {"lengths": (681,)}, r"--lengths .*must be at most 680 .* 681"),
        ("induction", {"block": 22}, r"--lengths .* three times --block .* 22, .* 64 "),
        ("induction", {"lengths": (16,), "block": 16}, r"--lengths .* got 16 \("),
        ("anchored", {"split": "train"}, r"--split .*one of validation, test, got"),
        ("anchord", {}, r"--protocol .*must be one of anchored, nonoverlap, .*anchord"),
        ("anchored", {"anchors": 0}, r"--anchors .* at least 1, got 0"),
        ("anchored", {"bootstrap": 0}, r"--bootstrap .* at least 1, got 0"),
        ("nonoverlap", {"max_bytes": -1}, r"--max_bytes .* 0 or more, got -1"),
        ("sliding", {"stride": -1}, r"--stride .*must be 0 or more, got -1"),
    ],
)
def test_d04_impossible_plans_name_the_flag_and_what_is_possible(
    protocol, options, message
):
    options = {"lengths": (64,), "anchors": 10} | options
    with pytest.raises(ValueError, match=message):
        planned(protocol, 1000, train_length=64, **options)


@pytest.mark.parametrize(
    ("protocol", "longest"),
    [
        ("anchored", 680),
        ("nonoverlap", 999),
        ("sliding", 999),
        ("per_position", 470),
        ("last_token", 990),
        ("control", 354),
        ("window_cap", 840),
        ("induction", 840),
    ],
)
def test_the_longest_length_that_an_error_names_is_possible(protocol, longest):
    options = {"anchors": 10, "train_length": 64}
    if protocol in ("window_cap", "induction"):
        options["block"] = 16
    cells = planned(protocol, 1000, (longest,), **options)
    assert cells[-1].length == longest
    with pytest.raises(ValueError, match="--lengths"):
        planned(protocol, 1000, (longest + 2,), **options)


@pytest.mark.parametrize(
    ("protocol", "name", "readers"),
    [
        ("anchored", "stride", "sliding, per_position"),
        ("induction", "max_bytes", "nonoverlap, sliding, per_position"),
        ("last_token", "block", "anchored, nonoverlap, sliding, per_position, contr"),
        ("sliding", "anchors", "anchored, last_token, control, window_cap, induction"),
        ("nonoverlap", "reach", "anchored, last_token"),
        ("control", "examples", "task"),
    ],
)
def test_d04_an_option_without_effect_is_named(protocol, name, readers):
    message = f"--{name} .*no effect on the protocol '{protocol}'; .* of {readers}"
    with pytest.raises(ValueError, match=message):
        check_options(protocol, ["lengths", name])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_options_without_a_note_are_every_protocols_own(protocol):
    check_options(protocol, ["lengths", "split", "batch_tokens", "scaling", "seed"])
    check_options("task", ["stride"])  # a task's own check says more
