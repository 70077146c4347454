"""Where results come from: the command, the machine and the versions, line by line.

Each evaluation adds a line of JSON to commands.jsonl beside its rows.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys

import jax

from rope_jax.experiment import atomic

_PACKAGES = ("rope_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_FILE = "commands.jsonl"


def describe() -> dict:
    """The command that is running, the machine and the versions."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_program(), *sys.argv[1:]]),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "devices": [d.device_kind for d in jax.devices()],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _program() -> list[str]:
    """The script that runs, or the module after -m."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        return ["-m", spec.name]
    return sys.argv[:1]


def record(workdir: pathlib.Path) -> None:
    """Add a line about what is running."""
    with (workdir / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(describe()) + "\n")


def write(lines: list[dict], workdir: pathlib.Path) -> None:
    """Keep lines that `read` gave elsewhere."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    atomic.write_text(workdir / _FILE, text)


def read(workdir: pathlib.Path) -> list[dict]:
    """What `record` wrote there, oldest first, without lines that were cut short."""
    path = workdir / _FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return models[0] if models else platform.processor() or platform.machine()
