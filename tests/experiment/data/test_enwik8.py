"""The enwik8 builder from end to end, on a small archive from a local server."""

import functools
import hashlib
import http.server
import os
import threading
import zipfile

import numpy as np
import pytest
import tensorflow_datasets as tfds

from rope_jax.experiment.data import enwik8

# 1,000 bytes of all values, with the line ends and spaces that other routes strip.
TEXT = b"\n\n  <page>  \n\n" + np.random.default_rng(0).bytes(974) + b"  end \n  \n\n\n"
SIZES = (900, 50, 50)


class Site:
    """A web server with one folder, and the addresses that were asked for."""

    def __init__(self, folder):
        self.folder = folder
        self.requests = []
        site = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args):
                site.requests.append(self.path)

        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
        )
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/tiny.zip"

    def put(self, content):
        (self.folder / "tiny.zip").write_bytes(content)

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def archive_of(path, text=TEXT):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny", text)
    return path.read_bytes()


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "www").mkdir()
    site = Site(tmp_path / "www")
    yield site
    site.close()


@pytest.fixture
def config(site, tmp_path):
    content = archive_of(tmp_path / "made.zip")
    site.put(content)
    return enwik8.Enwik8Config(
        name="tiny",
        url=site.url,
        archive_size=len(content),
        archive_sha256=hashlib.sha256(content).hexdigest(),
        split_sizes=SIZES,
        record_bytes=128,
    )


@pytest.fixture
def data_dir(tmp_path):
    return str(tmp_path / "tfds")


def refuse(*args, **kwargs):
    raise OSError("no network here")


def message(data_dir, config):
    """The error's text, which names both flags in every case."""
    with pytest.raises(ValueError) as info:
        enwik8.load(data_dir, config)
    text = str(info.value)
    assert "--config.data.path" in text and "--config.data.data_dir" in text
    return text


def test_d03_the_real_archive_is_known():
    real = enwik8.Enwik8.builder_configs["bytes"]
    assert real.url == "http://mattmahoney.net/dc/enwik8.zip"
    assert real.archive_size == 36_445_475
    assert real.archive_sha256 == (
        "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
    )
    assert real.split_sizes == (90_000_000, 5_000_000, 5_000_000)  # D01
    assert len(TEXT) == sum(SIZES)


def test_d02_builder_gives_every_byte_in_order(data_dir, config):
    splits = enwik8.load(data_dir, config)
    assert [split.dtype for split in splits] == [np.uint8] * 3
    assert tuple(split.size for split in splits) == SIZES
    assert b"".join(split.tobytes() for split in splits) == TEXT


def test_d03_prepared_data_needs_no_network(data_dir, config, site, monkeypatch):
    first = enwik8.load(data_dir, config)
    asked = len(site.requests)
    assert asked >= 1
    monkeypatch.setattr("socket.socket.connect", refuse)
    again = enwik8.load(data_dir, config)
    assert len(site.requests) == asked
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)


def test_d03_no_network_and_nothing_prepared(data_dir, config, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", refuse)
    text = message(data_dir, config)
    assert "nothing is prepared" in text and "cannot be reached" in text
    assert not os.path.exists(data_dir) or not os.listdir(data_dir)


def test_d03_html_page_in_place_of_the_archive(data_dir, config, site, tmp_path):
    site.put(b"<!DOCTYPE html><html><body>This page has moved</body></html>")
    text = message(data_dir, config)
    assert "an HTML page" in text and config.archive_sha256 in text
    # The page is not kept: once the archive is back, it is fetched and used.
    site.put((tmp_path / "made.zip").read_bytes())
    splits = enwik8.load(data_dir, config)
    assert b"".join(split.tobytes() for split in splits) == TEXT


def test_d03_another_archive_of_the_same_size_is_refused(data_dir, config, site):
    other = bytearray((site.folder / "tiny.zip").read_bytes())
    other[500] ^= 1
    site.put(other)
    text = message(data_dir, config)
    assert hashlib.sha256(other).hexdigest() in text
    assert config.archive_sha256 in text and f"{config.archive_size:,} bytes" in text


def test_d03_missing_page_is_reported(data_dir, config, site):
    (site.folder / "tiny.zip").unlink()
    assert "404" in message(data_dir, config)


def test_archive_with_another_number_of_bytes_is_refused(
    data_dir, config, site, tmp_path
):
    content = archive_of(tmp_path / "longer.zip", TEXT + b"\n")
    site.put(content)
    config.archive_size = len(content)
    config.archive_sha256 = hashlib.sha256(content).hexdigest()
    assert "must hold 1,000 bytes, it holds 1,001" in message(data_dir, config)


@pytest.mark.parametrize("harm", ["shard_gone", "shard_cut", "byte_changed", "no_info"])
def test_damaged_preparation_is_refused(data_dir, config, tmp_path, harm):
    enwik8.load(data_dir, config)
    (shard,) = (tmp_path / "tfds").rglob("*train.array_record*")
    content = shard.read_bytes()
    if harm == "shard_gone":
        shard.unlink()
    elif harm == "shard_cut":
        shard.write_bytes(content[: len(content) // 2])
    elif harm == "byte_changed":
        middle = content.index(TEXT[300:320])  # stored as it is: noise
        shard.write_bytes(content[:middle] + b"\0" + content[middle + 1 :])
    else:
        (shard.parent / "dataset_info.json").unlink()
    assert "damaged" in message(data_dir, config)


def test_splits_of_other_sizes_are_refused(data_dir, config):
    enwik8.load(data_dir, config)
    config.split_sizes = (800, 150, 50)
    assert "train has 900 bytes, 800 are expected" in message(data_dir, config)


def test_data_dir_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").write_text("a file, not a directory")
    assert "directory" in message(str(tmp_path / "file"), config)


def test_data_dir_in_the_home_directory(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    enwik8.load("~/here", config)
    assert list((tmp_path / "here" / "enwik8" / "tiny").iterdir())


def test_tfds_finds_it_by_name(data_dir, config):
    enwik8.load(data_dir, config)
    source = tfds.data_source(
        "enwik8",
        split="validation",
        data_dir=data_dir,
        download=False,
        builder_kwargs={"config": config},
    )
    assert len(source) == 1
    assert source[0]["text"].tobytes() == TEXT[900:950]
    assert int(source[0]["offset"]) == 0
