"""`widening` is `lax.dot_general`, with another order in one gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rope_jax.nn.products import widening

DIMENSIONS = (((2,), (0,)), ((), ()))


def test_values_and_gradients_are_those_of_float64():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, 5)), rng.normal(size=(5, 4, 6))
    weights = rng.normal(size=(2, 3, 4, 6))

    def loss(x, kernel):
        return (widening(x, kernel, DIMENSIONS) * weights.astype(np.float32)).sum()

    value, (to_x, to_kernel) = jax.value_and_grad(loss, (0, 1))(
        jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)
    )
    product = np.einsum("btd,dnh->btnh", x, kernel)
    np.testing.assert_allclose(value, (product * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        to_x, np.einsum("btnh,dnh->btd", weights, kernel), atol=1e-5
    )
    np.testing.assert_allclose(
        to_kernel, np.einsum("btd,btnh->dnh", x, weights), atol=1e-5
    )


def test_one_copy_of_x_serves_the_gradients_of_two_kernels():
    """What it is for: the left operand of both products is the same transposed x."""
    shapes = [(8, 32, 16), (16, 48), (16, 48)]
    x, gate, up = (jnp.ones(shape) for shape in shapes)

    def lefts(product):
        def loss(gate, up):
            return (product(x, gate, DIMENSIONS) * product(x, up, DIMENSIONS)).sum()

        equations = jax.make_jaxpr(jax.grad(loss, (0, 1)))(gate, up).jaxpr.eqns
        dots = [e for e in equations if e.primitive.name == "dot_general"]
        over_rows = [e for e in dots if len(e.params["dimension_numbers"][0][0]) == 2]
        return [equation.invars[0].aval.shape for equation in over_rows]

    assert lefts(widening) == [(8, 32, 16)] * 2
    assert lefts(lax.dot_general) == [(8, 32, 48)] * 2


def test_types_are_those_of_the_operands():
    x, kernel = jnp.ones((2, 3, 5), jnp.bfloat16), jnp.ones((5, 4), jnp.bfloat16)
    pull = jax.vjp(lambda *args: widening(*args, DIMENSIONS), x, kernel)[1]
    grads = pull(jnp.ones((2, 3, 4), jnp.bfloat16))
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 2
    np.testing.assert_array_equal(grads[1].astype(np.float32), np.full((5, 4), 6))


def test_wider_outputs_leave_gradients_in_the_types_of_the_operands():
    x, kernel = jnp.ones((2, 3, 5), jnp.bfloat16), jnp.ones((5, 4), jnp.bfloat16)

    def loss(x, kernel):
        out = widening(x, kernel, DIMENSIONS, preferred_element_type=jnp.float32)
        assert out.dtype == jnp.float32
        return out.sum()

    to_x, to_kernel = jax.grad(loss, (0, 1))(x, kernel)
    assert (to_x.dtype, to_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(to_x.astype(np.float32), np.full((2, 3, 5), 4))
    np.testing.assert_array_equal(to_kernel.astype(np.float32), np.full((5, 4), 6))


def test_other_axes_are_refused():
    x, kernel = jnp.ones((2, 3, 5)), jnp.ones((4, 5))
    with pytest.raises(ValueError, match=r"dimension_numbers must contract the last"):
        widening(x, kernel, (((2,), (1,)), ((), ())))
