"""The nats of each scored byte of a plan, under any model.

Every batch of a plan has one shape, so a window length costs one compilation; on
the device nothing but the nats of the last targets is computed (or what else is to
be known of each), some tokens at a time, and the host takes from them what the plan
scores.
"""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rope_jax.experiment.loss import token_nats
from rope_jax.experiment.mesh import batch_sharding, batch_shards, replicated
from rope_jax.experiment.plans import Windows
from rope_jax.experiment.token_chunks import Head, by_chunks


class Outputs(NamedTuple):
    """The logits of some tokens that are not made yet: `head(hidden)`.

    Attributes:
      hidden: `[B, T, D]`.
      head: gives the logits `[B, t, V]` of any `[B, t, D]`.
    """

    hidden: jax.Array
    head: Head


# (params, inputs [B, W], *, last) -> logits [B, last, V], or `Outputs`; `key_mask`
# [B, W] beside `last` for windows that hide tokens.
Apply = Callable[..., jax.Array | Outputs]
Statistic = Callable[[jax.Array, jax.Array], jax.Array]  # (logits, targets)


@dataclass(frozen=True)
class ModelApply:
    """A model as a function of its parameters; equal for runs of equal structure.

    Equality is what lets several seeds of one encoding share a compilation.
    """

    graphdef: nnx.GraphDef

    def __call__(
        self,
        params,
        inputs: jax.Array,
        *,
        last: int,
        key_mask: jax.Array | None = None,
    ) -> Outputs:
        """What gives the logits after the last tokens of inputs `[B, W]`.

        Positions count along the row whatever `key_mask` `[B, W]` hides. An encoding
        that makes its own counts them over what is seen instead.
        """
        model = nnx.merge(self.graphdef, params)
        if key_mask is None:
            return Outputs(model.hidden(inputs)[:, -last:], model.logits)
        own = model.encoding is not None and model.encoding.own_positions
        positions = None if own else jnp.arange(inputs.shape[1])
        hidden = model.hidden(inputs, positions=positions, key_mask=key_mask)
        return Outputs(hidden[:, -last:], model.logits)


def score(
    apply: Apply,
    params,
    windows: Windows,
    data: np.ndarray,
    *,
    batch_tokens: int = 16384,
    mesh: Mesh | None = None,
    statistic: Statistic = token_nats,
) -> np.ndarray:
    """The nats of each scored byte of a plan, in the order of `windows.targets()`.

    Windows are fed in batches of equal size; the last one is filled up with rows that
    are not scored, so one compilation serves a window length.

    Args:
      apply: `(params, inputs [B, W], *, last) -> logits [B, last, V]`, or the `Outputs`
        of which they are made; hashable. It is compiled once for each length. It is
        given `key_mask`, bool `[B, W]`, where the windows hide tokens.
      params: what `apply` takes.
      windows: what to feed and what to score.
      data: uint8 `[N]`, the split.
      batch_tokens: tokens in one call; at least one window is fed.
      mesh: splits a batch over its data and fsdp axes; None uses one device.
      statistic: what is to be known of each target, from logits `[B, last, V]` and
        targets `[B, last]`; `[B, last]` or `[B, last, K]`.

    Returns:
      `[n]` or `[n, K]`, by default the nats in float32.
    """
    shards = 1 if mesh is None else batch_shards(mesh)
    rows = _batch_rows(windows, batch_tokens, shards)
    put = functools.partial(_put, mesh=mesh)
    pending, scored = deque(), []

    def collect():
        mask, values = pending.popleft()
        scored.append(np.asarray(values)[: len(mask)][mask])

    for begin in range(0, len(windows.starts), rows):
        part = slice(begin, begin + rows)
        inputs, targets = _batch(windows, data, part, rows)
        inputs, targets = put(inputs), put(targets)
        options = {"mesh": mesh, "statistic": statistic}
        values = window_values(
            apply, params, inputs, targets, windows.hidden, **options
        )
        pending.append((windows.scored(part), values))
        if len(pending) > 1:  # read a batch while the device works on the next
            collect()
    while pending:
        collect()
    return np.concatenate(scored)


@functools.partial(jax.jit, static_argnames=("apply", "mesh", "statistic"))
def window_values(apply, params, inputs, targets, hidden, *, mesh, statistic):
    """The program that `score` runs for each batch of windows.

    Args:
      apply: as for `score`.
      params: as for `score`.
      inputs: uint8 `[B, W]`.
      targets: uint8 `[B, last]`.
      hidden: as of `Windows`.
      mesh: as for `score`.
      statistic: as for `score`.

    Returns:
      `[B, last]` or `[B, last, K]`, on every device of the mesh.
    """
    inputs, targets = inputs.astype(jnp.int32), targets.astype(jnp.int32)
    options = {}
    if hidden is not None:
        seen = jnp.arange(inputs.shape[1])[None] >= hidden
        options["key_mask"] = jnp.broadcast_to(seen, inputs.shape)
    outputs = apply(params, inputs, last=targets.shape[1], **options)
    if not isinstance(outputs, Outputs):
        outputs = Outputs(outputs, lambda logits: logits)
    values = by_chunks(statistic, outputs.head, outputs.hidden, targets)
    if mesh is None:
        return values
    # Every process reads all of the values.
    return jax.lax.with_sharding_constraint(values, replicated(mesh))


def _batch(windows, data, part, rows):
    """Inputs `[rows, W]` and targets `[rows, last]`, uint8; unfilled rows are 0.

    The one place where what is fed may differ from the data.
    """
    starts, stop = windows.starts[part, None], windows.stop[part, None]
    offset = np.arange(windows.length + 1)
    tokens = np.zeros((rows, windows.length + 1), np.uint8)
    # A window may reach past the data: what follows its last target is 0.
    real = np.take(data, starts + offset, mode="clip")
    real = np.where(offset <= stop, real, 0)
    if windows.edit is not None:
        real = windows.edit(real, data, part)
    tokens[: len(starts)] = real
    return tokens[:, :-1], tokens[:, -windows.last :]


def _batch_rows(windows: Windows, batch_tokens: int, shards: int) -> int:
    """Rows per batch: as many as are allowed, evenly over the batches and shards."""
    count = len(windows.starts)
    most = max(1, batch_tokens // windows.length // shards) * shards
    batches = -(-count // most)
    return -(-count // (batches * shards)) * shards


def _put(rows: np.ndarray, mesh: Mesh | None):
    if mesh is None:
        return jax.device_put(rows)  # jnp.asarray would compile a copy for each shape
    # Only rows are split: a length need not divide by the sequence axis.
    spec = PartitionSpec(batch_sharding(mesh).spec[0])
    return jax.make_array_from_callback(
        rows.shape, NamedSharding(mesh, spec), lambda index: rows[index]
    )
