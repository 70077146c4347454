"""PoPE: polar coordinates that keep content (magnitude) and position (angle) apart.

Letters: T query time, S key time, N heads, H head dim.
"""

import jax
import jax.numpy as jnp

from rope_jax.functional import frequencies as builders
from rope_jax.functional.distance import (
    clip_forward,
    parameter,
    time_positions,
    to_rank,
)
from rope_jax.functional.frequency_set import check_count
from rope_jax.functional.rotary import rope_angles


def init_pope(
    num_heads: int, head_dim: int, *, key: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Phases of PoPE: `{"phase": [N, H]}`, float32 radians in [-2 pi, 0].

    Zero, or uniform over the range where a `key` is given. N counts key heads.

    Args:
      num_heads: key heads N.
      head_dim: H.
      key: a JAX random key, or None for zeros.

    Returns:
      `{"phase": [N, H]}`, float32, radians.

    Raises:
      ValueError: if a size is not positive.

    >>> init_pope(2, 8)["phase"].shape
    (2, 8)

    Source: Gopalakrishnan et al. 2025, PoPE (arXiv 2509.10534), section 3.
    """
    shape = (check_count("num_heads", num_heads), check_count("head_dim", head_dim))
    if key is None:
        return {"phase": jnp.zeros(shape, jnp.float32)}
    return {"phase": jax.random.uniform(key, shape, jnp.float32, -2 * jnp.pi, 0.0)}


def pope_query(
    query: jax.Array,
    positions: jax.Array,
    frequencies: builders.Frequencies | None = None,
) -> jax.Array:
    """Features of a query in PoPE: content as magnitude, position as angle.

    out = softplus(q_c) * [cos(p f_c), sin(p f_c)],  c = 0 .. H-1

    The product with the features of a key is sum_c softplus(q_c) softplus(k_c)
    cos((s - t) f_c + phase_c). Attention keeps the scale H**-0.5 of the H channels
    that come in, not of the 2H that go out.

    Args:
      query: `[..., T, N, H]`.
      positions: integer `[T]` or `[..., T]`.
      frequencies: H of them, radians per position; None is
        `frequencies.default(2 * H)`, theta ** (-c / H).

    Returns:
      `[..., T, N, 2H]` in the dtype of the query, cosines before sines.

    Raises:
      ValueError: if there are not H frequencies.

    >>> pope_query(jnp.zeros((1, 1, 2)), jnp.array([0])).round(4)
    Array([[[0.6931, 0.6931, 0.    , 0.    ]]], dtype=float32)

    Source: Gopalakrishnan et al. 2025, PoPE (arXiv 2509.10534), section 3.
    """
    return _polar(query, positions, frequencies, None)


def pope_key(
    params: dict[str, jax.Array],
    key: jax.Array,
    positions: jax.Array,
    frequencies: builders.Frequencies | None = None,
) -> jax.Array:
    """Features of a key in PoPE, whose angles carry a learned phase.

    out = softplus(k_c) * [cos(p f_c + phase_c), sin(p f_c + phase_c)]

    A phase outside [-2 pi, 0] acts as the nearest end and still receives the gradient
    taken there.

    Args:
      params: `{"phase": [N, H]}`, radians.
      key: `[..., S, N, H]`.
      positions: integer `[S]` or `[..., S]`.
      frequencies: as for `pope_query`.

    Returns:
      `[..., S, N, 2H]` in the dtype of the key, cosines before sines.

    Raises:
      ValueError: if there are not H frequencies, or the phase has another shape.

    >>> params = {"phase": jnp.full((1, 1), -jnp.pi / 2)}
    >>> pope_key(params, jnp.zeros((1, 1, 1)), jnp.array([0])).round(4)
    Array([[[-0.    , -0.6931]]], dtype=float32)

    Source: Gopalakrishnan et al. 2025, PoPE (arXiv 2509.10534), section 3.
    """
    phase = parameter(params, "phase", key.shape[-2], key.shape[-1])
    return _polar(key, positions, frequencies, clip_forward(phase, -2 * jnp.pi, 0.0))


def _polar(x, positions, frequencies, phase):
    width = x.shape[-1]
    frequencies = builders.default(2 * width) if frequencies is None else frequencies
    if frequencies.inv_freq.shape != (width,):
        raise ValueError(
            f"frequencies must be {width}, one for each channel, got shape "
            f"{frequencies.inv_freq.shape}"
        )
    angles = rope_angles(time_positions(positions, "positions"), frequencies.inv_freq)
    angles = to_rank(angles[..., None, :], x.ndim)
    if phase is not None:
        angles = angles + to_rank(phase, angles.ndim)
    magnitude = frequencies.attention_factor * jax.nn.softplus(x.astype(jnp.float32))
    features = [magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)]
    return jnp.concatenate(features, axis=-1).astype(x.dtype)
