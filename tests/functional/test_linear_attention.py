"""Every form of linear attention against one quadratic float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.feature_maps import (
    elu_plus_one,
    favor_projection,
    favor_relu,
    favor_softmax,
)
from rope_jax.functional.frequency_set import Frequencies
from rope_jax.functional.linear_attention import (
    init_linear_state,
    linear_attention,
    linear_attention_step,
)
from rope_jax.functional.positions import positions_from_segments

PROJECTION = favor_projection(jax.random.key(7), 8, 16)


def softmax_reference(x, is_query, epsilon=1e-4):
    """FAVOR+ features, written out; no stabiliser."""
    x = x / 8**0.25
    logs = x @ PROJECTION.astype(x.dtype).T - (x**2).sum(-1, keepdims=True) / 2
    phi = jnp.exp(logs)
    return (phi + epsilon * phi.max(-1, keepdims=True)) / 4


def relu_reference(x, is_query, epsilon=1e-3):
    products = x @ PROJECTION.astype(x.dtype).T / 8**0.25
    phi = jnp.where(products > 0, products, 0)
    size = jnp.where(phi.max(-1) > 1, phi.max(-1), 1)[..., None]
    return (phi + epsilon * size) / 4


def elu_reference(x, is_query, epsilon=1e-6):
    phi = jnp.where(x > 0, 1 + x, jnp.exp(jnp.where(x > 0, 0, x)))
    return phi + epsilon * phi.max(-1, keepdims=True)


def own_map(x, is_query):
    """A map as a user writes it, different for queries and keys."""
    return jnp.exp(0.5 * x) if is_query else 1 / (1 + x**2)


def turned(phi, positions, inv_freq, layout):
    """Rotation by complex numbers, `[B, T, N, M]`, positions `[B, T]`."""
    if inv_freq is None:
        return phi
    pairs = len(inv_freq)
    first, second = phi[..., :pairs], phi[..., pairs : 2 * pairs]
    if layout == "interleaved":
        first, second = phi[..., 0 : 2 * pairs : 2], phi[..., 1 : 2 * pairs : 2]
    angles = positions[:, :, None, None] * np.asarray(inv_freq, np.float64)
    z = (first + 1j * second) * jnp.exp(1j * angles)
    parts = jnp.concatenate([z.real, z.imag], axis=-1)
    if layout == "interleaved":
        parts = jnp.stack([z.real, z.imag], axis=-1).reshape(parts.shape)
    return jnp.concatenate([parts, phi[..., 2 * pairs :]], axis=-1)


def reference(query, key, value, case):
    """Equation 19 with all T x S scores, float64."""
    group = query.shape[2] // key.shape[2]
    phi_q = case["reference"](query, True)
    phi_k = jnp.repeat(case["reference"](key, False), group, axis=2)
    value = jnp.repeat(value, group, axis=2)
    rows, columns = case["positions"]
    turn = functools.partial(turned, inv_freq=case["inv_freq"], layout=case["layout"])
    above = jnp.einsum("btnm,bsnm->bnts", turn(phi_q, rows), turn(phi_k, columns))
    below = jnp.einsum("btnm,bsnm->bnts", phi_q, phi_k)
    mask = case["mask"][:, None]
    total = jnp.where(mask, below, 0).sum(-1, keepdims=True)
    weights = jnp.where(mask, above, 0) / jnp.where(total == 0, 1, total)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def runs(ids):
    """Number of the run of equal ids that each token is in, by a plain loop."""
    out = np.zeros(ids.shape, int)
    for row, line in enumerate(ids):
        for t in range(1, len(line)):
            out[row, t] = out[row, t - 1] + (line[t] != line[t - 1])
    return out


def make_case(shape, pair, *, causal=True, inv_freq=None, **arguments):
    """Shape (T, S, N, K, V), a map and its reference, arguments of the call."""
    num_queries, num_keys = shape[:2]
    layout = arguments.get("layout", "half")
    own = runs(np.broadcast_to(arguments.get("segment_ids", 0), (2, num_keys)))
    index = np.arange(num_keys)
    last = index[num_keys - num_queries :] if causal else np.arange(num_queries)
    mask = np.ones((2, num_queries, num_keys), bool)
    if causal:
        mask &= last[:, None] >= index
    if causal or num_queries == num_keys:
        mask &= own[:, last, None] == own[:, None, :]
    mask &= np.broadcast_to(arguments.get("key_mask", True), (2, num_keys))[:, None]
    default = np.arange(num_queries) + num_keys - num_queries, index
    given = (arguments.get("query_positions"), arguments.get("key_positions"))
    positions = [
        np.broadcast_to(d if g is None else g, (2, len(d)))
        for d, g in zip(default, given, strict=True)
    ]
    frequency_set = None if inv_freq is None else Frequencies(inv_freq)
    return {
        "shape": shape,
        "map": pair[0],
        "reference": pair[1],
        "inv_freq": inv_freq,
        "layout": layout,
        "mask": mask,
        "positions": positions,
        "causal": causal,
        "arguments": arguments | {"frequencies": frequency_set},
    }


def cases():
    rng = np.random.default_rng(0)
    softmax = favor_softmax(PROJECTION), softmax_reference
    relu = favor_relu(PROJECTION), relu_reference
    elu = elu_plus_one, elu_reference
    ladder = frequencies.default(16).inv_freq
    # One token, a return to an earlier id, and ends that are no ends of chunks.
    ids = np.repeat([3, 1, 3, 2, 9], [40, 1, 65, 2, 42])
    segments = np.stack([ids, ids[::-1]])
    packed = np.asarray(positions_from_segments(segments))
    real = np.arange(150) >= np.array([[40], [150]])
    holes = rng.random((2, 150)) < 0.7
    shape = (150, 150, 4, 2, 6)
    return {
        "plain": make_case(shape, softmax),
        "rope_far_away": make_case(
            shape,
            softmax,
            inv_freq=ladder,
            query_positions=np.arange(150) + 10_000_000,
            key_positions=np.arange(150) + 10_000_000,
        ),
        "relu_partial_interleaved": make_case(
            shape, relu, inv_freq=ladder[:5], layout="interleaved", segment_ids=ids
        ),
        "packed": make_case(
            shape,
            softmax,
            inv_freq=ladder,
            segment_ids=segments,
            query_positions=packed,
            key_positions=packed,
            key_mask=holes,
        ),
        # The second row has no real token at all.
        "left_padded": make_case(shape, elu, key_mask=real),
        "last_queries": make_case(
            (70, 150, 4, 1, 6), softmax, inv_freq=ladder, segment_ids=segments
        ),
        "two_way": make_case((130, 150, 4, 2, 6), softmax, causal=False),
        "two_way_rope": make_case(
            (150, 90, 4, 4, 6),
            (own_map, own_map),
            causal=False,
            inv_freq=ladder[:3],
            key_mask=holes[:, :90],
            query_positions=np.arange(150) * 2,
        ),
        "two_way_packed": make_case(
            shape,
            softmax,
            causal=False,
            inv_freq=ladder,
            segment_ids=segments,
            key_mask=holes,
        ),
    }


CASES = cases()


def inputs(shape, dtype=jnp.float32, size=1.0):
    """Query and key of norm `size` times that of unit variance, value, cotangent."""
    num_queries, num_keys, num_heads, num_groups, value_dim = shape
    rng = np.random.default_rng(1)
    shapes = (
        (2, num_queries, num_heads, 8),
        (2, num_keys, num_groups, 8),
        (2, num_keys, num_groups, value_dim),
        (2, num_queries, num_heads, value_dim),
    )
    query, key, *others = (rng.standard_normal(s) for s in shapes)
    return tuple(jnp.asarray(x, dtype) for x in (size * query, size * key, *others))


@functools.cache
def expected(name, dtype=jnp.float32, size=1.0):
    case = CASES[name]
    given = inputs(case["shape"], dtype, size)
    with jax.enable_x64(True):
        *arrays, cotangent = (jnp.asarray(np.asarray(x, np.float64)) for x in given)
        run = jax.jit(functools.partial(reference, case=case))
        out, pull_back = jax.vjp(run, *arrays)
        assert out.dtype == jnp.float64
        return [np.asarray(x) for x in (out, *pull_back(cotangent))]


def whole(case, chunk_size):
    return functools.partial(
        linear_attention,
        feature_map=case["map"],
        causal=case["causal"],
        chunk_size=chunk_size,
        **case["arguments"],
    )


def one_by_one(case):
    """`linear_attention_step` in a scan over single tokens."""
    arguments = dict(case["arguments"])
    positions = arguments.pop("query_positions", None)
    assert positions is arguments.pop("key_positions", None)
    arguments["positions"] = positions
    frequency_set = arguments.pop("frequencies")
    rows = {name: x for name, x in arguments.items() if x is not None}

    def cut(x):
        return jnp.moveaxis(x, 1, 0)[:, :, None]

    def run(query, key, value):
        state = init_linear_state((2,), num_heads=2, num_features=16, value_dim=6)

        def one(state, token):
            arrays, others = token
            out, state = linear_attention_step(
                state,
                *arrays,
                feature_map=case["map"],
                frequencies=frequency_set,
                **others,
            )
            return state, out[:, 0]

        tokens = jax.tree.map(cut, ((query, key, value), rows))
        return jnp.moveaxis(jax.lax.scan(one, state, tokens)[1], 0, 1)

    return run


FORMS = {
    "chunked": functools.partial(whole, chunk_size=32),
    "one_chunk": functools.partial(whole, chunk_size=512),
    "recurrent": one_by_one,
}
EACH = [(name, "chunked") for name in CASES] + [
    ("packed", "one_chunk"),
    ("plain", "recurrent"),
    ("packed", "recurrent"),
]


@functools.cache
def compiled(name, form):
    """Value and gradients of the sum of value times cotangent."""
    run = FORMS[form](CASES[name])

    @jax.jit
    def all_of(query, key, value, cotangent):
        out, pull_back = jax.vjp(run, query, key, value)
        return out, *pull_back(cotangent)

    return all_of


def measured(name, form, dtype=jnp.float32, size=1.0):
    return compiled(name, form)(*inputs(CASES[name]["shape"], dtype, size))


def assert_near(got, right, tolerance):
    """Largest error within `tolerance` of the largest value, or of 1 if larger."""
    got = np.asarray(got, np.float64)
    assert got.shape == right.shape
    size = max(1.0, np.abs(right).max())
    np.testing.assert_allclose(got, right, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize(("name", "form"), EACH)
def test_values_and_gradients_match_the_quadratic_form(name, form):
    for got, right in zip(measured(name, form), expected(name), strict=True):
        assert_near(got, right, 1e-5)


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_weights_hundreds_of_nats_apart_match_the_quadratic_form(form):
    """Float32 exponentials would vanish: the largest log feature of some keys is -132.

    Squared norms of up to 310 are rounded to 3e-5, and with them the logarithms.
    """
    got = measured("plain", form, size=6.0)
    for part, right in zip(got, expected("plain", size=6.0), strict=True):
        assert_near(part, right, 1e-5)


def test_fully_masked_rows_are_zeros_with_zero_gradient():
    out, *gradients = measured("left_padded", "chunked")
    assert not CASES["left_padded"]["mask"][1].any()
    for array in (out, *gradients):
        assert not array[0, :40].any()
        assert not array[1].any()
        assert array[0, 40:].any()


def test_bfloat16_result_is_rounded_once():
    got = measured("rope_far_away", "chunked", jnp.bfloat16)
    right = expected("rope_far_away", jnp.bfloat16)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    # Half a unit in the last place of 8 bits, and the error of float32 sums.
    out = np.asarray(got[0], np.float64)
    np.testing.assert_allclose(out, right[0], rtol=2.0**-8, atol=1e-5)
    for part, whole_part in zip(got[1:], right[1:], strict=True):
        assert_near(part, whole_part, 2.0**-8)


def test_float64_inputs_are_computed_in_float64():
    right = expected("two_way")
    case = CASES["two_way"]
    with jax.enable_x64(True):
        arrays = [
            jnp.asarray(np.asarray(x, np.float64)) for x in inputs(case["shape"])[:3]
        ]
        out = jax.jit(FORMS["chunked"](case))(*arrays)
        assert out.dtype == jnp.float64
        assert_near(out, right[0], 1e-12)
