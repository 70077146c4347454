"""Rows as files, sums as numbers, progress as lines or a bar."""

import io
import json
import math
import struct

import jax
import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event

from rope_jax.experiment.metrics import (
    Metrics,
    add_step,
    empty_window,
    format_time,
    restart_window,
    summarize,
)


def row(step, **changes):
    values = {"loss": 2.0, "bpc": 2.885, "learning_rate": 1e-3, "bytes_per_second": 1e4}
    return {"step": step} | values | changes


def read_rows(run_dir):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def read_events(run_dir):
    """(step, name, value) of the scalars in a run's event files, in order."""
    scalars = []
    for path in sorted(run_dir.glob("events.*")):
        content = path.read_bytes()
        while content:
            size = struct.unpack("<Q", content[:8])[0]
            event = Event.FromString(content[12 : 12 + size])
            content = content[size + 16 :]
            scalars += [
                (event.step, v.tag, v.simple_value) for v in event.summary.value
            ]
    return scalars


def sums(nats, targets=10.0, norm=1.0):
    values = {"nats": nats, "targets": targets, "grad_norm": norm, "param_norm": 1.0}
    return {k: jnp.float32(v) for k, v in values.items()}


def test_a_window_adds_up_steps_and_weighs_targets():
    """T03's numbers: 100 targets at mean 1.0 and 7 at mean 3.0."""
    add = jax.jit(add_step)
    window = add(empty_window(), sums(100.0, 100.0, norm=2.0), 1)
    window = add(window, sums(21.0, 7.0, norm=4.0), 2)
    summary = summarize(jax.device_get(window))
    assert summary["loss"] == pytest.approx(1.1308411215)
    assert summary["bpc"] == pytest.approx(1.6314588780)
    assert summary["grad_norm"] == pytest.approx(3.0)
    assert int(window["bad_step"]) == 0


@pytest.mark.parametrize("name", ["nats", "grad_norm", "param_norm"])
def test_the_first_bad_step_is_remembered(name):
    add = jax.jit(add_step)
    window = add(empty_window(), sums(1.0), 4)
    for step, value in ((5, jnp.inf), (6, 1.0), (7, jnp.nan)):
        window = add(window, sums(1.0) | {name: jnp.float32(value)}, step)
    window = restart_window(window)
    assert int(window["bad_step"]) == 5
    assert float(window["targets"]) == 0.0


def test_nothing_summed_is_nan_not_an_error():
    summary = summarize(jax.device_get(empty_window()))
    assert all(math.isnan(v) for v in summary.values())


def test_rows_go_to_json_lines_and_event_files(tmp_path):
    with Metrics(tmp_path, start=0, steps=20) as metrics:
        metrics.write(row(10, loss=3.0))
        metrics.write(row(20, loss=2.5))
    assert read_rows(tmp_path) == [row(10, loss=3.0), row(20, loss=2.5)]
    events = read_events(tmp_path)
    assert [(s, v) for s, name, v in events if name == "loss"] == [(10, 3.0), (20, 2.5)]
    assert {name for _, name, _ in events} == set(row(0)) - {"step"}


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with Metrics(tmp_path, start=0, steps=20) as metrics:
        metrics.write(row(10))
        assert read_rows(tmp_path) == [row(10)]


def test_what_is_not_finite_becomes_null(tmp_path):
    with Metrics(tmp_path, start=0, steps=20) as metrics:
        metrics.write(row(10, loss=math.nan, bpc=math.inf))
    assert read_rows(tmp_path) == [row(10, loss=None, bpc=None)]
    assert "loss" not in {name for _, name, _ in read_events(tmp_path)}


def test_rows_after_the_restored_step_are_dropped(tmp_path):
    with Metrics(tmp_path, start=0, steps=40) as metrics:
        for step in (10, 20, 30):
            metrics.write(row(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "los')  # killed in the middle of a row
    with Metrics(tmp_path, start=20, steps=40) as metrics:
        metrics.write(row(30, loss=1.0))
    assert read_rows(tmp_path) == [row(10), row(20), row(30, loss=1.0)]


def test_a_row_that_lost_its_end_of_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(10)) + "\n" + json.dumps(row(20)))
    with Metrics(tmp_path, start=20, steps=40) as metrics:
        metrics.write(row(30))
    assert read_rows(tmp_path) == [row(10), row(30)]


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    with Metrics(tmp_path, start=0, steps=20) as metrics:
        metrics.advance(10)
        metrics.write(row(10, loss=2.5, bpc=3.6067, bytes_per_second=12345.6))
    captured = capsys.readouterr()
    assert captured.out == ""
    right = "step 10/20  loss 2.5000  bpc 3.6067  12,346 bytes/s  ETA 0:00:00\n"
    assert captured.err == right


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Metrics(tmp_path, start=5, steps=20) as metrics:
        metrics.advance(10)
        metrics.write(row(10, bytes_per_second=12345.6))
    shown = terminal.getvalue()
    assert "10/20" in shown and "bpc 2.8850  12,346 bytes/s" in shown
    assert "ETA" not in shown and "\n" not in shown.rstrip("\n")


def test_other_processes_write_nothing(tmp_path, capsys):
    with Metrics(tmp_path, start=0, steps=20, primary=False) as metrics:
        metrics.advance(10)
        metrics.write(row(10))
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_files_are_closed_when_the_run_fails(tmp_path):
    with (
        pytest.raises(RuntimeError, match="stop"),
        Metrics(tmp_path, start=0, steps=20) as metrics,
    ):
        metrics.write(row(10))
        raise RuntimeError("stop")
    assert read_rows(tmp_path) == [row(10)]
    with pytest.raises(ValueError, match="closed"):
        metrics.write(row(20))


@pytest.mark.parametrize(
    ("seconds", "right"), [(0, "0:00:00"), (59.6, "0:01:00"), (90061, "25:01:01")]
)
def test_times(seconds, right):
    assert format_time(seconds) == right
