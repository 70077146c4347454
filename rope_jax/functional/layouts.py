"""Which channels make a pair: the two layouts, and moving tensors between them.

"half" pairs channel i with i + R, "interleaved" pairs 2i with 2i + 1. Channels from 2R
on belong to no pair.
"""

import jax
import jax.numpy as jnp

LAYOUTS = ("half", "interleaved")


def check_layout(layout: str, *, name: str = "layout") -> str:
    """Return the layout, or raise naming it."""
    if layout not in LAYOUTS:
        raise ValueError(f"{name} must be 'half' or 'interleaved', got {layout!r}")
    return layout


def check_rotary_dim(rotary_dim: int | None, width: int) -> int:
    """Return the rotary width, the whole `width` where None, or raise naming it."""
    rotary_dim = width if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= width:
        raise ValueError(
            f"rotary_dim must be even and from 2 to the head dim {width}, got "
            f"{rotary_dim}"
        )
    return rotary_dim


def check_array(x: jax.Array, width: int = 0, *, name: str = "x") -> jax.Array:
    """Return [..., T, N, H] activations with `width` channels to turn, or raise."""
    x = jnp.asarray(x)
    if x.ndim < 3:
        raise ValueError(f"{name} must be [..., T, N, H], got shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, got dtype {x.dtype}")
    if width > x.shape[-1]:
        raise ValueError(
            f"rotary width must be at most the head dim {x.shape[-1]} of {name}, got "
            f"{width}"
        )
    return x


def convert_layout(
    x: jax.Array, *, source: str, target: str, rotary_dim: int | None = None
) -> jax.Array:
    """Return `x` with the channels of its last axis moved to another pairing.

    half -> interleaved: y[2i] = x[i], y[2i+1] = x[i+R]; interleaved -> half is the
    inverse. Rotation in one layout and conversion commute, and scores do not change
    when query and key are converted alike. Values are moved, never changed.

    Args:
      x: [..., H] activations, or any per-channel vector such as a QK-norm scale.
      source: layout of `x`, "half" or "interleaved".
      target: layout wanted.
      rotary_dim: number of channels 2R that turn; the rest stay. None means all H.

    Returns:
      array of the shape and dtype of `x`.

    Raises:
      ValueError: when a layout is unknown, or `rotary_dim` is odd or not within 2..H.

    >>> convert_layout(jnp.arange(6), source="half", target="interleaved").tolist()
    [0, 3, 1, 4, 2, 5]

    Source: the interleaved pairing is Su et al. 2021, "RoFormer" (arXiv 2104.09864),
    eq. 15; the half pairing is that of GPT-NeoX and Llama in Hugging Face form.
    """
    check_layout(source, name="source")
    check_layout(target, name="target")
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("x must be [..., H], got a scalar")
    rotary_dim = check_rotary_dim(rotary_dim, x.shape[-1])
    if source == target:
        return x
    pairs = rotary_dim // 2
    split = (2, pairs) if source == "half" else (pairs, 2)
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    turning = turning.reshape(*x.shape[:-1], *split)
    turning = jnp.swapaxes(turning, -1, -2).reshape(*x.shape[:-1], rotary_dim)
    return jnp.concatenate([turning, rest], axis=-1)


def convert_projection(
    kernel: jax.Array,
    *,
    num_heads: int,
    source: str,
    target: str,
    rotary_dim: int | None = None,
) -> jax.Array:
    """Return a query or key projection whose output channels follow another pairing.

    With converted query and key projections (kernel and bias; never the value's) a
    model gives the same scores under the target layout as before under the source.

    Args:
      kernel: kernel [D, N*H] or [D, N, H], or bias [N*H] or [N, H]; D is the input
        width. A rank-2 array whose first axis is `num_heads` long is a bias: give a
        kernel with D = N as [D, N, H]. PyTorch stores kernels transposed, [N*H, D].
      num_heads: number of heads N of this projection; for keys of grouped-query
        attention, the number of key/value heads.
      source: layout of the checkpoint, "half" or "interleaved".
      target: layout wanted.
      rotary_dim: number of channels 2R of a head that turn. None means all H.

    Returns:
      array of the shape and dtype of `kernel`.

    Raises:
      ValueError: when the shape does not fit `num_heads`, or as for `convert_layout`.

    >>> bias = jnp.array([0, 1, 2, 3, 10, 11, 12, 13])
    >>> convert_projection(bias, num_heads=2, source="interleaved",
    ...                    target="half").tolist()
    [0, 2, 1, 3, 10, 12, 11, 13]

    Source: as `convert_layout`.
    """
    kernel = jnp.asarray(kernel)
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    shape = kernel.shape
    flat = kernel.ndim == 1 or (kernel.ndim == 2 and shape[0] != num_heads)
    if kernel.ndim not in (1, 2, 3):
        raise ValueError(
            f"kernel must be [D, N*H], [D, N, H], [N*H] or [N, H], got shape {shape}"
        )
    heads = shape[-1] if flat else shape[-2]
    if heads % num_heads if flat else heads != num_heads:
        raise ValueError(
            f"kernel does not hold num_heads={num_heads} heads, got shape {shape}"
        )
    if flat:
        kernel = kernel.reshape(*shape[:-1], num_heads, heads // num_heads)
    converted = convert_layout(
        kernel, source=source, target=target, rotary_dim=rotary_dim
    )
    return converted.reshape(shape)
