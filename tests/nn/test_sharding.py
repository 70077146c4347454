"""Where activations lie on a mesh, and rows whose tokens several devices share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rope_jax.functional.alibi import alibi_slopes
from rope_jax.nn import sharding
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.rotations import RandomRopeOptions


def mesh_of(*sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, sharding.AXES, axis_types=kinds)


def pieces(array):
    """What each device holds, in the order of the devices."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]


def decoder_of(encoding, **options):
    sizes = {"num_layers": 1, "model_dim": 16, "head_dim": 8, "mlp_dim": 16}
    config = DecoderConfig(encoding=encoding, tied_output=True, **(sizes | options))
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    return lambda tokens, **row: nnx.merge(graphdef, params)(tokens, **row)


def test_without_a_mesh_nothing_is_added():
    x = jnp.ones((3, 5, 7))
    for place in (sharding.stream, sharding.hidden, sharding.by_token, sharding.whole):
        assert place(x) is x
    assert sharding.size("data", "sequence") == 1
    with jax.set_mesh(jax.make_mesh((8,), ("devices",))):  # of another's making
        assert sharding.stream(x) is x


def test_t17_an_axis_that_does_not_divide_is_an_error_not_a_copy():
    with jax.set_mesh(mesh_of(8, 1, 1, 1)):
        placed = jax.jit(sharding.stream)(jnp.ones((16, 2, 4)))
        assert [piece.shape for piece in pieces(placed)] == [(2, 2, 4)] * 8
        message = r"mesh.data\*mesh.fsdp=8 does not divide the size 17 of .*17, 2, 4"
        with pytest.raises(ValueError, match=message):
            sharding.stream(jnp.ones((17, 2, 4)))


def test_r29_positions_of_a_row_that_is_split():
    """Device r has tokens 8r .. 8r + 7, and the keys of all 64."""
    keys = jnp.arange(64.0)[None, :, None, None]

    def attend(index, keys, rest):
        del rest
        total = jnp.broadcast_to(keys.sum((1, 2, 3))[:, None], (1, len(index)))
        numbers = jnp.stack([index[None].astype(jnp.float32), total], axis=-1)
        return numbers[..., None, :]

    with jax.set_mesh(mesh_of(1, 1, 1, 8)):
        run = jax.jit(lambda keys: sharding.over_sequence(attend, at, keys, None))
        at = jnp.arange(64)
        parts = pieces(run(keys))
    for r, part in enumerate(parts):
        assert part[0, :, 0, 0].tolist() == list(range(8 * r, 8 * r + 8))
        assert part[0, :, 0, 1].tolist() == [64 * 63 / 2] * 8


@pytest.mark.parametrize(
    ("encoding", "heads", "moves"),
    [("rope", 8, "all-to-all"), ("random_rope", 2, "all-gather")],
)
def test_r29_a_row_over_eight_devices_is_the_row_of_one(encoding, heads, moves):
    """By whole rows of a head each where there are enough, else by all the keys."""
    tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, 256)
    drawn = RandomRopeOptions(max_length=256)
    apply = decoder_of(encoding, num_heads=heads, random_rope=drawn)
    expected = jax.jit(apply)(tokens)
    with jax.set_mesh(mesh_of(1, 1, 1, 8)):
        compiled = jax.jit(apply).lower(tokens).compile()
        np.testing.assert_allclose(compiled(tokens), expected, atol=1e-6)
    kinds = {"all-to-all", "all-gather", "all-reduce", "collective-permute"}
    text = compiled.as_text()
    assert {kind for kind in kinds if f" {kind}(" in text} == {moves}


def test_a05_slopes_follow_their_heads():
    """Eight heads over four devices: two of the global slopes on each."""
    mesh = mesh_of(1, 1, 4, 2)
    place = jax.sharding.NamedSharding(mesh, P("tensor"))
    slopes = pieces(jax.jit(lambda: alibi_slopes(8), out_shardings=place)())
    assert [piece.tolist() for piece in slopes[::2]] == [
        [0.5, 0.25],
        [0.125, 0.0625],
        [0.03125, 0.015625],
        [0.0078125, 0.00390625],
    ]
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 256)
    apply = decoder_of("alibi", num_heads=8)
    expected = jax.jit(apply)(tokens)
    with jax.set_mesh(mesh):
        compiled = jax.jit(apply).lower(tokens).compile()
        np.testing.assert_allclose(compiled(tokens), expected, atol=1e-6)
    text = compiled.as_text()
    assert "f32[8,8,16]" not in text  # the bias of all heads for half of the queries


def test_alibi_in_a_kernel_that_no_partitioner_can_cut():
    """Each device folds the slopes of its heads, and the positions of its rows."""
    tokens = jax.random.randint(jax.random.key(0), (2, 128), 0, 256)
    segments = jnp.arange(128)[None] // jnp.array([[50], [90]])
    heads = {"num_heads": 8, "num_kv_heads": 4, "attention_implementation": "splash"}
    apply = decoder_of("alibi", **heads)
    expected = jax.jit(apply)(tokens, segment_ids=segments)
    with jax.set_mesh(mesh_of(2, 1, 2, 2)):
        got = jax.jit(apply)(tokens, segment_ids=segments)
        np.testing.assert_allclose(got, expected, atol=1e-5)
        np.testing.assert_allclose(
            jax.jit(apply)(tokens)[:, :50], expected[:, :50], atol=1e-5
        )
