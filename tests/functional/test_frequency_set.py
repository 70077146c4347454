"""`Frequencies` as a pytree: host numbers are static, JAX arrays are leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.frequencies import Frequencies
from rope_jax.functional.rotary import rope, rope_angles


def test_host_numbers_pass_through_jit_in_float64():
    built = frequencies.yarn(8, factor=4, original_max_position_embeddings=2048)
    seen = []

    @jax.jit
    def through(given):
        seen.append(given)
        return given

    out = through(built)
    assert isinstance(seen[0].inv_freq, np.ndarray)
    assert isinstance(seen[0].attention_factor, float)
    for copy in (seen[0], out):
        assert copy.inv_freq.dtype == np.float64
        np.testing.assert_array_equal(copy.inv_freq, built.inv_freq)
        assert copy.attention_factor == built.attention_factor


def test_a_set_as_argument_keeps_the_angles_exact():
    built = frequencies.default(8)
    position = jnp.array([2**31 - 1])
    through = jax.jit(lambda given, p: rope_angles(p, given.inv_freq))
    np.testing.assert_array_equal(
        through(built, position), rope_angles(position, built.inv_freq)
    )


def test_equal_sets_share_a_compilation_and_others_do_not():
    traces = []

    @jax.jit
    def turn(x, given):
        traces.append(None)
        return rope(x, None, given)

    x = jnp.ones((2, 1, 8))
    turn(x, frequencies.default(8))
    turn(x, Frequencies(frequencies.default(8).inv_freq.copy()))
    assert len(traces) == 1
    turn(x, frequencies.default(8, theta=5e5))
    turn(x, Frequencies(frequencies.default(8).inv_freq, 1.5))
    assert len(traces) == 3


def test_jax_arrays_are_leaves():
    built = Frequencies(jnp.ones(4), jnp.float32(1.5))
    assert len(jax.tree.leaves(built)) == 2
    assert len(jax.tree.leaves(Frequencies(jnp.ones(4)))) == 1
    assert len(jax.tree.leaves(Frequencies([1.0], jnp.float32(2)))) == 1
    assert jax.tree.leaves(Frequencies([1.0], 2.0)) == []
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(built)]
    assert paths == [".inv_freq", ".attention_factor"]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, built)
    np.testing.assert_array_equal(doubled.inv_freq, 2 * np.ones(4))
    assert doubled.attention_factor == 3.0


def test_structure_survives_a_trip_to_the_host():
    built = Frequencies(jnp.ones(4), jnp.float32(1.5))
    on_host = jax.device_get(built)
    assert isinstance(on_host.inv_freq, np.ndarray)
    assert jax.tree.structure(on_host) == jax.tree.structure(built)
    jax.tree.map(np.testing.assert_array_equal, on_host, built)


def test_equality_and_hash_are_by_value_for_host_sets():
    first, second = frequencies.default(8), frequencies.default(8)
    assert first == second and hash(first) == hash(second)
    assert first != frequencies.default(8, theta=5e5)
    assert first != Frequencies(first.inv_freq, 1.5)
    assert first != Frequencies(first.inv_freq.reshape(2, 2))
    learned = Frequencies(jnp.ones(4))
    assert learned == learned and learned != Frequencies(jnp.ones(4))
    assert {first: 1}[second] == 1


def test_a_set_cannot_be_changed_in_place():
    values = np.array([1.0, 0.1])
    built = Frequencies(values)
    values[0] = 7.0
    assert built.inv_freq[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        built.inv_freq[0] = 7.0
    with pytest.raises(AttributeError):
        built.attention_factor = 2.0


def test_vmap_over_learned_sets():
    stacked = Frequencies(jnp.stack([jnp.ones(4), jnp.full(4, 0.5)]))
    x = jnp.arange(8.0).reshape(1, 1, 8)
    turned = jax.vmap(lambda given: rope(x, jnp.array([3]), given))(stacked)
    for row, f in enumerate([1.0, 0.5]):
        alone = rope(x, jnp.array([3]), Frequencies(jnp.full(4, f)))
        np.testing.assert_allclose(turned[row], alone, atol=1e-6)
