"""What is drawn: the lines, axes and texts of the figures, not their pixels."""

import itertools

import numpy as np
import pytest

from rope_jax.experiment import plot_style, plots
from rope_jax.experiment.rows import complete

LENGTHS = (128, 256, 512, 1024, 2048)
VALUES = {
    "rope": [2.54, 4.07, 4.9, 5.3, 5.53],
    "alibi": [2.65, 2.65, 2.648, 2.645, 2.645],
    "sinusoidal": [3.38, 6.0, 8.2, 12.5, 15.3],
    "learned": [2.9, None, None, None, None],
}


def rows_of(values, *, seeds=1, protocol="anchored", train_length=128):
    rows = []
    for encoding, seed in itertools.product(values, range(seeds)):
        for length, bpc in zip(LENGTHS, values[encoding], strict=True):
            known = bpc is not None
            rows.append(
                {
                    "encoding": encoding,
                    "seed": seed,
                    "protocol": protocol,
                    "split": "validation",
                    "train_length": train_length,
                    "length": length,
                    "bpc": bpc + 0.1 * seed if known else None,
                    "bpc_low": bpc - 0.05 if known else None,
                    "bpc_high": bpc + 0.07 if known else None,
                    "delta": 0.0 if known else None,
                    "scored_bytes": 8192 if known else 0,
                }
            )
    return rows


def drawn(rows):
    """The panels of the picture of bits per byte."""
    return plots.extrapolation([complete(row) for row in rows]).axes


def texts(axes):
    return [text.get_text() for text in axes.texts]


def lines_of(axes, points):
    return [line for line in axes.lines if len(line.get_xdata()) == points]


def test_context_is_on_a_binary_axis_with_the_bytes_as_labels():
    axes = drawn(rows_of(VALUES))[-1]
    assert axes.get_xscale() == "log" and axes.xaxis.get_transform().base == 2
    assert list(axes.get_xticks()) == list(LENGTHS)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["128", "256", "512", "1,024", "2,048"]
    assert "bytes" in axes.get_xlabel()


def test_each_encoding_is_a_line_with_its_own_colour_and_marker():
    axes = drawn(rows_of(VALUES))[0]
    curves = lines_of(axes, 5)
    for curve, name in zip(curves, ("rope", "alibi", "sinusoidal"), strict=True):
        np.testing.assert_allclose(curve.get_ydata(), VALUES[name])
    assert len({curve.get_color() for curve in curves}) == 3
    assert len({curve.get_marker() for curve in curves}) == 3
    bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    assert bands[0].min() == pytest.approx(2.49) and bands[0].max() == pytest.approx(
        5.6
    )


def test_twenty_encodings_never_share_colour_marker_and_dashes():
    values = {f"encoding{i}": [2 + i / 10] * 5 for i in range(20)}
    curves = lines_of(drawn(rows_of(values))[0], 5)
    styles = {(c.get_color(), c.get_marker(), c.get_linestyle()) for c in curves}
    assert len(styles) == 20


def test_labels_stand_in_the_order_of_the_last_values_without_overlap():
    axes = drawn(rows_of(VALUES))[0]
    names = {"rope", "alibi", "sinusoidal", "learned (to 128)"}
    places = {t.get_text(): t.xy[1] for t in axes.texts if t.get_text() in names}
    assert sorted(places, key=places.get) == [
        "alibi",
        "learned (to 128)",
        "rope",
        "sinusoidal",
    ]
    bottom, top = axes.get_ylim()
    gaps = np.diff(sorted(places.values())) / (top - bottom)
    assert gaps.min() > 0.05 and max(places.values()) < top


def test_training_length_is_marked():
    axes = drawn(rows_of(VALUES))[0]
    assert "trained at 128" in texts(axes)
    marks = [line for line in lines_of(axes, 2) if set(line.get_xdata()) == {128}]
    assert len(marks) == 1


def test_an_explosion_is_cut_off_and_written_down():
    full, close = drawn(rows_of(VALUES))
    assert 8 < full.get_ylim()[1] < 10
    assert [t for t in texts(full) if t.startswith("↑")] == ["↑ 12.5", "↑ 15.3"]
    assert "a uniform guess" in texts(full)
    # The close-up shows every encoding's best value, and what is flat near them.
    assert close.get_ylim()[0] < 2.49 and 3.38 < close.get_ylim()[1] < 4
    assert "alibi" in texts(close) and "rope" not in texts(close)


def test_a_refused_length_ends_the_line_with_a_cross():
    axes = drawn(rows_of(VALUES))[0]
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert cross.get_xdata()[0] == 128 and set(cross.get_ydata()) == {2.9}
    assert cross.get_color() != lines_of(axes, 5)[0].get_color()


def test_one_flat_encoding_needs_one_panel_with_room_for_its_interval():
    (axes,) = drawn(rows_of({"alibi": VALUES["alibi"]}))
    bottom, top = axes.get_ylim()
    assert bottom < 2.595 and 2.72 < top < 3
    assert "a uniform guess" not in texts(axes)


def test_seeds_are_drawn_as_a_mean_with_its_interval():
    (axes,) = drawn(rows_of({"alibi": [2.0] * 5}, seeds=3))
    (curve,) = lines_of(axes, 5)
    np.testing.assert_allclose(curve.get_ydata(), 2.1)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    half = 4.302652730 * 0.1 / 3**0.5  # over seeds; 0.15 below and 0.03 above: bytes
    assert band.min() == pytest.approx(2.1 - np.hypot(0.15, half))
    assert band.max() == pytest.approx(2.1 + np.hypot(0.03, half))
    assert any("95 % interval over bytes and 3 seeds" in text for text in texts(axes))


def test_training_lengths_are_told_apart():
    rows = rows_of({"rope": [2.0, 3.0, 4.0, 5.0, 6.0]})
    rows += rows_of({"rope": [2.1, 2.0, 3.0, 4.0, 5.0]}, train_length=256)
    axes = drawn(rows)[0]
    assert {"rope (128)", "rope (256)", "trained at 128", "trained at 256"} <= set(
        texts(axes)
    )


def test_per_position_says_what_its_axis_is():
    axes = drawn(rows_of(VALUES, protocol="per_position"))
    assert "before the predicted byte" in axes[-1].get_xlabel()
    assert "position" in axes[0].get_title(loc="left")


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="at least one with a bpc"):
        drawn(rows_of({"learned": [None] * 5}))
    assert plots.figures(rows_of({"learned": [None] * 5})) == {}


def test_an_encoding_has_its_colour_in_every_picture():
    first = plot_style.styles(["rope", "alibi", "none"])
    other = plot_style.styles(["none", "fire", "rope", "rope"])
    assert first[2] == other[0] and first[0] == other[2]
    assert other[3]["color"] == other[2]["color"]
    assert other[3]["linestyle"] != other[2]["linestyle"]
    assert other[3]["marker"] != other[2]["marker"]


def with_deltas(rows, **more):
    for row in rows:
        if row["bpc"] is not None:
            row |= {"delta": row["bpc"] - 2.0, "delta_low": None, "delta_high": None}
        row |= more
    return rows


def test_differences_are_drawn_around_zero():
    figure = plots.delta(
        [complete(r) for r in with_deltas(rows_of({"rope": VALUES["rope"]}))]
    )
    (axes,) = figure.axes
    (curve,) = lines_of(axes, 5)
    np.testing.assert_allclose(curve.get_ydata(), np.array(VALUES["rope"]) - 2)
    assert any(set(line.get_ydata()) == {0} for line in lines_of(axes, 2))


def test_budgets_are_an_axis():
    rows = []
    for amount, bpc in ((10**6, 2.5), (3 * 10**6, 2.25), (10**7, 3.0)):
        values = {"fox": [2.0, 2.0, 2.0, 2.0, bpc]}
        rows += with_deltas(rows_of(values), trained_bytes=amount)
    figures = plots.figures(rows)
    assert list(figures) == ["anchored", "anchored-delta", "anchored-budget"]
    (axes,) = figures["anchored-budget"].axes
    (curve,) = lines_of(axes, 3)
    np.testing.assert_allclose(curve.get_xdata(), [1e6, 3e6, 1e7])
    np.testing.assert_allclose(curve.get_ydata(), [0.5, 0.25, 1.0])
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["1 MB", "3 MB", "10 MB"]
    assert len(lines_of(figures["anchored"].axes[0], 5)) == 3


def test_gains_have_a_panel_for_each_condition():
    rows = rows_of({"alibi": [2.0] * 5}, protocol="control")
    for control, gain in (("real", None), ("shuffled", 0.3), ("masked", 0.1)):
        part = rows_of({"alibi": [2.0] * 5}, protocol="control")
        rows += with_deltas(part, control=control, gain=gain)
    (figure,) = plots.figures(rows).values()
    shuffled, masked = figure.axes
    for axes, name in ((shuffled, "shuffled"), (masked, "masked")):
        assert name in [text.get_text() for text in axes.texts]
    for axes, gain in ((shuffled, 0.3), (masked, 0.1)):
        (curve,) = lines_of(axes, 5)
        np.testing.assert_allclose(curve.get_ydata(), gain)


def test_induction_is_drawn_against_distance():
    rows = []
    for distance, bits in ((64, 3.0), (256, 2.0), (1024, 0.5)):
        part = rows_of({"rope": [2.0] * 5}, protocol="induction")[:1]
        rows += with_deltas(part, length=distance, distance=distance, gain=bits)
    (figure,) = plots.figures(rows).values()
    (curve,) = lines_of(figure.axes[0], 3)
    np.testing.assert_allclose(curve.get_xdata(), [64, 256, 1024])
    np.testing.assert_allclose(curve.get_ydata(), [3.0, 2.0, 0.5])
    assert "copies" in figure.axes[0].get_xlabel()


def test_too_many_lines_are_split_by_kind_of_run():
    rows = []
    for length in (128, 256):
        values = {f"encoding{i}": [2.0] * 5 for i in range(7)}
        part = rows_of(values, train_length=length)
        rows += with_deltas(part, trained_bytes=length * 10**4)
    assert list(plots.figures(rows)) == [
        "anchored-trained128-1.28MB",
        "anchored-trained128-1.28MB-delta",
        "anchored-trained256-2.56MB",
        "anchored-trained256-2.56MB-delta",
    ]


def test_a_figure_becomes_a_png(tmp_path):
    rows = [complete(row) for row in rows_of({"alibi": [2.0] * 5})]
    written = plot_style.save(plots.extrapolation(rows), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes() == written
    assert written.startswith(b"\x89PNG") and len(written) > 10_000
