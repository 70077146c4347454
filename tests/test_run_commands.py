"""The commands that use a run, sample and score, as a user runs them."""

import re

import pytest

SAMPLE, SCORE = "rope_jax.experiment.sample", "rope_jax.experiment.score"
TEXT = (b"the quick brown fox \xff jumps over the lazy dog. " * 9)[:400]


@pytest.fixture(scope="module")
def runs(write_run, tmp_path_factory):
    """A folder with one/rope-seed0 and learned-seed0, of 16 bytes of context."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one" / "rope-seed0")
    write_run(folder / "learned-seed0", "learned")
    return folder


def test_the_whole_job_of_score(run, runs, tmp_path):
    """Score, compress, restore in another process: the numbers belong together."""
    (tmp_path / "F").write_bytes(TEXT)
    code, output = run(SCORE, f"--workdir={runs}/one/rope-seed0", "--file=F")
    assert code == 0, output
    bpc = float(re.search(r"([0-9.]+) bits per byte", output)[1])
    assert "399 bytes in windows of 16, 4 apart" in output
    code, output = run(
        SCORE,
        f"--workdir={runs}/one/rope-seed0",
        *("--compress=F", "--out=G", "--streams=1"),
    )
    assert code == 0, output
    predicted = re.search(r"predicted ([0-9.,]+) bits", output)[1]
    predicted = float(predicted.replace(",", ""))
    # The same windows, and the first byte at 8 bits.
    assert predicted == pytest.approx(8 + 399 * bpc, abs=0.1)
    size = (tmp_path / "G").stat().st_size
    assert f"400 bytes -> {size:,} bytes" in output
    assert predicted <= 8 * (size - 82) + 1 <= 1.005 * predicted + 64
    restore = (SCORE, f"--workdir={runs}/one/rope-seed0", "--out=back")
    code, output = run(*restore, "--decompress=G")
    assert code == 0, output
    assert (tmp_path / "back").read_bytes() == TEXT

    # Nothing is written where something is wrong.
    (tmp_path / "cut").write_bytes((tmp_path / "G").read_bytes()[:-4])
    (tmp_path / "back").unlink()
    code, output = run(*restore, "--decompress=cut")
    assert code == 2 and f"cut should have {size:,} bytes" in output, output
    wrong = (SCORE, f"--workdir={runs}/learned-seed0", "--out=back")
    code, output = run(*wrong, "--decompress=G")
    assert code == 2 and "not the model that compressed G" in output, output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["F", "G", "cut"]


def test_text_of_any_bytes_on_the_command_line(run, runs, tmp_path):
    code, output = run(SCORE, f"--workdir={runs}/one", "--text=caf\u00e9 \udcff")
    assert code == 0, output
    assert " 6 bytes in windows of 6" in output


def test_a_sample_is_text_and_a_rate(run, runs, tmp_path):
    """A directory above one run will do; the prompt may be any bytes."""
    prompt, where = "--prompt=caf\u00e9 \udcff", f"--workdir={runs}/one"
    code, output = run(SAMPLE, where, prompt, "--length=40", "--window=12")
    assert code == 0, output
    assert output.startswith("café �")
    rate = r"compiled in [0-9.]+ s; 40 bytes in [0-9.]+ s: [0-9,]+ bytes/s"
    assert re.search(rate, output)
    (tmp_path / "P").write_bytes(bytes(range(256)))
    code, output = run(SAMPLE, where, "--prompt_file=P", "--length=0")
    assert code == 0, output
    assert "\x0e\x0f\x10" in output and "�" * 64 in output


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (SAMPLE, ["--lenght=5"], ["lenght"]),
        (SAMPLE, ["--length=five"], ["length", "five"]),
        (SAMPLE, ["--length=-1"], ["--length must be", "-1"]),
        (SAMPLE, ["--temperature=-1"], ["--temperature", "-1"]),
        (SAMPLE, ["--top_k=-1"], ["--top_k", "-1"]),
        (SAMPLE, ["--top_p=0"], ["--top_p", "0"]),
        (SAMPLE, ["--min_p=2"], ["--min_p", "2"]),
        (SAMPLE, ["--window=0"], ["--window", "0"]),
        (SAMPLE, ["--window=4", "--sinks=-1"], ["--sinks", "-1"]),
        (SAMPLE, ["--sinks=4"], ["--sinks=4 has no effect without --window"]),
        (SAMPLE, ["--prompt=a", "--prompt_file=b"], ["--prompt", "--prompt_file"]),
        (SAMPLE, ["--prompt_file=none"], ["--prompt_file=none cannot be read"]),
        (SAMPLE, ["--step=3"], ["no checkpoint 3", "[7]"]),
        (SAMPLE, ["text"], ["unexpected argument 'text'"]),
        (SCORE, [], ["--text, --file, --compress, --decompress", "got none"]),
        (SCORE, ["--text=ab", "--file=F"], ["got --text and --file"]),
        (SCORE, ["--text=a"], ["at least 2 bytes, got 1"]),
        (SCORE, ["--file=none"], ["--file=none cannot be read"]),
        (SCORE, ["--text=abc", "--out=G"], ["--out=G has no effect with --text"]),
        (SCORE, ["--file=F", "--streams=2"], ["--streams=2 has no effect"]),
        (SCORE, ["--decompress=F", "--out=G", "--context=9"], ["--context=9 has no"]),
        (SCORE, ["--compress=F"], ["--compress needs --out"]),
        (SCORE, ["--compress=F", "--out=F"], ["--out must be another file"]),
        (SCORE, ["--compress=F", "--out=no/G"], ["--out must be a file in a folder"]),
        (SCORE, ["--compress=F", "--out=/dev/null"], ["--out must be a file in a f"]),
        (SCORE, ["--decompress=F", "--out=G"], ["F was not written by --compress"]),
        (SCORE, ["--text=abc", "--context=0"], ["--context must be", "got 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags_are_named_before_any_work(
    run, runs, tmp_path, command, arguments, words
):
    (tmp_path / "F").write_bytes(TEXT)
    code, output = run(command, f"--workdir={runs}/one", *arguments)
    assert code not in (0, None), output
    assert "Traceback" not in output, output
    for word in words:
        assert word in output
    assert [path.name for path in tmp_path.iterdir()] == ["F"]


@pytest.mark.parametrize("command", [SAMPLE, SCORE])
def test_several_runs_are_listed(run, runs, command):
    text = ["--text=abc"] if command == SCORE else []
    code, output = run(command, f"--workdir={runs}", *text)
    assert code == 2, output
    assert "--workdir must hold one run, got 2" in output
    assert "/learned-seed0" in output and "/one/rope-seed0" in output


@pytest.mark.parametrize("command", [SAMPLE, SCORE])
def test_a_place_without_a_run_is_named(run, tmp_path, command):
    text = ["--text=abc"] if command == SCORE else []
    code, output = run(command, "--workdir=missing", *text)
    assert code == 2 and "missing" in output, output
    code, output = run(command, *text)
    assert code not in (0, None) and "workdir" in output


def test_length_past_a_table_names_the_limit(run, runs):
    code, output = run(SAMPLE, f"--workdir={runs}/learned-seed0", "--prompt=abc")
    assert code == 2, output
    assert "--length must be at most 13 after a prompt of 3 bytes, got 500" in output
