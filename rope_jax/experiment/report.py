"""Everything that is written about an evaluation, from its rows alone.

    python -m rope_jax.experiment.report --workdir=runs/enwik8
    python -m rope_jax.experiment.report --rows=a.json,b.json --out=results/all
    python -m rope_jax.experiment.report --rows=runs/lab --out=results/lab

Reads extrapolation.json (or other files of rows, or all of that name below a
directory), with the configs and the commands that lie beside it, and writes, in the
same place or into --out:

    extrapolation.json, .csv    the rows
    extrapolation.png           bits per byte against context length
    tables.md                   every table
    summary.csv                 means over seeds, with intervals
    differences.csv             encodings against rope, seed by seed
    figures/*.png               every other figure
    configs.json                of the runs, where they lie elsewhere
    report.html                 all of it in one file, with configs and commands
"""

import json
import pathlib
from collections.abc import Iterable

from absl import flags

from rope_jax.experiment import (
    cli,
    plot_style,
    plots,
    provenance,
    run_directory,
    task_plots,
    task_report,
)
from rope_jax.experiment.aggregate import aggregate, paired_differences
from rope_jax.experiment.atomic import write_text
from rope_jax.experiment.config import Config, from_dict, to_dict
from rope_jax.experiment.report_html import page
from rope_jax.experiment.rows import combine, read_json, write_csv, write_json
from rope_jax.experiment.table import format_markdown, format_table
from rope_jax.experiment.task_evaluation import PROTOCOL

__all__ = ["format_table", "write"]

_CONFIGS = "configs.json"


def write(
    rows: list[dict], out: pathlib.Path, sources: Iterable[pathlib.Path] = ()
) -> None:
    """Write rows, tables, figures and the HTML report into a directory.

    Args:
      rows: complete rows, of any protocols.
      out: where.
      sources: the directories whose runs' configs, and recorded commands, go into the
        report; by default `out` itself.
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = list(sources) or [out]
    configs: dict[str, Config] = {}
    for source in sources:
        configs |= _configs(source, alone=len(sources) == 1)
    commands = [line for source in sources for line in provenance.read(source)]
    if sources != [out]:
        commands.append(provenance.describe())
        values = {name: to_dict(one) for name, one in configs.items()}
        write_text(out / _CONFIGS, json.dumps(values) + "\n")
        provenance.write(commands, out)
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
    document = page(rows, _pictures(of_text, of_tasks, out), configs, commands)
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


def _configs(source: pathlib.Path, alone: bool) -> dict[str, Config]:
    """The configs of the runs below a directory, or those that a report kept there."""
    kept = source / _CONFIGS
    if kept.exists():
        values = json.loads(kept.read_text(encoding="utf-8"))
        return {name: from_dict(value) for name, value in values.items()}
    try:
        runs = run_directory.find_runs(source)
    except FileNotFoundError:
        return {}
    if source in runs:  # two workdirs may have a run of one name
        name = f"{source.parent.name}/{source.name}"
        return {name: run_directory.load_config(source)}
    here = source if alone else source.parent
    return {str(run.relative_to(here)): run_directory.load_config(run) for run in runs}


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """A file of rows, or those below a directory."""
    path = path.absolute()
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("extrapolation.json"))
    if not found:
        raise FileNotFoundError(f"there is no extrapolation.json below {path}")
    return found


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
    files = [one for file in files for one in _files(pathlib.Path(file).expanduser())]
    rows = combine(read_json(file) for file in files)
    if not rows:
        raise ValueError(f"{', '.join(map(str, files))} hold no row")
    folder = run_directory.absolute(out or workdir)
    write(rows, folder, dict.fromkeys(file.parent for file in files))
    of_task = all(row["protocol"] == PROTOCOL for row in rows)
    print((task_report.format_table if of_task else format_table)(rows))
    print(f"\nwritten: {folder}/report.html and what it shows")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "A directory with extrapolation.json.")
    flags.DEFINE_list(
        "rows", None, "Files of rows, or directories of them; needs --out."
    )
    flags.DEFINE_string("out", None, "Where to write; by default the workdir.")
    cli.run(_main)
