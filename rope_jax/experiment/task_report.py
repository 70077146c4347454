"""The printed table of a task: exact match and token accuracy by length."""

import textwrap

import numpy as np

from rope_jax.experiment.rows import complete
from rope_jax.experiment.table import WIDTH, blocks, label
from rope_jax.experiment.task_evaluation import SOLVED

_SOLVED = f"{SOLVED:.0%}"


def format_table(rows: list[dict]) -> str:
    """The table of an evaluation: a line for each run, a column for each length.

    Two blocks for each task: the exact match with half of its 95 % interval, and the
    token accuracy, both in percent. A line over several seeds has their mean and
    their standard deviation. The column in front of the lengths is the longest length
    that was solved.

    Args:
      rows: the rows of `evaluation.evaluate_workdir`, of the protocol "task".

    Returns:
      Lines of at most 100 columns.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("rows must not be empty")
    rows = [row | {"encoding": label(complete(row))} for row in rows]
    parts = []
    for name in dict.fromkeys(row["corpus"] for row in rows):
        own = [row for row in rows if row["corpus"] == name]
        parts.append(_headline(own))
        for value, title in (
            ("exact_match", "exact match in percent, by length"),
            ("token_accuracy", "scored bytes that are right in percent, by length"),
        ):
            parts += [f"{title}:\n{block}" for block in blocks(_lines(own, value))]
    return "\n\n".join([*parts, "\n".join(_notes(rows))])


def _headline(rows: list[dict]) -> str:
    first = rows[0]
    steps = sorted({row["step"] for row in rows})
    shown = " to ".join(f"{n:,}" for n in dict.fromkeys([steps[0], steps[-1]]))
    return (
        f"{first['corpus']}: {first['examples']} examples of each length, "
        f"{first['split']} split, checkpoint of step {shown}"
    )


def _lines(rows: list[dict], name: str) -> list[tuple[tuple, dict[int, str]]]:
    """(label, cells by length) of each line, the header first."""
    lengths = sorted({row["length"] for row in rows})
    header = ("encoding", "trained", "seed", _SOLVED)
    lines = [(header, {n: str(n) for n in lengths})]
    models: dict[tuple, dict[int, list[dict]]] = {}
    for row in rows:
        model = models.setdefault((row["encoding"], str(row["train_length"])), {})
        model.setdefault(row["seed"], []).append(row)
    for model, seeds in models.items():
        for seed, own in seeds.items():
            solved = str(own[0]["longest_solved"] or "-")
            cells = {row["length"]: _cell(row, name) for row in own}
            lines.append(((*model, str(seed), solved), cells))
        if len(seeds) > 1:
            cells = {n: _mean(seeds.values(), n, name) for n in lengths}
            lines.append(((*model, "mean", ""), cells))
    return lines


def _cell(row: dict, name: str) -> str:
    if row[name] is None:
        return "-"
    text = f"{100 * row[name]:.1f}"
    if name != "exact_match":
        return text
    return text + f"±{50 * (row['exact_high'] - row['exact_low']):.1f}"


def _mean(runs, length: int, name: str) -> str:
    rows = [row for run in runs for row in run if row["length"] == length]
    values = [100 * row[name] for row in rows if row[name] is not None]
    if not values:
        return "-"
    text = f"{np.mean(values):.1f}"
    return text + (f"±{np.std(values, ddof=1):.1f}" if len(values) > 1 else "")


def _notes(rows: list[dict]) -> list[str]:
    notes = [
        "±: half of the 95 % interval (Wilson); in a line of means the standard "
        "deviation over the seeds",
        f"{_SOLVED}: the longest length here with an exact match of {_SOLVED} or more",
    ]
    missing: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["reason"]:
            lengths = missing.setdefault((row["encoding"], row["reason"]), [])
            lengths += [] if row["length"] in lengths else [row["length"]]
    for (encoding, reason), lengths in missing.items():
        shown = ", ".join(map(str, sorted(lengths)))
        notes.append(f"-: no value for {encoding} at {shown}: {reason}")
    return [part for note in notes for part in textwrap.wrap(note, WIDTH)]
