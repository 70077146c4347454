"""Saving and restoring: what counts as a checkpoint, and what must not be restored."""

import dataclasses
import functools
import logging
import pathlib
import shutil

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.experiment.checkpoint import Checkpoints, load_params, with_shardings
from rope_jax.experiment.config import Config, MeshConfig, resolve
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.mesh import make_mesh, param_shardings, replicated
from rope_jax.experiment.metrics import empty_window
from rope_jax.experiment.optimizer import make_optimizer
from rope_jax.experiment.run_directory import check_config, complete_steps, save_config
from rope_jax.experiment.train_step import init_state
from rope_jax.nn.decoder import Decoder


@functools.cache
def config(**changes):
    config = Config()
    sizes = {"num_layers": 2, "model_dim": 32, "num_heads": 2, "head_dim": 16}
    for name, value in (sizes | changes).items():
        setattr(config.model, name, value)
    config.data.length = 32
    config.train.keep_checkpoints = 2
    return resolve(config)


@functools.cache
def make_state(config_key=()):
    """A state with no two equal arrays, so that a mixed-up restore shows."""
    chosen = config(**dict(config_key))
    init = functools.partial(
        init_state,
        functools.partial(Decoder, chosen.model),
        make_optimizer(chosen.train),
    )
    state = jax.eval_shape(init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(state._replace(key=None))
    rng = np.random.default_rng(0)
    values = [rng.uniform(1, 100, leaf.shape).astype(leaf.dtype) for leaf in leaves]
    filled = jax.tree.unflatten(tree, [jnp.asarray(v) for v in values])
    return filled._replace(step=jnp.int32(0), key=jax.random.key(5))


def state_at(step, **changes):
    state = make_state(tuple(changes.items()))
    params = jax.tree.map(lambda x: x + step, state.params)
    return state._replace(step=jnp.int32(step), params=params)


def window_at(step):
    return empty_window() | {"nats": jnp.float32(step)}


def data(taken=0):
    numbers = grain.MapDataset.range(1000).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    iterator = iter(numbers)
    for _ in range(taken):
        next(iterator)
    return iterator


def abstract(tree, mesh=None):
    mesh = mesh or make_mesh(MeshConfig(data=1))
    return with_shardings(tree, jax.tree.map(lambda _: replicated(mesh), tree))


def save(run_dir, *steps, config=None, state_at=state_at):
    config = config or globals()["config"]()
    save_config(config, run_dir)
    with Checkpoints(run_dir, config) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_at(step), window_at(step), data(step))
    return run_dir


def restore(run_dir, shardings=None, corpus="", **changes):
    """The newest checkpoint, into the model that `changes` describe."""
    state = state_at(0, **changes)
    wanted = with_shardings(state, shardings) if shardings else abstract(state)
    iterator = data()
    with Checkpoints(run_dir, config(**changes), corpus) as checkpoints:
        state, window = checkpoints.restore(wanted, abstract(window_at(0)), iterator)
    return state, window, iterator


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints 10 and 20. Copy it before changing it."""
    return save(tmp_path_factory.mktemp("run"), 10, 20)


@pytest.fixture
def run_dir(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))


def test_c02_a_checkpoint_is_named_by_the_updates_done(tmp_path):
    save(tmp_path, 3)
    state, window, iterator = restore(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert int(state.step) == 3
    assert float(window["nats"]) == 3.0
    assert next(iterator) == 3


def test_everything_comes_back_bit_for_bit(saved):
    state, window, iterator = restore(saved)
    right = state_at(20)
    assert_same_bits(state._replace(key=None), right._replace(key=None))
    assert_same_bits(jax.random.key_data(state.key), jax.random.key_data(right.key))
    assert_same_bits(window, window_at(20))
    assert next(iterator) == 20


def test_the_position_of_a_checkpoint_that_grain_wrote_is_read(run_dir):
    """A file for each process, as grain itself saves an iterator."""
    part = run_dir / "checkpoints" / "20" / "data"
    position = part / "position.json"
    assert position.read_text() == '{"next_index": 20}'
    for name in ("process_0-of-2.json", "process_1-of-2.json"):
        (part / name).write_text('{\n    "next_index": 17\n}')
    position.unlink()
    assert next(restore(run_dir)[2]) == 17


def test_t14_saved_values_are_those_of_the_save_step(tmp_path):
    """The state is given away to the next steps while the save is under way."""
    changes = {"model_dim": 512, "num_layers": 1}
    state = state_at(0, **changes)
    advance = jax.jit(
        lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0
    )
    params = jax.tree.map(jnp.copy, state.params)
    save_config(config(**changes), tmp_path)
    with Checkpoints(tmp_path, config(**changes)) as checkpoints:
        for step in range(1, 7):
            params = advance(params)
            if step in (2, 4):
                now = state._replace(step=jnp.int32(step), params=params)
                checkpoints.save(step, now, window_at(step), data(step))
    for step in (2, 4):
        right = state.params
        for _ in range(step):
            right = jax.tree.map(lambda x: x + 1, right)
        assert_same_bits(load_params(tmp_path, step)[2], right)


def test_the_newest_are_kept_and_none_is_saved_twice(tmp_path):
    save(tmp_path, 10, 20, 30, 30)
    assert complete_steps(tmp_path) == [20, 30]


BREAKAGES = {
    "marker deleted": lambda path: (path / "_CHECKPOINT_METADATA").unlink(),
    "marker truncated": lambda path: (path / "_CHECKPOINT_METADATA").write_text(""),
    "commit deleted": lambda path: (path / "commit_success.txt").unlink(),
    "commit truncated": lambda path: (path / "commit_success.txt").write_text(""),
    "part missing": lambda path: shutil.rmtree(path / "opt_state"),
    "iterator missing": lambda path: shutil.rmtree(path / "data"),
    "empty": lambda path: (shutil.rmtree(path), path.mkdir()),
    "temporary": lambda path: path.rename(f"{path}.orbax-checkpoint-tmp"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_c04_a_half_written_checkpoint_is_passed_over(name, run_dir, caplog):
    BREAKAGES[name](run_dir / "checkpoints" / "20")
    with caplog.at_level(logging.WARNING):
        assert load_params(run_dir)[3] == 10
        state, _, iterator = restore(run_dir)
    assert int(state.step) == 10
    assert next(iterator) == 10
    assert any("20" in r.getMessage() for r in caplog.records)
    save(run_dir, 20)
    assert complete_steps(run_dir) == [10, 20]
    state, _, _ = restore(run_dir)
    assert_same_bits(state.params, state_at(20).params)


def test_c04_a_half_written_checkpoint_pushes_no_whole_one_out(run_dir):
    BREAKAGES["marker deleted"](run_dir / "checkpoints" / "20")
    one = dataclasses.replace(
        config(), train=dataclasses.replace(config().train, keep_checkpoints=1)
    )
    with Checkpoints(run_dir, one) as checkpoints:
        assert checkpoints.latest == 10
    assert complete_steps(run_dir) == [10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, r"model\.num_layers: 2 != 3"),
        ({"model_dim": 64}, r"model\.model_dim: 32 != 64"),
        ({"encoding": "learned"}, r"model\.encoding: 'rope' != 'learned'"),
        ({"encoding": "alibi"}, r"model\.encoding: 'rope' != 'alibi'"),
    ],
)
def test_c07_another_model_is_refused(saved, changes, message):
    with pytest.raises(ValueError, match=message):
        restore(saved, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_layers": 3},
            r"params/blocks/attention/key/kernel is float32\[2, 32, 2, 16\] there "
            r"and float32\[3, 32, 2, 16\] here",
        ),
        ({"encoding": "learned"}, r"params/encoding/table is absent there and float32"),
        ({"tied_output": True}, r"params/head is float32\[32, 256\] there and absent"),
    ],
)
def test_c07_other_parameters_are_refused_whatever_the_config_says(
    saved, changes, message
):
    """As when the code of the model changed since."""
    wanted = abstract(state_at(0, **changes))
    with (
        Checkpoints(saved, config()) as checkpoints,
        pytest.raises(ValueError, match=message),
    ):
        checkpoints.restore(wanted, abstract(window_at(0)), data())


def test_other_data_is_refused(tmp_path):
    save_config(config(), tmp_path)
    with Checkpoints(tmp_path, config(), "aa11") as checkpoints:
        checkpoints.save(1, state_at(1), window_at(1), data(1))
    with pytest.raises(
        ValueError, match="other bytes: sha256 'aa11' there, 'bb22' here"
    ):
        restore(tmp_path, corpus="bb22")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named(run_dir):
    for path in (run_dir / "checkpoints" / "20" / "params").rglob("d/*"):
        path.write_bytes(b"")
    with pytest.raises(RunError, match=r"checkpoints/20 cannot be read; delete it"):
        load_params(run_dir)
    assert load_params(run_dir, step=10)[3] == 10


@pytest.mark.parametrize("shape", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}])
def test_arrays_come_back_on_the_mesh_that_is_asked_for(saved, shape):
    mesh = make_mesh(MeshConfig(**{"data": 1} | shape))
    shardings = param_shardings(mesh, state_at(0))
    state, _, _ = restore(saved, shardings)
    kernel = state.params["blocks"]["mlp"]["up"]["kernel"]
    split = (2, 32 // mesh.shape["fsdp"], 128 // mesh.shape["tensor"])
    assert {s.data.shape for s in kernel.addressable_shards} == {split}
    assert_same_bits(jax.device_get(state.params), jax.device_get(state_at(20).params))


def test_c06_eight_devices_save_and_others_restore(tmp_path):
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))

    def in_pieces(step):
        return jax.device_put(state_at(step), param_shardings(mesh, state_at(step)))

    save(tmp_path / "run", 3, state_at=in_pieces)
    expected = jax.device_get(state_at(3)._replace(key=None))
    for data, fsdp, tensor in ((1, 1, 1), (1, 2, 2), (2, 4, 1), (1, 8, 1)):
        other = make_mesh(MeshConfig(data, fsdp, tensor))
        state, _, _ = restore(tmp_path / "run", param_shardings(other, state_at(0)))
        kernel = state.params["blocks"]["mlp"]["up"]["kernel"]
        pieces = {shard.data.shape for shard in kernel.addressable_shards}
        assert pieces == {(2, 32 // fsdp, 128 // tensor)}
        assert_same_bits(jax.device_get(state._replace(key=None)), expected)


def test_load_params_makes_the_model(saved):
    loaded_config, graphdef, params, step = load_params(saved)
    assert (loaded_config, step) == (config(), 20)
    assert_same_bits(params, state_at(20).params)
    model = nnx.merge(graphdef, params)
    assert isinstance(model, Decoder)
    np.testing.assert_array_equal(model.head[...], state_at(20).params["head"])
    _, _, older, step = load_params(saved, step=10)
    assert step == 10
    assert_same_bits(older, state_at(10).params)


def test_load_params_onto_a_mesh(saved):
    mesh = make_mesh(MeshConfig(data=1, fsdp=4))
    params = load_params(saved, mesh=mesh)[2]
    assert {s.data.shape for s in params["head"].addressable_shards} == {(8, 256)}


def test_c08_relative_paths_and_home(saved, monkeypatch):
    right = load_params(saved)[2]
    monkeypatch.chdir(saved.parent)
    assert_same_bits(load_params(f"./{saved.name}")[2], right)
    monkeypatch.setenv("HOME", str(saved.parent))
    assert_same_bits(load_params(f"~/{saved.name}")[2], right)
    monkeypatch.chdir("/")
    assert_same_bits(load_params(saved.absolute())[2], right)


def test_c09_a_path_one_level_too_deep(saved, tmp_path):
    for inside in ("checkpoints/20", "checkpoints"):
        with pytest.raises(
            ValueError, match=f"inside a run; give its directory, {saved}$"
        ):
            load_params(saved / inside)
    with pytest.raises(FileNotFoundError, match=f"no checkpoint found in {tmp_path}"):
        load_params(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint found"):
        load_params(tmp_path / "missing")
    save_config(config(), tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint found"):
        load_params(tmp_path)
    with pytest.raises(
        ValueError, match=r"no checkpoint 15 in .*; there are \[10, 20\]"
    ):
        load_params(saved, step=15)
    with pytest.raises(ValueError, match="must be a directory, got the file"):
        load_params(saved / "config.json")
    with pytest.raises(ValueError, match=r"path of the file system, got 'gs://b/run'"):
        load_params("gs://b/run")


def test_a_directory_of_another_config_is_refused(run_dir):
    other = config(encoding="alibi", qk_norm=True)
    with pytest.raises(
        ValueError, match=r"encoding: 'rope' != 'alibi'; model\.qk_norm"
    ):
        check_config(other, run_dir)
    free = dataclasses.replace(
        config(),
        eval=dataclasses.replace(config().eval, anchors=3),
        mesh=MeshConfig(fsdp=2),
        data=dataclasses.replace(config().data, data_dir="elsewhere"),
        model=dataclasses.replace(
            config().model, remat="full", attention_implementation="xla"
        ),
        train=dataclasses.replace(
            config().train, log_every=7, checkpoint_every=9, keep_checkpoints=5
        ),
    )
    check_config(free, run_dir)
    longer = dataclasses.replace(
        config(), train=dataclasses.replace(config().train, steps=7777)
    )
    with pytest.raises(ValueError, match=r"train\.steps: 1000 != 7777"):
        check_config(longer, run_dir)
    (run_dir / "config.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoints but no config\.json"):
        check_config(config(), run_dir)


def test_a_damaged_config_is_named(run_dir):
    (run_dir / "config.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"config\.json cannot be used"):
        load_params(run_dir)
    (run_dir / "config.json").write_text('{"modle": {}}')
    with pytest.raises(ValueError, match="modle"):
        load_params(run_dir)
