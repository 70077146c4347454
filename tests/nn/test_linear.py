"""The decoder with linear attention: the formula, causality, packing, draws."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.experiment.config import MeshConfig
from rope_jax.experiment.mesh import batch_sharding, make_mesh, param_shardings
from rope_jax.functional.feature_maps import favor_projection
from rope_jax.nn.absolute import LearnedOptions
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.encodings import ENCODINGS, make_encoding
from rope_jax.nn.linear import LinearAttention, LinearOptions, make_draws
from rope_jax.nn.rotations import RandomRopeOptions, RopeOptions

SMALL = DecoderConfig(
    attention="linear",
    linear=LinearOptions(num_features=10),
    num_layers=2,
    model_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=24,
    learned=LearnedOptions(max_length=32),
    random_rope=RandomRopeOptions(max_length=64),
)
KINDS = {
    "favor_softmax": LinearOptions(num_features=10),
    "favor_relu": LinearOptions("favor_relu", num_features=10),
    "elu": LinearOptions("elu"),
}
LINEAR = "none", "integer", "binary", "sinusoidal", "learned", "rope", "prope"
LINEAR += ("random_rope",)


def build(**changes):
    """A small model none of whose parameters is zero, as (apply, params)."""
    config = dataclasses.replace(SMALL, **changes)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    noise = jax.random.normal(jax.random.key(1), (4096,))
    params = jax.tree.map(lambda x: x + 0.2 * jnp.resize(noise, x.shape), params)

    def apply(params, tokens, **kwargs):
        return nnx.merge(graphdef, params)(tokens, **kwargs)

    return apply, params


@functools.cache
def compiled(encoding="rope", kind="favor_softmax", **changes):
    """Logits, and the gradient of their sum at token 4 of row 0, at one shape."""
    apply, params = build(encoding=encoding, linear=KINDS[kind], **changes)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params, text, positions, ids, mask):
        logits = apply(
            params, text, positions=positions, segment_ids=ids, key_mask=mask
        )
        return logits[0, 4].sum(), logits

    return jax.jit(run), params


def row(encoding="rope", kind="favor_softmax", text=None, positions=None, **changes):
    """`compiled` of twelve tokens in two rows: (logits, gradients)."""
    run, params = compiled(encoding, kind)
    ids = changes.get("ids", jnp.zeros((2, 12), jnp.int32))
    mask = changes.get("mask", jnp.ones((2, 12), bool))
    positions = PLACES if positions is None else positions
    (_, logits), grad = run(
        params, TEXT if text is None else text, positions, ids, mask
    )
    return np.asarray(logits), grad


# Distinct bytes in row 0, so that a row of the embedding is a token.
TEXT = jnp.stack([jnp.arange(12), jnp.arange(12) ** 3 % 251])
PLACES = jnp.broadcast_to(jnp.arange(12), (2, 12))
PAIRS = [("rope", kind) for kind in KINDS]
PAIRS += [("none", "favor_softmax"), ("sinusoidal", "elu")]
each_pair = pytest.mark.parametrize(("encoding", "kind"), PAIRS)


def test_a_layer_is_equation_19_of_the_paper():
    """All pairs in float64: two heads share a key head; half of the features turn."""
    config = dataclasses.replace(SMALL, num_kv_heads=1, rope=RopeOptions(fraction=0.4))
    layer = LinearAttention(config, rngs=nnx.Rngs(0))
    encoding = make_encoding(dataclasses.replace(config, head_dim=20), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((1, 7, 16))
    positions = np.array([5, 6, 7, 8, 9, 10, 11])
    projection = jax.jit(make_draws(config))(None)[1]
    arguments = jnp.asarray(positions), encoding, None, None, projection
    got = jax.jit(lambda x: layer(x, *arguments))(jnp.asarray(x, jnp.float32))

    kernels = (layer.query, layer.key, layer.value, layer.out)
    query, key, value, out = (np.asarray(p.kernel[...], np.float64) for p in kernels)
    scaled = 8**-0.25 * np.asarray(projection, np.float64)

    def features(heads):
        logs = heads @ scaled.T - (heads**2).sum(-1, keepdims=True) / (2 * 8**0.5)
        phi = np.exp(logs)
        return phi + 1e-4 * phi.max(-1, keepdims=True)

    def turn(phi):
        angles = positions[:, None, None] * 10_000.0 ** -np.array([0.0, 0.5])
        z = (phi[..., :2] + 1j * phi[..., 2:4]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag, phi[..., 4:]], axis=-1)

    phi_q = features(np.einsum("td,dnh->tnh", x[0], query))
    phi_k = features(np.einsum("td,dnh->tnh", x[0], key))
    causal = np.tril(np.ones((7, 7)))
    above = causal * np.einsum("tnm,skm->nts", turn(phi_q), turn(phi_k))
    below = causal * np.einsum("tnm,skm->nts", phi_q, phi_k)
    weights = above / below.sum(-1, keepdims=True)
    mixed = np.einsum("nts,skv->tnv", weights, np.einsum("td,dkv->tkv", x[0], value))
    right = np.einsum("tnv,nvd->td", mixed, out)
    np.testing.assert_allclose(got[0], right, atol=1e-5)
    assert np.abs(weights.sum(-1) - 1).max() > 0.1  # the rotation does something


@each_pair
def test_causality_by_gradient(encoding, kind):
    """The logits at t have exactly zero gradient in every later embedding."""
    _, grad = row(encoding, kind)
    moved = np.abs(np.asarray(grad["embedding"][...])).sum(-1)
    assert (moved[:5] > 0).all()
    assert (moved[5:12] == 0).all()


@each_pair
def test_packed_documents_equal_padded_ones(encoding, kind):
    """A document of nine tokens and one of three: packed, and with the other masked."""
    start = PLACES < 9
    ids = jnp.where(start, 4, 1)
    places = jnp.where(start, PLACES, PLACES - 9)
    packed, _ = row(encoding, kind, positions=places, ids=ids)
    whole, _ = row(encoding, kind)
    np.testing.assert_allclose(packed[:, :9], whole[:, :9], atol=2e-5)
    other = jnp.where(start, 7, TEXT)
    padded, _ = row(encoding, kind, other, places, mask=~start)
    np.testing.assert_allclose(packed[:, 9:], padded[:, 9:], atol=2e-5)
    assert np.abs(packed[:, 9:] - whole[:, 9:]).max() > 1e-2  # they do not see it


def test_a_short_row_is_the_start_of_a_long_one():
    apply, params = build()
    short = jax.jit(functools.partial(apply, params, last=3))(TEXT[:, :9])
    np.testing.assert_allclose(short, row()[0][:, 6:9], atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rope_counts_distances(kind):
    """Each row has an offset of its own; twice the distance is another thing."""
    whole, _ = row(kind=kind)
    far, _ = row(kind=kind, positions=PLACES + jnp.array([[0], [1_000_000]]))
    np.testing.assert_allclose(far, whole, atol=3e-5)
    spread, _ = row(kind=kind, positions=2 * PLACES)
    assert np.abs(spread - whole).max() > 1e-2


def test_a_row_in_pieces_is_the_row():
    """Filled from a prompt, then one token at a time, through a change of segment."""
    config = dataclasses.replace(SMALL, num_kv_heads=1)
    layer = LinearAttention(config, rngs=nnx.Rngs(0))
    encoding = make_encoding(config, rngs=nnx.Rngs(0))
    projection = jax.jit(make_draws(config))(None)[0]
    x = jax.random.normal(jax.random.key(0), (2, 9, 16))
    ids = jnp.asarray(np.repeat([[3, 8]], [6, 3], axis=1).repeat(2, axis=0))

    @jax.jit
    def advance(state, x, positions, ids):
        return layer.advance(state, x, positions, encoding, ids, None, projection)

    whole, _ = advance(layer.init_state(2), x, jnp.arange(9), ids)
    state, parts = layer.init_state(2), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
        at = slice(start, stop)
        part, state = advance(state, x[:, at], jnp.arange(start, stop), ids[:, at])
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)
    assert state.mixed.shape == (2, 1, 10, 8)


@pytest.mark.parametrize(
    ("head_dim", "number"), [(1, 1), (8, 24), (24, 96), (32, 128), (64, 320)]
)
def test_the_default_number_of_features(head_dim, number):
    config = DecoderConfig(attention="linear", head_dim=head_dim, num_layers=3)
    assert jax.eval_shape(make_draws(config), 0).shape == (3, number, head_dim)


def test_a_draw_depends_on_seed_layer_and_interval():
    def draws(**changes):
        options = LinearOptions(num_features=8, **changes)
        return jax.jit(make_draws(dataclasses.replace(SMALL, linear=options)))

    redrawn = draws(redraw_every=1000)
    first, second = redrawn(0), redrawn(1000)
    base = jax.random.fold_in(jax.random.key(0), 0)
    right = favor_projection(jax.random.fold_in(base, 1), 8, 8)
    np.testing.assert_allclose(first[1], right, atol=1e-6)
    np.testing.assert_array_equal(redrawn(999), first)
    np.testing.assert_allclose(draws()(12_345), first, atol=1e-6)
    np.testing.assert_allclose(draws(redraw_every=7)(None), first, atol=1e-6)
    for other in (second, draws(seed=1)(None), first[::-1]):
        assert np.abs(other - first).max(axis=(1, 2)).min() > 0.5


def test_parameters_are_those_of_softmax_attention():
    """So the features are not trained, and are in no checkpoint."""

    def shapes(attention):
        config = dataclasses.replace(SMALL, attention=attention, qk_norm=True)
        made = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        return jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(made)))

    assert shapes("linear") == shapes("softmax")


def test_heads_on_two_devices_and_recomputed_layers_change_no_number():
    right, right_grad = row()
    apply, params = compiled(remat="full")
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    with jax.set_mesh(mesh):
        params = nnx.to_pure_dict(params)
        params = jax.device_put(params, param_shardings(mesh, params))
        assert (
            params["blocks"]["attention"]["key"]["kernel"].sharding.spec[2] == "tensor"
        )
        rows = jax.device_put((TEXT, PLACES), batch_sharding(mesh))
        ids, mask = jnp.zeros_like(rows[0]), jnp.ones_like(rows[0], bool)
        (_, logits), grad = apply(nnx.State(params), *rows, ids, mask)
    np.testing.assert_allclose(logits, right, atol=2e-5)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(near, nnx.to_pure_dict(grad), nnx.to_pure_dict(right_grad))


def test_bfloat16_stays_near_float32():
    apply, params = build(dtype="bfloat16")
    right, _ = row()
    rounded = jax.jit(apply)(params, TEXT)
    assert rounded.dtype == jnp.float32
    assert np.abs(rounded - right).max() < 0.05 * np.abs(right).max()


@pytest.mark.parametrize("encoding", LINEAR)
def test_encodings_that_linear_attention_has(encoding):
    apply, params = build(encoding=encoding)
    assert jax.eval_shape(apply, params, TEXT).shape == (2, 12, 256)


REFUSED = {
    name: (
        {"encoding": name},
        "its scales, exponential"
        if name == "xpos"
        else "features of its own"
        if name == "pope"
        else "adds to the score of each pair",
    )
    for name in ENCODINGS
    if name not in LINEAR
} | {
    "attention": ({"attention": "flash"}, "model.attention must be one of softmax, "),
    "window": ({"window": 4}, "model.window must be 0.*a sum over all tokens.*got 4"),
    "implementation": (
        {"attention_implementation": "blockwise"},
        "model.attention_implementation must be auto.*got 'blockwise'",
    ),
    "features": (
        {"linear": LinearOptions("relu")},
        "model.linear.features must be one of favor_softmax, favor_relu, elu; got",
    ),
    "negative": (
        {"linear": LinearOptions(redraw_every=-1)},
        "model.linear.redraw_every must not be negative, got -1",
    ),
    "elu": (
        {"linear": LinearOptions("elu", num_features=8)},
        "model.linear.num_features must be 0 for features 'elu'.*got 8",
    ),
    "odd": (
        {"linear": LinearOptions(num_features=9)},
        "model.linear.num_features .*even number.*got 9",
    ),
    "yarn": (
        {"rope": RopeOptions(scaling="yarn", factor=2.0, original_length=16)},
        "model.rope.scaling must not be 'yarn'.*temperature.*'ntk_by_parts'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_linear_attention_cannot_do_is_refused_with_the_reason(name):
    changes, reason = REFUSED[name]

    def run():
        apply, params = build(**changes)
        return apply(params, TEXT)

    with pytest.raises(ValueError, match=reason) as error:
        jax.eval_shape(run)
    if name in ENCODINGS:
        assert re.search(f"model.encoding '{name}' does not go with", str(error.value))


@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic_ntk", "ntk_by_parts"])
def test_scalings_of_rope_change_the_frequencies_of_the_features(scaling):
    options = RopeOptions(scaling=scaling, factor=4.0, original_length=16)
    encoding = make_encoding(dataclasses.replace(SMALL, rope=options), rngs=nnx.Rngs(0))
    long = encoding.rotate_features(jnp.arange(64), 10, 64)["frequencies"].inv_freq
    plain = 10_000.0 ** -(np.arange(5) / 5)
    assert long.shape == (5,)
    assert long[-1] < 0.5 * plain[-1]
