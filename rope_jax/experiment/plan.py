r"""What a run would take on machines that are not here: memory, traffic, arithmetic.

    python -m rope_jax.experiment.plan --config=configs/scaling.py:100m \
        --topology=v5e:16x16 [--json=FILE] [--config.mesh.fsdp=16 ...]

The train step and the evaluation step of the run are compiled ahead of time for the
topology, with the shardings that training gives them, and what is printed is read from
the result: the memory of a chip, and each collective with the bytes that it moves.
TPUs (v5e, v5p, v6e) need the compiler of the extra `tpu`, and no TPU. GPUs
(`cuda:h100:8`) have no compiler without a GPU: the steps are lowered for them, and the
table is the analytical one. `cpu:8` compiles for virtual devices.

Step time and MFU are a roofline, not a forecast: the largest of arithmetic at the peak
rate, the least memory traffic at full bandwidth, and the bytes of the collectives on
rings along one dimension of the torus at full bandwidth, as if each hid behind the
others. A mesh axis that lies across several dimensions has more links than that.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable

import jax
from absl import flags
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from rope_jax.experiment import cli, plan_table, roofline
from rope_jax.experiment.abstract_step import abstract_state, eval_call, train_call
from rope_jax.experiment.chips import Topology, parse_topology
from rope_jax.experiment.collectives import Collective, parse_collectives
from rope_jax.experiment.config import Config, resolve
from rope_jax.experiment.data.tasks import TASKS
from rope_jax.experiment.mesh import AXES, check_mesh, make_mesh, mesh_shape
from rope_jax.experiment.workload import (
    memory_traffic,
    network_traffic,
    saved_activations,
    work,
)

_SCALING = pathlib.Path(__file__).parents[2] / "configs" / "scaling.py"
# What libtpu asks of its surroundings where there is no TPU, and that it may compile
# beside another process that has the library.
_NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def plan(config: Config, topology: Topology) -> dict:
    """What a run would take on a topology.

    Args:
      config: of the run; its mesh must use every chip.
      topology: from `parse_topology`.

    Returns:
      A tree of plain values with the keys encoding, topology, mesh, versions, state
      (bytes of a chip), work, train and eval (see `_step`), and estimate (see
      `roofline`; None for virtual devices).

    Raises:
      ValueError: the mesh does not fit the chips or the sizes of the run, or there
        is no compiler for the topology; or the config has several encodings.
    """
    config = _one_run(config)
    sizes = dict(zip(AXES, mesh_shape(config.mesh, topology.devices), strict=True))
    used = math.prod(sizes.values())
    if used != topology.devices:
        raise ValueError(
            f"--config.mesh of {used} chips must use the {topology.devices} of "
            f"--topology={topology.name}; one size may be -1 for what is left"
        )
    check_mesh(config, topology.devices)
    mesh = _mesh(config, topology, sizes)
    with _entered(mesh):
        state = abstract_state(config, mesh)
        train = _step(topology, sizes, *train_call(config, mesh))
        scored = _step(topology, sizes, *eval_call(config, mesh, _eval_length(config)))
    result = {
        "encoding": config.model.encoding,
        "topology": topology.name,
        "mesh": sizes,
        "versions": _versions(),
        "state": {
            "parameters": _bytes_on_a_chip(state.params),
            "optimizer": _bytes_on_a_chip(state.opt_state),
            "activations_estimated": saved_activations(config, sizes),
        },
        "work": _work(config, sizes),
        "train": train,
        "eval": {"length": _eval_length(config), **scored},
    }
    return result | {"estimate": roofline.estimate(topology, result)}


def _one_run(config: Config) -> Config:
    """The resolved config of the one run that a config describes."""
    config = resolve(config)
    if len(config.sweep.encodings) > 1:
        raise ValueError(
            "--config.sweep.encodings must be one for a plan, got "
            f"{','.join(config.sweep.encodings)}"
        )
    (config.model.encoding,) = config.sweep.encodings
    return config


def _work(config: Config, sizes: dict[str, int]) -> dict:
    made = work(config)
    return {
        "parameters": made.parameters,
        "tokens": config.train.batch_size * config.data.length,
        "rows": config.train.batch_size,
        "length": config.data.length,
        "accumulate": config.train.accumulate,
        "remat": config.model.remat,
        "dtype": config.model.dtype,
        "weight_flops": made.weight_flops,
        "attention_flops": made.attention_flops,
        "model_flops": made.model_flops,
        "executed_flops": made.executed_flops,
        "memory_traffic_per_chip": memory_traffic(config, sizes),
        "network_traffic_per_chip": network_traffic(config, sizes),
    }


def _step(topology: Topology, sizes, step: Callable, arguments: tuple) -> dict:
    """What compiling one step says.

    Returns:
      A tree with the keys fits (None where no compiler says), why_not, seconds (of
      the compiler), memory (bytes of a chip, by kind), compiler_flops, and collectives
      (a list of dictionaries, alike ones together).
    """
    began = time.monotonic(), time.process_time()
    made = {"fits": None, "why_not": "", "memory": None, "compiler_flops": None}
    made["collectives"] = []
    if topology.platform == "gpu":
        exported = jax.export.export(step, platforms=["cuda"])(*arguments)
        made["lowered_bytes"] = len(exported.mlir_module_serialized)
    else:
        try:
            compiled = step.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            made |= {"fits": False, "why_not": str(error).partition(": ")[2]}
        else:
            made |= _compiled(compiled, sizes)
    made["seconds"] = time.monotonic() - began[0]
    made["cpu_seconds"] = time.process_time() - began[1]
    return made


def _compiled(compiled: jax.stages.Compiled, sizes) -> dict:
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    kinds = {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    found = parse_collectives(compiled.as_text(), sizes)
    return {
        "fits": True,
        "memory": kinds | {"total": sum(kinds.values())},
        "compiler_flops": cost.get("flops"),
        "collectives": _grouped(found),
    }


def _grouped(found: Iterable[Collective]) -> list[dict]:
    """Collectives of one kind over the same axes as one row, the largest first."""
    rows = {}
    for one in found:
        if not one.axes:
            continue
        row = rows.setdefault((one.kind, one.axes), _EMPTY.copy())
        row["count"] += 1
        row["times"] += one.times
        row["payload"] += one.times * one.payload
        row["sent"] += one.sent
        row["exact"] &= one.exact
        if one.times * one.payload > row["largest_payload"]:
            row["largest_payload"] = one.times * one.payload
            row["largest"] = {"shapes": one.shapes, "op_name": one.op_name}
    merged = [{"kind": k, "axes": list(a)} | row for (k, a), row in rows.items()]
    return sorted(merged, key=lambda row: -row["sent"])


_EMPTY = {
    "count": 0,
    "times": 0,
    "payload": 0,
    "sent": 0.0,
    "exact": True,
    "largest_payload": -1,
    "largest": None,
}


def _mesh(config: Config, topology: Topology, sizes) -> Mesh | AbstractMesh:
    if topology.platform == "gpu":
        kind = AbstractDevice(topology.chip.name, None, "gpu")
        types = (AxisType.Auto,) * len(AXES)
        return AbstractMesh(tuple(sizes.values()), AXES, types, abstract_device=kind)
    if topology.platform == "tpu":
        return make_mesh(config.mesh, _tpu_devices(topology))
    devices = jax.devices("cpu")
    if len(devices) < topology.devices:
        raise ValueError(
            f"--topology={topology.name} needs as many virtual devices, and JAX was "
            f"started with {len(devices)}; set JAX_NUM_CPU_DEVICES={topology.devices}"
        )
    return make_mesh(config.mesh, devices[: topology.devices])


def _entered(mesh: Mesh | AbstractMesh):
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def _tpu_devices(topology: Topology) -> list:
    """The chips of a topology, which need not be present."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology={topology.name} needs the compiler for TPUs, the package "
            "libtpu: pip install '.[tpu]' where this repository is"
        )
    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    options = {}
    if topology.devices == 1:  # otherwise a host has four
        options["chips_per_host_bounds"] = [1, 1, 1]
    return topologies.get_topology_desc(topology.name, "tpu", **options).devices


def _eval_length(config: Config) -> int:
    """The longest window that the run is evaluated with; of a task, its row."""
    if config.data.source in TASKS:
        return config.data.length
    multiples = [factor * config.data.train_length for factor in config.eval.multiples]
    return max(config.eval.lengths or multiples or [config.data.length])


def _bytes_on_a_chip(tree) -> int:
    """Bytes of the part of each array that one chip holds."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "libtpu")
    present = [name for name in names if importlib.util.find_spec(name)]
    return {name: importlib.metadata.version(name) for name in present}


def _define_flags() -> None:
    cli.define_config(str(_SCALING))
    flags.DEFINE_string(
        "topology", "v5e:16x16", "v5e:16x16, v5p:4x4x4, v6e:8x8, cuda:h100:8 or cpu:8."
    )
    flags.DEFINE_string("json", "", "A file that gets everything as JSON.")


def main(argv: list[str]) -> None:
    """Print the plan that the flags ask for."""
    del argv
    topology = parse_topology(flags.FLAGS["topology"].value)
    # The host compiles; whatever accelerators it has are left alone.
    jax.config.update("jax_platforms", "cpu")
    if topology.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", topology.devices)
    made = plan(flags.FLAGS["config"].value, topology)
    if path := flags.FLAGS["json"].value:
        pathlib.Path(path).write_text(json.dumps(made, indent=1) + "\n")
    print(plan_table.render(made))


if __name__ == "__main__":
    _define_flags()
    cli.run(main)
