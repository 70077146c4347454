r"""Bits per byte of a text under a trained run, and files compressed to that size.

    python -m rope_jax.experiment.score --workdir=RUN --file=F
    python -m rope_jax.experiment.score --workdir=RUN --text="the quick brown fox"
    python -m rope_jax.experiment.score --workdir=RUN --compress=F --out=G
    python -m rope_jax.experiment.score --workdir=RUN --decompress=G --out=F

A text is scored by the protocol `sliding` of eval.py: windows of --context bytes,
--stride apart, each read into a cache; then the bytes that no window before has scored
are read over it and scored. The first byte of the text has nothing before it and is not
scored.

A compressed file is an arithmetic code of the model's predictions in such windows, in
--streams pieces side by side, the first byte of each at 8 bits. It comes back byte for
byte from the same checkpoint on the same machine, with the same versions of the
libraries; anywhere else the last bits of a probability may differ, and then a checksum
refuses the result. See rope_jax/experiment/compression.py.
"""

import os
import pathlib
import time

import jax
import numpy as np
from absl import flags

from rope_jax.experiment import (
    atomic,
    cli,
    compressed_file,
    compression,
    protocols,
    run_directory,
    trained,
)
from rope_jax.experiment.cached_scoring import CachedApply
from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.measurement import measure
from rope_jax.nn import decoding

# Each more is quicker, and begins without context: with a small model some 15 bits.
_STREAMS = 4


def score(
    content: bytes,
    workdir: str | os.PathLike,
    *,
    context: int | None = None,
    stride: int | None = None,
    step: int | None = None,
) -> dict:
    """The bits per byte of a text under a run's checkpoint, through the cache.

    Args:
      content: at least 2 bytes.
      workdir: a run, or a directory above one.
      context: bytes in a window; None is the run's training length. A text that is
        shorter is one window.
      stride: bytes from window to window; None is a quarter of the window.
      step: of the checkpoint; None is the newest.

    Returns:
      A row as of `measurement.measure`.

    Raises:
      FileNotFoundError: no run or no checkpoint.
      ValueError: an argument that cannot work; its flag is named.
      RunError: the loss is not finite.
    """
    if len(content) < 2:
        raise ValueError(
            "the text of --text or --file must have at least 2 bytes, got "
            f"{len(content)}: the first has nothing before it and is not scored"
        )
    run = trained.load(workdir, step)
    context, stride = _windows(run, context, stride)
    context = min(context, len(content) - 1)
    stride = min(stride, context)
    options = EvalConfig((context,), protocol="sliding", stride=stride)
    (row,) = measure(
        CachedApply(run.graphdef, after=stride),
        run.params,
        protocols.plan(len(content), options, context),
        np.frombuffer(content, np.uint8),
        options,
        train_length=context,
    )
    if row["reason"]:
        raise RunError(f"{run.run_dir} at step {run.step}: {row['reason']}")
    return row


def compress(
    content: bytes,
    workdir: str | os.PathLike,
    *,
    context: int | None = None,
    stride: int | None = None,
    streams: int = _STREAMS,
    step: int | None = None,
) -> compression.Compressed:
    """Compress bytes with a run's checkpoint.

    Args:
      content: any bytes, also none.
      workdir: as for `score`, and so on.
      context: see there.
      stride: see there.
      streams: pieces coded side by side.
      step: see there.

    Returns:
      The compressed file and the bits that were predicted for its content.

    Raises:
      FileNotFoundError: no run or no checkpoint.
      ValueError: an argument that cannot work; its flag is named.
      RunError: a probability is not finite, or constriction is not installed.
    """
    if streams < 1:
        raise ValueError(f"--streams must be at least 1, got {streams}")
    run = trained.load(workdir, step)
    return compression.compress(
        content,
        run.graphdef,
        run.params,
        compression.Rule(streams, *_windows(run, context, stride)),
        model=compressed_file.model_hash(run.config, run.params),
        step=run.step,
    )


def decompress(
    content: bytes,
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    name: str = "the file",
) -> bytes:
    """The bytes that a compressed file holds.

    Args:
      content: of the compressed file.
      workdir: as for `score`.
      step: of the checkpoint; None is the one that compressed it, if it is there.
      name: of the file, for errors.

    Raises:
      FileNotFoundError: no run or no checkpoint.
      ValueError: the file is damaged, another checkpoint compressed it, or what comes
        out is not what was compressed.
      RunError: a probability is not finite, or constriction is not installed.
    """
    header, code = compressed_file.unpack(content, name)
    run_dir = run_directory.find_run(workdir)
    if step is None and header.step in run_directory.complete_steps(run_dir):
        step = header.step
    run = trained.load(run_dir, step)
    if compressed_file.model_hash(run.config, run.params) != header.model:
        raise ValueError(
            f"--workdir {run_dir} at step {run.step} is not the model that compressed "
            f"{name}, which was at step {header.step} of its run"
        )
    return compression.decompress(header, code, run.graphdef, run.params)


def _windows(run, context: int | None, stride: int | None) -> tuple[int, int]:
    """Bytes in a window and from one to the next; ValueError if they cannot be."""
    model = run.model
    context = run.config.data.length if context is None else context
    stride = max(1, context // 4) if stride is None else stride
    most = model.max_length
    if context < 1 or (most is not None and context > most):
        limit = "" if most is None else f" and at most {most}, where its positions end"
        raise ValueError(f"--context must be at least 1{limit}, got {context}")
    if not 1 <= stride <= context:
        raise ValueError(
            f"--stride must be at least 1 and at most the context of {context}, got "
            f"{stride}"
        )
    try:
        jax.eval_shape(lambda: decoding.init_cache(model, 1, context))
    except ValueError as error:
        raise run.refused(f"--context={context}", error) from error
    return context, stride


def _define_flags() -> None:
    flags.DEFINE_string(
        "workdir", None, "A run, or a directory above one run.", required=True
    )
    flags.DEFINE_string("text", None, "Text to score.")
    flags.DEFINE_string("file", None, "File to score.")
    flags.DEFINE_string("compress", None, "File to compress, into --out.")
    flags.DEFINE_string("decompress", None, "File to restore, into --out.")
    flags.DEFINE_string("out", None, "Where --compress and --decompress write.")
    flags.DEFINE_integer("step", None, "Checkpoint; by default the newest.")
    flags.DEFINE_integer(
        "context", None, "Bytes in a window; by default the run's training length."
    )
    flags.DEFINE_integer(
        "stride", None, "Bytes from window to window; by default a quarter of one."
    )
    flags.DEFINE_integer(
        "streams",
        None,
        f"--compress: pieces coded side by side, {_STREAMS} by default. More are "
        "faster, and each begins without context.",
    )


# The flags of each job, beside --workdir and --step.
_JOBS = {
    "text": ("context", "stride"),
    "file": ("context", "stride"),
    "compress": ("out", "context", "stride", "streams"),
    "decompress": ("out",),
}


def _job() -> tuple[str, dict]:
    """The one job that the flags ask for, and its options; ValueError if unclear."""
    given = {name: flags.FLAGS[name].value for name in flags.FLAGS}
    jobs = [name for name in _JOBS if given[name] is not None]
    if len(jobs) != 1:
        names = ", ".join(f"--{name}" for name in _JOBS)
        got = " and ".join(f"--{name}" for name in jobs) or "none"
        raise ValueError(f"give exactly one of {names}; got {got}")
    (job,) = jobs
    for name in ("out", "context", "stride", "streams"):
        if given[name] is not None and name not in _JOBS[job]:
            raise ValueError(f"--{name}={given[name]} has no effect with --{job}")
    if "out" in _JOBS[job] and not given["out"]:
        raise ValueError(f"--{job} needs --out, the file to write")
    options = {n: given[n] for n in (*_JOBS[job], "step") if given[n] is not None}
    return job, options


def _read(job: str) -> bytes:
    value = flags.FLAGS[job].value
    if job == "text":
        return os.fsencode(value)  # the bytes as they were typed
    try:
        return pathlib.Path(value).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"--{job}={value} cannot be read: {error.strerror}") from error


def _output(job: str, out: str) -> pathlib.Path:
    path = pathlib.Path(out).expanduser()
    source = pathlib.Path(flags.FLAGS[job].value).expanduser()
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise ValueError(f"--out must be a file in a folder that exists, got {out!r}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--out must be in a folder that is writable, got {out!r}")
    if path.exists() and path.samefile(source):
        raise ValueError(f"--out must be another file than --{job}, got {out!r}")
    return path


def main(argv):
    """Score, compress or decompress."""
    del argv
    job, options = _job()
    content, workdir = _read(job), flags.FLAGS["workdir"].value
    began = time.monotonic()
    if job in ("text", "file"):
        print(_scored(score(content, workdir, **options)))
        return
    path = _output(job, options.pop("out"))
    if job == "compress":
        result = compress(content, workdir, **options)
        atomic.write_bytes(path, result.file)
        print(_compressed(len(content), result))
    else:
        restored = decompress(content, workdir, name=flags.FLAGS[job].value, **options)
        atomic.write_bytes(path, restored)
        print(f"{len(content):,} bytes -> {len(restored):,} bytes, checksum right")
    print(f"written: {path} in {time.monotonic() - began:.1f} s")


def _scored(row: dict) -> str:
    limits = ""
    if row["bpc_low"] is not None:
        limits = f" (95 % interval {row['bpc_low']:.4f} to {row['bpc_high']:.4f})"
    return (
        f"{row['bpc']:.6f} bits per byte{limits}, {row['scored_bytes']:,} bytes in "
        f"windows of {row['window']}, {row['stride']} apart"
    )


def _compressed(length: int, result: compression.Compressed) -> str:
    size, header = len(result.file), compressed_file.HEADER_BYTES
    text = f"{length:,} bytes -> {size:,} bytes"
    if length:
        text += f", {8 * size / length:.4f} bits per byte, ratio {length / size:.3f}"
    return (
        f"{text}\npredicted {result.predicted_bits:,.1f} bits, coded in "
        f"{8 * (size - header):,} and a header of {8 * header}"
    )


if __name__ == "__main__":
    _define_flags()
    cli.run(main)
