"""What the makers state about accelerators, and the names of their arrangements.

Every estimate of `plan` rests on this table and on nothing else about the hardware.
"""

import math
import re
from dataclasses import dataclass
from types import MappingProxyType

_GB, _GIB, _TERA = 1e9, 2**30, 1e12


@dataclass(frozen=True)
class Chip:
    """One accelerator, as JAX counts devices.

    Attributes:
      name: as the maker writes it.
      platform: of JAX: "tpu", "gpu" or "cpu".
      flops: peak bfloat16 operations per second, dense.
      memory: bytes.
      memory_bandwidth: bytes per second.
      ring_bandwidth: bytes per second that a chip sends on a ring along one mesh axis:
        on a torus the two links of one dimension, one way; else all its links.
      joined: chips that these links join; a larger group has slower ones between.
      shapes: arrangements that can be compiled for; empty for any number.
      source: where the numbers are from.
    """

    name: str
    platform: str
    flops: float
    memory: float
    memory_bandwidth: float
    ring_bandwidth: float
    joined: int
    shapes: tuple[str, ...]
    source: str

    @property
    def ridge(self) -> float:
        """Operations per byte of memory traffic above which arithmetic is the limit."""
        return self.flops / self.memory_bandwidth


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_CUBIC += ("8x8x16", "8x16x16", "16x16x16", "16x16x24")
_CLOUD = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

# The TPU pages state the interconnect of all links of a chip in both directions (v5e
# 400 GB/s on 4, v5p 1200 GB/s on 6) or in one (v6e 3200 Gbit/s on 4); the GPU pages
# that of all links in both (600 and 900 GB/s), and the peak with sparsity, twice this.
CHIPS = MappingProxyType(
    {
        "v5e": Chip(
            "TPU v5e", "tpu", 197 * _TERA, 16 * _GIB, 819 * _GB, 2 * 50 * _GB,
            256, _FLAT, _CLOUD + "v5e",
        ),
        "v5p": Chip(
            "TPU v5p", "tpu", 459 * _TERA, 95 * _GIB, 2765 * _GB, 2 * 100 * _GB,
            6144, _CUBIC, _CLOUD + "v5p",
        ),
        "v6e": Chip(
            "TPU v6e", "tpu", 918 * _TERA, 32 * _GIB, 1600 * _GB, 2 * 100 * _GB,
            256, _FLAT, _CLOUD + "v6e",
        ),
        "a100": Chip(
            "NVIDIA A100 80GB SXM", "gpu", 312 * _TERA, 80 * _GB, 2039 * _GB,
            300 * _GB, 8, (), _NVIDIA + "a100/",
        ),
        "h100": Chip(
            "NVIDIA H100 SXM", "gpu", 989 * _TERA, 80 * _GB, 3350 * _GB,
            450 * _GB, 8, (), _NVIDIA + "h100/",
        ),
        "h200": Chip(
            "NVIDIA H200 SXM", "gpu", 989 * _TERA, 141 * _GB, 4800 * _GB,
            450 * _GB, 8, (), _NVIDIA + "h200/",
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """Chips of one kind; `chip` is None for virtual devices on a CPU.

    Attributes:
      name: as given, such as "v5e:16x16".
      platform: "tpu", "gpu" or "cpu".
      chip: what is known of one.
      devices: how many.
    """

    name: str
    platform: str
    chip: Chip | None
    devices: int


def parse_topology(name: str) -> Topology:
    """The chips that a name stands for.

    Args:
      name: "v5e:16x16" and the like for TPUs, "cuda:h100:8" for GPUs, "cpu:8" for
        virtual devices, whose collectives can be read though they have no roofline.

    Raises:
      ValueError: another name; the message lists the valid ones.

    Example:
      >>> parse_topology("v5p:4x4x4").devices, parse_topology("cuda:h100:8").devices
      (64, 8)
    """
    kind, _, shape = name.partition(":")
    chip = CHIPS.get(kind)
    if chip and shape in chip.shapes:
        return Topology(name, "tpu", chip, math.prod(map(int, shape.split("x"))))
    if found := re.fullmatch(r"cuda:(\w+):([1-9]\d*)", name):
        chip = CHIPS.get(found[1])
        if chip and chip.platform == "gpu":
            return Topology(name, "gpu", chip, int(found[2]))
    if found := re.fullmatch(r"cpu:([1-9]\d*)", name):
        return Topology(name, "cpu", None, int(found[1]))
    raise ValueError(f"--topology must be one of {_valid_names()}; got {name!r}")


def _valid_names() -> str:
    names = []
    for kind, chip in CHIPS.items():
        if chip.platform == "tpu":
            names.append(f"{kind}:SHAPE with SHAPE of {', '.join(chip.shapes)}")
        else:
            names.append(f"cuda:{kind}:N")
    return "; ".join([*names, "cpu:N"])
