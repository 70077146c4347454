"""Signed distances between positions, and the small pieces that biases share.

Letters: T query time, S key time, N heads.
"""

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = 2**31 - 1


def relative_positions(
    query_positions: jax.Array, key_positions: jax.Array
) -> jax.Array:
    """Signed distance of every key from every query: key minus query, in positions.

    Args:
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`; leading axes broadcast.

    Returns:
      int32 `[..., T, S]`, negative for keys of the past. Where the difference leaves
      int32 it is the largest number of its sign, +-(2**31 - 1).

    Raises:
      ValueError: if positions are not integer arrays with a time axis, their leading
        axes do not broadcast, or a host array leaves int32.

    >>> relative_positions(jnp.array([4, 5]), jnp.array([3, 4, 5]))
    Array([[-1,  0,  1],
           [-2, -1,  0]], dtype=int32)
    """
    query, key = _pairs(query_positions, key_positions)
    lag = key - query
    wrapped = ((key ^ query) & (key ^ lag)) < 0
    lag = jnp.where(wrapped, jnp.where(key < 0, -_LARGEST, _LARGEST), lag)
    return jnp.maximum(lag, -_LARGEST)


def distances(query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Absolute distance of every key from every query, in positions.

    It is formed in integers, exactly, and rounded once: nothing but the distance
    matters, wherever the positions lie.

    Args:
      query_positions: integer `[T]` or `[..., T]`.
      key_positions: integer `[S]` or `[..., S]`; leading axes broadcast.

    Returns:
      float32 `[..., T, S]`.

    Raises:
      ValueError: if positions are not integer arrays with a time axis, their leading
        axes do not broadcast, or a host array leaves int32.

    >>> distances(jnp.array([4]), jnp.array([1, 4, 6]))
    Array([[3., 0., 2.]], dtype=float32)
    """
    query, key = _pairs(query_positions, key_positions)
    # The difference of two int32 fits uint32 from the larger to the smaller.
    words = [x.astype(jnp.uint32) for x in (query, key)]
    distance = jnp.where(query >= key, words[0] - words[1], words[1] - words[0])
    return distance.astype(jnp.float32)


def fitting(x: jax.Array, name: str) -> jax.Array | np.ndarray:
    """Return `x` as an array, or raise naming it where host integers leave int32.

    JAX would keep their lowest 32 bits and say nothing.
    """
    if isinstance(x, jax.Array):
        return x
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        return jnp.asarray(x)
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.integer) and x.size:
        least, most = int(x.min()), int(x.max())
        if least < -_LARGEST - 1 or most > _LARGEST:
            raise ValueError(f"{name} must fit int32, got {least} to {most}")
    return x


def integers(x: jax.Array, name: str) -> jax.Array:
    """Return `x` as int32, or raise naming it."""
    x = fitting(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got dtype {x.dtype}")
    return jnp.asarray(x, jnp.int32)


def time_positions(x: jax.Array, name: str) -> jax.Array:
    """Return positions `[..., T]` as int32, or raise naming them."""
    x = integers(x, name)
    if x.ndim < 1:
        raise ValueError(f"{name} must have a time axis, got shape {x.shape}")
    return x


def parameter(params: dict[str, jax.Array], name: str, *shape: int | None) -> jax.Array:
    """Return `params[name]` in float32, or raise unless its shape fits.

    None in `shape` stands for any size.

    >>> parameter({"r1": jnp.ones(3)}, "r1", None).shape
    (3,)
    """
    if name not in params:
        raise ValueError(f"params must have {name!r}, got {sorted(params)}")
    value = jnp.asarray(params[name], jnp.float32)
    fits = value.ndim == len(shape) and all(
        want is None or want == size
        for want, size in zip(shape, value.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"params[{name!r}] must have shape ({sizes}), got {value.shape}"
        )
    return value


def per_head(x: jax.Array, rank: int) -> jax.Array:
    """`[N]` as `[..., N, 1, 1]` of `rank` axes, to meet a bias `[..., N, T, S]`."""
    return to_rank(x[:, None, None], rank)


def to_rank(x: jax.Array, rank: int) -> jax.Array:
    """`x` with axes of 1 in front, up to `rank` of them in all.

    >>> to_rank(jnp.ones((2, 3)), 4).shape
    (1, 1, 2, 3)
    """
    return jax.lax.expand_dims(x, range(rank - x.ndim))


@jax.custom_jvp
def clip_forward(x: jax.Array, low: float, high: float) -> jax.Array:
    """Clip the value and let the gradient taken at the clipped value through.

    A plain clip has no gradient outside its range: a parameter that was drawn there,
    or stepped there once, would never move again.

    >>> jax.grad(lambda x: 3 * clip_forward(x, 0.0, 1.0))(5.0)
    Array(3., dtype=float32, weak_type=True)
    """
    return jnp.clip(x, low, high)


@clip_forward.defjvp
def _clip_forward_jvp(primals, tangents):
    return clip_forward(*primals), tangents[0]


def _pairs(query_positions, key_positions):
    """Positions as `[..., T, 1]` and `[..., 1, S]`, of one rank."""
    query = time_positions(query_positions, "query_positions")[..., :, None]
    key = time_positions(key_positions, "key_positions")[..., None, :]
    rank = max(query.ndim, key.ndim)
    query, key = to_rank(query, rank), to_rank(key, rank)
    for size, other in zip(query.shape, key.shape, strict=True):
        if size != other and 1 not in (size, other):
            raise ValueError(
                "the leading axes of query_positions and key_positions must fit, got "
                f"shapes {query.shape} and {key.shape}"
            )
    return query, key
