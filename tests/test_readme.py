"""The README's Python runs as written, and its commands are those that CI runs."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp

from rope_jax.experiment.rows import read_json
from rope_jax.experiment.summary import format_summary

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run(tmp_path, monkeypatch):
    configs = json.loads((ROOT / "tests" / "golden" / "configs.json").read_text())
    folder = tmp_path / "Llama-3.2-1B"
    folder.mkdir()
    (name,) = [n for n in configs if re.search("llama.*3.2.*1b", n, re.IGNORECASE)]
    (folder / "config.json").write_text(json.dumps(configs[name]))
    monkeypatch.chdir(tmp_path)
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    with jax.numpy_rank_promotion("raise"):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), scope)
    assert scope["spec"].layout == "half"
    assert scope["out"].shape == (2, 16, 8, 64)
    assert jnp.isfinite(scope["out"]).all()
    assert scope["logits"].shape == (2, 1, 256)
    assert scope["cache"].lengths.tolist() == [5, 3]


def test_ci_runs_the_readme_test_command():
    commands = re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)
    (command,) = [c for c in commands if "pytest" in c]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_table_is_the_one_that_its_command_prints():
    rows = read_json(ROOT / "results" / "lab" / "extrapolation.json")
    largest, *_ = format_summary(rows).split("\n\n")
    assert f"```\n{largest}\n```" in README


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(targets) > 5
    assert [name for name in targets if not (ROOT / name).exists()] == []
