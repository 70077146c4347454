"""Files that are written at once: a reader never sees half of one."""

import os
import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
    """Put a whole UTF-8 text file in place, in one step, or leave what was there."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Put a whole file in place, in one step, or leave what was there.

    Until then it has a name that no other file or process will have.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
