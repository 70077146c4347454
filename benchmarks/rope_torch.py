"""The peers of `rope.py`: rotations of one array [B, T, N, H] for PyTorch.

Each is called as its library documents, with what a model keeps between calls made
beforehand: tables of cosines and sines for transformers, angles for x-transformers and
rotary-embedding-torch, which take the cosines and sines themselves in each call.

Started by `rope.py`; answers a line of JSON for each line that it reads.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version

import numpy as np
import torch


def transformers_side(x: torch.Tensor):
    """`apply_rotary_pos_emb` of Llama, which takes queries and keys.

    They are half of the heads each, so that the bytes are those of one array.
    """
    from transformers.models.llama.modeling_llama import (
        apply_rotary_pos_emb,
    )

    angle = _angles(x)
    angle = torch.cat([angle, angle], dim=-1)[None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    query, key = (part.contiguous() for part in x.chunk(2, dim=2))

    def run():
        return apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)

    return run, lambda found: torch.cat(found, dim=2), "tables made before"


def rotary_embedding_side(x: torch.Tensor):
    """`RotaryEmbedding.rotate_queries_or_keys`, which keeps the angles it made."""
    from rotary_embedding_torch import RotaryEmbedding

    module = RotaryEmbedding(dim=x.shape[-1])

    def run():
        return module.rotate_queries_or_keys(x, seq_dim=-3)

    return run, lambda found: found, "cos, sin; angles made before"


def x_transformers_side(x: torch.Tensor):
    """`apply_rotary_pos_emb`, on an array laid out as its attention has it."""
    from x_transformers.x_transformers import (
        RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    # [B, N, T, H] is the order that the function works on.
    turned = x.transpose(1, 2).contiguous()
    freqs, scale = RotaryEmbedding(x.shape[-1]).forward_from_seq_len(x.shape[1])

    def run():
        return apply_rotary_pos_emb(turned, freqs, scale)

    return run, lambda found: found.transpose(1, 2), "cos, sin; angles made before"


def _angles(x: torch.Tensor) -> torch.Tensor:
    """Angles `[T, H/2]` in float64."""
    exponent = torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1]
    return torch.arange(x.shape[1])[:, None] / 10_000.0**exponent


_SIDES = {
    "transformers": transformers_side,
    "rotary-embedding-torch": rotary_embedding_side,
    "x-transformers": x_transformers_side,
}


def main() -> None:
    """Answer requests until the input ends: {"save": path} or {"calls": n}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=tuple(_SIDES))
    parser.add_argument("array")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    x = torch.from_numpy(np.load(options.array)).to(getattr(torch, options.dtype))
    run, joined, includes = _SIDES[options.library](x)
    if options.compile:
        run = torch.compile(run, dynamic=False)
    about = f"{options.library} {version(options.library)}, torch {torch.__version__}"
    about += f", {torch.get_num_threads()} threads"
    for line in sys.stdin:
        request = json.loads(line)
        with torch.no_grad():
            if "save" in request:
                np.save(request["save"], joined(run()).float().numpy())
                answer = {"about": about, "includes": includes}
            else:
                run()
                began = time.perf_counter()
                for _ in range(request["calls"]):
                    run()
                seconds = (time.perf_counter() - began) / request["calls"]
                answer = {"seconds": seconds}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
