"""The two pairings: moving activations, kernels and biases between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.rotary import convert_layout, convert_projection, rope

TO_HALF = {"source": "interleaved", "target": "half"}
TO_INTERLEAVED = {"source": "half", "target": "interleaved"}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_r08_channel_order():
    x = jnp.arange(8)
    np.testing.assert_array_equal(
        convert_layout(x, **TO_HALF), [0, 2, 4, 6, 1, 3, 5, 7]
    )
    np.testing.assert_array_equal(
        convert_layout(x, **TO_INTERLEAVED), [0, 4, 1, 5, 2, 6, 3, 7]
    )
    np.testing.assert_array_equal(
        convert_layout(convert_layout(x, **TO_HALF), **TO_INTERLEAVED), x
    )
    np.testing.assert_array_equal(convert_layout(x, source="half", target="half"), x)
    np.testing.assert_array_equal(
        convert_layout(x, rotary_dim=4, **TO_HALF), [0, 2, 1, 3, 4, 5, 6, 7]
    )


@pytest.mark.parametrize("width", [8, 6])
def test_r08_rotation_and_conversion_commute(width):
    x = normal(2, 5, 3, 8)
    positions = jnp.array([0, 1, 7, -4, 131_071])
    built = frequencies.default(width)
    first = rope(
        convert_layout(x, rotary_dim=width, **TO_HALF), positions, built, layout="half"
    )
    second = convert_layout(
        rope(x, positions, built, layout="interleaved"), rotary_dim=width, **TO_HALF
    )
    np.testing.assert_allclose(first, second, atol=1e-6)


def attention(x, query_kernel, key_kernel, biases, value_kernel, layout, heads):
    """Grouped-query causal attention with biases, written out."""
    query_bias, key_bias = biases
    query = jnp.einsum("btd,dnh->btnh", x, query_kernel) + query_bias[None, None]
    key = jnp.einsum("btd,dnh->btnh", x, key_kernel) + key_bias[None, None]
    value = jnp.einsum("btd,dnh->btnh", x, value_kernel)
    query, key = rope(query, layout=layout), rope(key, layout=layout)
    key, value = (jnp.repeat(each, heads, axis=2) for each in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
    return scores, jnp.einsum("bnts,bsnh->btnh", weights, value)


def test_r08_projections_keep_scores_and_output():
    """Four query heads, two key heads: each projection has its own head count."""
    x = normal(2, 6, 16, seed=1)
    query_kernel, key_kernel = normal(16, 4, 8, seed=2), normal(16, 2, 8, seed=3)
    biases = normal(4, 8, seed=4), normal(2, 8, seed=5)
    value_kernel = normal(16, 2, 8, seed=6)
    wanted = attention(
        x, query_kernel, key_kernel, biases, value_kernel, "interleaved", 2
    )
    converted = attention(
        x,
        convert_projection(query_kernel, num_heads=4, **TO_HALF),
        convert_projection(key_kernel, num_heads=2, **TO_HALF),
        (
            convert_projection(biases[0], num_heads=4, **TO_HALF),
            convert_projection(biases[1], num_heads=2, **TO_HALF),
        ),
        value_kernel,
        "half",
        2,
    )
    for before, after in zip(wanted, converted, strict=True):
        scale = float(jnp.abs(before).max())
        np.testing.assert_allclose(after, before, atol=1e-6 * scale)
    # Without the conversion the scores are others: the comparison can fail.
    unconverted = attention(
        x, query_kernel, key_kernel, biases, value_kernel, "half", 2
    )
    assert float(jnp.abs(unconverted[0] - wanted[0]).max()) > 1.0


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_r08_the_four_shapes_of_a_projection_agree(rotary_dim):
    kernel, bias = normal(16, 3, 8), normal(3, 8, seed=1)
    options = {"num_heads": 3, "rotary_dim": rotary_dim, **TO_HALF}
    split = convert_projection(kernel, **options)
    np.testing.assert_array_equal(
        split, convert_layout(kernel, rotary_dim=rotary_dim, **TO_HALF)
    )
    flat = convert_projection(kernel.reshape(16, 24), **options)
    np.testing.assert_array_equal(flat, split.reshape(16, 24))
    split = convert_projection(bias, **options)
    np.testing.assert_array_equal(
        split, convert_layout(bias, rotary_dim=rotary_dim, **TO_HALF)
    )
    np.testing.assert_array_equal(
        convert_projection(bias.ravel(), **options), split.ravel()
    )
    back = convert_projection(
        convert_projection(kernel, **options),
        num_heads=3,
        rotary_dim=rotary_dim,
        **TO_INTERLEAVED,
    )
    np.testing.assert_array_equal(back, kernel)


def test_conversion_keeps_dtype_and_works_traced():
    x = normal(2, 3, 8).astype(jnp.bfloat16)
    converted = jax.jit(lambda x: convert_layout(x, **TO_HALF))(x)
    assert converted.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        converted, x[..., jnp.array([0, 2, 4, 6, 1, 3, 5, 7])]
    )


def test_wrong_arguments_are_named():
    x = jnp.arange(8)
    with pytest.raises(ValueError, match=r"source.*'neox'"):
        convert_layout(x, source="neox", target="half")
    with pytest.raises(ValueError, match=r"target.*'gptj'"):
        convert_layout(x, source="half", target="gptj")
    for rotary_dim in (3, 0, 10, -2):
        with pytest.raises(ValueError, match=rf"rotary_dim.*8.*{rotary_dim}"):
            convert_layout(x, rotary_dim=rotary_dim, **TO_HALF)
    with pytest.raises(ValueError, match=r"rotary_dim.*7"):
        convert_layout(jnp.arange(7), **TO_HALF)
    with pytest.raises(ValueError, match=r"num_heads=3.*\(16, 8\)"):
        convert_projection(jnp.ones((16, 8)), num_heads=3, **TO_HALF)
    with pytest.raises(ValueError, match=r"num_heads=3.*\(16, 2, 8\)"):
        convert_projection(jnp.ones((16, 2, 8)), num_heads=3, **TO_HALF)
    with pytest.raises(ValueError, match=r"num_heads.*0"):
        convert_projection(jnp.ones((16, 8)), num_heads=0, **TO_HALF)
    with pytest.raises(ValueError, match=r"kernel.*\(1, 16, 2, 8\)"):
        convert_projection(jnp.ones((1, 16, 2, 8)), num_heads=2, **TO_HALF)
