"""Rotary position encoding: rotate, undo, and move from one position to another.

Letters: B batch, T time, N heads, H head dim, R rotary pairs. Arrays are
[..., T, N, H]; the first 2R of the H channels turn and the rest pass through.
"""

import functools

import jax
import jax.numpy as jnp

from rope_jax.functional.angles import (
    align,
    check_inv_freq,
    check_positions,
    check_positions_fit,
    is_exact,
    mixed_angles,
    multi_axis_angles,
    rope_angles,
    rope_cos_sin,
)
from rope_jax.functional.attention_target import target_platform
from rope_jax.functional.frequencies import default
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.layouts import (
    check_array,
    check_layout,
    convert_layout,
    convert_projection,
)
from rope_jax.functional.phases import cos_sin, phase
from rope_jax.functional.xpos import xpos_block, xpos_scale

__all__ = [
    "apply_rope",
    "convert_layout",
    "convert_projection",
    "mixed_angles",
    "multi_axis_angles",
    "rerotate",
    "rope",
    "rope_angles",
    "xpos_block",
    "xpos_scale",
]


def _per_head(table: jax.Array, x: jax.Array, name: str) -> jax.Array:
    """Return a [..., T, R] or [..., T, N, R] table with the rank of `x`, checked."""
    if table.ndim == 0 or table.ndim > x.ndim:
        raise ValueError(
            f"{name} must be [..., T, R] or [..., T, N, R] for x of shape {x.shape}, "
            f"got shape {table.shape}"
        )
    shape = table.shape
    if table.ndim < x.ndim:
        shape = (*shape[:-1], 1, shape[-1])
        shape = (1,) * (x.ndim - len(shape)) + shape
    fits = all(
        size in (1, wanted)
        for size, wanted in zip(shape[:-1], x.shape[:-1], strict=True)
    )
    if not fits or shape[-3] != x.shape[-3]:
        raise ValueError(
            f"{name} does not fit x of shape {x.shape}, got shape {table.shape}"
        )
    return table.reshape(shape)


def _keep(table: jax.Array) -> jax.Array:
    """Return the table bit for bit, computed once and not for every head and row.

    XLA on CPU counts cosine and sine as cheap and computes them anew for each element
    that uses them: three times the time of the whole rotation. It never repeats a
    division, so the table ends in one, by a 1 that the compiler cannot foresee.
    """
    return table / (table == table).astype(table.dtype)


@functools.partial(jax.jit, static_argnames="layout")
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> jax.Array:
    """Turn the first channels of `x` by tables of its rank, in float32 or better."""
    pairs = cos.shape[-1]
    wider = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    cos, sin = _keep(cos.astype(wider.dtype)), _keep(sin.astype(wider.dtype))
    starts, stride = ((0, pairs), 1) if layout == "half" else ((0, 1), 2)
    first, second = (
        jax.lax.slice_in_dim(wider, start, start + stride * (pairs - 1) + 1, stride, -1)
        for start in starts
    )
    turned = first * cos - second * sin, second * cos + first * sin
    one_by_one = x.dtype != wider.dtype and target_platform() == "cpu"
    if layout == "interleaved" and one_by_one:
        # XLA on CPU rounds to 16 bits one by one where a select has a stride of 2.
        joined = jnp.stack(turned, axis=-1).reshape(*x.shape[:-1], 2 * pairs)
        rest = x[..., 2 * pairs :]
        return jnp.concatenate([joined.astype(x.dtype), rest], axis=-1)
    channel = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    # `full_like` has the sharding of `x`, which the condition of a select must have.
    constant = functools.partial(jax.lax.full_like, x, dtype=jnp.int32)
    if layout == "half":
        is_first = channel < constant(pairs)
    else:
        is_first = channel & constant(1) == constant(0)
    # Two arrays with gaps, and a select, are one pass over `x` for XLA on CPU. A
    # concatenation is one for each operand, and a pass reads all of `x`.
    result = jnp.where(is_first, *_spread(turned, starts, stride, x.shape[-1]))
    if 2 * pairs < x.shape[-1]:
        result = jnp.where(channel < constant(2 * pairs), result, wider)
    return result.astype(x.dtype)


def _spread(
    parts: tuple[jax.Array, ...], starts: tuple[int, ...], stride: int, width: int
) -> list[jax.Array]:
    """Put the channels of each part at start, start + stride, ... of `width`."""
    zero = jnp.zeros((), parts[0].dtype)
    others = [(0, 0, 0)] * (parts[0].ndim - 1)
    taken = stride * (parts[0].shape[-1] - 1) + 1
    return [
        jax.lax.pad(part, zero, [*others, (start, width - start - taken, stride - 1)])
        for part, start in zip(parts, starts, strict=True)
    ]


def apply_rope(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    layout: str = "half",
    inverse: bool = False,
) -> jax.Array:
    """Rotate `x` by given cosines and sines.

    Each pair (a, b) of channels becomes (a cos - b sin, b cos + a sin). The first 2R
    channels turn; the others are returned bit for bit. Compute the tables once and
    apply them to queries and keys, or in every layer.

    Args:
      x: [..., T, N, H], floating point. 16-bit input is rotated in float32 and only
        the result is rounded.
      cos: cosines [..., T, R], the same for all heads, or [..., T, N, R] where it has
        the rank of `x`. May carry an attention factor.
      sin: sines, shaped as `cos`.
      layout: "half" pairs channel i with i + R, "interleaved" 2i with 2i + 1.
      inverse: undo the rotation, an attention factor in the tables included.

    Returns:
      array of the shape and dtype of `x`.

    Raises:
      ValueError: when the layout is unknown, 2R exceeds H, or shapes or dtypes do not
        fit.

    >>> angles = rope_angles(jnp.array([1]), default(4).inv_freq)
    >>> import numpy as np
    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    >>> y = apply_rope(x, jnp.cos(angles), jnp.sin(angles))
    >>> print(np.asarray(y).round(4))
    [[[-1.9841  1.9599  2.4624  4.0198]]]

    Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864), section 3.4.2, eq. 34.
    """
    check_layout(layout)
    cos, sin = jnp.asarray(cos), jnp.asarray(sin)
    if cos.shape != sin.shape:
        raise ValueError(
            f"cos and sin must have one shape, got {cos.shape} and {sin.shape}"
        )
    x = check_array(x, 2 * (cos.shape[-1] if cos.ndim else 0))
    cos, sin = _per_head(cos, x, "cos"), _per_head(sin, x, "sin")
    if inverse:
        # The matrix is att * R(angle): its inverse is R(-angle) / att, and
        # att ** 2 = cos ** 2 + sin ** 2.
        wide = jnp.promote_types(cos.dtype, jnp.float32)
        cos, sin = cos.astype(wide), sin.astype(wide)
        square = cos * cos + sin * sin
        cos, sin = cos / square, -sin / square
    return _rotate(x, cos, sin, layout)


def _lift(
    positions: jax.Array, frequencies: Frequencies, x: jax.Array, name: str
) -> tuple[jax.Array, jax.Array]:
    """Return positions [..., T] of rank `x.ndim - 2` and inv_freq [1 or N, R]."""
    positions = check_positions(positions, name=name)
    check_positions_fit(positions, x, name)
    lead = (1,) * (x.ndim - 2 - positions.ndim)
    inv_freq = check_inv_freq(frequencies.inv_freq, (1, 2))
    if inv_freq.ndim == 1:
        inv_freq = inv_freq[None, :]
    elif inv_freq.shape[0] not in (1, x.shape[-2]):
        raise ValueError(
            f"frequencies must have one ladder, or one for each of {x.shape[-2]} "
            f"heads, got inv_freq of shape {inv_freq.shape}"
        )
    return positions.reshape(lead + positions.shape), inv_freq


def _turn(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    factor: float | jax.Array,
    layout: str,
) -> jax.Array:
    """Turn `x` by tables of its rank and multiply what turns by `factor`."""
    if not isinstance(factor, float) or factor != 1.0:
        factor = jnp.asarray(factor, jnp.float32)
        cos, sin = cos * factor, sin * factor
    return _rotate(x, cos, sin, layout)


def _check_frequencies(frequencies: Frequencies, name: str = "frequencies") -> None:
    if not isinstance(frequencies, Frequencies):
        raise ValueError(f"{name} must be a Frequencies, got {type(frequencies)}")


def rope(
    x: jax.Array,
    positions: jax.Array | None = None,
    frequencies: Frequencies | None = None,
    *,
    layout: str = "half",
    inverse: bool = False,
) -> jax.Array:
    """Rotate queries or keys by their positions.

    Pair i of the token at position p turns by the angle p * inv_freq[i] and is
    multiplied by the attention factor f: (a, b) becomes
    f * (a cos - b sin, b cos + a sin). Scores of rotated queries and keys depend on
    the distance of their positions only. Angles are exact for integer positions and
    host frequencies (see `rope_angles`); nothing is cached, and no position is too
    large. NumPy positions of 64 bits beyond int32 are exact where `rope` is called
    eagerly, but JAX cuts them to 32 bits on the way into a jitted function.

    Args:
      x: [..., T, N, H], floating point. 16-bit input is rotated in float32 and only
        the result is rounded.
      positions: [T], or [..., T] that broadcasts with the leading axes of `x`;
        integers, or float32; may be traced. None means 0 .. T-1.
      frequencies: the `Frequencies` of any builder; 2R may be less than H, and the
        other channels then pass through bit for bit. None means `default(H)`.
      layout: "half" pairs channel i with i + R (Llama in Hugging Face form, Gemma),
        "interleaved" pairs 2i with 2i + 1 (RoFormer, GPT-J, Llama of Meta).
      inverse: undo the rotation, the attention factor included.

    Returns:
      array of the shape and dtype of `x`.

    Raises:
      ValueError: when the layout is unknown, the rotary width is odd or exceeds H, or
        shapes or dtypes do not fit.

    >>> import numpy as np
    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    >>> print(np.asarray(rope(x, jnp.array([1]))).round(4))
    [[[-1.9841  1.9599  2.4624  4.0198]]]

    Source: Su et al. 2021, "RoFormer" (arXiv 2104.09864), section 3.4.2, eq. 34.
    """
    check_layout(layout)
    if frequencies is None:
        frequencies = default(check_array(x).shape[-1])
    _check_frequencies(frequencies)
    x = check_array(x, frequencies.rotary_dim)
    if positions is None:
        positions = jnp.arange(x.shape[-3], dtype=jnp.int32)
    cos, sin = rope_cos_sin(*_lift(positions, frequencies, x, "positions"))
    factor = frequencies.attention_factor
    if inverse:
        sin, factor = -sin, 1 / factor
    return _turn(x, cos, sin, factor, layout)


def rerotate(
    x: jax.Array,
    from_positions: jax.Array,
    to_positions: jax.Array,
    frequencies: Frequencies,
    to_frequencies: Frequencies | None = None,
    *,
    layout: str = "half",
) -> jax.Array:
    """Move rotated keys to other positions, or to other frequencies, in one rotation.

    The result is `rope(raw, to_positions, to_frequencies)` for
    `x = rope(raw, from_positions, frequencies)`: pair i turns by
    to_positions * to_inv_freq[i] - from_positions * inv_freq[i] and is multiplied by
    the ratio of the attention factors. The two phases are subtracted before they are
    rounded, so that the move is as exact as a fresh rotation. Start from the keys as
    first cached where you can: rounding of `x` adds up over repeated moves.

    Args:
      x: [..., T, N, H] rotated keys.
      from_positions: [T] or [..., T], the positions `x` was rotated with.
      to_positions: [T] or [..., T], the positions wanted.
      frequencies: the `Frequencies` that `x` was rotated with.
      to_frequencies: the `Frequencies` wanted, of the same rotary width. None means
        the same.
      layout: layout of `x`, as in `rope`.

    Returns:
      array of the shape and dtype of `x`.

    Raises:
      ValueError: when the two frequency sets differ in width, or as for `rope`.

    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
    >>> cached = rope(x, jnp.array([1_000_007]))
    >>> moved = rerotate(cached, jnp.array([1_000_007]), jnp.array([7]), default(4))
    >>> bool(jnp.allclose(moved, rope(x, jnp.array([7])), atol=1e-6))
    True

    Source: R(b) R(a)^-1 = R(b - a), Su et al. 2021, "RoFormer" (arXiv 2104.09864),
    section 3.4.2; use as in Xiao et al. 2023, "StreamingLLM" (arXiv 2309.17453).
    """
    check_layout(layout)
    to_frequencies = frequencies if to_frequencies is None else to_frequencies
    _check_frequencies(frequencies)
    _check_frequencies(to_frequencies, "to_frequencies")
    if frequencies.rotary_dim != to_frequencies.rotary_dim:
        raise ValueError(
            "to_frequencies must have the rotary width of frequencies, "
            f"{frequencies.rotary_dim}, got {to_frequencies.rotary_dim}"
        )
    x = check_array(x, frequencies.rotary_dim)
    ends = (
        _lift(from_positions, frequencies, x, "from_positions"),
        _lift(to_positions, to_frequencies, x, "to_positions"),
    )
    if all(is_exact(*end) for end in ends):
        start, stop = (phase(*align(*end)) for end in ends)
        cos, sin = cos_sin(stop - start)
    else:
        start, stop = (rope_angles(*end) for end in ends)
        cos, sin = jnp.cos(stop - start), jnp.sin(stop - start)
    factor = to_frequencies.attention_factor / frequencies.attention_factor
    return _turn(x, cos, sin, factor, layout)
