"""One meaning, whichever implementation of attention a decoder is told to use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.functional.attention import attention
from rope_jax.nn import biases, contextual
from rope_jax.nn.biases import FireOptions
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.encoding import Side
from rope_jax.nn.encodings import ENCODINGS, make_encoding

SMALL = DecoderConfig(
    num_layers=1,
    model_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=16,
    fire=FireOptions(length=16),
)
# Those that add to the scores, block by block; the others leave attention as it is.
ADDING = (
    *("alibi", "t5", "kerple", "fire", "sandwich"),
    *("shaw", "fox", "cable", "dape"),
)


def disturbed(module):
    """The graph and the parameters of a module, none of which is zero."""
    graphdef, params = nnx.split(module)
    noise = jax.random.normal(jax.random.key(1), (4096,))
    noisy = jax.tree.map(lambda x: x + 0.2 * jnp.resize(noise, x.shape), params)
    return graphdef, noisy


def test_no_encoding_that_adds_is_left_out():
    adding = {
        name
        for name, kind in ENCODINGS.items()
        if kind.__module__ in (biases.__name__, contextual.__name__)
        and not kind.whole_rows
    }
    assert adding == set(ADDING)


@pytest.mark.parametrize("name", ADDING)
def test_implementations_agree_in_values_and_gradients(name):
    """More than one block of keys, three documents in a row, grouped heads."""
    config = dataclasses.replace(SMALL, encoding=name, num_kv_heads=1)
    graphdef, params = disturbed(make_encoding(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x, query, key, value, cotangent = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 140, 16), *[(2, 140, n, 8) for n in (2, 1, 1, 2)])
    )
    segments = jnp.arange(140) // 50
    positions, index = jnp.arange(140) % 50, jnp.arange(140)

    def loss(params, query, key, value, implementation):
        encoding = nnx.merge(graphdef, params)
        extras = encoding.extras(x)
        scores = encoding.scores(
            Side(query, positions, index, extras), Side(key, positions, index, extras)
        )
        out = attention(
            query,
            key,
            value,
            bias=scores,
            segment_ids=segments,
            implementation=implementation,
        )
        return jnp.vdot(out, cotangent), out

    arrays = params, query, key, value
    run = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True), static_argnums=4)
    right, got = (run(*arrays, name) for name in ("xla", "blockwise"))
    for one, other in zip(*map(jax.tree.leaves, (got, right)), strict=True):
        size = max(1.0, float(jnp.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * size)
    _, chunked = jax.jit(loss, static_argnums=4)(*arrays, "chunked")
    np.testing.assert_allclose(chunked, right[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_a_decoder_by_splash_is_the_decoder(encoding):
    """Packed and windowed, with positions that begin again in each document."""
    tokens = jax.random.randint(jax.random.key(3), (2, 40), 0, 256)
    segments = jnp.arange(40)[None] // jnp.array([[15], [33]])
    logits = []
    for implementation in ("xla", "splash"):
        config = dataclasses.replace(
            SMALL,
            encoding=encoding,
            window=9,
            attention_implementation=implementation,
        )
        graphdef, params = disturbed(Decoder(config, rngs=nnx.Rngs(0)))

        @jax.jit
        def run(params, graphdef=graphdef):
            return nnx.merge(graphdef, params)(tokens, segment_ids=segments)

        logits.append(run(params))
    np.testing.assert_allclose(*logits, atol=2e-5)


@pytest.mark.parametrize(
    ("encoding", "implementation", "message"),
    [
        ("t5", "splash", r"no bias function.*; xla, chunked, blockwise can"),
        ("rope", "cudnn", r"NVIDIA GPU.*got cpu; xla, chunked, blockwise can"),
        ("cope", "splash", r"model\.attention_implementation.*'cope'.*'splash'"),
        ("cope", "cudnn", r"model\.attention_implementation.*'cope'.*'cudnn'"),
    ],
)
def test_an_implementation_that_cannot_is_named(encoding, implementation, message):
    config = dataclasses.replace(
        SMALL, encoding=encoding, attention_implementation=implementation
    )
    tokens = jnp.zeros((1, 8), int)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))(tokens))
