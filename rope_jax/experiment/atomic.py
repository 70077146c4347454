"""Files that are written at once: a reader never sees half of one."""

import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
    """Put a whole UTF-8 text file in place, in one step, or leave what was there."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Put a whole file in place, in one step, or leave what was there."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_bytes(content)
    partial.replace(path)
