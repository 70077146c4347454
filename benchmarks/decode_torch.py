"""The peer of `decode.py`: the same model in PyTorch, decoding with its own cache.

Idiomatic eager PyTorch: keys and values are written in place into buffers that are
allocated once, attention is `scaled_dot_product_attention` over the filled part, the
cosines and sines of all positions are a table, projections of one input are one
product, and the most likely byte is fed back as it is. With --compile the step is
`torch.compile`d, and attention goes over the whole buffer under a mask, so that shapes
never change.

Started by `decode.py`, with the weights as an .npz; answers a line of JSON for each
line that it reads.
"""

import argparse
import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """One pre-norm block with RoPE (pairs i and i + H/2) and SwiGLU."""

    def __init__(self, weights: dict, index: int):
        super().__init__()

        def kernel(*names):
            return torch.from_numpy(weights["/".join(("blocks", *names))][index])

        def fixed(tensor):
            return nn.Parameter(tensor.contiguous(), requires_grad=False)

        heads = [kernel("attention", n, "kernel") for n in ("query", "key", "value")]
        self.heads, self.width = heads[0].shape[1:]
        self.project = fixed(torch.cat([part.flatten(1) for part in heads], dim=1).T)
        self.out = fixed(kernel("attention", "out", "kernel").flatten(0, 1).T)
        both = [kernel("mlp", name, "kernel") for name in ("gate", "up")]
        self.gate_up = fixed(torch.cat(both, dim=1).T)
        self.down = fixed(kernel("mlp", "down", "kernel").T)
        self.attention_norm = fixed(kernel("attention_norm", "scale"))
        self.mlp_norm = fixed(kernel("mlp_norm", "scale"))

    def forward(self, x, at, filled, turn, cache, mask):
        """Map `[B, D]` of the token at place `at`, over the first `filled` slots."""
        normed = F.rms_norm(x, x.shape[-1:], self.attention_norm, 1e-6)
        joined = F.linear(normed, self.project).view(x.shape[0], 3, self.heads, -1)
        query, key, value = joined.unbind(1)
        query, key = _turn(query, *turn), _turn(key, *turn)
        for buffer, new in zip(cache, (key, value), strict=True):
            buffer.index_copy_(2, at, new[:, :, None])
        keys, values = (buffer[:, :, :filled] for buffer in cache)
        mixed = F.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=mask
        )
        x = x + F.linear(mixed.flatten(1), self.out)
        normed = F.rms_norm(x, x.shape[-1:], self.mlp_norm, 1e-6)
        gate, up = F.linear(normed, self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Model(nn.Module):
    """The decoder of `rope_jax.nn` with encoding rope, one token at a time."""

    def __init__(self, weights: dict):
        super().__init__()
        depth = len(weights["blocks/attention_norm/scale"])
        self.layers = nn.ModuleList(Layer(weights, i) for i in range(depth))
        self.embedding = torch.from_numpy(weights["embedding"])
        self.embedding = self.embedding * self.embedding.shape[1] ** 0.5
        self.head = torch.from_numpy(weights["head"]).T.contiguous()
        self.scale = torch.from_numpy(weights["norm/scale"])

    def forward(self, tokens, at, filled, tables, caches, mask):
        """Logits `[B, V]` after tokens `[B]` at place `at` `[1]`."""
        x, turn = self.embedding[tokens], [table[at] for table in tables]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, at, filled, turn, cache, mask)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.scale, 1e-6), self.head)


def _turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Run:
    """Buffers for one batch size and length."""

    def __init__(self, model: Model, batch: int, length: int, compiled: bool):
        layer = model.layers[0]
        shape = (batch, layer.heads, length, layer.width)
        self.caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in model.layers]
        self.places = torch.arange(length)
        exponent = torch.arange(0, layer.width, 2, dtype=torch.float64) / layer.width
        angle = torch.arange(length, dtype=torch.float64)[:, None] / 10_000.0**exponent
        self.tables = angle.cos().float(), angle.sin().float()
        self.step = torch.compile(model, dynamic=False) if compiled else model
        self.batch, self.length, self.compiled = batch, length, compiled

    def logits(self, tokens, index: int):
        """Logits `[B, V]` after the tokens `[B]` at place `index`."""
        at, filled, mask = self.places[index : index + 1], index + 1, None
        if self.compiled:
            filled, mask = self.length, (self.places <= index).view(1, 1, 1, -1)
        return self.step(tokens, at, filled, self.tables, self.caches, mask)

    def generate(self) -> torch.Tensor:
        """`length` bytes for each row, the most likely each time, after a byte 10."""
        tokens, found = torch.full((self.batch,), 10), []
        for index in range(self.length):
            tokens = self.logits(tokens, index).argmax(dim=-1)
            found.append(tokens)
        return torch.stack(found, dim=1)


def main() -> None:
    """Answer requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with np.load(options.weights) as file:
        model = Model(dict(file)).eval()
    run, sizes = None, None
    for line in sys.stdin:
        request = json.loads(line)
        if sizes != (request["batch"], request["length"]):
            sizes = request["batch"], request["length"]
            torch.compiler.reset()
            run = Run(model, *sizes, options.compile)
        with torch.inference_mode():
            print(json.dumps(_answer(run, request)), flush=True)


def _answer(run: Run, request: dict) -> dict:
    if "tokens" in request:
        columns = torch.tensor(request["tokens"]).T.contiguous()
        logits = [run.logits(tokens, i).tolist() for i, tokens in enumerate(columns)]
        threads = torch.get_num_threads()
        return {"logits": logits, "version": torch.__version__, "threads": threads}
    began = time.perf_counter()
    run.generate()
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
