"""Whole runs: resuming bit for bit, stopping, and refusing to go on from a NaN.

The bytes make 22 windows; with 4 in an update an epoch ends in the middle of
update 6, so that every run of 12 updates crosses the end of an epoch twice.
"""

import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rope_jax.experiment import training
from rope_jax.experiment.checkpoint import load_params
from rope_jax.experiment.config import Config, MeshConfig, to_dict
from rope_jax.experiment.data import pipeline, sources
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.data.tasks import TaskOptions
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.optimizer import learning_rate
from rope_jax.experiment.run_directory import complete_steps

STEPS = 12

# `read_arrays` asks for the arrays as they were saved.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory):
    """The runs below share most of their programs; compile each of them once."""
    path = str(tmp_path_factory.mktemp("compiled"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (path, 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield path
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(800))
    config = Config()
    for name, value in {
        "num_layers": 2,
        "model_dim": 32,
        "num_heads": 2,
        "head_dim": 16,
        "dropout": 0.1,
    }.items():
        setattr(config.model, name, value)
    config.data.path, config.data.length = str(path), 32
    config.mesh = MeshConfig(data=1)
    for name, value in {
        "steps": STEPS,
        "batch_size": 4,
        "warmup_steps": 5,
        "log_every": 1,
        "checkpoint_every": 100,
        "keep_checkpoints": 10,
    }.items():
        setattr(config.train, name, value)
    return config


def changed(config, **train):
    train = dataclasses.replace(config.train, **train)
    return dataclasses.replace(copy.deepcopy(config), train=train)


def without_dropout(config, **train):
    """Compiles faster, where no program can be shared anyway."""
    config = changed(config, **train)
    config.model.dropout = 0.0
    return config


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def without_speed(rows):
    return [{k: v for k, v in row.items() if k != "bytes_per_second"} for row in rows]


def read_arrays(run_dir, step):
    """Every array of a checkpoint, as a flat list."""
    from orbax.checkpoint import v1 as ocp

    names = ("params", "opt_state", "progress")
    path = run_dir / "checkpoints" / str(step)
    loaded = ocp.load_checkpointables(path, dict.fromkeys(names))
    return [np.asarray(x) for x in jax.tree.leaves(loaded)]


def assert_same_checkpoint(left, right, step=STEPS):
    left, right = read_arrays(left, step), read_arrays(right, step)
    assert len(left) == len(right) > 30
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@contextlib.contextmanager
def at_batch(monkeypatch, hook):
    """Call `hook(number, batch)` with each batch of this process, from number 1."""
    put_on_device = pipeline.to_device
    with monkeypatch.context() as patch:

        def to_device(*args, **kwargs):
            iterator = put_on_device(*args, **kwargs)
            take = type(iterator).__next__
            count = 0

            class Watched(type(iterator)):
                def __next__(self):
                    nonlocal count
                    count += 1
                    return hook(count, take(self))

            iterator.__class__ = Watched
            return iterator

        patch.setattr(pipeline, "to_device", to_device)
        yield


def stop_at(step, seen=None):
    """A hook that asks for a stop while the update `step` is being prepared."""

    def hook(number, batch):
        if seen is not None:
            seen.append(np.asarray(batch["inputs"]).tobytes())
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    return hook


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """An uninterrupted run: (its directory, its batches)."""
    run_dir, seen = tmp_path_factory.mktemp("straight"), []
    with pytest.MonkeyPatch.context() as patch, at_batch(patch, stop_at(None, seen)):
        result = training.fit(base, run_dir)
    assert result == training.FitResult(run_dir, STEPS, finished=True)
    return run_dir, seen


@pytest.mark.parametrize("stop", [3, 6])
def test_c01_c03_stopped_and_resumed_is_bit_for_bit_the_straight_run(
    stop, base, straight, tmp_path, monkeypatch
):
    """Same windows in the same order, same learning rates, same dropout."""
    seen = []
    handler = signal.getsignal(signal.SIGTERM)
    with at_batch(monkeypatch, stop_at(stop, seen)):
        first = training.fit(base, tmp_path)
    assert first == training.FitResult(tmp_path, stop, finished=False)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert complete_steps(tmp_path) == [stop]
    with at_batch(monkeypatch, stop_at(None, seen)):
        second = training.fit(base, tmp_path)
    assert second == training.FitResult(tmp_path, STEPS, finished=True)
    assert seen == straight[1]
    assert len(set(seen)) == STEPS
    assert_same_checkpoint(tmp_path, straight[0])
    assert without_speed(rows_of(tmp_path)) == without_speed(rows_of(straight[0]))


def test_c02_the_next_row_is_that_of_the_next_step(
    base, straight, tmp_path, monkeypatch
):
    with at_batch(monkeypatch, stop_at(3)):
        training.fit(base, tmp_path)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    with at_batch(monkeypatch, stop_at(1)):
        assert training.fit(base, tmp_path).step == 4
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    assert complete_steps(tmp_path) == [3, 4]
    counts = [x for x in read_arrays(tmp_path, 4) if x.dtype == np.int32]
    assert sorted(int(x) for x in counts) == [0, 4, 4, 4]  # 0: no bad step


def test_rows_have_the_schedule_and_finite_numbers(base, straight):
    rows = rows_of(straight[0])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    schedule = learning_rate(base.train)
    for row in rows:
        right = float(schedule(row["step"]))
        assert row["learning_rate"] == pytest.approx(right, rel=1e-6)
        assert row["bpc"] == pytest.approx(row["loss"] / np.log(2))
        assert row["bytes_per_second"] > 0 and row["grad_norm"] > 0
    assert rows[0]["bpc"] == pytest.approx(8.0, abs=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_row_sums_up_the_steps_since_the_last_across_a_stop(
    base, straight, tmp_path, monkeypatch
):
    config = changed(base, log_every=4)
    with at_batch(monkeypatch, stop_at(6)):
        training.fit(config, tmp_path)
    training.fit(config, tmp_path)
    every = [row["loss"] for row in rows_of(straight[0])]
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [4, 8, 12]
    for row in rows:
        right = np.mean(every[row["step"] - 4 : row["step"]])
        assert row["loss"] == pytest.approx(right, rel=1e-6)


@contextlib.contextmanager
def compile_events():
    """A list that (event, function) is appended to as jax traces or compiles."""
    events = []

    def listen(event, seconds, fun_name=None, **kwargs):
        if event.startswith("/jax/core/compile/"):
            events.append((event.rpartition("/")[2], fun_name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_finished_run_returns_at_once(base, straight, capfd):
    with compile_events() as events:
        result = training.fit(base, straight[0])
    assert result == training.FitResult(straight[0], STEPS, finished=True)
    assert "backend_compile_duration" not in {event for event, _ in events}
    assert capfd.readouterr() == ("", "")


def test_the_step_is_compiled_once_and_the_loop_compiles_nothing(
    base, tmp_path, monkeypatch
):
    """From the fourth batch on, over log rows and checkpoints."""
    at = {}

    def hook(number, batch):
        at[number] = len(events)
        return batch

    with compile_events() as events, at_batch(monkeypatch, hook):
        training.fit(changed(base, checkpoint_every=2), tmp_path)
    assert events.count(("jaxpr_trace_duration", "train_step")) == 1
    assert ("jaxpr_trace_duration", "train_step") in events[: at[1]]
    assert events[at[4] : at[STEPS]] == []


def test_rows_are_read_after_the_next_step_is_dispatched(base, tmp_path, monkeypatch):
    written = []

    def hook(number, batch):
        written.append(len(rows_of(tmp_path)))
        return batch

    with at_batch(monkeypatch, hook):
        training.fit(base, tmp_path)
    assert written == [0, *range(STEPS - 1)]


@pytest.mark.parametrize(
    ("steps", "every", "right"),
    [(25, 10, [10, 20, 25]), (5, 10, [5]), (STEPS, 6, [6, 12])],
)
def test_c05_the_last_step_is_saved_once(steps, every, right, base, tmp_path):
    config = without_dropout(base, steps=steps, checkpoint_every=every, log_every=100)
    assert training.fit(config, tmp_path) == training.FitResult(tmp_path, steps, True)
    assert complete_steps(tmp_path) == right
    assert load_params(tmp_path)[3] == steps


@pytest.mark.parametrize(
    ("bad", "log_every", "good"), [(7, 1, 6), (7, 100, 6), (1, 100, None), (12, 5, 10)]
)
def test_a_loss_that_is_not_finite_stops_the_run(
    bad, log_every, good, base, tmp_path, monkeypatch
):
    """A target that is no byte makes the loss NaN; see `token_nats`."""

    def poison(number, batch):
        if number == bad:
            targets = batch["targets"].at[0, 0].set(300)
            batch |= {"targets": jax.device_put(targets, batch["targets"].sharding)}
        return batch

    config = changed(base, log_every=log_every, checkpoint_every=2)
    last = f"the last good checkpoint is .*/checkpoints/{good}$"
    message = last if good else "there is no checkpoint before it$"
    with (
        at_batch(monkeypatch, poison),
        pytest.raises(RunError, match=f"not finite at step {bad}; {message}"),
    ):
        training.fit(config, tmp_path)
    assert complete_steps(tmp_path) == list(range(2, bad, 2))
    nulls = [row["step"] for row in rows_of(tmp_path) if row["loss"] is None]
    assert nulls == ([bad] if bad % log_every == 0 or bad == STEPS else [])


def test_an_existing_directory_of_another_config_is_refused(base, straight, tmp_path):
    run_dir = pathlib.Path(shutil.copytree(straight[0], tmp_path / "run"))
    for check in (training.fit, training.check_workdir):
        with pytest.raises(ValueError, match=r"train\.learning_rate: 0\.001 != 0\.5"):
            check(changed(base, learning_rate=0.5), run_dir)
    other = changed(base, log_every=50)
    other.eval.anchors = 3
    training.check_workdir(other, run_dir)
    assert training.fit(other, run_dir).finished
    saved = json.loads((run_dir / "config.json").read_text())
    assert (saved["train"]["log_every"], saved["eval"]["anchors"]) == (50, 3)


def test_c08_a_relative_workdir(base, straight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = without_dropout(base, steps=5)
    assert training.fit(config, "./run1").run_dir == tmp_path / "run1"
    assert training.fit(config, "~/run2").run_dir == tmp_path / "run2"
    monkeypatch.chdir("/")
    assert load_params(tmp_path / "run1")[3] == load_params("~/run2")[3] == 5


def test_a_run_moves_to_another_mesh(base, straight, tmp_path, monkeypatch):
    """Begun on two devices, ended on one; the same numbers."""
    spread = copy.deepcopy(base)
    spread.mesh = MeshConfig(data=1, fsdp=2)
    with at_batch(monkeypatch, stop_at(6)):
        training.fit(spread, tmp_path)
    assert training.fit(base, tmp_path).finished
    ours, right = rows_of(tmp_path), rows_of(straight[0])
    for row, expected in zip(ours, right, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


SCRIPT = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[3])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from rope_jax.experiment import training
from rope_jax.experiment.config import from_dict
result = training.fit(from_dict(json.loads(sys.argv[1])), sys.argv[2])
print(result.step, result.finished)
"""


@contextlib.contextmanager
def in_a_process(config, run_dir, compile_cache):
    arguments = [json.dumps(to_dict(config)), str(run_dir), compile_cache]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_c04_killed_during_a_save_then_resumed(base, straight, tmp_path, compile_cache):
    """SIGKILL as soon as a second save has begun to write."""
    config = changed(base, checkpoint_every=1)
    checkpoints = tmp_path / "checkpoints"
    unfinished = "*.orbax-checkpoint-tmp*"
    for _ in range(5):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        with in_a_process(config, tmp_path, compile_cache) as process:
            wait_for(lambda: (checkpoints / "1").exists(), process)
            wait_for(lambda: any(checkpoints.glob(unfinished)), process)
            process.kill()
            process.wait()
        if any(checkpoints.glob(unfinished)):
            break
    assert any(checkpoints.glob(unfinished)), "never killed in the middle of a save"
    done = complete_steps(tmp_path)[-1]
    assert 1 <= done < STEPS
    assert training.fit(config, tmp_path).finished
    assert complete_steps(tmp_path)[-1] == STEPS
    assert not any(checkpoints.glob(unfinished))
    assert_same_checkpoint(tmp_path, straight[0])
    assert without_speed(rows_of(tmp_path)) == without_speed(rows_of(straight[0]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_process_cleanly(
    number, base, tmp_path, compile_cache
):
    config = without_dropout(base, steps=100_000, log_every=20)
    rows = tmp_path / "metrics.jsonl"
    with in_a_process(config, tmp_path, compile_cache) as process:
        wait_for(lambda: rows.exists() and rows.read_text(), process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    step, finished = out.split()
    assert finished == "False"
    assert complete_steps(tmp_path) == [int(step)]
    assert f"{number.name}: saving, then stopping" in err
    assert f"{tmp_path.name}: " in err and "0/100000 done\n" in err
    assert "Traceback" not in err


def test_a_kernel_that_would_be_interpreted_is_refused(base):
    config = copy.deepcopy(base)
    config.model.attention_implementation = "splash"
    with pytest.raises(ValueError, match=r"attention_implementation .* got 'splash'"):
        training.check(config, sources.load(base.data))


def test_a_vocabulary_that_the_data_exceeds_is_refused(base):
    text, task = sources.load(base.data), Task("copy", TaskOptions())
    small = copy.deepcopy(base)
    for size, corpus, message in (
        (64, text, "at least 256 for bytes, got 64"),
        (255, text, "at least 256 for bytes, got 255"),
        (100, task, "at least 128 for the ASCII of a task, got 100"),
    ):
        small.model.vocab_size = size
        with pytest.raises(ValueError, match=f"--config.model.vocab_size .*{message}"):
            training.check(small, corpus)
    small.model.vocab_size = 128
    training.check(small, task)
