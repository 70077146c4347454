"""From a plan to rows of numbers: bits per byte, intervals, differences and gains.

`scoring.score` gives the nats of each scored byte; here they are summed in float64 on
the host, by stretches of text that the block bootstrap resamples. bpc is sum(nats) /
(bytes * ln 2) and perplexity 2**bpc, per byte. Differences are taken stretch by stretch
before they are averaged, so that what two rows share drops out of the interval.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from rope_jax.experiment.bootstrap import mean_interval, unit_values
from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.plans import Cell, Windows
from rope_jax.experiment.scoring import Apply, score

# Nats of the scored bytes of some windows, by the model with capped attention or not.
_Run = Callable[[Windows, bool], np.ndarray]


def measure(
    apply: Apply,
    params,
    cells: list[Cell],
    data: np.ndarray,
    config: EvalConfig,
    *,
    train_length: int,
    capped: Apply | None = None,
    max_length: int | None = None,
    mesh: Mesh | None = None,
) -> list[dict]:
    """Run a plan and summarise it: one row for each cell.

    Args:
      apply: as for `scoring.score`.
      params: what `apply` takes.
      cells: the plan.
      data: uint8 `[N]`, the split.
      config: batch size, resamples and seed.
      train_length: the length that differences are to.
      capped: the model that attends to the last `train_length` bytes alone, for the
        same params; needed for cells that ask for it.
      max_length: the longest window that the model takes; None for any. A cell
        beyond it becomes a row without a value, and with a `reason`.
      mesh: as for `scoring.score`.

    Returns:
      Rows with length, control, distance, bpc, bpc_low, bpc_high, standard_error,
      perplexity, delta, delta_low, delta_high, gain, gain_low, gain_high,
      scored_bytes (a byte counts each time that it is scored), window, stride and
      reason. What is not known is None.

    Raises:
      ValueError: a cell asks for capped attention and `capped` is None.
    """
    options = {"capped": capped, "max_length": max_length, "mesh": mesh}
    scores = score_cells(apply, params, cells, data, config, **options)
    trained = reference(cells, scores, train_length)
    return summarize(cells, scores, config, trained=trained)


class Scores(NamedTuple):
    """What a model scored in each cell, before any statistic.

    Attributes:
      rows: what a row says beside its numbers; a `reason` where there are none.
      values: bits per byte of each stretch of text, float64 `[U]`, where known.
    """

    rows: dict[Cell, dict]
    values: dict[Cell, np.ndarray]

    @classmethod
    def without(cls, cells: list[Cell], reason: str) -> "Scores":
        """Rows that all lack a value for one reason."""
        return cls({cell: _row(cell, 0, reason) for cell in cells}, {})


def score_cells(
    apply: Apply,
    params,
    cells: list[Cell],
    data: np.ndarray,
    config: EvalConfig,
    *,
    capped: Apply | None = None,
    max_length: int | None = None,
    mesh: Mesh | None = None,
) -> Scores:
    """Run a plan; the arguments are those of `measure`."""
    if capped is None and any(cell.capped for cell in cells):
        raise ValueError("capped must be given for a plan that caps attention")

    def run(windows: Windows, cap: bool) -> np.ndarray:
        options = {"batch_tokens": config.batch_tokens, "mesh": mesh}
        return score(capped if cap else apply, params, windows, data, **options)

    scores = Scores({}, {})
    for cell, sums, counts in _unit_sums(run, cells, max_length):
        row = scores.rows[cell] = _row(cell, int(counts.sum()))
        if sums is None:
            row["reason"] = f"the model's positions end at {max_length}"
        elif not np.isfinite(sums).all():
            row["reason"] = "the loss is not finite"
        else:
            scores.values[cell] = unit_values(sums / math.log(2), counts)
    return scores


def reference(
    cells: list[Cell], scores: Scores, train_length: int
) -> np.ndarray | None:
    """The values at the training length, where no protocol has two conditions."""
    cell = next((cell for cell in cells if cell.length == train_length), None)
    return scores.values.get(cell)


def summarize(
    cells: list[Cell],
    scores: Scores,
    config: EvalConfig,
    *,
    trained: np.ndarray | None,
) -> list[dict]:
    """One row for each cell, with intervals and paired differences.

    Args:
      cells: the plan.
      scores: what a model scored in it.
      config: resamples and seed.
      trained: the values that `delta` is to, of this model or of another; None if
        they are not known.

    Returns:
      As `measure`.
    """
    return [
        scores.rows[cell] | _statistics(cell, trained, scores.values, config)
        for cell in cells
    ]


def _row(cell: Cell, scored: int, reason: str | None = None) -> dict:
    return {
        "length": cell.length,
        "control": cell.control,
        "distance": cell.distance,
        "window": cell.windows.length,
        "stride": cell.stride or None,
        "scored_bytes": scored,
        "reason": reason,
    }


def _unit_sums(
    run: _Run, cells: list[Cell], max_length: int | None
) -> Iterator[tuple[Cell, np.ndarray | None, np.ndarray]]:
    """Nats summed over, and targets counted in, each unit of each cell's text.

    A cell that another's gain needs comes before it, whether it is a row or not.
    """
    planned = None  # the windows whose scores are at hand, and by which model
    done = set()
    for cell in cells:
        if max_length is not None and cell.longest > max_length:
            yield cell, None, np.zeros(1)
            continue
        for one in (cell.versus, cell):
            if one is None or one in done:
                continue
            done.add(one)
            windows = one.windows
            if planned != (windows, one.capped):
                planned = windows, one.capped
                if max_length is not None and windows.length > max_length:
                    windows = _shortened(windows, max_length)
                nats = run(windows, one.capped).astype(np.float64)
                contexts, targets = windows.contexts(), windows.targets()
            kept = one.holds(contexts)
            unit = np.searchsorted(one.units, targets[kept], side="right") - 1
            size = len(one.units)
            sums = np.bincount(unit, weights=nats[kept], minlength=size)
            yield one, sums, np.bincount(unit, minlength=size)


def _shortened(windows: Windows, length: int) -> Windows:
    """The same windows without their end; causal, so their beginning is unchanged."""
    kept = windows.first < length
    return Windows(
        length,
        windows.starts[kept],
        windows.first[kept],
        np.minimum(windows.stop[kept], length),
    )


def _statistics(
    cell: Cell,
    trained: np.ndarray | None,
    values: dict[Cell, np.ndarray],
    config: EvalConfig,
) -> dict:
    """A row's numbers from its own values and those that it is compared with."""

    def interval(name, series):
        mean, error, low, high, _ = mean_interval(
            series, resamples=config.bootstrap, seed=config.seed
        )
        return error, {name: mean, f"{name}_low": low, f"{name}_high": high}

    names = ["bpc", "bpc_low", "bpc_high", "standard_error", "perplexity"]
    names += ["delta", "delta_low", "delta_high", "gain", "gain_low", "gain_high"]
    row, own = dict.fromkeys(names), values.get(cell)
    if own is None:
        return row
    row["standard_error"], statistics = interval("bpc", own)
    row |= statistics
    row["perplexity"] = 2.0 ** row["bpc"] if row["bpc"] < 1024 else None
    if trained is not None:
        row |= interval("delta", own - trained)[1]
    if cell.versus in values:
        costs = own - values[cell.versus]
        row |= interval("gain", -costs if cell.saves else costs)[1]
    return {name: None if v is None or math.isnan(v) else v for name, v in row.items()}
