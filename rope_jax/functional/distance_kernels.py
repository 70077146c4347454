"""Learned functions of the distance as attention biases: KERPLE and FIRE.

Pure functions of (params, query positions, key positions); float32; any block of rows
and columns can be computed alone. Letters: T query time, S key time, N heads, W hidden
width.
"""

import jax
import jax.numpy as jnp

from rope_jax.functional.distance import (
    clip_forward,
    distances,
    parameter,
    per_head,
    time_positions,
    to_rank,
)
from rope_jax.functional.frequency_set import check_count

KERPLE_MIN = 1e-2
KERPLE_MAX_POWER = 2.0


def init_kerple(
    key: jax.Array, num_heads: int, *, kernel: str = "log"
) -> dict[str, jax.Array]:
    """Uniform parameters of KERPLE: `{"r1": [N], "r2": [N]}`, float32.

    As the authors draw them: for "log" r1 in (0, 2) and r2 in (0, 1); for "power" the
    slope r1 in (0, 1) and the exponent r2 in (0, 2); then moved into range. Their
    code passes one module, so one set, to every layer; a set for each layer works too.

    Args:
      key: a JAX random key.
      num_heads: N.
      kernel: "log" or "power".

    Returns:
      `{"r1": [N], "r2": [N]}`, float32, in the range of `kerple_clip`.

    Raises:
      ValueError: if `kernel` is neither or `num_heads` is not positive.

    >>> sorted(init_kerple(jax.random.key(0), 8))
    ['r1', 'r2']

    Source: Chi et al. 2022, KERPLE (arXiv 2205.09921); github.com/chijames/KERPLE,
      megatron/mpu/layers.py and megatron/model/gpt2_model.py.
    """
    _check_kernel(kernel)
    num_heads = check_count("num_heads", num_heads)
    top1, top2 = (2.0, 1.0) if kernel == "log" else (1.0, 2.0)
    key1, key2 = jax.random.split(key)
    params = {
        "r1": top1 * jax.random.uniform(key1, (num_heads,), jnp.float32),
        "r2": top2 * jax.random.uniform(key2, (num_heads,), jnp.float32),
    }
    return kerple_clip(params, kernel=kernel)


def kerple_clip(
    params: dict[str, jax.Array], *, kernel: str = "log"
) -> dict[str, jax.Array]:
    """Parameters of KERPLE moved into range: at least 0.01, the power at most 2.

    `kerple_bias` sees the parameters through this function. The authors also write
    the moved values back at every step; calling it after an update does the same.

    Args:
      params: `{"r1": [N], "r2": [N]}`.
      kernel: "log" or "power"; only the power has an upper limit.

    Returns:
      `{"r1": [N], "r2": [N]}`, float32.

    Raises:
      ValueError: if `kernel` is neither, or a parameter is missing or not `[N]`.

    >>> kerple_clip({"r1": jnp.zeros(1), "r2": jnp.array([3.0])}, kernel="power")
    {'r1': Array([0.01], dtype=float32), 'r2': Array([2.], dtype=float32)}

    Source: github.com/chijames/KERPLE, megatron/mpu/layers.py, the code of Chi et al.
      2022 (arXiv 2205.09921).
    """
    _check_kernel(kernel)
    top = KERPLE_MAX_POWER if kernel == "power" else jnp.inf
    return {
        "r1": clip_forward(parameter(params, "r1", None), KERPLE_MIN, jnp.inf),
        "r2": clip_forward(parameter(params, "r2", None), KERPLE_MIN, top),
    }


def kerple_bias(
    params: dict[str, jax.Array],
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    kernel: str = "log",
) -> jax.Array:
    """Bias of KERPLE: a conditionally positive definite kernel of the distance d.

    log:    -r1 * ln(1 + r2 * d)
    power:  -r1 * d ** r2

    with r1, r2 >= 0.01 and the power r2 <= 2. A parameter out of range acts as the
    nearest value in range and still receives the gradient taken there, so that a head
    at the limit can leave it.

    Args:
      params: `{"r1": [N], "r2": [N]}`.
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`.
      kernel: "log" or "power".

    Returns:
      float32 `[..., N, T, S]`.

    Raises:
      ValueError: if `kernel` is neither, or a parameter has another shape.

    >>> params = {"r1": jnp.array([2.0]), "r2": jnp.array([1.0])}
    >>> kerple_bias(params, jnp.array([3]), jnp.array([0, 2])).round(4)
    Array([[[-2.7726, -1.3863]]], dtype=float32)

    Source: Chi et al. 2022, KERPLE (arXiv 2205.09921), section 4.
    """
    params = kerple_clip(params, kernel=kernel)
    distance = distances(query_positions, key_positions)[..., None, :, :]
    r1 = per_head(params["r1"], distance.ndim)
    r2 = per_head(params["r2"], distance.ndim)
    if kernel == "log":
        return -r1 * jnp.log1p(r2 * distance)
    # The gradient of 0 ** r2 is 0 * ln(0): distance zero stays out of the power.
    power = jnp.maximum(distance, 1.0) ** r2
    return jnp.where(distance > 0, -r1 * power, 0.0)


def init_fire(
    key: jax.Array, num_heads: int, *, width: int = 32, c: float = 0.1
) -> dict[str, jax.Array]:
    """Parameters of FIRE, float32.

    Scalars `c` and `length_multiplier`; a hidden layer `kernel_in`, `bias_in` `[W]`;
    the output `kernel_out` `[W, N]`, `bias_out` `[N]`. Both layers are uniform within
    1/sqrt(inputs) of zero.

    Args:
      key: a JAX random key.
      num_heads: N.
      width: hidden width W.
      c: first value of the scalar c.

    Returns:
      A dict of the six arrays named above, float32; `length_multiplier` is 1.

    Raises:
      ValueError: if `num_heads` or `width` is not positive.

    >>> init_fire(jax.random.key(0), 4)["kernel_out"].shape
    (32, 4)

    Source: Li et al. 2024, FIRE (arXiv 2310.04418), the authors' code in the appendix.
    """
    num_heads = check_count("num_heads", num_heads)
    width = check_count("width", width)
    keys = jax.random.split(key, 4)
    edge = width**-0.5

    def uniform(key, shape, edge):
        return jax.random.uniform(key, shape, jnp.float32, -edge, edge)

    return {
        "c": jnp.asarray(c, jnp.float32),
        "length_multiplier": jnp.ones((), jnp.float32),
        "kernel_in": uniform(keys[0], (width,), 1.0),
        "bias_in": uniform(keys[1], (width,), 1.0),
        "kernel_out": uniform(keys[2], (width, num_heads), edge),
        "bias_out": uniform(keys[3], (num_heads,), edge),
    }


def fire_bias(
    params: dict[str, jax.Array],
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    length: float = 512.0,
    eps: float = 1e-6,
) -> jax.Array:
    """Bias of FIRE: a small network of the distance, interpolated progressively.

    With d the distance, p the position of the query, L = |length_multiplier * length|::

        x = ln(1 + |c| d) / (ln(1 + |c| max(p, L)) + eps)
        bias = kernel_out . relu(kernel_in * x + bias_in) + bias_out

    x stays below 1 for every causal pair at any length. Past L the bias depends on the
    position itself and not on the distance alone.

    Args:
      params: as `init_fire` makes them.
      query_positions: integer `[T]` or `[..., T]`, counted from the first key.
      key_positions: integer `[S]` or `[..., S]`.
      length: the threshold before its learned multiplier, in positions.
      eps: keeps the quotient finite where c = 0.

    Returns:
      float32 `[..., N, T, S]`; a block takes T * S * W numbers of memory on the way.

    Raises:
      ValueError: if `length` is not positive, or a parameter has another shape.

    >>> params = init_fire(jax.random.key(0), 2)
    >>> fire_bias(params, jnp.array([9]), jnp.arange(10)).shape
    (2, 1, 10)

    Source: Li et al. 2024, FIRE (arXiv 2310.04418), equation 4; the network, the
      initial values and eps are those of the authors' code in the appendix.
    """
    if not length > 0:
        raise ValueError(f"length must be positive, got {length}")
    kernel = parameter(params, "kernel_out", None, None)
    width, num_heads = kernel.shape
    distance = distances(query_positions, key_positions)
    query = time_positions(query_positions, "query_positions").astype(jnp.float32)
    query = to_rank(query, distance.ndim - 1)
    c = jnp.abs(parameter(params, "c"))
    threshold = jnp.abs(parameter(params, "length_multiplier") * length)
    limit = jnp.maximum(query, threshold)[..., None]
    x = (jnp.log1p(c * distance) / (jnp.log1p(c * limit) + eps))[..., None]
    hidden = jax.nn.relu(
        x * to_rank(parameter(params, "kernel_in", width), x.ndim)
        + to_rank(parameter(params, "bias_in", width), x.ndim)
    )
    bias = jnp.einsum(
        "...tsw,wn->...nts", hidden, kernel, precision=jax.lax.Precision.HIGHEST
    )
    return bias + per_head(parameter(params, "bias_out", num_heads), bias.ndim)


def _check_kernel(kernel):
    if kernel not in ("log", "power"):
        raise ValueError(f"kernel must be 'log' or 'power', got {kernel!r}")
