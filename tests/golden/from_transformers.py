"""Numbers from transformers, for `make_golden.py`.

For each config the family's own rotary embedding and its own rotation function are run
on the same small inputs. Arrays are stored as this project holds them, [B, T, N, H];
bfloat16 values as their bits in uint16. Torch is imported inside the functions.
"""

import importlib
import importlib.util
import inspect
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
POSITIONS = [0, 1, 2, 7, 31, 63, 64, 511, 2047]
DTYPES = ("float32", "bfloat16")
GEMMA4 = ("gemma4_text", "gemma4_unified_text")  # heads of two widths

# config -> the (layer type, length) pairs that are run; the default is one of each.
RUNS = {
    "llama-2-7b-dynamic2": [(None, n) for n in (1024, 2048, 4096, 8192)],
    "phi-3-128k": [(None, 4096), (None, 4097)],
    "phi-3.5-moe": [(None, 4096)],
    "tiny-llama-longrope": [(None, 512), (None, 513)],
    **{
        name: [("full_attention", None), ("sliding_attention", None)]
        for name in (
            "gemma-3-4b",
            "gemma-3-27b-v5",
            "gemma-4",
            "olmo-3-7b",
            "modernbert-base",
            "mimo-v2-flash-v5",
        )
    },
}
# Here only the parsing is tested: the layers differ by rotating or not.
PARSED_ONLY = ("cohere2-7b", "exaone-4-32b")


def configs():
    """The contents of `configs.json`."""
    return json.loads((HERE / "configs.json").read_text())


def runs(name):
    """The (layer type, length) pairs of one config."""
    lengths = (2048, 8192) if "/dynamic/" in name else (None,)
    if "/longrope/" in name:
        lengths = (2048, 2049)
    return RUNS.get(name, [(None, length) for length in lengths])


def text_config(config):
    """The peer's config object of the language model."""
    from transformers import AutoConfig

    config = dict(config)
    return AutoConfig.for_model(config.pop("model_type"), **config).get_text_config()


def modeling(config):
    """The peer's modeling module, and its rotary embedding for text."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(name)
    skip = ("Vision", "Audio", "Talker", "DiT", "SaProt")
    classes = [
        value
        for key, value in vars(module).items()
        if key.endswith("RotaryEmbedding") and not any(word in key for word in skip)
    ]
    if len(classes) > 1:
        classes = [value for value in classes if "Text" in value.__name__]
    assert len(classes) == 1, (name, classes)
    return module, classes[0](config)


def angles(config, embedding, positions, layer_type, dtype):
    """What the embedding returns for [T] or [3, T] positions."""
    import torch

    x = torch.zeros(1, dtype=dtype)
    positions = torch.tensor(positions)
    positions = positions[None] if positions.ndim == 1 else positions[:, None]
    arguments = (x, positions) if layer_type is None else (x, positions, layer_type)
    if hasattr(embedding, "mrope_section") and positions.shape[0] != 3:
        arguments = (x, positions[None].expand(3, -1, -1))
    return embedding(*arguments)


def rotate(config, module, result, *inputs):
    """Run the family's rotation on [1, N, T, H] arrays, channel slices included."""
    import torch

    heads_last = config.model_type in ("gptj", "codegen", "llama4_text")
    if config.model_type in ("llama4_text", "deepseek_v2"):
        width = 2 * result.shape[-1]
    else:
        width = result[0].shape[-1]
        # these hand on one cosine per pair, everyone else one per channel
        width *= 2 if config.model_type in ("gpt_oss", "gptj", "codegen") else 1
    heads = [x[..., :width] for x in inputs]
    if heads_last:
        heads = [x.transpose(1, 2) for x in heads]
    turned = _apply(config, module, result, heads)
    if heads_last:
        turned = [x.transpose(1, 2) for x in turned]
    return [
        torch.cat([y, x[..., width:]], dim=-1)
        for x, y in zip(inputs, turned, strict=True)
    ]


def _apply(config, module, result, heads):
    """Call the function that the family's attention calls."""
    if config.model_type in ("gptj", "codegen"):
        sin, cos = result
        return [module.apply_rotary_pos_emb(x, sin, cos) for x in heads]
    pairs = list(zip(heads[::2], heads[1::2], strict=True))
    if config.model_type in ("llama4_text", "deepseek_v2"):
        calls = [module.apply_rotary_emb(q, k, result) for q, k in pairs]
        return [x for call in calls for x in call]
    # Where a module has both, attention takes this one unless the config declines.
    function = getattr(module, "apply_rotary_pos_emb_interleave", None)
    if function is None or not getattr(config, "rope_interleave", True):
        function = module.apply_rotary_pos_emb
    if "k" not in inspect.signature(function).parameters:
        return [function(x, *result) for x in heads]
    return [x for q, k in pairs for x in function(q, k, *result)]


def _stored(tensor):
    """[1, N, T, H] -> [1, T, N, H] in NumPy, bfloat16 as bits."""
    import torch

    tensor = tensor.detach().transpose(1, 2).contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def _head_dim(config, layer_type):
    if layer_type == "full_attention" and config.model_type in GEMMA4:
        return config.per_layer_config[layer_type].head_dim
    if config.model_type in GEMMA4:
        return config.per_layer_config["sliding_attention"].head_dim
    head_dim = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def _one_run(config, layer_type, length, inputs, with_key, out, prefix):
    import torch

    module, embedding = modeling(config)
    positions = [p for p in POSITIONS if length is None or p < length]
    positions += [] if length is None else [length - 1]
    count, head_dim = len(positions), _head_dim(config, layer_type)
    if hasattr(embedding, "mrope_section"):
        positions = [positions, [2 * p for p in positions], [p // 3 for p in positions]]
    out[f"{prefix}/positions"] = np.array(positions)
    query, key = inputs[..., :count, :head_dim]
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        result = angles(config, embedding, positions, layer_type, kind)
        turned = rotate(config, module, result, query.to(kind), key.to(kind))
        out[f"{prefix}/{dtype}/query"] = _stored(turned[0])
        if with_key and dtype == "float32":
            out[f"{prefix}/{dtype}/key"] = _stored(turned[1])
    stem = f"{layer_type}_" if layer_type else ""
    if hasattr(embedding, f"{stem}inv_freq"):  # GPT-J holds a table of sines instead
        out[f"{prefix}/inv_freq"] = getattr(embedding, f"{stem}inv_freq").numpy()
        scaling = getattr(embedding, f"{stem}attention_scaling")
        out[f"{prefix}/attention_factor"] = np.float64(scaling)


def transformers_arrays():
    """Every array of `transformers.npz`."""
    import torch

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn((2, 1, 1, len(POSITIONS) + 1, 512), generator=generator)
    out = {"inputs/query": _stored(inputs[0]), "inputs/key": _stored(inputs[1])}
    for name in configs():
        if name in PARSED_ONLY:
            continue
        for layer_type, length in runs(name):
            run = "/".join(str(part) for part in (name, layer_type, length))
            config = text_config(configs()[name])  # read anew: the peer changes it
            with_key = not name.startswith("grid/")
            _one_run(config, layer_type, length, inputs, with_key, out, run)
    _magnitudes(out)
    _buckets_and_slopes(out)
    return out


def _magnitudes(out):
    """Softmax scale of DeepSeek's attention beyond 1/sqrt(H)."""
    for name in ("deepseek-v3", "deepseek-v2-lite"):
        config = text_config(configs()[name])
        module, _ = modeling(config)
        scale = module.yarn_apply_mscale(config.rope_parameters, 1.0)
        out[f"{name}/softmax_scale_factor"] = np.float64(scale)


def _buckets_and_slopes(out):
    """T5 buckets, and ALiBi slopes as BLOOM and MPT compute them."""
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    out["t5/relative_position"] = distance.numpy()
    for name, both in (("causal", False), ("bidirectional", True)):
        buckets = T5Attention._relative_position_bucket(distance, bidirectional=both)
        out[f"t5/bucket_{name}"] = buckets.numpy()
    slopes = np.zeros((2, 129, 128), np.float32)  # row N holds N slopes
    for heads in range(1, 129):
        mask = torch.ones(1, 2)
        bloom = build_alibi_tensor(mask, heads, torch.float32)  # [N, 1, S], slope * key
        slopes[0, heads, :heads] = bloom[:, 0, 1].numpy()
        mpt = build_mpt_alibi_tensor(heads, 2)  # [1, N, 1, S], slope * (key - last)
        slopes[1, heads, :heads] = -mpt.reshape(heads, 2)[:, 0].numpy()
    out["alibi/bloom_slopes"], out["alibi/mpt_slopes"] = slopes


def _families():
    """The table of `rope_jax`, loaded by path: nothing of JAX is needed here."""
    path = HERE.parents[1] / "rope_jax/functional/huggingface_families.py"
    spec = importlib.util.spec_from_file_location("families", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module
    spec.loader.exec_module(module)
    return module.FAMILIES


def layouts():
    """What each family of the table does to unit vectors, and its class defaults."""
    import torch
    from transformers import AutoConfig

    out = {}
    for name in _families():
        if name == "kimi_k2":  # remote code around DeepSeek-V3's classes
            continue
        options = {}
        if name in ("glm4v_text", "glm_ocr_text"):
            options = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
            share = {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
            options["rope_parameters"] = {"rope_theta": 1e4, **share}
        config = AutoConfig.for_model(name, **options).get_text_config()
        blocks = getattr(config, "rope_parameters", None) or {}
        nested = [key for key, value in blocks.items() if isinstance(value, dict)]
        module, embedding = modeling(config)
        result = angles(
            config, embedding, [1], nested[0] if nested else None, torch.float32
        )
        out[name] = {"layout": _pairing(config, module, result)}
        out[name]["blocks"] = json.loads(json.dumps(blocks)) if not options else None
        out[name]["head_dim"] = _default_head_dim(name)
    return out


def _pairing(config, module, result):
    """Say which channel turns together with channel 0, and which way."""
    import torch

    width = result.shape[-1] * 2 if torch.is_tensor(result) else result[0].shape[-1]
    width *= 2 if config.model_type in ("gpt_oss", "gptj", "codegen") else 1
    unit = torch.eye(width)[None, :, None, :]
    image = rotate(config, module, result, unit, unit)[0][0, :, 0]
    spread = [tuple(row.nonzero().flatten().tolist()) for row in image]
    partners = [i for i in range(1, width) if spread[i] == spread[0]]
    assert len(partners) == 1 and len(spread[0]) == 2, (config.model_type, partners)
    names = {1: "interleaved", width // 2: "half"}
    reversed_turn = "" if image[0, spread[0][1]] > 0 else " reversed"
    return names[partners[0]] + reversed_turn


def _default_head_dim(name):
    """The head dim of the class where it does not follow from the other sizes."""
    from transformers import AutoConfig

    found = []
    for heads in (8, 16):
        config = AutoConfig.for_model(name)
        sizes = {"hidden_size": 1024, "num_attention_heads": heads}
        if set(sizes) <= set(vars(config)):
            config = AutoConfig.for_model(name, **sizes).get_text_config()
        if name in GEMMA4:
            return _head_dim(config, "sliding_attention")
        found.append(getattr(config, "head_dim", None))
    return found[0] if found[0] == found[1] else None
