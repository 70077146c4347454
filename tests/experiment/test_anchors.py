"""The blocks that are scored at every length, as literal numbers and as properties."""

import numpy as np
import pytest

from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.protocols import plan

AT_ANCHORS = ("anchored", "last_token", "control", "window_cap", "induction")


def planned(protocol, size, lengths, train_length=None, **options):
    config = EvalConfig(protocol=protocol, lengths=lengths, **options)
    return plan(size, config, train_length or lengths[0])


def test_anchored_scores_the_same_bytes_at_every_length():
    lengths = (32, 64, 256, 1024)
    cells = planned("anchored", 5000, lengths, anchors=16, block=8)
    targets = [cell.windows.targets() for cell in cells]
    for ids in targets:
        np.testing.assert_array_equal(ids, targets[0])
    assert len(set(targets[0].tolist())) == 16 * 8  # no byte twice
    # Blocks are whole, from the first byte with a full context to the last byte.
    blocks = targets[0].reshape(16, 8)
    np.testing.assert_array_equal(np.diff(blocks, axis=1), 1)
    assert blocks[0, 0] == 1024 and blocks[-1, -1] == 4999
    gaps = np.diff(blocks[:, 0])
    assert gaps.max() - gaps.min() <= 1
    for length, cell in zip(lengths, cells, strict=True):
        windows = cell.windows
        # W bytes are fed, the last of them just before the last scored byte.
        assert windows.length == length and windows.last == 8
        np.testing.assert_array_equal(windows.starts + length, blocks[:, -1])
        assert windows.starts.min() >= 0
        np.testing.assert_array_equal(
            windows.contexts().reshape(16, 8)[:, -1], np.full(16, length)
        )


def test_anchors_may_fill_the_room_and_be_a_single_one():
    cells = planned("anchored", 164, (32, 64), anchors=10, block=10)
    np.testing.assert_array_equal(cells[0].windows.targets(), np.arange(64, 164))
    cells = planned("anchored", 164, (32, 64), anchors=1, block=10)
    np.testing.assert_array_equal(cells[1].windows.targets(), np.arange(64, 74))


@pytest.mark.parametrize("protocol", AT_ANCHORS)
def test_every_row_scores_the_same_bytes_at_the_end_of_its_window(protocol):
    lengths = (32, 64, 256)
    cells = planned(protocol, 5000, lengths, anchors=16, block=8)
    block = 1 if protocol == "last_token" else 8
    # 16 begins, evenly from byte 256 to the last place for a block.
    begins = 256 + np.arange(16) * (5000 - 256 - block) // 15
    ids = (begins[:, None] + np.arange(block)).ravel()
    assert {cell.length for cell in cells} == set(lengths)
    for cell in cells:
        np.testing.assert_array_equal(cell.targets(), ids)
        np.testing.assert_array_equal(cell.units, begins)
        assert cell.windows.length == cell.length
        np.testing.assert_array_equal(
            cell.windows.starts + cell.length, ids[block - 1 :: block]
        )
        assert cell.windows.starts.min() >= 0


def test_last_token_gives_every_target_the_whole_window_whatever_block_says():
    cells = planned("last_token", 1000, (16, 32), anchors=5, block=64)
    for cell in cells:
        np.testing.assert_array_equal(cell.windows.contexts(), [cell.length] * 5)
    np.testing.assert_array_equal(cells[1].windows.starts, [0, 241, 483, 725, 967])


@pytest.mark.parametrize("protocol", AT_ANCHORS)
def test_reach_lets_runs_at_other_lengths_score_the_same_bytes(protocol):
    options = {"anchors": 16, "block": 8}
    long = planned(protocol, 5000, (32, 256), **options)[0].targets()
    short = planned(protocol, 5000, (32, 64), **options)[0].targets()
    assert short[0] == 64 and long[0] == 256
    for reach, right in ((0, short), (63, short), (256, long)):
        for cell in planned(protocol, 5000, (32, 64), reach=reach, **options):
            np.testing.assert_array_equal(cell.targets(), right)
