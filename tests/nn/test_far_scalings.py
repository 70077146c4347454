"""ReRoPE, Self-Extend and the log-n temperature in the decoder's attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.rotations import RopeOptions

ONE_LAYER = DecoderConfig(
    num_layers=1, model_dim=32, num_heads=2, head_dim=16, mlp_dim=48
)
TOKENS = jax.random.randint(jax.random.key(3), (2, 90), 0, 256)
REROPE = {"scaling": "rerope", "window": 7}
SELF_EXTEND = {"scaling": "self_extend", "window": 7, "group": 3}
DOCUMENTS = jnp.where(jnp.arange(90) < 40, 1, 2)[None].repeat(2, axis=0)


def build(rope=None, **changes):
    """(a jitted call of the model, its parameters), none of them at a zero."""
    options = RopeOptions(**(rope or {}))
    config = dataclasses.replace(ONE_LAYER, rope=options, **changes)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    noise = jax.random.normal(jax.random.key(1), (4096,))
    params = jax.tree.map(lambda x: x + 0.2 * jnp.resize(noise, x.shape), params)
    return jax.jit(lambda p, t, **kw: nnx.merge(graphdef, p)(t, **kw)), params


def float64_layer(params, tokens, distance, temperature):
    """The one layer's logits for a row: rotations by distance[i, j], in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    block = jax.tree.map(lambda x: x[0], p["blocks"])
    x = p["embedding"][np.asarray(tokens)] * 32**0.5
    y = norm(x, block["attention_norm"]["scale"])
    names = ("query", "key", "value")
    q, k, v = (
        np.einsum("td,dnh->tnh", y, block["attention"][n]["kernel"]) for n in names
    )
    q, k = q[..., :8] + 1j * q[..., 8:], k[..., :8] + 1j * k[..., 8:]
    turn = np.exp(1j * distance[..., None] * 10_000.0 ** (-np.arange(8) / 8))
    scores = np.einsum("tnr,snr,tsr->nts", q, k.conj(), turn).real / 4
    scores *= temperature[:, None]
    length = len(x)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("nts,snh->tnh", weights, v)
    x = x + np.einsum("tnh,nhd->td", mixed, block["attention"]["out"]["kernel"])
    y = norm(x, block["mlp_norm"]["scale"])
    gate = y @ block["mlp"]["gate"]["kernel"]
    up = y @ block["mlp"]["up"]["kernel"]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp"]["down"]["kernel"]
    return norm(x, p["norm"]["scale"]) @ p["head"]


@pytest.mark.parametrize("implementation", ["xla", "chunked", "blockwise"])
@pytest.mark.parametrize("rope", [REROPE, SELF_EXTEND], ids=lambda o: o["scaling"])
def test_logits_are_those_of_the_replaced_distances(rope, implementation):
    apply, params = build(
        rope,
        attention_implementation=implementation,
        temperature="logn",
        temperature_length=16,
    )
    at = np.arange(90)
    near = at[:, None] - at
    far = 7 + 0 * near
    if rope is SELF_EXTEND:
        far = at[:, None] // 3 - at // 3 + 7 - 2
    distance = np.where(near < 7, near, far)
    temperature = np.maximum(1.0, np.log(at + 1) / np.log(16))
    right = float64_layer(params, TOKENS[0], distance, temperature)
    np.testing.assert_allclose(apply(params, TOKENS)[0], right, atol=1e-4)
    other = float64_layer(params, TOKENS[0], near, temperature)
    assert np.abs(right - other).max() > 1e-2
    without = float64_layer(params, TOKENS[0], distance, np.ones(90))
    assert np.abs(right - without)[17:].max() > 1e-3
    np.testing.assert_array_equal(right[:16], without[:16])


@pytest.mark.parametrize("rope", [REROPE, SELF_EXTEND], ids=lambda o: o["scaling"])
def test_packed_documents_are_encoded_as_alone(rope):
    options = {"temperature": "logn", "temperature_length": 16}
    apply, params = build(rope, **options)
    packed = apply(params, TOKENS, segment_ids=DOCUMENTS)
    alone = apply(params, TOKENS[:, 40:])
    np.testing.assert_allclose(packed[:, 40:], alone, atol=3e-5)


def test_gradients_pass_through_both_scores():
    apply, params = build(SELF_EXTEND)

    def loss(params):
        return jnp.sum(apply(params, TOKENS) ** 2)

    gradient = jax.grad(loss)(params)["blocks"]["attention"]["key"]["kernel"][...]
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@pytest.mark.parametrize(
    ("rope", "changes", "message"),
    [
        ({"scaling": "rerope"}, {}, "'rerope' needs a window of at least 1, got 0"),
        (
            {"scaling": "self_extend", "window": 4},
            {},
            "'self_extend' needs a group of at least 1, got 0",
        ),
        ({"window": 4}, {}, "window 4 needs the scaling rerope or self_extend"),
        (REROPE | {"group": 2}, {}, "group 2 needs the scaling self_extend, got"),
        (REROPE | {"factor": 2.0}, {}, "factor 2 needs a scaling other than 'rerope'"),
        (REROPE, {"encoding": "pope"}, "scaling must be 'none' for encoding 'pope'"),
        ({"fraction": 0.5}, {"encoding": "pope"}, "rope.fraction must be 1.0 for enc"),
        (
            {"layout": "interleaved"},
            {"encoding": "pope"},
            "rope.layout must be 'half' for encoding 'pope', .*got 'interleaved'",
        ),
        (REROPE, {"encoding": "xpos"}, "'rerope' does not fit encoding 'xpos'"),
        (REROPE, {"encoding": "prope"}, "scaling must be 'none' for encoding 'prope'"),
        (
            {},
            {"temperature": "log"},
            "model.temperature must be one of none, logn; got 'log'",
        ),
        (
            {},
            {"temperature": "logn"},
            "model.temperature_length must be at least 2, got 0",
        ),
        (
            {},
            {"temperature": "logn", "temperature_length": 9, "attention": "linear"},
            "temperature must be 'none' for model.attention 'linear'",
        ),
        ({}, {"temperature_length": 9}, "temperature_length needs .* got 9"),
        (
            {},
            {
                "temperature": "logn",
                "temperature_length": 9,
                "encoding": "random_rope",
            },
            "'random_rope' makes positions of its own",
        ),
    ],
)
def test_d04_options_that_do_not_fit_are_named(rope, changes, message):
    with pytest.raises(ValueError, match=message):
        build(rope, **changes)


def test_linear_attention_has_no_pairs_to_replace_distances_of():
    apply, params = build(REROPE, attention="linear")
    with pytest.raises(ValueError, match=r"must not be 'rerope' for model\.attention"):
        jax.eval_shape(apply, params, TOKENS)
