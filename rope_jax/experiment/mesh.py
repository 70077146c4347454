"""One device mesh for every run, and where each array lies on it.

Axes: `data` splits the batch; `fsdp` splits the batch and the weights; `tensor`
splits heads, feed-forward channels and the vocabulary; `sequence` splits the
tokens of a row. A size that an axis does not divide raises before any work.
"""

import math
from collections.abc import Iterable, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rope_jax.experiment.config import Config, MeshConfig
from rope_jax.nn.config import mlp_width
from rope_jax.nn.sharding import AXES, ROWS, check_divides

# Parameter path, by its last names -> the mesh axes of its last dimensions.
_RULES: dict[tuple[str, ...], tuple[str | None, ...]] = {
    ("blocks", "encoding", "params", "embedding"): (None, None),  # CoPE's, of no head
    ("encoding", "params", "embedding"): (None, "tensor"),  # T5's
    ("encoding", "params", "kernel"): ("fsdp", "tensor"),
    ("encoding", "params", "bias"): ("tensor",),
    ("encoding", "params", "kernel_out"): (None, "tensor"),
    ("encoding", "params", "bias_out"): ("tensor",),
    ("encoding", "params", "r1"): ("tensor",),
    ("encoding", "params", "r2"): ("tensor",),
    ("encoding", "phase"): ("tensor", None),
    ("embedding",): (None, "fsdp"),
    ("head",): ("fsdp", "tensor"),
    ("encoding", "table"): (None, "fsdp"),
    ("query", "kernel"): ("fsdp", "tensor", None),
    ("key", "kernel"): ("fsdp", "tensor", None),
    ("value", "kernel"): ("fsdp", "tensor", None),
    ("out", "kernel"): ("tensor", None, "fsdp"),
    ("gate", "kernel"): ("fsdp", "tensor"),
    ("up", "kernel"): ("fsdp", "tensor"),
    ("down", "kernel"): ("tensor", "fsdp"),
    ("scale",): (None,),
}


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """The four axis sizes, with the one -1 replaced by the devices left.

    Raises:
      ValueError: a size is 0 or below -1, two are -1, or the devices do not fit.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    shown = ", ".join(
        f"--config.mesh.{a}={s}" for a, s in zip(AXES, sizes, strict=True)
    )
    if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"mesh sizes must be positive, at most one -1; got {shown}")
    fixed = math.prod(size for size in sizes if size != -1)
    if fixed > num_devices or (-1 in sizes and num_devices % fixed):
        raise ValueError(f"{shown} does not fit the {num_devices} devices present")
    return tuple(num_devices // fixed if size == -1 else size for size in sizes)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run, over the first devices if it needs fewer than all.

    Args:
      config: sizes of the axes.
      devices: real ones or those of a topology; None means all that are present.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    # An axis need not be a whole dimension of a TPU's torus, nor several.
    grid = mesh_utils.create_device_mesh(
        shape, devices[: math.prod(shape)], allow_split_physical_axes=True
    )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a `[B, T]` batch: rows over data and fsdp, tokens over sequence."""
    return NamedSharding(mesh, PartitionSpec(ROWS, "sequence"))


def batch_shards(mesh: Mesh) -> int:
    """How many parts the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, tree):
    """Shardings for a tree of parameters, or of anything shaped as they are.

    Optimizer slots carry the parameter's path inside theirs, so one table serves
    both. Scalars are replicated.

    Args:
      mesh: the mesh of the run.
      tree: abstract or real arrays, with the parameters' names as keys.

    Raises:
      ValueError: no rule knows an array, or an axis does not divide it.
    """

    def place(path, leaf):
        if leaf.ndim == 0:
            return replicated(mesh)
        names = _names(path)
        return _sharding(mesh, names, leaf.shape, _spec(names, leaf.ndim))

    return jax.tree_util.tree_map_with_path(place, tree)


def over_data_too(mesh: Mesh, tree, shardings):
    """Shardings that split over data as well what they split over fsdp.

    For the moments of the optimizer, which only the update reads: with it each device
    updates its part of the parameters, and the parts are gathered (Rajbhandari et al.
    2020, "ZeRO", the first stage).

    Args:
      mesh: the mesh of the run.
      tree: abstract or real arrays.
      shardings: from `param_shardings`.

    Raises:
      ValueError: data and fsdp together do not divide an array.
    """

    def place(path, leaf, sharding):
        names = _names(path)
        spec = [("data", "fsdp") if axes == "fsdp" else axes for axes in sharding.spec]
        spec += [None] * (leaf.ndim - len(spec))
        return _sharding(mesh, names, leaf.shape, spec)

    return jax.tree_util.tree_map_with_path(place, tree, shardings)


def cache_shardings(mesh: Mesh, cache):
    """Shardings for a decoding cache: rows over data and fsdp, heads over tensor.

    Args:
      mesh: the mesh of the run.
      cache: an abstract or real `rope_jax.nn.cache.Cache`.

    Raises:
      ValueError: an axis does not divide an array.
    """

    def place(path, leaf):
        names = _names(path)
        spec = [ROWS] + [None] * (leaf.ndim - 1)
        if "extras" in names:  # [B, S, N]
            spec[-1] = "tensor"
        elif names[0] == "layers" and leaf.ndim > 1:  # [B, K, ...]
            spec[1] = "tensor"
        return _sharding(mesh, names, leaf.shape, spec)

    return jax.tree_util.tree_map_with_path(place, cache)


def _names(path) -> tuple[str, ...]:
    """The names of the keys and fields that lead to a leaf."""
    return tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path)


def _sharding(mesh, names, shape, spec):
    """The sharding of a spec, or ValueError where an axis does not divide a size."""
    check_divides(shape, spec, mesh, ".".join(names))
    return NamedSharding(mesh, PartitionSpec(*spec))


def _spec(names: tuple[str, ...], ndim: int) -> tuple[str | None, ...]:
    for suffix, axes in _RULES.items():
        if names[-len(suffix) :] == suffix:
            return (None,) * (ndim - len(axes)) + axes
    if "encoding" in names:  # a few numbers for all heads: on every device
        return (None,) * ndim
    raise ValueError(f"no sharding rule for the parameter {'.'.join(names)}")


def check_mesh(config: Config, num_devices: int | None = None) -> None:
    """Raise ValueError where the mesh does not divide what it has to split.

    Args:
      config: a resolved one.
      num_devices: None means all that are present.
    """
    num_devices = jax.device_count() if num_devices is None else num_devices
    data, fsdp, tensor, sequence = mesh_shape(config.mesh, num_devices)
    model, rows = config.model, config.train.batch_size // config.train.accumulate
    kv_heads = model.num_kv_heads or model.num_heads
    sizes = [
        ("mesh.data*mesh.fsdp", data * fsdp, rows, "sequences per micro-batch"),
        ("mesh.tensor", tensor, model.num_heads, "heads (model.num_heads)"),
        ("mesh.tensor", tensor, kv_heads, "key/value heads (model.num_kv_heads)"),
        ("mesh.tensor", tensor, model.vocab_size, "bytes (model.vocab_size)"),
        ("mesh.tensor", tensor, mlp_width(model), "channels (model.mlp_dim)"),
        ("mesh.fsdp", fsdp, model.model_dim, "channels (model.model_dim)"),
        ("mesh.sequence", sequence, config.data.length, "bytes of data.length"),
    ]
    if config.mesh.shard_optimizer:
        parts, what = data * fsdp, "channels (model.model_dim) of mesh.shard_optimizer"
        sizes.append(("mesh.data*mesh.fsdp", parts, model.model_dim, what))
    if model.attention == "linear" and sequence > 1:  # see `rows_of_heads`
        what = "key/value heads of linear attention (model.num_kv_heads)"
        sizes.append(("mesh.tensor*mesh.sequence", tensor * sequence, kv_heads, what))
    for axis, parts, size, what in sizes:
        if size % parts:
            raise ValueError(f"--config.{axis}={parts} must divide the {size} {what}")


def check_lengths(mesh: Mesh, lengths: Iterable[int]) -> None:
    """Raise ValueError where the mesh does not divide rows that are to be evaluated."""
    parts = mesh.shape["sequence"]
    odd = sorted({length for length in lengths if length % parts})
    if odd:
        raise ValueError(
            f"--config.mesh.sequence={parts} must divide the tokens of every row that "
            "is evaluated (--config.eval.lengths or multiples), got "
            f"{', '.join(map(str, odd))}"
        )
