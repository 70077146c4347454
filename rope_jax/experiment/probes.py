"""Texts that are made to ask one question of a model.

Sources: Elhage et al. 2021, "A mathematical framework for transformer circuits", and
Olsson et al. 2022, arXiv:2209.11895 (induction: a repeated random sequence is
predicted from its first copy).
"""

import dataclasses
import functools

import numpy as np

from rope_jax.experiment.anchors import block_begins, same_bytes, windows_at
from rope_jax.experiment.plans import Cell, Request, flag


def induction(request: Request) -> list[Cell]:
    """A random string twice in the text: the bits that the second copy saves.

    Nothing but the first copy tells the second, so what it saves is read from
    `distance` bytes back, whatever the model knows of the language. The string has
    `block` bytes. Its second copy takes the place of the anchored block at the end of
    the window of W bytes; the first begins W - 2 block bytes before that, after
    block + 1 bytes of real text. Its bytes are drawn one by one from the split, so
    that they are as frequent as in the text but in no order; `seed` and the anchor
    fix it for all lengths.

    bpc is the bits per byte of the second copy, and gain is that of the first copy
    less that of the second, paired anchor by anchor. It is at most what the first copy
    costs, about 0 where the model cannot look so far back, and below 0 where it does
    worse at the end of the window than near its beginning.
    """
    config = request.config
    block, shortest = config.block, min(request.lengths)
    if shortest < 3 * block:
        raise ValueError(
            f"{flag('lengths')} must be at least three times {flag('block')}, {block}, "
            f"for two copies and a beginning, got {shortest} (the training length is "
            "always among them)"
        )
    begins = block_begins(request, block)
    edit = functools.partial(_planted, seed=config.seed, block=block)
    cells = []
    for length in request.lengths:
        windows = windows_at(begins, block, length)
        # Both copies are read from one pass, with all that lies between them.
        windows = dataclasses.replace(
            windows, first=np.full_like(begins, block), edit=edit
        )
        distance = length - 2 * block
        first = Cell(length, windows, block + 1, 2 * block, begins - distance)
        cells.append(
            Cell(
                length,
                windows,
                length - block + 1,
                length,
                begins,
                versus=first,
                saves=True,
                distance=distance,
            )
        )
    return same_bytes(cells)


def _planted(tokens, data, rows, *, seed, block):
    tokens = tokens.copy()
    for anchor, row in enumerate(tokens, rows.start):
        drawn = np.random.default_rng((seed, anchor)).integers(0, len(data), block)
        row[block + 1 : 2 * block + 1] = row[-block:] = data[drawn]
    return tokens
