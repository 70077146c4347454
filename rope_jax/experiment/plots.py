"""Pictures of an evaluation: every figure that its rows can fill.

Each function takes rows of one protocol and split and gives a figure back, whose
bands are the 95 % intervals of `aggregate`: over the bytes, and over the seeds too
where there are several.
"""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from rope_jax.experiment.plot_lines import (
    UNIFORM,
    Curve,
    binary_axis,
    curves_of,
    draw,
    label_ends,
    mark_training,
    trained_bytes,
    widened,
)
from rope_jax.experiment.plot_style import GREY, new_figure, offset, titled
from rope_jax.experiment.table import (
    budget_text,
    by_measurement,
    column,
    label,
    several_budgets,
)

_CONTEXT = "context length (bytes)"
_GAINS = {
    "control": (
        "What real distant context is worth",
        "bits per byte lost without it",
        _CONTEXT,
    ),
    "window_cap": (
        "What attention beyond the training length is worth",
        "bits per byte lost by the capped window",
        _CONTEXT,
    ),
    "induction": (
        "Copying from a distance",
        "bits per byte saved on the second copy",
        "bytes between the starts of the copies",
    ),
}


# Protocols whose pictures stand behind those of bits per byte by context length.
_LAST = (*_GAINS, "per_position")
_LINES = 12  # most lines of several kinds of runs in one picture


def figures(rows: list[dict]) -> dict[str, Figure]:
    """Every figure that rows can fill, by a name that begins with its protocol.

    The first is that of bits per byte against context length, if there is one. Where
    one picture would hold more than a dozen lines of several training lengths or
    budgets, each of these has a picture of its own.

    Args:
      rows: rows of any protocols. What has no value is left out.
    """
    made: dict[str, Figure] = {}
    groups = by_measurement(rows)
    for protocol, split in sorted(groups, key=lambda key: key[0] in _LAST):
        group = groups[protocol, split]
        several = len({s for p, s in groups if p == protocol}) > 1
        end = f"-{split}" if several else ""
        for part, own in _parts(group).items():
            name = f"{protocol}{part}"
            if protocol in _GAINS:
                if any(row["gain"] is not None for row in own):
                    made[name + end] = gain(own)
            elif any(row["bpc"] is not None for row in own):
                made[name + end] = extrapolation(own)
                if any(row["delta"] is not None for row in own):
                    made[f"{name}-delta{end}"] = delta(own)
        if protocol not in _GAINS and several_budgets(_known(group)):
            made[f"{protocol}-budget{end}"] = budget(group)
    return made


def _known(rows: list[dict]) -> list[dict]:
    return [
        row
        for row in rows
        if row["delta"] is not None and row["trained_bytes"] is not None
    ]


def _parts(rows: list[dict]) -> dict[str, list[dict]]:
    """All rows, or, where they are too many lines, those of each kind of run."""
    kinds = sorted({(r["train_length"], r["trained_bytes"] or 0) for r in rows})
    lines = {(label(r), r["train_length"], r["trained_bytes"]) for r in rows}
    if len(kinds) == 1 or len(lines) <= _LINES:
        return {"": rows}
    return {
        f"-trained{length}-{budget_text(amount).replace(' ', '')}": [
            row
            for row in rows
            if (row["train_length"], row["trained_bytes"] or 0) == (length, amount)
        ]
        for length, amount in sorted(kinds, key=lambda kind: (kind[0], -kind[1]))
    }


def extrapolation(rows: list[dict]) -> Figure:
    """Bits per byte against context length, a line for each encoding.

    A cross ends the line of an encoding that refuses the next length; an arrow at the
    upper edge gives a value beyond it.

    Raises:
      ValueError: no row has a value.
    """
    curves = curves_of(rows)
    if not curves:
        raise ValueError("rows must hold at least one with a bpc")
    limits = _limits(curves)
    figure = new_figure(8.4, 3.2 + 2 * len(limits))
    panels = figure.subplots(
        len(limits), sharex=True, squeeze=False, height_ratios=[3, 2][: len(limits)]
    ).ravel()
    for axes, (bottom, top) in zip(panels, limits, strict=True):
        first = axes is panels[0]
        axes.set_ylim(bottom, top)
        binary_axis(axes, [column(row) for row in rows])
        _mark_uniform(axes)
        mark_training(axes, [row["train_length"] for row in rows], named=first)
        for curve in curves:
            draw(axes, curve, cut=top >= UNIFORM)
        shown = [curve for curve in curves if first or curve.y[-1] <= top]
        label_ends(axes, shown, line=0.055 if first else 0.085)
    title, what = "Length extrapolation", _CONTEXT
    if rows[0]["protocol"] == "per_position":
        what = "bytes of context before the predicted byte, up to"
        title = "Loss by position in the window"
    panels[-1].set_xlabel(what)
    panels[0].set_ylabel("bits per byte (lower is better)")
    for axes in panels[1:]:
        axes.set_ylabel("close-up")
    titled(figure, title, _subtitle(rows))
    return figure


def delta(rows: list[dict]) -> Figure:
    """The paired difference to the training length against context length."""
    panels = {"": curves_of(rows, "delta")}
    figure = _panels(
        panels, "difference to the training length (bits per byte)", column
    )
    axes = figure.axes[0]
    mark_training(axes, [row["train_length"] for row in rows], named=True)
    axes.set_xlabel(_CONTEXT)
    titled(figure, "Lost beyond the training length", _subtitle(rows))
    return figure


def gain(rows: list[dict]) -> Figure:
    """The gain of a control protocol, a panel for each condition."""
    title, up, along = _GAINS[rows[0]["protocol"]]
    rows = [row for row in rows if row["gain"] is not None]
    panels = {
        condition: curves_of([r for r in rows if r["control"] == condition], "gain")
        for condition in dict.fromkeys(row["control"] for row in rows)
    }
    figure = _panels(panels, up, column)
    for axes in figure.axes:
        axes.set_xlabel(along)
        if rows[0]["distance"] is None:
            mark_training(axes, [row["train_length"] for row in rows], named=True)
    titled(figure, title, _subtitle(rows))
    return figure


def budget(rows: list[dict]) -> Figure:
    """The loss at the longest length against the bytes seen in training.

    A panel for each training length. Where a line rises, more training made
    extrapolation worse.
    """
    panels, rows = {}, _known(rows)
    for trained in sorted({row["train_length"] for row in rows}):
        own = [row for row in rows if row["train_length"] == trained]
        longest = max(row["length"] for row in own)
        own = [row for row in own if row["length"] == longest]
        text = f"trained at {trained:,}, evaluated at {longest:,}"
        panels[text] = curves_of(own, "delta", trained_bytes)
    figure = _panels(
        panels, "difference to the training length (bits per byte)", trained_bytes
    )
    for axes in figure.axes:
        axes.set_xlabel("bytes seen in training")
    titled(figure, "Does more training make extrapolation worse?", _subtitle(rows))
    return figure


def _panels(panels: dict[str, list[Curve]], ylabel: str, x: Callable) -> Figure:
    """Panels side by side with one y axis, cut at a uniform guess, and a line at 0."""
    curves = [curve for part in panels.values() for curve in part]
    ends = np.concatenate([np.r_[c.y, c.low, c.high] for c in curves])
    low, high = np.nanmin(np.r_[ends, 0.0]), np.nanmax(np.r_[ends, 0.0])
    figure = new_figure(3.4 + 5 * len(panels), 5.2)
    for axes, (name, part) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False).ravel(),
        panels.items(),
        strict=True,
    ):
        axes.set_ylim(widened(max(low, -UNIFORM), min(high, UNIFORM)))
        ticks = np.unique(np.concatenate([curve.x for curve in part])).tolist()
        if x is trained_bytes:
            binary_axis(axes, ticks, budget_text)
        else:
            binary_axis(axes, ticks)
        axes.axhline(0, color=GREY, linewidth=0.9)
        for curve in part:
            draw(axes, curve, cut=True)
        label_ends(axes, part, line=0.05)
        if name:
            inside = offset(-4, -4, color=GREY, ha="right", va="top")
            axes.annotate(name, (1, 1), xycoords="axes fraction", **inside)
    figure.axes[0].set_ylabel(ylabel)
    return figure


def _mark_uniform(axes) -> None:
    if axes.get_ylim()[1] <= UNIFORM:
        return
    axes.axhline(UNIFORM, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)))
    place = axes.get_yaxis_transform()
    above = offset(0, 3, color=GREY, fontsize=8, va="bottom")
    above["bbox"] = {"color": "white", "pad": 1}
    axes.annotate("a uniform guess", (0.01, UNIFORM), xycoords=place, **above)


def _limits(curves: list[Curve]) -> list[tuple[float, float]]:
    """The y limits of the picture, and of a close-up of its lower part if it helps.

    A model worse than a uniform guess would flatten all others: the picture ends a
    little above 8 bits, and what is higher is written there. The close-up reaches from
    the best value of all to the worst encoding's own best one.
    """
    bests = [curve.y.min() for curve in curves]
    highest = max(np.nanmax([curve.y, curve.high]) for curve in curves)
    bottom = min(np.nanmin([curve.y, curve.low]) for curve in curves)
    top = max(min(highest, UNIFORM + 0.5), bottom + 0.2)
    limits = [widened(bottom, top)]
    close = max(*bests, bottom + 0.1)
    if top - bottom > 2 and close - bottom < 0.4 * (top - bottom):
        limits.append(widened(bottom, close))
    return limits


def _subtitle(rows: list[dict]) -> str:
    scored = sorted({row["scored_bytes"] for row in rows if row["bpc"] is not None})
    amount = " to ".join(f"{n:,}" for n in (scored[:1] + scored[1:][-1:]))
    seeds = len({row["seed"] for row in rows})
    over = f"over bytes and {seeds} seeds" if seeds > 1 else "over bytes"
    return (
        f"{rows[0]['protocol']} protocol, {rows[0]['split']} split, {amount} bytes "
        f"scored at each point; band: 95 % interval {over}"
    )
