"""The layout of a compressed file: a header of 82 bytes and a code.

Integers are little-endian. By offset and size in bytes:

     0   8  magic, "ROPEJAX" and 0x1A
     8   2  version of this layout, 1
    10   4  streams: pieces that are coded side by side
    14   4  context: bytes that a prediction sees at most
    18   4  stride: bytes from one window of context to the next
    22   8  step of the checkpoint
    30   8  length of the content
    38   8  words of code
    46  16  of the model: SHA-256, cut, of its config and its parameters
    62  16  of the content: SHA-256, cut
    78   4  CRC-32 of the 78 bytes before
    82      the code, in words of 4 bytes
"""

import hashlib
import json
import struct
import sys
import zlib
from typing import NamedTuple

import jax
import numpy as np

from rope_jax.experiment.config import Config, to_dict

_MAGIC, _VERSION = b"ROPEJAX\x1a", 1
_FIELDS = struct.Struct("<8sHIIIQQQ16s16s")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size


class Header(NamedTuple):
    """What a compressed file says of itself; see the layout above."""

    streams: int
    context: int
    stride: int
    step: int
    length: int
    words: int
    model: bytes
    content: bytes


def pack(header: Header, code: np.ndarray) -> bytes:
    """A file: the header and uint32 words of code."""
    fields = _FIELDS.pack(_MAGIC, _VERSION, *header)
    return fields + _CHECK.pack(zlib.crc32(fields)) + code.astype("<u4").tobytes()


def unpack(content: bytes, name: str) -> tuple[Header, np.ndarray]:
    """The header and the words of code of a file.

    Args:
      content: the whole file.
      name: what to call it in an error.

    Raises:
      ValueError: it is no such file, of another version, damaged or cut short.
    """
    if not content.startswith(_MAGIC):
        raise ValueError(f"{name} was not written by --compress")
    if len(content) < HEADER_BYTES:
        raise ValueError(f"{name} is cut short: its header is {HEADER_BYTES} bytes")
    _, version, *fields = _FIELDS.unpack_from(content)
    if version != _VERSION:
        raise ValueError(f"{name} has layout {version}; this program reads {_VERSION}")
    (check,) = _CHECK.unpack_from(content, _FIELDS.size)
    if check != zlib.crc32(content[: _FIELDS.size]):
        raise ValueError(f"{name} is damaged: the checksum of its header is wrong")
    header = Header(*fields)
    streams = 1 <= header.streams <= max(1, header.length)
    if not streams or not 1 <= header.stride <= header.context:
        names = "streams", "context", "stride", "length"
        numbers = ", ".join(f"{n}={getattr(header, n)}" for n in names)
        raise ValueError(f"{name} is damaged: no file has {numbers}")
    size = HEADER_BYTES + 4 * header.words
    if len(content) != size:
        raise ValueError(f"{name} should have {size:,} bytes, got {len(content):,}")
    code = np.frombuffer(content, "<u4", offset=HEADER_BYTES)
    return header, code.astype(np.uint32)


def content_hash(content: bytes) -> bytes:
    """16 bytes that tell contents apart."""
    return hashlib.sha256(content).digest()[:16]


def model_hash(config: Config, params) -> bytes:
    """16 bytes that tell models apart: by architecture, encoding and every weight."""
    digest = hashlib.sha256(json.dumps(to_dict(config)["model"]).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(jax.device_get(leaf))
        if sys.byteorder != "little":
            array = array.byteswap()
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()[:16]
