"""Lines of encodings against something on a binary axis, with bands and labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rope_jax.experiment import plot_style
from rope_jax.experiment.aggregate import aggregate
from rope_jax.experiment.plot_style import GREY, offset
from rope_jax.experiment.table import budget_text, column, label, several_budgets

UNIFORM = 8.0  # bits per byte of a guess that knows nothing


@dataclass(frozen=True)
class Curve:
    """One line of a picture.

    Attributes:
      label: its name.
      x: ascending `[n]`.
      y: `[n]`.
      low: `[n]`, lower ends of the 95 % intervals; NaN where unknown.
      high: `[n]`, the upper ends.
      refuses: there is a further x, without a value.
      style: options of `Axes.plot`.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    refuses: bool
    style: dict


def curves_of(
    rows: list[dict], name: str = "bpc", x: Callable[[dict], int] = column
) -> list[Curve]:
    """A curve for each encoding, scaling, training length, budget and corpus.

    Args:
      rows: rows of one protocol, of any number of seeds; their means are drawn.
      name: "bpc", "delta" or "gain".
      x: the place of a mean row on the axis. Where it is the budget, the lines
        run over budgets.
    """
    over_budgets = x is trained_bytes
    groups: dict[tuple, list[dict]] = {}
    for row in aggregate(rows):
        budget = None if over_budgets else row["trained_bytes"]
        key = row["encoding"], label(row), row["train_length"], budget, row["corpus"]
        groups.setdefault((*key, row["control"]), []).append(row)
    groups = {
        key: sorted(group, key=x)
        for key, group in groups.items()
        if any(row[name] is not None for row in group)
    }
    lengths = len({key[2] for key in groups}) > 1
    corpora = len({key[4] for key in groups}) > 1
    budgets = not over_budgets and several_budgets(rows)
    looks = plot_style.styles([key[0] for key in groups])
    made = []
    for style, (key, group) in zip(looks, groups.items(), strict=True):
        known = [row for row in group if row[name] is not None]
        limits = [(row[f"{name}_low"], row[f"{name}_high"]) for row in known]
        low, high = np.array(limits, np.float64).T
        text = key[1] + (f" ({key[2]})" if lengths else "")
        text += f" {budget_text(key[3])}" if budgets else ""
        text += f" {key[4]}" if corpora else ""
        made.append(
            Curve(
                label=text,
                x=np.array([x(row) for row in known]),
                y=np.array([row[name] for row in known]),
                low=low,
                high=high,
                refuses=group[-1][name] is None,
                style=style,
            )
        )
    return made


def trained_bytes(row: dict) -> int:
    """The place of a row on an axis of budgets."""
    return row["trained_bytes"]


def binary_axis(axes: Axes, values: Sequence[int], form=lambda x: f"{x:,.0f}") -> None:
    """A logarithmic x axis with a tick at each value."""
    values = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: form(x)))
    axes.set_xlim(values[0] / 2**0.25, values[-1] * 2**0.25)
    if len(values) > 9:
        axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def mark_training(axes: Axes, lengths: Sequence[int], *, named: bool) -> None:
    """A dashed line at each training length."""
    least, most = axes.get_xlim()
    for trained in sorted(n for n in set(lengths) if least <= n <= most):
        axes.axvline(trained, color=GREY, linewidth=1.0, linestyle="--", zorder=1)
        if named:
            place = axes.get_xaxis_transform()
            beside = offset(4, -2, color=GREY, fontsize=8, va="top")
            axes.annotate(
                f"trained at {trained:,}", (trained, 1), xycoords=place, **beside
            )


def draw(axes: Axes, curve: Curve, *, cut: bool = False) -> None:
    """Draw a line, its band and its end.

    Args:
      axes: with its limits set.
      curve: what to draw.
      cut: write down the values above the upper edge.
    """
    style, colour = curve.style, curve.style["color"]
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6, "markersize": 5.5}
    axes.plot(curve.x, curve.y, linewidth=1.8, zorder=3, **edge, **style)
    band = {"color": colour, "alpha": 0.15, "linewidth": 0}
    axes.fill_between(curve.x, curve.low, curve.high, **band)
    if len(curve.x) == 1:  # a band of no width
        axes.vlines(curve.x, curve.low, curve.high, color=colour, alpha=0.5)
    if curve.refuses:  # a stub that ends in a cross: nothing comes after
        stub = curve.x[-1] * np.array([1, 2**0.2]), np.repeat(curve.y[-1], 2)
        cross = {"marker": "x", "markevery": [1], "markersize": 8, "markeredgewidth": 2}
        axes.plot(*stub, color=colour, linestyle=":", zorder=3, **cross)
    top = axes.get_ylim()[1]
    for x, y in zip(curve.x, curve.y, strict=True):
        if cut and y > top:
            text = {"ha": "center", "va": "top", "color": colour, "fontsize": 8}
            axes.annotate(f"↑ {y:.1f}", (x, top), **text)


def label_ends(axes: Axes, curves: list[Curve], *, line: float) -> None:
    """The names at the right edge, in the order of their last values.

    Args:
      axes: with its limits set.
      curves: what is drawn in it.
      line: height of a line of text, as a part of the axes' height.
    """
    bottom, top = axes.get_ylim()
    curves = sorted(curves, key=lambda curve: curve.y[-1])
    gap = line * (top - bottom)
    wanted = np.clip([curve.y[-1] for curve in curves], bottom, top - gap / 2)
    places = _spread(wanted, gap, bottom, top - gap / 2)
    right = axes.get_xlim()[1]
    for curve, wish, place in zip(curves, wanted, places, strict=True):
        colour = curve.style["color"]
        text = curve.label + (f" (to {curve.x[-1]:,})" if curve.refuses else "")
        if not curve.refuses and abs(place - wish) > 0.015 * (top - bottom):
            ends = [curve.x[-1], right], [wish, place]
            axes.plot(*ends, color=colour, linewidth=0.6, alpha=0.6, clip_on=False)
        bold = offset(4, 0, color=colour, fontsize=10, fontweight="bold", va="center")
        axes.annotate(text, (right, place), annotation_clip=False, **bold)


def widened(bottom: float, top: float) -> tuple[float, float]:
    """Limits of an axis with a margin around values."""
    margin = 0.07 * max(top - bottom, 1e-3)
    return bottom - margin, top + margin


def _spread(
    wanted: np.ndarray, gap: float, bottom: float, top: float
) -> Sequence[float]:
    """Ascending places at least a gap apart and near the wanted ones, below top."""
    places = list(wanted)
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    ceiling = max(top, bottom + gap * (len(places) - 1))
    for i in reversed(range(len(places))):
        places[i] = min(places[i], ceiling)
        ceiling = places[i] - gap
    return places
