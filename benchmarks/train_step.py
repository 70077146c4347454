"""Bytes per second of a training step, against the same model and update in PyTorch.

    python -m benchmarks.train_step --out=train_step.json
    python -m benchmarks.train_step --peer_python=PATH/TO/python   where torch is

Ours is the step of `train.py`: `make_train_step` with AdamW, the clip and the mesh that
the command has on this machine. The peers are `train_step_torch.py`: eager, compiled,
and the decoder of x-transformers. Ours and the first two start from the same weights
and take the same batch, and their losses over the first updates are compared. Each side
is one process that stays; the timed runs, of a few updates each, alternate between
all sides of all encodings. For each: the median and the spread (least and most) of
bytes per second, our median over that side's, and the time beside no encoding.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import numpy as np
from flax import nnx

from benchmarks.measure import table, write
from benchmarks.peer import Peer, save_weights
from rope_jax.experiment import host
from rope_jax.experiment.checkpoint import abstract_model
from rope_jax.experiment.config import MeshConfig, TrainConfig
from rope_jax.experiment.mesh import batch_sharding, make_mesh, param_shardings
from rope_jax.experiment.optimizer import make_optimizer
from rope_jax.experiment.train_step import TrainState, make_train_step
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder

_PEER = pathlib.Path(__file__).with_name("train_step_torch.py")
_TRAIN = TrainConfig(learning_rate=1e-3, warmup_steps=0, steps=10**9)

# layers, model_dim, heads, bytes of context, rows of a batch
SIZES = {"small": (4, 256, 4, 256, 16), "large": (6, 384, 6, 512, 8)}

_COLUMNS = {
    "size": "{size}",
    "mlp": "{mlp}",
    "encoding": "{encoding}",
    "side": "{side}",
    "bytes/s": "{bytes_per_second:,.0f}",
    "least": "{least:,.0f}",
    "most": "{most:,.0f}",
    "ours/this": "{ours_over_this:.2f}",
    "time/none": "{time_over_none:.2f}",
}


class Ours:
    """Our side, in this process."""

    name = "rope_jax"

    def __init__(self, config: DecoderConfig, params: dict, length: int, batch: int):
        self._mesh = mesh = make_mesh(MeshConfig())
        optimizer = make_optimizer(_TRAIN)
        state = TrainState(
            np.int32(0), params, optimizer.init(params), jax.random.key(0)
        )
        shardings = param_shardings(mesh, jax.eval_shape(lambda: state))
        self._state = jax.device_put(state, shardings)
        self._step = make_train_step(
            abstract_model(config)[0], optimizer, state_shardings=shardings
        )
        tokens = np.random.default_rng(1).integers(0, 256, (batch, length + 1))
        tokens = tokens.astype(np.int32)
        halves = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        self._batch = jax.device_put(halves, batch_sharding(mesh))
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.about = f"jax {jax.__version__}, {mesh.size} devices, {count:,} parameters"

    def run(self, steps: int) -> tuple[float, list[float]]:
        """Seconds of some updates, and the loss before each in nats."""
        began, losses = time.perf_counter(), []
        with jax.set_mesh(self._mesh):
            for _ in range(steps):
                self._state, sums = self._step(self._state, self._batch)
                losses.append(sums)
        jax.block_until_ready(self._state)
        seconds = time.perf_counter() - began
        return seconds, [float(x["nats"] / x["targets"]) for x in losses]


class Torch:
    """PyTorch, in a process of its own."""

    def __init__(self, name: str, command: list[str]):
        self._peer = Peer(name, command)
        self.name, self.about, self.close = name, "", self._peer.close

    def run(self, steps: int) -> tuple[float, list[float]]:
        """Seconds of some updates, and the loss before each in nats."""
        answer = self._peer.ask(steps=steps)
        self.about = answer["about"]
        return answer["seconds"], answer["losses"]


def peers(options, encoding: str, length: int, batch: int, weights) -> list[Torch]:
    """The sides in PyTorch that were asked for."""
    command = [options.peer_python, str(_PEER), str(weights)]
    command += [f"--encoding={encoding}", f"--batch={batch}", f"--length={length}"]
    for name in ("learning_rate", "weight_decay", "beta2", "clip_norm"):
        command.append(f"--{name}={getattr(_TRAIN, name)}")
    command.append(f"--threads={options.peer_threads}")
    found = [Torch("torch, eager", command)]
    if not options.no_compile:
        found.append(Torch("torch, compiled", [*command, "--compile"]))
    if not options.no_x_transformers:
        found.append(Torch("x-transformers", [*command, "--x_transformers"]))
    return found


def working(sides: list) -> list:
    """The sides that run, warm; those with our weights must have our losses."""
    kept = []
    for side in sides:
        try:
            losses = side.run(3)[1]
        except RuntimeError as failure:
            print(f"{side.name}: left out, {failure}", file=sys.stderr)
            continue
        if not kept:
            expected = losses
        elif side.name != "x-transformers":
            error = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            if error > 2e-3:
                raise SystemExit(f"{side.name} is another model: losses {losses}")
            side.about += f", losses equal to {error:.0e}"
        print(f"{side.name}: {side.about}", file=sys.stderr, flush=True)
        kept.append(side)
    return kept


def measure(options, size: str, mlp: str) -> list[dict]:
    """One row for each side of each encoding; all of them take turns."""
    layers, dim, heads, length, batch = SIZES[size]
    shape = {"num_layers": layers, "model_dim": dim, "num_heads": heads, "mlp": mlp}
    sides = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for encoding in options.encodings.split(","):
            config = DecoderConfig(encoding=encoding, head_dim=dim // heads, **shape)
            config.fire.length = config.learned.max_length = length
            model = Decoder(config, rngs=nnx.Rngs(0))
            params = nnx.to_pure_dict(nnx.split(model)[1])
            weights = pathlib.Path(folder) / f"{encoding}.npz"
            save_weights(params, weights)
            others = peers(options, encoding, length, batch, weights)
            for other in others:
                stack.callback(other.close)
            ours = Ours(config, params, length, batch)
            sides |= {(encoding, s.name): s for s in working([ours, *others])}
        rates = {key: [] for key in sides}
        for _ in range(options.repeats):
            for key, side in sides.items():
                seconds = side.run(options.steps)[0]
                rates[key].append(options.steps * batch * length / seconds)
    asked = {"size": size, "mlp": mlp}
    return [asked | _row(key, sides[key].about, rates) for key in sides]


def _row(key: tuple[str, str], about: str, rates: dict) -> dict:
    """One side of one encoding beside ours of the same, and beside no encoding."""
    encoding, side = key
    median = statistics.median(rates[key])
    row = {"encoding": encoding, "side": side, "about": about}
    row |= {"bytes_per_second": median, "least": min(rates[key])}
    row |= {"most": max(rates[key])}
    ours, none = rates[encoding, Ours.name], rates.get(("none", side))
    row["ours_over_this"] = statistics.median(ours) / median
    row["time_over_none"] = None if none is None else statistics.median(none) / median
    return row


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--mlps", default="gated,plain")
    parser.add_argument("--encodings", default="rope")
    parser.add_argument("--steps", type=int, default=4, help="updates of a timed run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--peer_threads", type=int, default=0, help="0: its choice")
    parser.add_argument("--no_compile", action="store_true", help="no torch.compile")
    parser.add_argument("--no_x_transformers", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    host.prepare(min(size[-1] for size in SIZES.values()))
    rows = []
    for size in options.sizes.split(","):
        for mlp in options.mlps.split(","):
            rows += measure(options, size, mlp)
    print(table(rows, _COLUMNS))
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    main()
