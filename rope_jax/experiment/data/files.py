"""Bytes from one local file: raw, .zip or .gz, and nothing in between.

Every failure is a ValueError that names the flag, the path and what would be valid,
because these functions run before any work and on paths that a person typed.
"""

import gzip
import pathlib
import zipfile
import zlib

import numpy as np

FLAG = "--config.data.path"
VALID = (
    "valid: a non-empty file of raw bytes, a .zip that holds one file (or one that is "
    "named like the archive), or a .gz"
)
_ARCHIVES = ((b"PK\x03\x04", ".zip"), (b"\x1f\x8b\x08", ".gz"))


def is_html(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a web page.

    Servers and captive portals answer with a page where a download was asked for; the
    page then lies on disk under the name of the archive.

    >>> is_html(b"<!DOCTYPE html><html>"), is_html(b"<mediawiki>"), is_html(b"PK")
    (True, False, False)
    """
    return head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html"))


def describe(head: bytes) -> str:
    """What the first bytes of a file say that it is, for an error message."""
    return "an HTML page" if is_html(head) else f"a file that begins with {head[:8]!r}"


def read_bytes(path: str) -> np.ndarray:
    """The content of a local file as it is: every byte kept, none added.

    The ending decides how the file is read, in any case: `.zip` and `.gz` are
    unpacked, everything else is raw. Newlines, blank lines, trailing spaces and bytes
    that are no UTF-8 stay (one byte is one token).

    Args:
      path: the file; `~` is expanded.

    Returns:
      uint8 [number of bytes], in memory, so that a file which changes later does not
      change a run.

    Raises:
      ValueError: the path is missing, no regular file, empty, unreadable, a damaged
        archive, an HTML page where an archive should be, or an archive whose name
        does not say so.
    """
    file = pathlib.Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"{FLAG}: there is no file {str(file)!r}; {VALID}")
    if not file.is_file():
        kind = "a directory" if file.is_dir() else "not a regular file"
        raise ValueError(f"{FLAG}: {str(file)!r} is {kind}; {VALID}")
    try:
        with file.open("rb") as stream:
            head = stream.read(512)
        if not head:
            raise ValueError(f"{FLAG}: {str(file)!r} is empty; {VALID}")
        read = {".zip": read_zip, ".gz": _read_gzip}.get(file.suffix.lower(), _read_raw)
        content = read(file, head)
    except OSError as error:
        raise ValueError(
            f"{FLAG}: {str(file)!r} cannot be read ({error}); {VALID}"
        ) from error
    if not content.size:
        raise ValueError(f"{FLAG}: the file in {str(file)!r} is empty; {VALID}")
    return content


def read_zip(file: pathlib.Path, head: bytes) -> np.ndarray:
    """The one file in a zip archive, or the one that is named like the archive.

    Raises:
      ValueError: the archive is damaged, encrypted or an HTML page, or none of its
        several members is named like the archive.
    """
    if not zipfile.is_zipfile(file):
        raise ValueError(
            f"{FLAG}: {str(file)!r} is {describe(head)}, not a complete zip archive: "
            f"fetch it again; {VALID}"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            alike = [n for n in names if pathlib.PurePosixPath(n).name == file.stem]
            if len(names) != 1 and len(alike) != 1:
                raise ValueError(
                    f"{FLAG}: {str(file)!r} must hold one file, or one file named "
                    f"{file.stem!r}; it holds {names}"
                )
            member = names[0] if len(names) == 1 else alike[0]
            return np.frombuffer(archive.read(member), np.uint8)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{FLAG}: {str(file)!r} is damaged ({error})") from error
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or too new
        raise ValueError(
            f"{FLAG}: {str(file)!r} cannot be unpacked ({error})"
        ) from error


def _read_gzip(file: pathlib.Path, head: bytes) -> np.ndarray:
    try:
        with gzip.open(file) as stream:
            return np.frombuffer(stream.read(), np.uint8)
    except gzip.BadGzipFile as error:
        raise ValueError(
            f"{FLAG}: {str(file)!r} is {describe(head)}, not a complete gzip file "
            f"({error}): fetch it again; {VALID}"
        ) from error
    except (EOFError, zlib.error) as error:
        raise ValueError(
            f"{FLAG}: {str(file)!r} is a damaged gzip file ({error})"
        ) from error


def _read_raw(file: pathlib.Path, head: bytes) -> np.ndarray:
    for magic, suffix in _ARCHIVES:
        if head.startswith(magic):
            # Compressed bytes would train without complaint, to about 8 bits each.
            raise ValueError(
                f"{FLAG}: {str(file)!r} is a {suffix} archive; rename it so that its "
                f"name ends in {suffix}; {VALID}"
            )
    return np.fromfile(file, np.uint8)
