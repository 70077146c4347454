"""Attention that ends a number of tokens back: `model.window`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder

ONE_LAYER = DecoderConfig(
    num_layers=1, model_dim=32, num_heads=2, head_dim=16, mlp_dim=48
)
TOKENS = jax.random.randint(jax.random.key(3), (2, 160), 0, 256)


def build(**changes):
    config = dataclasses.replace(ONE_LAYER, **changes)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    noise = jax.random.normal(jax.random.key(1), (4096,))
    params = jax.tree.map(lambda x: x + 0.2 * jnp.resize(noise, x.shape), params)
    return lambda params, tokens: nnx.merge(graphdef, params)(tokens), params


@pytest.mark.parametrize("encoding", ["none", "rope", "alibi", "fox"])
@pytest.mark.parametrize("implementation", ["xla", "chunked", "blockwise"])
def test_a_layer_with_a_window_sees_the_last_tokens_alone(encoding, implementation):
    apply, params = build(
        encoding=encoding, window=5, attention_implementation=implementation
    )
    whole, _ = build(encoding=encoding)
    logits = apply(params, TOKENS)
    for t in (0, 3, 4, 5, 150):
        alone = whole(params, TOKENS[:, max(0, t - 4) : t + 1])[:, -1]
        np.testing.assert_allclose(logits[:, t], alone, atol=2e-5)
    without = whole(params, TOKENS)[:, 150]
    assert np.abs(logits[:, 150] - without).max() > 1e-2  # the window does something


@pytest.mark.parametrize("implementation", ["xla", "chunked", "blockwise"])
def test_gradients_are_finite_and_end_with_the_window(implementation):
    apply, params = build(
        encoding="alibi", window=5, attention_implementation=implementation
    )

    def last(embedding):
        changed = {**params, "embedding": embedding}
        return apply(nnx.State(changed), tokens)[0, -1, 7]

    tokens = jnp.arange(140)[None]  # each token once: row t of the gradient is token t
    gradient = jax.grad(last)(params["embedding"])[...]
    assert np.isfinite(gradient).all()
    reached = np.abs(np.asarray(gradient)).max(axis=-1) > 0
    assert reached[:140].nonzero()[0].tolist() == [135, 136, 137, 138, 139]


def test_a_negative_window_is_refused():
    with pytest.raises(ValueError, match=r"model\.window must not be negative, got -1"):
        Decoder(dataclasses.replace(ONE_LAYER, window=-1), rngs=nnx.Rngs(0))
