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
    "distance",
    "corpus",
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
    "corpus": "",
}


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


def merge(old: list[dict], new: list[dict]) -> list[dict]:
    """New rows, after the old ones that can stand beside them.

    New rows replace all old ones of their protocol, split and scaling: the longest
    length decides which bytes are scored, so that an old row beside new ones would
    compare other bytes. Old rows of other scalings stay where the unchanged model's
    new rows are its old ones again, which shows that the bytes are the same.

    Args:
      old: complete rows.
      new: complete rows.

    Returns:
      The rows that both leave.
    """
    kinds = {(row["protocol"], row["split"]) for row in new}
    repeated = {kind for kind in kinds if _unchanged(old, kind, new)}
    measured = {(row["protocol"], row["split"], row["scaling"]) for row in new}

    def stays(row):
        kind = row["protocol"], row["split"]
        if (*kind, row["scaling"]) in measured:
            return False
        return kind in repeated or kind not in kinds

    return [row for row in old if stays(row)] + new


def _unchanged(old: list[dict], kind: tuple[str, str], new: list[dict]) -> bool:
    """Whether the rows of a protocol and split, without a scaling, say the same."""

    def plain(rows):
        return {
            identity(row): math.nan if row["bpc"] is None else row["bpc"]
            for row in rows
            if (row["protocol"], row["split"], row["scaling"]) == (*kind, "")
        }

    before, after = plain(old), plain(new)
    if before.keys() != after.keys():
        return False
    # Another machine adds up in another order; other bytes differ by far more.
    pairs = np.array([(before[key], after[key]) for key in after]).reshape(-1, 2)
    return np.allclose(pairs[:, 0], pairs[:, 1], rtol=1e-5, atol=0, equal_nan=True)


def combine(parts: Iterable[list[dict]]) -> list[dict]:
    """The complete rows of several files; of two of one identity the later."""
    return list({identity(row): row for part in parts for row in part}.values())


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
            f"{path} does not hold the rows of an evaluation: {error}; move it "
            "away to start afresh"
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
