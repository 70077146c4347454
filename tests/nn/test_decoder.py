"""The decoder with every encoding: causality, padding, packing, dtypes, options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.nn.absolute import LearnedOptions
from rope_jax.nn.biases import FireOptions
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.encodings import ENCODINGS
from rope_jax.nn.rotations import RandomRopeOptions

SMALL = DecoderConfig(
    num_layers=2,
    model_dim=32,
    num_heads=2,
    head_dim=16,
    mlp_dim=48,
    learned=LearnedOptions(max_length=32),
    random_rope=RandomRopeOptions(max_length=512),
    fire=FireOptions(length=16),
)
# Positions of random_rope are spread over the whole row, so they depend on its length.
SPREAD = ("random_rope",)


def build(**changes):
    """A small model none of whose parameters is zero, as (apply, params)."""
    made = Decoder(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(made)
    noise = jax.random.normal(jax.random.key(1), (4096,))

    def disturb(array):
        return array + 0.2 * jnp.resize(noise, array.shape)

    params = jax.tree.map(disturb, params)

    def apply(params, tokens, **kwargs):
        return nnx.merge(graphdef, params)(tokens, **kwargs)

    return apply, params


@functools.cache
def model(encoding, **changes):
    """The model as a function of tokens, run operation by operation.

    Twenty encodings at a dozen shapes would spend minutes in the compiler; the
    compiled model is the subject of the training and evaluation tests.
    """
    apply, params = build(encoding=encoding, **changes)

    def run(*args, **kwargs):
        with jax.disable_jit():
            return apply(params, *args, **kwargs)

    return run


def tokens(rows, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, 256)


every_encoding = pytest.mark.parametrize("encoding", list(ENCODINGS))
fixed_encoding = pytest.mark.parametrize(
    "encoding", [name for name in ENCODINGS if name not in SPREAD]
)


@every_encoding
def test_causality_by_gradient(encoding):
    """The logits at t have exactly zero gradient in every later embedding."""
    apply, params = build(encoding=encoding)
    text = jnp.arange(12)[None]  # distinct bytes, so a row of the table is a token

    def logit(params):
        return apply(params, text)[0, 4].sum()

    with jax.disable_jit():
        grad = jax.grad(logit)(params)["embedding"][...]
    moved = np.abs(np.asarray(grad)).sum(-1)
    assert (moved[:5] > 0).all()
    assert (moved[5:12] == 0).all()


@fixed_encoding
def test_a_prefix_has_the_same_logits_at_two_lengths(encoding):
    run = model(encoding)
    text = tokens(2, 12)
    np.testing.assert_allclose(run(text[:, :9]), run(text)[:, :9], rtol=0, atol=1e-5)


@fixed_encoding
def test_r18_left_padding_changes_nothing(encoding):
    """Padded rows give the logits of unpadded ones, whatever the padding holds."""
    run = model(encoding)
    text = tokens(2, 12)
    mask = jnp.arange(12)[None] >= jnp.array([[3], [0]])
    padded = run(text, key_mask=mask)
    np.testing.assert_allclose(padded[0, 3:], run(text[:, 3:])[0], atol=1e-5)
    np.testing.assert_allclose(padded[1], run(text)[1], atol=1e-5)
    other = run(text.at[0, :3].set(7), key_mask=mask)
    np.testing.assert_allclose(other[0, 3:], padded[0, 3:], atol=1e-5)


@fixed_encoding
def test_r19_packed_documents_equal_documents_alone(encoding):
    """A document of nine tokens and one of three, in both orders, in one row each."""
    run = model(encoding)
    text = tokens(2, 12)
    ids = jnp.where(jnp.arange(12)[None] < jnp.array([[9], [3]]), 1, 2)
    packed = run(text, segment_ids=ids)
    long = jnp.stack([text[0, :9], text[1, 3:]])
    short = jnp.stack([text[0, 9:], text[1, :3]])
    long_alone, short_alone = run(long), run(short)
    np.testing.assert_allclose(packed[0, :9], long_alone[0], atol=1e-5)
    np.testing.assert_allclose(packed[1, 3:], long_alone[1], atol=1e-5)
    np.testing.assert_allclose(packed[0, 9:], short_alone[0], atol=1e-5)
    np.testing.assert_allclose(packed[1, :3], short_alone[1], atol=1e-5)


@pytest.mark.parametrize(
    "encoding",
    [
        *("none", "rope", "prope", "xpos", "pope", "alibi", "t5", "kerple"),
        *("sandwich", "shaw", "fox", "cable", "cope", "dape"),
    ],
)
def test_relative_encodings_ignore_an_offset(encoding):
    """Each row has an offset of its own, and none sees another row's."""
    run = model(encoding)
    text = tokens(2, 12)
    far = run(text, positions=jnp.arange(12)[None] + jnp.array([[0], [1_000_000]]))
    np.testing.assert_allclose(far, run(text), atol=3e-5)


def test_random_rope_makes_its_own_positions():
    """Spread evenly over 512 in evaluation, drawn anew for each key in training."""
    run = model("random_rope")
    text = tokens(1, 8)
    with pytest.raises(ValueError, match="positions must not be given"):
        run(text, positions=jnp.arange(8))
    np.testing.assert_array_equal(run(text), run(text))
    keys = jax.random.key(0), jax.random.key(1)
    drawn = [run(text, dropout_key=key) for key in keys]
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-3
    apply, params = build(
        encoding="random_rope", random_rope=RandomRopeOptions(max_length=8)
    )
    spread = functools.partial(apply, params)
    np.testing.assert_allclose(spread(text), model("rope")(text), atol=1e-5)
    with pytest.raises(ValueError, match="draws from 8 positions, got a sequence of 9"):
        spread(tokens(1, 9))


@pytest.mark.parametrize("encoding", ["sinusoidal", "integer", "binary", "learned"])
def test_r20_absolute_encodings_use_the_position_they_are_given(encoding):
    """Four tokens at positions 4..7 are not four tokens at positions 0..3."""
    run = model(encoding)
    text = tokens(1, 4)
    at_four = run(text, positions=jnp.arange(4) + 4)
    assert np.abs(at_four - run(text)).max() > 1e-3
    rows = run(text, positions=jnp.broadcast_to(jnp.arange(4) + 4, (1, 4)))
    np.testing.assert_allclose(rows, at_four, atol=1e-6)


@every_encoding
def test_order_matters_except_to_none(encoding):
    """Without an encoding one layer's last logits do not see the order before them."""
    run = model(encoding, num_layers=1)
    text = tokens(2, 12)
    swapped = text.at[:, 0].set(text[:, 5]).at[:, 5].set(text[:, 0])
    gap = np.abs(run(swapped)[:, -1] - run(text)[:, -1]).max()
    assert (gap < 1e-5) == (encoding == "none")


def test_t19_an_untrained_model_is_uniform():
    untrained = Decoder(SMALL, rngs=nnx.Rngs(0))
    for length in (4, 16):
        logits = untrained(tokens(2, length))
        np.testing.assert_array_equal(logits, jnp.zeros((2, length, 256)))


@every_encoding
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_and_parameters_too(encoding, dtype):
    apply, params = build(encoding=encoding, dtype=dtype)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    shape = jax.eval_shape(apply, params, tokens(2, 8))
    assert (shape.shape, shape.dtype) == ((2, 8, 256), jnp.float32)


def test_bfloat16_stays_near_float32():
    text = tokens(2, 16)
    exact, rounded = model("rope")(text), model("rope", dtype="bfloat16")(text)
    assert np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


def test_t12_dropout_needs_a_key():
    text = tokens(2, 16)
    plain = model("rope")
    dropped = model("rope", dropout=0.5)
    np.testing.assert_array_equal(plain(text), dropped(text))
    np.testing.assert_array_equal(dropped(text), dropped(text))
    key = jax.random.key(3)
    assert np.abs(dropped(text, dropout_key=key) - dropped(text)).max() > 0.01
    np.testing.assert_array_equal(
        dropped(text, dropout_key=key), dropped(text, dropout_key=key)
    )
    np.testing.assert_array_equal(plain(text, dropout_key=key), plain(text))


def test_every_dropout_key_gives_another_model():
    apply, params = build(dropout=0.5, num_layers=1)
    text = tokens(1, 4)
    keys = jax.random.split(jax.random.key(0), 64)
    run = jax.jit(jax.vmap(lambda key: apply(params, text, dropout_key=key)[0, 0]))
    assert len(np.unique(np.asarray(run(keys)[:, 0]))) == 64


def test_remat_gives_the_same_gradients():
    grads = []
    for remat in ("none", "dots", "full"):
        apply, params = build(remat=remat)

        def loss(params, apply=apply):
            return jnp.mean(apply(params, tokens(2, 8)) ** 2)

        grads.append(jax.jit(jax.grad(loss))(params))
    for other in grads[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            grads[0],
            other,
        )


@pytest.mark.parametrize(("unroll", "apart"), [(1, False), (2, True)])
def test_what_is_computed_again_is_not_shared_in_a_turn_of_several_layers(
    unroll, apart
):
    """Shared with what came first, it would be kept, and remat save nothing."""
    apply, params = build(remat="full", unroll=unroll, num_layers=2)
    jaxpr = jax.make_jaxpr(lambda params: apply(params, tokens(2, 8)))(params)
    assert f"prevent_cse={apart}" in str(jaxpr)
    assert f"prevent_cse={not apart}" not in str(jaxpr)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 1},
        {"qk_norm": True},
        {"mlp": "plain"},
        {"tied_output": True},
        {"attention_implementation": "blockwise"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_options_run_and_stay_causal(changes):
    run = model("rope", **changes)
    text = tokens(2, 12)
    full = run(text)
    np.testing.assert_allclose(run(text[:, :9]), full[:, :9], atol=1e-5)
    gap = np.abs(full - model("rope")(text)).max()
    assert gap < 1e-4 if "attention_implementation" in changes else gap > 1e-3


def test_grouped_heads_have_fewer_parameters():
    _, params = build(num_kv_heads=1)
    attention = params["blocks"]["attention"]
    assert attention["query"]["kernel"].shape == (2, 32, 2, 16)
    assert attention["key"]["kernel"].shape == (2, 32, 1, 16)


def test_last_gives_the_end_of_the_logits():
    run = model("alibi")
    text = tokens(2, 12)
    np.testing.assert_allclose(run(text, last=3), run(text)[:, -3:], atol=1e-6)


def test_one_compilation_serves_all_positions():
    apply, params = build(encoding="rope")
    traces = []

    @jax.jit
    def run(params, text, start):
        traces.append(1)
        return apply(params, text, positions=jnp.arange(6) + start)

    for start in range(10):
        run(params, tokens(1, 6), start)
    assert len(traces) == 1


def test_s04_learned_positions_end_at_their_table():
    apply, params = build(encoding="learned")
    with pytest.raises(ValueError, match=r"table of 32 positions.*sequence of 33"):
        apply(params, tokens(1, 33))
    inside = apply(params, tokens(1, 4), positions=jnp.arange(4) + 28)
    assert np.isfinite(inside).all()
    past = apply(params, tokens(1, 4), positions=jnp.arange(4) + 29)
    assert np.isnan(past).all()  # loud: never the last row again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoding": "ropee"}, r"model.encoding must be one of none, .*'ropee'"),
        ({"head_dim": 15}, "model.head_dim.*even.*15"),
        ({"num_heads": 0}, "model.num_heads must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide model.num_heads, got 3 and 2"),
        ({"mlp": "wide"}, "model.mlp must be one of gated, plain; got 'wide'"),
        ({"dtype": "float16"}, "model.dtype must be one of float32, bfloat16"),
        ({"remat": "some"}, "model.remat must be one of none, dots, full"),
        ({"dropout": 1.0}, r"model.dropout must be in \[0, 1\), got 1.0"),
        (
            {"attention_implementation": "flash"},
            "implementation must be one of.*'flash'",
        ),
        (
            {"encoding": "learned", "learned": LearnedOptions(0)},
            "model.learned.max_length must be at least 1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_named(changes, message):
    def run():
        apply, params = build(**changes)
        return apply(params, tokens(1, 4))

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run)
