"""Angles of positions, in radians: one axis, several axes, and learned directions.

Letters: T time, N heads, R rotary pairs.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.phases import cos_sin, phase, radians

Array = np.ndarray | jax.Array


def check_positions(positions: Array, *, name: str = "positions") -> Array:
    """Return positions as an array of a type that can hold them, or raise."""
    if not isinstance(positions, jax.Array):
        positions = np.asarray(positions)
    kind = positions.dtype
    if jnp.issubdtype(kind, jnp.integer):
        return positions
    if not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(f"{name} must be integers or floats, got dtype {kind}")
    if kind.itemsize < 4:
        # bfloat16 knows 769 of the first 4096 integers; the harm is done before here.
        raise ValueError(f"{name} cannot be held in 16 bits, got dtype {kind}")
    return positions


def check_positions_fit(positions: Array, x: jax.Array, name: str) -> None:
    """Raise unless positions are [T] or broadcast to the [..., T] of `x`."""
    lead, wanted = positions.shape[:-1], x.shape[:-3]
    wanted = wanted[len(wanted) - len(lead) :]
    fits = positions.ndim and positions.shape[-1] == x.shape[-3]
    fits = fits and len(lead) == len(wanted)
    fits = fits and all(p in (1, w) for p, w in zip(lead, wanted, strict=True))
    if not fits:
        raise ValueError(
            f"{name} must be [T] or [..., T] for x [..., T, N, H] of shape {x.shape}, "
            f"got shape {positions.shape}"
        )


def check_inv_freq(inv_freq: Array, ranks: tuple[int, ...]) -> Array:
    """Return inverse frequencies as a float64 host array or a JAX one, or raise."""
    if isinstance(inv_freq, Frequencies):
        raise ValueError("inv_freq must be an array, got Frequencies: pass its field")
    if not isinstance(inv_freq, jax.Array):
        inv_freq = np.asarray(inv_freq, dtype=np.float64)
    elif not jnp.issubdtype(inv_freq.dtype, jnp.floating) or (
        inv_freq.dtype.itemsize < 4
    ):
        raise ValueError(
            f"inv_freq must be float32 or float64, got dtype {inv_freq.dtype}"
        )
    if inv_freq.ndim not in ranks:
        raise ValueError(
            f"inv_freq must have rank {' or '.join(map(str, ranks))}, got shape "
            f"{inv_freq.shape}"
        )
    return inv_freq


def is_exact(positions: Array, inv_freq: Array) -> bool:
    """Whether the phases of these positions can be formed in integers."""
    host = not isinstance(inv_freq, jax.Array)
    return host and jnp.issubdtype(positions.dtype, jnp.integer)


def align(positions: Array, inv_freq: Array) -> tuple[Array, Array]:
    """Give [..., T] positions and [R] or [N, R] inv_freq a common rank, to broadcast.

    One axis of the positions is added for each axis of the frequencies.
    """
    expanded = positions.reshape(positions.shape + (1,) * inv_freq.ndim)
    return expanded, inv_freq.reshape((1,) * positions.ndim + inv_freq.shape)


def _angles(positions: Array, inv_freq: Array) -> jax.Array:
    """Return float32 angles of two arrays of one rank."""
    if is_exact(positions, inv_freq):
        return radians(phase(positions, inv_freq))
    return jnp.asarray(positions, jnp.float32) * jnp.asarray(inv_freq, jnp.float32)


def rope_angles(positions: jax.Array, inv_freq: np.ndarray | jax.Array) -> jax.Array:
    """Return the angles position * inv_freq of a rotary encoding.

    angle[..., t, i] = positions[..., t] * inv_freq[i], in radians.

    Exactness. For integer positions and a host `inv_freq` (NumPy, float64) the product
    is formed in 64-bit fixed point and reduced to [-pi, pi]; it is within 1e-6 of the
    float64 product modulo 2 pi at every position of up to 32 bits, negative ones and
    traced ones included. Where `inv_freq` is a `jax.Array` (learned, traced, or float32
    on purpose, to reproduce another library bit for bit) or positions are floating
    point, it is the plain float32 product, not reduced, whose error grows with the
    position: 4e-3 at 131,072.

    Args:
      positions: [..., T] positions, integers of any type, or float32; traced or not.
      inv_freq: [R], or [N, R] for one ladder per head, radians per position.

    Returns:
      float32 angles [..., T, R], or [..., T, N, R], radians.

    Raises:
      ValueError: when `positions` is neither integer nor at least 32-bit floating
        point, or `inv_freq` is of another rank or a 16-bit array.

    >>> angles = rope_angles(jnp.array([1, 10]), np.array([1.0, 0.01]))
    >>> print(np.asarray(angles).round(4))   # 10 radians are -2.5664 and one turn
    [[ 1.      0.01  ]
     [-2.5664  0.1   ]]

    Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864), section 3.2.2, eq. 15.
    """
    positions = check_positions(positions)
    return _angles(*align(positions, check_inv_freq(inv_freq, (1, 2))))


def rope_cos_sin(positions: Array, inv_freq: Array) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of `rope_angles`, float32, without forming the angles.

    Exact where those are: then within 1.1e-7 of the float64 cosine and sine.
    """
    positions = check_positions(positions)
    pair = align(positions, check_inv_freq(inv_freq, (1, 2)))
    if is_exact(*pair):
        return cos_sin(phase(*pair))
    angles = _angles(*pair)
    return jnp.cos(angles), jnp.sin(angles)


def _axis_of_pair(sections: Sequence[int], axes: int, style: str) -> np.ndarray:
    """Return the axis [R] that turns each pair."""
    if style != "interleaved":
        return np.repeat(np.arange(len(sections)) % axes, sections)
    pairs = sum(sections)
    axis = np.zeros(pairs, dtype=np.int64)
    for index, size in enumerate(sections):
        if index == 0:
            continue
        if size and index + axes * (size - 1) >= pairs:
            raise ValueError(
                f"sections of style 'interleaved' must fit every {axes}-th of {pairs} "
                f"pairs, got {tuple(sections)}"
            )
        axis[index : axes * size : axes] = index
    return axis


def _check_sections(sections: Sequence[int], axes: int, style: str) -> tuple[int, ...]:
    if style not in ("axial", "chunked", "interleaved"):
        raise ValueError(
            f"style must be 'axial', 'chunked' or 'interleaved', got {style!r}"
        )
    sections = tuple(sections)
    whole = all(size == int(size) and size >= 0 for size in sections)
    if not whole or sum(sections) == 0:
        raise ValueError(f"sections must be numbers of pairs, got {sections}")
    enough = len(sections) >= axes if style == "chunked" else len(sections) == axes
    if not enough:
        raise ValueError(
            f"sections must have one entry for each of {axes} axes, got {sections}"
        )
    return tuple(int(size) for size in sections)


def multi_axis_angles(
    positions: jax.Array,
    inv_freq: np.ndarray | jax.Array,
    *,
    sections: Sequence[int],
    style: str,
) -> jax.Array:
    """Return the angles of tokens that have a position on each of several axes.

    Each pair turns with one axis. The styles differ in which, and in the ladder:

    * "axial": axis a turns sections[a] pairs in a row. `inv_freq` is the ladder of one
      axis, of which each axis takes its first sections[a] rungs; or the ladders of all
      axes one after another (see `frequencies.axial`). RoPE-ViT, Pixtral.
    * "chunked": one ladder over all pairs, cut into sections; section k turns with axis
      k modulo the number of axes. M-RoPE of Qwen2-VL, sections (16, 24, 24).
    * "interleaved": one ladder over all pairs; of A axes, axis a > 0 turns the
      sections[a] pairs a, a + A, a + 2A, ..., and axis 0 the others. M-RoPE of
      Qwen3-VL, sections (24, 20, 20).

    Exact for integer positions and a host `inv_freq`, as `rope_angles`.

    Args:
      positions: [..., T, axes] positions, integers of any type, or float32.
      inv_freq: [R] radians per step; for "axial" the ladder of one axis, or all R.
      sections: pairs per axis, R in all.
      style: "axial", "chunked" or "interleaved".

    Returns:
      float32 angles [..., T, R], radians: cosine and sine of them go to `apply_rope`.

    Raises:
      ValueError: when `sections` does not sum to the number of pairs or does not match
        the axes, the style is unknown, or as for `rope_angles`.

    >>> ladder = np.array([1.0, 0.1, 0.01, 0.001])
    >>> angles = multi_axis_angles(np.array([[3, 5, 7]]), ladder, sections=(1, 1, 2),
    ...                            style="chunked")
    >>> print(np.asarray(angles).round(4))
    [[3.    0.5   0.07  0.007]]

    Source: Heo et al. 2024, "RoPE-ViT" (arXiv 2403.13298), eq. 9; Wang et al. 2024,
    "Qwen2-VL" (arXiv 2409.12191), section 2.1; Qwen Team 2025, "Qwen3-VL"
    (arXiv 2511.21631), interleaved MRoPE.
    """
    positions = check_positions(positions)
    if positions.ndim < 2:
        raise ValueError(f"positions must be [..., T, axes], got {positions.shape}")
    axes = positions.shape[-1]
    sections = _check_sections(sections, axes, style)
    inv_freq = check_inv_freq(inv_freq, (1,))
    pairs = sum(sections)
    if style == "axial" and inv_freq.size == max(sections):
        inv_freq = inv_freq[np.concatenate([np.arange(size) for size in sections])]
    if inv_freq.size != pairs:
        raise ValueError(
            f"sections must sum to the {inv_freq.size} pairs of inv_freq, got "
            f"{sections}, whose sum is {pairs}"
        )
    of_pair = positions[..., _axis_of_pair(sections, axes, style)]
    return _angles(of_pair, inv_freq.reshape((1,) * (of_pair.ndim - 1) + (-1,)))


def mixed_angles(positions: jax.Array, inv_freq: np.ndarray | jax.Array) -> jax.Array:
    """Return the angles of RoPE-Mixed: every pair turns with all axes at once.

    angle[..., t, n, i] = sum over axes a of positions[..., t, a] * inv_freq[a, n, i]

    Args:
      positions: [..., T, axes] positions, integers of any type, or float32.
      inv_freq: [axes, N, R] radians per step, usually learned (`frequencies.mixed`).
        Exact for integer positions where it is a host array, as `rope_angles`.

    Returns:
      float32 angles [..., T, N, R], radians.

    Raises:
      ValueError: when the numbers of axes differ, or as for `rope_angles`.

    >>> angles = mixed_angles(np.array([[2, 3]]), np.array([[[0.1]], [[0.01]]]))
    >>> print(np.asarray(angles).round(4))
    [[[0.23]]]

    Source: Heo et al. 2024, "Rotary Position Embedding for Vision Transformer"
    (arXiv 2403.13298), section 3.2, eq. 12.
    """
    positions = check_positions(positions)
    inv_freq = check_inv_freq(inv_freq, (3,))
    axes = inv_freq.shape[0]
    if positions.ndim < 2 or positions.shape[-1] != axes:
        raise ValueError(
            f"positions must be [..., T, {axes}] for inv_freq of {axes} axes, got "
            f"{positions.shape}"
        )
    along = [align(positions[..., axis], inv_freq[axis]) for axis in range(axes)]
    if is_exact(positions, inv_freq):
        return radians(sum(phase(*pair) for pair in along))
    return sum(_angles(*pair) for pair in along)
