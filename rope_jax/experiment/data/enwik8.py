"""enwik8 as a TensorFlow Datasets builder, without TensorFlow.

The first 100,000,000 bytes of the English Wikipedia dump of 2006-03-03, as they are:
one byte is one token, newlines and XML included. (Line-split versions of this data set
lose about 1.1 % of the bytes.) The archive is fetched once, checked, and written as
array_record files, from which later runs read without a network.
"""

import dataclasses
import hashlib
import os
import pathlib
import sys
from typing import ClassVar

import numpy as np
import requests
import tensorflow_datasets as tfds

from rope_jax.experiment.data import files

SPLITS = ("train", "validation", "test")
_HELP = (
    f"get enwik8.zip by other means and pass it by {files.FLAG}=FILE, or name another "
    "directory, where enwik8 is prepared or can be, by --config.data.data_dir=DIR"
)


@dataclasses.dataclass
class Enwik8Config(tfds.core.BuilderConfig):
    """Where an archive with one byte string lies, what it must be, how it is cut.

    Attributes:
      url: address of a zip archive with one file.
      archive_size: its size in bytes.
      archive_sha256: its SHA-256 digest, in hexadecimal.
      split_sizes: bytes of train, validation and test, which follow each other in the
        file and are all of it.
      record_bytes: bytes in each stored record, the last one of a split excepted.
    """

    url: str = "http://mattmahoney.net/dc/enwik8.zip"
    archive_size: int = 36_445_475
    archive_sha256: str = (
        "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
    )
    split_sizes: tuple[int, int, int] = (90_000_000, 5_000_000, 5_000_000)
    record_bytes: int = 1_000_000


class Enwik8(tfds.core.GeneratorBasedBuilder):
    """Builder of `enwik8/bytes`: records of consecutive bytes with their offset.

    Importing this module registers it: `tfds.data_source("enwik8", split="train")`
    then works as for any other data set.
    """

    name = "enwik8"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "Raw bytes, split 90M/5M/5M."}
    url_infos = None  # no checksums file: `_check_archive` says what to do about it
    BUILDER_CONFIGS: ClassVar = [Enwik8Config(name="bytes", description="Raw bytes.")]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "offset": np.int64,  # of the record, from the start of its split
                    "text": tfds.features.Tensor(
                        shape=(None,),
                        dtype=np.uint8,
                        encoding=tfds.features.Encoding.BYTES,
                    ),
                }
            ),
            homepage="http://mattmahoney.net/dc/textdata.html",
            citation=(
                "@misc{mahoney2011large,\n"
                "  author = {Matt Mahoney},\n"
                "  title = {Large Text Compression Benchmark},\n"
                "  year = {2011},\n"
                "  url = {http://mattmahoney.net/dc/text.html},\n"
                "}"
            ),
            disable_shuffling=True,  # the records are one text, in its order
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        config = self.builder_config
        archive = pathlib.Path(dl_manager.download(config.url))
        _check_archive(archive, config)
        with archive.open("rb") as stream:
            content = files.read_zip(archive, stream.read(512))
        if content.size != sum(config.split_sizes):
            raise ValueError(
                f"the archive at {config.url} must hold {sum(config.split_sizes):,} "
                f"bytes, it holds {content.size:,}"
            )
        borders = np.cumsum(config.split_sizes)[:-1]
        parts = np.split(content, borders)
        return {
            split: self._generate_examples(part)
            for split, part in zip(SPLITS, parts, strict=True)
        }

    def _generate_examples(self, content: np.ndarray):
        step = self.builder_config.record_bytes
        for offset in range(0, content.size, step):
            yield offset, {"offset": offset, "text": content[offset : offset + step]}


def load(
    data_dir: str = "", config: str | Enwik8Config = "bytes"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train, validation and test bytes; fetched and prepared on first use only.

    Args:
      data_dir: where TensorFlow Datasets keeps its data; "" is its default, which is
        the environment variable TFDS_DATA_DIR or ~/tensorflow_datasets.
      config: "bytes" is the real enwik8; an `Enwik8Config` describes another archive.

    Returns:
      Three uint8 arrays [split size], in memory.

    Raises:
      ValueError: nothing is prepared and the archive cannot be fetched, is not the one
        expected or cannot be written; or what is prepared is damaged. The message
        names the flags to use.
    """
    try:
        builder = _builder(data_dir, config)
        if not builder.is_prepared():
            _prepare(builder)
            # Another object: this one does not know what a faster process has written.
            builder = _builder(data_dir, config)
        return tuple(_read_split(builder, split) for split in SPLITS)
    except Exception as error:  # of the network, the disk, or any library on the way
        where = data_dir or "the default directory of TensorFlow Datasets"
        raise ValueError(f"enwik8 from {where}: {error}; {_HELP}") from error


def _builder(data_dir: str, config: str | Enwik8Config) -> Enwik8:
    return Enwik8(
        data_dir=os.path.expanduser(data_dir) or None,
        config=config,
        file_format="array_record",
    )


def _prepare(builder: Enwik8) -> None:
    """Fetches, checks and writes the data, unless another process is faster."""
    url = builder.builder_config.url
    try:
        # TFDS would retry for minutes before it reports that there is no network.
        requests.head(url, timeout=20)
    except requests.RequestException as error:
        raise ValueError(
            f"nothing is prepared in {str(builder.data_dir)!r}, and {url} cannot be "
            f"reached ({error})"
        ) from error
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
    except OSError:
        if not builder.is_prepared():
            raise


def _check_archive(archive: pathlib.Path, config: Enwik8Config) -> None:
    """Raises, and removes the file from the cache, where it is not the right one."""
    with archive.open("rb") as stream:
        head = stream.read(512)
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    size = archive.stat().st_size
    if (size, digest) != (config.archive_size, config.archive_sha256):
        archive.unlink()
        archive.with_name(archive.name + ".INFO").unlink(missing_ok=True)
        raise ValueError(
            f"{config.url} gave {files.describe(head)}, {size:,} bytes with sha256 "
            f"{digest}, where a zip archive of {config.archive_size:,} bytes with "
            f"sha256 {config.archive_sha256} is expected"
        )


def _read_split(builder: Enwik8, split: str) -> np.ndarray:
    """All records of a split, one after the other, as one uint8 array."""
    size = builder.builder_config.split_sizes[SPLITS.index(split)]
    damaged = f"what is prepared in {str(builder.data_dir)!r} is damaged: remove it ("
    try:
        source = builder.as_data_source(split)
        records = [source[index] for index in range(len(source))]
    except Exception as error:  # array_record, protobuf and TFDS each have their own
        raise ValueError(f"{damaged}{error})") from error
    starts = np.cumsum([0, *(record["text"].size for record in records)])
    if [record["offset"] for record in records] != list(starts[:-1]) or (
        starts[-1] != size
    ):
        raise ValueError(
            f"{damaged}{split} has {starts[-1]:,} bytes, {size:,} are expected)"
        )
    return np.concatenate([record["text"] for record in records])
