"""Results as text and files: rows of dictionaries in, a table, JSON and CSV out."""

import csv
import io
import json
import math
import pathlib
import textwrap
from collections.abc import Iterable

import numpy as np

from rope_jax.experiment import atomic

WIDTH = 100  # columns of a terminal that a table may take
# What the runs of one series have in common, whatever their seed.
_SERIES = ("encoding", "scaling", "train_length", "control", "length")
_GAINS = {
    "control": "what the control costs in bits per byte, against the real old bytes",
    "window_cap": "what the cap costs in bits per byte, against full attention",
    "induction": "bits per byte that the second copy saves, against the first",
}


def format_table(rows: list[dict]) -> str:
    """The table of an evaluation: a line for each run, a column for each length.

    Two blocks: bits per byte, and the paired difference to the training length; a
    third one of gains for the protocols that report them. A number after "±" is half
    of the 95 % interval; on the lines over several seeds it is the standard deviation
    over them. A model that was changed for the evaluation has lines of its own ("rope
    +yarn:4"). Lengths that do not fit beside each other in 100 columns go into further
    blocks.

    Args:
      rows: the rows of `evaluation.evaluate_workdir`, of one protocol.

    Returns:
      Lines of at most 100 columns.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("rows must not be empty")
    rows = name_attention(rows)
    parts = [_headline(rows)]
    for name, title in (
        ("bpc", "bits per byte, by bytes of context"),
        ("delta", "difference in bits per byte to the training length"),
        ("gain", _GAINS.get(rows[0]["protocol"], "gain in bits per byte")),
    ):
        if name == "gain" and all(row.get(name) is None for row in rows):
            continue
        parts += [f"{title}:\n{block}" for block in blocks(_lines(rows, name))]
    return "\n\n".join([*parts, "\n".join(_notes(rows))])


def label(row: dict) -> str:
    """The model of a row: its encoding, and what was changed for the evaluation."""
    scaling = row.get("scaling", "")
    return f"{row['encoding']} +{scaling}" if scaling else row["encoding"]


def aggregate(rows: Iterable[dict]) -> list[dict]:
    """Means over the seeds of each model, training length, control and length.

    Args:
      rows: rows of one protocol; those without a value count as missing.

    Returns:
      Rows with encoding, scaling, train_length, control, length, seeds (how many have a
      value), bpc, delta and gain (means) and bpc_sd, delta_sd, gain_sd (sample
      standard deviation, ddof 1; None for fewer than two seeds), in the order of
      first appearance.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in _SERIES), []).append(row)
    made = []
    for key, group in groups.items():
        one = dict(zip(_SERIES, key, strict=True))
        one["seeds"] = sum(row["bpc"] is not None for row in group)
        for name in ("bpc", "delta", "gain"):
            values = [row[name] for row in group if row.get(name) is not None]
            one[name] = float(np.mean(values)) if values else None
            several = len(values) > 1
            one[f"{name}_sd"] = float(np.std(values, ddof=1)) if several else None
        made.append(one)
    return made


def name_attention(rows: Iterable[dict]) -> list[dict]:
    """The rows, those of linear attention with that word beside their encoding."""
    return [
        row | {"encoding": f"{row['encoding']} linear"}
        if row.get("attention") == "linear"
        else row
        for row in rows
    ]


def write_json(path: pathlib.Path, rows: list[dict]) -> None:
    """Rows as a JSON list; what is not a finite number becomes null."""
    text = json.dumps([_plain(row) for row in rows], indent=1, allow_nan=False)
    atomic.write_text(path, text + "\n")


def write_csv(path: pathlib.Path, rows: list[dict]) -> None:
    """Rows as CSV with one header; a column for every key, empty where unknown."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_plain(row) for row in rows)
    atomic.write_text(path, text.getvalue())


def _plain(row: dict) -> dict:
    def plain(value):
        value = value.item() if isinstance(value, np.generic) else value
        finite = not isinstance(value, float) or math.isfinite(value)
        return value if finite else None

    return {name: plain(value) for name, value in row.items()}


def _headline(rows: list[dict]) -> str:
    def span(name, form="{:,}"):
        known = (row[name] for row in rows if row["bpc"] is not None)
        values = sorted({value for value in known if value is not None})
        ends = values[:1] + values[1:][-1:]
        return " to ".join(form.format(value) for value in ends) or "no"

    apart = all(row["stride"] is None for row in rows)
    stride = "apart" if apart else f"{span('stride')} bytes from one to the next"
    return (
        f"{rows[0]['protocol']} protocol, {rows[0]['split']} split, "
        f"{span('scored_bytes')} bytes scored at each length\n"
        f"trained at {span('train_length')} bytes of context, "
        f"checkpoint of step {span('step')}, {span('dtype', '{}')}, "
        f"seed {span('seed')}\n"
        f"windows of {span('window')} bytes, {stride}, "
        f"standard error {span('standard_error', '{:.4f}')}"
    )


def blocks(lines: list[tuple[tuple, dict[int, str]]]) -> list[str]:
    """The lines of a table, cut into as many blocks as the width needs.

    Args:
      lines: (label, cells by length) of each line, the header first.
    """
    lengths = sorted(lines[0][1])
    columns = zip(*(key for key, _ in lines), strict=True)
    label_widths = [max(map(len, column)) for column in columns]
    labels = [
        "  ".join(t.ljust(w) for t, w in zip(key, label_widths, strict=True))
        for key, _ in lines
    ]
    width = 2 + max(len(text) for _, cells in lines for text in cells.values())
    fit = max(1, (WIDTH - len(labels[0])) // width)
    return [
        "\n".join(
            label + "".join(cells.get(n, "").rjust(width) for n in lengths[i : i + fit])
            for label, (_, cells) in zip(labels, lines, strict=True)
        )
        for i in range(0, len(lengths), fit)
    ]


def _lines(rows: list[dict], name: str) -> list[tuple[tuple, dict[int, str]]]:
    """(label, cells by length) of each line, the header first."""
    controls = any(row.get("control") for row in rows)
    runs: dict[tuple, dict[int, str]] = {}
    for row in rows:
        if name == "gain" and row.get(name) is None:
            continue
        key = (*_label(row, controls), str(row["seed"]))
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        half = None if low is None or high is None else (high - low) / 2
        runs.setdefault(key, {})[row["length"]] = _cell(name, row[name], half)
    lengths = sorted({length for cells in runs.values() for length in cells})
    heads = ("encoding", "trained", *["control"][:controls], "seed")
    lines = [(heads, {n: str(n) for n in lengths})]
    means: dict[tuple, dict[int, str]] = {}
    for row in aggregate(rows):
        key = _label(row, controls)
        text = _cell(name, row[name], row[f"{name}_sd"])
        means.setdefault(key, {})[row["length"]] = text
    for mean_key, mean_cells in means.items():
        own = [(key, cells) for key, cells in runs.items() if key[:-1] == mean_key]
        lines += own
        if len(own) > 1:
            lines.append(((*mean_key, "mean"), mean_cells))
    return lines


def _label(row: dict, controls: bool) -> tuple[str, ...]:
    """What the lines of one run's seeds have in common."""
    model = label(row), str(row["train_length"])
    return (*model, row["control"]) if controls else model


def _cell(name: str, value: float | None, spread: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.3f}" if name == "bpc" else f"{value:+.3f}"
    if spread is None:
        return text
    return text + "±" + f"{spread:.3f}"[:5].removeprefix("0")


def _notes(rows: list[dict]) -> list[str]:
    notes = ["±: half of the 95 % interval (block bootstrap along the text)"]
    if any(row["seeds"] > 1 for row in aggregate(rows)):
        notes.append("mean ±: mean and standard deviation over the seeds")
    if any(row.get("scaling") for row in rows):
        notes.append(
            "+: changed for the evaluation alone; differences are to the unchanged "
            "model at its training length"
        )
    missing: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["bpc"] is None:
            lengths = missing.setdefault((label(row), row["reason"]), [])
            lengths += [] if row["length"] in lengths else [row["length"]]
    for (model, reason), lengths in missing.items():
        shown = ", ".join(map(str, sorted(lengths)))
        notes.append(f"-: no value for {model} at {shown}: {reason}")
    return [part for note in notes for part in textwrap.wrap(note, WIDTH)]
