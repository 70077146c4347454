"""train.py and eval.py as a user runs them: the whole job, and every wrong flag."""

import csv
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENCODINGS = ("none", "sinusoidal", "learned", "rope", "alibi")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes((b"the quick brown fox jumps over the lazy dog. " * 900)[:40_000])
    return path


def tiny(text, *more):
    return (
        f"--config={ROOT}/configs/small.py:rope",
        f"--config.data.path={text}",
        "--config.data.length=32",
        "--config.model.num_layers=1",
        "--config.model.model_dim=32",
        "--config.model.num_heads=2",
        "--config.model.head_dim=16",
        "--config.train.steps=6",
        "--config.train.batch_size=4",
        "--config.train.warmup_steps=2",
        "--config.train.log_every=3",
        "--config.eval.lengths=32,128",
        "--config.eval.anchors=8",
        "--config.eval.block=16",
        "--config.eval.bootstrap=50",
        *more,
    )


def test_the_whole_job(run, text, tmp_path):
    """Train the table of encodings, evaluate, and evaluate again from elsewhere."""
    grid = tiny(text, f"--config.sweep.encodings={','.join(ENCODINGS)}")
    code, output = run("train.py", *grid, "--workdir=runs/all")
    assert code == 0, output
    workdir = tmp_path / "runs" / "all"
    rows = json.loads((workdir / "extrapolation.json").read_text())
    assert {(r["encoding"], r["length"]) for r in rows} == {
        (e, n) for e in ENCODINGS for n in (32, 128)
    }
    assert {r["scored_bytes"] for r in rows if r["bpc"] is not None} == {8 * 16}
    for row in rows:
        refused = row["encoding"] == "learned" and row["length"] > 32
        assert (row["bpc"] is None) == refused == bool(row["reason"])
        if not refused:
            assert row["bpc_low"] <= row["bpc"] <= row["bpc_high"] < 9
            assert row["step"] == 6
    with (workdir / "extrapolation.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (workdir / "extrapolation.png").read_bytes()[:4] == b"\x89PNG"
    assert "--workdir=runs/all" in (workdir / "report.html").read_text()
    logged = (workdir / "rope-seed0" / "metrics.jsonl").read_text().splitlines()
    keys = {"step", "loss", "bpc", "learning_rate", "bytes_per_second"}
    assert [json.loads(line)["step"] for line in logged] == [3, 6]
    assert keys <= set(json.loads(logged[0]))
    for word in ("learned", "128", "bits per byte", "extrapolation"):
        assert word in output

    # Again: nothing is trained, the numbers are the same. From another folder too.
    before = (workdir / "extrapolation.json").read_bytes()
    code, output = run("train.py", *grid, "--workdir=runs/all")
    assert code == 0, output
    assert (workdir / "extrapolation.json").read_bytes() == before
    other = ("--lengths=32,48", "--protocol=nonoverlap", "--split=test")
    other += ("--scaling=self_extend:4,8,logn", "--scaling=window:8")
    code, output = run(
        "eval.py", f"--workdir={workdir}/alibi-seed0", *other, folder=ROOT / "tests"
    )
    assert code == 0, output
    rows = json.loads((workdir / "alibi-seed0" / "extrapolation.json").read_text())
    assert [(r["scaling"], r["length"]) for r in rows] == [
        (scaling, length)
        for scaling in ("", "self_extend:4,8", "logn", "window:8")
        for length in (32, 48)
    ]
    assert "'alibi' is none" in rows[2]["reason"] and "-: no value" in output
    rows = rows[:2]
    assert {(r["protocol"], r["split"]) for r in rows} == {("nonoverlap", "test")}
    assert {r["scored_bytes"] for r in rows} == {2000 - 1}

    # Another config in the same place is refused before any work.
    code, output = run(
        "train.py", *grid, "--config.model.qk_norm=True", "--workdir=runs/all"
    )
    assert code == 2, output
    assert "qk_norm" in output
    # So are lengths that the data does not hold.
    code, output = run("eval.py", f"--workdir={workdir}", "--lengths=32,4096")
    assert code == 2, output
    assert "lengths" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learing_rate=1"], ["learing_rate", "--config.train.learning_rate"]),
        (["--confg=x.py"], ["confg"]),
        (["--config=none.py:rope"], ["--config=none.py:rope: there is no such file"]),
        (
            ["--config.train.learing_rate=1"],
            ["config.train.learing_rate", "did you mean 'learning_rate'"],
        ),
        (["--config.train.steps=10.5"], ["config.train.steps"]),
        (["--config.train.steps=many"], ["config.train.steps"]),
        (["--config.train=1"], ["--config.train is a group", "steps"]),
        (["--config.model.qk_norm=perhaps"], ["config.model.qk_norm"]),
        (["--config.model.encoding=ropee"], ["encoding", "ropee", "sinusoidal"]),
        (["--config.sweep.encodings=rope,alibbi"], ["alibbi", "sinusoidal"]),
        (["--config.eval.lengths=512,abc"], ["eval.lengths", "abc"]),
        (["--config.eval.protocol=anchor"], ["protocol", "anchor", "nonoverlap"]),
        (["--config.eval.split=train"], ["split", "train", "validation"]),
        (["--config.eval.lengths=128,4000000"], ["lengths"]),
        (["--config.eval.block=256"], ["block", "128"]),
        (
            ["--config.eval.scaling=self_extend:4,64,yarm:4"],
            ["--scaling", "'yarm:4'", "self_extend:GROUP,WINDOW"],
        ),
        (["--config.model.head_dim=31"], ["head_dim", "31"]),
        (
            ["--config.model.rope.scaling=yarn", "--config.model.rope.factor=0.5"],
            ["model.rope", "factor", "0.5"],
        ),
        (
            ["--config.model.encoding=alibi", "--config.model.rope.theta=5"],
            ["model.rope.theta would have no effect"],
        ),
        (
            ["--config.model.encoding=t5", "--config.model.t5.max_distance=3"],
            ["model.t5", "max_distance", "3"],
        ),
        (
            [
                "--config.sweep.encodings=rope,learned",
                "--config.model.learned.max_length=16",
            ],
            ["table of 16 positions", "model.learned.max_length"],
        ),
        (["--config.train.batch_size=100000"], ["batch_size", "100000"]),
        (["--config.mesh.data=999"], ["mesh.data=999", "devices present"]),
        (["--config.mesh.tensor=-1"], ["mesh.tensor=-1"]),
        (["--config.train.batch_size=0"], ["train.batch_size"]),
        (["--config.init_from=no/such/run"], ["--config.init_from", "no/such/run"]),
        (["--init_from=x"], ["--config.init_from"]),
        (["--config.data.path=no/such/file"], ["data.path", "no/such/file"]),
        (["--config.data.path="], None),  # the embedded corpus: see below
        (["--config=no_such_config.py"], ["no_such_config.py"]),
        (
            [f"--config={ROOT}/configs/tasks.py:copi"],
            ["'copi'", "one of copy, reverse"],
        ),
        ([f"--config={ROOT}/configs/tasks.py:copy:rop"], ["encoding", "'rop'"]),
        (["--config.data.source=copy"], ["data.length must be 0 or 41", "got 128"]),
        (
            [f"--config={ROOT}/configs/tasks.py", "--config.eval.block=8"],
            ["--block", "no effect on a task"],
        ),
        (["--config.data.task.reverse=sum"], ["task.reverse=sum would have no effect"]),
        (["runs/x"], ["unexpected argument 'runs/x'"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_d04_wrong_flags_stop_before_any_work(run, tmp_path, flags, words):
    if words is None:  # a control: this command line is right until its last flag
        flags, words = [*flags, "--config.train.accumulate=3"], ["train.accumulate"]
    code, output = run("train.py", *flags, "--workdir=runs/x")
    assert code not in (0, None), output
    assert "Traceback" not in output, output
    for word in words:
        assert word in output
    assert not list(tmp_path.rglob("runs"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["data.path", "empty"]),
        (b"too short", ["data.path", "bytes"]),
    ],
)
def test_unusable_data_files_are_named(run, tmp_path, content, words):
    path = tmp_path / "text"
    path.write_bytes(content)
    code, output = run("train.py", *tiny(path), "--workdir=runs/x")
    assert code == 2, output
    for word in words:
        assert word in output
    assert not (tmp_path / "runs").exists()


def test_an_html_page_is_no_archive(run, tmp_path):
    path = tmp_path / "enwik8.zip"
    path.write_bytes(b"<!DOCTYPE html><html><body>Not found</body></html>" * 50)
    code, output = run("train.py", *tiny(path), "--workdir=runs/x")
    assert code == 2, output
    assert "HTML" in output and "data.path" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["workdir"]),
        (["--workdir=empty"], ["no checkpoint found", "empty"]),
        (["--workdir=empty", "--lengths=512,abc"], ["--lengths", "512,abc"]),
        (["--workdir=empty", "--scalings=logn"], ["scalings"]),
        (["--workdir=missing"], ["missing"]),
        (
            ["--workdir=empty", "--lengths=512", "--multiples=2"],
            ["--lengths and --multiples", "512", "2"],
        ),
    ],
    ids=str,
)
def test_c09_eval_of_nothing_says_so(run, tmp_path, flags, words):
    (tmp_path / "empty").mkdir()
    code, output = run("eval.py", *flags)
    assert code not in (0, None), output
    assert "Traceback" not in output, output
    for word in words:
        assert word in output
