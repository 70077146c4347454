"""xPos: finite scores that depend on the distance only, at any position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional.rotary import rope, xpos_block, xpos_scale
from rope_jax.functional.xpos import scale_channels

DIM = 64


def zeta(dim=DIM):
    return np.array([(2 * i + 0.4 * dim) / (1.4 * dim) for i in range(dim // 2)])


def reference_score(query, key, lag, scale_base=512.0):
    """The decayed score of one query and key (half layout), in float64."""
    query, key = np.float64(query), np.float64(key)
    half = query.shape[-1] // 2
    query = query[..., :half] + 1j * query[..., half:]
    key = key[..., :half] + 1j * key[..., half:]
    inv_freq = 10_000.0 ** (-np.arange(half) / half)
    turned = query * np.conj(key) * np.exp(1j * lag * inv_freq)
    return (zeta(2 * half) ** (lag / scale_base) * turned).real.sum(-1)


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@jax.jit
def block_scores(query, key, query_positions, key_positions):
    query, key = rope(query, query_positions), rope(key, key_positions)
    query, key = xpos_block(query, key, query_positions, key_positions)
    return jnp.einsum("tnh,snh->nts", query, key, preferred_element_type=jnp.float32)


def test_scale_values_and_magnitudes():
    scale = xpos_scale(jnp.array([0, 512, -512, 1024]), DIM)
    assert scale.dtype == jnp.float32 and scale.shape == (4, 32)
    powers = np.array([0, 1, -1, 2])[:, None]
    np.testing.assert_allclose(scale, zeta()[None, :] ** powers, rtol=1e-6)
    assert float(scale[1, 0]) == pytest.approx(0.4 / 1.4, rel=1e-6)
    moved = xpos_scale(jnp.array([100_000, 100_512]), DIM, center=100_000)
    np.testing.assert_array_equal(moved, scale[:2])
    slower = xpos_scale(jnp.array([64]), DIM, scale_base=64.0)
    np.testing.assert_allclose(slower[0], zeta(), rtol=1e-6)
    # In range of float32 the values are those of the formula, far from the centre too.
    far = xpos_scale(jnp.array([-20_000, 20_000]), DIM)
    powers = np.array([-20_000, 20_000])[:, None] / 512
    np.testing.assert_allclose(far, zeta()[None, :] ** powers, rtol=2e-5)


@pytest.mark.parametrize(
    ("position", "scale_base", "exponent"), [(65536, 512.0, 69.6), (9000, 64.0, 76.5)]
)
def test_r27_magnitudes_that_would_overflow_are_limited(position, scale_base, exponent):
    true = -position / scale_base * np.log10(zeta()[0])
    assert true == pytest.approx(exponent, abs=0.05)
    scale = xpos_scale(jnp.array([position, -position]), DIM, scale_base=scale_base)
    assert np.isfinite(scale).all() and (np.asarray(scale) > 0).all()
    assert np.isfinite(1 / scale).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_r27_scores_are_finite_and_depend_on_the_distance_only(dtype):
    query, key = normal(1, 1, DIM, dtype=dtype), normal(1, 1, DIM, dtype=dtype, seed=1)
    lags = np.array([0, 1, 5, 63, 100, 1000, 5000])
    wanted = np.array([reference_score(query[0, 0], key[0, 0], lag) for lag in lags])
    keys = jnp.broadcast_to(key, (7, 1, DIM))
    tolerance = {4: 2e-6, 2: 2**-6}[jnp.dtype(dtype).itemsize] * DIM
    for position in (5000, 9000, 36_260, 65_536, 131_072):
        at = jnp.array([position])
        scores = block_scores(query, keys, at, position - jnp.asarray(lags))
        np.testing.assert_allclose(scores[0, 0], wanted, atol=tolerance)
    # And all the way back to the first key.
    scores = block_scores(query, keys, at, jnp.arange(7))
    wanted = [reference_score(query[0, 0], key[0, 0], 131_072 - n) for n in range(7)]
    np.testing.assert_allclose(scores[0, 0], wanted, atol=tolerance / 100)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_r27_small_scale_base_and_both_layouts(layout):
    query, key = normal(1, 1, DIM), normal(1, 1, DIM, seed=1)
    scores = []
    for position in (100, 9000, 131_072):
        at, other = jnp.array([position]), jnp.array([position - 37])
        turned = rope(query, at, layout=layout), rope(key, other, layout=layout)
        scaled = xpos_block(*turned, at, other, scale_base=64.0, layout=layout)
        scores.append(float((scaled[0] * scaled[1]).sum()))
    if layout == "half":
        wanted = reference_score(query[0, 0], key[0, 0], 37, scale_base=64.0)
        assert scores[0] == pytest.approx(wanted, abs=1e-5)
    np.testing.assert_allclose(scores, scores[0], atol=1e-5)


def test_r27_blocks_give_the_scores_of_the_direct_form():
    """Causal blocks of 8 over 64 positions from 131,000 on, and their gradient."""
    start, length, block = 131_000, 64, 8
    query, key = normal(length, 2, 16), normal(length, 2, 16, seed=1)
    positions = start + jnp.arange(length)

    def blockwise(query, key):
        rows = []
        for first in range(0, length, block):
            at = slice(first, first + block)
            scores = block_scores(query[at], key, positions[at], positions)
            seen = positions[at][:, None] >= positions[None, :]
            rows.append(jnp.where(seen[None], scores, 0.0))
        return jnp.concatenate(rows, axis=1)

    wanted = np.array(
        [
            [
                [
                    reference_score(query[t, n], key[s, n], t - s) if s <= t else 0.0
                    for s in range(length)
                ]
                for t in range(length)
            ]
            for n in range(2)
        ]
    )
    np.testing.assert_allclose(blockwise(query, key), wanted, atol=2e-5)
    gradients = jax.grad(lambda q, k: (blockwise(q, k) ** 2).sum(), argnums=(0, 1))
    for gradient in gradients(query, key):
        assert np.isfinite(gradient).all()
        assert float(jnp.abs(gradient).max()) > 1


def test_keys_of_the_future_stay_finite():
    """A mask hides them, but an overflow would reach the gradient as NaN."""
    query, key = normal(2, 1, DIM, dtype=jnp.float16), normal(3, 1, DIM, seed=1)
    key = key.astype(jnp.float16)
    at, other = jnp.array([0, 1]), jnp.array([0, 70_000, 131_072])
    scaled = xpos_block(query, key, at, other)
    assert np.isfinite(scaled[0]).all() and np.isfinite(scaled[1]).all()


def test_fault_13_and_15_the_centre_does_not_depend_on_the_length():
    """Keys cached in a short context give the same scores in a long one."""
    query, key = normal(1, 1, DIM), normal(40, 1, DIM, seed=1)
    early = block_scores(query, key[:10], jnp.array([9]), jnp.arange(10))
    late = block_scores(query, key, jnp.array([9]), jnp.arange(40))
    np.testing.assert_allclose(late[..., :10], early, atol=1e-6)


def test_batched_positions_partial_width_and_dtype():
    query, key = normal(2, 3, 4, 8), normal(2, 5, 2, 8, seed=1)
    query_positions = jnp.array([[4, 5, 6], [2, 3, 4]])
    scaled = xpos_block(
        query, key.astype(jnp.bfloat16), query_positions, jnp.arange(5), rotary_dim=4
    )
    assert scaled[0].dtype == jnp.float32 and scaled[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled[0][..., 4:], query[..., 4:])
    for row, first in enumerate([4, 2]):
        powers = np.arange(3)[:, None, None] / 512
        scale = np.concatenate([zeta(4), zeta(4)]) ** powers
        np.testing.assert_allclose(
            scaled[0][row, ..., :4], query[row, ..., :4] * scale, rtol=1e-6
        )
        last = query_positions[row, -1]
        powers = (first - np.minimum(np.arange(5), last))[:, None, None] / 512
        scale = np.concatenate([zeta(4), zeta(4)]) ** powers
        np.testing.assert_allclose(
            scaled[1][row, ..., :4].astype(jnp.float32),
            key[row, ..., :4] * scale,
            rtol=2**-7,
        )


def test_wrong_arguments_are_named():
    x, at = jnp.ones((2, 1, 8)), jnp.arange(2)
    with pytest.raises(ValueError, match=r"dim.*7"):
        xpos_scale(at, 7)
    with pytest.raises(ValueError, match=r"scale_base must be >= 0\.015625, got 0\.01"):
        xpos_scale(jnp.arange(3), 8, scale_base=0.01)
    with pytest.raises(ValueError, match=r"scale_base.*got 0"):
        xpos_scale(at, 8, scale_base=0)
    with pytest.raises(ValueError, match=r"positions.*float32"):
        xpos_scale(jnp.ones(2), 8)
    with pytest.raises(ValueError, match=r"layout.*'odd'"):
        xpos_block(x, x, at, at, layout="odd")
    with pytest.raises(ValueError, match=r"rotary_dim.*8.*10"):
        xpos_block(x, x, at, at, rotary_dim=10)
    with pytest.raises(ValueError, match=r"key_positions.*\(3,\)"):
        xpos_block(x, x, at, jnp.arange(3))
    with pytest.raises(ValueError, match=r"query.*\(2, 8\)"):
        xpos_block(x[:, 0], x, at, at)


def test_the_smallest_scale_base_is_still_finite():
    scale = xpos_scale(jnp.arange(-2, 3), 8, scale_base=2.0**-6)
    assert jnp.isfinite(scale).all()
    assert (scale[2] == 1).all()
    assert (scale[3] < scale[2]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_channels_are_scaled_pair_by_pair(dtype, lead):
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.normal(size=(2, 3, 5, 8)), dtype)
    scale = jnp.asarray(rng.uniform(0.1, 2, (*lead, 3, 3)), jnp.float32)
    exact, factors = np.float64(x), np.float64(scale)[..., None, :]
    for layout, turned in (
        ("half", np.concatenate([factors, factors], -1)),
        ("interleaved", np.repeat(factors, 2, -1)),
    ):
        scaled = scale_channels(x, scale, layout=layout)
        assert scaled.dtype == dtype
        wanted = jnp.asarray(exact[..., :6] * turned, jnp.float32).astype(dtype)
        np.testing.assert_allclose(
            np.float32(scaled[..., :6]), np.float32(wanted), rtol=2e-7
        )
        np.testing.assert_array_equal(scaled[..., 6:], x[..., 6:])


def test_scaling_channels_names_what_does_not_fit():
    x, scale = jnp.ones((3, 2, 8)), jnp.ones((3, 4))
    with pytest.raises(ValueError, match=r"layout.*'odd'"):
        scale_channels(x, scale, layout="odd")
    with pytest.raises(ValueError, match=r"head dim 8.*10"):
        scale_channels(x, jnp.ones((3, 5)), layout="half")
    with pytest.raises(ValueError, match=r"scale must be .*\(2,\)"):
        scale_channels(x, scale[:2], layout="half")
