"""What a run reports: sums on the device, rows in files, progress for a person."""

import json
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import tqdm
from tensorboardX import SummaryWriter

from rope_jax.experiment import atomic

# Sums since the last row, and the first step of the run whose numbers were not
# finite (0: none), which outlives the row.
Window = dict[str, jax.Array]


def empty_window() -> Window:
    """The sums over no step."""
    zero = jnp.zeros((), jnp.float32)
    return {
        "steps": zero,
        "nats": zero,
        "targets": zero,
        "grad_norm": zero,
        "bad_step": jnp.zeros((), jnp.int32),
    }


def add_step(window: Window, sums: dict[str, jax.Array], step: jax.Array) -> Window:
    """The window with the sums of one more step; pure, on the device.

    Args:
      window: sums so far.
      sums: of one step, from `make_train_step`.
      step: its number, from 1.
    """
    finite = jnp.all(jnp.isfinite(jnp.stack(list(sums.values()))))
    newly_bad = ~finite & (window["bad_step"] == 0)
    return {
        "steps": window["steps"] + 1,
        "nats": window["nats"] + sums["nats"],
        "targets": window["targets"] + sums["targets"],
        "grad_norm": window["grad_norm"] + sums["grad_norm"],
        "bad_step": jnp.where(newly_bad, step, window["bad_step"]),
    }


def restart_window(window: Window) -> Window:
    """An empty window that still knows of a bad step."""
    return empty_window() | {"bad_step": window["bad_step"]}


def summarize(window: dict[str, float]) -> dict[str, float]:
    """Loss (nats per target), bpc (bits per byte) and the mean gradient norm.

    bpc = loss / ln 2, because one byte is one target. NaN where there was no target.
    """
    loss = _ratio(window["nats"], window["targets"])
    return {
        "loss": loss,
        "bpc": loss / math.log(2),
        "grad_norm": _ratio(window["grad_norm"], window["steps"]),
    }


def _ratio(total, count) -> float:
    return float(total) / float(count) if count else math.nan


class Metrics:
    """Writes rows to metrics.jsonl and TensorBoard, and shows progress on stderr.

    A context manager. On a terminal it shows a bar, elsewhere one line for each row.
    Rows of steps after `start` are left from a run that was interrupted later than
    its last checkpoint; they are dropped, since those steps are done again. Only the
    process that is `primary` writes or shows anything.

    Args:
      run_dir: where the files go.
      start: updates done already.
      steps: updates in the whole run.
      primary: whether this process reports.
      label: stands before what is shown, where several runs show theirs.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        start: int,
        steps: int,
        primary: bool = True,
        label: str = "",
    ):
        self._primary, self._label = primary, label
        self._start, self._steps = start, steps
        self._began = time.monotonic()
        if not primary:
            return
        path = run_dir / "metrics.jsonl"
        _drop_rows_after(path, start)
        self._file = path.open("a")
        self._events = SummaryWriter(str(run_dir), purge_step=start + 1, flush_secs=10)
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=steps, initial=start, unit="step", desc=label or None
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if not self._primary:
            return
        self._file.close()
        self._events.close()
        if self._bar is not None:
            self._bar.close()

    def write(self, row: dict[str, float]) -> None:
        """Add a row; it needs step, loss, bpc and bytes_per_second.

        A value that is not finite becomes null: JSON knows no NaN.
        """
        if not self._primary:
            return
        step = row["step"]
        finite = {k: v for k, v in row.items() if math.isfinite(v)}
        clean = {k: finite.get(k) for k in row}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in finite.items():
            if name != "step":
                self._events.add_scalar(name, value, step)
        self._show(row)

    def advance(self, step: int) -> None:
        """Move the bar, where there is one."""
        if self._primary and self._bar is not None:
            self._bar.update(step - self._bar.n)

    def _show(self, row: dict[str, float]) -> None:
        figures = (
            f"loss {row['loss']:.4f}  bpc {row['bpc']:.4f}  "
            f"{row['bytes_per_second']:,.0f} bytes/s"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(figures)
            return
        done = row["step"] - self._start
        left = (time.monotonic() - self._began) / max(done, 1)
        left *= self._steps - row["step"]
        line = f"step {row['step']}/{self._steps}  {figures}  ETA {format_time(left)}"
        label = f"{self._label}: " if self._label else ""
        print(label + line, file=sys.stderr, flush=True)


def format_time(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> format_time(3725.4)
    '1:02:05'
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _drop_rows_after(path: pathlib.Path, step: int) -> None:
    """Keep the rows up to a step; a last row that was cut short goes as well."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    if kept != lines:
        atomic.write_text(path, "".join(kept))


def _step_of(line: str) -> float:
    if not line.endswith("\n"):
        return math.inf
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
