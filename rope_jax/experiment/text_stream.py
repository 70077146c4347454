"""Bytes of a model as text, while they come.

A model of bytes may end a character halfway, or write none that exists. What cannot
be read as UTF-8 becomes U+FFFD; what may still become a character waits for its rest.
"""

import codecs
import os
import sys
from typing import BinaryIO


class TextStream:
    r"""UTF-8 text on a byte stream, whatever bytes and whoever reads it.

    The locale has no say: the text is written as UTF-8. A reader that goes away, such
    as `head`, is no error; `closed` tells, and nothing more is written.

    Attributes:
      closed: whether the reader went away.

    Example:
      >>> import io
      >>> out = io.BytesIO()
      >>> stream = TextStream(out)
      >>> for part in (b"a\xf0\x9f", b"\x98\x80b\xff", b"\xc3"):
      ...     stream.write(part)
      >>> stream.end()
      >>> print(out.getvalue().decode())
      a😀b��
    """

    def __init__(self, out: BinaryIO):
        self._out = out
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.closed = False

    def write(self, content: bytes) -> None:
        """Write what can be read so far."""
        self._print(self._decoder.decode(content))

    def end(self) -> None:
        """Write what was waiting for its rest; the next text starts anew."""
        self._print(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _print(self, text: str) -> None:
        if not text or self.closed:
            return
        try:
            self._out.write(text.encode("utf-8"))
            self._out.flush()
        except BrokenPipeError:
            self.closed = True


def silence_stdout() -> None:
    """Point a standard output that nobody reads to nowhere.

    Python flushes it once more at the end, and would print an error of its own.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
