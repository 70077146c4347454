"""Cross-entropy of next-byte predictions: sums and counts, never means.

Both training and evaluation use these functions, so that a number from one can be
compared with a number from the other. They return sums, because the mean of the
means of unequal batches is not the mean over targets; whoever reports a number
divides once, at the end. Bits per byte are nats / (bytes * ln 2).
"""

import jax
import jax.numpy as jnp


def token_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The negative log-likelihood of every target, in nats.

    nats[b, t] = logsumexp_v(logits[b, t, v]) - logits[b, t, targets[b, t]]

    The arithmetic is float32 whatever the dtype of the logits: a bfloat16 loss
    between 4 and 8 nats moves in steps of 1/32.

    Args:
      logits: `[..., V]`, any floating dtype.
      targets: `[...]`, integers in `[0, V)`.

    Returns:
      float32 `[...]`, nats; at least 0. A target outside of `[0, V)` gives NaN:
      traced values cannot raise, and a clamped index would score another byte.

    Raises:
      ValueError: if the shapes disagree, the targets are not integers, or the
        logits are not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> nats = token_nats(jnp.zeros((1, 2, 256), jnp.bfloat16), jnp.array([[7, 9]]))
      >>> [round(float(n), 6) for n in nats[0]]
      [5.545177, 5.545177]
    """
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integers, got {targets.dtype}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            "logits must be [..., V] for targets [...], "
            f"got logits {logits.shape} and targets {targets.shape}"
        )
    # Subtracting the maximum first: exp cannot overflow, and where the target is
    # the sure winner nothing is the difference of two large numbers.
    shifted = logits.astype(jnp.float32)
    shifted -= jax.lax.stop_gradient(jnp.max(shifted, axis=-1, keepdims=True))
    log_normalizer = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    chosen = jnp.take_along_axis(shifted, targets[..., None], axis=-1, mode="clip")
    in_range = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(in_range, log_normalizer - chosen[..., 0], jnp.nan)


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The sum of the targets' nats, and how many targets were summed.

    Args:
      logits: `[..., V]`, any floating dtype.
      targets: `[...]`, integers in `[0, V)`.
      weights: `[...]`, 1 where a target is scored and 0 where it is not; None
        scores all of them. A position of weight 0 adds nothing to the sum or to
        the gradient, even where its logits are not finite.

    Returns:
      `(nats, count)`, two float32 scalars. No targets: `(0, 0)`, zero gradient.

    Raises:
      ValueError: as `token_nats`, or if the weights' shape is not the targets'.

    Example:
      >>> import jax.numpy as jnp
      >>> logits, targets = jnp.zeros((1, 3, 100)), jnp.array([[5, 6, 7]])
      >>> nats, count = cross_entropy(logits, targets, jnp.array([[1, 1, 0]]))
      >>> round(float(nats), 5), float(count)
      (9.21034, 2.0)
    """
    if weights is None:
        nats = token_nats(logits, targets)
        return jnp.sum(nats), jnp.asarray(nats.size, jnp.float32)
    if weights.shape != targets.shape:
        raise ValueError(
            "weights must have the shape of the targets, "
            f"got {weights.shape} and {targets.shape}"
        )
    # The selection stands before the softmax as well: 0 * nan would be nan, and so
    # would the gradient of a where() that stood only behind it.
    weights = weights.astype(jnp.float32)
    scored = weights != 0
    nats = token_nats(jnp.where(scored[..., None], logits, 0), targets)
    return jnp.sum(jnp.where(scored, nats * weights, 0)), jnp.sum(weights)
