"""One HTML file about a sweep: what was found, and all that is needed to check it.

The file has everything inside, needs no network and no script, prints, and follows
the reader's choice of a dark or a light page.
"""

import base64
import html
import json
from collections.abc import Iterable
from string import Template

from rope_jax.experiment import task_report
from rope_jax.experiment.claims import judge
from rope_jax.experiment.config import Config, differences, to_dict
from rope_jax.experiment.table import Table, by_measurement, headline, notes, tables
from rope_jax.experiment.task_evaluation import PROTOCOL

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d9dee3;
  --page: #ffffff; --good: #00694b; --bad: #a84300; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae;
  --line: #39424b; --page: #15191d; --good: #4fc9a0; --bad: #f0924f; } }
body { color: var(--ink); background: var(--page); margin: 2.5rem auto;
  max-width: 62rem; padding: 0 1.25rem;
  font: 16px/1.55 system-ui, "Segoe UI", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, li { max-width: 46rem; }
.soft, caption, small { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; margin: .4rem 0 1.2rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem .22rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1.5px solid var(--line); font-weight: 600; }
td.n, th.n { text-align: right; padding: .22rem 0 .22rem .9rem; white-space: nowrap; }
tr.mean td { font-weight: 600; }
tr.sd td { color: var(--soft); border-bottom: 1px solid var(--line); }
.agrees { color: var(--good); font-weight: 600; white-space: nowrap; }
.disagrees { color: var(--bad); font-weight: 600; white-space: nowrap; }
.cannot { color: var(--soft); white-space: nowrap; }
figure { margin: 1.2rem 0; break-inside: avoid; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
pre { overflow-x: auto; font-size: .8rem; line-height: 1.45; padding: .8rem;
  border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap; }
@media print { body { margin: 0; max-width: none; font-size: 10pt; }
  .wide { overflow: visible; } details > * { display: block; } }
</style>
</head>
<body>
<h1>$title</h1>
<p class="soft">$summary</p>
$body
</body>
</html>
""")

_INTERVALS = """
<ul>
<li><b>One run.</b> ± is half of the 95 % interval over the scored bytes: a studentised
circular block bootstrap along the text. It says how far other bytes of the same text
could move the number, for these very weights.</li>
<li><b>A mean over seeds.</b> The interval joins that of the bytes and the t interval
over the seeds; sd is the standard deviation over seeds.</li>
<li><b>Difference to the training length.</b> Paired: the same bytes at every length of
one training length, so that hard bytes drop out.</li>
<li><b>Difference to another encoding, by seed.</b> The t interval over seeds of the
differences on the same bytes. Other bytes are not covered.</li>
<li>No interval covers other texts, sizes or settings, nor is any widened for the number
of comparisons.</li>
</ul>
"""


def page(
    rows: list[dict],
    pictures: dict[str, bytes],
    configs: dict[str, Config],
    commands: list[dict],
) -> str:
    """The report of a sweep as one HTML document.

    Args:
      rows: complete rows, of any protocols.
      pictures: PNG files by name, in the order in which they are shown.
      configs: of each run, by its name; empty where only rows are at hand.
      commands: what `provenance.read` gives.
    """
    groups = by_measurement(rows)
    parts = [_claims(rows)]
    for (protocol, split), group in groups.items():
        parts.append(f"<h2>{_text(protocol)}, {_text(split)}</h2>")
        if protocol == PROTOCOL:
            parts += [_figure(*p) for p in pictures.items() if p[0] == PROTOCOL]
            parts.append(f"<pre>{_text(task_report.format_table(group))}</pre>")
            continue
        parts.append(f"<p class=soft>{'<br>'.join(map(_text, headline(group)))}</p>")
        parts += [
            _figure(name, content)
            for name, content in pictures.items()
            if name.partition("-")[0] == protocol
            and (name.endswith(f"-{split}") or not _names_split(name))
        ]
        parts += [_table(table) for table in tables(group)]
        parts.append(
            f"<ul>{''.join(f'<li>{_text(n)}</li>' for n in notes(group))}</ul>"
        )
    parts.append(f"<h2>What the intervals cover</h2>{_INTERVALS}")
    parts += [_commands(commands), _configs(configs)]
    return _PAGE.substitute(
        title="Length extrapolation of positional encodings",
        summary=_summary(rows, commands),
        body="\n".join(parts),
    )


def _names_split(name: str) -> bool:
    return name.endswith(("-validation", "-test"))


def _summary(rows: list[dict], commands: list[dict]) -> str:
    def listed(name, form=str):
        return ", ".join(form(v) for v in sorted({row[name] for row in rows}))

    date = f" {commands[-1]['date'][:10]}." if commands else ""
    corpora = sorted({row.get("corpus") or "" for row in rows} - {""})
    return _text(
        f"{listed('encoding')}; seeds {listed('seed')}; trained at "
        f"{listed('train_length', '{:,}'.format)} bytes of context, evaluated at "
        f"{listed('length', '{:,}'.format)}; {', '.join(corpora)}.{date}"
    )


def _claims(rows: list[dict]) -> str:
    lines = []
    for claim, runs, verdict in judge(rows):
        style = verdict.outcome.partition(" ")[0]
        lines.append(
            f"<tr><td>{_text(claim.text)}<br><small>{_text(claim.source)}</small></td>"
            f"<td class={style}>{_text(verdict.outcome)}</td>"
            f"<td>{_text(verdict.evidence)}<br><small>{_text(runs)}</small></td></tr>"
        )
    if not lines:
        return "<h2>Published claims</h2><p>These rows are about none of them.</p>"
    head = "<tr><th>claim</th><th>here</th><th>numbers</th></tr>"
    return (
        "<h2>Published claims, held against these rows</h2><p>A claim agrees or "
        "disagrees only where a whole 95 % interval, in bits per byte, lies on one "
        "side of its limit; with one seed that covers the bytes alone. Published "
        "numbers are of larger models and other texts: the limits are about shapes.</p>"
        f"<div class=wide><table>{head}{''.join(lines)}</table></div>"
    )


def _figure(name: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    return (
        f'<figure><img alt="{_text(name)}" src="data:image/png;base64,{data}"></figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in table.names)
    head += "".join(f"<th class=n>{n:,}</th>" for n in table.columns)
    lines = []
    for key, cells in table.lines:
        kind = f" class={key[-1]}" if key[-1] in ("mean", "sd") else ""
        line = "".join(f"<td>{_text(text)}</td>" for text in key)
        values = (cells.get(n, "") for n in table.columns)
        line += "".join(f"<td class=n>{_text(value)}</td>" for value in values)
        lines.append(f"<tr{kind}>{line}</tr>")
    return (
        f"<h3>{_text(table.title)}</h3><div class=wide><table><tr>{head}</tr>"
        f"{''.join(lines)}</table></div>"
    )


def _commands(commands: Iterable[dict]) -> str:
    lines = []
    for one in commands:
        versions = ", ".join(f"{k} {v}" for k, v in one["versions"].items())
        lines.append(
            f"$ {one['command']}\n{one['date']}; {one['cpu']}, {one['cores']} cores; "
            f"devices: {', '.join(one['devices'])}\nPython {one['python']}; {versions}"
        )
    text = "\n\n".join(lines) or "Not recorded with these rows."
    return f"<h2>Commands, machine and versions</h2><pre>{_text(text)}</pre>"


def _configs(configs: dict[str, Config]) -> str:
    """The first config whole; of the others, what differs from it."""
    if not configs:
        return "<h2>Configs</h2><p>Not beside these rows.</p>"
    (name, first), *others = configs.items()
    lines = [
        f"{other}: {'; '.join(differences(first, config)) or 'the same'}"
        for other, config in others
    ]
    rest = "\n".join(lines)
    more = f"<h3>The other runs, there and here</h3><pre>{_text(rest)}</pre>"
    return (
        f"<h2>Configs</h2><details><summary>{_text(name)}</summary><pre>"
        f"{_text(json.dumps(to_dict(first), indent=1))}</pre></details>"
        f"{more if others else ''}"
    )


def _text(value: str) -> str:
    return html.escape(str(value))
