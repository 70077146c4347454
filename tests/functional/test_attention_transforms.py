"""Attention under jit, vmap, grad, scan and shard_map, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax.functional.alibi import alibi_bias
from rope_jax.functional.attention import attention

each_implementation = pytest.mark.parametrize(
    "implementation", ["xla", "chunked", "blockwise"]
)


def arrays(num_queries, num_keys, batch=2, num_groups=1, width=4):
    """Query, key, value and a cotangent for two query heads."""
    rng = np.random.default_rng(1)
    lengths = num_queries, num_keys, num_keys, num_queries
    heads = 2, num_groups, num_groups, 2
    return tuple(
        jnp.asarray(rng.standard_normal((batch, length, count, width)), jnp.float32)
        for length, count in zip(lengths, heads, strict=True)
    )


@each_implementation
def test_no_batch_axis_and_two_batch_axes(implementation):
    query, key, value, _ = arrays(130, 130, batch=6)
    run = jax.jit(functools.partial(attention, implementation=implementation))
    right = run(query, key, value)
    np.testing.assert_allclose(run(query[5], key[5], value[5]), right[5], atol=1e-6)
    folded = (x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value))
    np.testing.assert_allclose(run(*folded)[1, 2], right[5], atol=1e-6)


@each_implementation
def test_vmap_over_everything_a_bias_closes_over(implementation):
    query, key, value, _ = arrays(130, 130, batch=3)
    slopes = jnp.asarray([[0.5, 0.25], [1.0, 2.0], [0.0, 0.1]])
    positions = jnp.arange(130)[None] * jnp.array([[1], [2], [3]])

    @functools.partial(jax.value_and_grad, argnums=(0, 4))
    def one(query, key, value, positions, slopes):
        out = attention(
            query,
            key,
            value,
            query_positions=positions,
            key_positions=positions,
            bias=functools.partial(alibi_bias, slopes),
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(out))

    together = jax.jit(jax.vmap(one))(query, key, value, positions, slopes)
    arguments = query[2], key[2], value[2], positions[2], slopes[2]
    for got, right in zip(
        jax.tree.leaves(together),
        jax.tree.leaves(jax.jit(one)(*arguments)),
        strict=True,
    ):
        np.testing.assert_allclose(got[2], right, rtol=2e-5, atol=2e-5)


@each_implementation
def test_traced_positions_compile_once(implementation):
    query, key, value, _ = arrays(5, 140)
    traces = []

    @jax.jit
    def run(offset):
        traces.append(offset)
        return attention(
            query,
            key,
            value,
            query_positions=jnp.arange(5) + offset,
            implementation=implementation,
        )

    for offset in (0, 3, 135):
        right = attention(query, key[:, : offset + 5], value[:, : offset + 5])
        np.testing.assert_allclose(run(offset), right, atol=1e-6)
    assert len(traces) == 1


@each_implementation
def test_bias_function_closes_over_traced_positions_in_a_scan(implementation):
    """Layers are scanned and rematerialised, and the bias knows the real positions."""
    query, key, value, _ = arrays(130, 130, num_groups=2)
    positions = jnp.arange(130) % 50
    segments = jnp.arange(130) // 50
    slopes = jnp.asarray([[0.5, 0.1], [0.2, 0.3]])

    def loss(slopes, positions, segments):
        def bias(slopes, rows, columns):
            return alibi_bias(slopes, positions[rows], positions[columns])

        def layer(x, slopes):
            return x + attention(
                x,
                key,
                value,
                bias=functools.partial(bias, slopes),
                segment_ids=segments,
                implementation=implementation,
            )

        layer = jax.checkpoint(layer)
        out, _ = jax.lax.scan(lambda x, s: (layer(x, s), None), query, slopes)
        return jnp.sum(out**2)

    def plain(slopes, query):
        for layer in slopes:
            bias = alibi_bias(layer, positions, positions)
            query = query + attention(
                query, key, value, bias=bias, segment_ids=segments, implementation="xla"
            )
        return jnp.sum(query**2)

    grad = jax.jit(jax.grad(loss))
    right = jax.jit(jax.grad(plain))(slopes, query)
    np.testing.assert_allclose(grad(slopes, positions, segments), right, rtol=2e-5)


@each_implementation
def test_shard_map_adds_up_the_gradient_of_a_replicated_table(implementation):
    query, key, value, cotangent = arrays(130, 130, batch=4)
    segments = jnp.tile(jnp.arange(130) // 70, (4, 1))
    slopes = jnp.asarray([0.5, 0.1])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(slopes, query, key, value, segments):
        return attention(
            query,
            key,
            value,
            bias=functools.partial(alibi_bias, slopes),
            segment_ids=segments,
            implementation=implementation,
        )

    data = P("data")
    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), data, data, data, data), out_specs=data
    )

    def grads(function):
        def loss(slopes, query):
            return jnp.vdot(function(slopes, query, key, value, segments), cotangent)

        return jax.jit(jax.grad(loss, (0, 1)))(slopes, query)

    for got, right in zip(grads(sharded), grads(run), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-5, atol=1e-6)


@each_implementation
def test_no_gradient_reaches_a_later_token(implementation):
    query, key, value, _ = arrays(200, 200)

    def loss(key, value):
        return jnp.sum(
            attention(query, key, value, implementation=implementation)[:, :133]
        )

    for grad in jax.jit(jax.grad(loss, (0, 1)))(key, value):
        assert np.all(np.asarray(grad[:, 133:]) == 0)
        assert np.all(np.abs(np.asarray(grad[:, :133])).sum((0, 2, 3)) > 0)


def test_chunked_leaves_out_the_masked_triangle():
    query, key, value, _ = arrays(512, 512, num_groups=2, width=64)

    def flops(implementation):
        run = jax.jit(functools.partial(attention, implementation=implementation))
        return run.lower(query, key, value).compile().cost_analysis()["flops"]

    # Four chunks compute 1/4, 2/4, 3/4 and 4/4 of their rows: 10/16 of the whole.
    assert flops("chunked") < 0.65 * flops("xla")


ONES = jnp.ones((2, 5, 4, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": jnp.ones((5, 8))}, r"query .*\[5, 8\]"),
        ({"query": jnp.ones((2, 5, 3, 8))}, r"key .*\[2, 5, 3, 8\]"),
        ({"query": jnp.ones((3, 5, 4, 8))}, r"key .*leading axes.*\[2, 5, 4, 8\]"),
        ({"query": jnp.ones((2, 0, 4, 8))}, r"query .*empty.*\[2, 0, 4, 8\]"),
        ({"query": jnp.ones((2, 5, 4, 8), int)}, "query .*int32"),
        ({"key": jnp.ones((2, 5, 4, 8), jnp.bfloat16)}, "key .*float32.*bfloat16"),
        ({"key": jnp.ones((2, 5, 4, 6))}, r"key .*head dim.*\[2, 5, 4, 6\]"),
        ({"value": jnp.ones((2, 4, 4, 8))}, r"value .*\[2, 4, 4, 8\]"),
        ({"value": jnp.ones((2, 5, 2, 8))}, r"value .*\[2, 5, 2, 8\]"),
        ({"query": jnp.ones((2, 6, 4, 8))}, "query_positions .*6 queries and 5 keys"),
        ({"query_positions": jnp.arange(4)}, r"query_positions .*\[5\].*\[4\]"),
        ({"query_positions": jnp.ones((3, 5), int)}, r"query_positions .*\[3, 5\]"),
        ({"key_positions": jnp.arange(5.0)}, "key_positions .*float32"),
        ({"segment_ids": jnp.ones((2, 4), int)}, r"segment_ids .*\[2, 4\]"),
        ({"segment_ids": (jnp.ones(5, int),) * 3}, "segment_ids .*3"),
        ({"key_mask": jnp.ones((2, 5), int)}, "key_mask .*int32"),
        ({"key_mask": jnp.ones((2, 6), bool)}, r"key_mask .*\[2, 6\]"),
        ({"bias": jnp.ones((3, 5, 5))}, r"bias .*\[2, 4, 5, 5\].*\[3, 5, 5\]"),
        ({"bias": jnp.ones((1, 2, 4, 5, 5))}, r"bias .*\[1, 2, 4, 5, 5\]"),
        ({"bias": jnp.ones((5, 5), bool)}, "bias .*bool.*key_mask"),
        ({"bias": lambda i, j: jnp.ones((4, 5))}, r"bias function .*\[4, 5\]"),
        ({"scale": float("nan")}, "scale .*nan"),
        ({"scale": jnp.ones(())}, "scale .*multiply query"),
        ({"implementation": "flash"}, "blockwise, cudnn, splash; got 'flash'"),
    ],
)
def test_wrong_input_is_named(change, message):
    arguments = {"query": ONES, "key": ONES, "value": ONES} | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: attention(**arguments))


def test_one_segment_array_for_two_lengths_is_refused():
    with pytest.raises(ValueError, match=r"segment_ids must be a pair.*2 queries"):
        attention(ONES[:, :2], ONES, ONES, segment_ids=jnp.ones((2, 2), int))
