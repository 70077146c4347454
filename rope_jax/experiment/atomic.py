"""Text files that are written at once: a reader never sees half of one."""

import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
    """Put a whole UTF-8 text file in place, in one step, or leave what was there."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
