"""A corpus: three runs of bytes to train on, to watch, and to report.

The split is by bytes: the first 90 % train, the next 5 % validation, the last 5 %
test, each border rounded down to a whole byte. For the 100,000,000 bytes of enwik8 this
is the standard 90M/5M/5M split that published numbers use. One byte is one token of a
vocabulary of 256; nothing is stripped, decoded or added on any route.
"""

import functools
import hashlib
import pathlib
import platform
from dataclasses import dataclass

import numpy as np

from rope_jax.experiment.config import DataConfig
from rope_jax.experiment.data import embedded, files
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.data.tasks import TASKS

SOURCES = ("embedded", "enwik8", *TASKS)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Three consecutive runs of one byte string, uint8 [number of bytes] each.

    Attributes:
      train: bytes to train on.
      validation: bytes to choose by.
      test: bytes to report on.
      name: what the bytes are and how many, for reports.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    name: str

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of train, validation and test together: the whole file's."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            digest.update(np.ascontiguousarray(part))
        return digest.hexdigest()


def split_borders(size: int) -> tuple[int, int]:
    """Where validation and test begin in `size` bytes: 90 % and 95 %, rounded down.

    >>> split_borders(100_000_000)
    (90000000, 95000000)
    >>> split_borders(39)  # 35, 2 and 2 bytes
    (35, 37)
    """
    return size * 90 // 100, size * 95 // 100


def split_bytes(content: np.ndarray, name: str) -> Corpus:
    """Cuts one byte string 90/5/5; see `split_borders`. No byte is copied or lost."""
    first, second = split_borders(content.size)
    return Corpus(content[:first], content[first:second], content[second:], name)


def load(data: DataConfig) -> Corpus | Task:
    """The task, or the corpus from memory, disk or (enwik8 only) the net, of a config.

    `data.path`, where given, is used instead of `data.source`. Nothing is ever put in
    place of missing data.

    Args:
      data: source, path, data_dir, length and task.

    Returns:
      The task, or the corpus: each of its three parts holds at least one training
      window, which is `data.length` + 1 bytes.

    Raises:
      ValueError: naming the flag, for an unknown source, a file that is missing, empty,
        damaged or too short, or enwik8 that is neither prepared nor can be fetched.
    """
    if data.path:
        content = files.read_bytes(data.path)
        label = pathlib.Path(data.path).name
        corpus = split_bytes(content, f"{label} ({content.size:,} bytes)")
    elif data.source == "embedded":
        content = embedded.read_standard_library()
        label = f"standard library of Python {platform.python_version()}"
        corpus = split_bytes(content, f"{label} ({content.size:,} bytes)")
    elif data.source == "enwik8":
        # Not at the top: TensorFlow Datasets takes seconds to import.
        from rope_jax.experiment.data import enwik8

        corpus = Corpus(*enwik8.load(data.data_dir), name="enwik8 (100,000,000 bytes)")
    elif data.source in TASKS:
        return Task(data.source, data.task)
    else:
        raise ValueError(
            f"--config.data.source must be one of {', '.join(SOURCES)}, "
            f"got {data.source!r}; for a file of your own use {files.FLAG}"
        )
    _check_length(corpus, data)
    return corpus


def _check_length(corpus: Corpus, data: DataConfig) -> None:
    window = data.length + 1
    sizes = [corpus.train.size, corpus.validation.size, corpus.test.size]
    if min(sizes) < window:
        flag = f"{files.FLAG}={data.path}" if data.path else "--config.data.length"
        raise ValueError(
            f"{flag}: {corpus.name} splits into {sizes} bytes (train, validation, "
            f"test), but each needs at least --config.data.length + 1 = {window}; use "
            f"at least {20 * window:,} bytes, or a shorter length"
        )
