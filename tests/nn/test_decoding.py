"""Decoding with a cache gives the logits of a full pass, however a row is split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.functional.additive import sinusoidal
from rope_jax.nn import cached_attention
from rope_jax.nn.absolute import LearnedOptions
from rope_jax.nn.biases import Alibi, FireOptions
from rope_jax.nn.cache import Cache, admit
from rope_jax.nn.cached_attention import Queries, attend
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.decoding import extend, init_cache
from rope_jax.nn.encodings import ENCODINGS
from rope_jax.nn.rotations import RandomRopeOptions, Rope, RopeOptions

SMALL = DecoderConfig(
    num_layers=2,
    model_dim=32,
    num_heads=2,
    head_dim=16,
    mlp_dim=48,
    learned=LearnedOptions(max_length=16),
    random_rope=RandomRopeOptions(max_length=512),
    fire=FireOptions(length=8),
)
TOKENS = jax.random.randint(jax.random.key(3), (3, 12), 0, 256)


@functools.cache
def build(**changes):
    """The small model with changes; see `build_from`."""
    return build_from(dataclasses.replace(SMALL, **changes))


def build_from(config):
    """A model none of whose parameters is zero, its full pass, and its `extend`.

    Every call of `step` has room for six tokens, so that it is compiled once.
    """
    model = Decoder(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    noise = jax.random.normal(jax.random.key(1), (4096,))
    params = jax.tree.map(lambda x: x + 0.2 * jnp.resize(noise, x.shape), params)
    model = nnx.merge(graphdef, params)
    full = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))

    @jax.jit
    def step(params, tokens, cache, key_mask):
        model = nnx.merge(graphdef, params)
        return extend(model, tokens, cache, key_mask=key_mask)

    return model, functools.partial(full, params), functools.partial(step, params)


def in_parts(step, cache, tokens, counts, *, width=6, left=()):
    """Logits of rows that come `counts[i][b]` at a time; rows of `left` padded there.

    Padding is 255, or whatever stands in its place in `tokens` past the row.
    """
    rows, at = len(tokens), np.zeros(len(tokens), int)
    logits = [[] for _ in range(rows)]
    for part in counts:
        text = np.full((rows, width), 255)
        mask = np.zeros((rows, width), bool)
        for b, count in enumerate(part):
            places = slice(width - count, width) if b in left else slice(0, count)
            text[b, places] = tokens[b, at[b] : at[b] + count]
            mask[b, places] = True
        out, cache = step(jnp.asarray(text), cache, jnp.asarray(mask))
        for b in range(rows):
            logits[b].extend(np.asarray(out[b])[mask[b]])
        at += np.asarray(part)
    return [np.asarray(row) for row in logits], cache


CACHED = [name for name in ENCODINGS if name != "random_rope"]


@pytest.mark.parametrize("encoding", CACHED)
def test_r18_r20_r21_any_split_of_a_row_gives_the_logits_of_a_full_pass(encoding):
    """4+6, 5+5+2 and 1x12; ragged rows, one padded on the left, in one compilation."""
    model, full, step = build(encoding=encoding)
    expected = np.asarray(full(TOKENS))
    assert np.abs(expected).max() > 1
    splits = (
        [(4, 4, 3), (6, 6, 1)],
        [(5, 5, 0), (5, 2, 6), (2, 5, 2)],
        [(1, 1, 1)] * 12,
    )
    for counts in splits:
        logits, cache = in_parts(
            step, init_cache(model, 3, 16), TOKENS, counts, left=[1]
        )
        assert cache.lengths.tolist() == np.sum(counts, axis=0).tolist()
        for b in range(3):
            np.testing.assert_allclose(
                logits[b], expected[b, : len(logits[b])], rtol=0, atol=1e-5
            )
    assert step.func._cache_size() == 1


def test_r18_positions_of_left_padding():
    """Mask [[0,0,1,1,1],[1,1,1,1,1]]: positions 0..2 and 0..4, whatever the padding."""
    model, _, step = build(encoding="rope")
    mask = jnp.array([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0], [0] * 6], bool)
    outs = []
    for pad in (0, 77):
        text = jnp.where(mask, TOKENS[:, :6], pad)
        logits, cache = step(text, init_cache(model, 3, 8), mask)
        outs.append(np.asarray(logits)[np.asarray(mask)])
        assert cache.lengths.tolist() == [3, 5, 0]
        assert cache.positions[:2].tolist() == [
            [0, 1, 2, 0, 0, 0, 0, 0],
            [0, 1, 2, 3, 4, 0, 0, 0],
        ]
    np.testing.assert_array_equal(*outs)


def test_positions_that_are_given_are_those_of_the_full_pass():
    model, _, _ = build(encoding="sinusoidal")
    at = jnp.array([3, 4, 9, 11])
    expected = jax.jit(Decoder.__call__)(model, TOKENS[:, :4], positions=at)
    step = jax.jit(extend)
    logits, cache = step(
        model, TOKENS[:, :2], init_cache(model, 3, 8), positions=at[:2]
    )
    again, cache = step(model, TOKENS[:, 2:4], cache, positions=at[2:])
    np.testing.assert_allclose(
        jnp.concatenate([logits, again], axis=1), expected, atol=1e-5
    )
    assert cache.positions[0].tolist() == [3, 4, 9, 11, 0, 0, 0, 0]


def test_r22_layers_agree_about_the_past(monkeypatch):
    """Three layers: each turns the token by the same position, at every step."""
    model, _, step = build(encoding="rope", num_layers=3)
    seen = []
    rotate_alone = Rope.rotate_alone

    def recording(self, query, key, positions):
        jax.debug.callback(lambda at: seen.append(at[0].tolist()), positions)
        return rotate_alone(self, query, key, positions)

    monkeypatch.setattr(Rope, "rotate_alone", recording)
    cache = init_cache(model, 3, 8)
    seen.clear()
    in_parts(step, cache, TOKENS, [(3, 3, 3), (1, 1, 1), (1, 1, 1)])
    jax.effects_barrier()
    # A padded place of a call repeats the last real one.
    at = [[0, 1, 2, 2, 2, 2], [3] * 6, [4] * 6]
    assert seen == [at[0]] * 3 + [at[1]] * 3 + [at[2]] * 3


def weights_of_zeros(heads, held, new, capacity):
    """Attention weights of head 0 with ALiBi where all products are zero."""
    encoding = Alibi(DecoderConfig(num_heads=heads), rngs=nnx.Rngs(0))
    cache = Cache(None, jnp.arange(capacity)[None], jnp.array([held]))

    @jax.jit
    def weights(cache):
        view, _ = admit(cache, jnp.array([new]), None, length=new, window=0)
        value = jnp.eye(capacity)[None, None]
        segment = {"key": jnp.ones_like(value), "value": value, "extras": None}
        queries = Queries(jnp.zeros((1, new, heads, capacity)), None, None)
        options = {"rolling": None, "window": 0, "scale": 1.0}
        return attend(queries, (segment,), view, encoding, **options)[0, :, 0]

    return np.asarray(weights(cache))


def softmax(rows):
    rows = np.exp(np.asarray(rows, np.float64))
    return rows / rows.sum(axis=-1, keepdims=True)


def test_a04_the_bias_of_one_query_covers_the_keys_held():
    """Position 3, slope 1/2 (the first of 8 heads), 4 of 8 slots filled."""
    weights = weights_of_zeros(8, held=3, new=1, capacity=8)
    expected = softmax([[-1.5, -1.0, -0.5, 0.0]])
    np.testing.assert_allclose(weights[:, :4], expected, atol=1e-6)
    assert (weights[:, 4:] == 0).all()


def test_a08_two_queries_at_the_end_of_five_keys():
    """Slope 1/4, the first of 4 heads."""
    weights = weights_of_zeros(4, held=3, new=2, capacity=5)
    masked = -np.inf
    expected = softmax([[-0.75, -0.5, -0.25, 0, masked], [-1, -0.75, -0.5, -0.25, 0]])
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    assert weights[0, 4] == 0


def test_a07_padding_takes_no_slot():
    """Mask [0,0,1,1,1]: three slots are written, and the logits are those without."""
    model, full, step = build(encoding="alibi")
    logits, cache = in_parts(
        step, init_cache(model, 3, 8), TOKENS, [(3, 3, 3)], left=[0]
    )
    np.testing.assert_allclose(logits[0], full(TOKENS)[0, :3], atol=1e-5)
    keys = np.stack([memory["key"] for (memory,) in cache.layers])
    written = np.abs(keys).max(axis=(0, 2, 4)) > 0
    assert written.tolist() == [[True] * 3 + [False] * 5] * 3


def test_s05_token_five_is_at_position_five():
    first = sinusoidal(jnp.arange(1), 6)[0]
    np.testing.assert_array_equal(first, [0, 1, 0, 1, 0, 1])
    cache = Cache(None, jnp.zeros((2, 8), jnp.int32), jnp.array([5, 0]))
    view, cache = admit(cache, jnp.array([1, 1]), None, length=1, window=0)
    assert view.positions.tolist() == view.slots.tolist() == [[5], [0]]
    assert cache.lengths.tolist() == [6, 1]


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        *(("rope", "float32"), ("alibi", "float32"), ("sinusoidal", "float32")),
        *(("rope", "bfloat16"), ("alibi", "bfloat16")),
    ],
)
def test_g07_long_rows_stay_with_the_full_pass(encoding, dtype):
    """Three hundred tokens in three parts, over more than one segment of slots."""
    model, full, _ = build(encoding=encoding, dtype=dtype, num_layers=1)
    text = jax.random.randint(jax.random.key(5), (1, 300), 0, 256)
    part = jax.jit(extend, static_argnames="last_only")
    cache, logits = init_cache(model, 1, 600), []
    for start in range(0, 300, 100):
        out, cache = part(model, text[:, start : start + 100], cache)
        logits.append(out)
    gap = np.abs(np.concatenate(logits, axis=1) - full(text))[0].max(axis=-1)
    size = np.abs(full(text)).max()
    limit = 1e-5 if dtype == "float32" else 0.01 * size
    assert gap.max() < limit
    assert gap[150:].mean() < 2 * gap[:150].mean() + 1e-6
    if dtype == "bfloat16":
        top = np.sort(np.asarray(full(text)[0]))[:, -2:]
        clear = top[:, 1] - top[:, 0] > 0.02 * size
        same = np.concatenate(logits, axis=1).argmax(-1) == full(text).argmax(-1)
        assert clear.sum() > 50
        assert same[0][clear].all()


def test_g06_a_full_cache_is_never_written_over():
    model, full, step = build(encoding="rope")
    with pytest.raises(
        ValueError, match="room for 8 tokens a row, got 6 held and up to 10"
    ):
        six = jnp.array([6, 6, 2])
        cache = dataclasses.replace(init_cache(model, 3, 8), lengths=six)
        extend(model, TOKENS[:, 6:10], cache)
    # Under jit lengths cannot be looked at: what finds no slot is dropped, and seen.
    logits, cache = in_parts(
        step, init_cache(model, 3, 8), TOKENS, [(6, 6, 2), (4, 4, 4)]
    )
    before = in_parts(step, init_cache(model, 3, 8), TOKENS, [(6, 6, 2), (2, 2, 2)])[1]
    for now, then in zip(cache.layers, before.layers, strict=True):
        np.testing.assert_array_equal(now[0]["key"][:2], then[0]["key"][:2])
    np.testing.assert_allclose(logits[0][:8], full(TOKENS)[0, :8], atol=1e-5)
    assert np.isnan(logits[0][8:]).all()
    assert np.isfinite(logits[2]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "linear"},
        {"temperature": "logn", "temperature_length": 4},
        {"rope": RopeOptions(scaling="rerope", window=3)},
    ],
    ids=["linear", "logn", "rerope"],
)
def test_what_changes_attention_holds_in_the_cache(changes):
    config = dataclasses.replace(SMALL, encoding="rope", **changes)
    model, full, step = build_from(config)
    logits, _ = in_parts(
        step,
        init_cache(model, 3, 16),
        TOKENS,
        [(5, 4, 6), (1, 2, 0), (6, 6, 6)],
        left=[1],
    )
    np.testing.assert_allclose(np.asarray(logits), full(TOKENS), atol=1e-5)
    without = build(encoding="rope")[1](TOKENS)
    assert np.abs(np.asarray(logits) - np.asarray(without)).max() > 1e-2


@pytest.mark.parametrize("encoding", ["alibi", "cope"])
def test_the_window_of_the_model_holds_in_the_cache(encoding):
    model, full, step = build(encoding=encoding, window=3)
    logits, _ = in_parts(
        step, init_cache(model, 3, 16), TOKENS, [(5, 5, 5), (1, 1, 1), (6, 6, 6)]
    )
    np.testing.assert_allclose(logits, full(TOKENS), atol=1e-5)
    without = build(encoding=encoding)[1](TOKENS)
    assert np.abs(logits - np.asarray(without)).max() > 1e-2


@pytest.mark.parametrize("encoding", ["rope", "alibi", "fox"])
def test_rows_cross_the_segments_of_a_layers_memory(encoding, monkeypatch):
    """Ragged rows in 5 + 5 + 2, each query seeing its last four tokens."""
    monkeypatch.setattr(cached_attention, "_SEGMENT_ON_CPU", 2)
    model, full, step = build(encoding=encoding, window=4, num_layers=1)
    cache = init_cache(model, 3, 16)
    sizes = [segment["key"].shape[-2] for segment in cache.layers[0]]
    assert sizes == [2, 2, 2, 2, 2, 4, 2]
    counts = [(5, 5, 0), (5, 2, 6), (2, 5, 2)]
    logits, cache = in_parts(step, cache, TOKENS, counts, left=[1])
    expected = np.asarray(full(TOKENS))
    for b in range(3):
        np.testing.assert_allclose(
            logits[b], expected[b, : len(logits[b])], rtol=0, atol=1e-5
        )
    keys = np.concatenate([segment["key"] for segment in cache.layers[0]], axis=2)
    written = np.abs(keys).max(axis=(1, 3)) > 0
    assert written.sum(axis=1).tolist() == cache.lengths.tolist() == [12, 12, 8]
    assert not written[:, 12:].any()


def test_grouped_heads_and_a_smaller_type():
    model, full, step = build(encoding="rope", num_kv_heads=1)
    cache = init_cache(model, 3, 16, dtype=jnp.bfloat16)
    assert [memory["key"].shape for (memory,) in cache.layers] == [(3, 1, 16, 16)] * 2
    assert {x.dtype for x in jax.tree.leaves(cache.layers)} == {jnp.dtype("bfloat16")}
    logits, _ = in_parts(step, cache, TOKENS, [(6, 6, 6), (6, 6, 6)])
    gap = np.abs(np.asarray(logits) - full(TOKENS)).max()
    assert 1e-5 < gap < 0.05 * np.abs(full(TOKENS)).max()


def test_last_only_gives_the_logits_after_each_row():
    model, full, _ = build(encoding="rope")
    mask = jnp.arange(6)[None] < jnp.array([[6], [2], [4]])
    last = jax.jit(functools.partial(extend, last_only=True))
    logits, _ = last(model, TOKENS[:, :6], init_cache(model, 3, 8), key_mask=mask)
    expected = np.asarray(full(TOKENS))[[0, 1, 2], [5, 1, 3]]
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        (
            {"encoding": "random_rope"},
            (2, 8),
            "spreads its positions over the whole row",
        ),
        ({"encoding": "learned"}, (2, 17), "table of 16 positions, got a cache of 17"),
        (
            {"rope": RopeOptions(scaling="dynamic_ntk", factor=2.0, original_length=8)},
            (2, 9),
            "'dynamic_ntk' changes its frequencies with every token past 8",
        ),
        ({}, (2, None), "either a capacity or rolling, got capacity=None"),
        ({}, (0, 8), "at least 1, got 0 and 8"),
        ({}, (2, 0), "at least 1, got 2 and 0"),
    ],
    ids=lambda value: "",
)
def test_a_cache_that_cannot_be_right_is_refused(changes, sizes, message):
    model = Decoder(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        init_cache(model, *sizes)


def test_arguments_that_do_not_fit_are_named():
    model, _, _ = build(encoding="rope")
    cache = init_cache(model, 3, 8)
    with pytest.raises(ValueError, match=r"tokens must be \[3, T\].*got \(2, 12\)"):
        extend(model, TOKENS[:2], cache)
    with pytest.raises(ValueError, match=r"key_mask must have the shape of tokens"):
        extend(model, TOKENS, cache, key_mask=jnp.ones((3, 4), bool))
