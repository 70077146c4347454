"""Numbers from x-transformers and rotary-embedding-torch, for `make_golden.py`.

Both libraries keep heads before time; everything is stored as this project holds
it, [B, T, N, H] for activations and [B, N, T, S] for scores and biases. Torch is
imported inside the functions: nothing here may cost a plain test run an import.
"""

import math

import numpy as np


def _swap(array):
    """[B, N, T, H] -> [B, T, N, H]."""
    return array.detach().transpose(1, 2).contiguous().numpy()


def _activations(torch, seed, batch, heads, length, width, count=2):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, width)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def x_transformers_arrays():
    """Every array of `x_transformers.npz`."""
    import torch
    from x_transformers import x_transformers as xt

    torch.manual_seed(0)
    out = {}
    with torch.no_grad():
        _xpos(torch, xt, out)
        _rescaled(torch, xt, out)
        _cope(torch, xt, out)
        _fox(torch, xt, out)
        _pope(torch, xt, out)
        _biases(torch, xt, out)
        sinusoid = xt.ScaledSinusoidalEmbedding(24)
        out["sinusoid/embedding"] = sinusoid(torch.zeros(1, 40, 24)).numpy()
        out["sinusoid/scale"] = sinusoid.scale.numpy()
    return out


def _xpos(torch, xt, out):
    """xPos in the interleaved layout, centred on the middle of the sequence."""
    for name, base, length in (("xpos", 512, 48), ("xpos_base64", 64, 33)):
        rotary = xt.RotaryEmbedding(32, use_xpos=True, scale_base=base)
        freqs, scale = rotary(torch.arange(length))
        query, key = _activations(torch, 1, 1, 2, length, 32)
        turned_query = xt.apply_rotary_pos_emb(query, freqs, scale)
        turned_key = xt.apply_rotary_pos_emb(key, freqs, scale**-1)
        out[f"{name}/query"] = _swap(query)
        out[f"{name}/key"] = _swap(key)
        out[f"{name}/scale"] = scale[0, :, 0::2].numpy()
        out[f"{name}/rotated_query"] = _swap(turned_query)
        out[f"{name}/rotated_key"] = _swap(turned_key)
        scores = torch.einsum("bnth,bnsh->bnts", turned_query, turned_key)
        out[f"{name}/scores"] = scores.numpy()


def _rescaled(torch, xt, out):
    """NTK-aware base, position interpolation and partial rotary, interleaved."""
    out["ntk_factor4/inv_freq"] = xt.RotaryEmbedding(
        64, base_rescale_factor=4.0
    ).inv_freq.numpy()
    query, key = _activations(torch, 2, 1, 2, 20, 48)
    out["partial/query"], out["partial/key"] = _swap(query), _swap(key)
    for name, kwargs in (
        ("partial", {}),
        ("partial_linear4", {"interpolation_factor": 4.0}),
    ):
        freqs, _ = xt.RotaryEmbedding(16, **kwargs)(torch.arange(20))
        out[f"{name}/rotated_query"] = _swap(xt.apply_rotary_pos_emb(query, freqs))
        out[f"{name}/rotated_key"] = _swap(xt.apply_rotary_pos_emb(key, freqs))


def _cope(torch, xt, out):
    """CoPE as attention calls it: logits masked causally before the gates."""
    for name, max_pos, length in (("cope", 8, 12), ("cope_long", 16, 40)):
        module = xt.CoPE(dim=16, heads=2, max_pos=max_pos)
        module.pos_emb.normal_()
        query, key = _activations(torch, 3, 2, 2, length, 16)
        logits = torch.einsum("bnth,bnsh->bnts", query, key) / 4.0
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        masked = logits.masked_fill(~causal, -torch.finfo(logits.dtype).max)
        out[f"{name}/query"] = _swap(query)
        out[f"{name}/logits"] = logits.numpy()
        out[f"{name}/embedding"] = module.pos_emb.numpy()
        # Above the diagonal the numbers mean nothing; attention masks them.
        out[f"{name}/bias"] = (module(query, masked) * causal).numpy()


def _fox(torch, xt, out):
    """The forgetting transformer's bias; above the diagonal set to zero."""
    module = xt.DataDependentAlibi(dim=24, heads=3)
    linear = module.to_forget_gates[0]
    linear.bias.uniform_(-2.0, 5.0)
    x = torch.randn(2, 30, 24)
    causal = torch.ones(30, 30, dtype=torch.bool).tril()
    out["fox/x"] = x.numpy()
    out["fox/kernel"] = linear.weight.T.contiguous().numpy()
    out["fox/bias_param"] = linear.bias.numpy()
    out["fox/log_gates"] = module.to_forget_gates(x).numpy()
    out["fox/bias"] = (module(x) * causal).numpy()


def _pope(torch, xt, out):
    """PoPE: query and key features with the learned phase on the keys."""
    module = xt.PolarEmbedding(16, heads=2, bias_uniform_init=True)
    freqs, bias = module(torch.arange(25))
    query, key = _activations(torch, 4, 1, 2, 25, 16)
    polar_query = xt.apply_polar_pos_emb(query, freqs)
    polar_key = xt.apply_polar_pos_emb(key, freqs + bias)
    out["pope/query"], out["pope/key"] = _swap(query), _swap(key)
    out["pope/phase"] = bias[:, 0].numpy()
    out["pope/inv_freq"] = module.inv_freq.numpy()
    out["pope/polar_query"] = _swap(polar_query)
    out["pope/polar_key"] = _swap(polar_key)
    scores = torch.einsum("bnth,bnsh->bnts", polar_query, polar_key)
    out["pope/scores"] = scores.numpy()


def _biases(torch, xt, out):
    """Symmetric ALiBi at given positions, and the T5 buckets."""
    alibi = xt.AlibiPositionalBias(6)
    positions = torch.tensor([0, 3, 4, 90, 1000])
    out["alibi/positions"] = positions.numpy()
    out["alibi/bias_6_heads"] = alibi.forward_custom_pos(positions).numpy()
    slopes = np.zeros((129, 128))  # row N holds N slopes
    for heads in range(1, 129):
        slopes[heads, :heads] = xt.AlibiPositionalBias._get_slopes(heads)
    out["alibi/slopes"] = slopes
    distance = torch.arange(-300, 301)
    out["t5/relative_position"] = distance.numpy()
    for causal in (True, False):
        name = "causal" if causal else "bidirectional"
        out[f"t5/bucket_{name}"] = xt.RelativePositionBias._relative_position_bucket(
            distance, causal=causal
        ).numpy()


def rotary_embedding_torch_arrays():
    """Every array of `rotary_embedding_torch.npz`; its layout is interleaved."""
    import torch
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    out = {}
    with torch.no_grad():
        query, key = _activations(torch, 5, 1, 2, 24, 32)
        out["query"], out["key"] = _swap(query), _swap(key)
        for name, kwargs in (
            ("default", {}),
            ("linear2", {"interpolate_factor": 2.0}),
            ("ntk8", {"theta_rescale_factor": 8.0}),
            ("partial16", {"dim": 16}),
            ("theta1e6", {"theta": 1_000_000}),
        ):
            rotary = RotaryEmbedding(**{"dim": 32, **kwargs})
            out[f"{name}/rotated_query"] = _swap(rotary.rotate_queries_or_keys(query))
            out[f"{name}/rotated_key_offset7"] = _swap(
                rotary.rotate_queries_or_keys(key, offset=7)
            )
        rotary = RotaryEmbedding(32, use_xpos=True)
        turned_query, turned_key = rotary.rotate_queries_and_keys(query, key)
        out["xpos/rotated_query"] = _swap(turned_query)
        out["xpos/rotated_key"] = _swap(turned_key)
        out["xpos/scores"] = torch.einsum(
            "bnth,bnsh->bnts", turned_query, turned_key
        ).numpy()
        rotary = RotaryEmbedding(16, freqs_for="pixel", max_freq=10)
        out["pixel/inv_freq"] = rotary.freqs.numpy() / math.pi
        grid = torch.randn(1, 4, 6, 32, generator=torch.Generator().manual_seed(6))
        out["axial/x"] = grid.numpy()
        freqs = RotaryEmbedding(16).get_axial_freqs(4, 6)
        out["axial/rotated"] = apply_rotary_emb(freqs, grid).numpy()
    return out
