"""Encodings that read the data: CoPE, DAPE, PoPE; the forget gate (FoX) and CABLE.

Pure functions of (params, positions, activations). Logits and biases are float32
`[..., N, T, S]`, logits already scaled by attention.

Letters: T query time, S key time, N heads, H head dim, P positions of CoPE, W hidden
width.
"""

import jax
import jax.numpy as jnp

from rope_jax.functional.distance import (
    parameter,
    per_head,
    relative_positions,
    to_rank,
)
from rope_jax.functional.forgetting import (
    RunningSum,
    accumulated_bias,
    cable_gates,
    cable_sums,
    fox_gates,
    fox_sums,
    init_cable,
    init_fox,
    rows_at,
    running_sum,
)
from rope_jax.functional.frequency_set import check_count
from rope_jax.functional.polar import init_pope, pope_key, pope_query

__all__ = [
    "RunningSum",
    "accumulated_bias",
    "cable_gates",
    "cable_sums",
    "cope_bias",
    "cope_positions",
    "dape_logits",
    "fox_gates",
    "fox_sums",
    "init_cable",
    "init_cope",
    "init_dape",
    "init_fox",
    "init_pope",
    "pope_key",
    "pope_query",
    "rows_at",
    "running_sum",
]


def init_cope(head_dim: int, *, num_positions: int = 64) -> dict[str, jax.Array]:
    """Zero embeddings of CoPE, as its authors start: `{"embedding": [P, H]}`.

    They are shared by the heads of one layer.

    Args:
      head_dim: H.
      num_positions: P, at least 2; positions from P - 1 on share the last embedding.

    Returns:
      `{"embedding": [P, H]}`, float32.

    Raises:
      ValueError: if `head_dim` is not positive or `num_positions` is below 2.

    >>> init_cope(8, num_positions=4)["embedding"].shape
    (4, 8)

    Source: Golovneva et al. 2024, CoPE (arXiv 2405.18719), the listing in the appendix.
    """
    head_dim = check_count("head_dim", head_dim)
    num_positions = check_count("num_positions", num_positions, at_least=2)
    return {"embedding": jnp.zeros((num_positions, head_dim), jnp.float32)}


def cope_positions(
    logits: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    mask: jax.Array | None = None,
    gates_after: jax.Array | None = None,
) -> jax.Array:
    """Contextual positions of CoPE: how many gates lie open from a key to the query.

    p_ts = sum(sigmoid(logits_tu) for u from s to t), over the keys that t may see

    Keys are in the order of their positions. Rows are independent. Blocks of keys go
    from the last to the first, each given the first column of the block after it::

        later = cope_positions(logits[..., 8:], query_positions, key_positions[8:])
        cope_positions(logits[..., :8], query_positions, key_positions[:8],
                       gates_after=later[..., 0])

    Args:
      logits: `[..., N, T, S]`, the scaled products of queries and keys.
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`; keys after the query have no gate.
      mask: boolean `[T, S]` or `[..., T, S]`, False where a key has no gate either.
      gates_after: float32 `[..., N, T]`, the gates of all the keys after this block.

    Returns:
      float32 `[..., N, T, S]`, in (fractional) positions, not yet limited to P - 1.

    Raises:
      ValueError: if positions are not integers.

    >>> logits = jnp.zeros((1, 1, 4))
    >>> cope_positions(logits, jnp.array([2]), jnp.arange(4))
    Array([[[1.5, 1. , 0.5, 0. ]]], dtype=float32)

    Source: Golovneva et al. 2024, CoPE (arXiv 2405.18719), equations 3 and 4.
    """
    seen = relative_positions(query_positions, key_positions) <= 0
    if mask is not None:
        rank = max(seen.ndim, mask.ndim)
        seen = to_rank(seen, rank) & to_rank(mask, rank)
    seen = seen[..., None, :, :]
    rank = max(seen.ndim, logits.ndim)
    seen, logits = to_rank(seen, rank), to_rank(logits, rank)
    gates = jnp.where(seen, jax.nn.sigmoid(logits.astype(jnp.float32)), 0.0)
    positions = jax.lax.cumsum(gates, axis=gates.ndim - 1, reverse=True)
    return positions if gates_after is None else positions + gates_after[..., None]


def cope_bias(
    params: dict[str, jax.Array],
    query: jax.Array,
    positions: jax.Array,
    *,
    scale: float = 1.0,
) -> jax.Array:
    """Bias of CoPE: the query's product with the embedding of a fractional position.

    With p limited to P - 1 and e[p] interpolated between its two neighbours::

        bias_ts = scale * q_t . e[p_ts]

    The query meets each of the P embeddings once and the products are interpolated.

    Args:
      params: `{"embedding": [P, H]}`, P at least 2.
      query: `[..., T, N, H]`, not scaled.
      positions: float32 `[..., N, T, S]` from `cope_positions`.
      scale: 1 as in the paper's listing and x-transformers; the authors' released
        code multiplies by H**-0.5.

    Returns:
      float32 `[..., N, T, S]`, to be added to the scaled logits.

    Raises:
      ValueError: if the embedding does not fit the query or has fewer than two rows.

    >>> params = {"embedding": jnp.array([[0.0], [1.0], [4.0]])}
    >>> positions = jnp.array([[[9.0, 1.5, 0.25]]])
    >>> cope_bias(params, jnp.ones((1, 1, 1)), positions)
    Array([[[4.  , 2.5 , 0.25]]], dtype=float32)

    Source: Golovneva et al. 2024, CoPE (arXiv 2405.18719), equation 5, appendix B.
    """
    table = parameter(params, "embedding", None, query.shape[-1])
    if table.shape[0] < 2:
        raise ValueError(
            f"params['embedding'] must have at least two rows, got {table.shape}"
        )
    products = scale * jnp.einsum(
        "...tnh,ph->...ntp",
        query.astype(jnp.float32),
        table,
        precision=jax.lax.Precision.HIGHEST,
    )
    limited = jnp.minimum(positions.astype(jnp.float32), table.shape[0] - 1.0)
    below = jnp.clip(limited.astype(jnp.int32), 0, table.shape[0] - 2)
    weight = limited - below.astype(jnp.float32)

    def product_at(index):
        return jnp.take_along_axis(products, index, axis=-1, mode="promise_in_bounds")

    return (1.0 - weight) * product_at(below) + weight * product_at(below + 1)


def init_dape(
    key: jax.Array, num_heads: int, *, width: int = 32
) -> dict[str, jax.Array]:
    """Network of DAPE, float32, uniform within 1/sqrt(inputs) of zero.

    `kernel_in` `[2N, W]`, logits before biases; `bias_in` `[W]`; `kernel_out`
    `[W, N]`; `bias_out` `[N]`. Each layer has its own.

    Args:
      key: a JAX random key.
      num_heads: N.
      width: hidden width W.

    Returns:
      A dict of the four arrays named above, float32.

    Raises:
      ValueError: if `num_heads` or `width` is not positive.

    >>> init_dape(jax.random.key(0), 4)["kernel_in"].shape
    (8, 32)

    Source: Zheng et al. 2024, DAPE (arXiv 2405.14722), and the code of its authors.
    """
    num_heads = check_count("num_heads", num_heads)
    width = check_count("width", width)
    keys = jax.random.split(key, 4)
    shapes = {
        "kernel_in": ((2 * num_heads, width), 2 * num_heads),
        "bias_in": ((width,), 2 * num_heads),
        "kernel_out": ((width, num_heads), width),
        "bias_out": ((num_heads,), width),
    }
    return {
        name: jax.random.uniform(k, shape, jnp.float32, -(fan**-0.5), fan**-0.5)
        for k, (name, (shape, fan)) in zip(keys, shapes.items(), strict=True)
    }


def dape_logits(
    params: dict[str, jax.Array], logits: jax.Array, bias: jax.Array
) -> jax.Array:
    """Logits of DAPE: a network over heads corrects a bias by what the logits say.

    out = logits + bias + kernel_out . leaky_relu(kernel_in . [logits, bias] + b) + b'

    It acts on every pair of query and key alone, across its N heads, so any block can
    be computed by itself. Masking comes after it: the logits must be finite.

    Args:
      params: as `init_dape` makes them.
      logits: `[..., N, T, S]`, scaled, not masked.
      bias: `[N, T, S]` or `[..., N, T, S]`, of ALiBi, KERPLE or FIRE.

    Returns:
      float32 `[..., N, T, S]`; a block takes W/N times its logits of memory on the way.

    Raises:
      ValueError: if a parameter does not fit the heads.

    >>> params = init_dape(jax.random.key(0), 2)
    >>> dape_logits(params, jnp.zeros((1, 2, 3, 4)), jnp.zeros((2, 3, 4))).shape
    (1, 2, 3, 4)

    Source: Zheng et al. 2024, DAPE (arXiv 2405.14722), section 3; the network is that
      of the authors' code.
    """
    num_heads = logits.shape[-3]
    kernel_out = parameter(params, "kernel_out", None, num_heads)
    width = kernel_out.shape[0]
    kernel_in = parameter(params, "kernel_in", 2 * num_heads, width)
    logits, bias = logits.astype(jnp.float32), bias.astype(jnp.float32)
    rank = max(logits.ndim, bias.ndim)
    logits, bias = to_rank(logits, rank), to_rank(bias, rank)

    def across_heads(x, kernel):
        return jnp.einsum(
            "...nts,nw->...wts", x, kernel, precision=jax.lax.Precision.HIGHEST
        )

    # The two halves of the first layer apart: the bias has no batch to repeat over.
    hidden = across_heads(logits, kernel_in[:num_heads])
    hidden += across_heads(bias, kernel_in[num_heads:])
    hidden += per_head(parameter(params, "bias_in", width), rank)
    correction = across_heads(jax.nn.leaky_relu(hidden, 0.01), kernel_out)
    correction += per_head(parameter(params, "bias_out", num_heads), rank)
    return logits + bias + correction
