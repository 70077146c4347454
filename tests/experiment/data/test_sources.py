"""Corpora: the 90/5/5 split, the choice of a source, and what is refused."""

import gzip
import hashlib
import os
import pathlib
import platform
import subprocess
import sys

import numpy as np
import pytest

from rope_jax.experiment.config import DataConfig
from rope_jax.experiment.data import sources

ENWIK6 = "369b688978f649681136198fb96db14c1616756260c55fb4b65e9bc049552cad"


def parts(corpus):
    return [corpus.train, corpus.validation, corpus.test]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("é", [195, 169]),
        ("ą", [196, 133]),
        ("中", [228, 184, 173]),
        ("😀", [240, 159, 152, 128]),
    ],
)
def test_d01_one_byte_is_one_token(tmp_path, text, tokens):
    path = tmp_path / "text"
    path.write_bytes(text.encode() * 100)
    corpus = sources.load(DataConfig(path=str(path), length=1))
    assert corpus.train[: len(tokens)].tolist() == tokens
    assert sum(part.size for part in parts(corpus)) == 100 * len(tokens)


def test_d01_standard_split_of_100_million_bytes(tmp_path):
    path = tmp_path / "enwik8"
    path.touch()
    os.truncate(path, 100_000_000)  # sparse: no disk space is used
    marks = {0: 1, 89_999_999: 2, 90_000_000: 3, 94_999_999: 4, 95_000_000: 5}
    with path.open("r+b") as stream:
        for offset, value in (marks | {99_999_999: 6}).items():
            stream.seek(offset)
            stream.write(bytes([value]))
    corpus = sources.load(DataConfig(path=str(path), length=1024))
    assert [part.size for part in parts(corpus)] == [90_000_000, 5_000_000, 5_000_000]
    ends = [(int(part[0]), int(part[-1])) for part in parts(corpus)]
    assert ends == [(1, 2), (3, 4), (5, 6)]
    assert corpus.name == "enwik8 (100,000,000 bytes)"


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1_000_000, (900_000, 50_000, 50_000)), (39, (35, 2, 2)), (101, (90, 5, 6))],
)
def test_d01_split_of_other_sizes_rounds_borders_down(size, expected):
    content = np.arange(size).astype(np.uint8)
    corpus = sources.split_bytes(content, "x")
    assert tuple(part.size for part in parts(corpus)) == expected
    np.testing.assert_array_equal(np.concatenate(parts(corpus)), content)


def test_d01_all_256_byte_values_pass(tmp_path):
    path = tmp_path / "all"
    path.write_bytes(bytes(range(256)) * 20)
    corpus = sources.load(DataConfig(path=str(path), length=8))
    assert sorted(set(corpus.train.tolist())) == list(range(256))


def test_d02_enwik6_is_complete(enwik6):
    corpus = sources.load(DataConfig(path=str(enwik6), length=128))
    assert [part.size for part in parts(corpus)] == [900_000, 50_000, 50_000]
    assert corpus.sha256 == ENWIK6
    assert corpus.train[:10].tobytes() == b"<mediawiki"
    newlines = sum(int((part == 10).sum()) for part in parts(corpus))
    assert newlines == enwik6.read_bytes().count(b"\n") > 10_000


def test_d03_local_file_needs_no_connection(enwik6, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    packed = tmp_path / "enwik6.gz"
    packed.write_bytes(gzip.compress(enwik6.read_bytes(), 1))
    for source in ("embedded", "enwik8"):  # the path is used instead of either
        corpus = sources.load(DataConfig(source=source, path=str(packed)))
        assert corpus.sha256 == ENWIK6


def test_d03_enwik8_without_network_names_the_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ValueError, match="cannot be reached") as info:
        sources.load(DataConfig(source="enwik8", data_dir=str(tmp_path)))
    assert "--config.data.path" in str(info.value)
    assert "--config.data.data_dir" in str(info.value)
    assert not list(tmp_path.rglob("*array_record*"))


def test_d05_bytes_that_are_no_text_pass(tmp_path):
    path = tmp_path / "broken"
    path.write_bytes(b"a\xf0\x9f\x98\x80b\xff" * 40)
    corpus = sources.load(DataConfig(path=str(path), length=3))
    assert corpus.train[:7].tolist() == [97, 240, 159, 152, 128, 98, 255]


def test_embedded_corpus_is_the_default():
    corpus = sources.load(DataConfig())
    assert platform.python_version() in corpus.name and "bytes" in corpus.name
    assert f"{sum(p.size for p in parts(corpus)):,}" in corpus.name
    whole = b"".join(part.tobytes() for part in parts(corpus))
    assert corpus.sha256 == hashlib.sha256(whole).hexdigest()
    assert b"def __init__(self" in whole


def test_tfds_is_not_imported_by_the_local_routes():
    # The quickstart would wait seconds for it.
    code = (
        "import sys; from rope_jax.experiment.data import sources; "
        "from rope_jax.experiment.config import DataConfig; "
        "sources.load(DataConfig()); assert 'tensorflow_datasets' not in sys.modules"
    )
    root = pathlib.Path(sources.__file__).parents[3]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True)


def test_too_short_a_file_names_the_sizes(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(2560))
    with pytest.raises(ValueError, match=r"--config\.data\.path=.*short") as info:
        sources.load(DataConfig(path=str(path), length=128))
    assert "[2304, 128, 128]" in str(info.value) and "2,580" in str(info.value)
    path.write_bytes(bytes(20 * 129))
    corpus = sources.load(DataConfig(path=str(path), length=128))
    assert [part.size for part in parts(corpus)] == [18 * 129, 129, 129]


@pytest.mark.parametrize(
    ("change", "flag", "valid"),
    [
        ({"source": "text8"}, "--config.data.source", "embedded, enwik8"),
        ({"length": 10_000_000}, "--config.data.length", "shorter length"),
        ({"path": "/no/such/file"}, "--config.data.path", "raw bytes"),
    ],
)
def test_wrong_values_name_the_flag_and_what_is_valid(change, flag, valid):
    with pytest.raises(ValueError) as info:
        sources.load(DataConfig(**change))
    assert flag in str(info.value) and valid in str(info.value)
