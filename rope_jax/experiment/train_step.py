"""One update of the parameters: a pure function of the state and a batch.

Nothing here reads the clock, a file or a host value, so that the step can be
dispatched ahead of anybody reading its results, and compiled ahead of time for
machines that are not present.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from rope_jax.experiment.loss import head_cross_entropy

# What a batch may hold beside `inputs` and `targets`; all are [B, T].
_OPTIONAL = ("weights", "positions", "segment_ids", "key_mask")


class TrainState(NamedTuple):
    """Everything that an update reads and writes.

    Attributes:
      step: int32 scalar, updates done.
      params: nested dict of float32 arrays, `nnx.merge(graphdef, params)` is the
        model.
      opt_state: the optimizer's state.
      key: typed key, the same all through a run; dropout folds the step into it.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    key: jax.Array


def init_state(
    build: Callable[..., nnx.Module],
    optimizer: optax.GradientTransformation,
    key: jax.Array,
) -> TrainState:
    """The state before the first update.

    Call it under `jax.jit` with `out_shardings` to have every array born where it
    belongs, and under `jax.eval_shape` for shapes alone.

    Args:
      build: makes the model when called as `build(rngs=nnx.Rngs)`.
      optimizer: sees the parameters as a nested dict.
      key: typed key, of the parameters and of dropout.
    """
    params_key, dropout_key = jax.random.split(key)
    _, params = nnx.split(build(rngs=nnx.Rngs(params_key)))
    params = nnx.to_pure_dict(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        key=dropout_key,
    )


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    state_shardings: TrainState | None = None,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """The jitted update `(state, batch) -> (state, sums)`; it consumes the state.

    The loss of a batch is the mean over all of its targets,

        L = sum_i nats_i / sum_i targets_i    over micro-batches i,

    so the gradients of the *sums* are added up and divided once. Every target
    then weighs the same, however the batch was split.

    The batch is a dict of `[B, T]` arrays: `inputs` and `targets`; optionally
    `weights` (1 = scored), `positions`, `segment_ids` and `key_mask`, as the
    model takes them.

    Args:
      graphdef: static part of the model, from `nnx.split`. The model's `hidden` is
        called with the inputs, what else the batch holds, `dropout_key` and `step`,
        and its `logits` with some tokens of the result at a time.
      optimizer: as made by `make_optimizer`.
      accumulate: micro-batches that a batch is split into; must divide B.
      state_shardings: where the new state lies; None leaves it to the compiler.

    Returns:
      A jitted function. Its state argument is donated: use the returned one. `sums`
      holds float32 scalars on the device: `nats` and `targets` (sums over the
      batch), `grad_norm` (before clipping) and `param_norm` (after the update).

    Raises:
      ValueError: at trace time, for an unknown name in the batch, or a batch that
        `accumulate` does not divide.
    """
    return jax.jit(
        _make_update(graphdef, optimizer, accumulate, state_shardings),
        donate_argnames="state",
        out_shardings=None if state_shardings is None else (state_shardings, None),
    )


def make_joint_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    count: int,
    *,
    accumulate: int = 1,
    state_shardings: TrainState | None = None,
) -> Callable[[list[TrainState], list[dict]], tuple[list[TrainState], list[dict]]]:
    """The jitted update of several runs of one model: `(states, batches)` to both.

    Each run keeps its own state, batch and keys; the arrays are stacked inside, and
    the update of `make_train_step` is mapped over them, so that one call feeds a
    device that one small model would leave idle. A run may be at another step than
    its neighbours.

    Args:
      graphdef: as for `make_train_step`, of every run.
      optimizer: of every run.
      count: runs.
      accumulate: micro-batches that each batch is split into.
      state_shardings: where each new state lies; None leaves it to the compiler.

    Returns:
      A jitted function of two lists of `count` elements. The states are donated.

    Raises:
      ValueError: as the functions of `make_train_step`.
    """
    update = _make_update(graphdef, optimizer, accumulate, state_shardings)
    update = jax.vmap(update)

    def joint_step(states, batches):
        states, sums = update(_stacked(states), _stacked(batches))
        return _unstacked(states, count), _unstacked(sums, count)

    return jax.jit(
        joint_step,
        donate_argnames="states",
        out_shardings=None
        if state_shardings is None
        else ([state_shardings] * count, None),
    )


def _make_update(graphdef, optimizer, accumulate, state_shardings):
    """The pure update that the steps of one run and of several are made of."""
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")

    def batch_nats(params, batch, dropout_key, step):
        batch = dict(batch)
        inputs, targets = batch.pop("inputs"), batch.pop("targets")
        weights = batch.pop("weights", None)
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(inputs, **batch, dropout_key=dropout_key, step=step)
        return head_cross_entropy(model.logits, hidden, targets, weights)

    def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        _check_batch(batch, accumulate)
        key = jax.random.fold_in(state.key, state.step)
        nats_at_step = functools.partial(batch_nats, step=state.step)
        gradient = jax.value_and_grad(nats_at_step, has_aux=True)
        if accumulate == 1:
            (nats, targets), grads = gradient(state.params, batch, key)
        else:
            (nats, targets), grads = _accumulate(
                gradient, state.params, _split_batch(batch, accumulate), key
            )
        # No targets at all: the sums are 0, and 0 / 1 is the gradient of no loss.
        count = jnp.where(targets == 0, 1.0, targets)
        grads = jax.tree.map(lambda g: g / count, grads)
        if state_shardings is not None:  # or the update may be made in other slices
            grads = jax.lax.with_sharding_constraint(grads, state_shardings.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        sums = {
            "nats": nats,
            "targets": targets,
            "grad_norm": optax.tree.norm(grads),
            "param_norm": optax.tree.norm(params),
        }
        return TrainState(state.step + 1, params, opt_state, state.key), sums

    return train_step


def _stacked(trees: list):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _unstacked(tree, count: int) -> list:
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]


def _accumulate(gradient, params, micro_batches, key):
    """Sums of `gradient` over the leading axis of the micro-batches."""

    def add(total, micro):
        index, batch = micro
        part = gradient(params, batch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, part), None

    zero = jnp.zeros((), jnp.float32)
    start = ((zero, zero), jax.tree.map(jnp.zeros_like, params))
    count = jax.tree.leaves(micro_batches)[0].shape[0]
    return jax.lax.scan(add, start, (jnp.arange(count), micro_batches))[0]


def _split_batch(batch: dict, accumulate: int) -> dict:
    """`[B, T]` to `[A, B/A, T]`; micro-batch i holds rows i, i + A, i + 2A, ...

    Strided rows, because B is sharded: each device then splits the rows that it
    has, and none moves.
    """

    def split(x):
        return jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def _check_batch(batch: dict, accumulate: int) -> None:
    required = ("inputs", "targets")
    missing = [name for name in required if name not in batch]
    unknown = [name for name in batch if name not in required + _OPTIONAL]
    if missing or unknown:
        raise ValueError(
            f"a batch holds {', '.join(required)} and optionally "
            f"{', '.join(_OPTIONAL)}; got {', '.join(batch)}"
        )
    shapes = {name: x.shape for name, x in batch.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"a batch's arrays must have one shape [B, T], got {shapes}")
    rows = batch["inputs"].shape[0]
    if rows % accumulate:
        raise ValueError(
            f"accumulate must divide the batch of {rows} rows, got {accumulate}"
        )
