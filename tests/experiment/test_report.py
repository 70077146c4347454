"""Tables that fit, means over seeds, and files that any reader can parse."""

import csv
import json
import math

import numpy as np
import pytest

from rope_jax.experiment import report

LENGTHS = (128, 256, 512, 1024, 2048)


def rows_of(encoding, values, *, seed=0, lengths=LENGTHS, train_length=128):
    """Rows with an interval of -0.06 and +0.08; None is a refused length."""
    rows = []
    for length, bpc in zip(lengths, values, strict=True):
        row = {
            "encoding": encoding,
            "seed": seed,
            "protocol": "anchored",
            "split": "validation",
            "train_length": train_length,
            "length": length,
            "bpc": bpc,
            "bpc_low": None,
            "bpc_high": None,
            "delta": None,
            "delta_low": None,
            "delta_high": None,
            "scored_bytes": 0,
            "window": length,
            "stride": None,
            "standard_error": None,
            "step": 1000,
            "dtype": "float32",
            "reason": "the model's positions end at 128",
        }
        if bpc is not None:
            delta = bpc - values[0]
            row |= {"bpc_low": bpc - 0.06, "bpc_high": bpc + 0.08, "reason": None}
            row |= {"delta": delta, "delta_low": delta - 0.01, "scored_bytes": 8192}
            row["standard_error"] = 0.03
            row["delta_high"] = delta + 0.01
        rows.append(row)
    return rows


def test_the_table_has_a_line_for_each_run():
    rows = rows_of("rope", [2.54, 4.07, 4.9, 5.3, 5.53])
    rows += rows_of("learned", [2.9, None, None, None, None])
    table = report.format_table(rows)
    assert "anchored protocol, validation split, 8,192 bytes scored" in table
    assert "trained at 128 bytes of context, checkpoint of step 1,000, float32" in table
    lines = [line.split() for line in table.splitlines()]
    assert ["encoding", "trained", "seed", "128", "256", "512", "1024", "2048"] in lines
    bits = ["2.540±.070", "4.070±.070", "4.900±.070", "5.300±.070", "5.530±.070"]
    assert ["rope", "128", "0", *bits] in lines
    assert ["learned", "128", "0", "2.900±.070", "-", "-", "-", "-"] in lines
    difference = next(x for x in lines if x[:1] == ["rope"] and x[3].startswith("+"))
    assert difference[3:5] == ["+0.000±.010", "+1.530±.010"]
    reason = "learned at 256, 512, 1024, 2048: the model's positions end at 128"
    assert reason in table


def test_the_headline_says_what_was_fed_and_how_sure_it_is():
    rows = rows_of("rope", [2.5, 4.0, 4.9, 5.3, 5.5], seed=3)
    head = report.format_table(rows).splitlines()[:3]
    assert head[1].endswith(", float32, seed 3")
    assert head[2] == "windows of 128 to 2,048 bytes, apart, standard error 0.0300"
    for row in rows:
        row["stride"] = row["length"] // 4
    head = report.format_table(rows).splitlines()[:3]
    assert "2,048 bytes, 32 to 512 bytes from one to the next, standard" in head[2]


def test_controls_have_lines_of_their_own_and_a_block_of_gains():
    rows = []
    for seed, gain in enumerate((0.125, 0.375)):
        real = rows_of("alibi", [3.0, 2.5], seed=seed, lengths=(128, 256))
        masked = rows_of("alibi", [2.5 + gain], seed=seed, lengths=(256,))
        rows += [row | {"control": "real", "gain": None} for row in real]
        interval = {"gain_low": gain - 0.05, "gain_high": gain + 0.05}
        rows += [r | {"control": "masked", "gain": gain} | interval for r in masked]
    for row in rows:
        row["protocol"] = "control"
    (mean,) = (r for r in report.aggregate(rows) if r["control"] == "masked")
    assert (mean["bpc"], mean["gain"], mean["seeds"]) == (2.75, 0.25, 2)
    assert mean["gain_sd"] == pytest.approx(0.25 / np.sqrt(2))
    table = report.format_table(rows)
    lines = [line.split() for line in table.splitlines()]
    assert lines.count(["encoding", "trained", "control", "seed", "128", "256"]) == 2
    assert ["alibi", "128", "real", "1", "3.000±.070", "2.500±.070"] in lines
    assert ["alibi", "128", "masked", "1", "2.875±.070"] in lines
    _, gains = table.split("what the control costs in bits per byte")
    assert [line.split() for line in gains.splitlines()[1:5]] == [
        ["encoding", "trained", "control", "seed", "256"],
        ["alibi", "128", "masked", "0", "+0.125±.050"],
        ["alibi", "128", "masked", "1", "+0.375±.050"],
        ["alibi", "128", "masked", "mean", "+0.250±.177"],
    ]
    assert "what the control" not in report.format_table(rows_of("rope", [2.0] * 5))


def test_seeds_are_averaged_with_their_sample_deviation():
    rows = []
    for seed, bpc in enumerate([2.0, 2.1, 2.6]):
        rows += rows_of("rope", [bpc] * 5, seed=seed)
    rows += rows_of("alibi", [3.0] * 5)
    rope, alibi = (r for r in report.aggregate(rows) if r["length"] == 512)
    assert rope["bpc"] == pytest.approx(6.7 / 3) and rope["seeds"] == 3
    assert rope["bpc_sd"] == pytest.approx(0.3214550254)  # ddof 1
    assert alibi["bpc"] == 3.0 and alibi["bpc_sd"] is None and alibi["seeds"] == 1
    lines = [line.split() for line in report.format_table(rows).splitlines()]
    assert ["rope", "128", "mean", *["2.233±.321"] * 5] in lines
    assert not any(line[:3] == ["alibi", "128", "mean"] for line in lines)


def test_seeds_that_refuse_do_not_count():
    rows = rows_of("rope", [2.0, None, None, None, None])
    rows += rows_of("rope", [3.0, 4.0, None, None, None], seed=1)
    means = {row["length"]: row for row in report.aggregate(rows)}
    assert (means[256]["bpc"], means[256]["seeds"]) == (4.0, 1)
    assert means[256]["bpc_sd"] is None
    assert means[512]["bpc"] is None and means[512]["seeds"] == 0


def test_training_lengths_are_not_mixed():
    rows = rows_of("rope", [2.0] * 5) + rows_of("rope", [3.0] * 5, train_length=256)
    assert {(r["train_length"], r["bpc"]) for r in report.aggregate(rows)} == {
        (128, 2.0),
        (256, 3.0),
    }
    assert "trained at 128 to 256 bytes" in report.format_table(rows)


def test_a_model_changed_for_the_evaluation_has_a_line_of_its_own():
    rows = rows_of("rope", [2.0] * 5)
    rows += [row | {"scaling": "yarn:4"} for row in rows_of("rope", [3.0] * 5)]
    means = report.aggregate(rows)
    assert {(r["scaling"], r["bpc"]) for r in means} == {("", 2.0), ("yarn:4", 3.0)}
    table = report.format_table(rows)
    lines = [line.split() for line in table.splitlines()]
    assert ["rope", "+yarn:4", "128", "0", *["3.000±.070"] * 5] in lines
    assert ["rope", "128", "0", *["2.000±.070"] * 5] in lines
    assert "differences are to the unchanged" in table


def test_many_lengths_go_into_further_blocks_of_100_columns():
    lengths = [2**k for k in range(4, 21)]
    values = np.linspace(2, 15, 17).tolist()
    rows = rows_of("sinusoidal", values, lengths=lengths)
    rows += rows_of("learned", [2.0] + 16 * [None], lengths=lengths)
    table = report.format_table(rows)
    assert max(map(len, table.splitlines())) <= 100
    headers = [x.split()[3:] for x in table.splitlines() if x.startswith("encoding")]
    shown = [length for header in headers for length in header]
    assert shown == 2 * [str(length) for length in lengths]


def test_json_holds_no_nan_and_no_numpy(tmp_path):
    rows = [
        {"a": math.nan, "b": np.float32(0.5), "c": np.int64(3), "d": None, "e": "é"}
    ]
    report.write_json(tmp_path / "rows.json", rows)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "rows.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse) == [
        {"a": None, "b": 0.5, "c": 3, "d": None, "e": "é"}
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]


def test_csv_has_one_header_and_empty_cells_for_what_is_unknown(tmp_path):
    rows = [{"a": 1, "b": None}, {"a": 2.5, "c": "x,y"}, {"a": math.inf}]
    report.write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [
        {"a": "1", "b": "", "c": ""},
        {"a": "2.5", "b": "", "c": "x,y"},
        {"a": "", "b": "", "c": ""},
    ]


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="rows must not be empty"):
        report.format_table([])


def test_rows_without_any_value_still_make_a_table():
    table = report.format_table(rows_of("learned", [None] * 5))
    assert "no value for learned at 128, 256, 512, 1024, 2048" in table


def test_linear_attention_is_told_apart_from_softmax():
    rows = [row | {"attention": "softmax"} for row in rows_of("rope", [2.0] * 5)]
    rows += [row | {"attention": "linear"} for row in rows_of("rope", [3.0] * 5)]
    lines = [line.split() for line in report.format_table(rows).splitlines()]
    assert ["rope", "128", "0", *["2.000±.070"] * 5] in lines
    assert ["rope", "linear", "128", "0", *["3.000±.070"] * 5] in lines
    assert not any("mean" in line for line in lines)
