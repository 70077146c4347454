"""Cross-entropy of next-byte predictions: sums and counts, never means.

Both training and evaluation use these functions, so that a number from one can be
compared with a number from the other. They return sums, because the mean of the
means of unequal batches is not the mean over targets; whoever reports a number
divides once, at the end. Bits per byte are nats / (bytes * ln 2).
"""

import functools

import jax
import jax.numpy as jnp

from rope_jax.experiment.token_chunks import Chunks, Head


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
    _check_weights(weights, targets)
    nats = _sum(_scored_nats(logits, targets, weights), weights)
    return nats, _count(targets, weights)


def head_cross_entropy(
    head: Head,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    most_tokens: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy(head(hidden), ...)`, with never more than some of the logits.

    The gradient of a chunk is taken while its logits are there, so that none are made
    twice: what the loss is divided by comes later and is one factor for all.

    Args:
      head: gives the logits `[B, t, V]` of `[B, t, D]`.
      hidden: `[B, T, D]`, what the head takes.
      targets: `[B, T]`, as for `cross_entropy`.
      weights: `[B, T]`, as for `cross_entropy`; where they are 0, the hidden state may
        be what it will, and the head sees 0.
      most_tokens: as for `token_chunks.Chunks.of`.

    Returns:
      `(nats, count)`, as `cross_entropy`. Gradients reach `hidden`, the weights and
      what the head closes over; one reverse-mode derivative only, if there are chunks.

    Raises:
      ValueError: as `cross_entropy`.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            "hidden must be [B, T, D] for targets [B, T], "
            f"got hidden {hidden.shape} and targets {targets.shape}"
        )
    _check_weights(weights, targets)
    if weights is not None:
        # Before the head: its gradient is hidden^T times that of the logits, and
        # nan * 0 is nan.
        hidden = jnp.where((weights != 0)[..., None], hidden, 0)
    chunks = Chunks.of(head, hidden, most_tokens)
    if chunks.count == 1:
        return cross_entropy(head(hidden), targets, weights)
    each = jnp.ones(targets.shape) if weights is None else weights
    each = each.astype(jnp.float32)
    head, closed = jax.closure_convert(head, jax.eval_shape(chunks.take, hidden, 0))
    nats = _nats_by_chunks(head, chunks, closed, hidden, targets, each)
    return nats, _count(targets, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _nats_by_chunks(head, chunks, closed, hidden, targets, weights):
    def add(i, total):
        part = [chunks.take(x, i) for x in (targets, weights)]
        logits = head(chunks.take(hidden, i), *closed)
        return total + _sum(_scored_nats(logits, *part), part[1] * chunks.new(i)[None])

    return jax.lax.fori_loop(0, chunks.count, add, jnp.zeros(()))


def _nats_forward(head, chunks, closed, hidden, targets, weights):
    """The sum, and its gradients with respect to the floating arguments."""

    def add(i, carry):
        nats, each, d_closed, d_hidden = carry
        target, weight, before = (
            chunks.take(x, i) for x in (targets, weights, d_hidden)
        )

        def of_chunk(closed, hidden):
            found = _scored_nats(head(hidden, *closed), target, weight)
            return _sum(found, weight * chunks.new(i)[None]), found

        one = chunks.take(hidden, i)
        part, pull_back, found = jax.vjp(of_chunk, closed, one, has_aux=True)
        d_part, d_one = pull_back(jnp.ones_like(part))
        d_closed = jax.tree.map(jnp.add, d_closed, d_part)
        each = chunks.put(each, found, i)
        return nats + part, each, d_closed, chunks.put(d_hidden, before + d_one, i)

    start = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), weights, closed, hidden))
    nats, each, d_closed, d_hidden = jax.lax.fori_loop(0, chunks.count, add, start)
    d_weights = jnp.where(weights != 0, each, 0)
    return nats, (d_closed, d_hidden, d_weights)


def _nats_backward(head, chunks, saved, gradient):
    del head, chunks
    scaled = jax.tree.map(lambda x: (gradient * x).astype(x.dtype), saved)
    d_closed, d_hidden, d_weights = scaled
    return d_closed, d_hidden, None, d_weights


_nats_by_chunks.defvjp(_nats_forward, _nats_backward)


def _scored_nats(logits, targets, weights):
    """The nats of every target; those that are not scored mean nothing."""
    if weights is None:
        return token_nats(logits, targets)
    # The selection stands before the softmax as well: 0 * nan would be nan, and so
    # would the gradient of a where() that stood only behind it.
    return token_nats(jnp.where((weights != 0)[..., None], logits, 0), targets)


def _sum(nats, weights):
    if weights is None:
        return jnp.sum(nats)
    weights = weights.astype(jnp.float32)
    return jnp.sum(jnp.where(weights != 0, nats * weights, 0))


def _count(targets, weights):
    if weights is None:
        return jnp.asarray(targets.size, jnp.float32)
    return jnp.sum(weights.astype(jnp.float32))


def _check_weights(weights, targets):
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(
            "weights must have the shape of the targets, "
            f"got {weights.shape} and {targets.shape}"
        )
