"""The rows of an evaluation: what tells them apart, and the files that hold them."""

import csv
import io
import json
import math
import pathlib
from collections.abc import Iterable

import numpy as np

from rope_jax.experiment import atomic

# What one row is about. Two rows with the same identity are the same measurement.
IDENTITY = (
    "encoding",
    "attention",
    "scaling",
    "seed",
    "trained_bytes",
    "train_length",
    "protocol",
    "split",
    "control",
    "length",
)
# Keys that rows written by earlier versions lack, with what they meant.
_DEFAULTS = {
    "scaling": "",
    "control": "",
    "attention": "softmax",
    "trained_bytes": None,
    "gain": None,
    "gain_low": None,
    "gain_high": None,
    "distance": None,
}
# Rows that one evaluation measures together, on the same bytes.
_MEASUREMENT = ("protocol", "split", "scaling")


def complete(row: dict) -> dict:
    """A row with every key that rows have now, those of older files filled in."""
    return row | {k: v for k, v in _DEFAULTS.items() if k not in row}


def identity(row: dict, *, without: Iterable[str] = ()) -> tuple:
    """The values of `IDENTITY` in a complete row, but for some names.

    >>> identity({"encoding": "rope", "seed": 1}, without=IDENTITY[1:])
    ('rope',)
    """
    left_out = set(without)
    return tuple(row[name] for name in IDENTITY if name not in left_out)


def merge(old: Iterable[dict], new: list[dict]) -> list[dict]:
    """New rows, after the old ones of other measurements.

    Rows of one protocol, split and scaling are measured together: the longest length
    decides which bytes are scored, so that an old row beside new ones would compare
    other bytes. The new rows therefore replace all old ones of their measurement.

    Args:
      old: complete rows.
      new: complete rows.

    Returns:
      The rows that both leave.
    """
    measured = {tuple(row[name] for name in _MEASUREMENT) for row in new}
    kept = [r for r in old if tuple(r[name] for name in _MEASUREMENT) not in measured]
    return kept + new


def combine(parts: Iterable[list[dict]]) -> list[dict]:
    """The complete rows of several files; of two of one identity the later."""
    by_identity = {
        (*identity(row), row["distance"], row.get("corpus")): row
        for part in parts
        for row in part
    }
    return list(by_identity.values())


def read_json(path: pathlib.Path) -> list[dict]:
    """Complete rows from a file of `write_json`.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: it holds something else.
    """
    if not path.exists():
        raise FileNotFoundError(f"there are no rows at {path}")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError(f"expected a list, got {type(rows).__name__}")
        for row in rows:
            missing = [n for n in (*IDENTITY, "bpc") if n not in complete(row)]
            if missing:
                raise ValueError(f"a row lacks {', '.join(missing)}")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold the rows of an evaluation: {error}"
        ) from (error)
    return [complete(row) for row in rows]


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
