"""Rotation against complex multiplication in float64, and the published failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax.functional import frequencies
from rope_jax.functional.frequencies import Frequencies
from rope_jax.functional.rotary import apply_rope, rope, rope_angles

X4 = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4)
LAYOUTS = ["half", "interleaved"]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def rotate_complex(x, positions, inv_freq, layout, factor=1.0):
    """Multiply the pairs, as complex float64 numbers, by factor * exp(i p f)."""
    x = np.array(x, np.float64)
    pairs = len(inv_freq)
    turning = x[..., : 2 * pairs]
    if layout == "half":
        first, second = turning[..., :pairs], turning[..., pairs:]
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
    angles = np.asarray(positions, np.float64)[..., None, None] * inv_freq
    turned = (first + 1j * second) * factor * np.exp(1j * angles)
    out = x.copy()
    if layout == "half":
        out[..., :pairs], out[..., pairs : 2 * pairs] = turned.real, turned.imag
    else:
        out[..., 0 : 2 * pairs : 2] = turned.real
        out[..., 1 : 2 * pairs : 2] = turned.imag
    return out


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 6, 16])
def test_rotation_against_complex_multiplication(layout, width, dtype):
    x = normal(2, 5, 3, 16, dtype=dtype)
    positions = np.array([[0, 1, 2, 3, 131071], [7, -7, 4096, 10**6, 11]])
    built = Frequencies(frequencies.default(width).inv_freq, 1.25)
    turned = jax.jit(lambda x: rope(x, positions, built, layout=layout))(x)
    assert turned.dtype == dtype and turned.shape == x.shape
    wanted = rotate_complex(
        np.float32(x), positions, built.inv_freq, layout, factor=1.25
    )
    scale = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
    tolerance = scale[jnp.dtype(dtype).name]
    np.testing.assert_allclose(
        np.float64(turned), wanted, rtol=tolerance, atol=3 * tolerance
    )
    np.testing.assert_array_equal(turned[..., width:], x[..., width:])


def test_rotation_in_x64_mode_keeps_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 8)))
        turned = rope(x, None, frequencies.default(8))
        assert turned.dtype == jnp.float64
        wanted = rotate_complex(
            x, np.arange(3), frequencies.default(8).inv_freq, "half"
        )
        np.testing.assert_allclose(turned, wanted, atol=1e-6)


def test_r01_every_position_has_its_own_rotation():
    built = frequencies.default(64)
    angles = rope_angles(jnp.arange(4096), built.inv_freq)
    assert np.unique(np.asarray(angles), axis=0).shape[0] == 4096
    x = jnp.ones((4096, 1, 64), jnp.bfloat16)
    turned = np.float32(rope(x)).reshape(4096, 64)
    assert np.unique(turned, axis=0).shape[0] == 4096
    one = jnp.zeros((1, 1, 64)).at[..., 0].set(1.0)
    spots = {257: (0.8193055291, -0.5733571748), 15962: (-0.9080159013, None)}
    for position, (cos, sin) in spots.items():
        turned = rope(one, jnp.array([position]))
        assert float(turned[0, 0, 0]) == pytest.approx(cos, abs=1e-6)
        if sin is not None:
            assert float(turned[0, 0, 32]) == pytest.approx(sin, abs=1e-6)
        narrow = rope(one.astype(jnp.bfloat16), jnp.array([position]))
        np.testing.assert_array_equal(narrow, turned.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_r05_output_dtype_is_the_input_dtype(dtype):
    x = normal(3, 2, 8, dtype=dtype)
    sets = [
        frequencies.default(8),
        frequencies.default(4),
        frequencies.yarn(8, factor=4, original_max_position_embeddings=2048),
        frequencies.proportional(8, proportion=0.5),
        Frequencies(jnp.ones(4), jnp.float32(1.5)),
    ]
    for built in sets:
        assert rope(x, None, built).dtype == dtype
        assert rope(x, None, built, inverse=True).dtype == dtype
    table = jnp.ones((3, 4), jnp.float32)
    assert apply_rope(x, table, table).dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r06_sixteen_bit_input_is_rounded_once(layout):
    x = normal(4096, 1, 128, dtype=jnp.bfloat16)
    inv_freq = frequencies.default(128).inv_freq
    turned = np.float64(rope(x, layout=layout))
    wanted = rotate_complex(np.float32(x), np.arange(4096), inv_freq, layout)
    pair_norm = np.sqrt(wanted**2 + _partner(wanted, layout) ** 2)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(wanted))) - 7)
    error = np.abs(turned - wanted)
    # Rounding to nearest errs by half an ulp; the rest is the share of float32.
    assert (error <= 0.5 * ulp + 2.0**-20 * pair_norm).all()


def _partner(x, layout):
    if layout == "half":
        return np.roll(x, x.shape[-1] // 2, axis=-1)
    return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)


def test_r07_pairing_is_a_named_option():
    half = [-1.984110649, 1.959900667, 2.462377902, 4.019799668]
    interleaved = [-1.142639664, 1.922075597, 2.959850668, 4.029799502]
    at_one = jnp.array([1])
    np.testing.assert_allclose(rope(X4, at_one).ravel(), half, atol=1e-6)
    np.testing.assert_allclose(rope(X4, at_one, layout="half").ravel(), half, atol=1e-6)
    np.testing.assert_allclose(
        rope(X4, at_one, layout="interleaved").ravel(), interleaved, atol=1e-6
    )
    with pytest.raises(ValueError, match=r"layout.*'neox'"):
        rope(X4, at_one, layout="neox")
    table = jnp.ones((1, 2))
    with pytest.raises(ValueError, match=r"layout.*'neox'"):
        apply_rope(X4, table, table, layout="neox")


def test_r09_partial_width_has_its_own_ladder():
    x = jnp.arange(1.0, 9.0).reshape(1, 1, 8)
    turned = rope(x, jnp.array([2]), frequencies.default(4)).ravel()
    np.testing.assert_allclose(
        turned[:4],
        [-3.144039117, 1.919605347, -0.339143083, 4.039197360],
        atol=1e-6,
    )
    np.testing.assert_array_equal(turned[4:], [5, 6, 7, 8])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_r09_the_rest_passes_bit_for_bit(dtype):
    rest = jnp.array([-0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-7, 3.14159], dtype)
    x = jnp.concatenate([jnp.ones(2, dtype), rest]).reshape(1, 1, 8)
    turned = rope(x, jnp.array([5]), frequencies.default(2))
    bits = {2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(dtype).itemsize]
    np.testing.assert_array_equal(
        jax.lax.bitcast_convert_type(turned[..., 2:], bits),
        jax.lax.bitcast_convert_type(x[..., 2:], bits),
    )


def test_r10_widths_that_cannot_turn_are_named():
    with pytest.raises(ValueError, match="65"):
        rope(jnp.ones((2, 1, 65)))
    with pytest.raises(ValueError, match="9"):
        rope(jnp.ones((2, 1, 16)), None, frequencies.default(9))
    with pytest.raises(ValueError, match=r"rotary width.*8.*16"):
        rope(jnp.ones((2, 1, 8)), None, frequencies.default(16))
    table = jnp.ones((2, 8))
    with pytest.raises(ValueError, match=r"rotary width.*8.*16"):
        apply_rope(jnp.ones((2, 1, 8)), table, table)


def test_r20_decode_rotates_each_step_at_its_position():
    """Also fault 8: a single step is not rotated as position 0."""
    x = normal(1, 10, 2, 8)
    whole = rope(x)
    step = jax.jit(lambda x, p: rope(x, p[None]))
    for t in range(10):
        alone = step(x[:, t : t + 1], jnp.int32(t))
        np.testing.assert_allclose(alone, whole[:, t : t + 1], atol=5e-7)


def test_r23_each_call_stands_alone():
    x = normal(6, 1, 64)
    calls = [
        (x, 0, frequencies.default(64)),
        (x, 7, frequencies.default(64)),
        (x[..., :32], 7, frequencies.default(32)),
        (x, 7, frequencies.default(64, theta=5e5)),
        (x, 7, frequencies.linear(64, factor=4)),
        (x, 0, frequencies.default(64)),
    ]
    for given, offset, built in calls:
        positions = offset + np.arange(6)
        turned = rope(given, positions, built)
        wanted = rotate_complex(given, positions, built.inv_freq, "half")
        np.testing.assert_allclose(turned, wanted, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r24_time_is_the_axis_before_the_heads(layout):
    x = jnp.broadcast_to(normal(1, 1, 1, 8), (1, 4, 4, 8))
    turned = rope(x, layout=layout)
    for head in range(1, 4):
        np.testing.assert_array_equal(turned[:, :, head], turned[:, :, 0])
    for time in range(1, 4):
        assert float(jnp.abs(turned[:, time] - turned[:, time - 1]).max()) > 0.1


def test_r25_basic_invariants():
    query = X4
    key = jnp.array([0.5, -1.0, 2.0, 1.0]).reshape(1, 1, 4)
    for at, other in [(5, 2), (1005, 1002), (3, 0), (0, -3)]:
        score = (rope(query, jnp.array([at])) * rope(key, jnp.array([other]))).sum()
        assert float(score) == pytest.approx(-4.18531815516, abs=5e-6)
    np.testing.assert_array_equal(rope(query, jnp.array([0])), query)
    np.testing.assert_allclose(
        rope(query, jnp.array([-1])).ravel(),
        [3.06471526, 2.039899334, 0.779435933, 3.979800335],
        atol=1e-6,
    )
    there = rope(query, jnp.array([12345]))
    assert float(jnp.linalg.norm(there)) == pytest.approx(30**0.5, rel=1e-6)
    np.testing.assert_allclose(rope(there, jnp.array([-12345])), query, atol=2e-6)


def test_r26_three_axes_turn_a_vector():
    from rope_jax.functional.rotary import multi_axis_angles

    angles = multi_axis_angles(
        jnp.array([[3, 5, 7]]),
        frequencies.default(8).inv_freq,
        sections=(1, 1, 2),
        style="chunked",
    )
    turned = apply_rope(jnp.ones((1, 1, 8)), jnp.cos(angles), jnp.sin(angles))
    np.testing.assert_allclose(
        turned.ravel(),
        [
            -1.131112505,
            0.398157023,
            0.927608153,
            0.992975557,
            -0.848872489,
            1.357008100,
            1.067493848,
            1.006975443,
        ],
        atol=1e-6,
    )


def test_r28_one_compilation_serves_all_offsets():
    traces = []

    @jax.jit
    def turn(x, offset):
        traces.append(None)
        return rope(x, offset + jnp.arange(3))

    @jax.jit
    def turn_rows(x, offsets):
        traces.append(None)
        return rope(x, offsets[:, None] + jnp.arange(3)[None, :])

    x = normal(2, 3, 2, 8)
    inv_freq = frequencies.default(8).inv_freq
    for offset in range(10):
        wanted = rotate_complex(x, offset + np.arange(3), inv_freq, "half")
        np.testing.assert_allclose(turn(x, offset), wanted, atol=2e-6)
        offsets = np.array([offset, 10**6 * offset])
        wanted = rotate_complex(x, offsets[:, None] + np.arange(3), inv_freq, "half")
        np.testing.assert_allclose(turn_rows(x, offsets), wanted, atol=2e-6)
    assert len(traces) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [8, 4])
def test_inverse_undoes_the_rotation_and_its_factor(layout, width):
    x = normal(2, 5, 3, 8)
    built = Frequencies(frequencies.default(width).inv_freq, 1.4852030264)
    positions = jnp.array([0, 1, 4095, -7, 10**7])
    there = rope(x, positions, built, layout=layout)
    back = rope(there, positions, built, layout=layout, inverse=True)
    np.testing.assert_allclose(back, x, atol=2e-6)
    angles = rope_angles(positions, built.inv_freq)
    cos, sin = 1.4852030264 * jnp.cos(angles), 1.4852030264 * jnp.sin(angles)
    np.testing.assert_allclose(apply_rope(x, cos, sin, layout=layout), there, atol=2e-6)
    back = apply_rope(there, cos, sin, layout=layout, inverse=True)
    np.testing.assert_allclose(back, x, atol=2e-6)


def test_inverse_by_tables_of_16_bits():
    """The tables are rounded, but inverse still undoes what they do."""
    x = normal(5, 2, 8)
    angles = rope_angles(jnp.arange(5), frequencies.default(8).inv_freq)
    tables = jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)
    back = apply_rope(apply_rope(x, *tables), *tables, inverse=True)
    np.testing.assert_allclose(back, x, atol=2e-6)


def test_the_attention_factor_scales_what_turns_and_only_that():
    x = normal(3, 1, 8)
    plain = frequencies.default(4)
    scaled = Frequencies(plain.inv_freq, 1.5)
    turned, larger = rope(x, None, plain), rope(x, None, scaled)
    np.testing.assert_allclose(larger[..., :4], 1.5 * turned[..., :4], rtol=1e-6)
    np.testing.assert_array_equal(larger[..., 4:], x[..., 4:])
    learned = Frequencies(plain.inv_freq, jnp.float32(1.5))
    np.testing.assert_array_equal(rope(x, None, learned), larger)


def test_one_ladder_for_each_head():
    x = normal(2, 3, 2, 8)
    ladders = np.stack([frequencies.default(8).inv_freq, np.full(4, 0.25)])
    positions = jnp.array([0, 5, 1000])
    for given in (ladders, jnp.asarray(ladders, jnp.float32)):
        turned = rope(x, positions, Frequencies(given))
        for head in range(2):
            alone = rope(x[:, :, head : head + 1], positions, Frequencies(given[head]))
            np.testing.assert_allclose(turned[:, :, head : head + 1], alone, atol=1e-6)
    angles = rope_angles(jnp.broadcast_to(positions, (2, 3)), ladders)
    np.testing.assert_allclose(
        apply_rope(x, jnp.cos(angles), jnp.sin(angles)),
        rope(x, positions, Frequencies(ladders)),
        atol=1e-6,
    )
    with pytest.raises(ValueError, match=r"frequencies.*2 heads.*\(3, 4\)"):
        rope(x, positions, Frequencies(np.ones((3, 4))))


def test_positions_broadcast_over_the_batch():
    x = normal(2, 3, 4, 2, 8)
    rows = jnp.array([[0, 1, 2, 3], [9, 8, 7, 6], [5, 5, 5, 5]])
    turned = rope(x, rows)
    for batch in range(2):
        for row in range(3):
            np.testing.assert_array_equal(
                turned[batch, row], rope(x[batch, row], rows[row])
            )
    np.testing.assert_array_equal(
        rope(x, rows[None, :1]), rope(x, jnp.broadcast_to(rows[0], (2, 3, 4)))
    )


WRONG_SHAPES = [
    (lambda: rope(jnp.ones((4, 8))), r"x.*\(4, 8\)"),
    (lambda: rope(jnp.ones((2, 1, 8), jnp.int32)), "x.*int32"),
    (lambda: rope(jnp.ones((2, 1, 8)), jnp.arange(3)), r"positions.*\(3,\)"),
    (lambda: rope(jnp.ones((2, 1, 8)), jnp.int32(3)), r"positions.*\(\)"),
    (
        lambda: rope(jnp.ones((2, 1, 8)), jnp.zeros((5, 2), jnp.int32)),
        r"positions.*\(5, 2\)",
    ),
    (
        lambda: rope(jnp.ones((3, 2, 1, 8)), jnp.zeros((5, 2), jnp.int32)),
        r"positions.*\(5, 2\)",
    ),
    (
        lambda: rope(jnp.ones((2, 1, 8)), None, jnp.ones(4)),
        "frequencies must be a Frequencies",
    ),
    (
        lambda: rope(jnp.ones((2, 1, 8)), None, Frequencies(np.ones((2, 1, 4)))),
        r"inv_freq.*\(2, 1, 4\)",
    ),
    (
        lambda: apply_rope(jnp.ones((2, 1, 8)), jnp.ones((2, 4)), jnp.ones((2, 3))),
        r"\(2, 4\) and \(2, 3\)",
    ),
    (
        lambda: apply_rope(jnp.ones((2, 1, 8)), jnp.ones((3, 4)), jnp.ones((3, 4))),
        r"cos.*\(3, 4\)",
    ),
    (
        lambda: apply_rope(jnp.ones((2, 3, 8)), *[jnp.ones((2, 2, 4))] * 2),
        r"cos.*\(2, 2, 4\)",
    ),
    (
        lambda: apply_rope(jnp.ones((2, 3, 8)), *[jnp.ones((1, 2, 1, 4))] * 2),
        r"cos.*\(1, 2, 1, 4\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG_SHAPES)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_vmap_equals_the_batched_call():
    x, rows = normal(3, 4, 2, 8), jnp.arange(12).reshape(3, 4) ** 3
    np.testing.assert_array_equal(jax.vmap(rope)(x, rows), rope(x, rows))
    over_heads = jax.vmap(lambda x: rope(x[..., None, :]), in_axes=2, out_axes=2)
    np.testing.assert_allclose(over_heads(x)[..., 0, :], rope(x), atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_learned_frequencies(layout):
    """Against central differences of the float64 complex product."""
    x, weights = normal(5, 2, 6), normal(5, 2, 6, seed=1)
    positions = np.array([0, 1, 2, 5, -3])
    inv_freq = np.array([1.0, 0.3, 0.05])

    def loss(inv_freq, factor):
        turned = rope(x, positions, Frequencies(inv_freq, factor), layout=layout)
        return (turned * weights).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(
        jnp.asarray(inv_freq, jnp.float32), jnp.float32(1.5)
    )

    def reference(inv_freq, factor=1.5):
        turned = rotate_complex(x, positions, inv_freq, layout, factor)
        return (turned * np.float64(weights)).sum()

    step = 1e-6
    for pair in range(3):
        shift = step * np.eye(3)[pair]
        slope = reference(inv_freq + shift) - reference(inv_freq - shift)
        assert float(gradient[0][pair]) == pytest.approx(slope / (2 * step), rel=1e-4)
    assert float(gradient[1]) == pytest.approx(
        reference(inv_freq) / 1.5, rel=1e-4, abs=1e-5
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [8, 4])
def test_gradient_of_the_input_is_the_inverse_rotation(layout, width):
    x, weights = normal(5, 2, 8), normal(5, 2, 8, seed=1)
    built = frequencies.default(width)
    pull = jax.grad(lambda x: (rope(x, None, built, layout=layout) * weights).sum())
    np.testing.assert_allclose(
        pull(x), rope(weights, None, built, layout=layout, inverse=True), atol=2e-6
    )


def test_the_tables_are_computed_once_and_not_for_every_head():
    """No cosine or sine in the computation that touches the whole array.

    They are polynomials of phases, which are shifted to find their quarter turn.
    """
    x = jnp.ones((3, 32, 5, 8))
    for layout in LAYOUTS:
        text = jax.jit(lambda x, layout=layout: rope(x, layout=layout))
        text = text.lower(x).compile().as_text()
        computations = text.split("\n}")
        phases = [c for c in computations if "shift-right-logical(" in c]
        assert phases
        for computation in phases:
            assert "f32[3,32,5," not in computation


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("width", [8, 4])
def test_r29_a_sharded_sequence_is_positioned_as_a_whole(width, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(kind,))
    x = normal(2, 64, 2, 8)
    built = frequencies.default(width)
    wanted = rope(x, None, built)
    placed = jax.device_put(x, jax.NamedSharding(mesh, P(None, "sequence")))
    with jax.set_mesh(mesh):
        turned = jax.jit(lambda x: rope(x, None, built))(placed)
    np.testing.assert_allclose(turned, wanted, atol=1e-6)
    assert turned.sharding.spec[1] == "sequence"


@pytest.mark.parametrize("width", [8, 4])
def test_r29_shard_map_over_the_sequence(width):
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(2, 64, 2, 8)
    positions = jnp.arange(64) + 1_000_000
    built = frequencies.default(width)
    seen = []

    def turn(x, positions):
        seen.append(positions.shape)
        return rope(x, positions, built)

    mapped = jax.shard_map(
        turn,
        mesh=mesh,
        in_specs=(P(None, "sequence"), P("sequence")),
        out_specs=P(None, "sequence"),
    )
    np.testing.assert_allclose(
        jax.jit(mapped)(x, positions), rope(x, positions, built), atol=1e-6
    )
    assert seen == [(8,)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_08_a_decoded_token_turns_at_its_own_position(layout):
    """One token is at the position it is given, not at 0; scores agree with the row."""
    query, key = normal(12, 2, 8, seed=1), normal(12, 2, 8, seed=2)
    built = frequencies.default(8)
    cache = rope(key, layout=layout)
    scores = jnp.einsum("tnh,snh->nts", rope(query, layout=layout), cache)

    @jax.jit
    def decode(one, position):
        turned = rope(one, position[None], built, layout=layout)
        return turned, jnp.einsum("tnh,snh->nts", turned, cache)

    for step in (0, 1, 7, 11):
        one = query[step : step + 1]
        turned, row = decode(one, jnp.int32(step))
        wanted = rotate_complex(one, [step], built.inv_freq, layout)
        np.testing.assert_allclose(turned, wanted, atol=2e-6)
        np.testing.assert_allclose(row[:, 0], scores[:, step], atol=2e-5)
    assert np.abs(turned - one).max() > 0.5
    assert decode._cache_size() == 1
