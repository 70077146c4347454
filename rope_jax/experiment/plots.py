"""Pictures of an evaluation: bits per byte against bytes of context."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rope_jax.experiment.report import aggregate, label, name_attention

# Okabe & Ito's colours, told apart by readers with any colour vision; beyond seven
# encodings the line style changes as well. Markers never repeat beside a colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":")
_UNIFORM = 8.0  # bits per byte of a guess that knows nothing
_GREY = "#767676"


def plot(rows: list[dict], path: pathlib.Path | str) -> None:
    """Draw bits per byte against context length, a line for each model, as PNG.

    The band is the 95 % interval of the one run, or, of several seeds, the mean and
    one standard deviation to each side. A cross ends the line of an encoding that
    refuses the next length; an arrow at the upper edge gives a value beyond it.

    Args:
      rows: the rows of `evaluation.evaluate_workdir`, of one protocol.
      path: where the PNG goes.

    Raises:
      ValueError: no row has a value.
    """
    rows = name_attention(rows)
    curves = _curves(rows)
    if not curves:
        raise ValueError("rows must hold at least one with a bpc")
    limits = _limits(curves)
    figure = Figure(figsize=(8.4, 3.2 + 2 * len(limits)), dpi=150, layout="constrained")
    panels = figure.subplots(
        len(limits), sharex=True, squeeze=False, height_ratios=[3, 2][: len(limits)]
    ).ravel()
    for axes, (bottom, top) in zip(panels, limits, strict=True):
        axes.set_ylim(bottom, top)
        _frame(axes, rows, first=axes is panels[0])
        for curve in curves:
            _draw(axes, curve)
        _label_ends(axes, curves, first=axes is panels[0])
    _titles(panels, rows)
    FigureCanvasAgg(figure).print_png(path)


@dataclass(frozen=True)
class _Curve:
    label: str
    length: np.ndarray  # [n], ascending
    bpc: np.ndarray  # [n]
    low: np.ndarray  # [n]
    high: np.ndarray  # [n]
    refuses: bool  # there is a longer length, without a value
    style: dict


def _curves(rows: list[dict]) -> list[_Curve]:
    groups: dict[tuple, list[dict]] = {}
    for row in aggregate(rows):
        key = label(row), row["train_length"], row["control"]
        groups.setdefault(key, []).append(row)
    several = len({train_length for _, train_length, _ in groups}) > 1
    curves = []
    for index, ((model, train_length, control), group) in enumerate(groups.items()):
        group = sorted(group, key=lambda row: row["length"])
        known = [row for row in group if row["bpc"] is not None]
        if not known:
            continue
        length = f"({train_length})" if several else ""
        intervals = np.array([_band(row, rows) for row in known], np.float64)
        curves.append(
            _Curve(
                label=" ".join(filter(None, (model, length, control))),
                length=np.array([row["length"] for row in known]),
                bpc=np.array([row["bpc"] for row in known]),
                low=intervals[:, 0],
                high=intervals[:, 1],
                refuses=group[-1]["bpc"] is None,
                style=style(index),
            )
        )
    return curves


def _band(mean: dict, rows: list[dict]) -> tuple[float | None, float | None]:
    if mean["seeds"] > 1:
        return mean["bpc"] - mean["bpc_sd"], mean["bpc"] + mean["bpc_sd"]
    keys = ("train_length", "control", "length")
    for row in rows:
        same = label(row) == label(mean) and all(
            row.get(k, "") == mean[k] for k in keys
        )
        if row["bpc"] is not None and same:
            return row["bpc_low"], row["bpc_high"]
    raise AssertionError(f"no row is behind {mean}")


def style(index: int) -> dict:
    """Colour, marker and dashes of one line of a picture, the same in all pictures."""
    turn, place = divmod(index, len(_COLOURS))
    return {
        "color": _COLOURS[place],
        "marker": _MARKERS[(place + turn) % len(_MARKERS)],
        "linestyle": _DASHES[turn % len(_DASHES)],
    }


def _limits(curves: list[_Curve]) -> list[tuple[float, float]]:
    """The y limits of the picture, and of a close-up of its lower part if it helps.

    A model worse than a uniform guess would flatten all others: the picture ends a
    little above 8 bits, and what is higher is written there. The close-up reaches from
    the best value of all to the worst encoding's own best one.
    """
    bests = [curve.bpc.min() for curve in curves]
    highest = max(np.nanmax([curve.bpc, curve.high]) for curve in curves)
    bottom = min(np.nanmin([curve.bpc, curve.low]) for curve in curves)
    top = max(min(highest, _UNIFORM + 0.5), bottom + 0.2)
    limits = [_widened(bottom, top)]
    close = max(*bests, bottom + 0.1)
    if top - bottom > 2 and close - bottom < 0.4 * (top - bottom):
        limits.append(_widened(bottom, close))
    return limits


def _widened(bottom: float, top: float) -> tuple[float, float]:
    margin = 0.07 * (top - bottom)
    return bottom - margin, top + margin


def _frame(axes: Axes, rows: list[dict], first: bool) -> None:
    """The context axis, the training length and the grid of one panel."""
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlim(lengths[0] / 2**0.25, lengths[-1] * 2**0.25)
    if len(lengths) > 9:
        axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_ylim()[1] > _UNIFORM:
        axes.axhline(_UNIFORM, color=_GREY, linewidth=0.9, linestyle=(0, (1, 2)))
        place = axes.get_yaxis_transform()
        above = _offset(0, 3, color=_GREY, fontsize=8, va="bottom")
        above["bbox"] = {"color": "white", "pad": 1}
        axes.annotate("a uniform guess", (0.01, _UNIFORM), xycoords=place, **above)
    for trained in sorted({row["train_length"] for row in rows}):
        axes.axvline(trained, color=_GREY, linewidth=1.0, linestyle="--", zorder=1)
        if first:
            place = axes.get_xaxis_transform()
            beside = _offset(4, -2, color=_GREY, fontsize=8, va="top")
            axes.annotate(
                f"trained at {trained:,}", (trained, 1), xycoords=place, **beside
            )


def _offset(right: float, up: float, **text) -> dict:
    """Options of an annotation that stands some points away from its place."""
    return {"xytext": (right, up), "textcoords": "offset points", **text}


def _draw(axes: Axes, curve: _Curve) -> None:
    style, colour = curve.style, curve.style["color"]
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6, "markersize": 5.5}
    axes.plot(curve.length, curve.bpc, linewidth=1.8, zorder=3, **edge, **style)
    band = {"color": colour, "alpha": 0.15, "linewidth": 0}
    axes.fill_between(curve.length, curve.low, curve.high, **band)
    if len(curve.length) == 1:  # a band of no width
        axes.vlines(curve.length, curve.low, curve.high, color=colour, alpha=0.5)
    if curve.refuses:  # a stub that ends in a cross: nothing comes after
        stub = curve.length[-1] * np.array([1, 2**0.2]), np.repeat(curve.bpc[-1], 2)
        cross = {"marker": "x", "markevery": [1], "markersize": 8, "markeredgewidth": 2}
        axes.plot(*stub, color=colour, linestyle=":", zorder=3, **cross)
    top = axes.get_ylim()[1]
    if top < _UNIFORM:  # a close-up: the curve is whole in the other panel
        return
    for length, bpc in zip(curve.length, curve.bpc, strict=True):
        if bpc > top:
            text = {"ha": "center", "va": "top", "color": colour, "fontsize": 8}
            axes.annotate(f"↑ {bpc:.1f}", (length, top), **text)


def _label_ends(axes: Axes, curves: list[_Curve], first: bool) -> None:
    """The encodings' names at the right edge, in the order of their last values."""
    bottom, top = axes.get_ylim()
    inside = [curve for curve in curves if first or curve.bpc[-1] <= top]
    curves = sorted(inside, key=lambda curve: curve.bpc[-1])
    gap = (0.055 if first else 0.085) * (top - bottom)  # for a line of text
    wanted = np.clip([curve.bpc[-1] for curve in curves], bottom, top - gap / 2)
    places = _spread(wanted, gap, bottom, top - gap / 2)
    right = axes.get_xlim()[1]
    for curve, wish, place in zip(curves, wanted, places, strict=True):
        colour = curve.style["color"]
        text = curve.label + (f" (to {curve.length[-1]:,})" if curve.refuses else "")
        if not curve.refuses and abs(place - wish) > 0.015 * (top - bottom):
            ends = [curve.length[-1], right], [wish, place]
            axes.plot(*ends, color=colour, linewidth=0.6, alpha=0.6, clip_on=False)
        bold = _offset(4, 0, color=colour, fontsize=10, fontweight="bold", va="center")
        axes.annotate(text, (right, place), annotation_clip=False, **bold)


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


def _titles(panels: Sequence[Axes], rows: list[dict]) -> None:
    first = rows[0]
    scored = sorted({row["scored_bytes"] for row in rows if row["bpc"] is not None})
    amount = " to ".join(f"{n:,}" for n in (scored[:1] + scored[1:][-1:]))
    several = max(row["seeds"] for row in aggregate(rows)) > 1
    band = "mean ± sd over seeds" if several else "95 % interval"
    what, title = "context length (bytes)", "Length extrapolation"
    if first["protocol"] == "per_position":
        what = "bytes of context before the predicted byte, up to"
        title = "Loss by position in the window"
    panels[-1].set_xlabel(what)
    panels[0].set_ylabel("bits per byte (lower is better)")
    for axes in panels[1:]:
        axes.set_ylabel("close-up")
    panels[0].set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    subtitle = (
        f"{first['protocol']} protocol, {first['split']} split, {amount} bytes scored "
        f"at each length; band: {band}"
    )
    above = _offset(0, 8, color=_GREY, fontsize=9)
    panels[0].annotate(subtitle, (0, 1), xycoords="axes fraction", **above)
