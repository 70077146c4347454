"""The cores of a CPU as devices, unless somebody has said otherwise."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest

from rope_jax.experiment import host
from rope_jax.experiment.config import MeshConfig

_SCRIPT = """
import jax
from rope_jax.experiment import host
host.prepare({rows})
print(jax.device_count())
"""


def _count(rows: int | None, **variables: str) -> int:
    names = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(rows=rows)],
        env=kept | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(result.stdout)


def test_every_core_is_a_device_where_the_rows_allow_it():
    cores = len(os.sched_getaffinity(0))
    assert _count(None) == cores
    assert _count(5 * cores) == cores


@pytest.mark.parametrize(
    "variables",
    [
        {"JAX_NUM_CPU_DEVICES": "3"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
    ],
    ids=["jax", "xla"],
)
def test_what_the_user_says_stays(variables):
    assert _count(16, **variables) == 3


def test_devices_divide_the_rows():
    assert [host.devices(cores, 16) for cores in (1, 2, 3, 6, 64)] == [1, 2, 2, 4, 16]
    assert host.devices(4, 7) == 1
    assert host.devices(3, None) == 3
    assert host.devices(6, 16, MeshConfig()) == 4


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(data=1, sequence=2),
        MeshConfig(data=2),
        MeshConfig(fsdp=2),
        MeshConfig(tensor=2),
        MeshConfig(sequence=2),
    ],
)
def test_a_mesh_that_was_asked_for_gets_every_core(mesh):
    assert host.devices(2, 1, mesh) == 2


def test_an_accelerators_plugin_leaves_the_host_alone(monkeypatch):
    said = jax.config.jax_platforms
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: {"jax_plugins": ["x"]}[group]
    )
    try:
        jax.config.update("jax_platforms", "")
        assert not host._runs_on_cpu()
        jax.config.update("jax_platforms", "cpu,cuda")
        assert host._runs_on_cpu()
    finally:
        jax.config.update("jax_platforms", said)
