"""The report: whole in one file, made from rows alone."""

import html.parser
import json
import re

import pytest

from rope_jax.experiment import provenance, report, run_directory
from rope_jax.experiment.config import Config
from rope_jax.experiment.rows import read_json


class Tags(html.parser.HTMLParser):
    """Collects the tags and what is left open."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def written(rows_of, tmp_path_factory):
    """A directory with a report on several protocols, and its parsed page."""
    out = tmp_path_factory.mktemp("out")
    rows = []
    for seed in (0, 1):
        rows += rows_of("rope", [2.0, 2.5, 3, 4, 5 + seed], seed=seed, corpus="<text>")
        rows += rows_of("alibi", [2.1] * 5, seed=seed, corpus="<text>")
    gains = {"protocol": "control", "gain": 0.3, "gain_low": 0.2, "gain_high": 0.4}
    rows += rows_of("alibi", [2.3] * 5, control="shuffled", **gains)
    config = Config()
    config.train.steps = 321
    for name in ("rope-seed0", "rope-seed1"):
        run_directory.save_config(config, out / name)
        run_directory.save_failure(out / name, "as good as a checkpoint")
        config.train.seed = 1
    provenance.record(out)
    report.write(rows, out)
    page = Tags()
    page.feed((out / "report.html").read_text())
    return out, page, rows


def test_everything_is_written(written):
    out, _, rows = written
    assert {path.name for path in out.iterdir()} == {
        *("extrapolation.json", "extrapolation.csv", "extrapolation.png"),
        *("summary.csv", "differences.csv", "tables.md", "figures", "report.html"),
        *("commands.jsonl", "rope-seed0", "rope-seed1"),
    }
    figures = {path.name for path in (out / "figures").iterdir()}
    assert figures == {"anchored-delta.png", "control.png"}
    assert len(read_json(out / "extrapolation.json")) == len(rows)
    assert (out / "summary.csv").read_text().count("\n") == 1 + 15
    assert "alibi" in (out / "differences.csv").read_text()


def test_the_page_is_whole_and_needs_nothing_else(written):
    _, page, _ = written
    assert page.open == []
    names = [name for name, _ in page.tags]
    assert names.count("img") == 3 and "script" not in names and "link" not in names
    for name, attributes in page.tags:
        for value in attributes.values():
            assert "://" not in (value or ""), (name, value)
        if name == "img":
            assert attributes["src"].startswith("data:image/png;base64,iVBOR")


def test_the_page_says_what_was_found_and_how(written):
    _, page, _ = written
    text = re.sub(r"\s+", " ", page.text)
    for words in (
        "RoPE has risen at twice its length",
        "rope +0.500 [",
        "agrees",
        "What the intervals cover",
        "control, validation",
        "bits per byte lost by that context",
        '"steps": 321',
        "rope-seed1: train.seed: 0 != 1",
        "Python 3.",
        "cores",
        "<text>",
    ):
        assert words in text, words


def test_joined_rows_keep_configs_and_commands(written, tmp_path):
    out, _, rows = written
    target = tmp_path / "all"
    report.write(rows, target, [out, tmp_path])
    kept = json.loads((target / "configs.json").read_text())
    name = f"{out.name}/rope-seed1"
    assert list(kept) == [f"{out.name}/rope-seed0", name]
    assert kept[name]["train"]["steps"] == 321
    commands = provenance.read(target)
    assert commands[0] == provenance.read(out)[0] and len(commands) == 2
    report.write(rows, target)  # again, from what is there alone
    assert provenance.read(target) == commands
    assert f"{name}: train.seed: 0 != 1" in (target / "report.html").read_text()


def test_rows_alone_make_a_report(rows_of, tmp_path):
    report.write(rows_of("learned", [None] * 5), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "Not beside these rows" in text and "Not recorded" in text
    assert not (tmp_path / "extrapolation.png").exists()


def test_a_command_is_recorded_with_machine_and_versions(tmp_path):
    provenance.record(tmp_path)
    provenance.record(tmp_path)
    with (tmp_path / "commands.jsonl").open("a") as file:
        file.write('{"date": "2026-')
    first, second = provenance.read(tmp_path)
    assert first["command"] == second["command"] and first["cores"] >= 1
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", first["versions"]["jax"])
    assert json.dumps(first)
