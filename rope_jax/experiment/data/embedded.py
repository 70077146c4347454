"""The embedded corpus: real bytes on every machine, without a download.

Python's standard library lies as source text beside every interpreter: a few megabytes
of code and English prose, enough for a quickstart. It differs from one Python version
to the next, so a number measured on it names the version; for numbers to compare with
others, use enwik8.
"""

import hashlib
import pathlib
import sys
import sysconfig

import numpy as np

MAX_BYTES = 4_000_000

# Left out: tests and tables (encodings, pydoc_data), which are unlike the rest, and
# packages that distributors ship apart, so that more machines have the same text.
_SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
_SKIPPED |= {"idlelib", "lib2to3", "distutils", "tkinter", "turtledemo", "ensurepip"}


def source_files(root: pathlib.Path) -> list[pathlib.Path]:
    """The standard library's source files below `root`, in an order of their own.

    The order is that of the SHA-256 digests of the relative paths: the same on every
    file system, and mixed, so that the validation and test bytes at the end are not one
    odd package. Only modules of the standard library itself are taken (site-packages
    and what an administrator put beside it are not).
    """
    names = []
    for entry in root.iterdir():  # site-packages lies here too: do not walk into it
        if entry.name.removesuffix(".py") in sys.stdlib_module_names:
            for file in [entry] if entry.suffix == ".py" else entry.rglob("*.py"):
                relative = file.relative_to(root)
                if not _SKIPPED.intersection(relative.parts):
                    names.append(relative.as_posix())
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [root / name for name in names]


def read_standard_library(max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Text of the running Python's standard library, `max_bytes` of it at most.

    Returns:
      uint8 [number of bytes]: whole files one after the other, the last one cut at
      `max_bytes`.

    Raises:
      ValueError: this Python comes without its sources (a frozen or zipped one).
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for file in source_files(root):
        if size >= max_bytes:
            break
        parts.append(file.read_bytes())
        size += len(parts[-1])
    if not size:
        raise ValueError(
            f"--config.data.source=embedded: this Python has no standard library "
            f"sources in {str(root)!r}; pass a byte file by --config.data.path"
        )
    return np.frombuffer(b"".join(parts)[:max_bytes], np.uint8)
