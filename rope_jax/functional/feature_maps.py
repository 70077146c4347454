r"""Feature maps of linear attention: positive vectors whose products make a kernel.

Attention with the weights phi(q) . phi(k) needs one pass over the tokens instead of one
over all pairs. A feature map is a function `(x, is_query) -> features` of queries or
keys `[..., T, N, H]`. Its result is an array `[..., T, N, M]`, or :class:`Features`
where the size of a row is kept apart as a logarithm. The maps here do the latter for
keys: what is left lies in (0, 1 + epsilon], so that nothing overflows or vanishes
whatever the norms, and no maximum over other tokens (which would let the future leak
into the past) is needed.

Letters: T time, N heads, H head dim, M number of features.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rope_jax.functional.frequency_set import check_number
from rope_jax.functional.layouts import check_array

# What products with a projection can hold in float32.
_LARGEST = 1e30

FeatureFunction = Callable[[jax.Array, bool], "jax.Array | Features"]


class Features(NamedTuple):
    """Features as `values * exp(log_scale)`, one logarithm for each row.

    Attributes:
      values: `[..., T, N, M]`, positive.
      log_scale: `[..., T, N]`, in nats, finite, of any size.
    """

    values: jax.Array
    log_scale: jax.Array

    def dense(self) -> jax.Array:
        """The features themselves, `[..., T, N, M]`; may overflow or vanish.

        >>> Features(jnp.ones((1, 2)), jnp.zeros(1)).dense().tolist()
        [[1.0, 1.0]]
        """
        return self.values * jnp.exp(self.log_scale)[..., None]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["projection"],
    meta_fields=["kernel", "scale", "epsilon"],
)
@dataclasses.dataclass(frozen=True)
class RandomFeatures:
    """A feature map with a random projection: see `favor_softmax`, `favor_relu`.

    A pytree whose only leaf is the projection, so that it can be an argument of a
    jitted function and be redrawn without compiling again.
    """

    projection: jax.Array
    kernel: Callable
    scale: float | None
    epsilon: float

    def __call__(self, x: jax.Array, is_query: bool) -> "jax.Array | Features":
        """Features `[..., T, N, M]` of queries or keys `[..., T, N, H]`."""
        num_features, head_dim = self.projection.shape
        x = _wide(x)
        if x.shape[-1] != head_dim:
            raise ValueError(
                f"projection must be [M, {x.shape[-1]}] for a head dim of "
                f"{x.shape[-1]}, got shape {[num_features, head_dim]}"
            )
        scale = head_dim**-0.5 if self.scale is None else self.scale
        x = jnp.clip(x, -_LARGEST, _LARGEST) * math.sqrt(scale)
        products = jnp.einsum(
            "...h,mh->...m",
            x,
            self.projection.astype(x.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
        values, log_scale = self.kernel(x, products)
        values = values + self.epsilon
        if is_query:
            return values
        return Features(values, log_scale - 0.5 * math.log(num_features))


def favor_projection(key: jax.Array, head_dim: int, num_features: int) -> jax.Array:
    r"""Draw the projection of orthogonal random features.

    Each row is Gaussian, N(0, I); rows within a block of H are orthogonal to one
    another, blocks are independent. The directions are those of a uniformly random
    orthogonal matrix (QR of a Gaussian one, signs corrected) and the norms are drawn
    apart from them, from the chi distribution with H degrees of freedom.

    The same key gives the same features. To redraw every 1,000 steps, in a model whose
    step is traced, use `jax.random.fold_in(key, step // 1000)`.

    Args:
      key: a JAX random key.
      head_dim: H.
      num_features: M; the last block is cut where M is no multiple of H.

    Returns:
      float32 [M, H].

    Raises:
      ValueError: when a size is not a positive integer.

    >>> projection = favor_projection(jax.random.key(0), 4, 8)
    >>> projection.shape
    (8, 4)
    >>> bool(abs(projection[0] @ projection[3]) < 1e-5)
    True

    Source: Choromanski et al. 2021, "Rethinking Attention with Performers" (arXiv
    2009.14794), section 2.4.
    """
    head_dim = _check_size("head_dim", head_dim)
    num_features = _check_size("num_features", num_features)
    blocks = -(-num_features // head_dim)
    of_directions, of_norms = jax.random.split(key)
    square = jax.random.normal(of_directions, (blocks, head_dim, head_dim), jnp.float32)
    directions, triangle = jnp.linalg.qr(square)
    # QR with a positive diagonal is unique, which makes the directions uniform.
    signs = jnp.sign(jnp.diagonal(triangle, axis1=-2, axis2=-1))
    directions = jnp.swapaxes(directions * signs[..., None, :], -1, -2)
    rows = jax.random.normal(of_norms, (num_features, head_dim), jnp.float32)
    norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return directions.reshape(blocks * head_dim, head_dim)[:num_features] * norms


def favor_softmax(
    projection: jax.Array, *, scale: float | None = None, epsilon: float = 1e-4
) -> RandomFeatures:
    r"""Positive random features of the softmax kernel (FAVOR+).

    .. math::
        \phi(x)_m = M^{-1/2} \left( e^{\ell_m} + \epsilon \max_n e^{\ell_n} \right),
        \qquad \ell_m = w_m \cdot x' - |x'|^2 / 2, \quad x' = x \sqrt{\text{scale}}

    so that phi(q) . phi(k) estimates exp(scale * q . k), without bias but for epsilon.
    The error falls as 1/sqrt(M), and grows fast with the norms of q and k.

    The maximum is that of the row itself: the features of a token depend on that token
    alone, in every form of linear attention. Epsilon bounds the quotient of RoFormer's
    equation 19, which is unbounded without it: two rows that share no large feature
    have a denominator of nearly nothing, and, rotated, a numerator that is not small.

    Args:
      projection: [M, H], of `favor_projection`.
      scale: of the dot products, as in `attention`; None means `H**-0.5`.
      epsilon: size of the floor, relative to the largest feature of the row.

    Returns:
      the map. Of queries it gives phi up to a positive factor for each row, which
      cancels in attention; `map(x, False).dense()` is phi itself.

    Raises:
      ValueError: when the projection is no [M, H] array, or a number is not positive.

    The kernel of a query and a key, against its estimate from 4,096 features:

    >>> features = favor_softmax(favor_projection(jax.random.key(0), 4, 4096))
    >>> query, key = jnp.array([[[0.8, 0, 0, 0.2]]]), jnp.array([[[0.6, 0, 0.2, 0]]])
    >>> phi_query, phi_key = (features(x, False).dense() for x in (query, key))
    >>> round(math.exp(0.48 / 2), 2), round(float(jnp.sum(phi_query * phi_key)), 1)
    (1.27, 1.3)

    Source: Choromanski et al. 2021, "Rethinking Attention with Performers" (arXiv
    2009.14794), lemma 1 and section 2.3. Their code adds epsilon relative to the
    largest feature of all keys, later ones included.
    """
    return _random_features(projection, _softmax_kernel, scale, epsilon)


def favor_relu(
    projection: jax.Array, *, scale: float | None = None, epsilon: float = 1e-3
) -> RandomFeatures:
    r"""Random ReLU features (the generalized attention of the Performer).

    .. math::
        \phi(x)_m = M^{-1/2} \left( r_m + \epsilon \max(1, \max_n r_n) \right),
        \qquad r_m = \max(0, w_m \cdot x \sqrt{\text{scale}})

    phi(q) . phi(k) estimates the arc-cosine kernel of order 1, which is
    |q'| |k'| (sin t + (pi - t) cos t) / (2 pi) for an angle t between q and k.

    Args:
      projection: [M, H], of `favor_projection`.
      scale: of the dot products; None means `H**-0.5`.
      epsilon: size of the floor, relative to the largest feature of the row or 1.

    Returns:
      the map, as for `favor_softmax`.

    Raises:
      ValueError: when the projection is no [M, H] array, or a number is not positive.

    >>> features = favor_relu(jnp.eye(2), scale=1.0)
    >>> features(jnp.array([[[2.0, -1.0]]]), True).round(3).tolist()
    [[[1.0010000467300415, 0.0010000000474974513]]]

    Source: Choromanski et al. 2021, "Rethinking Attention with Performers" (arXiv
    2009.14794), section 2.2; kernel: Cho & Saul 2009, "Kernel Methods for Deep
    Learning", equation 6.
    """
    return _random_features(projection, _relu_kernel, scale, epsilon)


def elu_plus_one(
    x: jax.Array, is_query: bool, *, epsilon: float = 1e-6
) -> "jax.Array | Features":
    """The deterministic feature map elu(x) + 1, with M = H features.

    phi(x)_m = f(x_m) + epsilon max_n f(x_n), where f(x) = 1 + x for x > 0 and exp(x)
    for x <= 0.

    Args:
      x: queries or keys, [..., T, N, H].
      is_query: leave out the size of each row, which cancels for queries.
      epsilon: size of the floor, relative to the largest feature of the row.

    Returns:
      features [..., T, N, H], float32 or better.

    Raises:
      ValueError: when `x` is not floating point, or epsilon is not positive.

    >>> elu_plus_one(jnp.array([[[1.0, 0.0]]]), False).dense().round(3).tolist()
    [[[2.0, 1.0]]]

    Source: Katharopoulos et al. 2020, "Transformers are RNNs" (arXiv 2006.16236),
    equation 7.
    """
    epsilon = check_number("epsilon", epsilon, above=0.0)
    x = _wide(x)
    logs = jnp.where(x > 0, jnp.log1p(jnp.maximum(x, 0)), x)
    values, log_scale = _by_largest(logs)
    values = values + epsilon
    return values if is_query else Features(values, log_scale)


def _softmax_kernel(x, products):
    values, largest = _by_largest(products)
    # The square is kept out of the values: it may be far larger than the spread, and
    # even overflow.
    log_scale = largest - 0.5 * jnp.sum(x * x, axis=-1)
    return values, jnp.maximum(log_scale, -_LARGEST)


def _relu_kernel(x, products):
    del x
    positive = jax.nn.relu(products)
    size = jnp.maximum(positive.max(-1, keepdims=True), 1)
    return positive / size, jnp.log(size[..., 0])


def _by_largest(logs):
    """Exponentials relative to the largest of each row, and its logarithm."""
    largest = logs.max(-1, keepdims=True)
    return jnp.exp(logs - largest), largest[..., 0]


def _random_features(projection, kernel, scale, epsilon):
    projection = jnp.asarray(projection)
    floating = jnp.issubdtype(projection.dtype, jnp.floating)
    if projection.ndim != 2 or 0 in projection.shape or not floating:
        raise ValueError(
            "projection must be a floating point [M, H] array, got "
            f"{projection.dtype} {list(projection.shape)}"
        )
    if scale is not None:
        scale = check_number("scale", scale, above=0.0)
    epsilon = check_number("epsilon", epsilon, above=0.0)
    return RandomFeatures(projection, kernel, scale, epsilon)


def _wide(x):
    x = check_array(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _check_size(name, size):
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be a positive integer, got {size!r}")
    return size
