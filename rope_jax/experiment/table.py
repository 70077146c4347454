"""Tables of an evaluation: what stands in them, and as text or Markdown.

A table has a line for each run, and below the runs of several seeds their mean; its
columns are context lengths (or, for induction, distances).
"""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from rope_jax.experiment.aggregate import aggregate, paired_differences
from rope_jax.experiment.rows import complete

WIDTH = 100  # columns of a terminal that a table may take

_TITLES = {
    "bpc": "bits per byte, by bytes of context",
    "delta": "difference in bits per byte to the training length",
    "gain": "difference in bits per byte that the protocol asks for",
}
_GAINS = {
    "control": "bits per byte lost by that context, against the real one",
    "window_cap": "bits per byte lost by the capped window, against the full one",
    "induction": "bits per byte saved on the second copy, by bytes between the copies",
}


@dataclass(frozen=True)
class Table:
    """One table, before it is laid out.

    Attributes:
      title: what the numbers are.
      names: headers of the label columns.
      columns: headers of the others, ascending.
      lines: (labels, text by column).
    """

    title: str
    names: tuple[str, ...]
    columns: tuple[int, ...]
    lines: tuple[tuple[tuple[str, ...], dict[int, str]], ...]


def by_measurement(rows: Iterable[dict]) -> dict[tuple[str, str], list[dict]]:
    """Complete rows by protocol and split, in the order of first appearance."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in map(complete, rows):
        groups.setdefault((row["protocol"], row["split"]), []).append(row)
    return groups


def label(row: dict) -> str:
    """The encoding, with the attention and the eval-time scaling where unusual."""
    linear = row["attention"] if row["attention"] != "softmax" else ""
    scaling = f"+{row['scaling']}" if row["scaling"] else ""
    return " ".join(part for part in (row["encoding"], linear, scaling) if part)


def column(row: dict) -> int:
    """What a row is about: a distance where there is one, else a length."""
    return row["length"] if row["distance"] is None else row["distance"]


def tables(rows: list[dict]) -> list[Table]:
    """The tables of the rows of one protocol and split.

    Bits per byte, the paired difference to the training length, what the protocol
    gains, and, where there are rows of rope beside others, the difference to it.
    """
    rows = [complete(row) for row in rows]
    made = []
    for name, title in _TITLES.items():
        if any(row[name] is not None for row in rows) or name == "bpc":
            if name == "gain":
                title = _GAINS.get(rows[0]["protocol"], title)
            made.append(_values(rows, name, title))
    differences = paired_differences(rows)
    if differences:
        names = _names(rows)
        cells: dict[tuple, dict[int, str]] = {}
        for row in differences:
            half = None
            if row["difference_low"] is not None:
                half = row["difference"] - row["difference_low"]
            key = (*_key(row, names), str(row["seeds"]))
            cells.setdefault(key, {})[column(row)] = _cell(row["difference"], half, "+")
        title = f"difference in bits per byte to {differences[0]['reference']}, by seed"
        made.append(_table(title, (*names, "seeds"), rows, cells))
    return made


def format_table(rows: list[dict]) -> str:
    """All tables of rows as text, protocol by protocol.

    A number after "±" is half of the 95 % interval: of one run over the bytes, of a
    mean over seeds and bytes. Columns that do not fit beside each other in 100
    characters go into further blocks.

    Args:
      rows: the rows of `evaluation.evaluate_workdir`, of any protocols.

    Returns:
      Lines of at most 100 columns.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("rows must not be empty")
    parts = []
    for group in by_measurement(rows).values():
        parts.append("\n".join(headline(group)))
        for table in tables(group):
            parts += [
                f"{table.title}:\n{block}" for block in blocks(_with_header(table))
            ]
        parts.append(
            "\n".join(p for n in notes(group) for p in textwrap.wrap(n, WIDTH))
        )
    return "\n\n".join(parts)


def format_markdown(rows: list[dict]) -> str:
    """All tables of rows as Markdown, with the same words as `format_table`."""
    parts = []
    for (protocol, split), group in by_measurement(rows).items():
        parts.append(f"## {protocol}, {split}\n\n" + "  \n".join(headline(group)))
        for table in tables(group):
            header = [*table.names, *(f"{n:,}" for n in table.columns)]
            rule = ["---"] * len(table.names) + ["---:"] * len(table.columns)
            lines = [
                [*key, *(cells.get(n, "") for n in table.columns)]
                for key, cells in table.lines
            ]
            grid = [f"| {' | '.join(line)} |" for line in (header, rule, *lines)]
            parts.append("\n".join([f"{table.title}:\n", *grid]))
        parts.append("\n".join(f"- {note}" for note in notes(group)))
    return "\n\n".join(parts) + "\n"


def headline(rows: list[dict]) -> list[str]:
    """What was measured on what, in three lines."""

    def span(name, form="{:,}"):
        known = (row.get(name) for row in rows if row["bpc"] is not None)
        values = sorted({value for value in known if value is not None})
        ends = values[:1] + values[1:][-1:]
        return " to ".join(form.format(value) for value in ends) or "no"

    apart = all(row.get("stride") is None for row in rows)
    stride = "apart" if apart else f"{span('stride')} bytes from one to the next"
    return [
        f"{rows[0]['protocol']} protocol, {rows[0]['split']} split, "
        f"{span('scored_bytes')} bytes scored at each length",
        f"trained at {span('train_length')} bytes of context, checkpoint of step "
        f"{span('step')}, {span('dtype', '{}')}, seed {span('seed')}",
        f"windows of {span('window')} bytes, {stride}, "
        f"standard error {span('standard_error', '{:.4f}')}",
    ]


def notes(rows: list[dict]) -> list[str]:
    """What the intervals cover, and why values are missing."""
    made = ["±: half of the 95 % interval (block bootstrap along the text)"]
    if any(row["seeds"] > 1 for row in aggregate(rows)):
        made.append(
            "mean ±: mean over the seeds, half of its 95 % interval over seeds and "
            "bytes; sd: standard deviation over the seeds"
        )
    if any(row["seeds"] > 1 for row in paired_differences(rows)):
        made.append(
            "by seed ±: half of the 95 % t interval over the seeds, on the same bytes; "
            "other bytes are not covered"
        )
    if any(row.get("scaling") for row in rows):
        made.append(
            "+: changed for the evaluation alone; differences are to the unchanged "
            "model at its training length"
        )
    missing: dict[tuple[str, str], list[int]] = {}
    for row in map(complete, rows):
        if row["bpc"] is None:
            columns = missing.setdefault((label(row), row["reason"]), [])
            columns += [] if column(row) in columns else [column(row)]
    for (encoding, reason), columns in missing.items():
        shown = ", ".join(map(str, sorted(columns)))
        made.append(f"-: no value for {encoding} at {shown}: {reason}")
    return made


def several_budgets(rows: Iterable[dict]) -> bool:
    """Whether runs of one training length were trained on different amounts."""
    budgets: dict[int, set] = {}
    for row in rows:
        budgets.setdefault(row["train_length"], set()).add(row["trained_bytes"])
    return any(len(amounts) > 1 for amounts in budgets.values())


def budget_text(trained_bytes: int | None) -> str:
    """Bytes seen in training, in millions.

    >>> budget_text(2_457_600)
    '2.46 MB'
    """
    return "?" if trained_bytes is None else f"{trained_bytes / 1e6:.3g} MB"


def _names(rows: list[dict]) -> tuple[str, ...]:
    names = ["encoding", "trained"]
    names += ["budget"] if several_budgets(rows) else []
    names += ["context"] if any(row["control"] for row in rows) else []
    names += ["corpus"] if len({row["corpus"] for row in rows}) > 1 else []
    return tuple(names)


def _key(row: dict, names: tuple[str, ...]) -> tuple[str, ...]:
    texts = {
        "encoding": label(row),
        "trained": str(row["train_length"]),
        "budget": budget_text(row["trained_bytes"]),
        "context": row["control"],
        "corpus": row["corpus"],
    }
    return tuple(texts[name] for name in names)


def _values(rows: list[dict], name: str, title: str) -> Table:
    names, sign = _names(rows), "" if name == "bpc" else "+"
    if name == "gain":  # the condition that the others are compared with has none
        rows = [row for row in rows if row["gain"] is not None or row["reason"]]
    runs: dict[tuple, dict[int, str]] = {}
    for row in rows:
        low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
        half = None if low is None or high is None else (high - low) / 2
        key = (*_key(row, names), str(row["seed"]))
        runs.setdefault(key, {})[column(row)] = _cell(row[name], half, sign)
    means: dict[tuple, tuple[dict, dict]] = {}
    for row in aggregate(rows):
        mean, deviation = means.setdefault(_key(row, names), ({}, {}))
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        half = None if low is None or high is None else (high - low) / 2
        mean[column(row)] = _cell(row[name], half, sign)
        deviation[column(row)] = _cell(row[f"{name}_sd"], None, "")
    cells: dict[tuple, dict[int, str]] = {}
    for key, (mean, deviation) in means.items():
        own = {k: v for k, v in runs.items() if k[:-1] == key}
        cells |= own
        if len(own) > 1:
            cells |= {(*key, "mean"): mean, (*key, "sd"): deviation}
    return _table(title, (*names, "seed"), rows, cells)


def _with_header(table: Table) -> list[tuple[tuple, dict[int, str]]]:
    return [(table.names, {n: str(n) for n in table.columns}), *table.lines]


def _table(title, names, rows, cells) -> Table:
    columns = tuple(sorted({column(row) for row in rows}))
    return Table(title, names, columns, tuple(cells.items()))


def _cell(value: float | None, spread: float | None, sign: str) -> str:
    if value is None:
        return "-"
    text = f"{value:{sign}.3f}"
    if spread is None:
        return text
    return text + "±" + f"{spread:.3f}"[:5].removeprefix("0")


def blocks(lines: list[tuple[tuple, dict[int, str]]]) -> list[str]:
    """The lines of a table, cut into as many blocks as the width needs.

    Args:
      lines: (labels, cells by column) of each line, the header first.
    """
    columns = sorted(lines[0][1])
    parts = zip(*(key for key, _ in lines), strict=True)
    label_widths = [max(map(len, part)) for part in parts]
    labels = [
        "  ".join(t.ljust(w) for t, w in zip(key, label_widths, strict=True))
        for key, _ in lines
    ]
    width = 2 + max(len(text) for _, cells in lines for text in cells.values())
    fit = max(1, (WIDTH - len(labels[0])) // width)
    return [
        "\n".join(
            label + "".join(cells.get(n, "").rjust(width) for n in columns[i : i + fit])
            for label, (_, cells) in zip(labels, lines, strict=True)
        )
        for i in range(0, len(columns), fit)
    ]
