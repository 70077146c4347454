"""A cache of the first tokens and the last ones, for rows without end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.nn.biases import FireOptions
from rope_jax.nn.cache import Rolling
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.decoding import extend, init_cache

ONE_LAYER = DecoderConfig(
    num_layers=1,
    model_dim=32,
    num_heads=2,
    head_dim=16,
    mlp_dim=48,
    fire=FireOptions(length=4),
)
TOKENS = jax.random.randint(jax.random.key(3), (2, 14), 0, 256)


@functools.cache
def build(encoding, num_layers=1):
    config = dataclasses.replace(ONE_LAYER, encoding=encoding, num_layers=num_layers)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    noise = jax.random.normal(jax.random.key(1), (4096,))
    params = jax.tree.map(lambda x: x + 0.2 * jnp.resize(noise, x.shape), params)
    return nnx.merge(graphdef, params)


@pytest.mark.parametrize(
    ("encoding", "sinks"),
    [
        *(("rope", 2), ("xpos", 2), ("pope", 2), ("alibi", 2), ("fire", 2)),
        *(("cope", 2), ("shaw", 2), ("fox", 0)),
    ],
)
def test_a_layer_sees_the_sinks_and_the_window_as_a_row_of_their_own(encoding, sinks):
    """Row 0 is long; row 1 has three tokens less, at its end."""
    model, rolling = build(encoding), Rolling(sinks, 4)
    mask = jnp.arange(14)[None] < jnp.array([[14], [11]])
    run = jax.jit(extend)
    logits, cache = run(
        model, TOKENS, init_cache(model, 2, rolling=rolling), key_mask=mask
    )
    size = sinks + 4
    assert cache.layers["key"].shape[-2] == size
    assert cache.lengths.tolist() == [14, 11]
    full = jax.jit(Decoder.__call__)
    start = full(model, TOKENS[:, :size])  # nothing has left the cache yet
    np.testing.assert_allclose(logits[:, :size], start, atol=1e-5)
    for t in (size, 10, 13):
        row = jnp.concatenate([TOKENS[:, :sinks], TOKENS[:, t - 3 : t + 1]], axis=1)
        alone = full(model, row)[:, -1]
        np.testing.assert_allclose(logits[0, t], alone[0], atol=1e-5)
        if t < 11:
            np.testing.assert_allclose(logits[1, t], alone[1], atol=1e-5)


def test_token_by_token_is_the_same_and_positions_stay_exact_far_out():
    """Two layers; then a row that has come a billion tokens far."""
    model, rolling = build("rope", num_layers=2), Rolling(1, 5)
    run = jax.jit(extend)
    at_once, cache = run(model, TOKENS, init_cache(model, 2, rolling=rolling))
    one, step = init_cache(model, 2, rolling=rolling), []
    for t in range(14):
        out, one = run(model, TOKENS[:, t : t + 1], one)
        step.append(out)
    np.testing.assert_allclose(jnp.concatenate(step, axis=1), at_once, atol=1e-5)
    # The ring comes round every five tokens, so a row that starts again from sinks
    # alone, five hundred million tokens late, has the logits of one that is new.
    sinks = run(model, TOKENS[:, :1], init_cache(model, 2, rolling=rolling))[1]
    late, early = dataclasses.replace(sinks, lengths=sinks.lengths + 500_000_000), sinks
    for t in range(1, 11):
        new, early = run(model, TOKENS[:, t : t + 1], early)
        far, late = run(model, TOKENS[:, t : t + 1], late)
    assert late.lengths.tolist() == [500_000_011] * 2
    # Only one layer deep are they the same: deeper keys remember what came before.
    assert np.isfinite(np.asarray(far)).all()
    first = early.layers["key"][0]
    np.testing.assert_allclose(
        np.linalg.norm(late.layers["key"][0], axis=-1),
        np.linalg.norm(first, axis=-1),
        atol=1e-5,
    )


@pytest.mark.parametrize("encoding", ["sinusoidal", "integer", "binary"])
def test_positions_in_the_embedding_cannot_move(encoding):
    with pytest.raises(ValueError, match="adds positions to the embedding"):
        init_cache(build(encoding), 2, rolling=Rolling(2, 4))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="sinks must be 0, got 2"):
        init_cache(build("fox"), 2, rolling=Rolling(2, 4))
    with pytest.raises(ValueError, match="window of at least 1, got 2 and 0"):
        Rolling(2, 0)
    model = build("rope")
    with pytest.raises(ValueError, match="either a capacity or rolling"):
        init_cache(model, 2, 8, rolling=Rolling(2, 4))
    cache = init_cache(model, 2, rolling=Rolling(2, 4))
    with pytest.raises(ValueError, match="positions must not be given with a rolling"):
        extend(model, TOKENS, cache, positions=jnp.arange(14))
