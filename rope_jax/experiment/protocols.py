"""Evaluation protocols by name: which bytes are fed and which are scored.

`PROTOCOLS` is the table and `plan` the door to it. A new protocol is one function
from a `plans.Request` to cells and one entry here; no other file knows their names.

  anchored      the same blocks of bytes at the end of windows of every length
  nonoverlap    the text cut into windows, every byte scored once
  sliding       overlapping windows, every byte scored once with much context
  per_position  the loss by how much context a byte has
  last_token    anchored with one byte for each window
  control       anchored, with the bytes beyond the training length made useless
  window_cap    anchored, with attention capped to the training length
  induction     a random string planted twice: the bits that the second copy saves

Every result is in bits per byte: the sum of -log2 p(byte | bytes fed before it) over
all scored bytes, divided by their number, never a mean of means. Perplexity is 2 to
that power, per byte as well.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from rope_jax.experiment.anchors import anchored, last_token
from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.controls import control, window_cap
from rope_jax.experiment.plans import Cell, Request, Windows, flag
from rope_jax.experiment.probes import induction

# Stretches of text that the intervals resample, where a protocol scores all bytes.
_UNITS = 256


def sliding(request: Request) -> list[Cell]:
    """Overlapping windows, each scoring the targets that none before it did.

    Window starts are `stride` bytes apart (0 is a quarter of the length). The first
    window scores all of its targets, the others their last `stride`, so that every
    byte after the first is scored once, with at least W - stride + 1 bytes of context
    from the second window on.
    """
    stride, shortest = request.config.stride, min(request.lengths)
    limit = f"at most the shortest length {shortest}"
    request.require(stride <= shortest, "stride", limit)
    return [
        _strided(request, length, stride or max(1, length // 4))
        for length in request.lengths
    ]


def nonoverlap(request: Request) -> list[Cell]:
    """The split cut into windows that share no target; every target is scored.

    The mean context is half a window, so the result falls with the length even for
    a model that uses no more context than before; it is here because published
    numbers use it. The last window is as short as the rest of the data.
    """
    return [_strided(request, length, length) for length in request.lengths]


def per_position(request: Request) -> list[Cell]:
    """The loss by how much context a target has, in windows of max(lengths).

    A row holds the targets with more context than the row before and at most
    `length` bytes; the bounds are the powers of two and the lengths. Window starts
    are `stride` bytes apart (0 is an eighth of the window), and only bytes that are
    covered from all sides are scored: each is seen once at every `stride` positions,
    so that rows wider than the stride average the same bytes.
    """
    request = _read(request)
    config, longest, size = request.config, max(request.lengths), request.size
    stride = config.stride or max(1, longest // 8)
    limit = f"at most the longest length {longest}"
    request.require(stride <= longest, "stride", limit)
    if size < 2 * longest + stride:
        where = f"in two whole windows of {request.text}"
        possible = (size - config.stride) // 2 if config.stride else size * 8 // 17
        raise request.too_long(longest, possible, where)
    starts = np.arange(0, size - longest, stride)
    # Byte t is a target of the windows that start in [t - W, t - 1].
    begin, end = longest, int(starts[-1]) + stride + 1
    first = np.clip(begin - 1 - starts, 0, longest)
    stop = np.clip(end - 1 - starts, 0, longest)
    windows = Windows(longest, starts, first, stop)
    bounds = {2**k for k in range(longest.bit_length()) if 2**k < longest}
    bounds = sorted(bounds | set(request.lengths))
    units = _units(begin, end, config)
    return [
        Cell(high, windows, low + 1, high, units, stride)
        for low, high in zip([0, *bounds], bounds, strict=False)
    ]


Protocol = Callable[[Request], list[Cell]]

PROTOCOLS: dict[str, Protocol] = {
    "anchored": anchored,
    "nonoverlap": nonoverlap,
    "sliding": sliding,
    "per_position": per_position,
    "last_token": last_token,
    "control": control,
    "window_cap": window_cap,
    "induction": induction,
}

_BLOCKS = ("anchored", "last_token", "control", "window_cap", "induction")
_EVERYTHING = ("nonoverlap", "sliding", "per_position")
# Options that not every protocol reads, and which do.
_READ_BY = {
    "anchors": _BLOCKS,
    "block": tuple(name for name in PROTOCOLS if name != "last_token"),
    "reach": _BLOCKS,
    "stride": ("sliding", "per_position"),
    "max_bytes": _EVERYTHING,
    "examples": ("task",),
}


def check_options(protocol: str, chosen: Iterable[str]) -> None:
    """Raise ValueError, naming the flag, for an option that would have no effect.

    Args:
      protocol: one of `PROTOCOLS`; another name is left to `plan` to refuse, and a
        task to `task_evaluation.check`.
      chosen: the fields of EvalConfig that a user set.
    """
    for name in chosen:
        readers = _READ_BY.get(name, PROTOCOLS)
        if protocol in PROTOCOLS and protocol not in readers:
            raise ValueError(
                f"{flag(name)} would have no effect on the protocol {protocol!r}; it "
                f"is an option of {', '.join(readers)}"
            )


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
    lengths = tuple(config.lengths)
    lengths = lengths or tuple(n * train_length for n in config.multiples)
    everything = tuple(sorted({*lengths, train_length}))
    request = Request(size, config, everything, train_length)
    request.require(config.protocol in PROTOCOLS, "protocol", _one_of(PROTOCOLS))
    splits = ("validation", "test")
    request.require(config.split in splits, "split", _one_of(splits))
    for name in ("anchors", "block", "batch_tokens", "bootstrap"):
        request.require(getattr(config, name) >= 1, name, "at least 1")
    for name in ("reach", "stride", "max_bytes", "seed"):
        request.require(getattr(config, name) >= 0, name, "0 or more")
    distinct = len(set(lengths)) == len(lengths) > 0 and min(lengths) >= 1
    given = "lengths" if config.lengths or not config.multiples else "multiples"
    request.require(distinct, given, "different positive numbers")
    return PROTOCOLS[config.protocol](request)


def _strided(request: Request, length: int, stride: int) -> Cell:
    request = _read(request)
    size = request.size
    if length > size - 1:
        raise request.too_long(length, size - 1, f"on {request.text}")
    rest = size - 1 - length  # targets after the first window's
    starts = stride * np.arange(1 + -(-rest // stride))
    first = np.where(starts == 0, 0, length - stride)
    stop = np.minimum(length, size - 1 - starts)
    windows = Windows(length, starts, first, stop)
    units = _units(1, size, request.config)
    return Cell(length, windows, 1, length, units, stride)


def _read(request: Request) -> Request:
    """The request on as much of the split as `max_bytes` lets be read."""
    size = min(request.size, request.config.max_bytes or request.size)
    return dataclasses.replace(request, size=size)


def _units(begin: int, end: int, config: EvalConfig) -> np.ndarray:
    """About `_UNITS` stretches of text, none shorter than a block."""
    return np.arange(begin, end, max(config.block, -(-(end - begin) // _UNITS)))


def _one_of(names) -> str:
    return "one of " + ", ".join(names)
