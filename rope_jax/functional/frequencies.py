"""Inverse-frequency builders: the ladders of rotary encodings, in float64 on the host.

Every builder returns `Frequencies(inv_freq, attention_factor)`. Letters: d is the
rotary width `dim`, R = d/2 the number of pairs, i = 0 .. R-1 a pair, f_i its inverse
frequency in radians per position, s the context extension `factor`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional.frequency_bands import (
    llama3,
    ntk_by_parts,
    yarn,
    yarn_magnitude,
)
from rope_jax.functional.frequency_lengths import dynamic_ntk, longrope
from rope_jax.functional.frequency_set import (
    Frequencies,
    check_number,
    check_width,
    ladder,
)

__all__ = [
    "Frequencies",
    "axial",
    "default",
    "dynamic_ntk",
    "hope",
    "linear",
    "llama3",
    "longrope",
    "mixed",
    "ntk",
    "ntk_by_parts",
    "proportional",
    "yarn",
    "yarn_magnitude",
]


def default(dim: int, *, theta: float = 10_000.0) -> Frequencies:
    """Return the frequencies of RoFormer: a geometric ladder from 1 down.

    f_i = theta ** (-2i / d)

    Args:
      dim: rotary width d, even: the number of channels that turn.
      theta: base of the ladder, greater than 0.

    Returns:
      `Frequencies` with float64 inv_freq [dim/2], radians per position.

    Raises:
      ValueError: when `dim` is odd or not positive, or `theta` is not positive.

    >>> default(8).inv_freq
    array([1.   , 0.1  , 0.01 , 0.001])

    Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864), section 3.2.2, eq. 15.
    """
    return Frequencies(ladder(dim, theta))


def linear(dim: int, *, theta: float = 10_000.0, factor: float) -> Frequencies:
    """Return the frequencies of position interpolation: all divided by `factor`.

    f'_i = f_i / s, so that position s*p turns as position p did.

    Args:
      dim: rotary width d, even.
      theta: base of the ladder, greater than 0.
      factor: how many times longer the context becomes, at least 1.

    Returns:
      `Frequencies` with float64 inv_freq [dim/2], radians per position.

    Raises:
      ValueError: when `factor` is below 1, or as for `default`.

    >>> linear(8, factor=4).inv_freq
    array([0.25   , 0.025  , 0.0025 , 0.00025])

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via
    Positional Interpolation" (arXiv 2306.15595), eq. 4.
    """
    return Frequencies(ladder(dim, theta) / check_number("factor", factor, at_least=1))


def ntk(dim: int, *, theta: float = 10_000.0, factor: float) -> Frequencies:
    """Return NTK-aware frequencies: the base grows so that the slowest pair slows by s.

    theta' = theta * s ** (d / (d - 2)); f'_i = theta' ** (-2i / d). The fastest pair
    stays as it was and the slowest is divided by exactly s.

    Args:
      dim: rotary width d, even and at least 4.
      theta: base of the ladder, greater than 0.
      factor: how many times longer the context becomes, at least 1.

    Returns:
      `Frequencies` with float64 inv_freq [dim/2], radians per position.

    Raises:
      ValueError: when `factor` is below 1, `dim` below 4, or as for `default`.

    >>> ntk(4, factor=8).inv_freq
    array([1.     , 0.00125])

    Source: bloc97 2023, "NTK-Aware Scaled RoPE"; Peng et al. 2023, "YaRN"
    (arXiv 2309.00071), section 3.1, eq. 15 and 16.
    """
    dim = check_width("dim", dim)
    check_number("dim", dim, at_least=4)
    theta = check_number("theta", theta, above=0.0)
    factor = check_number("factor", factor, at_least=1)
    return Frequencies(ladder(dim, theta * factor ** (dim / (dim - 2))))


def proportional(
    head_dim: int,
    *,
    theta: float = 10_000.0,
    proportion: float,
    factor: float = 1.0,
) -> Frequencies:
    """Return p-RoPE frequencies: the ladder of the whole head, its slow end set to 0.

    With n = int(proportion * head_dim // 2): f_i = theta ** (-2i / head_dim) / s for
    i < n, and 0 for the other pairs, which then do not depend on position. All pairs
    stay pairs: this is not a partial rotary width, whose ladder would be steeper.

    Args:
      head_dim: head dim H, even.
      theta: base of the ladder, greater than 0.
      proportion: share of the pairs that turn, from 0 to 1.
      factor: divides the frequencies, at least 1.

    Returns:
      `Frequencies` with float64 inv_freq [head_dim/2], radians per position.

    Raises:
      ValueError: when `proportion` is outside 0..1, `factor` is below 1, `head_dim` is
        odd or not positive, or `theta` is not positive.

    >>> proportional(8, proportion=0.5).inv_freq
    array([1. , 0.1, 0. , 0. ])

    Source: Barbero et al. 2024, "Round and Round We Go! What makes Rotary Positional
    Encodings useful?" (arXiv 2410.06205), section 6.1; used by Gemma 4.
    """
    head_dim = check_width("head_dim", head_dim)
    proportion = check_number("proportion", proportion, at_least=0)
    if proportion > 1:
        raise ValueError(f"proportion must be at most 1, got {proportion}")
    factor = check_number("factor", factor, at_least=1)
    inv_freq = ladder(head_dim, theta) / factor
    inv_freq[int(proportion * head_dim // 2) :] = 0.0
    return Frequencies(inv_freq)


def hope(
    dim: int, *, theta: float = 10_000.0, original_max_position_embeddings: int
) -> Frequencies:
    """Return HoPE frequencies: pairs that never complete a turn in training become 0.

    f_i stays where its wavelength 2 pi / f_i is at most the training length, and is 0
    elsewhere: those pairs carry content only.

    Args:
      dim: rotary width d, even.
      theta: base of the ladder, greater than 0.
      original_max_position_embeddings: training length in positions.

    Returns:
      `Frequencies` with float64 inv_freq [dim/2], radians per position.

    Raises:
      ValueError: when `original_max_position_embeddings` is not positive, or as for
        `default`.

    >>> hope(8, original_max_position_embeddings=512).inv_freq
    array([1. , 0.1, 0. , 0. ])

    Source: Chen et al. 2024, "HoPE: A Novel Positional Encoding Without Long-Term Decay
    for Enhanced Context Awareness and Extrapolation" (arXiv 2410.21216), section 4.
    """
    inv_freq = ladder(dim, theta)
    length = check_number(
        "original_max_position_embeddings", original_max_position_embeddings, above=0
    )
    return Frequencies(np.where(inv_freq * length >= 2 * np.pi, inv_freq, 0.0))


def axial(
    dim: int, *, axes: int = 2, theta: float = 100.0, strided: bool = False
) -> Frequencies:
    """Return ladders for `multi_axis_angles(..., style="axial")`.

    Each axis of the grid (height, width, ...) turns d / (2 * axes) pairs.

    * `strided=False`: one ladder for every axis, f_j = theta ** (-2j * axes / d)
      (RoPE-ViT; also the vision towers of Qwen).
    * `strided=True`: axis a takes every axes-th rung of the ladder of the whole width,
      f_j = theta ** (-2 (j * axes + a) / d); the ladders follow one another (Pixtral,
      with theta 10,000).

    Args:
      dim: rotary width d of a head, a multiple of 2 * axes.
      axes: number of grid axes.
      theta: base of the ladder, greater than 0.
      strided: whether the axes share one ladder rung by rung.

    Returns:
      `Frequencies` with float64 inv_freq, radians per step: [dim / (2 * axes)], or
      [dim / 2] where strided. The matching sections are (dim / (2 * axes),) * axes.

    Raises:
      ValueError: when `axes` is below 1, `dim` is no positive multiple of 2 * axes, or
        `theta` is not positive.

    >>> axial(16).inv_freq
    array([1.        , 0.31622777, 0.1       , 0.03162278])
    >>> axial(8, theta=10_000.0, strided=True).inv_freq
    array([1.   , 0.01 , 0.1  , 0.001])

    Source: Heo et al. 2024, "Rotary Position Embedding for Vision Transformer"
    (arXiv 2403.13298), section 3.2, eq. 9; Agrawal et al. 2024, "Pixtral 12B"
    (arXiv 2410.07073), section 2.2.
    """
    axes = int(check_number("axes", axes, at_least=1))
    dim = check_width("dim", dim, multiple=2 * axes)
    if strided:
        return Frequencies(ladder(dim, theta).reshape(-1, axes).T.reshape(-1))
    return Frequencies(ladder(dim // axes, theta))


def mixed(
    key: jax.Array,
    dim: int,
    *,
    num_heads: int,
    theta: float = 10.0,
    rotate: bool = True,
) -> Frequencies:
    """Return initial frequencies of RoPE-Mixed: a 2-D direction a pair, to be learned.

    Pair i of head n turns by x * f[0, n, i] + y * f[1, n, i]. At the start the pairs of
    a head lie on two orthogonal directions, at a random angle phi_n to the axes, with
    magnitudes m_j = theta ** (-4j / d): f[:, n, j] = m_j (cos phi_n, sin phi_n) and
    f[:, n, j + d/4] = m_j (-sin phi_n, cos phi_n).

    Args:
      key: typed JAX random key.
      dim: rotary width d, a multiple of 4.
      num_heads: number of heads N.
      theta: base of the magnitudes, greater than 0.
      rotate: whether each head gets its own random angle; False makes every angle 0.

    Returns:
      `Frequencies` with a float32 `jax.Array` inv_freq [2, num_heads, dim/2], radians
      per step of each axis, for `mixed_angles`.

    Raises:
      ValueError: when `dim` is no positive multiple of 4, `num_heads` is below 1, or
        `theta` is not positive.

    >>> mixed(jax.random.key(0), 8, num_heads=3).inv_freq.shape
    (2, 3, 4)

    Source: Heo et al. 2024, "Rotary Position Embedding for Vision Transformer"
    (arXiv 2403.13298), section 3.2, eq. 12.
    """
    dim = check_width("dim", dim, multiple=4)
    num_heads = int(check_number("num_heads", num_heads, at_least=1))
    magnitude = jnp.asarray(ladder(dim // 2, theta), jnp.float32)[None, :]
    phi = jnp.zeros((num_heads, 1), jnp.float32)
    if rotate:
        phi = jax.random.uniform(key, (num_heads, 1), jnp.float32, 0.0, 2 * np.pi)
    cos, sin = magnitude * jnp.cos(phi), magnitude * jnp.sin(phi)
    along = jnp.stack([cos, sin])
    across = jnp.stack([-sin, cos])
    return Frequencies(jnp.concatenate([along, across], axis=-1))
