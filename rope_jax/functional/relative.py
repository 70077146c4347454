"""Attention biases of the relative distance: T5 and Sandwich; KERPLE, FIRE and Shaw.

The encodings that also read the data (CoPE, DAPE, PoPE, the forget gate, CABLE) can be
imported from here too.

Each is a pure function of (params, query positions, key positions). Only the rows and
columns that were asked for are computed, so that attention can call a bias block by
block and never hold the whole T x S matrix. Biases are float32 and are added to logits
that are already scaled; masking is the work of attention.

Letters: T query time, S key time, N heads.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional import frequencies
from rope_jax.functional.contextual import (
    RunningSum,
    accumulated_bias,
    cable_gates,
    cable_sums,
    cope_bias,
    cope_positions,
    dape_logits,
    fox_gates,
    fox_sums,
    init_cable,
    init_cope,
    init_dape,
    init_fox,
    init_pope,
    pope_key,
    pope_query,
    rows_at,
    running_sum,
)
from rope_jax.functional.distance import (
    integers,
    parameter,
    per_head,
    relative_positions,
    time_positions,
)
from rope_jax.functional.distance_kernels import (
    fire_bias,
    init_fire,
    init_kerple,
    kerple_bias,
    kerple_clip,
)
from rope_jax.functional.frequency_set import check_count
from rope_jax.functional.rotary import rope_angles
from rope_jax.functional.shaw import init_shaw, shaw_logits, shaw_values

__all__ = [
    "RunningSum",
    "accumulated_bias",
    "cable_gates",
    "cable_sums",
    "cope_bias",
    "cope_positions",
    "dape_logits",
    "fire_bias",
    "fox_gates",
    "fox_sums",
    "init_cable",
    "init_cope",
    "init_dape",
    "init_fire",
    "init_fox",
    "init_kerple",
    "init_pope",
    "init_shaw",
    "init_t5",
    "kerple_bias",
    "kerple_clip",
    "pope_key",
    "pope_query",
    "relative_positions",
    "rows_at",
    "running_sum",
    "sandwich_bias",
    "shaw_logits",
    "shaw_values",
    "t5_bias",
    "t5_buckets",
]


def t5_buckets(
    relative_position: jax.Array,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> jax.Array:
    """Bucket of T5 for every relative position.

    With n the distance into the past and E = num_buckets // 2, distances below E have
    a bucket each and the rest share buckets of growing width, up to num_buckets - 1::

        bucket = E + floor(ln(n / E) / ln(max_distance / E) * (num_buckets - E))

    A causal bias puts every key of the future in bucket 0; a bidirectional one gives
    half of the buckets to each direction. The edges are found in exact integer
    arithmetic: no rounding of the logarithm moves a distance across an edge.

    Args:
      relative_position: integer, key minus query, any shape.
      num_buckets: buckets in all; even where bidirectional.
      max_distance: in positions; from here on everything shares the last bucket.
      bidirectional: whether the future has its own buckets.

    Returns:
      int32, the shape of `relative_position`.

    Raises:
      ValueError: if `relative_position` is not integer, or the two numbers leave no
        bucket that grows.

    >>> t5_buckets(jnp.array([1, 0, -5, -16, -40, -127, -5000]))
    Array([ 0,  0,  5, 16, 23, 31, 31], dtype=int32)

    Source: Raffel et al. 2020, T5 (arXiv 1910.10683), section 2.1.
    """
    lag = integers(relative_position, "relative_position")
    if bidirectional and num_buckets % 2:
        raise ValueError(
            f"num_buckets must be even where bidirectional, got {num_buckets}"
        )
    buckets = num_buckets // 2 if bidirectional else num_buckets
    exact = buckets // 2
    if exact < 1:
        raise ValueError(
            "num_buckets must be at least 2 in each direction, got "
            f"{num_buckets} with bidirectional={bidirectional}"
        )
    edges = _t5_edges(exact, buckets - exact, max_distance)
    past = jnp.abs(lag) if bidirectional else jnp.maximum(-lag, 0)
    crossed = jnp.searchsorted(edges, past, side="right", method="compare_all")
    bucket = jnp.where(past < exact, past, exact + crossed.astype(jnp.int32))
    if bidirectional:
        bucket = bucket + jnp.where(lag > 0, buckets, 0)
    return bucket


def init_t5(
    key: jax.Array, num_heads: int, *, num_buckets: int = 32, stddev: float = 0.02
) -> dict[str, jax.Array]:
    """Normal table of T5: `{"embedding": [num_buckets, N]}`, float32.

    The layout is that of `relative_attention_bias.weight` in published checkpoints,
    where one table serves all the layers.

    Args:
      key: a JAX random key.
      num_heads: N.
      num_buckets: rows of the table, at least 2.
      stddev: standard deviation of the entries.

    Returns:
      `{"embedding": [num_buckets, N]}`, float32.

    Raises:
      ValueError: if `num_heads` is not positive or `num_buckets` is below 2.

    >>> init_t5(jax.random.key(0), 4)["embedding"].shape
    (32, 4)

    Source: Raffel et al. 2020, T5 (arXiv 1910.10683), section 2.1; the
      standard deviation is this library's.
    """
    num_heads = check_count("num_heads", num_heads)
    num_buckets = check_count("num_buckets", num_buckets, at_least=2)
    table = jax.random.normal(key, (num_buckets, num_heads), jnp.float32)
    return {"embedding": stddev * table}


def t5_bias(
    params: dict[str, jax.Array],
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> jax.Array:
    """Learned bias of T5: one number for each head and distance bucket.

    T5 itself adds it to logits that are not divided by sqrt(head_dim).

    Args:
      params: `{"embedding": [num_buckets, N]}`.
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`.
      max_distance: in positions, as in `t5_buckets`.
      bidirectional: as in `t5_buckets`.

    Returns:
      float32 `[..., N, T, S]`.

    Raises:
      ValueError: as for `t5_buckets`, or if the table has another shape.

    >>> params = {"embedding": jnp.arange(32.0)[:, None]}
    >>> t5_bias(params, jnp.array([40]), jnp.array([0, 24, 40]))
    Array([[[23., 16.,  0.]]], dtype=float32)

    Source: Raffel et al. 2020, T5 (arXiv 1910.10683), section 2.1.
    """
    table = parameter(params, "embedding", None, None)
    buckets = t5_buckets(
        relative_positions(query_positions, key_positions),
        num_buckets=table.shape[0],
        max_distance=max_distance,
        bidirectional=bidirectional,
    )
    bias = table.T.at[:, buckets].get(mode="promise_in_bounds")
    return jnp.moveaxis(bias, 0, -3)


def sandwich_bias(
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    num_heads: int,
    dim: int = 128,
    theta: float = 10_000.0,
) -> jax.Array:
    """Bias of Sandwich: the inner product of two sinusoidal embeddings.

    With h = 1 .. N, d the distance and i = 0 .. dim/2 - 1::

        bias_h = N / (8 h) * sum_i cos(d * theta ** (-2i / dim))

    There are no parameters. It is computed as that inner product, from exact angles,
    in (T + S) * dim numbers of memory. Implementations that subtract dim/2 from the
    sum differ by one constant in each head, which softmax does not see.

    Args:
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`.
      num_heads: N.
      dim: channels of the sinusoidal embedding, even; not the width of the model.
      theta: base of the ladder of frequencies.

    Returns:
      float32 `[..., N, T, S]`.

    Raises:
      ValueError: if `num_heads` is not positive or `dim` is odd.

    >>> sandwich_bias(jnp.array([5]), jnp.array([5]), num_heads=2, dim=16)[:, 0, 0]
    Array([2., 1.], dtype=float32)

    Source: Chi et al. 2023, Sandwich (arXiv 2212.10356), section 6 and appendix E.
    """
    num_heads = check_count("num_heads", num_heads)
    inv_freq = frequencies.default(dim, theta=theta).inv_freq

    def embedding(positions, name):
        angles = rope_angles(time_positions(positions, name), inv_freq)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)

    product = jnp.einsum(
        "...td,...sd->...ts",
        embedding(query_positions, "query_positions"),
        embedding(key_positions, "key_positions"),
        precision=jax.lax.Precision.HIGHEST,
    )[..., None, :, :]
    scale = (num_heads / (8.0 * np.arange(1, num_heads + 1))).astype(np.float32)
    return product * per_head(jnp.asarray(scale), product.ndim)


def _t5_edges(exact: int, steps: int, max_distance: int) -> jax.Array:
    """The distances at which buckets exact + 1, exact + 2, ... begin, int32."""
    if not exact < max_distance < 2**31:
        raise ValueError(
            f"max_distance must be above {exact}, half the buckets of a direction, "
            f"and below 2**31, got {max_distance}"
        )
    edges = []
    for step in range(1, steps):
        # (n / exact) ** steps >= (max_distance / exact) ** step, in whole numbers;
        # the float is only where the search begins.
        target = max_distance**step * exact ** (steps - step)
        edge = round(exact * math.exp(math.log(max_distance / exact) * step / steps))
        while (edge - 1) ** steps >= target:
            edge -= 1
        while edge**steps < target:
            edge += 1
        edges.append(edge)
    return jnp.asarray(np.array(edges, np.int32))
