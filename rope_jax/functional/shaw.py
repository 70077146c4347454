"""Relative embeddings on keys and values, after Shaw et al.

Letters: T query time, S key time, N heads, H head dim, k the clipping distance,
C = 2k + 1 clipped distances.
"""

import jax
import jax.numpy as jnp

from rope_jax.functional.distance import parameter, relative_positions, to_rank
from rope_jax.functional.frequency_set import check_count


def init_shaw(
    key: jax.Array,
    head_dim: int,
    *,
    max_distance: int = 16,
    num_heads: int | None = None,
) -> dict[str, jax.Array]:
    """Normal embeddings of Shaw et al.: `{"key": ..., "value": ...}`, float32.

    Each is `[2k+1, H]`, shared by the heads, or `[N, 2k+1, H]` where `num_heads` is
    given, with standard deviation H**-0.5. Row r belongs to key - query = r - k. The
    paper keeps one pair in each layer.

    Args:
      key: a JAX random key.
      head_dim: H.
      max_distance: the clipping distance k, in positions.
      num_heads: N, for embeddings of each head's own; None shares them.

    Returns:
      `{"key": [2k+1, H], "value": [2k+1, H]}`, with N in front where given, float32.

    Raises:
      ValueError: if a size is not positive.

    >>> init_shaw(jax.random.key(0), 8, max_distance=2)["value"].shape
    (5, 8)

    Source: Shaw et al. 2018 (arXiv 1803.02155), section 3.2.
    """
    head_dim = check_count("head_dim", head_dim)
    max_distance = check_count("max_distance", max_distance)
    shape = (2 * max_distance + 1, head_dim)
    if num_heads is not None:
        shape = (check_count("num_heads", num_heads), *shape)
    keys = jax.random.split(key)
    return {
        name: head_dim**-0.5 * jax.random.normal(k, shape, jnp.float32)
        for name, k in zip(("key", "value"), keys, strict=True)
    }


def shaw_logits(
    params: dict[str, jax.Array],
    query: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Term of the logits that comes from relative embeddings of the keys.

    bias_ts = scale * q_t . a^K[clip(s - t, -k, k)]

    The query meets each of the C embeddings once, `[..., N, T, C]`, and the product
    is then looked up by distance: no `[T, S, H]` array of embeddings is formed.

    Args:
      params: `{"key": [C, H] or [N, C, H], ...}`.
      query: `[..., T, N, H]`, not scaled.
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`.
      scale: factor of the attention logits; None is H**-0.5.

    Returns:
      float32 `[..., N, T, S]`, to be added to the scaled logits.

    Raises:
      ValueError: if the embeddings do not fit the query.

    >>> params = {"key": jnp.array([[1.0], [2.0], [3.0]])}
    >>> query = jnp.ones((1, 1, 1))
    >>> shaw_logits(params, query, jnp.array([5]), jnp.array([0, 5, 6, 9]))
    Array([[[1., 2., 3., 3.]]], dtype=float32)

    Source: Shaw et al. 2018 (arXiv 1803.02155), equations 4 and 5.
    """
    table = _embeddings(params, "key", num_heads=query.shape[-2], dim=query.shape[-1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    spec = "...tnh,ch->...ntc" if table.ndim == 2 else "...tnh,nch->...ntc"
    products = scale * jnp.einsum(
        spec,
        query.astype(jnp.float32),
        table,
        precision=jax.lax.Precision.HIGHEST,
    )
    rows = _rows(query_positions, key_positions, table)[..., None, :, :]
    rank = max(rows.ndim, products.ndim)
    rows, products = to_rank(rows, rank), to_rank(products, rank)
    return jnp.take_along_axis(products, rows, axis=-1, mode="promise_in_bounds")


def shaw_values(
    params: dict[str, jax.Array],
    weights: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
) -> jax.Array:
    """Term of the attention output that comes from relative embeddings of the values.

    out_t = sum_s weights_ts * a^V[clip(s - t, -k, k)]

    The weights are first summed by clipped distance, `[..., N, T, C]`. It is linear in
    the weights and a sum over keys, so blocks of keys can be added up, and weights
    that are not yet normalized can be divided afterwards.

    Args:
      params: `{"value": [C, H] or [N, C, H], ...}`.
      weights: attention weights `[..., N, T, S]`.
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`.

    Returns:
      `[..., T, N, H]` in the dtype of the weights. A block takes T * S * C numbers of
      memory on the way, without the axes of heads and batch.

    Raises:
      ValueError: if the embeddings do not fit the weights.

    >>> params = {"value": jnp.array([[1.0], [2.0], [3.0]])}
    >>> weights = jnp.array([[[0.5, 0.25, 0.25]]])
    >>> shaw_values(params, weights, jnp.array([5]), jnp.array([0, 4, 5]))
    Array([[[1.25]]], dtype=float32)

    Source: Shaw et al. 2018 (arXiv 1803.02155), equation 3.
    """
    table = _embeddings(params, "value", num_heads=weights.shape[-3])
    rows = _rows(query_positions, key_positions, table)
    by_distance = jnp.einsum(
        "...nts,...tsc->...ntc",
        weights.astype(jnp.float32),
        jax.nn.one_hot(rows, table.shape[-2], dtype=jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    spec = "...ntc,ch->...tnh" if table.ndim == 2 else "...ntc,nch->...tnh"
    out = jnp.einsum(spec, by_distance, table, precision=jax.lax.Precision.HIGHEST)
    return out.astype(weights.dtype)


def _embeddings(params, name, *, num_heads, dim=None):
    """The embeddings `[C, H]` or `[N, C, H]`, with their sizes checked."""
    per_head = name in params and jnp.ndim(params[name]) == 3
    shape = (num_heads, None, dim) if per_head else (None, dim)
    table = parameter(params, name, *shape)
    if table.shape[-2] % 2 == 0:
        raise ValueError(
            f"params[{name!r}] must have 2k+1 rows, an odd number, got {table.shape}"
        )
    return table


def _rows(query_positions, key_positions, table):
    """The row of every pair: its distance, clipped and counted from zero."""
    limit = table.shape[-2] // 2
    lag = relative_positions(query_positions, key_positions)
    return jnp.clip(lag, -limit, limit) + limit
