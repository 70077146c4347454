"""A cache of the first tokens and the last ones, for rows without end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.nn import cached_attention
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
def build(encoding):
    config = dataclasses.replace(ONE_LAYER, encoding=encoding)
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
    assert cache.layers[0][0]["key"].shape[-2] == size
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


def test_sinks_in_the_last_segment_of_slots(monkeypatch):
    """Segments of 4 slots and 6: the last sinks are with what comes after them."""
    monkeypatch.setattr(cached_attention, "_SEGMENT_ON_CPU", 4)
    model = build("rope")
    cache = init_cache(model, 2, rolling=Rolling(9, 1))
    logits, _ = jax.jit(lambda tokens, cache: extend(model, tokens, cache))(
        TOKENS, cache
    )
    row = jnp.concatenate([TOKENS[:, :9], TOKENS[:, 13:]], axis=1)
    alone = jax.jit(Decoder.__call__)(model, row)[:, -1]
    np.testing.assert_allclose(logits[:, 13], alone, atol=1e-5)


def test_token_by_token_is_the_same_however_far_the_row_has_come():
    """The late row starts again from its sink, half a billion tokens on.

    The ring is full of new tokens after five of them, so that the logits are those of
    the row that has just begun: positions that far turn the keys exactly.
    """
    model, rolling = build("rope"), Rolling(1, 5)
    run = jax.jit(extend)
    at_once, _ = run(model, TOKENS, init_cache(model, 2, rolling=rolling))
    cache, steps, late = init_cache(model, 2, rolling=rolling), [], None
    for t in range(14):
        token = TOKENS[:, t : t + 1]
        logits, cache = run(model, token, cache)
        steps.append(logits)
        if late is not None:
            far, late = run(model, token, late)
        else:
            late = dataclasses.replace(cache, lengths=cache.lengths + 500_000_000)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), at_once, atol=1e-5)
    assert late.lengths.tolist() == [500_000_014] * 2
    np.testing.assert_allclose(far, logits, atol=1e-5)


@pytest.mark.parametrize("encoding", ["sinusoidal", "integer", "binary"])
def test_positions_in_the_embedding_cannot_move(encoding):
    with pytest.raises(ValueError, match="adds positions to the embedding"):
        init_cache(build(encoding), 2, rolling=Rolling(2, 4))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="sinks must be 0, got 2"):
        init_cache(build("fox"), 2, rolling=Rolling(2, 4))
    linear = Decoder(
        dataclasses.replace(ONE_LAYER, attention="linear"), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="linear attention keeps a sum over all"):
        init_cache(linear, 2, rolling=Rolling(2, 4))
    with pytest.raises(ValueError, match="window of at least 1, got 2 and 0"):
        Rolling(2, 0)
    model = build("rope")
    with pytest.raises(ValueError, match="either a capacity or rolling"):
        init_cache(model, 2, 8, rolling=Rolling(2, 4))
    cache = init_cache(model, 2, rolling=Rolling(2, 4))
    with pytest.raises(ValueError, match="positions must not be given with a rolling"):
        extend(model, TOKENS, cache, positions=jnp.arange(14))
