"""What each device of a mesh holds, and what a step has them send to each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.experiment.checkpoint import abstract_model, with_shardings
from rope_jax.experiment.collectives import parse_collectives
from rope_jax.experiment.config import MeshConfig, TrainConfig
from rope_jax.experiment.mesh import batch_sharding, make_mesh, param_shardings
from rope_jax.experiment.optimizer import make_optimizer
from rope_jax.experiment.train_step import TrainState, make_train_step
from rope_jax.nn.config import DecoderConfig

# On 2 x 2 x 2 devices of data, fsdp and tensor: the whole, and what each device has.
SHAPES = {
    "embedding": ((64, 32), (64, 16)),
    "head": ((32, 64), (16, 32)),
    "norm/scale": ((32,), (32,)),
    "blocks/attention/query/kernel": ((2, 32, 4, 8), (2, 16, 2, 8)),
    "blocks/attention/key/kernel": ((2, 32, 4, 8), (2, 16, 2, 8)),
    "blocks/attention/value/kernel": ((2, 32, 4, 8), (2, 16, 2, 8)),
    "blocks/attention/out/kernel": ((2, 4, 8, 32), (2, 2, 8, 16)),
    "blocks/attention_norm/scale": ((2, 32), (2, 32)),
    "blocks/mlp/gate/kernel": ((2, 32, 48), (2, 16, 24)),
    "blocks/mlp/up/kernel": ((2, 32, 48), (2, 16, 24)),
    "blocks/mlp/down/kernel": ((2, 48, 32), (2, 24, 16)),
    "blocks/mlp_norm/scale": ((2, 32), (2, 32)),
    "blocks/encoding/params/kernel": ((2, 32, 4), (2, 16, 2)),
    "blocks/encoding/params/bias": ((2, 4), (2, 2)),
}


@functools.cache
def compiled_step(*sizes):
    """The step of training, compiled for a mesh, and the state that it takes."""
    model = DecoderConfig(
        encoding="fox",
        num_layers=2,
        unroll=1,  # as an accelerator runs them
        model_dim=32,
        num_heads=4,
        head_dim=8,
        mlp_dim=48,
        vocab_size=64,
    )
    optimizer, mesh = make_optimizer(TrainConfig()), make_mesh(MeshConfig(*sizes))
    graphdef, params = abstract_model(model)
    state = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32),
        params,
        jax.eval_shape(optimizer.init, params),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    places = param_shardings(mesh, state)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=batch_sharding(mesh))
    batch = {"inputs": tokens, "targets": tokens}
    state = with_shardings(state, places)
    with jax.set_mesh(mesh):
        step = make_train_step(graphdef, optimizer, state_shardings=places)
        step = step.lower(state, batch).compile()
    return mesh, step, state


def collectives(*sizes):
    mesh, step, _ = compiled_step(*sizes)
    found = parse_collectives(step.as_text(), mesh.shape)
    return [one for one in found if one.axes]


def kinds_and_axes(found):
    return {(one.kind, one.axes) for one in found}


def named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_t17_no_device_holds_more_than_its_part_of_a_state():
    """Every parameter and both moments, as the step leaves them."""
    mesh, step, abstract = compiled_step(2, 2, 2, 1)

    def make(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return np.zeros(leaf.shape, leaf.dtype)

    state = jax.tree.map(make, abstract)
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract))
    tokens = jax.device_put(np.zeros((8, 16), np.int32), batch_sharding(mesh))
    state, _ = step(state, {"inputs": tokens, "targets": tokens})
    assert {name: leaf.shape for name, leaf in named(state.params).items()} == {
        name: whole for name, (whole, _) in SHAPES.items()
    }
    held = {
        name: {shard.data.shape for shard in leaf.addressable_shards}
        for name, leaf in named((state.params, state.opt_state)).items()
        if leaf.ndim
    }
    assert len(held) == 3 * len(SHAPES)
    for name, shapes in held.items():
        (parameter,) = [known for known in SHAPES if name.endswith(f"/{known}")]
        assert shapes == {SHAPES[parameter][1]}, name


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("t5", {"embedding": (32, 1)}),
        ("kerple", {"r1": (1, 1), "r2": (1, 1)}),
        (
            "fire",
            {
                "bias_in": (32,),
                "bias_out": (1,),
                "c": (),
                "kernel_in": (32,),
                "kernel_out": (32, 1),
                "length_multiplier": (),
            },
        ),
        ("shaw", {"key": (1, 33, 8)}),  # of no head
        ("cable", {"kernel": (1, 16, 1), "bias": (1, 1)}),
        ("cope", {"embedding": (1, 64, 8)}),  # of no head
        (
            "dape",  # whose network is across heads
            {
                "bias_in": (1, 32),
                "bias_out": (1, 1),
                "kernel_in": (1, 8, 32),
                "kernel_out": (1, 32, 1),
            },
        ),
        ("pope", {"phase": (1, 1, 8)}),
        ("learned", {"table": (16, 16)}),
    ],
)
def test_numbers_of_a_head_lie_with_it(encoding, expected):
    config = DecoderConfig(encoding=encoding, num_layers=1, model_dim=32, head_dim=8)
    config.learned.max_length = config.fire.length = 16
    params = abstract_model(config)[1]
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    places = named(param_shardings(mesh, params))
    assert expected == {
        name.rpartition("/")[2]: places[name].shard_shape(leaf.shape)
        for name, leaf in named(params).items()
        if "encoding" in name
    }


def test_over_data_gradients_are_summed_once_and_no_more_is_sent():
    found = collectives(8, 1, 1, 1)
    assert kinds_and_axes(found) == {("all-reduce", ("data",))}
    size = sum(np.prod(whole) for whole, _ in SHAPES.values())
    loss = 1  # its sum; the number of targets is known
    assert sum(one.payload * one.times for one in found) == 4 * (size + loss)


def gathered(found):
    return sum(one.payload * one.times for one in found if one.kind == "all-gather")


def weights(tensor):
    """Bytes of all that is gathered: layers for both passes, the two tables once."""
    sizes = {name: np.prod(whole) for name, (whole, _) in SHAPES.items()}
    layers = sum(size for name, size in sizes.items() if name.endswith("kernel"))
    return 4 * (sizes["embedding"] + (sizes["head"] + 2 * layers) / tensor)


def test_over_fsdp_weights_come_together_and_activations_stay():
    """Nothing but weights: no optimizer state, no activation."""
    found = collectives(1, 8, 1, 1)
    assert kinds_and_axes(found) == {
        ("all-gather", ("fsdp",)),
        ("all-reduce", ("fsdp",)),
    }
    assert gathered(found) == weights(tensor=1)


def test_over_three_axes_no_activation_is_gathered_over_data():
    found = collectives(2, 2, 2, 1)
    assert kinds_and_axes(found) == {
        ("all-gather", ("fsdp",)),
        ("all-reduce", ("tensor",)),  # of activations, and of norms
        ("all-reduce", ("fsdp",)),
        ("all-reduce", ("data",)),
        ("all-reduce", ("data", "fsdp")),
    }
    assert gathered(found) == weights(tensor=2)
    of_data = {one.op_name for one in found if "data" in one.axes}
    assert all("transpose(jvp" in name for name in of_data)  # of gradients


def test_over_sequence_keys_and_values_alone_are_gathered():
    """And the gates, a number for each head, of which whole rows are summed up."""
    found = collectives(1, 1, 1, 8)
    assert {axes for _, axes in kinds_and_axes(found)} == {("sequence",)}
    shapes = {one.kind: set() for one in found}
    for one in found:
        shapes[one.kind] |= set(one.shapes)
    assert shapes["all-gather"] == {"f32[8,16,4,8]", "f32[8,16,4]"}
    assert shapes["reduce-scatter"] == {"f32[8,2,4,8]"}
    assert set(shapes) == {"all-gather", "reduce-scatter", "all-reduce"}
