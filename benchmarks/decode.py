"""Bytes per second of decoding, against the same model in PyTorch with its cache.

    python -m benchmarks.decode --out=decode.json
    python -m benchmarks.decode --peer_python=PATH/TO/python   where torch is installed

Both sides take the most likely byte each time, from one byte on to the length, with a
cache of that length, the same weights and as many threads as they choose. Ours is
`rope_jax.nn.generation.stream_over` with each core a device, as in the `sample`
command; the peers are `decode_torch.py`, eager and compiled. Each side is one process
that stays. The timed runs alternate between them, after one of each that is not timed.
First the logits of 64 random bytes are compared, so that it is the same model. For each
batch and length: the median and the spread (least and most) of bytes per second of the
whole batch, and our median over that side's.
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
from flax import nnx

from benchmarks.measure import integers, write
from benchmarks.peer import Peer, save_weights
from rope_jax.experiment import host
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.decoding import extend, init_cache
from rope_jax.nn.generation import stream_over
from rope_jax.nn.sampling import Sampling

_PEER = pathlib.Path(__file__).with_name("decode_torch.py")
_CHECKED = 64  # bytes whose logits are compared


class Ours:
    """Our side, in this process."""

    name = "rope_jax"

    def __init__(self, graphdef, params):
        self.graphdef, self.params = graphdef, params
        kind, count = jax.devices()[0].device_kind, jax.device_count()
        self.about = f"jax {jax.__version__}, {count} devices of kind {kind}"

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits `[T, B, V]` after tokens `[B, T]`."""

        @jax.jit
        def run(params):
            model = nnx.merge(self.graphdef, params)
            return extend(model, jnp.asarray(tokens), init_cache(model, *tokens.shape))

        return np.swapaxes(run(self.params)[0], 0, 1)

    def seconds(self, batch: int, length: int) -> float:
        """What `length` bytes for each of `batch` rows take, making the cache too."""
        model = nnx.merge(self.graphdef, self.params)
        prompts = np.full((batch, 1), 10, np.int32)
        began = time.perf_counter()
        parts = stream_over(
            jax.devices(),
            self.graphdef,
            self.params,
            prompts,
            make_cache=lambda rows: init_cache(model, rows, length + 1),
            max_new_tokens=length,
            key=jax.random.key(0),
            sampling=Sampling(temperature=0.0),
        )
        for _ in parts:
            pass
        return time.perf_counter() - began


class Torch:
    """PyTorch, in a process of its own."""

    def __init__(self, options, weights: pathlib.Path, *, compiled: bool):
        self.name = "torch, compiled" if compiled else "torch, eager"
        self.about = ""
        command = [options.peer_python, str(_PEER), str(weights)]
        command += [f"--threads={options.peer_threads}", *["--compile"] * compiled]
        self._peer = Peer(self.name, command)
        self.close = self._peer.close

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits `[T, B, V]` after tokens `[B, T]`; RuntimeError if it cannot work."""
        batch, length = tokens.shape
        answer = self._peer.ask(batch=batch, length=length, tokens=tokens.tolist())
        self.about = f"torch {answer['version']}, {answer['threads']} threads"
        return np.array(answer["logits"])

    def seconds(self, batch: int, length: int) -> float:
        """What `length` bytes for each of `batch` rows take."""
        return self._peer.ask(batch=batch, length=length)["seconds"]


def make_model(options) -> tuple[nnx.GraphDef, dict]:
    """A decoder with random weights, the head's too."""
    config = DecoderConfig(
        num_layers=options.layers,
        model_dim=options.model_dim,
        num_heads=options.heads,
        head_dim=options.model_dim // options.heads,
    )
    graphdef, shapes = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    )
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        centre = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(rng.normal(centre, 0.05, leaf.shape), jnp.float32)

    shapes = nnx.to_pure_dict(shapes)
    return graphdef, jax.tree_util.tree_map_with_path(draw, shapes)


def working(ours: Ours, peers: list[Torch]) -> list:
    """The sides that give the same logits; one that cannot run is named."""
    tokens = np.random.default_rng(0).integers(0, 256, (2, _CHECKED))
    expected, sides = ours.logits(tokens), [ours]
    for peer in peers:
        try:
            error = np.abs(peer.logits(tokens) - expected).max()
        except RuntimeError as failure:
            print(f"{peer.name}: left out, {failure}")
            continue
        if error > 1e-3:
            raise SystemExit(f"{peer.name} is another model: logits differ by {error}")
        print(f"{peer.name}: {peer.about}, logits equal to {error:.1e}")
        sides.append(peer)
    print(f"{ours.name}: {ours.about}\n")
    return sides


def measure(sides: list, batch: int, length: int, repeats: int) -> list[dict]:
    """One row for each side: bytes per second of the batch."""
    rates = {side.name: [] for side in sides}
    for side in sides:
        side.seconds(batch, length)  # compiles, and is not counted
    for _ in range(repeats):
        for side in sides:
            rates[side.name].append(batch * length / side.seconds(batch, length))
    ours = statistics.median(rates[sides[0].name])
    return [
        {
            "side": side.name,
            "about": side.about,
            "batch": batch,
            "length": length,
            "bytes_per_second": (median := statistics.median(rates[side.name])),
            "least": min(rates[side.name]),
            "most": max(rates[side.name]),
            "ours_over_this": ours / median,
        }
        for side in sides
    ]


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=integers, default=[1, 8, 32])
    parser.add_argument("--lengths", type=integers, default=[256, 1024, 2048])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--model_dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--peer_threads", type=int, default=0, help="0: its choice")
    parser.add_argument("--no_compile", action="store_true", help="no torch.compile")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    host.prepare()
    graphdef, params = make_model(options)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        weights = pathlib.Path(folder) / "weights.npz"
        save_weights(params, weights)
        peers = []
        for compiled in (False,) if options.no_compile else (False, True):
            peers.append(Torch(options, weights, compiled=compiled))
            stack.callback(peers[-1].close)
        rows = table(working(Ours(graphdef, params), peers), options)
    if options.out:
        write(options.out, rows)


def table(sides: list, options) -> list[dict]:
    """All rows, printed as they are measured."""
    rows = []
    print("side             batch length  bytes/s    least     most  ours/this")
    for batch in options.batches:
        for length in options.lengths:
            for row in measure(sides, batch, length, options.repeats):
                rows.append(row)
                print(
                    f"{row['side']:16} {batch:5} {length:6} "
                    f"{row['bytes_per_second']:8,.0f} {row['least']:8,.0f} "
                    f"{row['most']:8,.0f} {row['ours_over_this']:10.2f}",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    main()
