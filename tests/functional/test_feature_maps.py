"""Random features: their distribution, what they estimate, and how fast."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional.attention import attention
from rope_jax.functional.feature_maps import (
    elu_plus_one,
    favor_projection,
    favor_relu,
    favor_softmax,
)
from rope_jax.functional.linear_attention import linear_attention

HEAD_DIM = 16


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def projections(key, draws, num_features, head_dim=HEAD_DIM):
    """`[draws, M, H]`."""
    draw = functools.partial(
        favor_projection, head_dim=head_dim, num_features=num_features
    )
    return jax.vmap(draw)(jax.random.split(key, draws))


@functools.partial(jax.jit, static_argnums=0)
def estimates(make_map, projections, query, key):
    """Kernel estimates `[draws, pairs]` of pairs `[pairs, H]`."""

    def one(projection):
        feature_map = make_map(projection)
        phi = [feature_map(x[:, None], False).dense()[:, 0] for x in (query, key)]
        return jnp.sum(phi[0] * phi[1], axis=-1)

    return jax.vmap(one)(projections)


def pairs():
    """Five pairs [5, H]: two alike, three that are not; the products differ in sign.

    Not larger: the variance of a softmax feature, relative to the square of the kernel,
    is exp(|q' + k'|^2) - 1.
    """
    rng = np.random.default_rng(0)
    query, key = 0.4 * rng.standard_normal((2, 5, HEAD_DIM))
    key[0], key[1] = query[0], query[1] / 2
    return query.astype(np.float32), key.astype(np.float32)


def exact(kernel, query, key):
    return kernel(*(x.astype(np.float64) * HEAD_DIM**-0.25 for x in (query, key)))


def test_rows_of_a_block_are_orthogonal_and_blocks_are_not():
    projection = np.asarray(favor_projection(jax.random.key(0), 16, 40), np.float64)
    assert projection.shape == (40, 16)
    directions = projection / np.linalg.norm(projection, axis=-1, keepdims=True)
    products = directions @ directions.T
    for start in (0, 16, 32):
        block = products[start : start + 16, start : start + 16]
        np.testing.assert_allclose(block, np.eye(len(block)), atol=1e-6)
    assert np.abs(products[:16, 16:32]).max() > 0.2


def test_norms_are_those_of_gaussian_vectors():
    """Squares are chi-squared: mean H, variance 2 H, and third moment 8 H."""
    squares = np.sum(
        np.asarray(projections(jax.random.key(1), 500, 32), np.float64) ** 2, axis=-1
    ).ravel()
    count = len(squares)
    assert count == 16_000
    assert abs(squares.mean() - 16) < 5 * math.sqrt(2 * 16 / count)
    centred = squares - 16
    # Var of the square of a centred chi-squared: 12 H (H + 4) - (2 H)^2.
    error = math.sqrt((12 * 16 * 20 - 32**2) / count)
    assert abs((centred**2).mean() - 32) < 5 * error
    # Norms are independent within a block, in spite of the orthogonal directions.
    of_blocks = squares.reshape(-1, 16)
    correlation = np.corrcoef(of_blocks[:, 0], of_blocks[:, 1])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(len(of_blocks))


def test_rows_are_isotropic_gaussians():
    rows = np.asarray(projections(jax.random.key(2), 2000, 4, 4), np.float64)
    count = len(rows)
    for row in (rows[:, 0], rows[:, 3]):
        assert np.abs(row.mean(0)).max() < 5 / math.sqrt(count)
        moments = row.T @ row / count
        assert np.abs(moments - np.eye(4)).max() < 5 * math.sqrt(2 / count)
        assert np.abs((row**4).mean(0) - 3).max() < 5 * math.sqrt(96 / count)


def test_directions_are_uniform_over_both_orientations():
    """QR alone gives matrices of one determinant: that is not a uniform one."""
    blocks = np.asarray(projections(jax.random.key(3), 1000, 2, 2), np.float64)
    share = (np.linalg.det(blocks) > 0).mean()
    assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(1000)


def test_a_key_gives_one_projection_also_when_redrawn_in_jit():
    @jax.jit
    def at_step(step):
        key = jax.random.fold_in(jax.random.key(5), step // 1000)
        return favor_projection(key, 8, 16)

    np.testing.assert_array_equal(at_step(0), at_step(999))
    np.testing.assert_allclose(
        at_step(1000),
        favor_projection(jax.random.fold_in(jax.random.key(5), 1), 8, 16),
        atol=1e-5,
    )
    assert np.abs(at_step(1000) - at_step(999)).max() > 0.5


def arc_cosine(query, key):
    """Cho & Saul 2009, order 1, of unnormalized vectors and Gaussian rows."""
    norms = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1)
    cosine = np.clip((query * key).sum(-1) / norms, -1, 1)
    angle = np.arccos(cosine)
    return norms * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)


def softmax_kernel(query, key):
    return np.exp((query * key).sum(-1))


KERNELS = {
    "softmax": (favor_softmax, softmax_kernel),
    "relu": (functools.partial(favor_relu, epsilon=1e-6), arc_cosine),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_estimate_is_unbiased(name):
    """The mean of 4,000 draws is within 5 standard errors, and those are small."""
    make_map, kernel = KERNELS[name]
    query, key = pairs()
    drawn = projections(jax.random.key(20), 4000, 32)
    got = np.asarray(estimates(make_map, drawn, query, key), np.float64)
    right = exact(kernel, query, key)
    error = got.std(0) / math.sqrt(len(got))
    assert (error < 0.01 * right).all()
    # Epsilon, 1e-4 or less, adds a little.
    assert (np.abs(got.mean(0) - right) < 5 * error + 5e-4 * right).all()
    # The pairs tell the kernel from its neighbours, such as one with half the scale.
    assert np.ptp(np.log(right)) > 0.3


def test_a_scale_of_the_products_can_be_given():
    query, key = (1.5 * x for x in pairs())
    drawn = projections(jax.random.key(20), 4000, 32)
    make_map = functools.partial(favor_softmax, scale=0.1)
    got = np.asarray(estimates(make_map, drawn, query, key), np.float64)
    error = got.std(0) / math.sqrt(len(got))
    right = np.exp(0.1 * (query * key).sum(-1, dtype=np.float64))
    assert (error < 0.01 * right).all()
    assert (np.abs(got.mean(0) - right) < 5 * error + 5e-4 * right).all()


@pytest.mark.parametrize("name", KERNELS)
def test_the_error_falls_as_one_over_the_root_of_the_features(name):
    make_map, kernel = KERNELS[name]
    query, key = pairs()
    right = exact(kernel, query, key)
    errors = []
    for num_features in (32, 128, 512):
        drawn = projections(jax.random.key(8), 1000, num_features)
        got = np.asarray(estimates(make_map, drawn, query, key), np.float64)
        errors.append(np.sqrt(((got - right) ** 2).mean(0)))
    for few, many in itertools.pairwise(errors):
        np.testing.assert_allclose(few / many, 2, rtol=0.2)
        np.testing.assert_allclose(np.mean(few / many), 2, rtol=0.07)


@pytest.mark.parametrize("name", KERNELS)
def test_orthogonal_rows_have_a_smaller_error_than_independent_ones(name):
    make_map, _ = KERNELS[name]
    query, key = pairs()
    orthogonal = projections(jax.random.key(20), 4000, 32)
    independent = jax.random.normal(jax.random.key(10), orthogonal.shape)
    spread = [
        np.asarray(estimates(make_map, drawn, query, key)).var(0)
        for drawn in (orthogonal, independent)
    ]
    assert np.mean(spread[0] / spread[1]) < 0.85


def test_linear_attention_comes_to_softmax_attention():
    rng = np.random.default_rng(11)
    query, key, value = (
        jnp.asarray(rng.standard_normal((64, 2, HEAD_DIM)), jnp.float32)
        for _ in range(3)
    )
    query, key = 0.4 * query, 0.4 * key
    right = attention(query, key, value, implementation="xla")

    @jax.jit
    def error(projection):
        feature_map = favor_softmax(projection)
        got = linear_attention(query, key, value, feature_map=feature_map)
        return jnp.mean((got - right) ** 2)

    rms = []
    for num_features in (32, 512):
        drawn = projections(jax.random.key(8), 1000, num_features)[:64]
        rms.append(np.sqrt(np.mean(jax.lax.map(error, drawn))))
    np.testing.assert_allclose(rms[0] / rms[1], 4, rtol=0.15)
    assert rms[1] < 0.015
    # Attention that takes no notice of queries and keys is further away.
    uniform = jnp.cumsum(value, axis=0) / jnp.arange(1.0, 65)[:, None, None]
    assert np.sqrt(np.mean((uniform - right) ** 2)) > 2 * rms[1]


def test_features_written_out():
    """Numbers worked out by hand, of a projection that is the identity."""
    x = jnp.array([[[2.0, -1.0]]])
    softmax = favor_softmax(jnp.eye(2), scale=1.0, epsilon=0.5)(x, False).dense()
    # exp(2 - 2.5) and exp(-1 - 2.5), each plus half the larger, over root 2.
    right = [(0.60653066 * 1.5) / 2**0.5, (0.03019738 + 0.30326533) / 2**0.5]
    np.testing.assert_allclose(softmax[0, 0], right, rtol=1e-6)
    relu = favor_relu(jnp.eye(2), scale=4.0, epsilon=0.25)(x, False).dense()
    np.testing.assert_allclose(relu[0, 0], [5 / 2**0.5, 1 / 2**0.5], rtol=1e-6)
    small = favor_relu(jnp.eye(2), scale=1.0, epsilon=0.25)(0.1 * x, False).dense()
    np.testing.assert_allclose(small[0, 0], [0.45 / 2**0.5, 0.25 / 2**0.5], rtol=1e-6)
    elu = elu_plus_one(x, False, epsilon=0.1).dense()
    np.testing.assert_allclose(elu[0, 0], [3.3, 0.66787944], rtol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "relu", "elu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_bounded_and_positive_for_any_norm(name, dtype):
    drawn = favor_projection(jax.random.key(13), 8, 24)
    feature_map, epsilon = {
        "softmax": (favor_softmax(drawn), 1e-4),
        "relu": (favor_relu(drawn), 1e-3),
        "elu": (elu_plus_one, 1e-6),
    }[name]
    rng = np.random.default_rng(14)
    largest = float(jnp.finfo(dtype).max)
    for size in (0.0, 1e-30, 1.0, 1e4, largest):
        x = np.clip(size * rng.standard_normal((5, 2, 8)), -largest, largest)
        x = jnp.asarray(x, dtype)
        values, log_scale = feature_map(x, False)
        assert values.dtype == log_scale.dtype == jnp.float32
        assert values.min() >= epsilon
        assert values.max() <= (1 + epsilon) * (1 + 1e-6)
        assert jnp.isfinite(log_scale).all()
        np.testing.assert_array_equal(feature_map(x, True), values)


BAD = {
    "projection must be a floating point": lambda: favor_softmax(jnp.ones(3)),
    r"got int32 \[2, 2\]": lambda: favor_relu(jnp.ones((2, 2), int)),
    "epsilon must be > 0, got 0.0": lambda: favor_softmax(jnp.eye(2), epsilon=0.0),
    "scale must be > 0, got -1.0": lambda: favor_softmax(jnp.eye(2), scale=-1.0),
    r"projection must be \[M, 3\].*got shape \[2, 2\]": lambda: favor_softmax(
        jnp.eye(2)
    )(jnp.ones((1, 1, 3)), True),
    "x must be floating point": lambda: elu_plus_one(jnp.ones((1, 1, 2), int), True),
    r"x must be \[..., T, N, H\]": lambda: elu_plus_one(jnp.ones(2), True),
    "epsilon must be > 0, got -1": lambda: elu_plus_one(
        jnp.ones((1, 1, 2)), True, epsilon=-1
    ),
    "num_features must be a positive integer, got 0": lambda: favor_projection(
        jax.random.key(0), 4, 0
    ),
    "head_dim must be a positive integer, got 4.0": lambda: favor_projection(
        jax.random.key(0), 4.0, 4
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
