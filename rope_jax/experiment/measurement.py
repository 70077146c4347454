"""From a plan to rows of numbers: bits per byte, intervals, differences and gains.

`scoring.score` gives the nats of each scored byte; here they are summed in float64 on
the host, by stretches of text that the block bootstrap resamples. bpc is sum(nats) /
(bytes * ln 2) and perplexity 2**bpc, per byte. Differences are taken stretch by stretch
before they are averaged, so that what two rows share drops out of the interval.
"""

import math
from collections.abc import Callable, Iterator

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
    if capped is None and any(cell.capped for cell in cells):
        raise ValueError("capped must be given for a plan that caps attention")

    def run(windows: Windows, cap: bool) -> np.ndarray:
        options = {"batch_tokens": config.batch_tokens, "mesh": mesh}
        return score(capped if cap else apply, params, windows, data, **options)

    values: dict[Cell, np.ndarray] = {}
    rows: dict[Cell, dict] = {}
    for cell, sums, counts in _unit_sums(run, cells, max_length):
        row = rows[cell] = {
            "length": cell.length,
            "control": cell.control,
            "distance": cell.distance,
            "window": cell.windows.length,
            "stride": cell.stride or None,
            "scored_bytes": int(counts.sum()),
            "reason": None,
        }
        if sums is None:
            row["reason"] = f"the model's positions end at {max_length}"
        elif not np.isfinite(sums).all():
            row["reason"] = "the loss is not finite"
        else:
            values[cell] = unit_values(sums / math.log(2), counts)
    # No protocol has two conditions at the training length.
    trained = next((c for c in cells if c.length == train_length), None)
    return [rows[cell] | _statistics(cell, trained, values, config) for cell in cells]


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
    cell: Cell, trained: Cell | None, values: dict[Cell, np.ndarray], config: EvalConfig
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
    if trained in values:
        row |= interval("delta", own - values[trained])[1]
    if cell.versus in values:
        costs = own - values[cell.versus]
        row |= interval("gain", -costs if cell.saves else costs)[1]
    return {name: None if v is None or math.isnan(v) else v for name, v in row.items()}
