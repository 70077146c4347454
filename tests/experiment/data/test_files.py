"""Local files: raw, .zip and .gz give the same bytes; bad ones name the flag."""

import gzip
import os
import zipfile

import numpy as np
import pytest

from rope_jax.experiment.data import files

# Blank lines, spaces at both ends, a carriage return, a NUL, bytes that are no UTF-8.
TEXT = b"\n\n  <page>\r\n\n  caf\xc3\xa9  \n\x00\xff\xfe trailing   \n\n"


def write_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def message(path):
    """The error's text, which names the flag and the path in every case."""
    with pytest.raises(ValueError) as info:
        files.read_bytes(str(path))
    text = str(info.value)
    assert "--config.data.path" in text and os.path.basename(path) in text
    return text


@pytest.fixture
def routes(tmp_path):
    (tmp_path / "fixture").write_bytes(TEXT)
    (tmp_path / "fixture.GZ").write_bytes(gzip.compress(TEXT))
    write_zip(tmp_path / "fixture.zip", {"anything.txt": TEXT})
    return tmp_path


@pytest.mark.parametrize("name", ["fixture", "fixture.GZ", "fixture.zip"])
def test_d02_every_local_route_keeps_every_byte(routes, name):
    content = files.read_bytes(str(routes / name))
    assert content.dtype == np.uint8 and content.shape == (len(TEXT),)
    assert content.tobytes() == TEXT


def test_home_directory_is_expanded(routes, monkeypatch):
    monkeypatch.setenv("HOME", str(routes))
    assert files.read_bytes("~/fixture").tobytes() == TEXT


def test_zip_of_several_files_needs_one_named_like_the_archive(tmp_path):
    members = {"readme.txt": b"x", "folder/enwik8": TEXT, "__MACOSX/._enwik8": b"y"}
    path = write_zip(tmp_path / "enwik8.zip", members)
    assert files.read_bytes(str(path)).tobytes() == TEXT
    text = message(path.rename(tmp_path / "other.zip"))
    assert "'other'" in text and "readme.txt" in text and "folder/enwik8" in text


def test_zip_of_nothing_or_of_an_empty_file_raises(tmp_path):
    assert "[]" in message(write_zip(tmp_path / "none.zip", {"folder/": b""}))
    assert "empty" in message(write_zip(tmp_path / "hollow.zip", {"a": b""}))


@pytest.mark.parametrize("name", ["page.zip", "page.gz"])
def test_d03_html_page_in_place_of_an_archive_is_named_as_such(tmp_path, name):
    (tmp_path / name).write_bytes(b"\n<!DOCTYPE html>\n<html><body>Log in")
    assert "an HTML page" in message(tmp_path / name)


def test_zip_that_was_cut_or_changed_raises(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    path = write_zip(tmp_path / "a.zip", {"a": noise})
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    assert "not a complete zip archive" in message(path)
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    assert "damaged" in message(path)


def test_encrypted_zip_raises(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"a": TEXT})
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag bit of the local header, and that of the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    assert "encrypted" in message(path)


def test_gzip_that_was_cut_or_changed_raises(tmp_path):
    path = tmp_path / "a.gz"
    whole = gzip.compress(np.random.default_rng(0).bytes(5000))
    path.write_bytes(whole[:3000])
    assert "damaged" in message(path)
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    text = message(path)
    assert "damaged" in text or "not a complete gzip" in text


def test_missing_directory_empty_and_misnamed_files_raise(routes):
    assert "there is no file" in message(routes / "missing")
    assert "is a directory" in message(routes)
    (routes / "nothing").touch()
    assert "is empty" in message(routes / "nothing")
    (routes / "fixture.zip").rename(routes / "enwik8")
    assert "rename it" in message(routes / "enwik8")
    (routes / "fixture.GZ").rename(routes / "enwik8.bin")
    assert ".gz archive" in message(routes / "enwik8.bin")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_raises(routes):
    (routes / "fixture").chmod(0)
    assert "cannot be read" in message(routes / "fixture")
