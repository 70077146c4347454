"""What a call is compiled for, as far as the mesh in use tells while tracing."""

import jax
from jax.sharding import AxisType


def target_platform() -> str:
    """The platform of the mesh in use, else of the default backend: cpu, gpu, tpu.

    A mesh of a described topology (`jax.experimental.topologies`) under
    `jax.set_mesh` is what tells a host without the device what it compiles for.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def is_partitioned() -> bool | None:
    """Whether the compiler may split arrays over devices by itself.

    It does not inside a `shard_map` over all axes, nor for one device. None where
    there are several devices and no mesh tells what they are used for.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None if jax.device_count() > 1 else False
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in kinds)
