"""Protocols that score the same blocks of bytes at every length.

The blocks are chosen once and lie at the end of their windows, so only the amount of
text before them differs from one length to the next: every difference is paired, byte
by byte. `control`, `window_cap` and `induction` put their windows here as well.

Source: Al-Rfou et al. 2018, arXiv:1808.04444 (one scored byte for each window).
"""

import numpy as np

from rope_jax.experiment.plans import Cell, Request, Windows, flag


def anchored(request: Request) -> list[Cell]:
    """The same blocks of bytes at every length, at the end of their windows.

    `anchors` blocks of `block` bytes, evenly spread over the split and none before
    byte max(lengths, reach), are chosen once. For a length W the W bytes that predict
    a block's last byte are fed, and the block is scored: its targets have
    W - block + 1 to W bytes of context. So a difference between two lengths is a
    difference on the same bytes, in bits per byte.
    """
    return _at_all_lengths(request, request.config.block)


def last_token(request: Request) -> list[Cell]:
    """One scored byte for each window: every target has exactly W bytes of context.

    `anchored` with blocks of one byte, whatever `block` says. Where a byte's loss has
    a standard deviation of s bits, the standard error is about s / sqrt(anchors), so
    it takes many anchors: 0.006 bits at 100,000 of them for s = 2.
    """
    return _at_all_lengths(request, 1)


def block_begins(request: Request, block: int) -> np.ndarray:
    """The first byte of each anchor's block, int64 `[anchors]`, ascending.

    Raises:
      ValueError: naming the flag, if the blocks do not fit behind the longest window.
    """
    config, lengths = request.config, request.lengths
    shortest = f"at most the shortest length {min(lengths)}"
    request.require(block <= min(lengths), "block", shortest)
    possible = request.size - config.anchors * block
    where = f"with {config.anchors} anchors of {block} bytes on {request.text}"
    if max(lengths) > possible:
        raise request.too_long(max(lengths), possible, where)
    if config.reach > possible:
        raise ValueError(
            f"{flag('reach')} must be at most {possible} {where}, got {config.reach}"
        )
    begin = max(*lengths, config.reach)
    room = request.size - begin - block
    return begin + (np.arange(config.anchors) * room) // max(1, config.anchors - 1)


def windows_at(begins: np.ndarray, block: int, length: int) -> Windows:
    """Windows of a length whose last `block` targets are the blocks, and scored."""
    full = np.full(len(begins), length)
    return Windows(length, begins + block - 1 - length, full - block, full)


def same_bytes(cells: list[Cell]) -> list[Cell]:
    """The cells, which must all score the same bytes in the same order."""
    reference = cells[0].targets()
    for cell in cells:
        if not np.array_equal(cell.targets(), reference):
            raise AssertionError(f"length {cell.length} scores other bytes")
    return cells


def _at_all_lengths(request: Request, block: int) -> list[Cell]:
    begins = block_begins(request, block)
    return same_bytes(
        [
            Cell(length, windows_at(begins, block, length), 1, length, begins)
            for length in request.lengths
        ]
    )
