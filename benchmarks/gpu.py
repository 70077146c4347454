"""Training steps and the rotation on an NVIDIA GPU, in one run of a few minutes.

    python -m benchmarks.gpu --out=gpu.json
    python -m benchmarks.gpu --minutes=4 --sizes=100m --encodings=rope,alibi
    python -m benchmarks.gpu --any_device --sizes=tiny      to try the program itself

Two tables. First the rotation (`rope_jax.rope`) against a copy of the same array. Then
the step of `train.py` in bfloat16 with float32 parameters: its time, tokens (bytes) per
second, and MFU, which is the arithmetic that the model needs
(`rope_jax.experiment.workload`: 6 operations for each matrix parameter and token, and
those of causal attention) over what the chips could do at the peak that their maker
states (`chips`); "-" for a device that is not listed there. "auto" is what a run takes
unless told otherwise, and stderr says what it was; another implementation is named, and
one that refuses an encoding, or needs more memory than there is, says so in its row.
No cell is begun that would not be over, judged by the slowest so far, within
--minutes; such cells are named. With several devices the rows of a batch are split over
all of them.
"""

import argparse
import functools
import logging
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import spread, table, temporary_bytes, write
from rope_jax import rope
from rope_jax.experiment.abstract_step import state_init, train_call
from rope_jax.experiment.chips import CHIPS, Chip
from rope_jax.experiment.config import Config, resolve
from rope_jax.experiment.mesh import make_mesh
from rope_jax.experiment.workload import work
from rope_jax.functional.attention import IMPLEMENTATIONS
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.encodings import ENCODINGS

# layers, model_dim, heads, feed-forward width, bytes of context, rows of a batch
SIZES = {
    "10m": (8, 320, 5, 896, 1024, 64),
    "100m": (14, 768, 12, 2048, 1024, 32),
    "400m": (24, 1152, 18, 3072, 1024, 16),
    "tiny": (2, 64, 2, 128, 64, 2),
}
_ROTATED = {"tiny": (2, 64, 2, 64)}  # of the others: see rotations
_REPEATS, _SECONDS = 5, 0.3  # timed runs, and how long one of them is to take

_STEP_COLUMNS = {
    "size": "{size}",
    "encoding": "{encoding}",
    "implementation": "{implementation}",
    "ms": "{ms:.2f}",
    "least": "{least_ms:.2f}",
    "most": "{most_ms:.2f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "MFU": "{mfu:.3f}",
    "over auto": "{over_auto:.2f}",
    "temporary GiB": "{temporary_gib:.2f}",
    "compiled s": "{compile_seconds:.0f}",
    "": "{reason}",
}
_ROPE_COLUMNS = {
    "dtype": "{dtype}",
    "what": "{what}",
    "ms": "{ms:.3f}",
    "least": "{least_ms:.3f}",
    "most": "{most_ms:.3f}",
    "GB/s": "{gb_per_second:,.0f}",
    "over copy": "{over_copy:.2f}",
    "of peak": "{of_peak:.2f}",
}


class Clock:
    """What is left of the minutes that a run was given."""

    def __init__(self, minutes: float):
        self._ends = time.monotonic() + 60 * minutes
        self._slowest = 0.0

    def allows_another(self) -> bool:
        """Whether a cell as slow as the slowest so far would still fit."""
        return time.monotonic() + self._slowest < self._ends

    def timed(self, cell) -> dict:
        """The row of a cell, whose time is remembered."""
        began = time.monotonic()
        row = cell()
        self._slowest = max(self._slowest, time.monotonic() - began)
        return row


def chip_of(device: jax.Device) -> Chip | None:
    """What its maker states of a device; None for one that is not known.

    The table has the SXM modules: cards of the same name are slower.
    """
    kind = device.device_kind.lower()
    if device.platform != "gpu" or "pcie" in kind or "nvl" in kind:
        return None
    return next((chip for name, chip in CHIPS.items() if name in kind), None)


def timed_runs(run) -> list[float]:
    """Seconds of a call, of several runs of enough calls; `run` may be warm or not.

    Calls are queued, as in training, and the last one waited for.
    """
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - began
    calls, taken = max(2, min(1000, int(_SECONDS / once))), []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - began) / calls)
    return taken


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median, least and most, as keys of a row."""
    found = spread(seconds)
    row = {"ms": 1e3 * found["seconds"]}
    return row | {f"{key}_ms": 1e3 * found[key] for key in ("least", "most")}


def rotations(size: str) -> list[dict]:
    """The copy and the rotation of one array, in both dtypes, on one device."""
    chip, rows = chip_of(jax.devices()[0]), []
    for dtype in ("float32", "bfloat16"):
        shape = _ROTATED.get(size, (8, 4096, 16, 128))
        x = jax.random.normal(jax.random.key(0), shape, jnp.dtype(dtype))
        x = jax.device_put(x, jax.devices()[0])
        sides = {
            "copy, scaled": lambda x: x * jnp.asarray(1.5, x.dtype),
            "rope, half": rope,
            "rope, interleaved": functools.partial(rope, layout="interleaved"),
        }
        copied = None
        for what, function in sides.items():
            taken = timed_runs(functools.partial(jax.jit(function), x))
            median = statistics.median(taken)
            copied = copied or median
            row = {"dtype": dtype, "what": what, "shape": shape, **milliseconds(taken)}
            row["gb_per_second"] = 2 * x.nbytes / median / 1e9
            row["over_copy"] = copied / median
            row["of_peak"] = chip and 2 * x.nbytes / median / chip.memory_bandwidth
            rows.append(row)
    return rows


def config_of(size: str, encoding: str, implementation: str) -> Config:
    """The run that a cell is a step of."""
    layers, dim, heads, width, length, rows = SIZES[size]
    config = Config(
        model=DecoderConfig(
            encoding=encoding,
            num_layers=layers,
            model_dim=dim,
            num_heads=heads,
            head_dim=dim // heads,
            mlp_dim=width,
            dtype="bfloat16",
            attention_implementation=implementation,
        )
    )
    config.data.length, config.train.batch_size = length, rows * jax.device_count()
    return resolve(config)


def step_cell(size: str, encoding: str, implementation: str) -> dict:
    """One row: a train step, compiled and timed, or the reason why not."""
    row = {"size": size, "encoding": encoding, "implementation": implementation}
    began = time.perf_counter()
    try:
        config = config_of(size, encoding, implementation)
        mesh = make_mesh(config.mesh)
        with jax.set_mesh(mesh):
            step, arguments = train_call(config, mesh)
            compiled = step.lower(*arguments).compile()
            row["compile_seconds"] = time.perf_counter() - began
            row["temporary_gib"] = temporary_bytes(compiled) / 2**30
            return row | _timed_step(config, compiled, *arguments) | {"reason": ""}
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return row | {"reason": f"refused: {str(error).splitlines()[0][:145]}"}


def _timed_step(config: Config, step, abstract, batch) -> dict:
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    state = jax.jit(state_init(config), out_shardings=places)(jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = {
        name: jax.device_put(
            rng.integers(0, 256, leaf.shape, dtype=np.int32), leaf.sharding
        )
        for name, leaf in batch.items()
    }

    def run():
        nonlocal state  # the step consumes it
        state, sums = step(state, tokens)
        return sums

    taken = timed_runs(run)
    sums, seconds = run(), statistics.median(taken)
    made, chip = work(config), chip_of(jax.devices()[0])
    peak = chip and chip.flops * jax.device_count()
    return {
        **milliseconds(taken),
        "parameters": made.parameters,
        "rows": config.train.batch_size,
        "length": config.data.length,
        "tokens_per_second": config.train.batch_size * config.data.length / seconds,
        "model_flops": made.model_flops,
        "mfu": peak and made.model_flops / seconds / peak,
        "nats": float(sums["nats"] / sums["targets"]),
    }


def steps(options, clock: Clock) -> list[dict]:
    """The rows of all cells: "auto" of each size and encoding first, then the others.

    The other implementations begin with the last size, where they differ most.
    """
    sizes, encodings = options.sizes, options.encodings
    rows, auto = [], {}
    for implementation in options.implementations:
        for size in sizes if implementation == "auto" else reversed(sizes):
            for encoding in encodings:
                cell = functools.partial(step_cell, size, encoding, implementation)
                if not clock.allows_another():
                    left = {"size": size, "encoding": encoding}
                    left |= {"implementation": implementation}
                    rows.append(left | {"reason": "left out: the minutes were used up"})
                    continue
                print(f"{size} {encoding} {implementation}", file=sys.stderr)
                row = clock.timed(cell)
                auto.setdefault((size, encoding), row.get("ms"))
                if row.get("ms") and auto[size, encoding]:
                    row["over_auto"] = row["ms"] / auto[size, encoding]
                rows.append(row)
    return rows


def _names(text: str, valid: tuple[str, ...]) -> list[str]:
    """The names that a flag lists, each of which has to be one of those."""
    names = text.split(",")
    for name in names:
        if name not in valid:
            raise argparse.ArgumentTypeError(
                f"must be some of {', '.join(valid)}, got {name!r}"
            )
    return names


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, valid in (
        ("sizes", "10m,100m,400m", SIZES),
        ("encodings", "rope,alibi,t5,none", ENCODINGS),
        ("implementations", "auto,cudnn,xla,blockwise", ("auto", *IMPLEMENTATIONS)),
    ):
        kind = functools.partial(_names, valid=tuple(valid))
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--any_device", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.any_device:
        raise SystemExit(
            f"no GPU here, but {device.device_kind}: add --any_device to measure it"
        )
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rope_jax").setLevel(logging.INFO)
    clock = Clock(options.minutes)
    found = {"device": device.device_kind, "devices": jax.device_count()}
    rotated = rotations(options.sizes[0])
    print(table(rotated, _ROPE_COLUMNS), flush=True)
    stepped = steps(options, clock)
    print(f"\n{table(stepped, _STEP_COLUMNS)}")
    if options.out:
        rows = [{"part": "rope"} | row for row in rotated]
        rows += [{"part": "step"} | row for row in stepped]
        write(options.out, [found | row for row in rows])


if __name__ == "__main__":
    main()
