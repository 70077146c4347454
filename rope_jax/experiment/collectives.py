"""The communication of a compiled step, read from the compiler's own text.

Nothing is assumed about what the partitioner did: each collective that it put into
the program is listed with the mesh axes that it runs over and the bytes that it
moves. Devices are numbered as they lie in the mesh, in row-major order, which is how
JAX numbers the partitions of a program.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rope_jax.experiment.hlo_text import (
    Execution,
    array_bytes,
    array_shapes,
    elements,
    executions,
)

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\breplica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_TILE = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"\breplica_groups=@?mesh\w*\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"""['"]?(\w+)['"]?(?::\((\d+)\)(\d+))?""")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of `KINDS`. An all-reduce whose result is sliced in the same fused
        operation, as TPUs run it, is a reduce-scatter.
      axes: the mesh axes along which the devices of a group differ, in the mesh's
        order; empty where no data leaves a device.
      group_size: devices that exchange data with each other; 2 for a permutation.
      payload: bytes of the whole array on one device, for one execution: of an
        all-gather the result, of all others the operand.
      times: executions in one run of the program.
      exact: False where a loop around it has an unknown trip count; it is then
        counted as if that loop ran once.
      shapes: the arrays that `payload` counts, as in `"bf16[8,128,352]"`; of a
        reduce-scatter, the pieces that it leaves.
      op_name: the traced operation that it comes from, "" if it is not recorded.
      name: of the instruction.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    payload: int
    times: int
    exact: bool
    shapes: tuple[str, ...]
    op_name: str
    name: str

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run of the program, on a ring.

        A gather, a scatter and an exchange of n bytes among g devices send
        n (g - 1) / g; an all-reduce is a scatter and a gather; a permutation sends n.
        """
        if not self.axes:
            return 0.0
        part = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * part, "collective-permute": 1.0}
        return self.times * self.payload * factor.get(self.kind, part)


def parse_collectives(
    text: str, mesh_shape: Mapping[str, int]
) -> tuple[Collective, ...]:
    """The collectives of a compiled program.

    Args:
      text: from `jax.stages.Compiled.as_text()`.
      mesh_shape: axis names and sizes in order, as `Mesh.shape` gives them.

    Raises:
      ValueError: groups of devices in a notation that is not known, or of other
        devices than the mesh has.

    Example:
      >>> text = '''
      ... ENTRY %main (x: f32[4]) -> f32[4] {
      ...   %x = f32[4]{0} parameter(0)
      ...   ROOT %sum = f32[4]{0} all-reduce(%x), replica_groups={{0,2},{1,3}}
      ... }'''
      >>> (found,) = parse_collectives(text, {"data": 2, "fsdp": 2})
      >>> found.kind, found.axes, found.payload, found.sent
      ('all-reduce', ('data',), 16, 16.0)
    """
    found, chains = [], set()
    for execution in executions(text):
        instruction = execution.instruction
        if instruction.opcode.removesuffix("-start") not in KINDS:
            continue
        # A TPU's compiler spreads one collective over a chain of fused operations,
        # each of which names it again.
        if chain := _CHAIN.search(instruction.line):
            key = (chain[1], _CHANNEL.search(instruction.line)[1])
            if key in chains:
                continue
            chains.add(key)
        found.append(_collective(execution, mesh_shape))
    return tuple(found)


def _collective(execution: Execution, mesh_shape) -> Collective:
    instruction = execution.instruction
    kind = instruction.opcode.removesuffix("-start")
    result = instruction.type
    if instruction.opcode != kind and kind != "all-reduce":
        result = elements(result)[1]  # beside the operand, and what the wait needs
    groups = _groups(instruction.line, mesh_shape)
    size = groups.shape[1]
    payload = array_bytes(result)
    if kind == "reduce-scatter":
        payload *= size
    if kind == "all-reduce" and execution.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    op_name = _OP_NAME.search(instruction.line)
    return Collective(
        kind=kind,
        axes=_axes(groups, mesh_shape),
        group_size=size,
        payload=payload,
        times=execution.times,
        exact=execution.exact,
        shapes=array_shapes(result),
        op_name=op_name[1] if op_name else "",
        name=instruction.name,
    )


def _axes(groups: np.ndarray, mesh_shape) -> tuple[str, ...]:
    """The axes along which the members of any group differ."""
    sizes = tuple(mesh_shape.values())
    if groups.size and groups.max() >= math.prod(sizes):
        raise ValueError(
            f"a program for device {groups.max()} does not fit a mesh of "
            f"{math.prod(sizes)} devices: {dict(mesh_shape)}"
        )
    coordinates = np.unravel_index(groups, sizes)
    return tuple(
        axis
        for axis, place in zip(mesh_shape, coordinates, strict=True)
        if np.any(place != place[:, :1])
    )


def _groups(line: str, mesh_shape) -> np.ndarray:
    """Device numbers `[groups, devices of a group]`; of a permutation, its pairs."""
    devices = math.prod(mesh_shape.values())
    if listed := _PAIRS.search(line) or _LISTED.search(line):
        if not listed[1]:  # no groups stand for one of all devices
            return np.arange(devices)[None]
        rows = listed[1].strip("{}").split("},{")
        return np.array([_integers(row) for row in rows])
    if iota := _IOTA.search(line):
        return _iota(iota[1])
    if named := _NAMED.search(line):
        return _named_groups(*named.groups(), devices=devices)
    raise ValueError(f"the groups of a collective are not understood: {line.strip()}")


def _named_groups(sizes: str, order: str | None, axes: str, *, devices: int):
    """Groups over axes of a mesh that the compiler made for this purpose."""
    names, dims = zip(*(item.split("=") for item in sizes.split(",")), strict=True)
    names, dims = [name.strip(" '\"") for name in names], list(map(int, dims))
    if order is None:
        numbers = np.arange(devices)
    else:
        numbers = _iota(order) if "[" in order else np.array(_integers(order))
    grouped = []
    for name, before, size in _AXIS.findall(axes):
        place = names.index(name)
        if before:  # a part of an axis: cut it into before, the part and after
            whole, before, size = dims[place], int(before), int(size)
            dims[place : place + 1] = [before, size, whole // (before * size)]
            names[place : place + 1] = [f"{name}<", f"{name}:", name]
            grouped.append(f"{name}:")
        else:
            grouped.append(name)
    places = [names.index(name) for name in grouped]
    numbers = np.moveaxis(numbers.reshape(dims), places, range(-len(places), 0))
    return numbers.reshape(-1, math.prod(numbers.shape[-len(places) :]))


def _iota(text: str) -> np.ndarray:
    """The array that `[4,2]<=[2,2,2]T(1,0,2)` stands for; `[4,2]T(1,0)` is flat."""
    shape, reshaped, permutation = _TILE.match(text).groups()
    numbers = np.arange(math.prod(_integers(shape)))
    numbers = numbers.reshape(_integers(reshaped or shape))
    if permutation:
        numbers = numbers.transpose(_integers(permutation))
    return numbers.reshape(_integers(shape)) if reshaped else numbers.ravel()


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]
