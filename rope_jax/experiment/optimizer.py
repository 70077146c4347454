"""AdamW with warm-up, cosine decay and clipping, all counted in updates."""

import jax
import optax

from rope_jax.experiment.config import TrainConfig

# Weight decay acts on the matrices of linear maps: not on norms, biases, embeddings
# or an encoding's tables. The stacked layers give every parameter a leading axis, so
# the number of dimensions cannot tell; the last name does.
_DECAYED = ("kernel", "head")


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """The learning rate of update n, for n = 1 .. steps.

    A line from 0 at n = 0 to `learning_rate` at n = `warmup_steps`, then half a
    cosine (Loshchilov and Hutter 2017, eq. 5, without restarts) down to
    `final_learning_rate` at n = `steps`, and that value ever after. One update is
    one step of the optimizer, whatever number of micro-batches it was split into.
    A run that is no longer than its warm-up ends on the line.

    Returns:
      A function of the update's number, an int or an integer array.

    Example:
      >>> from rope_jax.experiment.config import TrainConfig
      >>> schedule = learning_rate(TrainConfig(steps=1000, warmup_steps=100))
      >>> [round(float(schedule(n)), 6) for n in (50, 100, 550, 1000)]
      [0.0005, 0.001, 0.00055, 0.0001]
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    line = optax.linear_schedule(0.0, peak, max(warmup, 1))
    if config.steps <= warmup:
        return line
    cosine = optax.cosine_decay_schedule(
        peak, config.steps - warmup, alpha=config.final_learning_rate / peak
    )
    return optax.join_schedules([line, cosine], [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm.

    Decay is decoupled (Loshchilov and Hutter 2019): each update subtracts
    `learning_rate * weight_decay * matrix`. The clip scales the whole gradient to
    norm `clip_norm` where it is longer.
    """
    schedule = learning_rate(config)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            # Optax counts the updates already done; the schedule counts this one.
            lambda done: schedule(done + 1),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def decay_mask(params):
    """Which parameters decay: a tree of bools, True for matrices."""

    def decays(path, leaf):
        del leaf
        return jax.tree_util.keystr(path[-1:], simple=True) in _DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)
