"""The steps of a run as functions of shapes: what is compiled before anything runs.

Training compiles its step from these, and `plan` compiles the same for machines that
are not here.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rope_jax.experiment.checkpoint import abstract_model, with_shardings
from rope_jax.experiment.config import Config
from rope_jax.experiment.data.tasks import TASKS
from rope_jax.experiment.loss import token_nats
from rope_jax.experiment.mesh import (
    batch_sharding,
    batch_shards,
    over_data_too,
    param_shardings,
)
from rope_jax.experiment.optimizer import make_optimizer
from rope_jax.experiment.scoring import ModelApply, window_values
from rope_jax.experiment.train_step import (
    TrainState,
    init_state,
    make_joint_step,
    make_train_step,
)
from rope_jax.nn.decoder import Decoder


def state_init(config: Config) -> Callable[[jax.Array], TrainState]:
    """`key -> TrainState`, the state before the first update."""
    build = functools.partial(Decoder, config.model)
    return functools.partial(init_state, build, make_optimizer(config.train))


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """The state of a run in shapes, each with its sharding on the mesh."""
    init = state_init(config)
    state = jax.eval_shape(lambda: init(jax.random.key(0)))
    shardings = param_shardings(mesh, state)
    if config.mesh.shard_optimizer:
        moments = over_data_too(mesh, state.opt_state, shardings.opt_state)
        shardings = shardings._replace(opt_state=moments)
    return with_shardings(state, shardings)


def abstract_batch(
    config: Config, mesh: Mesh, names: tuple[str, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch of an update in shapes, `[B, T]` each."""
    shape = (config.train.batch_size, config.data.length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    return dict.fromkeys(names, tokens)


def train_step(config: Config, state: TrainState, *, together: int = 0) -> Callable:
    """The jitted update of a run, or of several in one step.

    Args:
      config: of the run, or of the first of them.
      state: as `abstract_state` gives it.
      together: how many runs there are; 0 for one alone, without lists.

    Returns:
      As `make_train_step`, or `make_joint_step`.
    """
    graphdef, _ = abstract_model(config.model)
    optimizer = make_optimizer(config.train)
    options = {
        "accumulate": config.train.accumulate,
        "state_shardings": jax.tree.map(lambda x: x.sharding, state),
    }
    if together:
        return make_joint_step(graphdef, optimizer, together, **options)
    return make_train_step(graphdef, optimizer, **options)


def train_call(config: Config, mesh: Mesh) -> tuple[Callable, tuple]:
    """The jitted update of a run, and its arguments in shapes."""
    state, names = abstract_state(config, mesh), ("inputs", "targets")
    if config.data.source in TASKS:
        names += ("weights",)
    return train_step(config, state), (state, abstract_batch(config, mesh, names))


def eval_call(config: Config, mesh: Mesh, length: int) -> tuple[Callable, tuple]:
    """The jitted scoring of one batch of windows, and its arguments in shapes.

    The last `eval.block` bytes of each window are scored, as by the protocol
    "anchored".

    Args:
      config: a resolved one.
      mesh: of the run.
      length: bytes in a window.
    """
    apply = ModelApply(abstract_model(config.model)[0])
    shards = batch_shards(mesh)
    rows = max(1, config.eval.batch_tokens // length // shards) * shards
    place = NamedSharding(mesh, PartitionSpec(batch_sharding(mesh).spec[0]))

    def windows(width):
        return jax.ShapeDtypeStruct((rows, width), jnp.uint8, sharding=place)

    def eval_step(params, inputs, targets):
        return window_values(
            apply, params, inputs, targets, None, mesh=mesh, statistic=token_nats
        )

    params = abstract_state(config, mesh).params
    targets = windows(min(config.eval.block, length))
    return jax.jit(eval_step), (params, windows(length), targets)
