"""Text from bytes that come in pieces, end anywhere and may be no text at all."""

import io

import pytest

from rope_jax.experiment.text_stream import TextStream

TEXT = "a😀b".encode()


def shown(*parts):
    out = io.BytesIO()
    stream = TextStream(out)
    for part in parts:
        stream.write(part)
    stream.end()
    return out.getvalue().decode()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_d05_pieces_do_not_cut_a_character(size):
    parts = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    assert shown(*parts) == "a😀b"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff", "�"),
        (b"a\xf0\x9f\x98", "a�"),  # a character that never ends
        (b"\xf0a", "�a"),
        (b"\xed\xa0\x80", "���"),  # half of a surrogate pair is no character
        (b"\x80" * 3, "���"),
        (b"\x00\x1b", "\x00\x1b"),
    ],
)
def test_d05_what_is_no_text_never_raises(content, text):
    assert shown(content) == text
    assert shown(*(bytes([byte]) for byte in content)) == text


def test_every_byte_can_be_printed():
    assert len(shown(bytes(range(256)))) == 256


def test_what_one_text_leaves_does_not_begin_the_next():
    out = io.BytesIO()
    stream = TextStream(out)
    stream.write(b"\xf0\x9f")
    stream.end()
    stream.write(b"\x98\x80")
    stream.end()
    assert out.getvalue().decode() == "���"


def test_a_reader_that_went_away_is_no_error():
    class Gone(io.BytesIO):
        def write(self, content):
            raise BrokenPipeError

    stream = TextStream(Gone())
    stream.write(b"\xf0\x9f")
    assert not stream.closed
    for _ in range(2):
        stream.write(b"text")
        stream.end()
        assert stream.closed
