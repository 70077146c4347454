"""Numbers of x-transformers, rotary-embedding-torch, BLOOM, MPT and T5.

CoPE, the forget gate and PoPE are compared in the tests of their own files. These peers
form angles as float32 products, at positions of at most 47, so that rounding alone
(1e-5 of values of order 1) is allowed for.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.additive import sinusoidal
from rope_jax.functional.alibi import alibi_bias, alibi_slopes
from rope_jax.functional.relative import t5_buckets
from rope_jax.functional.rotary import (
    apply_rope,
    multi_axis_angles,
    rope,
    xpos_block,
    xpos_scale,
)

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(
    ("name", "scale_base"), [("xpos", 512.0), ("xpos_base64", 64.0)]
)
def test_golden_xpos_scale_and_rotation(golden, name, scale_base):
    """Centred where the peer centres it, the factors and the products are the same."""
    peer = golden("x_transformers")
    length = peer[f"{name}/query"].shape[1]
    positions = jnp.arange(length)
    scale = xpos_scale(positions, 32, scale_base=scale_base, center=length // 2)
    np.testing.assert_allclose(scale, peer[f"{name}/scale"], rtol=2e-5)
    both = jnp.repeat(scale, 2, axis=-1)[:, None, :]
    for which, factor in (("query", both), ("key", 1 / both)):
        turned = rope(
            jnp.asarray(peer[f"{name}/{which}"]), positions, layout="interleaved"
        )
        scaled = turned * factor[None]
        np.testing.assert_allclose(scaled, peer[f"{name}/rotated_{which}"], **TOLERANCE)


@pytest.mark.parametrize(
    ("archive", "name", "scale_base"),
    [
        ("x_transformers", "xpos/", 512.0),
        ("x_transformers", "xpos_base64/", 64.0),
        ("rotary_embedding_torch", "xpos/", 512.0),
    ],
)
def test_golden_xpos_causal_scores(golden, archive, name, scale_base):
    """Our centre is the block's own: scores agree where a causal mask lets them be."""
    peer = golden(archive)
    inputs = name if archive == "x_transformers" else ""
    positions = jnp.arange(peer[f"{inputs}query"].shape[1])
    query, key = (
        rope(jnp.asarray(peer[inputs + which]), positions, layout="interleaved")
        for which in ("query", "key")
    )
    query, key = xpos_block(
        query, key, positions, positions, scale_base=scale_base, layout="interleaved"
    )
    scores = np.asarray(jnp.einsum("btnh,bsnh->bnts", query, key))
    causal = np.tril(np.ones(scores.shape[-2:], bool))
    expected = peer[f"{name}scores"]
    np.testing.assert_allclose(
        scores[..., causal], expected[..., causal], rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("factor", [1, 4])
def test_golden_partial_rotation_of_x_transformers(golden, factor):
    """16 of 48 channels, interleaved, plain and with position interpolation."""
    peer = golden("x_transformers")
    name = "partial" if factor == 1 else "partial_linear4"
    ladder = frequencies.linear(16, factor=factor)
    for which in ("query", "key"):
        x = jnp.asarray(peer[f"partial/{which}"])
        turned = rope(x, None, ladder, layout="interleaved")
        np.testing.assert_allclose(turned, peer[f"{name}/rotated_{which}"], **TOLERANCE)
        np.testing.assert_array_equal(turned[..., 16:], x[..., 16:])


def test_golden_ntk_base_of_x_transformers(golden):
    """The rescaled base of both lucidrains libraries."""
    expected = golden("x_transformers")["ntk_factor4/inv_freq"]
    found = frequencies.ntk(64, factor=4.0).inv_freq
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "ladder"),
    [
        ("default", frequencies.default(32)),
        ("linear2", frequencies.linear(32, factor=2.0)),
        ("ntk8", frequencies.ntk(32, factor=8.0)),
        ("partial16", frequencies.default(16)),
        ("theta1e6", frequencies.default(32, theta=1e6)),
    ],
)
def test_golden_rotation_of_rotary_embedding_torch(golden, name, ladder):
    """From position 0, and keys from position 7 on.

    The peer adds its offset before it divides by the interpolation factor, as we do.
    """
    peer = golden("rotary_embedding_torch")
    for which, offset, suffix in (("query", 0, ""), ("key", 7, "_offset7")):
        x = jnp.asarray(peer[which])
        positions = jnp.arange(x.shape[1]) + offset
        turned = rope(x, positions, ladder, layout="interleaved")
        expected = peer[f"{name}/rotated_{which}{suffix}"]
        np.testing.assert_allclose(turned, expected, **TOLERANCE)


def test_golden_axial_rotation_of_rotary_embedding_torch(golden):
    """Two axes of 16 channels each, rows first, the same ladder on both."""
    peer = golden("rotary_embedding_torch")
    x = jnp.asarray(peer["axial/x"])
    _, rows, columns, width = x.shape
    grid = jnp.stack(
        jnp.meshgrid(jnp.arange(rows), jnp.arange(columns), indexing="ij"), axis=-1
    ).reshape(-1, 2)
    ladder = frequencies.default(16).inv_freq
    angles = multi_axis_angles(grid, ladder, sections=(8, 8), style="axial")
    turned = apply_rope(
        x.reshape(1, -1, 1, width),
        jnp.cos(angles)[None],
        jnp.sin(angles)[None],
        layout="interleaved",
    )
    expected = peer["axial/rotated"].reshape(turned.shape)
    np.testing.assert_allclose(turned, expected, **TOLERANCE)


def test_a02_golden_alibi_slopes_for_every_head_count(golden):
    """1 to 128 heads: the original recursion (x-transformers), BLOOM and MPT agree."""
    original = golden("x_transformers")["alibi/slopes"]
    peers = golden("transformers")
    for heads in range(1, 129):
        slopes = alibi_slopes(heads)
        assert slopes.shape == (heads,)
        np.testing.assert_array_equal(slopes, original[heads, :heads].astype("f4"))
        for name in ("bloom", "mpt"):
            expected = peers[f"alibi/{name}_slopes"][heads, :heads]
            np.testing.assert_allclose(slopes, expected, rtol=1e-6)


def test_golden_symmetric_alibi_bias(golden):
    """-slope * |i - j| at unordered distances."""
    peer = golden("x_transformers")
    positions = jnp.asarray(peer["alibi/positions"], jnp.int32)
    bias = alibi_bias(alibi_slopes(6), positions, positions)
    np.testing.assert_allclose(bias, peer["alibi/bias_6_heads"], rtol=1e-6)


@pytest.mark.parametrize("archive", ["x_transformers", "transformers"])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_golden_t5_buckets(golden, archive, kind):
    """Every distance from -300 to 300, bucket by bucket."""
    peer = golden(archive)
    distance = jnp.asarray(peer["t5/relative_position"], jnp.int32)
    found = t5_buckets(distance, bidirectional=kind == "bidirectional")
    np.testing.assert_array_equal(found, peer[f"t5/bucket_{kind}"])


def test_golden_sinusoid_of_x_transformers(golden):
    """All sines before all cosines, spacing of the paper."""
    peer = golden("x_transformers")
    found = sinusoidal(jnp.arange(40), 24, order="concatenated")
    expected = peer["sinusoid/embedding"] / peer["sinusoid/scale"]
    np.testing.assert_allclose(found, expected, **TOLERANCE)
