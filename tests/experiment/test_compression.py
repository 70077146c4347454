"""Arithmetic coding: the bits that were predicted, the content back, or an error."""

import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.experiment import compressed_file
from rope_jax.experiment.compressed_file import HEADER_BYTES
from rope_jax.experiment.compression import Rule, StreamModel, compress, decompress
from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.protocols import plan
from rope_jax.experiment.scoring import ModelApply, score
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder

CONTEXT, STRIDE = 16, 4
TEXT = (b"the quick brown fox \xff jumps over the lazy dog. " * 7)[:300]
NOISE = np.random.default_rng(5).integers(0, 256, 300).astype(np.uint8).tobytes()
ABOUT = {"model": b"m" * 16, "step": 7}


@pytest.fixture(scope="module")
def model():
    """A small decoder with random weights, as (graphdef, params)."""
    config = DecoderConfig("rope", num_layers=1, model_dim=16, num_heads=2, head_dim=8)
    shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, shapes = nnx.split(shapes)
    rng = np.random.default_rng(0)
    params = nnx.to_pure_dict(shapes)
    return graphdef, jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), x.dtype), params
    )


def rule(streams):
    return Rule(streams, CONTEXT, STRIDE)


def unpacked(file):
    return compressed_file.unpack(file, "F")


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("content", [TEXT, NOISE], ids=["text", "noise"])
def test_the_size_is_what_is_predicted_and_the_content_comes_back(
    model, content, streams
):
    file, predicted = compress(content, *model, rule(streams), **ABOUT)
    bits = 8 * (len(file) - HEADER_BYTES)
    assert predicted - 1 <= bits <= 1.005 * predicted + 64
    assert predicted > 300
    assert decompress(*unpacked(file), *model) == content


@pytest.mark.parametrize("content", [b"", b"a", b"\x00", b"\xff\xfe", TEXT[:5]])
def test_short_contents_have_no_more_streams_than_bytes(model, content):
    file, predicted = compress(content, *model, rule(8), **ABOUT)
    header, code = unpacked(file)
    # The first byte of each stream costs 8 bits, and here all are first bytes.
    assert predicted == 8 * len(content)
    assert header.streams == max(1, len(content))
    assert len(file) <= HEADER_BYTES + len(content) + 8
    assert decompress(header, code, *model) == content


@pytest.mark.parametrize("streams", [1, 3])
def test_the_bits_are_those_of_the_sliding_protocol_on_each_piece(model, streams):
    """By a full pass over every window, without a cache."""
    _, predicted = compress(TEXT, *model, rule(streams), **ABOUT)
    options = EvalConfig((CONTEXT,), protocol="sliding", stride=STRIDE)
    expected = 8.0 * streams
    for piece in np.array_split(np.frombuffer(TEXT, np.uint8), streams):
        (cell,) = plan(len(piece), options, CONTEXT)
        nats = score(ModelApply(model[0]), model[1], cell.windows, piece)
        assert len(nats) == len(piece) - 1
        expected += nats.astype(np.float64).sum() / np.log(2)
    assert predicted == pytest.approx(expected, rel=1e-6)


def test_the_context_of_each_byte(model):
    """Bytes 1 to 16 see all before; byte 17 begins a window of 12 and what follows."""
    graphdef, params = model
    seen = np.frombuffer(TEXT[:32], np.uint8)[None]
    stream_model = StreamModel(graphdef, params, rule(1))
    whole = jax.jit(nnx.merge(graphdef, params))
    found = np.stack([stream_model.after(seen, i)[0] for i in range(1, 32)])
    for index, begin in ((1, 0), (16, 0), (17, 4), (20, 4), (21, 8), (25, 12)):
        window = np.zeros((1, CONTEXT), np.int32)
        window[0, : index - begin] = seen[0, begin:index]
        logits = whole(window)[0, index - begin - 1]
        np.testing.assert_allclose(
            found[index - 1], jax.nn.softmax(logits), rtol=1e-4, atol=1e-7
        )


def test_the_layout():
    header = compressed_file.Header(
        3, 128, 32, step=1200, length=5, words=2, model=b"m" * 16, content=b"c" * 16
    )
    file = compressed_file.pack(header, np.array([1, 2**31], np.uint32))
    assert len(file) == HEADER_BYTES + 8 == 90
    assert file[:10] == b"ROPEJAX\x1a\x01\x00"
    assert struct.unpack_from("<III", file, 10) == (3, 128, 32)
    assert struct.unpack_from("<QQQ", file, 22) == (1200, 5, 2)
    assert file[46:78] == b"m" * 16 + b"c" * 16
    assert file[82:] == b"\x01\x00\x00\x00\x00\x00\x00\x80"
    again, code = unpacked(file)
    assert again == header
    assert code.tolist() == [1, 2**31]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: b"", "F was not written by --compress"),
        (lambda file: b"PK\x03\x04" + file, "F was not written by --compress"),
        (lambda file: file[:40], "F is cut short"),
        (lambda file: file[:-1], "should have 90 bytes, got 89"),
        (lambda file: file + b"\n", "should have 90 bytes, got 91"),
        (lambda file: file[:8] + b"\x02" + file[9:], "F has layout 2"),
        (lambda file: file[:30] + b"\x06" + file[31:], "checksum of its header"),
    ],
)
def test_what_is_no_whole_file_is_refused(damage, words):
    header = compressed_file.Header(1, 16, 4, 7, 5, 2, b"m" * 16, b"c" * 16)
    file = compressed_file.pack(header, np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match=words):
        compressed_file.unpack(damage(file), "F")


@pytest.mark.parametrize(
    ("numbers", "length"),
    [((0, 16, 4), 5), ((6, 16, 4), 5), ((1, 16, 0), 5), ((1, 3, 4), 5), ((2, 1, 1), 0)],
)
def test_a_header_of_numbers_that_no_file_has_is_refused(numbers, length):
    header = compressed_file.Header(*numbers, 7, length, 0, b"m" * 16, b"c" * 16)
    file = compressed_file.pack(header, np.zeros(0, np.uint32))
    with pytest.raises(ValueError, match=f"F is damaged: .*streams={numbers[0]}, "):
        compressed_file.unpack(file, "F")


@pytest.mark.parametrize("word", [0, 5, -1])
def test_a_damaged_code_gives_an_error_and_no_content(model, word):
    header, code = unpacked(compress(TEXT, *model, rule(3), **ABOUT).file)
    code[word] ^= 1 << 20
    with pytest.raises(ValueError, match="checksum"):
        decompress(header, code, *model)


def test_probabilities_that_are_not_finite_are_an_error(model):
    graphdef, params = model
    params = jax.tree.map(lambda x: x * jnp.nan, params)
    with pytest.raises(RunError, match="not finite at byte 1"):
        compress(TEXT, graphdef, params, rule(3), **ABOUT)


def test_a_missing_coder_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(RunError, match="pip install 'constriction"):
        compress(TEXT, *model, rule(3), **ABOUT)
