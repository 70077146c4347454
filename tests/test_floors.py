"""Which room may import which: a file uses lower floors, or its own."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLOORS = ("functional", "nn", "experiment")
ALLOWED = {"functional": {"jax", "numpy"}, "nn": {"jax", "numpy", "flax"}}
FILES = sorted((ROOT / "rope_jax").rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports from the root"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(parts):
    return FLOORS.index(parts[1]) if len(parts) > 2 or parts[1] in FLOORS else 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_lower_floors(path):
    parts = path.relative_to(ROOT).parts
    here = floor(parts)
    for name in imports(path):
        top = name.split(".")
        if top[0] == "rope_jax":
            assert floor(top) <= here, f"{path} imports {name} from above"
        elif FLOORS[here] in ALLOWED and top[0] not in sys.stdlib_module_names:
            assert top[0] in ALLOWED[FLOORS[here]], f"{path} imports {name}"


def test_importing_the_package_loads_jax_and_numpy_only():
    code = (
        "import sys, jax, numpy; before = set(sys.modules); import rope_jax; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert out.stdout.strip() == "['jax', 'rope_jax']" or out.stdout.strip() == (
        "['rope_jax']"
    ), out.stdout + out.stderr
