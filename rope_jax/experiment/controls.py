"""Does a model use the context beyond its training length, or only survive it?

A loss that stays flat with the length may come from attending to the last few bytes
alone. Both protocols here score the bytes of `anchored` at lengths above the training
length L0, with and without what is more than L0 bytes old, and report the paired
difference in bits per byte as `gain`. At lengths up to L0 nothing is that old, so
there is only the plain row.
"""

import dataclasses
import functools

import numpy as np

from rope_jax.experiment.anchors import block_begins, same_bytes, windows_at
from rope_jax.experiment.plans import Cell, Request


def control(request: Request) -> list[Cell]:
    """The anchored windows with their old bytes real, foreign, shuffled and hidden.

    Old are the first W - L0 of the W bytes fed, which leaves the last L0. They are
    (i) real; (ii) from elsewhere in the split, half of it away and apart from the
    window; (iii) shuffled, by a permutation that `seed` and the anchor give; (iv)
    masked: no later byte attends to them, while positions stay as they are. The
    scored bytes and the L0 bytes before them are always the real ones.

    gain = bpc(control) - bpc(real) on the same bytes: above 0, the old bytes help by
    what they say (elsewhere), by their order (shuffled), or at all (masked).
    """
    config, size = request.config, request.size
    begins = block_begins(request, config.block)
    possible = (size + request.train_length - 1) // 3
    longest = max(request.lengths)
    if request.train_length < longest and longest > possible:
        where = f"for text from elsewhere on {request.text}"
        raise request.too_long(longest, possible, where)
    cells = []
    for length in request.lengths:
        plain = windows_at(begins, config.block, length)
        old = length - request.train_length
        if old <= 0:
            cells.append(Cell(length, plain, 1, length, begins, control="real"))
            continue
        # All with a mask, so that one compilation serves the four.
        seen = dataclasses.replace(plain, hidden=0)
        places = _places(plain.starts, old, size)
        elsewhere = functools.partial(_elsewhere, places=places, old=old)
        shuffled = functools.partial(_shuffled, seed=config.seed, old=old)
        real = Cell(length, seen, 1, length, begins, control="real")
        cells += [real] + [
            dataclasses.replace(real, windows=windows, control=name, versus=real)
            for name, windows in (
                ("elsewhere", dataclasses.replace(seen, edit=elsewhere)),
                ("shuffled", dataclasses.replace(seen, edit=shuffled)),
                ("masked", dataclasses.replace(seen, hidden=old)),
            )
        ]
    return same_bytes(cells)


def window_cap(request: Request) -> list[Cell]:
    """The anchored windows under full attention, and with attention capped to L0 keys.

    Capped, each byte attends to the last L0 bytes, itself included, in every layer.
    gain = bpc(capped) - bpc(full) on the same bytes: near 0, the model extrapolates
    as a local one would; above 0, far keys help it; below 0, they harm it.
    """
    block = request.config.block
    begins = block_begins(request, block)
    cells = []
    for length in request.lengths:
        windows = windows_at(begins, block, length)
        full = Cell(length, windows, 1, length, begins, control="full")
        cells.append(full)
        if length > request.train_length:
            cells.append(
                dataclasses.replace(full, control="capped", capped=True, versus=full)
            )
    return same_bytes(cells)


def _places(starts: np.ndarray, old: int, size: int) -> np.ndarray:
    """Where the foreign bytes of each window begin: half of all places further on.

    Of n = size - old + 1 places, taken as a circle, the one n // 2 on lies n // 2
    bytes after the window's start or n - n // 2 before it. With n // 2 > W, which
    `control` makes sure of, neither touches the window.
    """
    places = size - old + 1
    return (starts + places // 2) % places


def _elsewhere(tokens, data, rows, *, places, old):
    tokens = tokens.copy()
    tokens[:, :old] = data[places[rows, None] + np.arange(old)]
    return tokens


def _shuffled(tokens, data, rows, *, seed, old):
    del data
    tokens = tokens.copy()
    for anchor, row in enumerate(tokens, rows.start):
        row[:old] = row[np.random.default_rng((seed, anchor)).permutation(old)]
    return tokens
