"""Peak memory of evaluating long windows, by encoding and length.

    python -m benchmarks.long_eval --out=results/speed/long_eval.json
    python -m benchmarks.long_eval --encodings=rope,alibi --lengths=8192,131072

What eval.py does with one window of each length, all of its bytes scored, by a model
with random weights. Each measurement is a process of its own. "peak" is what the
process (on an accelerator: the device) held at most while it compiled and ran, above
what it held before, with the model in it and a window of 256 bytes evaluated;
"temporary" is what the compiled program asks for besides its arguments and results.
"growth" is the peak over that at half the length: 2 is linear, 4 is quadratic.
"""

import argparse
import contextlib
import json
import pathlib
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.measure import integers, table, temporary_bytes, write
from rope_jax.experiment.config import Config, resolve
from rope_jax.experiment.loss import token_nats
from rope_jax.experiment.plans import Windows
from rope_jax.experiment.scoring import ModelApply, score, window_values
from rope_jax.nn.decoder import Decoder

_COLUMNS = {
    "encoding": "{encoding}",
    "bytes": "{length:,}",
    "seconds": "{seconds:.1f}",
    "model MiB": "{model_mib:.0f}",
    "temporary MiB": "{temporary_mib:.0f}",
    "peak MiB": "{peak_mib:.0f}",
    "growth": "{growth:.2f}",
    "": "{reason}",
}
_WARM = 256  # bytes of the window that is evaluated first


def make_model(encoding: str, options) -> tuple[ModelApply, dict]:
    """A model and random weights."""
    config = Config()
    config.data.length = options.train_length
    sizes = {"num_layers": options.layers, "model_dim": options.model_dim}
    sizes |= {"num_heads": options.heads, "dtype": options.dtype}
    sizes["head_dim"] = options.model_dim // options.heads
    for name, value in (sizes | {"encoding": encoding}).items():
        setattr(config.model, name, value)
    model = resolve(config).model

    @jax.jit
    def init():
        return nnx.to_pure_dict(nnx.split(Decoder(model, rngs=nnx.Rngs(0)))[1])

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))
    return ModelApply(graphdef), init()


def one_window(length: int) -> tuple[Windows, np.ndarray]:
    """A window of which every target is scored, and a text for it."""
    data = np.random.default_rng(0).integers(0, 256, length + 1).astype(np.uint8)
    return Windows(length, *(np.array([n]) for n in (0, 0, length))), data


def measure_here(encoding: str, length: int, options) -> dict:
    """One row, measured in this process, which must be a new one."""
    apply, params = make_model(encoding, options)
    score(apply, params, *one_window(_WARM))
    before = _held(peak=False)
    _forget_peak()
    began = time.perf_counter()
    score(apply, params, *one_window(length))
    seconds = time.perf_counter() - began
    peak = _held(peak=True) - before
    tokens = jax.ShapeDtypeStruct((1, length), jnp.uint8)
    program = window_values.lower(
        apply, params, tokens, tokens, None, mesh=None, statistic=token_nats
    ).compile()
    return {
        "seconds": seconds,
        "model_mib": sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20,
        "temporary_mib": temporary_bytes(program) / 2**20,
        "peak_mib": peak / 2**20,
    }


def measure(encoding: str, length: int, options) -> dict:
    """One row, measured in a process of its own; with a reason if that failed."""
    command = [sys.executable, "-m", "benchmarks.long_eval", "--here"]
    command += [f"--encodings={encoding}", f"--lengths={length}"]
    for name in ("train_length", "layers", "model_dim", "heads", "dtype"):
        command.append(f"--{name}={getattr(options, name)}")
    row = {"encoding": encoding, "length": length, "reason": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return row | json.loads(done.stdout.splitlines()[-1])
    said = done.stderr.strip().splitlines()
    return row | {"reason": said[-1] if said else f"exit code {done.returncode}"}


def _held(*, peak: bool) -> int:
    """Bytes on the device, if it says, or else of this process."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use" if peak else "bytes_in_use"]
    name = "VmHWM:" if peak else "VmRSS:"
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_peak() -> None:
    """Count the peak of this process from here on, where Linux lets us."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    doubled = [8192 * 2**i for i in range(5)]
    encodings = "rope,alibi,t5,kerple,fire"
    parser.add_argument("--encodings", type=lambda s: s.split(","), default=encodings)
    parser.add_argument("--lengths", type=integers, default=doubled)
    parser.add_argument("--train_length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--model_dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(*options.encodings, *options.lengths, options)))
        return
    rows, peaks = [], {}
    for encoding in options.encodings:
        for length in options.lengths:
            row = measure(encoding, length, options)
            peaks[encoding, length] = row.get("peak_mib")
            half = peaks.get((encoding, length // 2))
            if half and row.get("peak_mib"):
                row["growth"] = row["peak_mib"] / half
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if options.out:
                write(options.out, rows)
    print(table(rows, _COLUMNS))


if __name__ == "__main__":
    main()
