"""The embedded corpus: deterministic, mixed, and only the standard library."""

import pathlib
import random

import pytest

from rope_jax.experiment.data import embedded


@pytest.fixture
def library(tmp_path):
    for name in ["os.py", "json/decoder.py", "json/encoder.py", "email/mime/text.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    for name in ["site-packages/os.py", "test/os.py", "json/tests/a.py", "mine.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("not of the standard library\n")
    (tmp_path / "json/notes.txt").write_text("no source\n")
    return tmp_path


def test_order_is_that_of_the_digests_of_the_names(library):
    # They begin with 14, 3b, 91 and d9.
    names = [str(f.relative_to(library)) for f in embedded.source_files(library)]
    expected = ["json/encoder.py", "json/decoder.py", "email/mime/text.py", "os.py"]
    assert names == expected


def test_order_does_not_depend_on_the_file_system(library, monkeypatch):
    expected = embedded.source_files(library)
    listed = pathlib.Path.iterdir
    for seed in range(5):

        def shuffled(path, seed=seed):
            entries = list(listed(path))
            random.Random(seed).shuffle(entries)
            return iter(entries)

        monkeypatch.setattr(pathlib.Path, "iterdir", shuffled)
        assert embedded.source_files(library) == expected


def test_standard_library_is_read_whole_files_up_to_the_cap():
    content = embedded.read_standard_library(100_000)
    assert content.size == 100_000
    longer = embedded.read_standard_library()
    assert 1_000_000 < longer.size <= embedded.MAX_BYTES
    assert longer[:100_000].tobytes() == content.tobytes()


def test_python_without_sources_names_the_flag(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"--config\.data\.path"):
        embedded.read_standard_library()
