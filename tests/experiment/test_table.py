"""Tables that fit, as text and as Markdown."""

import numpy as np
import pytest

from rope_jax.experiment import table


def test_the_table_has_a_line_for_each_run(rows_of):
    rows = rows_of("rope", [2.54, 4.07, 4.9, 5.3, 5.53])
    rows += rows_of("learned", [2.9, None, None, None, None])
    text = table.format_table(rows)
    assert "anchored protocol, validation split, 8,192 bytes scored" in text
    assert "trained at 128 bytes of context, checkpoint of step 1,000, float32" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["encoding", "trained", "seed", "128", "256", "512", "1024", "2048"] in lines
    bits = ["2.540±.070", "4.070±.070", "4.900±.070", "5.300±.070", "5.530±.070"]
    assert ["rope", "128", "0", *bits] in lines
    assert ["learned", "128", "0", "2.900±.070", "-", "-", "-", "-"] in lines
    difference = next(x for x in lines if x[:1] == ["rope"] and x[3].startswith("+"))
    assert difference[3:5] == ["+0.000±.010", "+1.530±.010"]
    reason = "learned at 256, 512, 1024, 2048: the model's positions end at 128"
    assert reason in text


def test_many_lengths_go_into_further_blocks_of_100_columns(rows_of):
    lengths = [2**k for k in range(4, 21)]
    values = np.linspace(2, 15, 17).tolist()
    rows = rows_of("sinusoidal", values, lengths=lengths)
    rows += rows_of("learned", [2.0] + 16 * [None], lengths=lengths)
    text = table.format_table(rows)
    assert max(map(len, text.splitlines())) <= 100
    headers = [x.split()[3:] for x in text.splitlines() if x.startswith("encoding")]
    shown = [length for header in headers for length in header]
    assert shown == 2 * [str(length) for length in lengths]


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="rows must not be empty"):
        table.format_table([])


def test_rows_without_any_value_still_make_a_table(rows_of):
    text = table.format_table(rows_of("learned", [None] * 5))
    assert "no value for learned at 128, 256, 512, 1024, 2048" in text


def test_seeds_have_a_mean_with_an_interval_and_a_deviation(rows_of):
    rows = []
    for seed, bpc in enumerate([2.0, 2.1, 2.6]):
        rows += rows_of("rope", [bpc] * 5, seed=seed)
    rows += rows_of("alibi", [3.0] * 5)
    text = table.format_table(rows)
    lines = [line.split() for line in text.splitlines()]
    # sqrt(0.06**2 + 0.7985**2) below and sqrt(0.08**2 + 0.7985**2) above.
    assert ["rope", "128", "mean", *["2.233±.802"] * 5] in lines
    assert ["rope", "128", "sd", *["0.321"] * 5] in lines
    assert not any(line[:3] == ["alibi", "128", "mean"] for line in lines)
    # Against rope only seed 0 has a partner: no interval.
    assert ["alibi", "128", "1", *["+1.000"] * 5] in lines


def test_encodings_are_compared_with_rope_seed_by_seed(rows_of):
    rows = []
    for seed, (rope, other) in enumerate([(2.0, 2.5), (2.4, 2.7), (2.2, 2.6)]):
        rows += rows_of("rope", [rope] * 5, seed=seed)
        rows += rows_of("alibi", [other] * 5, seed=seed)
    text = table.format_table(rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["alibi", "128", "3", *["+0.400±.248"] * 5] in lines  # 4.3027 * 0.1/sqrt(3)
    assert "t interval over the seeds, on the same bytes" in text


def test_budgets_scalings_and_conditions_have_lines_of_their_own(rows_of):
    rows = rows_of("rope", [2.0] * 5, trained_bytes=10**6)
    rows += rows_of("rope", [1.5] * 5, trained_bytes=3 * 10**6)
    rows += rows_of("rope", [1.6] * 5, trained_bytes=3 * 10**6, scaling="yarn:4")
    rows += rows_of("rope", [1.7] * 5, trained_bytes=10**6, attention="linear")
    gains = {"protocol": "control", "gain": 0.25, "gain_low": 0.2, "gain_high": 0.3}
    rows += rows_of("rope", [2.0] * 5, control="real", protocol="control")
    rows += rows_of("rope", [2.2] * 5, control="shuffled", **gains)
    text = table.format_table(rows)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("rope 128 1 MB 0 2.000±.070") for line in lines)
    assert any(line.startswith("rope 128 3 MB 0 1.500±.070") for line in lines)
    assert any(line.startswith("rope +yarn:4 128 3 MB 0 1.600") for line in lines)
    assert any(line.startswith("rope linear 128 1 MB 0 1.700") for line in lines)
    assert any(line.startswith("rope 128 shuffled 0 +0.250±.050") for line in lines)
    assert not any(line.startswith("rope 128 real 0 -") for line in lines)
    assert text.count("control protocol, validation split") == 1
    # A scaling is compared with the same run without it.
    assert any(line.startswith("rope +yarn:4 128 3 MB 1 +0.100") for line in lines)


def test_markdown_has_the_same_numbers(rows_of):
    text = table.format_markdown(rows_of("rope", [2.54, 4.07, 4.9, 5.3, 5.53]))
    assert "## anchored, validation" in text
    assert "| encoding | trained | seed | 128 | 256 | 512 | 1,024 | 2,048 |" in text
    assert "| rope | 128 | 0 | 2.540±.070 | 4.070±.070 |" in text


def test_distances_are_columns(rows_of):
    rows = rows_of("rope", [2.0] * 5, protocol="induction", gain=1.0, distance=64)
    (bits, *_) = table.tables(rows)
    assert bits.columns == (64,)


def test_linear_attention_is_told_apart_from_softmax(rows_of):
    rows = rows_of("rope", [2.0] * 5) + rows_of("rope", [3.0] * 5, attention="linear")
    lines = [line.split() for line in table.format_table(rows).splitlines()]
    assert ["rope", "128", "0", *["2.000±.070"] * 5] in lines
    assert ["rope", "linear", "128", "0", *["3.000±.070"] * 5] in lines
    assert not any("mean" in line for line in lines)


def test_corpora_are_told_apart(rows_of):
    rows = rows_of("rope", [2.0] * 5, corpus="one") + rows_of("rope", [3.0] * 5)
    lines = [line.split() for line in table.format_table(rows).splitlines()]
    assert ["rope", "128", "one", "0", *["2.000±.070"] * 5] in lines
    assert ["rope", "128", "0", *["3.000±.070"] * 5] in lines
    assert not any("mean" in line for line in lines)


def test_the_headline_says_what_was_fed_and_how_sure_it_is(rows_of):
    fed = {"standard_error": 0.03, "stride": None, "train_length": 256}
    rows = [r | {"window": r["length"]} for r in rows_of("rope", [2.5] * 5, seed=3)]
    rows += [row | fed for row in rows]
    head = table.headline(rows)
    assert head[1].startswith("trained at 128 to 256 bytes of context")
    assert head[1].endswith(", float32, seed 3")
    assert head[2] == "windows of 128 to 2,048 bytes, apart, standard error 0.0300"
    for row in rows:
        row["stride"] = row["length"] // 4
    assert (
        "2,048 bytes, 32 to 512 bytes from one to the next" in table.headline(rows)[2]
    )


def test_controls_have_lines_of_their_own_and_a_block_of_gains(rows_of):
    rows, short = [], {"lengths": (128, 256), "protocol": "control"}
    for seed, gain in enumerate((0.125, 0.375)):
        rows += rows_of("alibi", [3.0, 2.5], seed=seed, control="real", **short)
        gains = {"gain": gain, "gain_low": gain - 0.05, "gain_high": gain + 0.05}
        one = {"lengths": (256,), "protocol": "control", "control": "masked"}
        rows += rows_of("alibi", [2.5 + gain], seed=seed, **one, **gains)
    text = table.format_table(rows)
    lines = [line.split() for line in text.splitlines()]
    assert lines.count(["encoding", "trained", "context", "seed", "128", "256"]) == 2
    assert ["alibi", "128", "real", "1", "3.000±.070", "2.500±.070"] in lines
    assert ["alibi", "128", "masked", "1", "2.875±.070"] in lines
    _, gains = text.split("bits per byte lost by that context")
    half = (0.05**2 + (12.7062 * 0.125) ** 2) ** 0.5  # t(0.975) with 1 degree
    assert [line.split() for line in gains.splitlines()[1:6]] == [
        ["encoding", "trained", "context", "seed", "256"],
        ["alibi", "128", "masked", "0", "+0.125±.050"],
        ["alibi", "128", "masked", "1", "+0.375±.050"],
        ["alibi", "128", "masked", "mean", f"+0.250±{half:.3f}"],
        ["alibi", "128", "masked", "sd", "0.177"],
    ]
    assert "lost by" not in table.format_table(rows_of("rope", [2.0] * 5))


def test_a_model_changed_for_the_evaluation_has_a_line_of_its_own(rows_of):
    rows = rows_of("rope", [2.0] * 5) + rows_of("rope", [3.0] * 5, scaling="yarn:4")
    text = table.format_table(rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["rope", "+yarn:4", "128", "0", *["3.000±.070"] * 5] in lines
    assert ["rope", "128", "0", *["2.000±.070"] * 5] in lines
    assert "differences are to the unchanged" in " ".join(text.split())
    assert "unchanged" not in table.format_table(rows_of("rope", [2.0] * 5))
