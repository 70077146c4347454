"""Runs that start from another run's parameters: which, at what lengths, and how."""

import copy
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from rope_jax.experiment import sweep
from rope_jax.experiment.checkpoint import (
    abstract_model,
    load_params,
    with_shardings,
)
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig, parse
from rope_jax.experiment.data import pipeline, sources
from rope_jax.experiment.init_from import inherit, load, source
from rope_jax.experiment.loss import cross_entropy
from rope_jax.experiment.mesh import make_mesh, param_shardings
from rope_jax.experiment.run_directory import load_config
from rope_jax.experiment.training import check_workdir, fit
from rope_jax.nn.config import DecoderConfig

LENGTH, LONGER = 16, 32


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "bytes"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 3000, np.uint8))
    config = Config(mesh=MeshConfig(data=1))
    config.model = DecoderConfig(
        num_layers=1, model_dim=16, num_heads=2, head_dim=8, mlp="plain"
    )
    config.data.path, config.data.length = str(path), LENGTH
    config.train.steps, config.train.batch_size = 3, 4
    config.train.warmup_steps, config.train.log_every = 0, 1
    config.train.learning_rate = 3e-2
    config.eval = EvalConfig(lengths=(LENGTH,), anchors=4, block=8, bootstrap=20)
    return config


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A sweep's directory with one run."""
    workdir = tmp_path_factory.mktemp("runs")
    fit(base, workdir / "rope-seed0")
    return workdir


def yarn(base, init_from, **train):
    """Two steps with a longer context by YaRN."""
    config = copy.deepcopy(base)
    config.train.steps = 2
    config.data.length = LONGER
    config.model.rope.scaling, config.model.rope.factor = "yarn", 2.0
    config.eval.lengths = (LONGER,)
    config.init_from = str(init_from)
    config.train = dataclasses.replace(config.train, **train)
    return config


@pytest.fixture(scope="module")
def tuned(base, trained, tmp_path_factory):
    """The run again, with YaRN, at twice its length, as a sweep of one."""
    workdir = tmp_path_factory.mktemp("tuned")
    (row,) = sweep.run(yarn(base, trained), workdir)
    assert (row["train_length"], row["step"]) == (LONGER, 2)
    return workdir / "rope-seed0"


def arrays(run, step, *names):
    path = run / "checkpoints" / str(step)
    loaded = ocp.load_checkpointables(path, dict.fromkeys(names))
    return [np.asarray(x) for x in jax.tree.leaves(loaded)]


def test_the_first_loss_is_that_of_the_source_with_the_scaling(base, trained, tuned):
    """Before its first update the new run is the old one, evaluated on its batch."""
    config = load_config(tuned)
    assert config.model.rope.original_length == LENGTH
    assert config.init_from == str(trained)
    _, _, params, _ = load_params(trained / "rope-seed0")
    graphdef = load_params(tuned)[1]
    corpus = sources.load(config.data)
    options = {"length": LONGER, "batch_size": 4, "seed": 0}
    dataset = pipeline.train_dataset(
        corpus.train, **options, process_index=0, process_count=1
    )
    batch = next(iter(dataset))
    logits = nnx.merge(graphdef, params)(batch["inputs"])
    nats, targets = cross_entropy(logits, batch["targets"])
    rows = [json.loads(line) for line in (tuned / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["loss"] == pytest.approx(float(nats / targets), rel=1e-6)
    assert abs(rows[0]["loss"] - np.log(256)) > 0.05  # what an untrained model has


def test_the_optimizer_is_fresh(tuned):
    counts = [x for x in arrays(tuned, 2, "opt_state") if x.dtype == np.int32]
    assert counts and {int(count) for count in counts} == {2}  # and not 2 + 3


def test_c01_it_goes_on_bit_for_bit_without_its_source(
    base, trained, tuned, tmp_path, monkeypatch
):
    """Resumed after its first step, when its source is gone; the path is relative."""
    run, gone = tmp_path / "rope-seed0", tmp_path / "gone"
    shutil.copytree(trained, gone)
    monkeypatch.chdir(tmp_path)
    config = yarn(base, "gone", checkpoint_every=1)
    assert fit(config, run).finished
    assert load_config(run).init_from == str(gone)
    shutil.rmtree(run / "checkpoints" / "2")
    shutil.rmtree(gone)
    assert fit(config, run).finished
    names = "params", "opt_state", "progress"
    for a, b in zip(arrays(run, 2, *names), arrays(tuned, 2, *names), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"another config .*init_from: '.*gone' != ''"):
        check_workdir(yarn(base, ""), run)
    with pytest.raises(ValueError, match=r"--config\.init_from must be the directory"):
        check_workdir(config, tmp_path / "another")


def test_the_encoding_may_be_dropped(base, trained, tmp_path):
    """DroPE: the parameters of a rotary model fit one without positions."""
    config = copy.deepcopy(base)
    config.model.encoding = "none"
    config.init_from = str(trained / "rope-seed0")
    check_workdir(config, tmp_path / "none-seed0")


def test_parameters_go_where_the_new_run_has_them(base, trained, capsys):
    """The values of the source, sharded over another mesh."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2))
    _, params = abstract_model(base.model)
    wanted = with_shardings(params, param_shardings(mesh, params))
    loaded = load(yarn(base, trained), wanted, "another hash")
    assert jax.tree.map(lambda x: x.sharding, loaded) == jax.tree.map(
        lambda x: x.sharding, wanted
    )
    right = load_params(trained / "rope-seed0")[2]
    jax.tree.map(np.testing.assert_array_equal, loaded, right)
    said = capsys.readouterr().err
    assert "starting from step 3 of" in said and "trained on other bytes" in said


def test_derived_lengths_are_those_of_the_source(base, trained, tmp_path):
    config = inherit(yarn(base, trained), tmp_path / "new")
    model = config.model
    assert model.rope.original_length == model.learned.max_length == LENGTH
    assert model.random_rope.max_length == 16 * LENGTH
    assert model.fire.length == LENGTH
    assert model.temperature_length == 0
    config = yarn(base, trained)
    config.model.temperature = "logn"
    config.model.learned.max_length = 99  # chosen
    model = inherit(config, tmp_path / "new").model
    assert (model.temperature_length, model.learned.max_length) == (LENGTH, 99)
    assert inherit(base, tmp_path / "new") is base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_dim": 32},
            r": checkpoint .*checkpoints.3 .*params/blocks/.* is float32\[.*16.* there "
            r"and float32\[.*32.* here",
        ),
        (
            {"vocab_size": 300},
            r"params/embedding is float32\[256, 16\] there and .*300",
        ),
        (
            {"qk_norm": True},
            r"key_norm/scale is absent there and float32\[1, 8\] here",
        ),
        (
            {"encoding": "alibi"},
            r"hold one named alibi-seed0 or alibi-steps2-seed0; got",
        ),
    ],
)
def test_d04_parameters_that_do_not_fit_are_named(
    base, trained, tmp_path, changes, message
):
    config = yarn(base, trained)
    for name, value in changes.items():
        setattr(config.model, name, value)
    for begin in (fit, lambda c, run: sweep.run(c, run.parent)):
        with pytest.raises(ValueError, match=r"--config\.init_from.*" + message):
            begin(config, tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()


def test_the_source_has_the_name_of_the_run_in_its_sweep(base, tmp_path):
    """With several budgets it is the one of as many steps; a plain name goes first."""
    config = yarn(base, tmp_path)
    config.sweep.steps = (2, 5)
    grid = sweep.runs(parse(config))
    for name in grid:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert list(grid) == ["rope-steps2-seed0", "rope-steps5-seed0"]
    for name, one in grid.items():
        assert source(one) == tmp_path / name
    (tmp_path / "rope-seed0").mkdir()
    (tmp_path / "rope-seed0" / "config.json").touch()
    assert source(config) == tmp_path / "rope-seed0"


def test_d04_a_source_that_is_none_is_named(base, trained, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(trained / "rope-seed0", bare)
    shutil.rmtree(bare / "checkpoints")
    (tmp_path / "file").touch()
    for path, message in (
        (bare, "--config.init_from: no checkpoint found in .*bare"),
        (tmp_path / "missing", "--config.init_from must be the directory of a run"),
        (tmp_path / "file", "--config.init_from must be a directory, got the file"),
        ("gs://x/y", "--config.init_from must be a path of the file system"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(yarn(base, path), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
