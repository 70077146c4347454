"""Real processes on loopback: the same run, whoever dies and however many go on.

One run of 14 updates: two processes do 7 of them, then one is killed; four go on from
the checkpoint at 5, until one of them gets a SIGTERM; one process does the rest, and
two evaluate what came out.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from rope_jax.experiment import distributed, evaluation, training
from rope_jax.experiment.checkpoint import load_params
from rope_jax.experiment.config import MeshConfig
from rope_jax.experiment.data import pipeline
from rope_jax.experiment.run_directory import complete_steps, load_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, BATCH, LENGTH = 14, 8, 16

# A command in a process that writes down its rows of every batch and, at one of them,
# when a checkpoint is complete, sends itself a signal.
CHILD = """
import json, os, pathlib, runpy, sys, time
log, number, batch, run_dir, script, *arguments = sys.argv[1:]
from rope_jax.experiment.data import pipeline
from rope_jax.experiment.run_directory import complete_steps
put = pipeline.to_device

def to_device(*args, **options):
    iterator = put(*args, **options)
    take, count = type(iterator).__next__, iter(range(1, 1000))

    class Watched(type(iterator)):
        def __next__(self):
            rows = take(self)
            with open(log, "a") as file:
                shards = rows["inputs"].addressable_shards
                file.write(json.dumps([[s.index[0].start or 0, s.data.tolist()]
                                       for s in shards]) + "\\n")
            if next(count) == int(batch):
                while not complete_steps(pathlib.Path(run_dir)):
                    time.sleep(0.01)
                os.kill(os.getpid(), int(number))
            return rows

    iterator.__class__ = Watched
    return iterator

pipeline.to_device = to_device
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, for the runs and the processes' logs."""
    path = tmp_path_factory.mktemp("job")
    (path / "text").write_bytes(np.random.default_rng(0).bytes(4000))
    return path


def tiny(place):
    return (
        f"--config={ROOT}/configs/small.py:rope",
        f"--workdir={place}/runs",
        f"--config.data.path={place}/text",
        f"--config.data.length={LENGTH}",
        "--config.model.num_layers=1",
        "--config.model.model_dim=16",
        "--config.model.num_heads=2",
        "--config.model.head_dim=8",
        "--config.model.dropout=0.1",
        f"--config.train.steps={STEPS}",
        f"--config.train.batch_size={BATCH}",
        "--config.train.warmup_steps=2",
        "--config.train.log_every=1",
        "--config.train.checkpoint_every=5",
        "--config.mesh.fsdp=2",
        "--config.eval.lengths=16,24",
        "--config.eval.anchors=8",
        "--config.eval.block=4",
        "--config.eval.bootstrap=20",
    )


def run_processes(place, name, count, devices, script, *arguments, sent=None):
    """Exit codes, outputs and logged batches of a command in several processes.

    `sent` is (process, signal, batch): who sends itself what, at which of its batches.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
    }
    logs = [place / f"{name}-{index}.rows" for index in range(count)]
    texts = [place / f"{name}-{index}.txt" for index in range(count)]
    processes = []
    try:
        for index in range(count):
            number, batch = sent[1:] if sent and sent[0] == index else (0, 0)
            command = [sys.executable, "-c", CHILD, str(logs[index])]
            command += [str(int(number)), str(batch), str(place / "runs/rope-seed0")]
            command += [str(ROOT / script), *arguments, "--distributed"]
            command += [f"--coordinator_address=127.0.0.1:{port}"]
            command += [f"--num_processes={count}", f"--process_id={index}"]
            with texts[index].open("w") as out:
                processes.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=out, env=environment, cwd=place
                    )
                )
        end = time.monotonic() + 420
        codes = [p.wait(max(1.0, end - time.monotonic())) for p in processes]
    finally:
        for process in processes:
            process.kill()
    rows = [
        [json.loads(line) for line in log.open()] if log.exists() else []
        for log in logs
    ]
    return codes, [text.read_text() for text in texts], rows


@pytest.fixture(scope="module")
def killed(place):
    """Two processes, of which one is killed after it has taken batch 8."""
    sent = (1, signal.SIGKILL, 8)
    found = run_processes(place, "killed", 2, 1, "train.py", *tiny(place), sent=sent)
    return *found, complete_steps(place / "runs" / "rope-seed0")


@pytest.fixture(scope="module")
def stopped(place, killed):
    """Four processes that go on, of which one gets a SIGTERM at its second batch."""
    sent = (2, signal.SIGTERM, 2)
    found = run_processes(place, "stopped", 4, 1, "train.py", *tiny(place), sent=sent)
    return *found, complete_steps(place / "runs" / "rope-seed0")


@pytest.fixture(scope="module")
def ended(place, stopped):
    """One process, with one device, that ends the run; gives the run's directory."""
    run_dir = place / "runs" / "rope-seed0"
    config = load_config(run_dir)
    config.mesh = MeshConfig(data=1)
    assert training.fit(config, run_dir).finished
    return run_dir


def test_a_process_that_dies_ends_the_job_and_is_named(killed):
    codes, texts, _, steps = killed
    assert codes == [1, -signal.SIGKILL], texts[0]
    assert "error: process 0 of 2: another process is gone" in texts[0]
    assert "no answer from process 1 within 10 s" in texts[0]
    assert "goes on from the last checkpoint" in texts[0]
    assert "Traceback" not in texts[0]
    assert steps == [5]


def test_a_signal_to_one_process_stops_all_at_one_step(stopped):
    codes, texts, _, steps = stopped
    assert codes == [0] * 4, texts
    assert steps[0] == 5 and 6 < steps[-1] < STEPS
    stopped_at = f"rope-seed0 stopped at step {steps[-1]} of {STEPS}"
    assert [stopped_at in text for text in texts] == [True, False, False, False]


def test_t18_the_order_of_data_is_that_of_one_process(place, killed, stopped):
    text = np.fromfile(place / "text", np.uint8)[:3600]
    options = {"length": LENGTH, "batch_size": BATCH, "seed": 0}
    whole = iter(pipeline.train_dataset(text, **options))
    batches = [next(whole)["inputs"] for _ in range(STEPS)]
    for first, (_, _, logs, _) in ((0, killed), (5, stopped)):
        assert min(map(len, logs)) >= 4
        share = BATCH // len(logs)
        for right, *shards in zip(batches[first:], *logs, strict=False):
            # Each process has its part and no other.
            starts = [[start for start, _ in own] for own in shards]
            assert starts == [[start] for start in range(0, BATCH, share)]
            found = np.concatenate([rows for own in shards for _, rows in own])
            np.testing.assert_array_equal(found, right)


def test_c06_two_four_and_one_process_train_what_one_does(ended, tmp_path):
    config = load_config(ended)
    assert training.fit(config, tmp_path).finished
    ours, right = load_params(ended)[2], load_params(tmp_path)[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, right)
    logged = [[json.loads(line) for line in (d / "metrics.jsonl").open()]
              for d in (ended, tmp_path)]  # fmt: skip
    assert [row["step"] for row in logged[0]] == list(range(1, STEPS + 1))
    for row, other in zip(*logged, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_two_processes_evaluate_as_one_does(ended, place):
    codes, texts, _ = run_processes(
        place, "eval", 2, 2, "eval.py", f"--workdir={ended}"
    )
    assert codes == [0, 0], texts
    rows = json.loads((ended / "extrapolation.json").read_text())
    expected = evaluation.evaluate_run(ended, load_config(ended).eval)
    assert len(rows) == len(expected) == 2
    for row, other in zip(rows, expected, strict=True):
        assert row["step"] == STEPS and row["length"] == other["length"]
        assert row["bpc"] == pytest.approx(other["bpc"], abs=1e-5)
    assert "extrapolation" in texts[0] and "extrapolation" not in texts[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_processes=2"], "--num_processes=2: needs --distributed"),
        (
            ["--distributed", "--process_id=0"],
            "needs --coordinator_address and --num_processes as well",
        ),
        (["host", 2, 0], "--coordinator_address must be HOST:PORT, got 'host'"),
        (["host:1", 0, 0], "--num_processes must be at least 1, got 0"),
        (["host:1", 2, 2], "--process_id must be from 0 to 1 with --num_processes=2"),
        (["--distributed"], "the environment is that of no cluster"),
    ],
)
def test_flags_that_cannot_work_are_named(flags, words, run, tmp_path):
    if len(flags) == 3:
        names = ("coordinator_address", "num_processes", "process_id")
        flags = [f"--{n}={f}" for n, f in zip(names, flags, strict=True)]
        flags.append("--distributed")
    code, output = run("train.py", *flags)
    assert code == 2 and words in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())


def test_processes_that_differ_are_told_so(monkeypatch):
    def gathered(digest):
        return np.stack([digest, digest, digest[::-1]])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gathered)
    with pytest.raises(ValueError, match=r"--config must be the same .*; process 2 d"):
        distributed.require_same("--config", "some")


def test_a_mesh_without_a_process_is_refused(monkeypatch):
    mesh = jax.make_mesh((2,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"mesh must use .* 2 processes.* process 1:"):
        pipeline.process_slice(sharding)
