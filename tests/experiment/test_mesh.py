"""The mesh: sizes that fit, sizes that do not, and where parameters lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from rope_jax.experiment.config import Config, MeshConfig
from rope_jax.experiment.mesh import (
    batch_sharding,
    cache_shardings,
    check_lengths,
    check_mesh,
    make_mesh,
    mesh_shape,
    param_shardings,
)
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.decoding import extend, init_cache


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1, 1)),
        ({"data": 2, "fsdp": -1}, (2, 4, 1, 1)),
        ({"data": 2, "tensor": 2}, (2, 1, 2, 1)),
        ({"data": 1}, (1, 1, 1, 1)),
    ],
)
def test_one_size_may_be_left_open(sizes, shape):
    assert mesh_shape(MeshConfig(**sizes), 8) == shape
    assert tuple(make_mesh(MeshConfig(**sizes)).shape.values()) == shape


@pytest.mark.parametrize(
    "sizes",
    [{"data": 0}, {"fsdp": -1}, {"data": 16}, {"data": -1, "tensor": 3}, {"data": -2}],
)
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="mesh"):
        mesh_shape(MeshConfig(**sizes), 8)


@pytest.mark.parametrize(
    ("group", "field", "value", "mesh", "message"),
    [
        ("train", "batch_size", 4, {}, "mesh.data.*=8 must divide the 4 sequences"),
        ("model", "num_kv_heads", 1, {"tensor": 2}, "=2 must divide the 1 key/value"),
        ("model", "vocab_size", 257, {"tensor": 4}, "tensor=4 must divide the 257"),
        ("train", "batch_size", 12, {}, "mesh.data.*=8 must divide the 12 sequences"),
        ("model", "num_heads", 3, {"tensor": 2}, "tensor=2 must divide the 3 heads"),
        ("data", "length", 129, {"sequence": 2}, "sequence=2 must divide the 129"),
        ("model", "model_dim", 66, {"fsdp": 4}, "fsdp=4 must divide the 66 channels"),
        ("model", "vocab_size", 255, {"tensor": 2}, "tensor=2 must divide the 255"),
        ("model", "mlp_dim", 65, {"tensor": 2}, r"=2 .* 65 channels \(model.mlp_dim"),
        (
            "model",
            "model_dim",
            36,
            {"data": 8, "shard_optimizer": True},
            r"mesh.data\*mesh.fsdp=8 must divide the 36 .*mesh.shard_optimizer",
        ),
    ],
)
def test_what_the_mesh_does_not_divide(group, field, value, mesh, message):
    config = Config(mesh=MeshConfig(**mesh))
    setattr(getattr(config, group), field, value)
    with pytest.raises(ValueError, match=message):
        check_mesh(config)


def test_linear_attention_splits_heads_over_the_sequence_axis():
    config = Config(mesh=MeshConfig(data=1, tensor=2, sequence=4))
    config.model.attention = "linear"
    with pytest.raises(ValueError, match=r"mesh.tensor\*mesh.sequence=8 must .* 4 key"):
        check_mesh(config)
    config.model.num_heads = 8
    check_mesh(config)


def test_lengths_of_an_evaluation_that_the_mesh_does_not_divide():
    mesh = make_mesh(MeshConfig(data=1, sequence=8))
    check_lengths(mesh, [128, 256])
    with pytest.raises(
        ValueError, match=r"mesh.sequence=8 .*eval.lengths.* got 100, 130"
    ):
        check_lengths(mesh, [130, 128, 100])


def test_parameters_are_born_in_slices():
    """Heads and feed-forward over tensor, the other side over fsdp, no full copy."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    config = DecoderConfig(num_layers=2, encoding="learned")
    config.learned.max_length = 16

    def init():
        return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0))))

    shardings = param_shardings(mesh, jax.eval_shape(init))
    params = jax.jit(init, out_shardings=shardings)()
    mlp = params["blocks"]["mlp"]
    attention = params["blocks"]["attention"]
    for array, spec in (
        (attention["query"]["kernel"], P(None, "fsdp", "tensor", None)),
        (attention["out"]["kernel"], P(None, "tensor", None, "fsdp")),
        (mlp["up"]["kernel"], P(None, "fsdp", "tensor")),
        (mlp["down"]["kernel"], P(None, "tensor", "fsdp")),
        (params["embedding"], P(None, "fsdp")),
        (params["head"], P("fsdp", "tensor")),
        (params["encoding"]["table"], P(None, "fsdp")),
    ):
        assert array.sharding.spec == spec
        sizes = [mesh.shape[axis] if axis else 1 for axis in spec]
        whole = zip(array.shape, sizes, strict=True)
        assert array.addressable_shards[0].data.shape == tuple(
            size // parts for size, parts in whole
        )


def test_an_unknown_parameter_is_refused():
    mesh = make_mesh(MeshConfig())
    with pytest.raises(ValueError, match=r"no sharding rule .* new\.thing"):
        param_shardings(mesh, {"new": {"thing": jnp.zeros((8, 8))}})


def test_a_cache_lies_and_is_written_as_the_model_does():
    """Rows over data and fsdp, heads over tensor; no device sees another's keys."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    config = DecoderConfig(
        num_layers=2, model_dim=16, num_heads=2, head_dim=8, mlp_dim=16, encoding="fox"
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    model.head = nnx.Param(jax.random.normal(jax.random.key(1), (16, 256)))
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    text = jax.random.randint(jax.random.key(2), (4, 6), 0, 256)

    def step(params, tokens, cache):
        return extend(nnx.merge(graphdef, params), tokens, cache)

    cache = init_cache(model, 4, 24)
    expected, after = jax.jit(step)(params, text, cache)
    with jax.set_mesh(mesh):
        places = cache_shardings(mesh, cache)
        memory = places.layers[0][0]
        assert memory["key"].spec == P(("data", "fsdp"), "tensor", None, None)
        assert memory["extras"].high.spec == P(("data", "fsdp"), None, "tensor")
        inputs = jax.device_put(
            (params, text, cache),
            (param_shardings(mesh, params), batch_sharding(mesh), places),
        )
        run = jax.jit(step, out_shardings=(None, places), donate_argnums=2)
        compiled = run.lower(*inputs).compile()
        logits, cache = compiled(*inputs)
    gathers = [
        line for line in compiled.as_text().splitlines() if "all-gather(" in line
    ]
    assert gathers  # of weights, whose fsdp slices come together
    assert not [line for line in gathers if ",24," in line]  # of slots
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"mesh.data\*mesh.fsdp=4 does not divide .* 3"
    ):
        cache_shardings(mesh, jax.eval_shape(lambda: init_cache(model, 3, 24)))


def test_batches_split_over_data_and_fsdp():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    batch = jax.device_put(jnp.zeros((8, 4)), batch_sharding(mesh))
    assert batch.addressable_shards[0].data.shape == (2, 4)
