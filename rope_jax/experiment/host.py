"""Make the most of the CPU that a command runs on, before jax is first used.

Both measures were found by timing the training step; docs/speed.md has the figures.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform

import jax

from rope_jax.experiment.config import MeshConfig

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def prepare(rows: int | None = None, mesh: MeshConfig | None = None) -> None:
    """Split the batch over the cores, and keep the memory of one step for the next.

    Does nothing where an accelerator's plugin is installed, unless JAX_PLATFORMS=cpu,
    nor in a job of several processes, which may share a machine.

    One device per core. XLA runs an operation on one device by splitting it over
    threads, which wait for each other after each; two devices with half of the batch
    each meet once, to add up the gradients. Where the user has said how many devices
    there are (JAX_NUM_CPU_DEVICES, XLA_FLAGS), that stays.

    Memory. XLA takes its scratch memory from malloc for each execution. Half a gigabyte
    that went back to the system has to be mapped and zeroed page by page the next time;
    kept in the process, and in one heap for all threads, it does not.

    Args:
      rows: sequences that a batch has, which the devices must divide; None if
        batches are padded.
      mesh: what is to be made of the devices; None for what splits batches only.
    """
    if jax.distributed.is_initialized() or not _runs_on_cpu():
        return
    _keep_memory()
    said = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not said and jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", devices(_cores(), rows, mesh))


def devices(cores: int, rows: int | None, mesh: MeshConfig | None = None) -> int:
    """The most devices, one per core, that divide the rows of a batch.

    All cores, if the mesh has sizes of its own: `mesh.check_mesh` says what is wrong.

    Example:
      >>> devices(6, 16), devices(2, 16), devices(6, None), devices(4, 7)
      (4, 2, 6, 1)
    """
    sizes = (-1, 1, 1, 1)  # of a mesh that only splits the rows, over all devices
    if mesh is not None:
        sizes = (mesh.data, mesh.fsdp, mesh.tensor, mesh.sequence)
    if rows is None or sizes != (-1, 1, 1, 1):
        return cores
    return max(n for n in range(1, cores + 1) if rows % n == 0)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _runs_on_cpu() -> bool:
    if jax.config.jax_platforms:
        return jax.config.jax_platforms.split(",")[0] == "cpu"
    if importlib.util.find_spec("libtpu"):
        return False
    return not importlib.metadata.entry_points(group="jax_plugins")


def _keep_memory() -> None:
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TOP_PAD, 2**28)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
