"""The shortest table of a sweep: for each model its level, and what longer text costs.

python -m rope_jax.experiment.summary --rows=results/lab/extrapolation.json
"""

import pathlib
from collections.abc import Iterable

from absl import flags

from rope_jax.experiment import cli
from rope_jax.experiment.aggregate import aggregate
from rope_jax.experiment.rows import read_json
from rope_jax.experiment.table import blocks, budget_text, label


def format_summary(rows: Iterable[dict]) -> str:
    """A line for each model of the anchored protocol, best at the longest length first.

    The first number is bits per byte at the training length, the others the paired
    difference to it (of a changed model: to the unchanged one); each a mean over the
    seeds, with half of its 95 % interval over seeds and bytes (see `aggregate`). There
    is a block for each training length and budget, the largest budget first, and for
    each corpus and split.

    Args:
      rows: rows of an evaluation.

    Raises:
      ValueError: there is no row of the anchored protocol.
    """
    means = [row for row in aggregate(rows) if row["protocol"] == "anchored"]
    if not means:
        raise ValueError("rows must hold rows of the anchored protocol, got none")
    groups: dict[tuple, list[dict]] = {}
    for row in means:
        key = row["train_length"], -(row["trained_bytes"] or 0)
        groups.setdefault((*key, row["corpus"] or "", row["split"]), []).append(row)
    return "\n\n".join(_block(groups[key]) for key in sorted(groups))


def _block(means: list[dict]) -> str:
    trained, seen = means[0]["train_length"], budget_text(means[0]["trained_bytes"])
    seeds = sorted({row["seeds"] for row in means if row["seeds"]})
    models: dict[str, dict[int, dict]] = {}
    for row in means:
        models.setdefault(label(row), {})[row["length"]] = row
    columns = sorted({row["length"] for row in means if row["length"] >= trained})
    order = sorted(models, key=lambda name: _rank(models[name], columns))
    header = ("encoding",), {n: f"at {n}" if n == trained else str(n) for n in columns}
    lines = [header]
    for name in order:
        level, changed = models[name], not _unchanged(models[name])
        cells = {}
        for n in columns:
            plain = n == trained and not changed
            cells[n] = _cell(level.get(n), "bpc" if plain else "delta")
        lines.append(((name,), cells))
    number = " to ".join(dict.fromkeys(map(str, [*seeds[:1], *seeds[-1:]])))
    title = (
        f"trained at {trained} bytes of context on {seen}; {means[0]['split']} split, "
        f"seeds: {number}\nbits per byte at {trained}, then the difference to it"
    )
    return "\n".join([title, *blocks(lines)])


def _unchanged(lengths: dict[int, dict]) -> bool:
    return not next(iter(lengths.values()))["scaling"]


def _rank(lengths: dict[int, dict], columns: list[int]) -> tuple:
    """By the value at the longest length; models that end before it come last."""
    values = [lengths[n]["bpc"] if n in lengths else None for n in reversed(columns)]
    ended = next((i for i, value in enumerate(values) if value is not None), None)
    return (len(columns), 0.0) if ended is None else (ended, values[ended])


def _cell(row: dict | None, name: str) -> str:
    if row is None or row[name] is None:
        return "-"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    text = f"{row[name]:{'+' if name == 'delta' else ''}.3f}"
    return text if low is None or high is None else f"{text}±{(high - low) / 2:.3f}"


def _main(argv):
    del argv
    print(format_summary(read_json(pathlib.Path(flags.FLAGS["rows"].value))))


if __name__ == "__main__":
    flags.DEFINE_string("rows", None, "A file of rows.", required=True)
    cli.run(_main)
