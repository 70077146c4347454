"""Cross-entropy against float64, and the cases in which a mean would go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.experiment.config import MeshConfig
from rope_jax.experiment.loss import cross_entropy, head_cross_entropy, token_nats
from rope_jax.experiment.mesh import batch_sharding, make_mesh
from rope_jax.experiment.token_chunks import Chunks


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


def head_case(batch=2, length=1000, dim=8, classes=256):
    """Hidden states, a head, targets and weights of 0, 1 and 0.5."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(0, 2, (batch, length, dim)), jnp.float32)
    head = jnp.asarray(rng.normal(0, 1, (dim, classes)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, classes, (batch, length)), jnp.int32)
    weights = jnp.asarray(rng.choice([0, 1, 0.5], (batch, length)), jnp.float32)
    return hidden, head, targets, weights


def reference_loss(hidden, head, targets, weights):
    """The sum of nats and its gradients (hidden, head, weights), in float64."""
    hidden, head, weights = (np.float64(x) for x in (hidden, head, weights))
    logits = hidden @ head
    shifted = logits - logits.max(-1, keepdims=True)
    share = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    chosen = np.eye(head.shape[1])[np.asarray(targets)]
    nats = -np.log((share * chosen).sum(-1))
    d_logits = weights[..., None] * (share - chosen)
    d_head = np.einsum("btd,btv->dv", hidden, d_logits)
    return (nats * weights).sum(), (d_logits @ head.T, d_head, nats * (weights != 0))


def assert_near(got, right, tolerance):
    """Largest error within `tolerance` of the largest value."""
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, right, rtol=0, atol=tolerance * np.abs(right).max())


@pytest.mark.parametrize("rows", ["weights", "all"])
@pytest.mark.parametrize("most_tokens", [2 * 64, 2 * 100, 2 * 1000])
def test_t16_chunks_of_the_logits_give_the_whole_loss(most_tokens, rows):
    """T = 1000, V = 256 in chunks of 64 (which do not divide it), 100 and T."""
    hidden, head, targets, weights = head_case()
    if rows == "all":
        weights = jnp.ones_like(weights)
    right, gradients = reference_loss(hidden, head, targets, weights)

    def loss(hidden, head, weights):
        given = weights if rows == "weights" else None
        options = {"most_tokens": most_tokens}
        return head_cross_entropy(lambda x: x @ head, hidden, targets, given, **options)

    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (nats, count), slopes = found(hidden, head, weights)
    assert float(jax.jit(loss)(hidden, head, weights)[0]) == pytest.approx(float(nats))
    assert float(nats) == pytest.approx(right, rel=1e-6)
    assert float(count) == float(weights.sum())
    for slope, gradient in zip(slopes[:2], gradients, strict=False):
        assert_near(slope, gradient, 1e-6)
    if rows == "weights":
        np.testing.assert_allclose(slopes[2], gradients[2], rtol=1e-5, atol=1e-5)


def test_t16_chunks_of_several_runs_and_of_bfloat16():
    """Mapped over runs with a head each; the head's gradient is float32."""
    hidden, head, targets, weights = head_case(length=30)
    heads = jnp.stack([head, -head]).astype(jnp.bfloat16).astype(jnp.float32)
    hidden = hidden.astype(jnp.bfloat16)

    def loss(head, hidden):
        logits = lambda x: jnp.einsum(  # noqa: E731
            "btd,dv->btv",
            x,
            head.astype(jnp.bfloat16),
            preferred_element_type=jnp.float32,
        )
        return head_cross_entropy(logits, hidden, targets, weights, most_tokens=14)[0]

    run = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1)), in_axes=(0, None)))
    nats, (d_heads, d_hidden) = run(heads, hidden)
    assert (d_heads.dtype, d_hidden.dtype) == (jnp.float32, jnp.bfloat16)
    for i in range(2):
        right, gradients = reference_loss(hidden, heads[i], targets, weights)
        np.testing.assert_allclose(nats[i], right, rtol=1e-4)
        assert_near(d_hidden[i], gradients[0], 2.0**-7)
        assert_near(d_heads[i], gradients[1], 2.0**-7)


@pytest.mark.parametrize("most_tokens", [14, 1000])
def test_t16_what_is_not_scored_is_nothing_in_chunks_too(most_tokens):
    hidden, head, targets, weights = head_case(length=30)
    right = hidden.at[weights == 0].set(0)
    hidden = hidden.at[weights == 0].set(jnp.nan)

    def loss(hidden, head):
        return head_cross_entropy(
            lambda x: x @ head, hidden, targets, weights, most_tokens=most_tokens
        )

    (nats, _), slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
    assert np.isfinite(nats)
    assert np.all(np.isfinite(slopes[0])) and np.all(slopes[0][weights == 0] == 0)
    expected, _ = jax.grad(loss, 1, has_aux=True)(right, head)
    np.testing.assert_allclose(slopes[1], expected, rtol=1e-6)


def test_t16_temporary_memory_does_not_hold_the_logits():
    """T = 65,536, V = 256: the logits alone are 64 MiB."""
    hidden = jax.ShapeDtypeStruct((1, 65536, 16), jnp.float32)
    head = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    targets = jnp.zeros((1, 65536), jnp.int32)

    def whole(hidden, head):
        return cross_entropy(hidden @ head, targets)[0]

    def chunks(hidden, head):
        return head_cross_entropy(lambda x: x @ head, hidden, targets)[0]

    def temporary(loss):
        compiled = jax.jit(loss).lower(hidden, head).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    for grad in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
        assert temporary(grad(whole)) >= 64
        assert temporary(grad(chunks)) <= 18


def test_chunks_move_no_tokens_between_devices():
    """Rows over 2 data x 2 fsdp, tokens over 2 sequence: each has a share."""
    hidden, head, targets, weights = head_case(batch=4, length=60)

    def loss(hidden, head, targets, weights):
        logits = lambda x: x @ head  # noqa: E731
        return head_cross_entropy(logits, hidden, targets, weights, most_tokens=6)

    slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)
    alone = jax.jit(slopes)(hidden, head, targets, weights)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, sequence=2))
    with jax.set_mesh(mesh):
        assert Chunks.of(lambda x: x @ head, hidden, 6) == Chunks(2, 30, 6)
        put = lambda x: jax.device_put(x, batch_sharding(mesh))  # noqa: E731
        arguments = put(hidden), head, put(targets), put(weights)
        compiled = jax.jit(slopes).lower(*arguments).compile()
        split = compiled(*arguments)
    jax.tree.map(lambda a, b: assert_near(b, np.float64(a), 1e-6), alone, split)
    assert "all-gather" not in compiled.as_text()
    assert "all-reduce" in compiled.as_text()
