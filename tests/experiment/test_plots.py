"""What is drawn: the axes and texts of the figure, and that the file is a picture."""

import itertools

import numpy as np
import pytest

from rope_jax.experiment import plots
from rope_jax.experiment.plots import plot

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


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw rows; give the panels of the figure back."""
    figures = []

    class Canvas(plots.FigureCanvasAgg):
        def __init__(self, figure):
            figures.append(figure)
            super().__init__(figure)

    monkeypatch.setattr(plots, "FigureCanvasAgg", Canvas)

    def draw(rows):
        plot(rows, tmp_path / "plot.png")
        written = (tmp_path / "plot.png").read_bytes()
        assert written.startswith(b"\x89PNG") and len(written) > 10_000
        return figures[-1].axes

    return draw


def texts(axes):
    return [text.get_text() for text in axes.texts]


def lines_of(axes, points):
    return [line for line in axes.lines if len(line.get_xdata()) == points]


def test_context_is_on_a_binary_axis_with_the_bytes_as_labels(drawn):
    axes = drawn(rows_of(VALUES))[-1]
    assert axes.get_xscale() == "log" and axes.xaxis.get_transform().base == 2
    assert list(axes.get_xticks()) == list(LENGTHS)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["128", "256", "512", "1,024", "2,048"]
    assert "bytes" in axes.get_xlabel()


def test_each_encoding_is_a_line_with_its_own_colour_and_marker(drawn):
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


def test_twenty_encodings_never_share_colour_marker_and_dashes(drawn):
    values = {f"encoding{i}": [2 + i / 10] * 5 for i in range(20)}
    curves = lines_of(drawn(rows_of(values))[0], 5)
    styles = {(c.get_color(), c.get_marker(), c.get_linestyle()) for c in curves}
    assert len(styles) == 20


def test_labels_stand_in_the_order_of_the_last_values_without_overlap(drawn):
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


def test_training_length_is_marked(drawn):
    axes = drawn(rows_of(VALUES))[0]
    assert "trained at 128" in texts(axes)
    marks = [line for line in lines_of(axes, 2) if set(line.get_xdata()) == {128}]
    assert len(marks) == 1


def test_an_explosion_is_cut_off_and_written_down(drawn):
    full, close = drawn(rows_of(VALUES))
    assert 8 < full.get_ylim()[1] < 10
    assert [t for t in texts(full) if t.startswith("↑")] == ["↑ 12.5", "↑ 15.3"]
    assert "a uniform guess" in texts(full)
    # The close-up shows every encoding's best value, and what is flat near them.
    assert close.get_ylim()[0] < 2.49 and 3.38 < close.get_ylim()[1] < 4
    assert "alibi" in texts(close) and "rope" not in texts(close)


def test_a_refused_length_ends_the_line_with_a_cross(drawn):
    axes = drawn(rows_of(VALUES))[0]
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert cross.get_xdata()[0] == 128 and set(cross.get_ydata()) == {2.9}
    assert cross.get_color() != lines_of(axes, 5)[0].get_color()


def test_one_flat_encoding_needs_one_panel_with_room_for_its_interval(drawn):
    (axes,) = drawn(rows_of({"alibi": VALUES["alibi"]}))
    bottom, top = axes.get_ylim()
    assert bottom < 2.595 and 2.72 < top < 3
    assert "a uniform guess" not in texts(axes)


def test_seeds_are_drawn_as_mean_and_deviation(drawn):
    (axes,) = drawn(rows_of({"alibi": [2.0] * 5}, seeds=3))
    (curve,) = lines_of(axes, 5)
    np.testing.assert_allclose(curve.get_ydata(), 2.1)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(2.0) and band.max() == pytest.approx(2.2)
    assert any("mean ± sd over seeds" in text for text in texts(axes))


def test_training_lengths_are_told_apart(drawn):
    rows = rows_of({"rope": [2.0, 3.0, 4.0, 5.0, 6.0]})
    rows += rows_of({"rope": [2.1, 2.0, 3.0, 4.0, 5.0]}, train_length=256)
    axes = drawn(rows)[0]
    assert {"rope (128)", "rope (256)", "trained at 128", "trained at 256"} <= set(
        texts(axes)
    )


def test_per_position_says_what_its_axis_is(drawn):
    axes = drawn(rows_of(VALUES, protocol="per_position"))
    assert "before the predicted byte" in axes[-1].get_xlabel()
    assert "position" in axes[0].get_title(loc="left")


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one with a bpc"):
        plot(rows_of({"learned": [None] * 5}), tmp_path / "plot.png")
