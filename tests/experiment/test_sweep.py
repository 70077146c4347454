"""A grid of runs: what is checked before its first step, and how often it loads."""

import json
import pathlib
import runpy

import numpy as np
import pytest

from rope_jax.experiment import sweep, training
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig, resolve
from rope_jax.experiment.data import sources
from rope_jax.experiment.run_directory import check_config, load_config
from rope_jax.nn.config import DecoderConfig


@pytest.fixture
def config(tmp_path):
    """Two encodings of one small model; the training split has 56 windows."""
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 2000, np.uint8))
    config = Config(mesh=MeshConfig(data=1))
    config.model = DecoderConfig(
        num_layers=1, model_dim=16, num_heads=2, head_dim=8, mlp="plain"
    )
    config.data.path, config.data.length = str(path), 32
    config.train.steps, config.train.batch_size = 2, 4
    config.train.warmup_steps, config.train.log_every = 0, 1
    config.eval = EvalConfig(lengths=(32,), anchors=2, block=8, bootstrap=50)
    config.sweep.encodings = ("none", "alibi")
    return config


def test_a_grid_loads_its_bytes_once(config, tmp_path, monkeypatch):
    load, calls = sources.load, []
    monkeypatch.setattr(sources, "load", lambda data: calls.append(data) or load(data))
    rows = sweep.run(config, tmp_path / "runs")
    assert [row["encoding"] for row in rows] == ["alibi", "none"]
    assert [row["attention"] for row in rows] == ["softmax", "softmax"]
    assert len(calls) == 1
    one = load_config(tmp_path / "runs" / "none-seed0")
    assert training.fit(one, tmp_path / "runs" / "none-seed0").finished
    assert len(calls) == 1


def test_d04_a_batch_that_the_data_does_not_fill_leaves_no_trace(config, tmp_path):
    config.train.batch_size = 57
    message = "batch_size must be at most 56, the windows of length 32 in 1800 bytes"
    with pytest.raises(ValueError, match=message):
        sweep.run(config, tmp_path / "runs")
    with pytest.raises(ValueError, match=message):
        training.fit(config, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_before_its_first_step_leaves_no_trace(
    config, tmp_path, monkeypatch
):
    """Whatever fails while the step is compiled; then the corrected config runs."""

    def fail(*args, **kwargs):
        raise NotImplementedError("no kernel for this")

    with monkeypatch.context() as patch:
        patch.setattr(training, "make_train_step", fail)
        with pytest.raises(NotImplementedError):
            training.fit(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    config.train.learning_rate = 0.5
    assert training.fit(config, tmp_path / "run").finished


def test_a_directory_where_no_step_was_taken_takes_another_config(config, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"train": {"learning_rate": 0.5}}))
    check_config(config, run)
    (run / "metrics.jsonl").touch()
    assert training.fit(config, run).finished
    assert load_config(run).train.learning_rate == 1e-3
    config.train.learning_rate = 0.5
    with pytest.raises(ValueError, match=r"train\.learning_rate: 0\.001 != 0\.5"):
        training.fit(config, run)


def test_options_of_linear_attention_need_linear_attention(config):
    chosen = ("model.linear.num_features",)
    with pytest.raises(ValueError, match=r"neither model\.attention 'softmax' nor any"):
        sweep.select(config, chosen)
    config.model.attention = "linear"
    assert sweep.select(config, chosen) == config


def test_the_performer_configs_resolve():
    path = pathlib.Path(__file__).parents[2] / "configs" / "performer.py"
    get_config = runpy.run_path(str(path))["get_config"]
    paper = resolve(get_config("paper"))
    assert paper.sweep.encodings == ("none", "rope")
    model, train = paper.model, paper.train
    sizes = (model.num_layers, model.model_dim, model.num_heads, model.head_dim)
    assert (*sizes, paper.data.length) == (12, 768, 12, 64, 1024)
    assert (train.batch_size, train.learning_rate) == (128, 1e-4)
    cpu = resolve(get_config("cpu:none,rope,sinusoidal"))
    assert list(sweep.runs(cpu))[2:4] == ["none-seed2", "rope-seed0"]
    assert cpu.model.attention == "linear"
    with pytest.raises(ValueError, match="one of paper, cpu; got 'gpu'"):
        get_config("gpu")
