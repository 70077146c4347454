"""Evaluation protocols: which bytes are fed and which are scored, as index arrays.

A protocol plans and never sees a model. It turns the size of a split into cells, one
for each row of the result: a context length, the windows to feed and the targets to
score. `scoring.score` runs any plan, so a new protocol is one function here and
one entry in `PROTOCOLS`.

Indices: a window that starts at byte s is fed bytes s .. s+W-1 and predicts bytes
s+1 .. s+W; its target p, counted from 0, is byte s+1+p and has p+1 bytes of context.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rope_jax.experiment.config import EvalConfig

# Stretches of text that the intervals resample, where a protocol scores all bytes.
_UNITS = 256


@dataclass(frozen=True)
class Windows:
    """Windows of one length, and in each the range of targets that is scored.

    Attributes:
      length: bytes fed, W.
      starts: int64 `[M]`, the first byte fed. A window may reach past the data,
        with `stop` below W: what lies past the last scored target is padding.
      first: int64 `[M]`, the first target scored, in [0, W).
      stop: int64 `[M]`, one past the last target scored, at most W.
    """

    length: int
    starts: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    @property
    def last(self) -> int:
        """Targets at the end of the window that hold all of the scored ones."""
        return int(self.length - self.first.min())

    def scored(self, rows: slice = slice(None)) -> np.ndarray:
        """Which of each window's last targets are scored, bool `[M, last]`."""
        target = np.arange(self.length - self.last, self.length)
        first, stop = self.first[rows, None], self.stop[rows, None]
        return (first <= target) & (target < stop)

    def contexts(self) -> np.ndarray:
        """Bytes of context of each scored target, row by row, int64 `[n]`."""
        return np.nonzero(self.scored())[1] + self.length - self.last + 1

    def targets(self) -> np.ndarray:
        """The byte that each scored target is, row by row, int64 `[n]`."""
        row, column = np.nonzero(self.scored())
        return self.starts[row] + 1 + column + self.length - self.last


@dataclass(frozen=True)
class Cell:
    """One row of a result, before it is measured.

    Attributes:
      length: the context length that the row is about.
      windows: what to feed; cells that share it are fed once.
      shortest: the row holds the targets with at least this much context,
      longest: and at most this much.
      units: int64 `[U]`, ascending: the first byte of each stretch of text that
        the interval resamples.
      stride: bytes from one window's start to the next, or 0 if they are apart.
    """

    length: int
    windows: Windows
    shortest: int
    longest: int
    units: np.ndarray
    stride: int = 0


def anchored(size: int, config: EvalConfig, lengths: tuple[int, ...]) -> list[Cell]:
    """The same blocks of bytes at every length, at the end of their windows.

    `config.anchors` blocks of `config.block` bytes, evenly spread over the split and
    none before byte max(lengths), are chosen once. For a length W the W bytes that
    predict a block's last byte are fed, and the block is scored. So a difference
    between two lengths is a difference on the same bytes.
    """
    block, anchors, longest = config.block, config.anchors, max(lengths)
    shortest = f"at most the shortest length {min(lengths)}"
    _require(block <= min(lengths), config, "block", shortest)
    room = size - longest
    if room < anchors * block:
        raise _too_long(
            longest,
            size - anchors * block,
            f"with {anchors} anchors of {block} bytes on {_bytes(size, config)}",
        )
    begins = longest + (np.arange(anchors) * (room - block)) // max(1, anchors - 1)
    cells = []
    for length in lengths:
        full = np.full(anchors, length)
        windows = Windows(length, begins + block - 1 - length, full - block, full)
        cells.append(Cell(length, windows, 1, length, begins))
    reference = cells[0].windows.targets()
    for cell in cells:
        if not np.array_equal(cell.windows.targets(), reference):
            raise AssertionError(f"length {cell.length} scores other bytes")
    return cells


def sliding(size: int, config: EvalConfig, lengths: tuple[int, ...]) -> list[Cell]:
    """Overlapping windows, each scoring the targets that none before it did.

    Window starts are `config.stride` bytes apart (0 is a quarter of the length). The
    first window scores all of its targets, the others their last `stride`, so that
    every byte after the first is scored once, with at least W - stride + 1 bytes of
    context from the second window on.
    """
    shortest = f"at most the shortest length {min(lengths)}"
    _require(config.stride <= min(lengths), config, "stride", shortest)
    return [
        _strided(size, config, length, config.stride or max(1, length // 4))
        for length in lengths
    ]


def nonoverlap(size: int, config: EvalConfig, lengths: tuple[int, ...]) -> list[Cell]:
    """The split cut into windows that share no target; every target is scored.

    The mean context is half a window, so the result falls with the length even for
    a model that uses no more context than before; it is here because published
    numbers use it. The last window is as short as the rest of the data.
    """
    return [_strided(size, config, length, length) for length in lengths]


def per_position(size: int, config: EvalConfig, lengths: tuple[int, ...]) -> list[Cell]:
    """The loss by how much context a target has, in windows of max(lengths).

    A row holds the targets with more context than the row before and at most
    `length` bytes; the bounds are the powers of two and the lengths. Window starts
    are `config.stride` bytes apart (0 is an eighth of the window), and only bytes
    that are covered from all sides are scored: each is seen once at every `stride`
    positions, so that rows wider than the stride average the same bytes.
    """
    longest = max(lengths)
    size = _read(size, config)
    stride = config.stride or max(1, longest // 8)
    limit = f"at most the longest length {longest}"
    _require(stride <= longest, config, "stride", limit)
    if size < 2 * longest + stride:
        where = f"in two whole windows of {_bytes(size, config)}"
        possible = (size - config.stride) // 2 if config.stride else size * 8 // 17
        raise _too_long(longest, possible, where)
    starts = np.arange(0, size - longest, stride)
    # Byte t is a target of the windows that start in [t - W, t - 1].
    begin, end = longest, int(starts[-1]) + stride + 1
    first = np.clip(begin - 1 - starts, 0, longest)
    stop = np.clip(end - 1 - starts, 0, longest)
    windows = Windows(longest, starts, first, stop)
    bounds = {2**k for k in range(longest.bit_length()) if 2**k < longest}
    bounds = sorted(bounds | set(lengths))
    units = _units(begin, end, config)
    return [
        Cell(high, windows, low + 1, high, units, stride)
        for low, high in zip([0, *bounds], bounds, strict=False)
    ]


Protocol = Callable[[int, EvalConfig, tuple[int, ...]], list[Cell]]

PROTOCOLS: dict[str, Protocol] = {
    "anchored": anchored,
    "nonoverlap": nonoverlap,
    "sliding": sliding,
    "per_position": per_position,
}


def plan(size: int, config: EvalConfig, train_length: int) -> list[Cell]:
    """The cells of a run: every length of the config, and the training length.

    The training length is always measured, because differences are to it.

    Args:
      size: bytes in the split.
      config: the protocol, its lengths and its options.
      train_length: the context that the model was trained with, in bytes.

    Returns:
      One Cell for each row, by ascending length.

    Raises:
      ValueError: naming the flag, for an unknown protocol or split, or for lengths
        that are not positive, are given twice or do not fit the data.
    """
    _require(config.protocol in PROTOCOLS, config, "protocol", _one_of(PROTOCOLS))
    splits = ("validation", "test")
    _require(config.split in splits, config, "split", _one_of(splits))
    for name in ("anchors", "block", "batch_tokens", "bootstrap"):
        _require(getattr(config, name) >= 1, config, name, "at least 1")
    for name in ("stride", "max_bytes", "seed"):
        _require(getattr(config, name) >= 0, config, name, "0 or more")
    lengths = tuple(config.lengths)
    distinct = len(set(lengths)) == len(lengths) > 0 and min(lengths) >= 1
    _require(distinct, config, "lengths", "different positive numbers of bytes")
    everything = tuple(sorted({*lengths, train_length}))
    return PROTOCOLS[config.protocol](size, config, everything)


def _strided(size: int, config: EvalConfig, length: int, stride: int) -> Cell:
    size = _read(size, config)
    if length > size - 1:
        raise _too_long(length, size - 1, f"on {_bytes(size, config)}")
    rest = size - 1 - length  # targets after the first window's
    starts = stride * np.arange(1 + -(-rest // stride))
    first = np.where(starts == 0, 0, length - stride)
    stop = np.minimum(length, size - 1 - starts)
    windows = Windows(length, starts, first, stop)
    return Cell(length, windows, 1, length, _units(1, size, config), stride)


def _flag(name: str) -> str:
    return f"--{name} (in train.py --config.eval.{name})"


def _one_of(names) -> str:
    return "one of " + ", ".join(names)


def _require(valid: bool, config: EvalConfig, name: str, what: str) -> None:
    if not valid:
        got = getattr(config, name)
        raise ValueError(f"{_flag(name)} must be {what}, got {got!r}")


def _read(size: int, config: EvalConfig) -> int:
    return min(size, config.max_bytes or size)


def _units(begin: int, end: int, config: EvalConfig) -> np.ndarray:
    """About `_UNITS` stretches of text, none shorter than a block."""
    return np.arange(begin, end, max(config.block, -(-(end - begin) // _UNITS)))


def _bytes(size: int, config: EvalConfig) -> str:
    return f"the {size:,} bytes of the {config.split} split"


def _too_long(length: int, longest: int, where: str) -> ValueError:
    if longest < 1:
        return ValueError(f"{_flag('lengths')}: no length fits {where}, got {length}")
    return ValueError(
        f"{_flag('lengths')} must be at most {longest} {where}, got {length} "
        "(the training length is always among them)"
    )
