"""The error of FAVOR+ against exact softmax attention, by number of features.

    python benchmarks/favor.py [--head_dim=24] [--out=favor.json]

Queries and keys are Gaussian, scaled to a norm; `root-mean-square x'` is that of
x' = x / H**0.25, whose products are the logarithms of the weights. A query or key of
an untrained model, and one that `model.qk_norm` has normalized, has |x'| = H**0.25:
2.2 for a head dim of 24. `--norms` takes others, such as those of a trained model,
which `--run=DIR` reads from a checkpoint, layer by layer.

For each norm and number of features M, over `--draws` independent projections:

* kernel_bias: the mean estimate of exp(q' . k') over the exact one, minus 1, averaged
  over pairs, and its standard error over the draws;
* kernel_error: root-mean-square error of the estimate over the exact one;
* output_error: of causal attention outputs, relative to the root-mean-square of the
  exact ones: mean over draws, and standard deviation from draw to draw.

Then the slope of log(error) over log(M): -0.5 is 1/sqrt(M). Where norms are large the
kernel's estimate is skewed: a few rare draws carry its mean, so that any number of
draws that is affordable shows a bias below 0 and a slope that is too flat.
"""

import argparse
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from rope_jax import attention
from rope_jax.functional.feature_maps import favor_projection, favor_softmax
from rope_jax.functional.linear_attention import linear_attention


def sample(length: int, head_dim: int, norm: float, seed: int) -> list[jax.Array]:
    """Queries, keys and values `[T, 1, H]`; |x'| is about `norm` in the first two."""
    rng = np.random.default_rng(seed)
    size = norm * head_dim**-0.25
    arrays = rng.standard_normal((3, length, 1, head_dim)) * [[[[size]]]] * 2
    arrays[2] = rng.standard_normal((length, 1, head_dim))
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@functools.partial(jax.jit, static_argnames=("num_features", "draws"))
def errors(query, key, value, seed, *, num_features: int, draws: int):
    """Relative kernel estimates `[draws, T]` and output errors `[draws]`."""
    exact = attention(query, key, value)
    log_kernel = jnp.einsum("tnh,tnh->t", query, key) * query.shape[-1] ** -0.5

    def one(draw_key):
        features = favor_softmax(
            favor_projection(draw_key, query.shape[-1], num_features)
        )
        phi_q, phi_k = features(query, False), features(key, False)
        product = jnp.sum(phi_q.values * phi_k.values, axis=-1)
        logs = phi_q.log_scale + phi_k.log_scale
        ratio = product[:, 0] * jnp.exp(logs[:, 0] - log_kernel)
        out = linear_attention(query, key, value, feature_map=features)
        gap = jnp.sum((out - exact) ** 2) / jnp.sum(exact**2)
        return ratio, jnp.sqrt(gap)

    return jax.lax.map(one, jax.random.split(jax.random.key(seed), draws))


def measure(options: argparse.Namespace, norm: float) -> list[dict]:
    """A row for each number of features."""
    arrays = sample(options.length, options.head_dim, norm, options.seed)
    rows = []
    for num_features in options.features:
        ratio, gap = (
            np.asarray(x, np.float64)
            for x in errors(
                *arrays, options.seed, num_features=num_features, draws=options.draws
            )
        )
        by_draw = ratio.mean(-1) - 1
        rows.append(
            {
                "head_dim": options.head_dim,
                "norm": norm,
                "num_features": num_features,
                "draws": options.draws,
                "kernel_bias": by_draw.mean(),
                "kernel_bias_se": by_draw.std(ddof=1) / math.sqrt(options.draws),
                "kernel_error": math.sqrt(((ratio - 1) ** 2).mean()),
                "output_error": gap.mean(),
                "output_error_sd": gap.std(ddof=1),
            }
        )
    return rows


def slope(rows: list[dict], name: str) -> float:
    """Of a straight line through the logarithms of error and number of features."""
    points = np.log([(row["num_features"], row[name]) for row in rows])
    return float(np.polyfit(*points.T, 1)[0])


def report(rows: list[dict]) -> list[dict]:
    """Print the rows of one norm; return its slopes."""
    norm = rows[0]["norm"]
    print(f"\n|x'| = {norm:.2f}, head dim {rows[0]['head_dim']}")
    print("     M    kernel bias        kernel error   output error")
    for row in rows:
        print(
            f"{row['num_features']:6d}   {row['kernel_bias']:+.3f} ± "
            f"{row['kernel_bias_se']:.3f}   {row['kernel_error']:12.3f}   "
            f"{row['output_error']:.3f} ± {row['output_error_sd']:.3f}"
        )
    found = {name: slope(rows, name) for name in ("kernel_error", "output_error")}
    print("slope", ", ".join(f"{name} {value:+.2f}" for name, value in found.items()))
    return {"norm": norm} | found


def trained_norms(run_dir: str, path: str) -> list[float]:
    """Root-mean-square |x'| of queries and keys in each layer of a run."""
    from flax import nnx

    from rope_jax.experiment.checkpoint import load_params
    from rope_jax.experiment.data import sources

    config, graphdef, params, _ = load_params(run_dir)
    config.data.path = path or config.data.path
    text = sources.load(config.data).validation[: 8 * config.data.length]
    tokens = jnp.asarray(text, jnp.int32).reshape(8, -1)
    return norms_of(nnx.merge(graphdef, params), tokens)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ints = functools.partial(_numbers, int)
    floats = functools.partial(_numbers, float)
    parser.add_argument("--features", type=ints, default=[16, 32, 64, 128, 256, 1024])
    parser.add_argument("--norms", type=floats, default=[0.5, 1.0, 1.5, 2.2, 3.0])
    parser.add_argument("--head_dim", type=int, default=24)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    rows, slopes = [], []
    for norm in options.norms:
        rows += (found := measure(options, norm))
        slopes.append(report(found))
    if options.out:
        result = {"rows": rows, "slopes": slopes}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _numbers(kind, text: str) -> list:
    return [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
