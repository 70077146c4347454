"""Generation: one compilation, one key a step, and nothing written past the end."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.nn import generation
from rope_jax.nn.cache import Rolling
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.decoding import init_cache
from rope_jax.nn.generation import generate, stream, stream_over
from rope_jax.nn.sampling import Sampling

KEY = jax.random.key(0)
CONFIG = DecoderConfig(num_layers=1, model_dim=32, num_heads=2, head_dim=16, mlp_dim=48)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def uniform():
    """Untrained: every byte is as likely as any other, whatever came before."""
    return nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def model(uniform):
    graphdef, params = uniform
    noise = jax.random.normal(jax.random.key(1), (4096,))
    params = jax.tree.map(lambda x: x + 0.2 * jnp.resize(noise, x.shape), params)
    return graphdef, params


def test_greedy_text_is_that_of_full_passes_with_ragged_prompts(model):
    """Rows of 4 and 2 tokens, the second padded on the left."""
    graphdef, params = model
    prompts = np.array([[82, 111, 80, 69], [7, 7, 65, 66]])
    mask = np.array([[True] * 4, [False, False, True, True]])
    tokens, lengths = generate(
        graphdef,
        params,
        prompts,
        max_new_tokens=6,
        key=KEY,
        key_mask=mask,
        sampling=GREEDY,
        chunk=4,
    )
    assert lengths.tolist() == [10, 8]
    assert tokens[1, :2].tolist() == [65, 66]
    assert tokens[1, 8:].tolist() == [0, 0]
    # The text is its own proof: each new byte is the largest logit after those before.
    logits = nnx.merge(graphdef, params)(jnp.asarray(tokens))
    for row, start in ((0, 4), (1, 2)):
        following = np.asarray(logits[row].argmax(-1))[start - 1 : lengths[row] - 1]
        np.testing.assert_array_equal(tokens[row, start : lengths[row]], following)


def test_g04_every_step_has_its_own_key(uniform):
    graphdef, params = uniform
    prompts = np.array([[0]])

    def text(seed, chunk=16):
        key = jax.random.key(seed)
        options = {"max_new_tokens": 64, "key": key, "chunk": chunk}
        return generate(graphdef, params, prompts, **options)[0][0, 1:]

    first = text(0)
    assert len(set(first.tolist())) > 40
    np.testing.assert_array_equal(text(0), first)
    assert (text(1) != first).mean() > 0.9
    np.testing.assert_array_equal(text(0, chunk=24), first)


def test_one_compilation_serves_all_steps(model):
    graphdef, params = model
    before = generation._steps._cache_size()
    room = init_cache(nnx.merge(graphdef, params), 1, 100)
    parts = stream(
        graphdef,
        params,
        np.array([[1, 2, 3]]),
        max_new_tokens=50,
        key=KEY,
        cache=room,
        chunk=8,
    )
    assert [part.shape for part in parts] == [(1, 8)] * 6 + [(1, 2)]
    assert generation._steps._cache_size() == before + 1


def test_a_rolling_cache_goes_on_for_as_long_as_it_is_asked(model):
    graphdef, params = model
    rolling = init_cache(nnx.merge(graphdef, params), 1, rolling=Rolling(1, 7))
    parts = stream(
        graphdef,
        params,
        np.array([[1, 2, 3]]),
        max_new_tokens=None,
        key=KEY,
        cache=rolling,
        chunk=8,
    )
    parts = list(itertools.islice(parts, 5))
    assert [part.shape for part in parts] == [(1, 8)] * 5


def test_zero_new_tokens_give_the_prompt_back(model):
    graphdef, params = model
    prompts = np.array([[5, 6, 7], [8, 9, 9]])
    mask = np.array([[True] * 3, [True, False, False]])
    tokens, lengths = generate(
        graphdef, params, prompts, max_new_tokens=0, key=KEY, key_mask=mask
    )
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": np.zeros((1, 0), int)}, r"at least one token, got lengths \[0\]"),
        ({"prompts": np.zeros((0, 3), int)}, r"at least one token, got lengths \[\]"),
        (
            {"key_mask": np.zeros((1, 6), bool)},
            r"at least one token, got lengths \[0\]",
        ),
        ({"prompts": np.array([[1, 256]])}, "tokens of 0 to 255, got 1 to 256"),
        ({"prompts": np.ones((1, 3))}, r"prompts must be integers.*float64"),
        ({"prompts": np.zeros((1, 8), int)}, "room for 8 tokens.*up to 12"),
        ({"prompts": np.zeros((1, 9), int)}, "room for 8 tokens.*up to 13"),
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative, got -1"),
        ({"max_new_tokens": None}, "needs a cache with rolling"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"key_mask": np.ones((1, 5), bool)}, "key_mask must be bool of the shape"),
        ({"prompts": np.zeros((2, 3), int)}, "a row for each prompt, 2, got 1"),
        ({}, "room for 8 tokens a row, got 0 held and up to 10"),
    ],
    ids=lambda value: next(iter(value), "g06") if isinstance(value, dict) else "",
)
def test_g06_what_cannot_be_done_is_refused_before_any_work(model, changes, message):
    """A cache of 8, a prompt of 6, 4 new tokens, unless told otherwise."""
    graphdef, params = model
    options = {
        "prompts": np.zeros((1, 6), int),
        "max_new_tokens": 4,
        "cache": init_cache(nnx.merge(graphdef, params), 1, 8),
        "key": KEY,
    }
    with pytest.raises(ValueError, match=message):
        stream(graphdef, params, **(options | changes))  # not iterated


@pytest.mark.parametrize(("batch", "capacity"), [(1, 257), (8, 2048)])
def test_the_cache_is_written_in_place(model, batch, capacity):
    """One step's own memory has no room for a second copy of it."""
    graphdef, params = model
    config = dataclasses.replace(CONFIG, num_layers=3)
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    )
    cache = jax.eval_shape(
        lambda params: init_cache(nnx.merge(graphdef, params), batch, capacity),
        params,
    )
    logits = jax.ShapeDtypeStruct((batch, 256), jnp.float32)
    draws, numbers = (KEY, np.int32(0)), (np.int32(0), np.int32(4))
    steps = generation._steps.lower(
        graphdef, GREEDY, 4, params, logits, cache, draws, *numbers
    )
    compiled = steps.compile()
    memory = compiled.memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= held
    key = jax.tree.leaves(cache.layers)[0].shape
    shown = rf"= f32\[{','.join(map(str, key))}\]\S* copy\("
    assert not re.search(shown, compiled.as_text())
    if batch > 1:  # what a step needs by itself is more than so small a cache
        assert memory.temp_size_in_bytes < held / 4


def test_rows_split_over_devices_give_the_same_text(model):
    """Seven rows on three devices, drawn: 2, 2 and 3 of them, each row as before."""
    graphdef, params = model
    prompts = np.arange(7)[:, None] + np.array([[3, 1, 4]])
    options = {"max_new_tokens": 5, "key": KEY, "chunk": 2}
    cache = functools.partial(init_cache, nnx.merge(graphdef, params), capacity=8)
    alone = np.concatenate(
        [*stream(graphdef, params, prompts, cache=cache(7), **options)], axis=1
    )
    parts = [
        *stream_over(
            jax.devices()[:3], graphdef, params, prompts, make_cache=cache, **options
        )
    ]
    assert [part.shape for part in parts] == [(7, 2), (7, 2), (7, 1)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), alone)
    assert len({tuple(row) for row in alone.tolist()}) == 7  # each its own draws
