"""T5, KERPLE, FIRE and Sandwich against float64 loops, and what each must keep."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import contextual, relative
from rope_jax.functional.distance import distances, relative_positions

HEADS = 3
QUERIES = np.array([0, 1, 2, 17, 40, 511, 512, 9000], np.int32)
KEYS = np.array([0, 1, 3, 17, 39, 200, 8999, 9000], np.int32)


def t5_bucket_of(lag, num_buckets, max_distance, bidirectional):
    """Bucket of one distance from the published formula, in float64."""
    offset = 0
    n = -lag
    if bidirectional:
        num_buckets //= 2
        offset = num_buckets if n < 0 else 0
        n = abs(n)
    n = max(n, 0)
    exact = num_buckets // 2
    if n < exact:
        return offset + n
    growth = math.log(n / exact) / math.log(max_distance / exact)
    # The nudge settles distances that lie exactly on an edge.
    step = math.floor(growth * (num_buckets - exact) + 1e-9)
    return offset + min(exact + step, num_buckets - 1)


def t5_reference(params, q, k, bidirectional=False):
    bucket = t5_bucket_of(k - q, len(params["embedding"]), 128, bidirectional)
    return params["embedding"][bucket]


def kerple_log_reference(params, q, k):
    return -params["r1"] * np.log(1 + params["r2"] * abs(q - k))


def kerple_power_reference(params, q, k):
    return -params["r1"] * float(abs(q - k)) ** params["r2"]


def fire_reference(params, q, k):
    def log(x):
        return np.log(abs(params["c"] * x) + 1)

    threshold = abs(params["length_multiplier"] * 512.0)
    x = log(abs(q - k)) / (log(max(float(q), threshold)) + 1e-6)
    hidden = np.maximum(params["kernel_in"] * x + params["bias_in"], 0)
    return hidden @ params["kernel_out"] + params["bias_out"]


def sandwich_reference(params, q, k):
    del params
    total = sum(math.cos((q - k) * 10_000.0 ** (-2 * i / 128)) for i in range(64))
    return total / (np.arange(1, HEADS + 1) * 8 / HEADS)


def t5_two_sided(params, q, k):
    return relative.t5_bias(params, q, k, bidirectional=True)


def kerple_power(params, q, k):
    return relative.kerple_bias(params, q, k, kernel="power")


def sandwich(params, q, k):
    del params
    return relative.sandwich_bias(q, k, num_heads=HEADS)


def _params(name):
    key = jax.random.key(3)
    if name.startswith("t5"):
        return relative.init_t5(key, HEADS)
    if name.startswith("kerple"):
        return relative.init_kerple(key, HEADS, kernel=name.removeprefix("kerple_"))
    return relative.init_fire(key, HEADS) if name == "fire" else {}


METHODS = {
    "t5": (relative.t5_bias, t5_reference),
    "t5_two_sided": (t5_two_sided, lambda *a: t5_reference(*a, bidirectional=True)),
    "kerple_log": (relative.kerple_bias, kerple_log_reference),
    "kerple_power": (kerple_power, kerple_power_reference),
    "fire": (relative.fire_bias, fire_reference),
    "sandwich": (sandwich, sandwich_reference),
}
LEARNED = [name for name in METHODS if name != "sandwich"]
JITTED = {name: jax.jit(function) for name, (function, _) in METHODS.items()}


def reference_bias(name, params, queries=QUERIES, keys=KEYS):
    params = {key: np.asarray(value, np.float64) for key, value in params.items()}
    function = METHODS[name][1]
    rows = [[function(params, int(q), int(k)) for k in keys] for q in queries]
    return np.moveaxis(np.array(rows), -1, 0)


@pytest.mark.parametrize("name", METHODS)
def test_bias_equals_float64_loops(name):
    params = _params(name)
    expected = reference_bias(name, params)
    got = JITTED[name](params, QUERIES, KEYS)
    assert got.dtype == jnp.float32 and got.shape == expected.shape
    # Sandwich adds 128 rounded products, the largest of them 1.
    atol = 3e-6 if name == "sandwich" else 1e-6
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=atol)


def test_golden_values():
    kerple = {"r1": jnp.array([2.0]), "r2": jnp.array([0.5])}
    keys = jnp.array([1000, 999, 990, 0])
    got = relative.kerple_bias(kerple, jnp.array([1000]), keys)
    expected = [0, -0.8109302162, -3.5835189385, -12.4332121932]
    np.testing.assert_allclose(got[0, 0], expected, rtol=1e-6)
    power = {"r1": jnp.array([0.5]), "r2": jnp.array([1.5])}
    got = kerple_power(power, jnp.array([100]), jnp.array([100, 98, 96, 0]))
    np.testing.assert_allclose(got[0, 0], [0, -1.4142135624, -4, -500], rtol=1e-6)
    fire = {
        "c": jnp.float32(1.0),
        "length_multiplier": jnp.float32(-0.5),
        "kernel_in": jnp.array([1.0, -1.0]),
        "bias_in": jnp.array([0.0, 0.5]),
        "kernel_out": jnp.array([[2.0, -1.0], [10.0, 1.0]]),
        "bias_out": jnp.array([0.5, 0.0]),
    }
    # x = ln(4) / ln(10) = 0.6020600, then ln(100) / ln(100) = 1, then 0.
    got = relative.fire_bias(fire, jnp.array([3, 99]), jnp.array([0, 99]), length=18)
    np.testing.assert_allclose(got[:, 0, 0], [1.7041200, -0.6020600], rtol=1e-6)
    np.testing.assert_allclose(got[:, 1], [[2.5, 5.5], [-1.0, 0.5]], atol=1e-6)
    got = relative.sandwich_bias(
        jnp.array([7]), jnp.array([7, 6, 0]), num_heads=2, dim=4
    )
    # cos(d) + cos(d / 100) over 4 and 8.
    expected = np.array([0.5, 0.3850630770, 0.4378633137])
    np.testing.assert_allclose(got[:, 0], [expected, expected / 2], rtol=1e-6)


def test_t5_edges_of_published_models():
    lags = -np.arange(0, 200)
    buckets = np.asarray(relative.t5_buckets(lags))
    assert buckets[:16].tolist() == list(range(16))
    begins = [int(np.argmax(buckets == b)) for b in range(16, 32)]
    expected = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert begins == expected
    both = np.asarray(relative.t5_buckets(np.arange(-200, 201), bidirectional=True))
    # Edges that are whole numbers: 16, 32 and 64 begin buckets 10, 12 and 14.
    past = both[200::-1]
    assert [int(past[n]) for n in (7, 8, 15, 16, 31, 32, 63, 64, 90, 91)] == [
        *(7, 8, 9, 10, 11, 12, 13, 14, 14, 15)
    ]
    assert (both[201:] == past[1:] + 16).all()


@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "bidirectional"),
    [(32, 128, False), (32, 128, True), (64, 256, False), (5, 90_000, False)],
)
def test_t5_buckets_to_a_hundred_thousand(num_buckets, max_distance, bidirectional):
    lags = np.arange(-100_000, 100_001)
    got = relative.t5_buckets(
        lags,
        num_buckets=num_buckets,
        max_distance=max_distance,
        bidirectional=bidirectional,
    )
    expected = [
        t5_bucket_of(int(lag), num_buckets, max_distance, bidirectional) for lag in lags
    ]
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, expected)


def test_t5_causal_bias_gives_the_future_bucket_zero():
    assert relative.t5_buckets(jnp.array([1, 40, 2**31 - 1])).tolist() == [0, 0, 0]
    far = relative.t5_buckets(jnp.array([-(2**31) + 1, 2**31 - 1]), bidirectional=True)
    assert far.tolist() == [15, 31]


@pytest.mark.parametrize("name", METHODS)
def test_blocks_equal_the_whole(name):
    params, function = _params(name), JITTED[name]
    whole = function(params, QUERIES, KEYS)
    for rows in (slice(0, 4), slice(4, 8)):
        for columns in (slice(0, 4), slice(4, 8)):
            block = function(params, QUERIES[rows], KEYS[columns])
            np.testing.assert_allclose(block, whole[:, rows, columns], atol=1e-6)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "fire"])
def test_shift_of_all_positions_changes_nothing(name):
    params, shift = _params(name), 10_000_000
    here = JITTED[name](params, QUERIES, KEYS)
    there = JITTED[name](params, QUERIES + shift, KEYS + shift)
    np.testing.assert_allclose(there, here, atol=5e-6 if name == "sandwich" else 0)


def test_fire_depends_on_the_position_only_past_its_threshold():
    params = _params("fire")
    queries, keys = np.array([3, 100]), np.array([0, 1, 3])
    here = relative.fire_bias(params, queries, keys)
    below = relative.fire_bias(params, queries + 400, keys + 400)
    np.testing.assert_array_equal(here, below)
    beyond = relative.fire_bias(params, queries + 4000, keys + 4000)
    assert abs(np.asarray(here - beyond)).max() > 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_one_compilation_for_many_offsets(name):
    traces = []

    @jax.jit
    def bias(params, queries, keys):
        traces.append(1)
        return METHODS[name][0](params, queries, keys)

    params = _params(name)
    for offset in (0, 7, 100_000):
        got = bias(params, QUERIES[:4] + offset, KEYS[:4] + offset)
    expected = reference_bias(name, params, QUERIES[:4] + offset, KEYS[:4] + offset)
    np.testing.assert_allclose(got, expected, atol=5e-6)
    assert len(traces) == 1


@pytest.mark.parametrize("name", METHODS)
def test_batched_positions(name):
    params, function = _params(name), JITTED[name]
    queries = np.stack([QUERIES, QUERIES + 5])
    keys = np.stack([KEYS, KEYS + 50])
    one_by_one = [function(params, q, k) for q, k in zip(queries, keys, strict=True)]
    together = function(params, queries, keys)
    assert together.shape == (2, HEADS, len(QUERIES), len(KEYS))
    np.testing.assert_allclose(together, np.stack(one_by_one), atol=1e-6)
    mapped = jax.jit(jax.vmap(function, (None, 0, 0)))(params, queries, keys)
    np.testing.assert_allclose(mapped, together, atol=1e-6)
    mixed = function(params, queries, KEYS)
    np.testing.assert_allclose(mixed[1], function(params, queries[1], KEYS), atol=1e-6)


def test_shard_map_over_the_queries_equals_unsharded():
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {name: _params(name) for name in METHODS}

    def every(params, queries, keys):
        return {n: METHODS[n][0](params[n], queries, keys) for n in METHODS}

    sharded = jax.shard_map(
        every,
        mesh=mesh,
        in_specs=(jax.P(), jax.P("seq"), jax.P()),
        out_specs=jax.P(None, "seq"),
    )
    got = jax.jit(sharded)(params, QUERIES, KEYS)
    for name in METHODS:
        expected = JITTED[name](params[name], QUERIES, KEYS)
        np.testing.assert_allclose(got[name], expected, atol=1e-6)


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_equal_finite_differences(name):
    params = _params(name)
    # Distance zero is among the pairs: 0 ** power must not make a NaN.
    queries, keys = QUERIES[2:7], KEYS[:5]
    weights = np.random.default_rng(0).normal(size=(HEADS, len(queries), len(keys)))

    def loss(params):
        bias = METHODS[name][0](params, queries, keys)
        return jnp.sum(weights.astype(np.float32) * bias)

    gradients = jax.jit(jax.grad(loss))(params)
    exact = {key: np.asarray(value, np.float64) for key, value in params.items()}
    seen = set()
    for key, value in exact.items():
        flat = gradients[key].reshape(-1)
        assert np.isfinite(flat).all() and np.abs(flat).max() > 0, key
        for index in range(value.size):
            step = np.zeros(value.size)
            step[index] = 1e-6 * max(1.0, abs(value.reshape(-1)[index]))
            ends = []
            for sign in (1, -1):
                moved = exact | {key: value + sign * step.reshape(value.shape)}
                bias = reference_bias(name, moved, queries, keys)
                ends.append(np.sum(weights * bias))
            slope = (ends[0] - ends[1]) / (2 * step[index])
            np.testing.assert_allclose(flat[index], slope, rtol=1e-3, atol=2e-4)
            seen.add(slope != 0)
    assert True in seen


def test_kerple_out_of_range_acts_as_the_limit_and_can_return():
    outside = {"r1": jnp.array([-3.0]), "r2": jnp.array([2.5])}
    at_limit = {"r1": jnp.array([0.01]), "r2": jnp.array([2.0])}

    def total(params):
        return jnp.sum(kerple_power(params, jnp.array([9]), jnp.array([0, 7, 9])))

    # -0.01 * (81 + 4)
    np.testing.assert_allclose(total(outside), -0.85, rtol=1e-6)
    got, expected = jax.grad(total)(outside), jax.grad(total)(at_limit)
    np.testing.assert_allclose(expected["r1"], [-85.0], rtol=1e-6)
    for name in got:
        np.testing.assert_array_equal(got[name], expected[name])
    clipped = relative.kerple_clip(outside, kernel="power")
    assert jax.tree.map(lambda x: x.item(), clipped) == jax.tree.map(
        lambda x: x.item(), at_limit
    )
    assert relative.kerple_clip(outside)["r2"].item() == 2.5


def test_initial_parameters_are_those_of_the_authors():
    key = jax.random.key(0)
    log = relative.init_kerple(key, 4000)
    power = relative.init_kerple(key, 4000, kernel="power")
    for params, tops in ((log, (2.0, 1.0)), (power, (1.0, 2.0))):
        for name, top in zip(("r1", "r2"), tops, strict=True):
            assert 0.01 <= params[name].min() < 0.02
            assert 0.99 * top < params[name].max() <= top
            np.testing.assert_allclose(params[name].mean(), top / 2, rtol=0.05)
    fire = relative.init_fire(key, 4)
    assert fire["c"] == np.float32(0.1) and fire["length_multiplier"] == 1
    assert np.abs(fire["kernel_out"]).max() <= 32**-0.5
    assert 0.9 < np.abs(fire["kernel_in"]).max() <= 1
    assert relative.init_t5(key, 4, stddev=0.5)["embedding"].std() > 0.3
    everything = [log, power, fire, relative.init_t5(key, 4)]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(everything))
    other = relative.init_fire(jax.random.key(1), 4)
    assert not np.array_equal(fire["kernel_in"], other["kernel_in"])


def test_half_precision_parameters_still_give_a_float32_bias():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params("kerple_log"))
    got = relative.kerple_bias(params, QUERIES, KEYS)
    assert got.dtype == jnp.float32
    expected = reference_bias("kerple_log", jax.tree.map(np.float32, params))
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


def test_distances_are_exact_wherever_positions_lie():
    low, high = -(2**31), 2**31 - 1
    ends = np.array([low, -1, 0, high], np.int32)
    exact = ends.astype(np.int64) - ends.astype(np.int64)[:, None]
    np.testing.assert_array_equal(distances(ends, ends), np.abs(exact).astype("f4"))
    lag = relative_positions(ends, ends)
    np.testing.assert_array_equal(lag, np.clip(exact, -high, high))


@pytest.mark.parametrize("name", METHODS)
def test_bad_positions_raise(name):
    params, function = _params(name), METHODS[name][0]
    with pytest.raises(ValueError, match=r"query_positions must be integers.*float32"):
        function(params, jnp.zeros(3), KEYS)
    with pytest.raises(ValueError, match=r"key_positions must have a time axis.*\(\)"):
        function(params, QUERIES, jnp.int32(3))


def test_bad_values_raise_with_their_names():
    key = jax.random.key(0)
    cases = [
        (lambda: relative.t5_buckets(KEYS, num_buckets=1), "num_buckets.*got 1"),
        (
            lambda: relative.t5_buckets(KEYS, num_buckets=31, bidirectional=True),
            "num_buckets must be even.*got 31",
        ),
        (lambda: relative.t5_buckets(KEYS, max_distance=16), "max_distance.*got 16"),
        (lambda: relative.t5_buckets(KEYS, max_distance=2**31), "max_distance"),
        (lambda: relative.t5_buckets(KEYS * 1.0), "relative_position must be integers"),
        (
            lambda: relative.t5_bias({"embedding": jnp.zeros(32)}, QUERIES, KEYS),
            r"params\['embedding'\].*\(32,\)",
        ),
        (
            lambda: relative.kerple_bias({"r1": jnp.ones(2)}, QUERIES, KEYS),
            r"params must have 'r2', got \['r1'\]",
        ),
        (lambda: relative.init_kerple(key, 2, kernel="exp"), "kernel.*got 'exp'"),
        (
            lambda: relative.kerple_bias(
                _params("kerple_log"), QUERIES, KEYS, kernel="Log"
            ),
            "kernel.*got 'Log'",
        ),
        (
            lambda: relative.fire_bias(_params("fire"), QUERIES, KEYS, length=0),
            "length must be positive, got 0",
        ),
        (
            lambda: relative.fire_bias(
                _params("fire") | {"bias_in": jnp.zeros(31)}, QUERIES, KEYS
            ),
            r"params\['bias_in'\] must have shape \(32\), got \(31,\)",
        ),
        (
            lambda: relative.sandwich_bias(QUERIES, KEYS, num_heads=0),
            "num_heads must be at least 1, got 0",
        ),
        (lambda: relative.sandwich_bias(QUERIES, KEYS, num_heads=2, dim=7), "dim.*7"),
        (lambda: relative.init_t5(key, 2, num_buckets=1), "num_buckets.*got 1"),
        (lambda: relative.init_t5(key, 0), "num_heads must be at least 1, got 0"),
        (lambda: relative.init_kerple(key, 0), "num_heads must be at least 1, got 0"),
        (
            lambda: relative.init_fire(key, 2, width=0),
            "width must be at least 1, got 0",
        ),
        (lambda: relative.init_fire(key, 2, width=1.5), "width.*integer, got 1.5"),
        (lambda: relative.init_shaw(key, 4, max_distance=0), "max_distance.*got 0"),
        (lambda: relative.init_shaw(key, 0), "head_dim must be at least 1, got 0"),
        (lambda: relative.init_cope(4, num_positions=1), "num_positions.*2, got 1"),
        (
            lambda: relative.init_dape(key, 2, width=0),
            "width must be at least 1, got 0",
        ),
        (lambda: relative.init_fox(key, 0, 2), "model_dim must be at least 1, got 0"),
        (lambda: relative.init_cable(key, 4, 0), "num_heads must be at least 1, got 0"),
        (lambda: relative.init_pope(2, 0), "head_dim must be at least 1, got 0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_one_import_has_every_relative_encoding():
    assert set(contextual.__all__) < set(relative.__all__)
    for name in contextual.__all__:
        assert getattr(relative, name) is getattr(contextual, name)
