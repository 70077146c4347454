"""Time and bandwidth of the rotation of one array, against a copy and other libraries.

    python -m benchmarks.rope --out=results/speed/rope.json
    python -m benchmarks.rope --peer_python=PATH/TO/python   where torch and peers are

The copy is a jitted multiplication of the same array by a number: the same bytes read
and written, and so the most that a rotation can reach. "GB/s" is twice the bytes of the
array over the time, "over copy" that over the copy's, and "ours/this" the speed of
`rope_jax.rope` with the same layout over that side's. "includes" says what a call
computes: ours makes exact angles and their cosines and sines each time; another side
may have got tables before. Values are compared first, and "differs" is the largest
difference to ours: a side that keeps angles in float32 is off by more than one that is
given tables. JAX sides run on one device, in this process, which keeps its memory
(`host.prepare`); PyTorch sides are `rope_torch.py`, and --peer_memory says whether they
keep theirs or leave malloc as it is. Timed runs alternate: each is a call that is not
counted, since another side has had the caches, and a few that are.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import integers, spread, table, write
from benchmarks.peer import Peer
from rope_jax import rope
from rope_jax.experiment import host

_PEER = pathlib.Path(__file__).with_name("rope_torch.py")
_PEERS = ("transformers", "rotary-embedding-torch", "x-transformers")
# Largest difference to ours. The second is for angles that are kept in float32, whose
# spacing at position 2,047 is 1.2e-4, times values up to about 6.
_TOLERANCE = {"float32": (1e-5, 2e-3), "bfloat16": (0.1, 0.1)}
# What `host.prepare` sets with mallopt, for a process that is not ours.
_KEEP_MEMORY = (
    "MALLOC_ARENA_MAX=1",
    "MALLOC_MMAP_MAX_=0",
    f"MALLOC_TOP_PAD_={2**28}",
    f"MALLOC_TRIM_THRESHOLD_={2**31 - 1}",
)
_SETTLE = 0.2  # seconds until the threads of the side before wait no more

_COLUMNS = {
    "side": "{side}",
    "layout": "{layout}",
    "ms": "{ms:.2f}",
    "least": "{least_ms:.2f}",
    "most": "{most_ms:.2f}",
    "GB/s": "{gb_per_second:.2f}",
    "over copy": "{over_copy:.2f}",
    "ours/this": "{ours_over_this:.2f}",
    "differs": "{differs:.0e}",
    "includes": "{includes}",
}


class Jitted:
    """A function of the array, in this process."""

    about = f"jax {jax.__version__}"

    def __init__(self, name: str, layout: str, includes: str, function, *arguments):
        self.name, self.layout, self.includes = name, layout, includes
        self._run, self._arguments = jax.jit(function), arguments

    def rotated(self) -> np.ndarray:
        """The result, in float32."""
        return np.asarray(self._run(*self._arguments).astype(jnp.float32))

    def seconds(self, calls: int) -> float:
        """Seconds of one call, of some in a row after one that is not counted."""
        jax.block_until_ready(self._run(*self._arguments))
        began = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(self._run(*self._arguments))
        return (time.perf_counter() - began) / calls

    def close(self) -> None:
        """Nothing to end."""


class Torch:
    """A library for PyTorch, in a process of its own."""

    def __init__(self, library: str, options, folder: pathlib.Path, *, compiled: bool):
        self.name = f"{library}, {'compiled' if compiled else 'eager'}"
        self.layout = "half" if library == "transformers" else "interleaved"
        self._result = folder / f"{self.name}.npy"
        keep = ["env", *_KEEP_MEMORY] if options.peer_memory == "kept" else []
        command = [*keep, options.peer_python, str(_PEER), library]
        command += [str(folder / "x.npy"), f"--dtype={options.dtype}"]
        command += [f"--threads={options.peer_threads}", *["--compile"] * compiled]
        self._peer = Peer(self.name, command)
        self.about, self.includes, self.close = "", "", self._peer.close

    def rotated(self) -> np.ndarray:
        """The result, in float32; RuntimeError if it cannot work."""
        answer = self._peer.ask(save=str(self._result))
        self.about, self.includes = answer["about"], answer["includes"]
        return np.load(self._result)

    def seconds(self, calls: int) -> float:
        """Seconds of one call, of some in a row after one that is not counted."""
        return self._peer.ask(calls=calls)["seconds"]


def our_sides(x: jax.Array) -> list[Jitted]:
    """The copy, and `rope` as it is called."""
    angles = "angles, cos, sin"
    length, offset = x.shape[-3], jnp.int32(0)

    def scaled(x):
        return x * jnp.asarray(1.5, x.dtype)

    def moved(x, offset):
        return rope(x, offset + jnp.arange(length))

    def interleaved(x):
        return rope(x, layout="interleaved")

    return [
        Jitted("copy, scaled", "", "", scaled, x),
        Jitted("rope_jax", "half", angles, rope, x),
        Jitted("rope_jax, traced offset", "half", angles, moved, x, offset),
        Jitted("rope_jax, interleaved", "interleaved", angles, interleaved, x),
    ]


def equinox_side(x: jax.Array) -> Jitted:
    """Equinox's module over batch and heads; ImportError where it is missing."""
    import equinox

    module = equinox.nn.RotaryPositionalEmbedding(x.shape[-1], dtype=x.dtype)
    function = jax.vmap(jax.vmap(module, in_axes=1, out_axes=1))
    side = Jitted("equinox", "half", "tables made at compilation", function, x)
    side.about = f"equinox {equinox.__version__}"
    return side


def other_sides(options, x: jax.Array, folder: pathlib.Path) -> list:
    """What was asked for and is there."""
    sides = []
    try:
        sides.append(equinox_side(x))
    except ImportError as error:
        print(f"equinox: left out, {error}", file=sys.stderr)
    for library in options.peers.split(",") if options.peers else ():
        for compiled in (False,) if options.no_compile else (False, True):
            sides.append(Torch(library, options, folder, compiled=compiled))
    return sides


def working(sides: list, dtype: str) -> dict[str, dict]:
    """A row for each side that runs and is the same rotation; the rest is named."""
    rows, ours = {}, {}
    for side in sides:
        try:
            values = side.rotated()
        except RuntimeError as failure:
            print(f"{side.name}: left out, {failure}", file=sys.stderr)
            continue
        row = {"side": side.name, "layout": side.layout, "includes": side.includes}
        if side.layout:
            expected = ours.setdefault(side.layout, values)
            row["differs"] = float(np.abs(values - expected).max())
            # Sides that make tables before, as ours, are held to the first.
            float_angles = side.name.startswith(_PEERS[1:]) or side.name == "equinox"
            if row["differs"] > _TOLERANCE[dtype][float_angles]:
                reason = f"differs from ours by {row['differs']:.1e}"
                print(f"{side.name}: left out, {reason}", file=sys.stderr)
                continue
        rows[side.name] = row | {"about": side.about}
        print(f"{side.name}: {side.about}", file=sys.stderr, flush=True)
    return rows


def measure(sides: list, rows: dict[str, dict], options, size: int) -> list[dict]:
    """Fill the rows: `size` is the bytes read and written by a copy."""
    sides = [side for side in sides if side.name in rows]
    taken = {side.name: [] for side in sides}
    for round_number in range(1 + options.repeats):
        for side in sides:
            time.sleep(_SETTLE)
            seconds = side.seconds(options.calls)
            if round_number:
                taken[side.name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    ours = {"half": "rope_jax", "interleaved": "rope_jax, interleaved"}
    for name, row in rows.items():
        found = spread(taken[name])
        row["ms"] = 1e3 * found["seconds"]
        row |= {f"{key}_ms": 1e3 * found[key] for key in ("least", "most")}
        row["gb_per_second"] = size / medians[name] / 1e9
        row["over_copy"] = medians["copy, scaled"] / medians[name]
        if row["layout"]:
            row["ours_over_this"] = medians[name] / medians[ours[row["layout"]]]
    return list(rows.values())


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=integers, default=[8, 2048, 8, 64])
    parser.add_argument("--dtype", choices=tuple(_TOLERANCE), default="float32")
    parser.add_argument("--calls", type=int, default=5, help="of a timed run")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peers", default=",".join(_PEERS))
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--peer_threads", type=int, default=0, help="0: its choice")
    parser.add_argument("--peer_memory", choices=("kept", "default"), default="kept")
    parser.add_argument("--no_compile", action="store_true", help="no torch.compile")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    host.prepare()
    values = np.random.default_rng(0).normal(size=options.shape).astype(np.float32)
    x = jax.device_put(values.astype(jnp.dtype(options.dtype)), jax.devices()[0])
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        np.save(folder / "x.npy", values)
        sides = our_sides(x) + other_sides(options, x, folder)
        for side in sides:
            stack.callback(side.close)
        rows = working(sides, options.dtype)
        rows = measure(sides, rows, options, 2 * x.nbytes)
    asked = {"shape": options.shape, "dtype": options.dtype}
    asked |= {"device": x.device.device_kind, "peer_memory": options.peer_memory}
    print(table(rows, _COLUMNS))
    if options.out:
        write(options.out, [asked | row for row in rows])


if __name__ == "__main__":
    main()
