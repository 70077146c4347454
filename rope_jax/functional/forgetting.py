"""Biases that accumulate with the content: the forget gate (FoX) and CABLE.

Both take one number a_t <= 0 from every token and head and add sum(a_{s+1} .. a_t) to
the logit of query t and key s. With c the running sum this is c_t - c_s, so attention
needs c alone, `[..., T, N]`, and can form the bias of any block of rows and columns.

Letters: T query time, S key time, N heads, D model dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rope_jax.functional.distance import parameter, time_positions, to_rank
from rope_jax.functional.frequency_set import check_count


class RunningSum(NamedTuple):
    """A running sum as the unevaluated sum of two float32 arrays `[..., T, N]`.

    After 64k tokens a sum of log gates can reach -45,000, where neighbouring float32
    numbers are 0.004 apart, and the bias of two close tokens, the difference of two
    such numbers, would be off by as much. `low` holds what `high` rounds away; the
    difference of two of them is exact to float32. As a pytree of two arrays it is
    sliced, cached and sharded like any other: `jax.tree.map(lambda c: c[:, a:b], c)`.

    >>> sums = running_sum(jnp.array([[1e8], [1.0]]))
    >>> sums.high.tolist(), sums.low.tolist()
    ([[100000000.0], [100000000.0]], [[0.0], [1.0]])

    Source: Dekker 1971, "A floating-point technique for extending the available
    precision".
    """

    high: jax.Array
    low: jax.Array


def init_fox(
    key: jax.Array,
    model_dim: int,
    num_heads: int,
    *,
    bias: float = 0.0,
    stddev: float = 0.02,
) -> dict[str, jax.Array]:
    """Projection of the forget gate: `{"kernel": [D, N], "bias": [N]}`, float32.

    The authors start at bias 0, where a gate keeps half; x-transformers starts at 5,
    where it keeps 0.993. Each layer has its own.

    Args:
      key: a JAX random key.
      model_dim: D.
      num_heads: N.
      bias: first value of every bias, before the sigmoid.
      stddev: standard deviation of the kernel.

    Returns:
      `{"kernel": [D, N], "bias": [N]}`, float32.

    Raises:
      ValueError: if a size is not positive.

    >>> init_fox(jax.random.key(0), 16, 4)["kernel"].shape
    (16, 4)

    Source: Lin et al. 2025, the forgetting transformer (arXiv 2503.02130), section 3.
    """
    model_dim = check_count("model_dim", model_dim)
    num_heads = check_count("num_heads", num_heads)
    kernel = jax.random.normal(key, (model_dim, num_heads), jnp.float32)
    return {
        "kernel": stddev * kernel,
        "bias": jnp.full((num_heads,), bias, jnp.float32),
    }


def init_cable(
    key: jax.Array, model_dim: int, num_heads: int, *, stddev: float = 0.02
) -> dict[str, jax.Array]:
    """Projection of CABLE: `{"kernel": [D, N], "bias": [N]}`, float32, bias zero.

    Args:
      key: a JAX random key.
      model_dim: D.
      num_heads: N.
      stddev: standard deviation of the kernel.

    Returns:
      `{"kernel": [D, N], "bias": [N]}`, float32.

    Raises:
      ValueError: if a size is not positive.

    >>> init_cable(jax.random.key(0), 16, 4)["bias"].shape
    (4,)

    Source: Veisi et al. 2025, CABLE (arXiv 2503.08067), and the code of its authors.
    """
    return init_fox(key, model_dim, num_heads, stddev=stddev)


def fox_gates(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Log forget gates of the forgetting transformer, what `fox_sums` adds up.

    ln f_t = ln sigmoid(x_t @ kernel + bias)

    Args:
      params: `{"kernel": [D, N], "bias": [N]}`.
      x: `[..., T, D]`, the input of the attention layer, any float dtype.

    Returns:
      float32 `[..., T, N]`, at most 0.

    Raises:
      ValueError: if a parameter does not fit `x`.

    >>> params = {"kernel": jnp.zeros((2, 1)), "bias": jnp.zeros(1)}
    >>> fox_gates(params, jnp.ones((1, 2))).round(3)
    Array([[-0.693]], dtype=float32)

    Source: Lin et al. 2025, the forgetting transformer (arXiv 2503.02130), section 3.
    """
    return jax.nn.log_sigmoid(_project(params, x))


def cable_gates(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Context-aware slopes of CABLE, negative, what `cable_sums` adds up.

    Args:
      params: `{"kernel": [D, N], "bias": [N]}`.
      x: `[..., T, D]`, the input of the attention layer, any float dtype.

    Returns:
      float32 `[..., T, N]`, at most 0: -softplus(x_t @ kernel + bias).

    Raises:
      ValueError: if a parameter does not fit `x`.

    >>> params = {"kernel": jnp.zeros((2, 1)), "bias": jnp.zeros(1)}
    >>> cable_gates(params, jnp.ones((1, 2))).round(3)
    Array([[-0.693]], dtype=float32)

    Source: Veisi et al. 2025, CABLE (arXiv 2503.08067), and the code of its authors.
    """
    return -jax.nn.softplus(_project(params, x))


def fox_sums(
    params: dict[str, jax.Array], x: jax.Array, initial: RunningSum | None = None
) -> RunningSum:
    """Running sums of the log forget gates of the forgetting transformer.

    f_t = sigmoid(x_t @ kernel + bias),  c_t = sum(ln f_1 .. ln f_t)

    Args:
      params: `{"kernel": [D, N], "bias": [N]}`.
      x: `[..., T, D]`, the input of the attention layer, any float dtype.
      initial: `[..., N]`, the sums after the last token before these: with a cache,
        the last row of what is in it. None starts at zero.

    Returns:
      `RunningSum` of float32 `[..., T, N]`, in nats.

    Raises:
      ValueError: if a parameter does not fit `x`.

    >>> params = {"kernel": jnp.zeros((2, 1)), "bias": jnp.zeros(1)}
    >>> fox_sums(params, jnp.ones((3, 2))).high[:, 0].round(3)
    Array([-0.693, -1.386, -2.079], dtype=float32)

    Source: Lin et al. 2025, the forgetting transformer (arXiv 2503.02130), section 3.
    """
    return running_sum(fox_gates(params, x), initial)


def cable_sums(
    params: dict[str, jax.Array], x: jax.Array, initial: RunningSum | None = None
) -> RunningSum:
    """Running sums of the context-aware slopes of CABLE.

    c_t = -sum(softplus(x_1 @ kernel + bias) .. softplus(x_t @ kernel + bias))

    A constant softplus is ALiBi with that slope. Since -softplus(z) is
    log sigmoid(-z), CABLE is the forget gate with the sign of its projection turned.

    Args:
      params: `{"kernel": [D, N], "bias": [N]}`.
      x: `[..., T, D]`, the input of the attention layer, any float dtype.
      initial: as for `fox_sums`.

    Returns:
      `RunningSum` of float32 `[..., T, N]`, in nats.

    Raises:
      ValueError: if a parameter does not fit `x`.

    >>> params = {"kernel": jnp.zeros((2, 1)), "bias": jnp.zeros(1)}
    >>> cable_sums(params, jnp.ones((3, 2))).high[:, 0].round(3)
    Array([-0.693, -1.386, -2.079], dtype=float32)

    Source: Veisi et al. 2025, CABLE (arXiv 2503.08067), and the code of its authors.
    """
    return running_sum(cable_gates(params, x), initial)


def accumulated_bias(query_sums: RunningSum, key_sums: RunningSum) -> jax.Array:
    """Bias c_t - c_s of a block of queries and keys, from their running sums.

    Args:
      query_sums: rows `[..., T, N]` of the queries.
      key_sums: rows `[..., S, N]` of the keys; leading axes broadcast.

    Returns:
      float32 `[..., N, T, S]`: zero at s = t, negative for keys of the past. Above the
      diagonal it is positive and means nothing; causal attention masks it.

    >>> sums = running_sum(jnp.array([[-1.0], [-2.0], [-4.0]]))
    >>> last = jax.tree.map(lambda c: c[2:], sums)
    >>> accumulated_bias(last, sums)
    Array([[[-6., -4.,  0.]]], dtype=float32)

    Source: Lin et al. 2025 (arXiv 2503.02130), section 3, the matrix D.
    """

    def difference(query, key):
        query, key = jnp.swapaxes(query, -1, -2), jnp.swapaxes(key, -1, -2)
        rank = max(query.ndim, key.ndim)
        query, key = to_rank(query, rank), to_rank(key, rank)
        return query[..., :, None] - key[..., None, :]

    high = difference(query_sums.high, key_sums.high)
    return high + difference(query_sums.low, key_sums.low)


def rows_at(sums: RunningSum, index: jax.Array) -> RunningSum:
    """Rows of running sums by their index, for a bias that is called block by block.

    Where the positions that attention is given are the indices of the rows, this is
    the bias function::

        lambda t, s: accumulated_bias(rows_at(sums, t), rows_at(sums, s))

    Args:
      sums: `[..., T, N]`.
      index: integer `[t]` or `[..., t]`, from 0 to T - 1.

    Returns:
      `RunningSum` of `[..., t, N]`.

    Raises:
      ValueError: if `index` is not integer.

    >>> rows_at(running_sum(jnp.ones((3, 1))), jnp.array([2, 0])).high[:, 0]
    Array([3., 1.], dtype=float32)

    Source: this library's; the sums are those of `fox_sums` and `cable_sums`.
    """
    index = time_positions(index, "index")

    def rows(part):
        if index.ndim == 1:
            return jnp.take(part, index, axis=-2, mode="clip")
        return jnp.take_along_axis(part, index[..., None], axis=-2, mode="clip")

    return RunningSum(*map(rows, sums))


def running_sum(x: jax.Array, initial: RunningSum | None = None) -> RunningSum:
    """Cumulative sum along the second last axis, kept to twice float32.

    Args:
      x: `[..., T, N]`.
      initial: `[..., N]`, added to every row; None is zero.

    Returns:
      `RunningSum` of float32 `[..., T, N]`.

    Raises:
      ValueError: if `x` has fewer than two axes.

    >>> sums = running_sum(jnp.array([[1e8], [1.0], [-1e8]]))
    >>> (sums.high + sums.low)[:, 0]
    Array([1.e+08, 1.e+08, 1.e+00], dtype=float32)

    Source: the scan of Hillis and Steele 1986, "Data parallel algorithms", over the
    two-term sums that `RunningSum` names.
    """
    if x.ndim < 2:
        raise ValueError(f"x must be [..., T, N], got shape {x.shape}")
    sums = _compensated_cumsum(x.astype(jnp.float32))
    if initial is None:
        return sums
    return _add(RunningSum(*(part[..., None, :] for part in initial)), sums)


def _add(left, right):
    """Sum of two `RunningSum`; the rounding error of the leading sum is kept."""
    total = left.high + right.high
    moved = total - left.high
    error = (left.high - (total - moved)) + (right.high - moved)
    low = left.low + right.low + error
    high = total + low
    return RunningSum(high, low - (high - total))


@jax.custom_jvp
def _compensated_cumsum(x):
    """Running sums by doubling: each step adds the sums that end 2**k rows before."""
    axis, length = x.ndim - 2, x.shape[-2]

    def double(k, sums):
        def moved(part):
            padded = jnp.concatenate([jnp.zeros_like(part), part], axis)
            start = length - jnp.left_shift(1, k)
            return jax.lax.dynamic_slice_in_dim(padded, start, length, axis)

        return _add(RunningSum(*map(moved, sums)), sums)

    # A loop and not an unrolled scan: it compiles in a fraction of the time.
    steps = max(length - 1, 0).bit_length()
    return jax.lax.fori_loop(0, steps, double, RunningSum(x, jnp.zeros_like(x)))


@_compensated_cumsum.defjvp
def _compensated_cumsum_jvp(primals, tangents):
    # The sum is linear; its correction, a rounding error, has no slope.
    (x,), (dx,) = primals, tangents
    dsum = jax.lax.cumsum(dx, axis=x.ndim - 2)
    return _compensated_cumsum(x), RunningSum(dsum, jnp.zeros_like(dsum))


def _project(params, x):
    kernel = parameter(params, "kernel", x.shape[-1], None)
    bias = parameter(params, "bias", kernel.shape[-1])
    z = jnp.einsum(
        "...td,dn->...tn",
        x.astype(jnp.float32),
        kernel,
        precision=jax.lax.Precision.HIGHEST,
    )
    return z + to_rank(bias, z.ndim)
