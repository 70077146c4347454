"""A picture of a task: exact match against the length, a line for each encoding."""

import pathlib

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rope_jax.experiment.plot_style import styles
from rope_jax.experiment.rows import complete
from rope_jax.experiment.table import label


def plot(rows: list[dict], path: pathlib.Path | str) -> None:
    """Draw exact match against length as PNG, a panel for each task.

    The band is the 95 % interval of the one run, or, of several seeds, reaches from
    the worst to the best, with the line at their mean.

    Args:
      rows: the rows of `evaluation.evaluate_workdir`, of the protocol "task".
      path: where the PNG goes.

    Raises:
      ValueError: no row has a value.
    """
    rows = [row | {"name": label(complete(row))} for row in rows]
    known = [row for row in rows if row["exact_match"] is not None]
    if not known:
        raise ValueError("rows must hold at least one with an exact_match")
    tasks = list(dict.fromkeys(row["corpus"] for row in known))
    size = (8.4, 4.8 * len(tasks))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    panels = figure.subplots(len(tasks), squeeze=False).ravel()
    names = dict.fromkeys((row["name"], row["encoding"]) for row in rows)
    looks = styles([encoding for _, encoding in names])
    looks = {name: look for (name, _), look in zip(names, looks, strict=True)}
    for axes, task in zip(panels, tasks, strict=True):
        _panel(axes, [row for row in known if row["corpus"] == task], looks)
    FigureCanvasAgg(figure).print_png(path)


def _panel(axes: Axes, rows: list[dict], looks: dict[str, dict]) -> None:
    _frame(axes, rows)
    for name, look in looks.items():
        own = [row for row in rows if row["name"] == name]
        if own:
            _draw(axes, own, name, look)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _frame(axes: Axes, rows: list[dict]) -> None:
    first, lengths = rows[0], sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_ylim(-3, 103)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for trained in {row["train_length"] for row in rows}:
        axes.axvline(trained, color="0.45", linewidth=1.0, linestyle="--", zorder=1)
    axes.set_xlabel("length of the task; dashed: the longest in training")
    axes.set_ylabel("exact match (%)")
    axes.set_title(first["corpus"], loc="left", fontsize=13, fontweight="bold")


def _draw(axes: Axes, rows: list[dict], label: str, line: dict) -> None:
    lengths = sorted({row["length"] for row in rows})
    groups = [[row for row in rows if row["length"] == n] for n in lengths]
    several = max(map(len, groups)) > 1
    ends = ("exact_match", "exact_match") if several else ("exact_low", "exact_high")
    low = [100 * min(row[ends[0]] for row in group) for group in groups]
    high = [100 * max(row[ends[1]] for row in group) for group in groups]
    mean = [100 * np.mean([row["exact_match"] for row in group]) for group in groups]
    axes.plot(lengths, mean, linewidth=1.8, markersize=5.5, label=label, **line)
    axes.fill_between(lengths, low, high, color=line["color"], alpha=0.15, linewidth=0)
