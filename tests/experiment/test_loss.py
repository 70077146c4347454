"""Cross-entropy against float64, and the cases in which a mean would go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.experiment.loss import cross_entropy, token_nats


def reference_nats(logits, targets):
    """-log softmax in float64."""
    logits = np.asarray(logits.astype(jnp.float32), np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probs, np.asarray(targets)[..., None], -1)[..., 0]


def random_case(dtype, shape=(2, 5, 17), scale=4.0):
    key = jax.random.key(0)
    logits = scale * jax.random.normal(key, shape)
    targets = jax.random.randint(jax.random.fold_in(key, 1), shape[:-1], 0, shape[-1])
    return logits.astype(dtype), targets


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_token_nats_match_float64(dtype):
    logits, targets = random_case(dtype)
    nats = jax.jit(token_nats)(logits, targets)
    assert nats.dtype == jnp.float32
    np.testing.assert_allclose(nats, reference_nats(logits, targets), rtol=2e-6)


@pytest.mark.parametrize(
    ("classes", "right"), [(256, 5.5451774445), (100, 4.6051701860)]
)
def test_t02_loss_of_bfloat16_logits_is_not_quantised(classes, right):
    logits = jnp.zeros((1, 3, classes), jnp.bfloat16)
    targets = jnp.array([[0, 1, classes - 1]])
    nats = token_nats(logits, targets)
    total, count = cross_entropy(logits, targets)
    assert nats.dtype == total.dtype == count.dtype == jnp.float32
    np.testing.assert_allclose(nats, right, atol=1e-5, rtol=0)
    assert float(total / count) == pytest.approx(right, abs=1e-5)


def test_t19_uniform_logits_are_8_bits_per_byte():
    nats, count = cross_entropy(jnp.zeros((2, 7, 256)), jnp.full((2, 7), 65))
    bits = float(nats) / (float(count) * np.log(2))
    assert bits == pytest.approx(8.0, abs=1e-6)
    assert 2**bits == pytest.approx(256, rel=1e-5)


def test_t11_no_targets_give_zero_and_zero_gradient():
    logits, targets = random_case(jnp.float32)
    logits = logits.at[0, 0].set(jnp.inf).at[0, 1].set(jnp.nan)
    loss = jax.value_and_grad(cross_entropy, has_aux=True)
    (nats, count), gradient = loss(logits, targets, jnp.zeros(targets.shape))
    assert (float(nats), float(count)) == (0.0, 0.0)
    np.testing.assert_array_equal(gradient, 0.0)


def test_weights_select_targets():
    logits, targets = random_case(jnp.float32)
    weights = jnp.array([[1, 0, 1, 1, 0], [0, 0, 1, 0, 0]])
    logits = logits.at[0, 1].set(jnp.nan)
    nats, count = cross_entropy(logits, targets, weights)
    right = reference_nats(logits, targets)[np.asarray(weights) == 1].sum()
    assert float(count) == 4.0
    assert float(nats) == pytest.approx(right, rel=2e-6)


def test_gradient_is_softmax_minus_one_hot():
    logits, targets = random_case(jnp.float32)
    gradient = jax.grad(lambda x: cross_entropy(x, targets)[0])(logits)
    x = np.asarray(logits, np.float64)
    softmax = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    right = softmax - np.eye(x.shape[-1])[np.asarray(targets)]
    np.testing.assert_allclose(gradient, right, atol=1e-6)


def test_large_logits_neither_overflow_nor_lose_the_rest():
    logits = jnp.array([[[1e4, -1e4, 0.0], [1e4, 1e4 - 8, -1e4]]])
    nats = token_nats(logits, jnp.array([[1, 0]]))
    np.testing.assert_allclose(
        nats[0], [2e4, np.log1p(np.exp(-8))], rtol=1e-7, atol=1e-7
    )


def test_a_target_out_of_range_is_not_clamped():
    nats = token_nats(jnp.zeros((1, 4, 3)), jnp.array([[2, 3, -1, 0]]))
    np.testing.assert_array_equal(np.isnan(nats), [[False, True, True, False]])
    weights = jnp.array([[1.0, 0.0, 0.0, 1.0]])
    total, count = cross_entropy(
        jnp.zeros((1, 4, 3)), jnp.array([[2, 3, -1, 0]]), weights
    )
    assert float(total) == pytest.approx(2 * np.log(3), rel=1e-6)
    assert float(count) == 2.0


def test_wrong_arguments_raise():
    logits = jnp.zeros((2, 3, 5))
    targets = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"logits \(2, 3, 5\) and targets \(3, 2\)"):
        token_nats(logits, targets.T)
    with pytest.raises(ValueError, match="targets must be integers, got float32"):
        token_nats(logits, targets.astype(jnp.float32))
    with pytest.raises(ValueError, match="logits must be floating point, got int32"):
        token_nats(logits.astype(jnp.int32), targets)
    with pytest.raises(ValueError, match="weights must have the shape"):
        cross_entropy(logits, targets, jnp.ones((2, 1)))
