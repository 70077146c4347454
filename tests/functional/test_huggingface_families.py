"""What `rope_from_hf` makes of single model families: layers, widths, layouts."""

import copy
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.huggingface import rope_from_hf
from rope_jax.functional.huggingface_families import FAMILIES
from rope_jax.functional.rotary import rope

CONFIGS = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "configs.json").read_text()
)
LLAMA = CONFIGS["tiny-llama"]
YARN = CONFIGS["tiny-llama-yarn"]["rope_scaling"]
LLAMA3 = CONFIGS["tiny-llama-llama3"]["rope_scaling"]
LONG = CONFIGS["tiny-llama-longrope"]["rope_scaling"]


def plain(dim, theta=10_000.0):
    """The ladder of RoFormer, float64 [dim/2]."""
    return theta ** (-np.arange(0, dim, 2) / dim)


def inv_freq(config, **options):
    """The inverse frequencies of a config."""
    return np.asarray(rope_from_hf(config, **options).frequencies.inv_freq)


def with_block(block, **changes):
    """A small Llama with a rope block in the form of transformers 4."""
    return LLAMA | {"rope_scaling": block} | changes


def without(mapping, *names):
    """A copy that lacks some keys."""
    return {key: value for key, value in mapping.items() if key not in names}


def test_hf_gemma3_local_and_global():
    """A flat block scales the global layers; local ones have their own base."""
    config = CONFIGS["gemma-3-4b"]
    full, local = plain(256, 1e6) / 8, plain(256, 1e4)
    np.testing.assert_allclose(inv_freq(config, layer_type="full_attention"), full)
    np.testing.assert_allclose(inv_freq(config, layer_type="sliding_attention"), local)
    for index in range(12):  # five local layers, then a global one
        expected = full if index in (5, 11) else local
        np.testing.assert_allclose(inv_freq(config, layer_index=index), expected)
    text = config["text_config"] | {"rope_local_base_freq": 7.0, "rope_theta": 9.0}
    local = inv_freq(text, layer_type="sliding_attention")
    np.testing.assert_allclose(local, plain(256, 7.0))
    full = inv_freq(text, layer_type="full_attention")
    np.testing.assert_allclose(full, plain(256, 9.0) / 8)


def test_hf_gemma3_flat_rope_parameters_leave_the_local_base_alone():
    """A base inside a flat block is that of the global layers."""
    text = without(CONFIGS["gemma-3-4b"]["text_config"], "rope_scaling")
    block = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e6}
    config = text | {"rope_parameters": block}
    full = inv_freq(config, layer_type="full_attention")
    np.testing.assert_allclose(full, plain(256, 5e6) / 8)
    local = inv_freq(config, layer_type="sliding_attention")
    np.testing.assert_allclose(local, plain(256, 1e4))
    config = text | {"rope_parameters": LLAMA3 | {"rope_theta": 5e6}}
    local = inv_freq(config, layer_type="sliding_attention")
    np.testing.assert_allclose(local, plain(256, 1e4))


@pytest.mark.parametrize("outer", ["rope_scaling", "rope_parameters"])
def test_hf_olmo3_flat_block_is_for_full_attention(outer):
    """YaRN on every fourth layer, and the plain ladder of the same base elsewhere."""
    config = dict(CONFIGS["olmo-3-7b"])
    config[outer] = config.pop("rope_scaling")
    full = rope_from_hf(config, layer_index=3)
    assert full.rope_type == "yarn"
    assert full.frequencies.attention_factor == 1.2079441541679836
    local = rope_from_hf(config, layer_index=2)
    assert local.frequencies == frequencies.default(128, theta=5e5)
    assert local == rope_from_hf(config, layer_type="sliding_attention")
    with pytest.raises(ValueError, match="layer_type"):
        rope_from_hf(config)
    np.testing.assert_allclose(inv_freq(without(config, outer)), plain(128, 5e5))


def test_hf_modernbert_layers():
    """Every third layer from the first is global, with the larger base."""
    config = CONFIGS["modernbert-base"]
    for index in range(6):
        theta = 10_000.0 if index % 3 else 160_000.0
        found = inv_freq(config, layer_index=index)
        np.testing.assert_allclose(found, plain(64, theta))


def test_hf_gemma4_heads_of_two_widths():
    """p-RoPE on 512-wide heads of the global layers, which the last layer is."""
    config = copy.deepcopy(CONFIGS["gemma-4"])
    full = rope_from_hf(config, layer_type="full_attention")
    assert full.rotary_dim == 512
    np.testing.assert_allclose(full.frequencies.inv_freq[:64], plain(512, 1e6)[:64])
    assert not full.frequencies.inv_freq[64:].any()
    assert rope_from_hf(config, layer_type="sliding_attention").rotary_dim == 256
    text = without(config["text_config"], "layer_types") | {"num_hidden_layers": 5}
    widths = [rope_from_hf(text, layer_index=i).rotary_dim for i in range(5)]
    assert widths == [256, 256, 256, 256, 512]


def test_hf_llama4_equal_band_factors_and_layers_without_rotation():
    """low_freq_factor == high_freq_factor is legal; every fourth layer is NoPE."""
    config = CONFIGS["llama-4-scout"]
    spec = rope_from_hf(config, layer_index=0)
    ladder = plain(128, 5e5)
    expected = np.where(2 * np.pi / ladder > 8192, ladder / 16, ladder)
    np.testing.assert_allclose(spec.frequencies.inv_freq, expected)
    assert spec.layout == "interleaved"
    rotating = [rope_from_hf(config, layer_index=i) is not None for i in range(48)]
    assert rotating == [(i + 1) % 4 != 0 for i in range(48)]
    assert rope_from_hf(config) == spec
    text = config["text_config"] | {"no_rope_layers": [0, 1] * 24}
    assert rope_from_hf(text, layer_index=2) is None
    assert rope_from_hf(text, layer_index=3) == spec


def test_hf_smollm3_layers_without_rotation():
    """The list says 1 for a layer that rotates; without it the interval counts."""
    config = CONFIGS["smollm3-3b"]
    for listed in (config, without(config, "no_rope_layers", "no_rope_layer_interval")):
        kept = [rope_from_hf(listed, layer_index=i) is not None for i in range(8)]
        assert kept == [True, True, True, False] * 2
    every = without(config, "no_rope_layers") | {"no_rope_layer_interval": 2}
    kept = [rope_from_hf(every, layer_index=i) is not None for i in range(4)]
    assert kept == [True, False, True, False]


@pytest.mark.parametrize("name", ["cohere2-7b", "exaone-4-32b"])
def test_hf_families_that_rotate_in_sliding_layers_only(name):
    """Cohere2 and EXAONE-4: global layers have no position; unless all are global."""
    config = CONFIGS[name]
    assert rope_from_hf(config, layer_index=3) is None
    assert rope_from_hf(config, layer_type="full_attention") is None
    spec = rope_from_hf(config, layer_index=2)
    assert spec == rope_from_hf(config) is not None
    all_global = config | {"sliding_window": None}
    assert rope_from_hf(all_global, layer_type="full_attention") == spec


def test_hf_other_position_encodings_are_no_rotation():
    """Falcon with ALiBi, Granite-4 and ESM by their own key: None, no default."""
    none = [
        LLAMA | {"model_type": "falcon", "alibi": True},
        LLAMA | {"model_type": "granitemoehybrid", "position_embedding_type": "nope"},
        LLAMA | {"model_type": "granitemoehybrid"},
        LLAMA | {"model_type": "esm", "position_embedding_type": "absolute"},
        LLAMA | {"use_rotary_pos_emb": False},
        {"model_type": "bert", "position_embedding_type": "absolute"},
    ]
    for config in none:
        assert rope_from_hf(config) is None
    rotating = [
        LLAMA | {"model_type": "falcon", "alibi": False},
        LLAMA | {"model_type": "granitemoehybrid", "position_embedding_type": "rope"},
        LLAMA | {"model_type": "esm", "position_embedding_type": "rotary"},
        LLAMA | {"model_type": "new", "position_embedding_type": "rope_gptj"},
        LLAMA | {"use_rotary_pos_emb": True},
        # Here the key means nothing: ModernBERT's files say "absolute", and rotate.
        LLAMA | {"position_embedding_type": "absolute"},
    ]
    for config in rotating:
        np.testing.assert_allclose(inv_freq(config), plain(64))
    unclear = LLAMA | {"model_type": "new", "position_embedding_type": "absolute"}
    with pytest.raises(ValueError, match="position_embedding_type"):
        rope_from_hf(unclear)


def test_hf_layers_without_attention_do_not_rotate():
    """Qwen3-Next mixes linear attention in."""
    config = LLAMA | {
        "model_type": "qwen3_next",
        "head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
    assert rope_from_hf(config, layer_index=0) is None
    assert rope_from_hf(config, layer_index=1).rotary_dim == 16


def test_hf_deepseek_latent_attention():
    """MLA: the rotary slice, the pairing, and the magnitude moved to the softmax."""
    spec = rope_from_hf(CONFIGS["deepseek-v3"])
    assert (spec.rotary_dim, spec.rotary_start) == (64, 128)
    assert spec.layout == "interleaved"
    assert spec.frequencies.attention_factor == 1.0
    assert math.isclose(spec.softmax_scale_factor, 1.873854207, rel_tol=1e-9)
    half = CONFIGS["deepseek-v3"] | {"rope_interleave": False}
    assert rope_from_hf(half).layout == "half"
    # Outside latent attention the pair acts on the rotation alone.
    block = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
    spec = rope_from_hf(with_block(block))
    assert spec.softmax_scale_factor == 1.0
    ratio = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert math.isclose(spec.frequencies.attention_factor, ratio, rel_tol=1e-12)


def test_hf_latent_attention_share_must_agree():
    """A share of the whole query head is legal if it names the rotary slice."""
    config = CONFIGS["deepseek-v3"]
    for share in (64 / 192, 1.0):  # of the query head, or of the slice itself
        shared = config | {"partial_rotary_factor": share}
        assert rope_from_hf(shared) == rope_from_hf(config)
    for share in (0.25, 0.5):
        with pytest.raises(ValueError, match="rotary_dim is given twice"):
            rope_from_hf(config | {"partial_rotary_factor": share})


def test_hf_hunyuan_alpha_is_the_static_ntk_base():
    """`dynamic` with `alpha`: no length, and the other keys of the block do nothing."""
    spec = rope_from_hf(CONFIGS["hunyuan-7b"], seq_len=10**6)
    base = 10_000.0 * 1000.0 ** (128 / 126)
    np.testing.assert_allclose(spec.frequencies.inv_freq, plain(128, base))
    assert spec.rope_type == "ntk_alpha"


def test_hf_mrope_sections_are_exposed():
    """Qwen2-VL takes chunks, Qwen3-VL interleaves; sections must fill the pairs."""
    spec = rope_from_hf(CONFIGS["qwen2-vl-7b"])
    assert (spec.sections, spec.section_style) == ((16, 24, 24), "chunked")
    spec = rope_from_hf(CONFIGS["qwen3-vl-8b"])
    assert (spec.sections, spec.section_style) == ((24, 20, 20), "interleaved")
    config = CONFIGS["qwen2-vl-7b"]
    saved = {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}
    assert rope_from_hf(config | {"rope_scaling": saved}) == rope_from_hf(config)
    unknown = LLAMA | {"model_type": "new", "rope_scaling": {"mrope_section": [8, 24]}}
    assert rope_from_hf(unknown).section_style is None
    unknown["rope_scaling"]["mrope_interleaved"] = True
    assert rope_from_hf(unknown).section_style == "interleaved"
    for block, message in [
        ({"mrope_section": [16, 24]}, "sum to the 64"),
        ({"type": "mrope"}, "needs mrope_section"),
        ({"mrope_section": 64}, "mrope_section must be a list"),
        ({"mrope_section": [16, 24, 24], "mrope_interleaved": True}, "style"),
    ]:
        with pytest.raises(ValueError, match=message):
            rope_from_hf(config | {"rope_scaling": block})


def test_hf_phimoe_has_a_factor_for_either_length():
    """long_mscale beyond the original length, short_mscale up to it; traced too."""
    block = LONG | {"short_mscale": 1.25, "long_mscale": 1.5}
    config = with_block(block, model_type="phimoe")
    factor = jax.jit(
        lambda length: rope_from_hf(config, seq_len=length).frequencies.attention_factor
    )
    for length, mscale in [(512, 1.25), (513, 1.5)]:
        spec = rope_from_hf(config, seq_len=length)
        assert spec.frequencies.attention_factor == mscale
        assert float(factor(jnp.int32(length))) == mscale
    assert rope_from_hf(config).frequencies.attention_factor == 1.25
    with pytest.raises(ValueError, match="short_mscale"):
        rope_from_hf(with_block(LONG | {"short_mscale": 1.25}))


def test_hf_nanochat_turns_the_other_way():
    """Its rotation is by minus the position; the frequencies carry the sign."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 128)), jnp.float32)
    spec = rope_from_hf(CONFIGS["nanochat-d32"])
    positions = jnp.arange(5) * 1000
    turned = rope(x, positions, spec.frequencies, layout=spec.layout)
    expected = rope(x, positions, frequencies.default(128), inverse=True)
    np.testing.assert_allclose(turned, expected, atol=2e-6)


# The layout.


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("llama", "half"),
        ("qwen2", "half"),
        ("gpt_neox", "half"),
        ("gpt_oss", "half"),
        ("cohere", "interleaved"),
        ("glm4", "interleaved"),
        ("glm4_moe", "half"),
        ("ernie4_5", "interleaved"),
        ("kimi_k2", "interleaved"),
        ("some_new_model", None),
        (None, None),
    ],
)
def test_r07_layout_is_stated_where_the_config_determines_it(model_type, layout):
    """And left to the caller, as None, where it does not."""
    config = LLAMA | {"model_type": model_type}
    if model_type == "gpt_oss":
        config["rope_scaling"] = YARN
    assert rope_from_hf(config).layout == layout


def test_r07_layout_key_in_the_config():
    """Flash-attention's GPT-NeoX configs state it themselves."""
    for stated, layout in [(True, "interleaved"), (False, "half")]:
        config = without(LLAMA, "model_type") | {"rotary_emb_interleaved": stated}
        assert rope_from_hf(config).layout == layout
    with pytest.raises(ValueError, match="rotary_emb_interleaved"):
        rope_from_hf(LLAMA | {"rotary_emb_interleaved": "yes"})


def test_hf_the_documented_layouts_are_those_of_the_table():
    page = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"
    rows = re.findall(
        r'^\| `"(half|interleaved)"` \|[^|]*\|([^|]*)\|$',
        page.read_text(),
        re.MULTILINE,
    )
    documented = {layout: re.findall(r"`([^`]+)`", names) for layout, names in rows}
    assert len(rows) == len(documented) == 2
    assert {family.layout for family in FAMILIES.values()} == set(documented)
    for layout, names in documented.items():
        assert len(names) == len(set(names))
        known = {name for name, family in FAMILIES.items() if family.layout == layout}
        assert set(names) == known
