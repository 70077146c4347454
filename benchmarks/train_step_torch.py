"""The peer of `train_step.py`: the same model and update in PyTorch.

Idiomatic PyTorch: projections of one input are one product, attention is
`scaled_dot_product_attention`, the cosines and sines are a table, AdamW is the fused
one, and the clip is `clip_grad_norm_`. With --compile the model is `torch.compile`d.
With --x_transformers the model is that library's decoder of the same sizes: RMSNorm,
rotary or ALiBi, SwiGLU or GELU, flash attention where it can; its weights are its own.

Started by `train_step.py`, with the weights as an .npz; answers a line of JSON for each
line that it reads.
"""

import argparse
import importlib.metadata
import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """One pre-norm block (RMSNorm) with RoPE, ALiBi or no encoding."""

    def __init__(self, weights: dict, index: int):
        super().__init__()

        def kernel(*names):
            return torch.from_numpy(weights["/".join(("blocks", *names))][index])

        def trained(tensor):
            return nn.Parameter(tensor.contiguous())

        heads = [kernel("attention", n, "kernel") for n in ("query", "key", "value")]
        self.heads, self.width = heads[0].shape[1:]
        self.project = trained(torch.cat([part.flatten(1) for part in heads], dim=1).T)
        self.out = trained(kernel("attention", "out", "kernel").flatten(0, 1).T)
        self.gated = "blocks/mlp/gate/kernel" in weights
        names = ("gate", "up") if self.gated else ("up",)
        up = [kernel("mlp", name, "kernel") for name in names]
        self.up = trained(torch.cat(up, dim=1).T)
        self.down = trained(kernel("mlp", "down", "kernel").T)
        self.attention_norm = trained(kernel("attention_norm", "scale"))
        self.mlp_norm = trained(kernel("mlp_norm", "scale"))

    def forward(self, x, turn, bias):
        """Map `[B, T, D]`; `turn` or `bias` are None where the encoding has none."""
        batch, length, dim = x.shape
        normed = F.rms_norm(x, (dim,), self.attention_norm, 1e-6)
        joined = F.linear(normed, self.project)
        joined = joined.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = joined
        if turn is not None:
            query, key = _turn(query, *turn), _turn(key, *turn)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=bias is None
        )
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.out)
        hidden = F.linear(F.rms_norm(x, (dim,), self.mlp_norm, 1e-6), self.up)
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return x + F.linear(hidden, self.down)


class Model(nn.Module):
    """The decoder of `rope_jax.nn`, and its loss."""

    def __init__(self, weights: dict, encoding: str, length: int):
        super().__init__()
        depth = len(weights["blocks/attention_norm/scale"])
        self.layers = nn.ModuleList(Layer(weights, i) for i in range(depth))
        self.embedding = nn.Parameter(torch.from_numpy(weights["embedding"]))
        self.head = nn.Parameter(torch.from_numpy(weights["head"]).T.contiguous())
        self.scale = nn.Parameter(torch.from_numpy(weights["norm/scale"]))
        layer = self.layers[0]
        self.turn, self.bias = None, None
        if encoding == "rope":
            self.turn = _tables(length, layer.width)
        elif encoding == "alibi":
            self.bias = _alibi(length, layer.heads)
        elif encoding != "none":
            raise ValueError(f"the peer has no encoding {encoding!r}")

    def forward(self, inputs, targets):
        """Mean nats of the targets `[B, T]`."""
        x = F.embedding(inputs, self.embedding) * self.embedding.shape[1] ** 0.5
        for layer in self.layers:
            x = layer(x, self.turn, self.bias)
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.scale, 1e-6), self.head)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class XTransformers(nn.Module):
    """The decoder of x-transformers with the sizes of our weights."""

    def __init__(self, weights: dict, encoding: str, length: int):
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper

        depth, dim = weights["blocks/attention_norm/scale"].shape
        heads, width = weights["blocks/attention/query/kernel"].shape[2:]
        gated = "blocks/mlp/gate/kernel" in weights
        self.model = TransformerWrapper(
            num_tokens=256,
            max_seq_len=length,
            use_abs_pos_emb=False,
            attn_layers=Decoder(
                dim=dim,
                depth=depth,
                heads=heads,
                attn_dim_head=width,
                use_rmsnorm=True,
                ff_mult=weights["blocks/mlp/up/kernel"].shape[-1] / dim,
                ff_glu=gated,
                ff_swish=gated,
                ff_no_bias=True,
                attn_flash=encoding != "alibi",
                rotary_pos_emb=encoding == "rope",
                rotary_emb_dim=width,
                alibi_pos_bias=encoding == "alibi",
            ),
        )

    def forward(self, inputs, targets):
        """Mean nats of the targets `[B, T]`."""
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def _tables(length, width):
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10_000.0**exponent
    return angle.cos().float(), angle.sin().float()


def _alibi(length, heads):
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    place = torch.arange(length)
    distance = place[:, None] - place
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, float("-inf"))[None]


def _turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Run:
    """A model, its optimizer and one batch."""

    def __init__(self, options, weights: dict):
        rng = np.random.default_rng(1)
        size = (options.batch, options.length + 1)
        tokens = torch.from_numpy(rng.integers(0, 256, size))
        self.inputs = tokens[:, :-1].contiguous()
        self.targets = tokens[:, 1:].contiguous()
        build = XTransformers if options.x_transformers else Model
        model = build(weights, options.encoding, options.length)
        named = dict(model.named_parameters())
        embeddings = [name for name in named if "emb" in name]
        matrices = [p for n, p in named.items() if p.ndim > 1 and n not in embeddings]
        decayed = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in decayed]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=(0.9, options.beta2), fused=True
        )
        self.parameters = list(model.parameters())
        self.model = torch.compile(model, dynamic=False) if options.compile else model
        self.clip = options.clip_norm

    def step(self) -> float:
        """One update; the loss before it, in nats."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.inputs, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        return loss.item()


def main() -> None:
    """Answer requests until the input ends: {"steps": n} -> {"losses", "seconds"}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("--encoding", default="rope")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--weight_decay", type=float, required=True)
    parser.add_argument("--beta2", type=float, required=True)
    parser.add_argument("--clip_norm", type=float, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--x_transformers", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with np.load(options.weights) as file:
        run = Run(options, dict(file))
    about = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    if options.x_transformers:
        about += f", x-transformers {importlib.metadata.version('x-transformers')}"
    about += f", {sum(p.numel() for p in run.parameters):,} parameters"
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        began = time.perf_counter()
        losses = [run.step() for _ in range(steps)]
        answer = {"losses": losses, "seconds": time.perf_counter() - began}
        print(json.dumps(answer | {"about": about}), flush=True)


if __name__ == "__main__":
    main()
