"""Time and memory of softmax attention, by length and implementation.

    python -m benchmarks.attention --out=results/speed/attention.json
    python -m benchmarks.attention --bias=alibi --lengths=1024,4096 --dtype=bfloat16

Every implementation that `rope_jax.attention` knows, and "auto", causal, with or
without a bias function, forward and with the gradients of query, key and value. The
timed runs of one length alternate between the implementations. "temporary" is what the
compiled program asks for besides its arguments and results; one that asks for more than
`--most_gib`, or that refuses, is named and not run. "over auto" is the time over that
of "auto".
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp

from benchmarks.measure import (
    alternate,
    integers,
    spread,
    table,
    temporary_bytes,
    write,
)
from rope_jax import alibi_bias, alibi_slopes, attention
from rope_jax.functional.attention import IMPLEMENTATIONS

_COLUMNS = {
    "pass": "{pass_}",
    "tokens": "{length:,}",
    "implementation": "{implementation}",
    "ms": "{ms:.1f}",
    "least": "{least_ms:.1f}",
    "most": "{most_ms:.1f}",
    "over auto": "{over_auto:.2f}",
    "temporary MiB": "{temporary_mib:.1f}",
    "": "{reason}",
}


def make_bias(name: str, heads: int):
    """The bias function of the benchmark; None for none."""
    if name == "none":
        return None
    slopes = alibi_slopes(heads)
    return lambda t, s: alibi_bias(slopes, t, s)


def compile_one(implementation: str, arrays, bias, gradient: bool):
    """The compiled program; ValueError where the implementation cannot."""

    def forward(query, key, value):
        return attention(query, key, value, bias=bias, implementation=implementation)

    def loss(query, key, value):
        return jnp.sum(forward(query, key, value).astype(jnp.float32) ** 2)

    run = jax.grad(loss, (0, 1, 2)) if gradient else forward
    return jax.jit(run).lower(*arrays).compile()


def measure(length: int, gradient: bool, options) -> list[dict]:
    """One row for each implementation."""
    shape = (options.batch, length, options.heads, options.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, shape, jnp.dtype(options.dtype)) for key in keys]
    bias = make_bias(options.bias, options.heads)
    rows, runs = {}, {}
    for name in ("auto", *IMPLEMENTATIONS):
        row = rows[name] = {
            "pass_": "gradient" if gradient else "forward",
            "length": length,
            "implementation": name,
            "reason": "",
        }
        try:
            program = compile_one(name, arrays, bias, gradient)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            row["reason"] = f"refused: {str(error).splitlines()[0][:120]}"
            continue
        row["temporary_mib"] = temporary_bytes(program) / 2**20
        if row["temporary_mib"] > 1024 * options.most_gib:
            row["reason"] = f"not run: above {options.most_gib} GiB"
        else:
            runs[name] = lambda program=program: program(*arrays)
    taken = alternate(runs, options.repeats)
    for name, seconds in taken.items():
        found = spread(seconds)
        rows[name] |= {"ms": 1e3 * found["seconds"]}
        rows[name] |= {f"{key}_ms": 1e3 * found[key] for key in ("least", "most")}
        if "auto" in taken:
            auto = spread(taken["auto"])["seconds"]
            rows[name]["over_auto"] = found["seconds"] / auto
    return list(rows.values())


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    doubled = [256 * 4**i for i in range(4)]
    parser.add_argument("--lengths", type=integers, default=doubled)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bias", choices=("none", "alibi"), default="none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most_gib", type=float, default=4.0)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    asked = {"bias": options.bias, "dtype": options.dtype, "batch": options.batch}
    asked |= {"heads": options.heads, "head_dim": options.head_dim}
    rows = []
    for gradient in (False, True):
        for length in options.lengths:
            print(f"{length:,} tokens", file=sys.stderr, flush=True)
            rows += [asked | row for row in measure(length, gradient, options)]
    print(table(rows, _COLUMNS))
    if options.out:
        write(options.out, rows)


if __name__ == "__main__":
    main()
