"""Known failures of attention in other libraries, each with its right value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional.additive import sinusoidal
from rope_jax.functional.alibi import alibi_bias, alibi_slopes
from rope_jax.functional.attention import attention
from rope_jax.functional.distance_kernels import (
    fire_bias,
    init_fire,
    init_kerple,
    kerple_bias,
)
from rope_jax.functional.positions import positions_from_mask, positions_from_segments
from rope_jax.functional.relative import init_t5, t5_bias
from rope_jax.functional.rotary import rope

each_implementation = pytest.mark.parametrize(
    "implementation", ["xla", "chunked", "blockwise"]
)
ENCODINGS = ["rope", "alibi", "sinusoidal"]
NUM_HEADS, WIDTH = 4, 8


def weights(num_queries, num_keys, slope, dtype=jnp.float32, **arguments):
    """Attention weights [T, S] for equal content, seen through one-hot values."""
    query = jnp.zeros((num_queries, 1, 4), dtype)
    key = jnp.zeros((num_keys, 1, 4), dtype)
    value = jnp.eye(num_keys, dtype=dtype)[:, None]
    arguments.setdefault("bias", functools.partial(alibi_bias, np.float32([slope])))
    run = jax.jit(functools.partial(attention, **arguments))
    return np.asarray(run(query, key, value)[:, 0], np.float64)


@functools.partial(jax.jit, static_argnames=("encoding", "implementation"))
def encoded(
    new, seen, query_positions, key_positions, encoding, implementation, **masks
):
    """Attention of `new` [..., T, N, H] to `seen`, positions entering as `encoding`."""
    if encoding == "sinusoidal":
        new, seen = (
            _add_sinusoidal(new, query_positions),
            _add_sinusoidal(seen, key_positions),
        )
    query, key = new, seen[..., ::-1]
    if encoding == "rope":
        query, key = rope(query, query_positions), rope(key, key_positions)
    bias = functools.partial(alibi_bias, alibi_slopes(NUM_HEADS))
    return attention(
        query,
        key,
        seen,
        query_positions=query_positions,
        key_positions=key_positions,
        bias=bias if encoding == "alibi" else None,
        implementation=implementation,
        **masks,
    )


def _add_sinusoidal(x, positions):
    table = sinusoidal(positions, NUM_HEADS * WIDTH)
    return x + jnp.broadcast_to(
        table.reshape(*table.shape[:-1], NUM_HEADS, WIDTH), x.shape
    )


def tokens(*lead):
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.standard_normal((*lead, NUM_HEADS, WIDTH)), jnp.float32)


@each_implementation
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_r18_a07_left_padding_changes_nothing(encoding, implementation):
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    positions = positions_from_mask(mask)
    np.testing.assert_array_equal(positions[0, 2:], [0, 1, 2])
    np.testing.assert_array_equal(positions[1], [0, 1, 2, 3, 4])
    x = tokens(2, 5)
    run = functools.partial(encoded, encoding=encoding, implementation=implementation)
    out = run(x, x, positions, positions, key_mask=mask)
    alone = run(x[0, 2:], x[0, 2:], jnp.arange(3), jnp.arange(3))
    np.testing.assert_allclose(out[0, 2:], alone, atol=1e-5)
    np.testing.assert_allclose(
        out[1], run(x[1], x[1], jnp.arange(5), jnp.arange(5)), atol=1e-5
    )
    x = x.at[0, :2].set(7.0)
    other = run(x, x, positions, positions, key_mask=mask)
    np.testing.assert_array_equal(other[0, 2:], out[0, 2:])


@each_implementation
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_r19_packed_documents_equal_documents_alone(encoding, implementation):
    segments = jnp.array([1, 1, 1, 2, 2, 3, 0])
    positions = positions_from_segments(segments)
    np.testing.assert_array_equal(positions[:6], [0, 1, 2, 0, 1, 0])
    x = tokens(7)
    run = functools.partial(encoded, encoding=encoding, implementation=implementation)
    out = run(x, x, positions, positions, segment_ids=segments)
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        alone = jnp.arange(stop - start)
        document = x[start:stop]
        right = run(document, document, alone, alone)
        np.testing.assert_allclose(out[start:stop], right, atol=1e-5)


@each_implementation
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_r20_decoding_step_by_step_equals_one_pass(encoding, implementation):
    x, positions = tokens(10), jnp.arange(10)
    run = functools.partial(encoded, encoding=encoding, implementation=implementation)
    whole = run(x, x, positions, positions)
    steps = [run(x[:4], x[:4], positions[:4], positions[:4])]
    for t in range(4, 10):
        cache = x.at[t + 1 :].set(0)  # ten slots, of which t + 1 are filled
        steps.append(run(x[t : t + 1], cache, positions[t : t + 1], positions))
    np.testing.assert_allclose(jnp.concatenate(steps), whole, atol=1e-5)


@each_implementation
def test_a03_sign_penalises_distance(implementation):
    got = weights(4, 4, 0.5, implementation=implementation)
    right = [0.101536324, 0.167405097, 0.276004345, 0.455054234]
    np.testing.assert_allclose(got[3], right, atol=1e-6)
    # The shortcut: one row of slope * key index for all queries.
    row = 0.5 * jnp.arange(4.0)
    shortcut = weights(4, 4, 0.5, bias=row[None, None], implementation=implementation)
    np.testing.assert_allclose(shortcut, got, atol=1e-6)


@each_implementation
def test_a04_bias_stays_in_cached_decoding(implementation):
    right = [0.101536324, 0.167405097, 0.276004345, 0.455054234, 0, 0, 0, 0]
    run = functools.partial(weights, 1, 8, 0.5, implementation=implementation)
    by_position = run(query_positions=jnp.array([3]))
    np.testing.assert_allclose(by_position[0], right, atol=1e-6)
    filled = jnp.arange(8) < 4
    by_mask = run(query_positions=jnp.array([3]), key_mask=filled, causal=False)
    np.testing.assert_allclose(by_mask[0], right, atol=1e-6)
    assert np.all(by_position[0, 4:] == 0)


@each_implementation
def test_a06_bias_is_not_rounded_to_bfloat16(implementation):
    query, key = (
        jnp.zeros((1, 1, 4), jnp.bfloat16),
        jnp.zeros((4096, 1, 4), jnp.bfloat16),
    )
    value = (
        jnp.zeros((4096, 1, 3), jnp.bfloat16)
        .at[-3:, 0]
        .set(jnp.eye(3, dtype=jnp.bfloat16))
    )
    bias = functools.partial(alibi_bias, np.float32([0.5]))
    run = functools.partial(attention, bias=bias, implementation=implementation)
    got = jax.jit(run)(query, key, value)
    right = [0.144749281, 0.238651219, 0.393469340]
    np.testing.assert_allclose(np.float32(got[0, 0]), right, atol=1e-3)


@each_implementation
def test_a07_pad_keys_weigh_exactly_zero(implementation):
    mask = jnp.array([False, False, True, True, True])
    got = weights(5, 5, 0.5, key_mask=mask, implementation=implementation)
    assert np.all(got[:, :2] == 0)
    alone = weights(3, 3, 0.5, implementation=implementation)
    np.testing.assert_allclose(got[2:, 2:], alone, atol=1e-6)


@each_implementation
def test_a08_two_queries_are_the_last_of_five_keys(implementation):
    got = weights(2, 5, 0.25, implementation=implementation)
    with np.errstate(divide="ignore"):
        logs = np.log(got) - np.log(got.max(-1, keepdims=True))
    right = [[-0.75, -0.5, -0.25, 0, -np.inf], [-1, -0.75, -0.5, -0.25, 0]]
    np.testing.assert_allclose(logs, right, atol=1e-6)


@functools.cache
def temporary_bytes(length, bias, gradient):
    """Scratch memory of compiled attention, 8 heads of 64."""
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)

    def run(query, key, value):
        return attention(query, key, value, bias=bias)

    if gradient:
        run = jax.grad(lambda *arrays, run=run: jnp.sum(run(*arrays)), (0, 1, 2))
    return jax.jit(run).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True])
def test_a09_alibi_takes_no_memory_and_length_takes_it_linearly(gradient):
    alibi = functools.partial(alibi_bias, alibi_slopes(8))
    without = temporary_bytes(16_384, None, gradient)
    with_bias = temporary_bytes(16_384, alibi, gradient)
    assert with_bias <= 1.1 * without
    # A dense bias would be 8 GiB; the arrays q, k, v and out are 32 MiB each.
    assert with_bias < 8 * 32 * 2**20
    assert temporary_bytes(65_536, alibi, gradient) <= 4.1 * with_bias


LEARNED = {
    "alibi": (lambda key: alibi_slopes(8), alibi_bias),
    "t5": (lambda key: init_t5(key, 8), t5_bias),
    "kerple": (lambda key: init_kerple(key, 8), kerple_bias),
    "fire": (
        lambda key: init_fire(key, 8),
        functools.partial(fire_bias, length=512.0),
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a09_learned_bias_takes_no_memory(name):
    x = jax.ShapeDtypeStruct((1, 16_384, 8, 64), jnp.float32)
    init, function = LEARNED[name]
    params = jax.eval_shape(init, jax.random.key(0))

    def loss(query, key, value, params):
        bias = functools.partial(function, params)
        return jnp.sum(attention(query, key, value, bias=bias))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, params).compile()
    without = temporary_bytes(16_384, None, True)
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.1 * without


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a10_bias_and_masks_do_not_overflow(dtype, implementation):
    """Causal, padding and bias all at their lowest on the same keys."""
    lowest = jnp.finfo(dtype).min
    bias = jnp.zeros((1, 4, 4), dtype).at[..., 0].set(lowest).at[..., 3].set(lowest)
    bias += alibi_bias(np.float32([0.5]), jnp.arange(4), jnp.arange(4)).astype(dtype)
    run = functools.partial(weights, 4, 4, 0.5, dtype, implementation=implementation)
    mask = jnp.array([False, True, True, True])
    got = run(bias=bias, key_mask=mask)
    assert np.all(np.isfinite(got))
    assert np.all(got[:, 0] == 0)
    right = np.exp([-0.5, 0]) / np.exp([-0.5, 0]).sum()
    np.testing.assert_allclose(
        got[2, 1:3], right, atol=1e-6 if dtype == jnp.float32 else 2e-3
    )
    # A bias of -inf masks too.
    infinite = run(bias=jnp.where(bias <= lowest, -jnp.inf, bias), key_mask=mask)
    np.testing.assert_array_equal(infinite[:3], got[:3])


@each_implementation
def test_t10_fully_masked_row_is_zero_and_leaves_the_rest_alone(implementation):
    x = tokens(2, 150)
    mask = jnp.ones((2, 150), bool).at[1].set(False)

    @jax.jit
    def out(x, mask):
        return attention(x, x, x, key_mask=mask, implementation=implementation)

    def loss(x, mask, counted):
        return jnp.sum(jnp.where(counted, jnp.sin(out(x, mask)), 0))

    both = out(x, mask)
    np.testing.assert_array_equal(both[1], 0)
    np.testing.assert_allclose(both[0], out(x[:1], mask[:1])[0], atol=1e-6)
    grad = jax.jit(jax.grad(loss))
    first, all_rows = (jnp.array(x).reshape(2, 1, 1, 1) for x in ([1, 0], [1, 1]))
    alone = grad(x[:1], mask[:1], first[:1])
    for counted in (first, all_rows):
        got = grad(x, mask, counted)
        np.testing.assert_allclose(got[0], alone[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[1], 0)


@pytest.mark.parametrize("implementation", ["xla", "chunked", "blockwise"])
def test_gradients_are_right_where_every_logit_of_a_row_is_large(implementation):
    """Weights sum to one whatever a row's level, so d sum(out) / d value does too."""
    x = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
    level = jnp.zeros((64, 64)).at[10].set(-1e9)

    def total(value):
        return attention(x, x, value, bias=level, implementation=implementation).sum()

    # Row by row: the gradient of value s is the sum of the weights that reach it.
    assert jax.grad(total)(x).sum() == pytest.approx(64 * 2 * 8, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        # The lowest 32 bits are 1, 1, 1, 1: one document instead of two.
        ("segment_ids", [1, 1, 2**32 + 1, 2**32 + 1], "1 to 4294967297"),
        # They are 2**31 - 2, 2**31 - 1, -2**31, -2**31 + 1: the future comes first.
        ("query_positions", np.arange(4) + 2**31 - 2, "2147483646 to 2147483649"),
        ("key_positions", np.arange(4) + 2**31 - 2, "2147483646 to 2147483649"),
    ],
)
def test_host_integers_beyond_int32_are_refused(name, values, shown):
    x = jnp.ones((4, 1, 2))
    with pytest.raises(ValueError, match=f"{name} must fit int32, got {shown}"):
        attention(x, x, x, **{name: np.asarray(values, np.int64)})


def test_int64_of_the_host_within_int32_is_taken():
    x, value = jnp.ones((4, 1, 2)), jnp.arange(4.0)[:, None, None]
    ids = np.array([1, 1, 2**31 - 1, 2**31 - 1])
    positions = np.arange(4) + 2**31 - 4
    out = attention(
        x,
        x,
        value,
        segment_ids=ids,
        query_positions=positions,
        key_positions=positions,
    )
    assert out[:, 0, 0].tolist() == [0.0, 0.5, 2.0, 2.5]
