"""Lossless compression with a model's predictions, by arithmetic coding.

A byte of probability p costs -log2 p bits. The content is cut into pieces of equal
length, the streams, which are coded side by side, as the rows of one batch, into one
code: byte 0 of each, byte 1 of each, and so on. More streams are faster and cost more
bits, since each begins without context.

The context rule, in each stream, is that of the sliding protocol
(`rope_jax.experiment.protocols`), with the first byte counted. It costs 8 bits. The
others are predicted in windows of `context` bytes, `stride` apart; each window begins
afresh from the `context - stride` bytes before, so that beyond the first window a byte
has between context - stride + 1 and `context` bytes in view.

Both directions make the same calls in the same order on arrays of the same shapes.
With one version of the libraries on one machine the probabilities are then equal to the
last bit, as decoding needs; elsewhere they may not be. A checksum decides: a wrong
content is never returned.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from rope_jax.experiment import compressed_file
from rope_jax.experiment.compressed_file import Header
from rope_jax.experiment.errors import RunError
from rope_jax.nn import decoding

# The coder's probabilities are multiples of this, and none is 0.
_LEAST = 2.0**-24


@dataclass(frozen=True)
class Rule:
    """How many pieces, and what a prediction sees: both sides must agree on it.

    Attributes:
      streams: pieces coded side by side, at least 1.
      context: bytes that a prediction sees at most, at least 1.
      stride: bytes from one window to the next, in [1, context].
    """

    streams: int
    context: int
    stride: int


class Compressed(NamedTuple):
    """A compressed file, and the bits that the model predicts for its content."""

    file: bytes
    predicted_bits: float


class StreamModel:
    """The next byte's distribution in streams that advance together, byte by byte."""

    def __init__(self, graphdef: nnx.GraphDef, params, rule: Rule):
        """Prepare the two programs that all steps run.

        Args:
          graphdef: of the model.
          params: its parameters.
          rule: the batch, the capacity of the cache, and when it begins afresh.
        """
        self._begin, self._step = _programs(graphdef, rule)
        self._params, self._rule, self._cache = params, rule, None

    def after(self, streams: np.ndarray, index: int) -> np.ndarray:
        """Probabilities of byte `index` of each stream, float32 `[K, 256]`.

        Args:
          streams: uint8 `[K, N]`, known before `index`.
          index: that of the call before and 1; 1 begins.

        Raises:
          RunError: they are not finite.
        """
        rule, fed = self._rule, index - 1
        beyond = fed - rule.context
        if fed == 0:
            self._cache = self._begin(self._params, streams[:, :0])
        elif beyond >= 0 and beyond % rule.stride == 0:
            overlap = rule.context - rule.stride
            self._cache = self._begin(self._params, streams[:, fed - overlap : fed])
        found, self._cache = self._step(self._params, self._cache, streams[:, fed])
        found = np.asarray(found)
        if not np.isfinite(found).all():
            raise RunError(f"the model's probabilities are not finite at byte {index}")
        return found


def compress(
    content: bytes,
    graphdef: nnx.GraphDef,
    params,
    rule: Rule,
    *,
    model: bytes,
    step: int,
) -> Compressed:
    """Compress bytes.

    Args:
      content: any bytes, also none.
      graphdef: of the model.
      params: its parameters.
      rule: streams and context; there are never more streams than bytes.
      model: `compressed_file.model_hash` of the model, written into the file.
      step: of the checkpoint, written into the file.

    Returns:
      The file and the bits predicted.
    """
    queue, family = _coder()
    encoder = queue.RangeEncoder()
    rule = Rule(max(1, min(rule.streams, len(content))), rule.context, rule.stride)
    pieces = _pieces(content, rule.streams)
    predicted = 0.0

    def encode(probabilities, index):
        nonlocal predicted
        symbols = pieces[: len(probabilities), index].astype(np.int32)
        encoder.encode(symbols, family, probabilities)
        chosen = probabilities[np.arange(len(symbols)), symbols].astype(np.float64)
        predicted -= np.log2(np.maximum(chosen, _LEAST)).sum()
        return symbols

    _code(StreamModel(graphdef, params, rule), rule.streams, len(content), encode)
    code = encoder.get_compressed()
    header = Header(
        *(rule.streams, rule.context, rule.stride),
        step=step,
        length=len(content),
        words=code.size,
        model=model,
        content=compressed_file.content_hash(content),
    )
    return Compressed(compressed_file.pack(header, code), float(predicted))


def decompress(
    header: Header, code: np.ndarray, graphdef: nnx.GraphDef, params
) -> bytes:
    """The content of a compressed file.

    Args:
      header: of the file; that its model is this one has been seen to.
      code: the words after it.
      graphdef: of the model.
      params: its parameters.

    Raises:
      ValueError: what came out is not what was compressed.
    """
    queue, family = _coder()
    decoder = queue.RangeDecoder(code)

    def decode(probabilities, index):
        del index
        return decoder.decode(family, probabilities)

    rule = Rule(header.streams, header.context, header.stride)
    stream_model = StreamModel(graphdef, params, rule)
    try:
        streams = _code(stream_model, rule.streams, header.length, decode)
    except AssertionError as error:  # how the coder says that no code is like this
        raise _wrong_content() from error
    content = _joined(streams, header.length)
    if compressed_file.content_hash(content) != header.content:
        raise _wrong_content()
    return content


def _wrong_content() -> ValueError:
    return ValueError(
        "the content does not have the checksum that it was compressed with, and is "
        "not written: the file is damaged, or this machine, this version of jax or "
        "this kind of device computes the probabilities differently in their last "
        "bits from the one that compressed it"
    )


def _coder():
    """The entropy coder's queues, and its family of distributions over bytes."""
    try:
        import constriction
    except ImportError as error:
        raise RunError(
            "--compress and --decompress need the package constriction; install it "
            "with pip install 'constriction>=0.5'"
        ) from error
    stream = constriction.stream
    return stream.queue, stream.model.Categorical(perfect=False)


def _code(
    model: StreamModel,
    streams: int,
    length: int,
    choose: Callable[[np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """All streams, uint8 `[K, N]`, byte by byte.

    Args:
      model: gives the probabilities.
      streams: K.
      length: bytes of all streams together; the first of them may have one more.
      choose: takes probabilities `[k, 256]` of the k streams that go on, and the index
        of the byte; gives the bytes `[k]`.
    """
    whole, rest = divmod(length, streams)
    known = np.zeros((streams, whole + (rest > 0)), np.uint8)
    uniform = np.full((streams, 256), 1 / 256, np.float32)
    steps = range(known.shape[1])
    for index in tqdm(steps, unit="B", unit_scale=streams, disable=None):
        going = streams if index < whole else rest
        found = model.after(known, index) if index else uniform
        known[:going, index] = choose(found[:going], index)
    return known


def _sizes(length: int, streams: int) -> np.ndarray:
    return length // streams + (np.arange(streams) < length % streams)


def _pieces(content: bytes, streams: int) -> np.ndarray:
    """Consecutive pieces of the content as rows, uint8 `[K, N]`, filled up with 0."""
    sizes = _sizes(len(content), streams)
    pieces = np.zeros((streams, sizes.max()), np.uint8)
    pieces[np.arange(sizes.max()) < sizes[:, None]] = np.frombuffer(content, np.uint8)
    return pieces


def _joined(streams: np.ndarray, length: int) -> bytes:
    sizes = _sizes(length, len(streams))
    return streams[np.arange(streams.shape[1]) < sizes[:, None]].tobytes()


@functools.lru_cache(maxsize=8)
def _programs(graphdef: nnx.GraphDef, rule: Rule):
    """Fill an empty cache with tokens; read one more token of each stream."""

    def begin(params, tokens):
        model = nnx.merge(graphdef, params)
        cache = decoding.init_cache(model, rule.streams, rule.context)
        if not tokens.shape[1]:
            return cache
        tokens = tokens.astype(jnp.int32)
        return decoding.extend(model, tokens, cache, last_only=True)[1]

    def step(params, cache, tokens):
        model = nnx.merge(graphdef, params)
        tokens = tokens.astype(jnp.int32)[:, None]
        logits, cache = decoding.extend(model, tokens, cache, last_only=True)
        return jax.nn.softmax(logits, axis=-1), cache

    options = _same_in_every_process()
    return (
        jax.jit(begin, compiler_options=options),
        jax.jit(step, donate_argnames="cache", compiler_options=options),
    )


def _same_in_every_process() -> dict[str, bool | int]:
    """Compiler options: a GPU's kernels are otherwise chosen by a race for speed."""
    if jax.default_backend() != "gpu":
        return {}
    return {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
