"""A step on eight devices is the step on one, for every encoding and kind of mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rope_jax.experiment.checkpoint import abstract_model
from rope_jax.experiment.config import MeshConfig
from rope_jax.experiment.mesh import batch_sharding, make_mesh, param_shardings
from rope_jax.experiment.train_step import TrainState, make_train_step
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.encodings import ENCODINGS

ROWS, LENGTH = 8, 16
# Sizes of data, fsdp, tensor and sequence.
MESHES = [(8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1), (1, 1, 4, 2), (1, 1, 1, 8)]
# The two that split all there is to split meet every encoding; the others these.
# `--every_mesh` has all of them meet all.
MANY = [(2, 2, 2, 1), (1, 1, 4, 2)]
SOME = ("rope", "alibi", "t5", "fox", "shaw", "learned", "cope")
# A third of the time to compile; an option that jax 0.12 does not have.
OLD = jax.__version_info__ < (0, 11)
QUICK = {"xla_cpu_use_fusion_emitters": False} if OLD else {}


def pytest_generate_tests(metafunc):
    if "some_sizes" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("every_mesh")
    cases = [
        pytest.param(encoding, sizes, id=f"{encoding}-{'x'.join(map(str, sizes))}")
        for encoding in ENCODINGS
        for sizes in MESHES
        if every or sizes in MANY or encoding in SOME
    ]
    metafunc.parametrize(("encoding", "some_sizes"), cases)


def model_of(encoding, **options):
    sizes = {"num_layers": 1, "model_dim": 32, "num_heads": 4, "head_dim": 8}
    sizes |= {"mlp": "plain", "mlp_dim": 32, "vocab_size": 32}
    config = DecoderConfig(encoding=encoding, **(sizes | options))
    config.learned.max_length = config.fire.length = LENGTH
    config.random_rope.max_length = 4 * LENGTH
    return config


def random_params(config):
    """Numbers with which every parameter has a gradient."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if not leaf.ndim or path[-1].key in ("scale", "r1", "r2"):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        return rng.normal(0, 0.3, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_model(config)[1])


def batch_of():
    tokens = np.random.default_rng(1).integers(0, 32, (ROWS, LENGTH + 1), np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def packed():
    """Two documents in each row, cut where no part of the row begins, and padding."""
    segments = np.repeat([[0] * 5 + [1] * 11], ROWS, axis=0)
    positions = np.concatenate([np.arange(5), 7 * np.arange(11)])
    real = np.ones((ROWS, LENGTH), bool)
    real[:, 3] = False
    return batch_of() | {
        "segment_ids": segments.astype(np.int32),
        "positions": np.repeat(positions[None], ROWS, axis=0).astype(np.int32),
        "key_mask": real,
    }


def update(config, batch, sizes=None):
    """A step's sums, and what it adds to the parameters: minus the gradients."""
    optimizer, params = optax.sgd(1.0), random_params(config)
    step = jnp.zeros((), jnp.int32)
    state = TrainState(step, params, optimizer.init(params), jax.random.key(0))
    graphdef, _ = abstract_model(config)
    mesh = make_mesh(MeshConfig(*(sizes or (1, 1, 1, 1))))
    with jax.set_mesh(mesh):
        places = param_shardings(mesh, state)
        state = jax.device_put(state, places)
        batch = jax.device_put(batch, batch_sharding(mesh))
        step = make_train_step(graphdef, optimizer, state_shardings=places)
        state, sums = step.lower(state, batch).compile(QUICK)(state, batch)
    added = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, params)
    return jax.device_get(sums), added


def assert_same(got, expected):
    for name in ("nats", "targets", "grad_norm", "param_norm"):
        np.testing.assert_allclose(got[0][name], expected[0][name], rtol=1e-5)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(got[1]),
        jax.tree.leaves(expected[1]),
        strict=True,
    ):
        if path[-1].key != "bias_out":  # one number for a head: no softmax sees it
            assert np.abs(other).max() > 1e-4, path
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=str(path))


@functools.cache
def alone(encoding):
    return update(model_of(encoding), batch_of())


def test_loss_and_gradients_are_those_of_one_device(encoding, some_sizes):
    got = update(model_of(encoding), batch_of(), some_sizes)
    assert_same(got, alone(encoding))


@pytest.mark.parametrize(
    ("encoding", "options", "batch", "sizes"),
    [
        ("rope", {"window": 6, "num_kv_heads": 2}, packed, (1, 2, 2, 2)),
        ("fox", {"attention_implementation": "blockwise"}, packed, (1, 2, 1, 4)),
        ("alibi", {"tied_output": True, "remat": "full"}, batch_of, (2, 2, 1, 2)),
        ("rope", {"num_layers": 2, "unroll": 1}, batch_of, (2, 2, 2, 1)),
        ("rope", {"attention": "linear"}, packed, (2, 1, 2, 2)),
        ("rope", {"attention_implementation": "blockwise"}, packed, (2, 1, 2, 2)),
    ],
)
def test_options_on_a_mesh(encoding, options, batch, sizes):
    config, batch = model_of(encoding, **options), batch()
    assert_same(update(config, batch, sizes), update(config, batch))
