"""Everything that is written about an evaluation, from its rows alone.

    python -m rope_jax.experiment.report --workdir=runs/enwik8
    python -m rope_jax.experiment.report --rows=a.json,b.json --out=results/all

Reads extrapolation.json (or other files of rows) and writes, beside it or into --out:

    extrapolation.json, .csv    the rows
    extrapolation.png           bits per byte against context length
    tables.md                   every table
    summary.csv                 means over seeds, with intervals
    differences.csv             encodings against rope, seed by seed
    figures/*.png               every other figure
    report.html                 all of it in one file, with configs and commands
"""

import pathlib

from absl import flags

from rope_jax.experiment import (
    cli,
    plot_style,
    plots,
    run_directory,
    task_plots,
    task_report,
)
from rope_jax.experiment.aggregate import aggregate, paired_differences
from rope_jax.experiment.atomic import write_text
from rope_jax.experiment.provenance import read
from rope_jax.experiment.report_html import page
from rope_jax.experiment.rows import combine, read_json, write_csv, write_json
from rope_jax.experiment.table import format_markdown, format_table
from rope_jax.experiment.task_evaluation import PROTOCOL

__all__ = ["format_table", "write"]


def write(rows: list[dict], out: pathlib.Path) -> None:
    """Write rows, tables, figures and the HTML report into a directory.

    Args:
      rows: complete rows, of any protocols.
      out: where; the configs of runs below it and the commands recorded in it go
        into the report.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "extrapolation.json", rows)
    write_csv(out / "extrapolation.csv", rows)
    of_tasks = [row for row in rows if row["protocol"] == PROTOCOL]
    of_text = [row for row in rows if row["protocol"] != PROTOCOL]
    write_csv(out / "summary.csv", aggregate(of_text))
    write_csv(out / "differences.csv", paired_differences(of_text))
    tables = format_markdown(of_text) if of_text else ""
    if of_tasks:
        tables += f"## {PROTOCOL}\n\n```\n{task_report.format_table(of_tasks)}\n```\n"
    write_text(out / "tables.md", tables)
    document = page(rows, _pictures(of_text, of_tasks, out), _configs(out), read(out))
    write_text(out / "report.html", document)


def _pictures(of_text: list[dict], of_tasks: list[dict], out: pathlib.Path) -> dict:
    """Write every figure; their PNG files by name. The first is extrapolation.png."""
    pictures: dict[str, bytes] = {}

    def place(name):
        if not pictures:
            return out / "extrapolation.png"
        (out / "figures").mkdir(exist_ok=True)
        return out / "figures" / f"{name}.png"

    for name, figure in plots.figures(of_text).items():
        pictures[name] = plot_style.save(figure, place(name))
    if any(row["exact_match"] is not None for row in of_tasks):
        path = place(PROTOCOL)
        task_plots.plot(of_tasks, path)
        pictures[PROTOCOL] = path.read_bytes()
    return pictures


def _configs(out: pathlib.Path) -> dict:
    try:
        runs = run_directory.find_runs(out)
    except FileNotFoundError:
        return {}
    return {str(run.relative_to(out)): run_directory.load_config(run) for run in runs}


def _main(argv):
    del argv
    workdir, files, out = (
        flags.FLAGS[name].value for name in ("workdir", "rows", "out")
    )
    if bool(workdir) == bool(files):
        raise ValueError("give either --workdir or --rows")
    if files and not out:
        raise ValueError("--rows needs --out, where the report goes")
    files = files or [pathlib.Path(workdir) / "extrapolation.json"]
    rows = combine(read_json(pathlib.Path(file)) for file in files)
    if not rows:
        raise ValueError(f"{', '.join(map(str, files))} hold no row")
    folder = run_directory.absolute(out or workdir)
    write(rows, folder)
    print(format_table(rows))
    print(f"\nwritten: {folder}/report.html and what it shows")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "A directory with extrapolation.json.")
    flags.DEFINE_list("rows", None, "Files of rows, as a.json,b.json; needs --out.")
    flags.DEFINE_string("out", None, "Where to write; by default the workdir.")
    cli.run(_main)
