"""A grid of runs: what is checked before its first step, and how often it loads."""

import json
import pathlib
import runpy

import numpy as np
import pytest

from rope_jax.experiment import abstract_step, sweep, training
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig, resolve
from rope_jax.experiment.data import pipeline, sources
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.run_directory import check_config, failure, load_config
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


def test_a_length_that_the_mesh_does_not_divide_leaves_no_trace(config, tmp_path):
    """It is to be evaluated after the training, which does not begin."""
    config.mesh.sequence, config.eval.lengths = 8, (32, 36)
    with pytest.raises(ValueError, match=r"mesh\.sequence=8 .*eval\.lengths.* got 36"):
        sweep.run(config, tmp_path / "runs")
    config.data.length = 36
    with pytest.raises(
        ValueError, match=r"=8 must divide the 36 bytes of data\.length"
    ):
        sweep.run(config, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_before_its_first_step_leaves_no_trace(
    config, tmp_path, monkeypatch
):
    """Whatever fails while the step is compiled; then the corrected config runs."""

    def fail(*args, **kwargs):
        raise NotImplementedError("no kernel for this")

    with monkeypatch.context() as patch:
        patch.setattr(abstract_step, "make_train_step", fail)
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


def test_budgets_are_runs_of_their_own(config):
    config.sweep.seeds, config.sweep.steps = (0, 1), (2, 3)
    grid = sweep.runs(resolve(config))
    assert list(grid) == [
        *("none-steps2-seed0", "none-steps2-seed1"),
        *("none-steps3-seed0", "none-steps3-seed1"),
        *("alibi-steps2-seed0", "alibi-steps2-seed1"),
        *("alibi-steps3-seed0", "alibi-steps3-seed1"),
    ]
    one = grid["alibi-steps3-seed1"]
    assert (one.model.encoding, one.train.steps, one.train.seed) == ("alibi", 3, 1)
    assert (one.sweep.steps, one.sweep.together) == ((3,), False)
    config.sweep.steps = (7,)  # one budget: the name without it, as ever
    grid = sweep.runs(resolve(config))
    assert next(iter(grid)) == "none-seed0" and grid["none-seed0"].train.steps == 7


def test_a_config_that_knew_no_budgets_goes_on(config, tmp_path):
    """A run of an earlier version: its config.json lacks the newer fields."""
    run = tmp_path / "none-seed0"
    config.sweep.encodings = ("none",)
    (one,) = sweep.runs(resolve(config)).values()
    training.fit(one, run)
    saved = json.loads((run / "config.json").read_text())
    for name in ("steps", "together"):
        del saved["sweep"][name]
    del saved["eval"]["multiples"]
    (run / "config.json").write_text(json.dumps(saved))
    check_config(one, run)
    assert training.fit(load_config(run), run).finished


def poisoned(monkeypatch, seed, step):
    """From `step` on the batches of a seed hold a target that is no byte."""
    dataset = pipeline.train_dataset

    def train_dataset(*args, **options):
        made = dataset(*args, **options)
        if options["seed"] != seed:
            return made
        count = iter(range(1, 1000))

        def poison(batch):
            batch["targets"][0, 0] = 300 if next(count) >= step else 1
            return batch

        return made.map(poison)

    monkeypatch.setattr(pipeline, "train_dataset", train_dataset)


@pytest.mark.parametrize("together", [False, True])
def test_a_run_that_fails_is_reported_and_the_others_go_on(
    together, config, tmp_path, monkeypatch, capsys
):
    config.sweep.encodings, config.sweep.seeds = ("none",), (0, 1, 2)
    config.sweep.together = together
    with monkeypatch.context() as patch:
        poisoned(patch, seed=1, step=2)
        message = r"1 of 3 runs failed:\n  none-seed1: the loss is not finite at step 2"
        with pytest.raises(RunError, match=message):
            sweep.run(config, tmp_path)
    assert "none-seed1 failed: the loss is not finite" in capsys.readouterr().err
    assert failure(tmp_path / "none-seed1") == "the loss is not finite at step 2"
    rows = json.loads((tmp_path / "extrapolation.json").read_text())
    assert [(row["seed"], row["bpc"] is None) for row in rows] == [
        *((0, False), (2, False), (1, True)),
    ]
    assert rows[2]["reason"] == "training failed: the loss is not finite at step 2"
    assert {row["trained_bytes"] for row in rows} == {2 * 4 * 32}
    assert "training failed" in (tmp_path / "report.html").read_text()
    if together:  # and once the cause is gone, it goes on
        rows = sweep.run(config, tmp_path)
        assert [row["bpc"] is None for row in rows] == [False] * 3
        assert failure(tmp_path / "none-seed1") == ""


def test_two_ways_to_say_one_thing_are_refused(config):
    config.sweep.steps = (5, 6)
    chosen = sweep.select(config, ["train.steps"])
    assert resolve(chosen).sweep.steps == (2,)
    with pytest.raises(ValueError, match=r"train\.steps and --config\.sweep\.steps"):
        sweep.select(config, ["train.steps", "sweep.steps"])
    config.eval.multiples = (1, 2)
    assert sweep.select(config, ["eval.multiples"]).eval.lengths == ()
    assert sweep.select(config, []).eval.lengths == (32,)
    with pytest.raises(ValueError, match=r"eval\.multiples and --config\.eval\.leng"):
        sweep.select(config, ["eval.multiples", "eval.lengths"])


def test_an_option_that_the_protocol_does_not_read_is_refused(config):
    assert sweep.select(config, ["eval.anchors", "model.num_layers"]) == config
    with pytest.raises(ValueError, match=r"eval\.stride\) would have no effect on the"):
        sweep.select(config, ["eval.stride"])


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
