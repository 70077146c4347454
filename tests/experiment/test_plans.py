"""Windows and cells as index arrays."""

import numpy as np

from rope_jax.experiment.plans import Cell, Windows


def test_windows_know_where_padding_begins():
    windows = Windows(4, np.array([0, 4]), np.array([0, 0]), np.array([4, 1]))
    np.testing.assert_array_equal(windows.scored(), [[1, 1, 1, 1], [1, 0, 0, 0]])
    np.testing.assert_array_equal(windows.targets(), [1, 2, 3, 4, 5])


def test_a_cell_holds_the_targets_with_its_amount_of_context():
    windows = Windows(4, np.array([10, 20]), np.array([1, 1]), np.array([4, 3]))
    np.testing.assert_array_equal(windows.contexts(), [2, 3, 4, 2, 3])
    np.testing.assert_array_equal(windows.targets(), [12, 13, 14, 22, 23])
    cell = Cell(4, windows, 3, 4, np.array([10, 20]))
    np.testing.assert_array_equal(cell.targets(), [13, 14, 23])
