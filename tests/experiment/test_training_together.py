"""Seeds in one compiled step: the numbers, files and resumes of runs on their own."""

import contextlib
import json
import os
import signal

import jax
import numpy as np
import pytest

from rope_jax.experiment import training
from rope_jax.experiment.checkpoint import load_params
from rope_jax.experiment.config import Config, MeshConfig
from rope_jax.experiment.data import pipeline
from rope_jax.experiment.run_directory import complete_steps, load_config

STEPS = 5
SEEDS = (0, 1, 7)


def config_of(path, seed, **mesh):
    config = Config(mesh=MeshConfig(**{"data": 1} | mesh))
    sizes = {"num_layers": 1, "model_dim": 32, "num_heads": 2, "head_dim": 16}
    for name, value in (sizes | {"dropout": 0.1, "mlp": "plain"}).items():
        setattr(config.model, name, value)
    config.data.path, config.data.length = str(path), 32
    config.train.steps, config.train.batch_size, config.train.seed = STEPS, 4, seed
    config.train.warmup_steps, config.train.log_every = 1, 2
    return config


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(1200))
    return path


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """Each seed by itself, by seed."""
    root = tmp_path_factory.mktemp("alone")
    for seed in SEEDS:
        training.fit(config_of(text, seed), root / f"seed{seed}")
    return root


def fit_together(text, root, seeds=SEEDS, **mesh):
    configs = [config_of(text, seed, **mesh) for seed in seeds]
    return training.fit_together(configs, [root / f"seed{seed}" for seed in seeds])


@contextlib.contextmanager
def traced(name):
    """A list with an entry for each time that a function is traced."""
    events = []

    def listen(event, seconds, fun_name=None, **kwargs):
        if event.endswith("jaxpr_trace_duration") and fun_name == name:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def together(text, tmp_path_factory):
    root = tmp_path_factory.mktemp("together")
    with traced("joint_step") as events:
        results = fit_together(text, root)
    assert len(events) == 1  # one compilation serves all seeds and steps
    assert [result.finished for result in results] == [True] * 3
    return root


def assert_close(left, right, rtol=1e-5):
    left, right = (load_params(run)[2] for run in (left, right))
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        difference = np.linalg.norm(np.asarray(a) - np.asarray(b))
        assert difference <= rtol * np.linalg.norm(np.asarray(b))


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_the_numbers_are_those_of_runs_alone(alone, together):
    for seed in SEEDS:
        ours, right = together / f"seed{seed}", alone / f"seed{seed}"
        assert_close(ours, right)
        assert load_config(ours) == load_config(right)
        assert complete_steps(ours) == complete_steps(right) == [STEPS]
        for row, expected in zip(rows_of(ours), rows_of(right), strict=True):
            assert row["step"] == expected["step"]
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert row["learning_rate"] == expected["learning_rate"]
    first, other = (load_params(together / f"seed{s}")[2] for s in SEEDS[:2])
    assert not np.array_equal(first["head"], other["head"])


def test_stopped_together_ended_alone_and_together(
    text, together, tmp_path, monkeypatch
):
    """One seed goes on by itself, and is ahead of the others when they meet again."""
    put = pipeline.to_device

    def stop_after(batches):
        asked = []  # once: a second signal would end the process

        def to_device(*args, **options):
            iterator, count = put(*args, **options), iter(range(1, 100))
            take = type(iterator).__next__

            class Watched(type(iterator)):
                def __next__(self):
                    if next(count) == batches and not asked:
                        asked.append(True)
                        os.kill(os.getpid(), signal.SIGTERM)
                    return take(self)

            iterator.__class__ = Watched
            return iterator

        monkeypatch.setattr(pipeline, "to_device", to_device)

    stop_after(2)
    assert [result.step for result in fit_together(text, tmp_path)] == [2, 2, 2]
    stop_after(1)
    ahead = training.fit(config_of(text, 0), tmp_path / "seed0")
    assert (ahead.step, ahead.finished) == (3, False)
    monkeypatch.setattr(pipeline, "to_device", put)
    results = fit_together(text, tmp_path)
    assert [result.finished for result in results] == [True] * 3
    for seed in SEEDS:
        assert_close(tmp_path / f"seed{seed}", together / f"seed{seed}")
        assert [row["step"] for row in rows_of(tmp_path / f"seed{seed}")] == [2, 4, 5]


def test_runs_of_other_configs_are_refused(text, tmp_path):
    one, other = config_of(text, 0), config_of(text, 1)
    other.train.learning_rate = 0.5
    with pytest.raises(ValueError, match=r"in train\.seed only, .*learning_rate"):
        training.fit_together([one, other], [tmp_path / "a", tmp_path / "b"])
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused(text, monkeypatch):
    configs = [config_of(text, seed) for seed in SEEDS]
    training.check_together(configs)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"sweep\.together .*mesh\.data.* 2 processes"):
        training.check_together(configs)
    training.check_together(configs[:1])
