"""Files of rows that any reader can parse, and what replaces what in them."""

import csv
import json
import math

import numpy as np
import pytest

from rope_jax.experiment.rows import (
    combine,
    complete,
    identity,
    merge,
    read_json,
    write_csv,
    write_json,
)


def test_json_holds_no_nan_and_no_numpy(tmp_path):
    rows = [
        {"a": math.nan, "b": np.float32(0.5), "c": np.int64(3), "d": None, "e": "é"}
    ]
    write_json(tmp_path / "rows.json", rows)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "rows.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse) == [
        {"a": None, "b": 0.5, "c": 3, "d": None, "e": "é"}
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]


def test_csv_has_one_header_and_empty_cells_for_what_is_unknown(tmp_path):
    rows = [{"a": 1, "b": None}, {"a": 2.5, "c": "x,y"}, {"a": math.inf}]
    write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [
        {"a": "1", "b": "", "c": ""},
        {"a": "2.5", "b": "", "c": "x,y"},
        {"a": "", "b": "", "c": ""},
    ]


def test_rows_of_older_files_are_filled_in(tmp_path):
    old = dict.fromkeys(("encoding", "seed", "train_length", "protocol", "split"), 1)
    old |= {"length": 128, "bpc": 2.0}
    write_json(tmp_path / "rows.json", [old])
    (row,) = read_json(tmp_path / "rows.json")
    assert row == complete(old)
    assert (row["scaling"], row["control"], row["attention"]) == ("", "", "softmax")
    assert row["trained_bytes"] is row["gain"] is row["distance"] is None


@pytest.mark.parametrize("text", ["{}", '[{"bpc": 1}]', "[1]", "not JSON"])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match="does not hold the rows of an evaluation"):
        read_json(tmp_path / "rows.json")
    with pytest.raises(FileNotFoundError, match="no rows at"):
        read_json(tmp_path / "none.json")


def test_a_measurement_replaces_itself_and_nothing_else(rows_of):
    """Lengths that are not measured again were scored on other bytes: they go."""
    old = rows_of("rope", [1.0] * 5) + rows_of("rope", [3.0] * 5, protocol="sliding")
    old += rows_of("rope", [4.0] * 5, split="test")
    new = rows_of("rope", [5.0, 6.0], lengths=(128, 256))
    merged = merge(old, new)
    assert [row["bpc"] for row in merged] == [3.0] * 5 + [4.0] * 5 + [5, 6]
    assert merge(merged, new) == merged


def test_other_scalings_stay_where_the_bytes_are_seen_to_be_the_same(rows_of):
    plain = rows_of("rope", [1.0] * 5) + rows_of("learned", [1.0, *[None] * 4])
    scaled = rows_of("rope", [2.0] * 5, scaling="ntk:4")
    new = rows_of("rope", [1.0 + 1e-7] * 5) + plain[5:]
    new += rows_of("rope", [3.0] * 5, scaling="yarn:4")
    assert merge(plain + scaled, new) == scaled + new
    # Other values of the unchanged model: other bytes, or other weights.
    other = rows_of("rope", [1.001] * 5) + plain[5:]
    assert merge(plain + scaled, other) == other
    later = rows_of("rope", [1.0] * 5, trained_bytes=9) + plain[5:]
    assert merge(plain + scaled, later) == later


def test_of_two_files_the_later_wins(rows_of):
    old = rows_of("rope", [1.0] * 5) + rows_of("rope", [3.0] * 5, train_length=256)
    both = combine([old, rows_of("rope", [2.0] * 5)])
    assert len(both) == 10 == len({identity(row) for row in both})
    assert [row["bpc"] for row in both] == [2.0] * 5 + [3.0] * 5
