r"""Text from a trained run.

    python -m rope_jax.experiment.sample --workdir=RUN --prompt="The " --length=500
    python -m rope_jax.experiment.sample --workdir=RUN --prompt_file=F --temperature=0.8
    python -m rope_jax.experiment.sample --workdir=RUN --length=100000 --window=128

The text goes to standard output as it comes, the prompt first, as UTF-8 with U+FFFD for
what is none; the rate goes to standard error. Several samples are made side by side;
the first is printed as it comes, the others when it is whole.

Nothing can be predicted from nothing: without a prompt the text starts after a line
break, which is not printed. Any bytes can be a prompt, in --prompt too.

The model sees all of the text so far. It was trained on rows of `data.length` bytes,
and beyond them most encodings write nonsense: --window=W lets it see the --sinks first
bytes and the last W, at the distances that they have in the cache (Xiao et al. 2023),
so that the text may be of any length.
"""

import functools
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np
from absl import flags

from rope_jax.experiment import cli, host, trained
from rope_jax.experiment.text_stream import TextStream, silence_stdout
from rope_jax.nn.cache import Rolling
from rope_jax.nn.decoding import init_cache
from rope_jax.nn.generation import stream_over
from rope_jax.nn.sampling import Sampling

_START = b"\n"


@dataclass(frozen=True)
class Request:
    """What to sample.

    Attributes:
      prompt: bytes to go on from; none starts after a line break.
      length: bytes to add.
      num_samples: texts, each with draws of its own.
      seed: of the draws.
      sampling: how bytes are drawn.
      rolling: what the model sees; None is all of the text.

    Raises:
      ValueError: a number is out of its range; its flag is named.
    """

    prompt: bytes = b""
    length: int = 500
    num_samples: int = 1
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    rolling: Rolling | None = None

    def __post_init__(self):
        limits = {"length": (0, 2**31), "num_samples": (1, 2**31), "seed": (0, 2**32)}
        for name, (least, end) in limits.items():
            if not least <= getattr(self, name) < end:
                raise ValueError(
                    f"--{name} must be from {least} to {end - 1}, got "
                    f"{getattr(self, name)}"
                )


class Samples:
    """Samples of a run; everything is checked and compiled before the first byte.

    Attributes:
      compile_seconds: what it took to compile and to try the two programs.
    """

    def __init__(self, run: trained.Trained, request: Request):
        """Check and compile.

        Raises:
          ValueError: the run's encoding cannot do this; the flag is named.
        """
        self._run, self._request = run, request
        self._prompts = np.tile(
            np.frombuffer(request.prompt or _START, np.uint8).astype(np.int32),
            (request.num_samples, 1),
        )
        self._make_cache = self._checked_cache()
        began = time.monotonic()
        for _ in self._stream(min(1, request.length)):
            pass
        self.compile_seconds = time.monotonic() - began

    def __iter__(self) -> Iterator[np.ndarray]:
        """The samples, uint8 `[num_samples, n]` at a time."""
        for part in self._stream(self._request.length):
            yield part.astype(np.uint8)

    def _stream(self, length: int) -> Iterator[np.ndarray]:
        return stream_over(
            jax.local_devices(),
            self._run.graphdef,
            self._run.params,
            self._prompts,
            make_cache=self._make_cache,
            max_new_tokens=length,
            key=jax.random.key(self._request.seed),
            sampling=self._request.sampling,
        )

    def _checked_cache(self):
        """A function that makes an empty cache for so many rows, of one capacity."""
        run, request, model = self._run, self._request, self._run.model
        rows, prompted = self._prompts.shape
        capacity = prompted + request.length
        most = model.max_length
        if request.rolling is not None:
            capacity, flag = None, f"--window={request.rolling.window}"
            flag += f" --sinks={request.rolling.sinks}"
        elif most is not None and capacity > most:
            raise ValueError(
                f"--length must be at most {max(0, most - prompted)} after a prompt of "
                f"{prompted} bytes, got {request.length}: the positions of encoding "
                f"{run.config.model.encoding!r} end at {most}"
            )
        else:
            flag = f"--length={request.length}"

        @functools.partial(jax.jit, static_argnums=0)
        def make(rows):
            return init_cache(model, rows, capacity, rolling=request.rolling)

        try:
            jax.eval_shape(functools.partial(make, rows))
        except ValueError as error:
            raise run.refused(flag, error) from error
        return make


def sample(run: trained.Trained, request: Request, out: TextStream, *, echo: bool):
    """Print samples as they come; the rate goes to standard error.

    Args:
      run: where from.
      request: what.
      out: where to.
      echo: whether the prompt is printed in front.

    Raises:
      ValueError: the run's encoding cannot do this; the flag is named.
    """
    samples = Samples(run, request)
    _note_length(run, request)
    waiting = [bytearray() for _ in range(1, request.num_samples)]
    head = request.prompt if echo else b""
    out.write(head)
    began, count = time.monotonic(), 0
    for part in samples:
        count += part.size
        first, *others = part
        out.write(first.tobytes())
        for text, new in zip(waiting, others, strict=True):
            text += new.tobytes()
        if out.closed:
            break
    seconds = time.monotonic() - began
    out.end()
    for text in waiting:
        out.write(b"\n---------------\n" + head + bytes(text))
        out.end()
    out.write(b"\n")
    print(
        f"compiled in {samples.compile_seconds:.1f} s; {count:,} bytes in "
        f"{seconds:.2f} s: {count / max(seconds, 1e-9):,.0f} bytes/s",
        file=sys.stderr,
    )


def _note_length(run: trained.Trained, request: Request) -> None:
    """Say where the text leaves the lengths that the model was trained at."""
    total = len(request.prompt or _START) + request.length
    length = run.config.data.length
    if request.rolling is None and request.length and total > length:
        print(
            f"note: the text reaches {total:,} bytes, and the run was trained at "
            f"{length:,}; --window shows the model its end only",
            file=sys.stderr,
        )


def _define_flags() -> None:
    flags.DEFINE_string(
        "workdir", None, "A run, or a directory above one run.", required=True
    )
    flags.DEFINE_string("prompt", None, "Text to go on from.")
    flags.DEFINE_string("prompt_file", None, "File whose bytes are the prompt.")
    flags.DEFINE_integer("length", 500, "Bytes to add.")
    flags.DEFINE_float("temperature", 1.0, "0 takes the most likely byte.")
    flags.DEFINE_integer("top_k", 0, "Draw from so many likely bytes; 0: all.")
    flags.DEFINE_float("top_p", 1.0, "Draw from the likely bytes that reach this.")
    flags.DEFINE_float("min_p", 0.0, "Draw from bytes this likely, times the best.")
    flags.DEFINE_integer("seed", 0, "Of the draws.")
    flags.DEFINE_integer("num_samples", 1, "Texts to make, side by side.")
    flags.DEFINE_integer("window", None, "Last bytes that the model sees.")
    flags.DEFINE_integer("sinks", None, "First bytes seen with --window; 4 by default.")
    flags.DEFINE_integer("step", None, "Checkpoint; by default the newest.")
    flags.DEFINE_boolean("echo", True, "Print the prompt in front.")


def _prompt(values: dict) -> bytes:
    text, path = values["prompt"], values["prompt_file"]
    if text is not None and path is not None:
        raise ValueError(f"give --prompt or --prompt_file, got {text!r} and {path!r}")
    if path is None:
        return os.fsencode(text or "")  # the bytes as they were typed
    try:
        return pathlib.Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(
            f"--prompt_file={path} cannot be read: {error.strerror}"
        ) from error


def _rolling(values: dict) -> Rolling | None:
    window, sinks = values["window"], values["sinks"]
    if window is None:
        if sinks is not None:
            raise ValueError(f"--sinks={sinks} has no effect without --window")
        return None
    try:
        return Rolling(4 if sinks is None else sinks, window)
    except ValueError as error:
        raise ValueError(f"--window and --sinks: {error}") from error


def _sampling(values: dict) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p")
    try:
        return Sampling(**{name: values[name] for name in names})
    except ValueError as error:
        raise ValueError(f"--{error}") from error


def main(argv):
    """Sample and print."""
    del argv
    values = {name: flags.FLAGS[name].value for name in flags.FLAGS}
    request = Request(
        prompt=_prompt(values),
        length=values["length"],
        num_samples=values["num_samples"],
        seed=values["seed"],
        sampling=_sampling(values),
        rolling=_rolling(values),
    )
    host.prepare()
    run = trained.load(values["workdir"], values["step"])
    out = TextStream(sys.stdout.buffer)
    sample(run, request, out, echo=values["echo"])
    if out.closed:
        silence_stdout()


if __name__ == "__main__":
    _define_flags()
    cli.run(main)
