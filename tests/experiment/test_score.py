"""Scoring a text through the cache, and files compressed with a run."""

import shutil

import numpy as np
import pytest

from rope_jax.experiment import run_directory
from rope_jax.experiment.checkpoint import load_params
from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.measurement import measure
from rope_jax.experiment.protocols import plan
from rope_jax.experiment.score import compress, decompress, score
from rope_jax.experiment.scoring import ModelApply

TEXT = (b"the quick brown fox \xff jumps over the lazy dog. " * 4)[:150]


@pytest.fixture(scope="module")
def runs(write_run, tmp_path_factory):
    """A folder with rope and fox of seed 0 and rope of seed 1, at step 7."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "rope-seed0")
    write_run(folder / "rope-seed1", seed=1)
    write_run(folder / "fox-seed0", "fox")
    write_run(folder / "learned-seed0", "learned")
    return folder


def scored(run, content, context, stride):
    return score(content, run, context=context, stride=stride)


def without_cache(run, content, context, stride):
    _, graphdef, params, _ = load_params(run)
    options = EvalConfig((context,), protocol="sliding", stride=stride)
    data = np.frombuffer(content, np.uint8)
    cells = plan(len(data), options, context)
    apply = ModelApply(graphdef)
    (row,) = measure(apply, params, cells, data, options, train_length=context)
    return row


@pytest.mark.parametrize("encoding", ["rope", "fox"])
def test_the_cache_changes_nothing(runs, encoding):
    run = runs / f"{encoding}-seed0"
    row, expected = score(TEXT, run), without_cache(run, TEXT, 16, 4)
    assert 1 < row["bpc"] < 40
    for name in ("bpc", "bpc_low", "bpc_high"):
        assert row[name] == pytest.approx(expected[name], abs=1e-5)
    names = ("window", "stride", "scored_bytes")
    assert [row[name] for name in names] == [16, 4, len(TEXT) - 1]


def test_a_text_of_two_bytes_is_one_prediction(runs):
    run = runs / "rope-seed0"
    row, expected = scored(run, b"ab", 1, 1), without_cache(run, b"ab", 1, 1)
    assert row["bpc"] == pytest.approx(expected["bpc"], abs=1e-5)
    assert (row["scored_bytes"], row["window"], row["stride"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rope-seed0", {"context": 0}, "--context must be at least 1, got 0"),
        ("learned-seed0", {"context": 17}, "--context .* at most 16, .* got 17"),
        ("rope-seed0", {"stride": 0}, "--stride must be .* got 0"),
        ("rope-seed0", {"stride": 17}, "--stride .* context of 16, got 17"),
        ("rope-seed0", {"step": 8}, "no checkpoint 8"),
        (".", {}, "--workdir must hold one run, got 4:\n.*fox-seed0\n.*learned"),
    ],
)
def test_wrong_arguments_are_named(runs, name, options, words):
    with pytest.raises(ValueError, match=words):
        score(TEXT, runs / name, **options)


@pytest.mark.parametrize("content", [b"", b"a"])
def test_a_text_too_short_to_score(runs, content):
    with pytest.raises(ValueError, match="--file must have at least 2 bytes"):
        score(content, runs / "rope-seed0")


def test_an_encoding_without_a_cache_is_refused_with_the_reason(write_run, tmp_path):
    write_run(tmp_path, "random_rope")
    with pytest.raises(ValueError, match=r"--context=16: .*\(encoding 'random_rope'"):
        score(TEXT, tmp_path)


def test_only_the_model_that_compressed_a_file_restores_it(runs, write_run, tmp_path):
    file = compress(TEXT, runs / "rope-seed0").file
    assert decompress(file, runs / "rope-seed0") == TEXT
    for name in ("rope-seed1", "fox-seed0"):
        with pytest.raises(ValueError, match="not the model that compressed F"):
            decompress(file, runs / name, name="F")
    # A run that went on still has the checkpoint that is needed, and it is found.
    further = write_run(tmp_path / "further", seed=2, step=9)
    needed = runs / "rope-seed0" / "checkpoints" / "7"
    shutil.copytree(needed, further / "checkpoints" / "7")
    assert run_directory.complete_steps(further) == [7, 9]
    assert decompress(file, further) == TEXT
    with pytest.raises(ValueError, match="at step 9 is not the model"):
        decompress(file, further, step=9)


def test_streams_must_be_positive(runs):
    with pytest.raises(ValueError, match="--streams must be at least 1, got 0"):
        compress(TEXT, runs / "rope-seed0", streams=0)
