"""Where a decoder's activations lie on a mesh, if one is entered.

The mesh is the one that `jax.set_mesh` entered, with axes named as in `AXES`; without
one, or with other names, nothing here does anything. Its axes are of type Auto: the
code says what is computed over whole arrays, the constraints of this file say where a
few of them lie, and the partitioner does the rest. Types that carry shardings (Explicit
axes) would have each operation of each encoding say the same again, where global
positions, running sums over a row and slopes by head come out right by themselves here.

Attention alone is given out by hand, since one that walks over blocks of queries has
to walk over those of its own device, and a kernel cannot be cut by a partitioner:
`by_head` where a head needs its queries, keys and values alone, or ALiBi's slope with
them, else `over_sequence`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from rope_jax.functional.alibi import AlibiBias

AXES = ("data", "fsdp", "tensor", "sequence")
ROWS = ("data", "fsdp")  # the axes that split a batch

_HEADS = ("tensor", "sequence")  # the axes that split heads of whole rows
_ANY = PartitionSpec.UNCONSTRAINED


def stream(x: jax.Array) -> jax.Array:
    """`[B, T, D]` between layers: rows over data and fsdp, tokens over sequence."""
    return _place(x, ROWS, "sequence", None)


def heads(x: jax.Array) -> jax.Array:
    """`[B, T, N, H]`: heads over tensor, whole rows and tokens as they come."""
    return _place(x, _ANY, _ANY, "tensor", None)


def tokens(x: jax.Array) -> jax.Array:
    """`[B, T, N, H]` of whole rows: tokens over sequence, heads over tensor."""
    return _place(x, ROWS, "sequence", "tensor", None)


def rows_of_heads(x: jax.Array) -> jax.Array:
    """`[B, T, N, H]` for what walks along a row: its heads are split, not its tokens.

    The sequence axis splits heads too, as in Jacobs et al., "DeepSpeed Ulysses" (2023,
    arXiv 2309.14509): an exchange between its devices instead of copies of rows.
    """
    if size("sequence") == 1:
        return x
    return _place(x, ROWS, None, _HEADS, None)


def hidden(x: jax.Array) -> jax.Array:
    """`[..., F]` within a feed-forward layer: channels over tensor."""
    return _place(x, *[_ANY] * (x.ndim - 1), "tensor")


def by_token(x: jax.Array) -> jax.Array:
    """`[B, T, N]`, a few numbers for each token: of whole rows, heads over tensor."""
    return _place(x, ROWS, None, "tensor")


def vocabulary(head: jax.Array) -> jax.Array:
    """The output projection `[D, V]`: what it gives is split over tensor."""
    return _place(head, None, "tensor")


def whole(weights: jax.Array) -> jax.Array:
    """Weights that every device needs whole: their slices come together."""
    return _place(weights, *[None] * weights.ndim)


def size(*axes: str) -> int:
    """How many parts the axes make on the mesh that is entered; 1 without one."""
    mesh = _mesh()
    return math.prod(mesh.shape[axis] for axis in axes) if mesh else 1


def check_divides(shape: tuple[int, ...], spec, mesh, what: str) -> None:
    """Raise ValueError, naming the sizes, where mesh axes do not divide an array.

    Args:
      shape: of the array.
      spec: for each of its axes a name, several, or None.
      mesh: with the sizes of the axes.
      what: names the array.
    """
    for length, axes in zip(shape, spec, strict=True):
        axes = (axes,) if isinstance(axes, str) else axes
        if axes is None or axes is _ANY:
            continue
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if length % parts:
            shown = "*".join(f"mesh.{axis}" for axis in axes)
            raise ValueError(
                f"{shown}={parts} does not divide the size {length} of {what} {shape}"
            )


def splits_heads(count: int) -> bool:
    """Whether `by_head` can split so many key heads over the mesh that is entered."""
    return count % size(*_HEADS) == 0


def by_head(
    function: Callable[[Any, Any, AlibiBias | None], jax.Array],
    heads: Any,
    rest: Any,
    bias: AlibiBias | None,
) -> jax.Array:
    """`function(heads, rest, bias)` where each device has whole rows of some heads.

    Tensor and sequence both split the heads: before and after, the devices of sequence
    exchange tokens for heads. So each has the same share of the work of a causal row,
    and every axis is manual inside, as a kernel needs that no partitioner can cut.

    Args:
      function: gives an array `[B, T, N, H]`; nothing in it but the bias may depend on
        which head it is.
      heads: a tree of arrays `[B, T, N, H]`, which `splits_heads`.
      rest: a tree of arrays `[B, T]`.
      bias: with one slope for each head of the queries, and positions `[T]` or
        `[B, T]`; or None.

    Returns:
      `[B, T, N, H]`.
    """
    if _mesh() is None:
        return function(heads, rest, bias)
    by_heads = PartitionSpec(ROWS, None, _HEADS, None)
    call = jax.shard_map(
        function,
        in_specs=(by_heads, PartitionSpec(ROWS, None), _bias_spec(bias)),
        out_specs=by_heads,
        check_vma=False,  # no Pallas kernel says over which axes its result varies
    )
    # Said on both sides, so that the exchange is here and not before a rotation, of
    # whose every operand there would be one.
    return tokens(call(jax.tree.map(tokens, heads), rest, bias))


def _bias_spec(bias):
    """Slopes lie with their heads, positions with their rows."""
    if bias is None:
        return None

    def by_row(positions):
        return PartitionSpec(*[ROWS] * (positions.ndim - 1), None)

    return dataclasses.replace(jax.tree.map(by_row, bias), slopes=PartitionSpec(_HEADS))


def over_sequence(
    function: Callable[[Any, Any, Any], jax.Array], queries: Any, keys: Any, rest: Any
) -> jax.Array:
    """`function(queries, keys, rest)`, on a mesh, with queries split over sequence.

    Each device calls the function with its part of the queries and with all the keys,
    which are gathered for it, and keeps its part of the result; in the backward pass
    the gradients of the keys are summed and scattered. Any score can be computed so:
    memory of a layer is the keys and values of a row, while its scores are split.

    Args:
      function: gives an array `[B, t, N, H]` for queries of t tokens.
      queries: a tree of arrays `[T]` or `[B, T, ...]`, to be split.
      keys: a tree of arrays `[B, S, K, H]`, to be gathered.
      rest: a tree of arrays that are handed on whole.

    Returns:
      `[B, T, N, H]`, split over sequence.
    """

    def split(array):
        time = min(1, array.ndim - 1)
        return PartitionSpec(*[None] * time, "sequence")

    # The other axes stay automatic inside.
    @functools.partial(
        jax.shard_map,
        in_specs=(jax.tree.map(split, queries), PartitionSpec("sequence"), _WHOLE),
        out_specs=PartitionSpec(None, "sequence"),
        axis_names={"sequence"},
        check_vma=False,  # JAX 0.10's searchsorted fails where it is checked
    )
    def local(queries, copies, rest):
        return function(queries, jax.tree.map(lambda x: x[0], copies), rest)

    return tokens(local(queries, jax.tree.map(_copies, keys), rest))


_WHOLE = PartitionSpec()


def _copies(array: jax.Array) -> jax.Array:
    """`[P, B, S, K, H]`: a copy of `[B, S, K, H]` for each of P devices of sequence.

    All axes are manual here: a partitioner that is left some of them would gather over
    these too. And as copies have gradients of their own, those are summed where they
    are scattered, not once on every device.
    """

    @functools.partial(
        jax.shard_map,
        in_specs=PartitionSpec(ROWS, "sequence", "tensor", None),
        out_specs=PartitionSpec("sequence", ROWS, None, "tensor", None),
    )
    def gather(part):
        return jax.lax.all_gather(part, "sequence", axis=1, tiled=True)[None]

    return gather(array)


def _mesh() -> AbstractMesh | None:
    """The mesh that is entered, if it has these axes and leaves them automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    return mesh if automatic.issuperset(AXES) and mesh.size > 1 else None


def _place(x, *spec):
    mesh = _mesh()
    if mesh is None:
        return x
    check_divides(x.shape, spec, mesh, "activations")
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
