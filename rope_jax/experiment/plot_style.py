"""One look for every picture: an encoding has the same colour wherever it stands.

Okabe & Ito's colours, and two of Tol's muted ones, are told apart by readers with any
colour vision; beyond nine encodings the line style changes as well, and markers never
repeat beside a colour, so that a print without colours can be read too.
"""

import io
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

GREY = "#767676"
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444"),
    *("#882255", "#999933"),
)
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":")
# Lines of one encoding that differ in something else: scaling, budget, length.
_VARIANTS = ((0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (2, 2)))
# The most compared ones first: they have plain lines.
_ORDER = (
    *("rope", "alibi", "none", "sinusoidal", "learned", "t5", "kerple"),
    *("fox", "fire", "pope", "cable", "dape", "cope", "shaw"),
    *("sandwich", "xpos", "prope", "random_rope", "integer", "binary"),
)


def styles(names: list[str]) -> list[dict]:
    """Options of matplotlib for lines, given by the names of their encodings.

    The colour is the encoding's own, whatever else is in the picture; further lines
    of the same encoding have other dashes and markers.
    """
    unknown = [name for name in dict.fromkeys(names) if name not in _ORDER]
    places = {name: i for i, name in enumerate((*_ORDER, *unknown))}
    made, seen = [], dict.fromkeys(names, 0)
    for name in names:
        turn, place = divmod(places[name], len(_COLOURS))
        variant = seen[name]
        seen[name] += 1
        dashes = _DASHES[turn % len(_DASHES)]
        if variant:
            dashes = _VARIANTS[(variant - 1) % len(_VARIANTS)]
        made.append(
            {
                "color": _COLOURS[place],
                "marker": _MARKERS[(place + turn + variant) % len(_MARKERS)],
                "linestyle": dashes,
            }
        )
    return made


def offset(right: float, up: float, **text) -> dict:
    """Options of an annotation that stands some points away from its place."""
    return {"xytext": (right, up), "textcoords": "offset points", **text}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, with room kept for what stands outside."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def titled(figure: Figure, title: str, subtitle: str) -> None:
    """Put a title and a grey line below it at the upper left of a figure."""
    axes = figure.axes[0]
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    above = offset(0, 8, color=GREY, fontsize=9)
    text = axes.annotate(subtitle, (0, 1), xycoords="axes fraction", **above)
    text.set_in_layout(False)  # it may reach over the panels beside it


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def save(figure: Figure, path: pathlib.Path | str) -> bytes:
    """Write a figure as PNG; the bytes that were written."""
    content = png(figure)
    pathlib.Path(path).write_bytes(content)
    return content
