"""Moving rotated keys in one rotation equals rotating the raw keys afresh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.frequencies import Frequencies
from rope_jax.functional.rotary import rerotate, rope

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 3, 8)), jnp.float32)
FROM = jnp.array([0, 17, 131_071, -5])
TO = jnp.array([3, 16, 10_000_000, 5])
YARN = frequencies.yarn(8, factor=16, original_max_position_embeddings=4096)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("built", [frequencies.default(8), frequencies.default(4)])
def test_keys_move_to_other_positions(layout, built):
    moved = rerotate(
        rope(X, FROM, built, layout=layout), FROM, TO, built, layout=layout
    )
    np.testing.assert_allclose(moved, rope(X, TO, built, layout=layout), atol=4e-6)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (frequencies.default(8), YARN),
        (YARN, frequencies.default(8)),
        (YARN, frequencies.llama3(8, factor=32)),
    ],
)
def test_keys_move_to_other_frequencies(before, after):
    """The attention factors differ too: their ratio is part of the move."""
    assert YARN.attention_factor == pytest.approx(1.2772588722, abs=1e-10)
    moved = rerotate(rope(X, FROM, before), FROM, FROM, before, after)
    np.testing.assert_allclose(moved, rope(X, FROM, after), atol=4e-6)
    moved = rerotate(rope(X, FROM, before), FROM, TO, before, after)
    np.testing.assert_allclose(moved, rope(X, TO, after), atol=4e-6)


def test_dynamic_frequencies_change_while_generating():
    """Keys cached at one length follow the base of the next, traced, in one program."""
    traces = []

    def at(length):
        return frequencies.dynamic_ntk(
            8, factor=2, max_position_embeddings=64, seq_len=length
        )

    @jax.jit
    def grow(cached, before, after):
        traces.append(None)
        return rerotate(cached, positions, positions, at(before), at(after))

    positions = jnp.array([0, 50, 90, 127])
    cached = rope(X, positions, at(128))
    for length in (129, 200, 256):
        cached = grow(cached, jnp.int32(128), jnp.int32(length))
        np.testing.assert_allclose(cached, rope(X, positions, at(length)), atol=1e-4)
        cached = rope(X, positions, at(128))
    assert len(traces) == 1


def test_a_move_of_nothing_changes_nothing():
    cached = rope(X, FROM)
    np.testing.assert_array_equal(rerotate(cached, FROM, FROM, YARN), cached)


def test_far_positions_do_not_cost_accuracy():
    """The distance is formed from whole phases, not from two rounded angles."""
    far = jnp.full(4, 2**31 - 1)
    near = far - jnp.arange(4)
    moved = rerotate(X, far, near, frequencies.default(8))
    wanted = rope(X, -jnp.arange(4), frequencies.default(8))
    np.testing.assert_allclose(moved, wanted, atol=1e-6)


def test_learned_and_per_head_frequencies():
    learned = Frequencies(jnp.asarray(YARN.inv_freq, jnp.float32), jnp.float32(1.5))
    near, other = jnp.array([0, 5, 9, 100]), jnp.array([7, 1, 50, 90])
    moved = rerotate(rope(X, near, learned), near, other, learned)
    np.testing.assert_allclose(moved, rope(X, other, learned), atol=2e-5)
    moved = rerotate(rope(X, near, learned), near, other, learned, YARN)
    np.testing.assert_allclose(moved, rope(X, other, YARN), atol=2e-5)
    heads = Frequencies(np.stack([YARN.inv_freq * s for s in (1, 0.5, 0.25)]))
    moved = rerotate(rope(X, FROM, heads), FROM, TO, heads)
    np.testing.assert_allclose(moved, rope(X, TO, heads), atol=4e-6)
    moved = rerotate(rope(X, FROM), FROM, TO, frequencies.default(8), heads)
    np.testing.assert_allclose(moved, rope(X, TO, heads), atol=4e-6)


def test_rows_move_by_their_own_amounts_and_dtype_stays():
    rows = jnp.array([[0, 1, 2, 3], [100, 101, 102, 103]])
    built = frequencies.default(8)
    moved = rerotate(rope(X, rows, built), rows, jnp.arange(4), built)
    np.testing.assert_allclose(moved, rope(X, jnp.arange(4), built), atol=4e-6)
    narrow = rope(X.astype(jnp.bfloat16), FROM)
    moved = rerotate(narrow, FROM, TO, built)
    assert moved.dtype == jnp.bfloat16
    # Against float64 rotation of the same bf16 numbers: rounded once, half an ulp.
    cached = np.float64(narrow)
    pairs = cached[..., :4] + 1j * cached[..., 4:]
    moves = np.subtract(TO, FROM, dtype=np.float64)[:, None, None] * built.inv_freq
    pairs = pairs * np.exp(1j * moves)
    wanted = np.concatenate([pairs.real, pairs.imag], axis=-1)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(wanted))) - 7)
    norm = np.tile(np.abs(pairs), 2)
    error = np.abs(np.float64(moved) - wanted)
    assert (error <= 0.5 * ulp + 2.0**-20 * norm).all()


def test_wrong_arguments_are_named():
    built = frequencies.default(8)
    with pytest.raises(ValueError, match=r"to_frequencies.*8.*4"):
        rerotate(X, FROM, TO, built, frequencies.default(4))
    with pytest.raises(ValueError, match=r"from_positions.*\(3,\)"):
        rerotate(X, jnp.arange(3), TO, built)
    with pytest.raises(ValueError, match=r"to_positions.*bool"):
        rerotate(X, FROM, TO > 0, built)
    with pytest.raises(ValueError, match=r"layout.*'thirds'"):
        rerotate(X, FROM, TO, built, layout="thirds")
    with pytest.raises(ValueError, match="to_frequencies must be a Frequencies"):
        rerotate(X, FROM, TO, built, jnp.ones(4))
