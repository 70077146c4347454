"""Absolute encodings, added to the token embeddings: computed, never looked up.

Letters: T time, D width of the embedding.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional.distance import integers
from rope_jax.functional.frequency_set import check_count, check_number
from rope_jax.functional.rotary import rope_angles

ORDERS = ("interleaved", "concatenated")
SPACINGS = ("paper", "endpoint")


def sinusoidal(
    positions: jax.Array,
    dim: int,
    *,
    max_timescale: float = 10_000.0,
    order: str = "interleaved",
    spacing: str = "paper",
) -> jax.Array:
    """Return the sinusoidal encoding of any positions.

    With D the width `dim`, b `max_timescale`, n = ceil(D / 2) sines and p a position::

        angle_i = p * b ** (-2i / D)          spacing "paper",    i = 0 .. n-1
        angle_i = p * b ** (-i / (n - 1))     spacing "endpoint"

    "paper" is the published formula; its slowest wave falls short of 2 pi b. "endpoint"
    forces it there, as tensor2tensor and fairseq do. Neighbouring channels are
    sin(angle_0), cos(angle_0), sin(angle_1), ... in order "interleaved" (the paper);
    "concatenated" puts all sines before all cosines (tensor2tensor, fairseq). An odd
    width keeps the extra sine: it has no cosine beside it.

    The angle of an integer position is exact to 1e-6 radians for every int32, traced
    or not, and there is no table to run out of.

    Args:
      positions: integer, [T] or [..., T]; the first is 0. Also float32, where angles
        are the plain float32 product.
      dim: width D, at least 1.
      max_timescale: b, greater than 0: the slowest wave is 2 pi b positions long, or
        nearly so.
      order: "interleaved" or "concatenated".
      spacing: "paper" or "endpoint".

    Returns:
      float32 [..., T, D].

    Raises:
      ValueError: when `dim` or `max_timescale` is not positive, `order` or `spacing` is
        unknown, or positions are 16-bit floats, which cannot hold them.

    >>> print(sinusoidal(jnp.arange(2), 4))
    [[0.         1.         0.         1.        ]
     [0.84147096 0.5403023  0.00999983 0.99995   ]]

    Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv 1706.03762),
    section 3.5.
    """
    dim = check_count("dim", dim)
    max_timescale = check_number("max_timescale", max_timescale, above=0.0)
    _check_choice("order", order, ORDERS)
    _check_choice("spacing", spacing, SPACINGS)
    index = np.arange((dim + 1) // 2, dtype=np.float64)
    last = max(len(index) - 1, 1)
    exponent = 2 * index / dim if spacing == "paper" else index / last
    angles = rope_angles(positions, max_timescale**-exponent)
    sines, cosines = jnp.sin(angles), jnp.cos(angles)
    if order == "concatenated":
        return jnp.concatenate([sines, cosines[..., : dim // 2]], axis=-1)
    pairs = jnp.stack([sines, cosines], axis=-1)
    return pairs.reshape(*angles.shape[:-1], 2 * len(index))[..., :dim]


def integer_encoding(positions: jax.Array, dim: int) -> jax.Array:
    """Return the position itself, in every channel.

    The simplest encoding there is, and a poor one: its size grows without bound.

    Args:
      positions: integer, [T] or [..., T].
      dim: width D, at least 1.

    Returns:
      float32 [..., T, D], exact for positions up to 2**24 in magnitude and rounded to
      float32 beyond.

    Raises:
      ValueError: when positions are not integers or `dim` is not positive.

    >>> integer_encoding(jnp.arange(3), 2).tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]

    Source: the starting point of C. Fleetwood 2024, "You could have designed state of
    the art positional encoding" (huggingface.co/blog/designing-positional-encoding).
    """
    dim = check_count("dim", dim)
    values = integers(positions, "positions").astype(jnp.float32)
    return jnp.broadcast_to(values[..., None], (*values.shape, dim))


def binary_encoding(positions: jax.Array, dim: int) -> jax.Array:
    """Return the binary digits of the position: bit c in channel c, lowest first.

    Digits are those of two's complement: a negative position has ones in all channels
    above its own bits. `dim` channels tell 2**dim positions apart; from there on the
    encoding repeats. With 32 channels or more all int32 positions differ.

    Args:
      positions: integer, [T] or [..., T].
      dim: width D, at least 1; 2**dim should exceed the longest context.

    Returns:
      float32 [..., T, D] of zeros and ones.

    Raises:
      ValueError: when positions are not integers or `dim` is not positive.

    >>> binary_encoding(jnp.array([1, 6, -1]), 4).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]

    Source: C. Fleetwood 2024, as in `integer_encoding`.
    """
    dim = check_count("dim", dim)
    positions = integers(positions, "positions")[..., None]
    # Shifting by 32 or more is undefined; bit 31 of int32 is the sign, which repeats.
    channel = jnp.minimum(jnp.arange(dim, dtype=jnp.int32), 31)
    channel = channel.reshape((1,) * (positions.ndim - 1) + (dim,))
    return ((positions >> channel) & 1).astype(jnp.float32)


def interpolate_table(table: jax.Array, length: int) -> jax.Array:
    """Stretch a learned table of positions to another length.

    Linear interpolation with the ends aligned: with L rows, new position p reads the
    table at p * (L - 1) / (length - 1), between two rows. Position interpolation for a
    learned table: every position falls into the range that was trained, the first
    row stays the first and the last the last. The same length returns the table as it
    is; a shorter one squeezes it.

    Args:
      table: [L, D], one row per position.
      length: rows of the result, at least 1; a single row is the first.

    Returns:
      [length, D] in the dtype of `table`, interpolated in float32.

    Raises:
      ValueError: when `table` is not [L, D] in floating point or `length` is not
        positive.

    >>> interpolate_table(jnp.array([[0.0], [2.0], [6.0]]), 5).tolist()
    [[0.0], [1.0], [2.0], [4.0], [6.0]]

    Source: the rule of Chen et al. 2023, "Extending Context Window of Large Language
    Models via Position Interpolation" (arXiv 2306.15595), on a table; ends aligned as
    for the positions of vision models that change resolution.
    """
    table = jnp.asarray(table)
    if (
        table.ndim != 2
        or not len(table)
        or not jnp.issubdtype(table.dtype, jnp.floating)
    ):
        raise ValueError(
            f"table must be floating point [L, D], got {table.dtype} {table.shape}"
        )
    length = check_count("length", length)
    # Whole numbers on the host: rows that fall on a row of the table copy it exactly.
    row, rest = np.divmod(np.arange(length) * (len(table) - 1), max(length - 1, 1))
    weight = jnp.asarray(rest / max(length - 1, 1), jnp.float32)[:, None]
    values = table.astype(jnp.float32)
    low, high = values[row], values[np.minimum(row + 1, len(table) - 1)]
    return (low + weight * (high - low)).astype(table.dtype)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
