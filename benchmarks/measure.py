"""What the benchmarks share: alternating runs, memory, provenance, tables and JSON."""

import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from rope_jax.experiment.provenance import describe


def alternate(
    runs: Mapping[str, Callable[[], object]], repeats: int, *, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each run, one of every kind after the other, `repeats` times.

    In turns, because what else the machine does then meets all of them alike.

    Args:
      runs: by name; what one returns is waited for (`jax.block_until_ready`).
      repeats: timed rounds.
      warmups: rounds before them that are not timed.
    """
    taken = {name: [] for name in runs}
    for round_number in range(warmups + repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if round_number >= warmups:
                taken[name].append(time.perf_counter() - began)
    return taken


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most, as keys of a row."""
    median = statistics.median(seconds)
    return {"seconds": median, "least": min(seconds), "most": max(seconds)}


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """What a compiled program needs on a device besides its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def provenance() -> dict:
    """The date, the command, the machine and the versions."""
    return describe()


def table(rows: Sequence[Mapping], columns: Mapping[str, str]) -> str:
    """Rows as aligned text; numbers are set to the right.

    Args:
      rows: one for each line.
      columns: heading -> format string over a row's keys, as "{seconds:.3f}". A cell
        whose keys the row lacks, or has as None, is "-".

    Example:
      >>> print(table([{"n": 8}, {"n": 16}], {"n": "{n}", "twice": "{m}"}))
       n  twice
       8      -
      16      -
    """
    cells = [[_cell(form, row) for form in columns.values()] for row in rows]
    lines = [list(columns), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [_is_text(column[1:]) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts, strict=True)
        ).rstrip()
        for line in lines
    )


def write(path: pathlib.Path, rows: Sequence[Mapping]) -> None:
    """Write `{"about": provenance, "rows": rows}` as JSON."""
    content = {"about": provenance(), "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def integers(text: str) -> list[int]:
    """A flag's value: `"1,2,3"`."""
    return [int(part) for part in text.split(",")]


def _cell(form: str, row: Mapping) -> str:
    known = {name: value for name, value in row.items() if value is not None}
    try:
        return form.format(**known)
    except KeyError:
        return "-"


def _is_text(cells: Sequence[str]) -> bool:
    return any(not any(c.isdigit() for c in cell) and cell != "-" for cell in cells)
