"""Time and memory of linear and of softmax attention against the length.

    python -m benchmarks.linear_attention --out=linear_attention.json

Forward passes of one row, compiled ahead; for each length: seconds (the least of
`--repeats`, after one that is not counted), nanoseconds per token, and the bytes that
the compiled program needs besides its inputs. Softmax attention is the one that
`rope_jax.attention` chooses; it stops at `--softmax_to` tokens, since it takes 4 times
as long for twice the length. "growth" is the time per token over that at the first
length: 1 is linear.
"""

import argparse
import json
import pathlib
import time

import jax
import jax.numpy as jnp

from benchmarks.measure import integers
from rope_jax import attention, frequencies, rope
from rope_jax.functional.feature_maps import favor_projection, favor_softmax
from rope_jax.functional.linear_attention import linear_attention


def forms(head_dim: int, num_features: int) -> dict:
    """The two attentions with RoPE, by name, as functions of `[T, N, H]` arrays."""
    projection = favor_projection(jax.random.key(0), head_dim, num_features)

    def linear(query, key, value):
        return linear_attention(
            query,
            key,
            value,
            feature_map=favor_softmax(projection),
            frequencies=frequencies.default(num_features),
        )

    def softmax(query, key, value):
        return attention(rope(query), rope(key), value)

    return {"linear": linear, "softmax": softmax}


def measure(run, shape: tuple[int, ...], dtype, repeats: int) -> tuple[float, int]:
    """Least seconds of a forward pass, and its bytes besides the inputs."""
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = [jax.random.normal(key, shape, dtype) for key in keys]
    compiled = jax.jit(run).lower(*arrays).compile()
    sizes = compiled.memory_analysis()
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        taken.append(time.perf_counter() - begin)
    return min(taken[1:]), sizes.temp_size_in_bytes + sizes.output_size_in_bytes


def series(name: str, run, lengths: list[int], options) -> list[dict]:
    """Measure and print one attention at each length."""
    rows = []
    for length in lengths:
        shape = (length, options.heads, options.head_dim)
        dtype = jnp.dtype(options.dtype)
        seconds, size = measure(run, shape, dtype, options.repeats)
        row = {"attention": name, "tokens": length, "seconds": seconds, "bytes": size}
        row["ns_per_token"] = each = 1e9 * seconds / length
        row["growth"] = growth = each / (rows[0]["ns_per_token"] if rows else each)
        rows.append(row | {"device": jax.devices()[0].device_kind})
        print(
            f"{name:9} {length:8,} {seconds:10.3f} {each:10.0f} {growth:8.2f} "
            f"{size / 2**20:10.1f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    doubled = [8192 * 2**i for i in range(5)]
    parser.add_argument("--lengths", type=integers, default=doubled)
    parser.add_argument("--softmax_to", type=int, default=32_768)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=24)
    parser.add_argument("--features", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    print("attention   tokens    seconds   ns/token   growth        MiB")
    for name, run in forms(options.head_dim, options.features).items():
        last = options.softmax_to if name == "softmax" else max(options.lengths)
        lengths = [length for length in options.lengths if length <= last]
        rows += series(name, run, lengths, options)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
