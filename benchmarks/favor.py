"""The error of FAVOR+ against exact softmax attention, by number of features.

    python -m benchmarks.favor --out=favor.json
    python -m benchmarks.favor --run=runs/performer-cpu/rope-seed0 --data=PATH/TO/enwik6

Without a run, queries, keys and values are Gaussian and |x'| is set: x' = x / H**0.25,
whose products are the logarithms of the weights. An untrained model has |x'| = H**0.25,
2.2 for a head dim of 24, and so has any that `model.qk_norm` normalizes, up to its
trained scale. With a run they are those of its layers, before any rotation.

For each number of features M, over independent projections:

* kernel bias: mean of (estimate / exact - 1) of exp(q' . k'), each query t with key
  t // 2, and its standard error over the draws;
* kernel error: root-mean-square of the same;
* output error: of causal attention, relative to the root-mean-square of the exact
  output: mean over the draws, and standard deviation from draw to draw.

The slope is that of log(error) over log(M): -0.5 is 1/sqrt(M). The relative variance of
one feature is exp(|q' + k'|**2) - 1. Where that is large, rare draws carry the mean: an
affordable number of them shows a bias below 0 and a slope that is too flat.
"""

import argparse
import functools
import json
import math
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rope_jax import attention
from rope_jax.experiment.checkpoint import load_params
from rope_jax.experiment.data import sources
from rope_jax.functional.feature_maps import favor_projection, favor_softmax
from rope_jax.functional.linear_attention import linear_attention
from rope_jax.nn.projections import Projections


def gaussian(norms: list[float], length: int, head_dim: int, seed: int) -> dict:
    """Queries, keys and values `[T, 1, H]` by label; |x'| is about each norm."""
    rng = np.random.default_rng(seed)
    made = {}
    for norm in norms:
        query, key, value = rng.standard_normal((3, length, 1, head_dim))
        size = norm * head_dim**-0.25
        arrays = size * query, size * key, value
        made[f"gaussian {norm:g}"] = [jnp.asarray(x, jnp.float32) for x in arrays]
    return made


def trained(run_dir: str, path: str) -> dict:
    """Queries, keys and values `[T, N, H]` of each layer of a run, by label."""
    config, graphdef, params, _ = load_params(run_dir)
    config.data.path = path or config.data.path
    text = sources.load(config.data).validation[: config.data.length]
    heads, seen = Projections.heads, []

    def record(self, x):
        arrays = heads(self, x)
        jax.debug.callback(lambda *x: seen.append(x), *arrays, ordered=True)
        return arrays

    with mock.patch.object(Projections, "heads", record):
        nnx.merge(graphdef, params)(jnp.asarray(text, jnp.int32)[None])
        jax.effects_barrier()
    made = {}
    for layer, arrays in enumerate(seen):
        query, *others = (jnp.asarray(x[0], jnp.float32) for x in arrays)
        group = query.shape[1] // others[0].shape[1]
        others = [jnp.repeat(x, group, axis=1) for x in others]
        made[f"layer {layer}"] = [query, *others]
    return made


@functools.partial(jax.jit, static_argnames=("num_features", "draws"))
def errors(query, key, value, seed, *, num_features: int, draws: int):
    """Relative kernel estimates `[draws, T, N]` and output errors `[draws]`."""
    exact = attention(query, key, value)
    width = query.shape[-1]
    half = key[jnp.arange(len(key)) // 2]
    log_kernel = jnp.sum(query * half, axis=-1) * width**-0.5

    def one(draw_key):
        features = favor_softmax(favor_projection(draw_key, width, num_features))
        phi_q, phi_k = features(query, False), features(half, False)
        product = jnp.sum(phi_q.values * phi_k.values, axis=-1)
        logs = phi_q.log_scale + phi_k.log_scale - log_kernel
        out = linear_attention(query, key, value, feature_map=features)
        gap = jnp.sum((out - exact) ** 2) / jnp.sum(exact**2)
        return product * jnp.exp(logs), jnp.sqrt(gap)

    return jax.lax.map(one, jax.random.split(jax.random.key(seed), draws))


def measure(label: str, arrays: list, options: argparse.Namespace) -> list[dict]:
    """A row for each number of features."""
    width = arrays[0].shape[-1]
    norms = [float(jnp.sqrt(jnp.mean(x**2) * width**0.5)) for x in arrays[:2]]
    rows = []
    for num_features in options.features:
        sizes = {"num_features": num_features, "draws": options.draws}
        ratio, gap = (
            np.asarray(x, np.float64) for x in errors(*arrays, options.seed, **sizes)
        )
        by_draw = ratio.mean((1, 2)) - 1
        row = {"source": label, "head_dim": width} | sizes
        row |= {"query_norm": norms[0], "key_norm": norms[1]}
        row["kernel_bias"] = by_draw.mean()
        row["kernel_bias_se"] = by_draw.std(ddof=1) / math.sqrt(options.draws)
        row["kernel_error"] = math.sqrt(((ratio - 1) ** 2).mean())
        row["output_error"], row["output_error_sd"] = gap.mean(), gap.std(ddof=1)
        rows.append(row)
    return rows


def slope(rows: list[dict], name: str) -> float:
    """Of a straight line through the logarithms of error and number of features."""
    points = np.log([(row["num_features"], row[name]) for row in rows])
    return float(np.polyfit(*points.T, 1)[0])


def report(rows: list[dict]) -> dict:
    """Print the rows of one source; return its slopes."""
    first = rows[0]
    print(
        f"\n{first['source']}: head dim {first['head_dim']}, |q'| "
        f"{first['query_norm']:.2f}, |k'| {first['key_norm']:.2f}\n"
        "     M     kernel bias   kernel error    output error"
    )
    for row in rows:
        print(
            f"{row['num_features']:6d}  {row['kernel_bias']:+.3f} ± "
            f"{row['kernel_bias_se']:.3f}   {row['kernel_error']:12.3f}   "
            f"{row['output_error']:.3f} ± {row['output_error_sd']:.3f}"
        )
    found = {name: slope(rows, name) for name in ("kernel_error", "output_error")}
    print("slope:", ", ".join(f"{name} {value:+.2f}" for name, value in found.items()))
    return {"source": first["source"]} | found


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ints = functools.partial(_numbers, int)
    floats = functools.partial(_numbers, float)
    parser.add_argument("--features", type=ints, default=[16, 32, 64, 128, 256, 1024])
    parser.add_argument("--norms", type=floats, default=[0.5, 1.0, 1.5, 2.2, 3.0])
    parser.add_argument("--head_dim", type=int, default=24)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--run", help="measure the layers of this run instead")
    parser.add_argument("--data", default="", help="the bytes that --run was given")
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.run:
        found = trained(options.run, options.data)
    else:
        found = gaussian(options.norms, options.length, options.head_dim, options.seed)
    rows, slopes = [], []
    for label, arrays in found.items():
        rows += (part := measure(label, arrays, options))
        slopes.append(report(part))
    if options.out:
        result = json.dumps({"rows": rows, "slopes": slopes}, indent=1)
        options.out.write_text(result + "\n")


def _numbers(kind, text: str) -> list:
    return [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
