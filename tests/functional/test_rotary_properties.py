"""Properties of rotation at positions and frequencies that hypothesis chooses."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.rotary import convert_layout, rerotate, rope

T, N, H = 3, 2, 16
LAYOUTS = ["half", "interleaved"]
BUILT = frequencies.default(H)
SCALED = frequencies.yarn(H, factor=16, original_max_position_embeddings=4096)

turn = jax.jit(rope, static_argnames=("layout", "inverse"))
move = jax.jit(rerotate, static_argnames="layout")
convert = jax.jit(convert_layout, static_argnames=("source", "target"))

settings = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
offsets = st.integers(-(10**7), 10**7)
positions = st.lists(offsets, min_size=T, max_size=T).map(functools.partial(np.array))


def vectors(seed, count=1):
    made = np.random.default_rng(seed).standard_normal((count, T, N, H))
    return [jnp.asarray(each, jnp.float32) for each in made]


def norms(x):
    return np.linalg.norm(np.float64(x), axis=-1)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings
@hypothesis.given(seed=seeds, first=positions, second=positions, shift=offsets)
def test_scores_depend_on_the_lag_only(layout, seed, first, second, shift):
    query, key = vectors(seed, 2)

    def score(offset):
        turned = (
            turn(query, first + offset, layout=layout),
            turn(key, second + offset, layout=layout),
        )
        return (np.float64(turned[0]) * np.float64(turned[1])).sum(-1)

    difference = np.abs(score(shift) - score(0))
    assert (difference <= 2e-6 * norms(query) * norms(key)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings
@hypothesis.given(seed=seeds, first=positions, second=positions)
def test_rotations_add_up(layout, seed, first, second):
    (x,) = vectors(seed)
    twice = turn(turn(x, first, layout=layout), second, layout=layout)
    once = turn(x, first + second, layout=layout)
    assert (norms(twice - once) <= 2e-6 * norms(x)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings
@hypothesis.given(seed=seeds, at=positions)
def test_inverse_undoes_and_norms_are_kept(layout, seed, at):
    (x,) = vectors(seed)
    turned = turn(x, at, layout=layout)
    np.testing.assert_allclose(norms(turned), norms(x), rtol=1e-6)
    for built in (BUILT, SCALED):
        there = turn(x, at, built, layout=layout)
        back = turn(there, at, built, layout=layout, inverse=True)
        assert (norms(back - x) <= 2e-6 * norms(x)).all()
    np.testing.assert_allclose(
        norms(there), SCALED.attention_factor * norms(x), rtol=1e-6
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@settings
@hypothesis.given(seed=seeds, first=positions, second=positions)
def test_rerotation_equals_a_fresh_rotation(layout, seed, first, second):
    (x,) = vectors(seed)
    cached = turn(x, first, BUILT, layout=layout)
    moved = move(cached, first, second, BUILT, layout=layout)
    fresh = turn(x, second, BUILT, layout=layout)
    assert (norms(moved - fresh) <= 2e-6 * norms(x)).all()
    moved = move(cached, first, second, BUILT, SCALED, layout=layout)
    fresh = turn(x, second, SCALED, layout=layout)
    assert (norms(moved - fresh) <= 3e-6 * norms(x)).all()


@settings
@hypothesis.given(seed=seeds, at=positions)
def test_layouts_agree_after_conversion(seed, at):
    (x,) = vectors(seed)
    half = turn(convert(x, source="interleaved", target="half"), at, layout="half")
    back = convert(half, source="half", target="interleaved")
    interleaved = turn(x, at, layout="interleaved")
    assert (norms(back - interleaved) <= 1e-6 * norms(x)).all()


@settings
@hypothesis.given(
    dim=st.sampled_from([8, 64, 128]),
    theta=st.floats(100, 1e7),
    factor=st.floats(1, 128),
    length=st.integers(256, 2**17),
)
def test_every_scaling_lies_between_plain_and_interpolated(dim, theta, factor, length):
    plain = frequencies.default(dim, theta=theta).inv_freq
    original = {"original_max_position_embeddings": length}
    for built in (
        frequencies.ntk(dim, theta=theta, factor=factor),
        frequencies.yarn(dim, theta=theta, factor=factor, **original),
        frequencies.llama3(dim, theta=theta, factor=factor, **original),
        frequencies.dynamic_ntk(
            dim,
            theta=theta,
            factor=factor,
            max_position_embeddings=length,
            seq_len=length,
        ),
    ):
        ratio = built.inv_freq / plain
        assert (ratio <= 1 + 1e-12).all()
        assert (ratio >= 1 / factor - 1e-12).all()
        assert (
            np.diff(ratio) <= 1e-12
        ).all()  # slower pairs are slowed at least as much
