"""The product with a kernel that many projections of one input share."""

import jax
from jax import lax


def widening(
    x: jax.Array, kernel: jax.Array, dimension_numbers, *, precision=None, **options
) -> jax.Array:
    """`lax.dot_general` whose gradient of the kernel has `x` on its left.

    dL/dkernel[d, f] = sum_t x[t, d] dL/dy[t, f]

    is the same number in either order, but XLA on a CPU copies the left operand into
    another order first, in passes that it joins with whatever made it. Derived by jax,
    that is the gradient of every output; this way it is `x`, once for all projections
    of one input and as wide as the narrower side. In a training step of 4 layers of
    256 channels it is a fifth of the time.

    Args:
      x: `[..., *inputs]`, all of `inputs` contracted.
      kernel: `[*inputs, *outputs]`.
      dimension_numbers: of `lax.dot_general`, as above, without batch axes.
      precision: of both products.
      options: further ones of `lax.dot_general`, for the forward product.

    Returns:
      `[..., *outputs]`. One reverse-mode derivative can be taken.

    Raises:
      ValueError: the axes are others than these.

    Example:
      >>> import jax.numpy as jnp
      >>> x, kernel = jnp.ones((5, 2)), jnp.ones((2, 3))
      >>> jax.grad(lambda k: widening(x, k, (((1,), (0,)), ((), ()))).sum())(kernel)
      Array([[5., 5., 5.],
             [5., 5., 5.]], dtype=float32)
    """
    (inputs, of_kernel), batch = dimension_numbers
    count = len(inputs)
    last = tuple(range(x.ndim - count, x.ndim))
    if (
        tuple(inputs) != last
        or tuple(of_kernel) != tuple(range(count))
        or any(map(len, batch))
    ):
        raise ValueError(
            f"dimension_numbers must contract the last axes of x {x.shape} with the "
            f"first of kernel {kernel.shape}, got {dimension_numbers}"
        )

    def forward_product(x, kernel):
        return lax.dot_general(
            x, kernel, dimension_numbers, precision=precision, **options
        )

    @jax.custom_vjp
    def product(x, kernel):
        return forward_product(x, kernel)

    def forward(x, kernel):
        return forward_product(x, kernel), (x, kernel)

    def backward(saved, gradient):
        x, kernel = saved
        (to_x,) = jax.linear_transpose(lambda x: forward_product(x, kernel), x)(
            gradient
        )
        rows = tuple(range(x.ndim - count))
        to_kernel = lax.dot_general(
            x, gradient, ((rows, rows), ((), ())), precision=precision
        )
        # The gradient that comes in may be wider, by `preferred_element_type`.
        return to_x, to_kernel.astype(kernel.dtype)

    product.defvjp(forward, backward)
    return product(x, kernel)
