"""Pictures of the functional library: what the encodings look like before training.

    python -m rope_jax.experiment.plots_functional --out=figures

Each function draws on given axes from the pure functions of rope_jax, so that a
notebook can place them as it likes; the command writes each as a PNG.
"""

import pathlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rope_jax.experiment import cli
from rope_jax.experiment.plot_style import GREY, new_figure, offset, save
from rope_jax.functional import additive, alibi, frequencies, rotary

_BLUE, _RED, _GREEN, _PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"


def decay_bound(distances: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """The factor of RoPE's upper bound that depends on the distance.

        (1/R) sum_{j=1..R} |S_j|,   S_j = sum_{i<j} exp(1j * distance * inv_freq_i)

    By Abel summation a score of RoPE is at most max_i |h_(i+1) - h_i| sum_j |S_j|,
    where h_i are the products of the pairs of query and key.

    Args:
      distances: integers `[n]`.
      inv_freq: `[R]`, radians per position.

    Returns:
      `[n]`; (R + 1) / 2 at distance 0.

    References:
      Su et al. 2021, RoFormer, section 3.4.3 and figure 2.

    Example:
      >>> decay_bound(np.array([0]), np.ones(4)).tolist()
      [2.5]
    """
    angles = np.asarray(rotary.rope_angles(jnp.asarray(distances), inv_freq))
    partial = np.cumsum(np.exp(1j * angles.astype(np.float64)), axis=-1)
    return np.abs(partial).mean(axis=-1)


def long_term_decay(axes: Axes, *, dim: int = 128, longest: int = 256) -> None:
    """RoPE's upper bound against distance, and the scores of two equal vectors.

    Both are divided by their value at distance 0. The score, of vectors of ones, is
    the mean of cos(distance * inv_freq): it falls in waves as the bound does, and
    past zero at distances that are long for the base.
    """
    distances = np.arange(longest + 1)
    bound = decay_bound(distances, frequencies.default(dim).inv_freq)
    ones = jnp.ones((longest + 1, 1, dim))
    query = rotary.rope(ones[:1], jnp.zeros(1, jnp.int32))
    keys = rotary.rope(ones, jnp.asarray(distances))
    scores = np.asarray((query * keys).sum(-1)[:, 0]) / dim
    axes.plot(distances, bound / bound[0], color=_BLUE, linewidth=1.8)
    axes.plot(distances, scores, color=_RED, linewidth=1.4)
    axes.axhline(0, color=GREY, linewidth=0.8)
    _names(axes, {"upper bound": _BLUE, "score of equal vectors": _RED})
    _texts(
        axes,
        f"Long-term decay of RoPE, {dim} channels",
        "distance (tokens)",
        "relative to distance 0",
    )


def spectra(axes: Axes, *, dim: int = 64, factor: float = 8.0, length: int = 2048):
    """Each scaling's frequencies over the default ones, pair by pair.

    1 is an untouched pair, 1 / factor one that is interpolated in full.
    """
    options = {"factor": factor, "original_max_position_embeddings": length}
    default = frequencies.default(dim).inv_freq
    lines = {
        "default": (default, GREY, "-"),
        "linear": (frequencies.linear(dim, factor=factor).inv_freq, _BLUE, "-"),
        "ntk": (frequencies.ntk(dim, factor=factor).inv_freq, _GREEN, "--"),
        "yarn": (frequencies.yarn(dim, **options).inv_freq, _RED, "-."),
        "llama3": (
            frequencies.llama3(dim, theta=10_000.0, **options).inv_freq,
            _PINK,
            ":",
        ),
    }
    pair = np.arange(len(default))
    for values, colour, dashes in lines.values():
        ratio = np.asarray(values) / default
        axes.plot(pair, ratio, color=colour, linestyle=dashes, linewidth=1.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    _names(axes, {name: line[1] for name, line in lines.items()})
    _texts(
        axes,
        f"Frequencies after scaling by {factor:g} from {length:,} tokens",
        "rotary pair, fast to slow",
        "frequency over the default one",
    )


def slopes_by_heads(
    axes: Axes, heads: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 20, 32)
) -> None:
    """ALiBi's slopes, a column of dots for each number of heads.

    Other numbers than powers of two take slopes of the power below, then every second
    one of the power above.
    """
    for index, count in enumerate(heads):
        slopes = np.asarray(alibi.alibi_slopes(count))
        colour, marker = (_RED, "D") if count & (count - 1) else (_BLUE, "o")
        place = np.full(count, index)
        axes.plot(place, slopes, color=colour, marker=marker, markersize=4, ls="")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(_power_of_two))
    axes.xaxis.set_major_locator(FixedLocator(range(len(heads))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: str(heads[round(x)])))
    _names(axes, {"power of two": _BLUE, "other": _RED})
    _texts(axes, "ALiBi's slopes", "heads", "bias per token of distance")


def sinusoidal_matrix(axes: Axes, *, length: int = 128, dim: int = 64) -> None:
    """The sinusoidal encoding: rows are positions, columns are channels."""
    matrix = np.asarray(additive.sinusoidal(jnp.arange(length), dim))
    axes.imshow(matrix, aspect="auto", cmap="PuOr", vmin=-1, vmax=1)
    _texts(axes, "The sinusoidal encoding", "channel", "position")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator(range(0, length, 32)))


DRAWINGS: dict[str, Callable[[Axes], None]] = {
    "decay": long_term_decay,
    "spectra": spectra,
    "slopes": slopes_by_heads,
    "sinusoidal": sinusoidal_matrix,
}


def _power_of_two(value: float, place) -> str:
    del place
    return f"$2^{{{np.log2(value):g}}}$"


def _names(axes: Axes, names: dict[str, str]) -> None:
    """Names in their lines' colours, one below the other at the right edge."""
    for index, (name, colour) in enumerate(names.items()):
        text = offset(6, -14 * index, color=colour, fontsize=9, va="top")
        axes.annotate(name, (1, 1), xycoords="axes fraction", fontweight="bold", **text)


def _texts(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)


def _main(argv):
    del argv
    if not flags.FLAGS["out"].value:
        raise ValueError("--out must name a directory, where the pictures go")
    out = pathlib.Path(flags.FLAGS["out"].value).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    for name, drawing in DRAWINGS.items():
        figure = new_figure(7.2, 4.2)
        drawing(figure.subplots())
        save(figure, out / f"{name}.png")
        print(f"written: {out / name}.png")


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "A directory for the pictures.")
    cli.run(_main)
