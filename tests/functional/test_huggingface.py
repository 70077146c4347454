"""Parsing of Hugging Face configs of both generations, and everything that raises.

The frequencies behind them are compared with transformers in `tests/golden`; here the
expected numbers are short float64 formulas written out again.
"""

import copy
import json
import math
import pathlib

import numpy as np
import pytest

from rope_jax.functional import frequencies
from rope_jax.functional.huggingface import rope_from_hf

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


# Where the config comes from.


def test_hf_reads_a_dict_and_a_file(tmp_path):
    """A dict, a path and a string name the same thing; the dict is left alone."""
    config = copy.deepcopy(CONFIGS["gemma-3-4b"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    specs = [
        rope_from_hf(source, layer_type="full_attention")
        for source in (config, path, str(path))
    ]
    assert specs[0] == specs[1] == specs[2]
    assert config == CONFIGS["gemma-3-4b"]


def test_hf_follows_text_config_and_joins_keys_outside_it():
    """Keys about rotation outside a text_config count as inside, and must agree."""
    inner = without(LLAMA, "rope_theta")
    outer = {"model_type": "llava", "vision_config": {"rope_theta": 100.0}}
    spec = rope_from_hf(outer | {"text_config": LLAMA | {"rope_theta": 5e5}})
    np.testing.assert_allclose(spec.frequencies.inv_freq, plain(64, 5e5))
    assert spec.layout == "half"
    joined = outer | {"text_config": inner, "rope_theta": 2e4}
    np.testing.assert_allclose(inv_freq(joined), plain(64, 2e4))
    with pytest.raises(ValueError, match=r"rope_theta .*10000.*20000"):
        rope_from_hf(joined | {"text_config": LLAMA})
    outer["model_type"] = "cohere"
    unnamed = outer | {"text_config": without(LLAMA, "model_type")}
    assert rope_from_hf(unnamed).layout == "interleaved"


@pytest.mark.parametrize("config", [None, 3, ["rope_theta"], {"text_config": 3}])
def test_hf_rejects_what_is_no_config(config):
    """Neither a dict nor a path."""
    with pytest.raises(ValueError, match=r"config.* must be a dict"):
        rope_from_hf(config)


# Legacy names and the current ones.


@pytest.mark.parametrize(
    ("config", "width", "theta"),
    [
        (
            {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500},
            32,
            500,
        ),
        ({"model_type": "gpt_neox"}, 16, 10_000),
        ({"model_type": "stablelm", "rope_pct": 0.5, "rope_theta": 20.0}, 32, 20),
        ({"model_type": "phi", "partial_rotary_factor": 0.25}, 16, 10_000),
        ({"model_type": "phi"}, 32, 10_000),
        ({"model_type": "minimax_m2", "head_dim": 64, "rotary_dim": 32}, 32, 5e6),
        ({"model_type": "nomic_bert", "rotary_emb_fraction": 1.0}, 64, 1000),
        ({"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}, 64, 77),
        ({"rope_parameters": {"rope_theta": 77.0}, "rope_theta": 77}, 64, 77),
        ({"rope_parameters": {"rope_theta": 7, "partial_rotary_factor": 0.5}}, 32, 7),
    ],
)
def test_hf_names_of_the_base_and_of_the_share(config, width, theta):
    """Every name that a family has for them, and the defaults of the families."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4}
    spec = rope_from_hf(sizes | config)
    np.testing.assert_allclose(spec.frequencies.inv_freq, plain(width, theta))
    assert spec.rotary_dim == width


def test_hf_gptj_names():
    """GPT-J: n_embd, n_head, rotary_dim, a base that is nowhere, interleaved."""
    spec = rope_from_hf({"model_type": "gptj", "n_embd": 512, "n_head": 4})
    assert (spec.layout, spec.rotary_dim) == ("interleaved", 64)
    np.testing.assert_allclose(spec.frequencies.inv_freq, plain(64))


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("outer", ["rope_scaling", "rope_parameters"])
def test_hf_type_names_of_both_generations(name, outer):
    """`type` and `rope_type` in `rope_scaling` and `rope_parameters` are the same."""
    config = LLAMA | {outer: {name: "linear", "factor": 4.0}}
    spec = rope_from_hf(config)
    assert spec.rope_type == "linear"
    np.testing.assert_allclose(spec.frequencies.inv_freq, plain(64) / 4)


@pytest.mark.parametrize(
    "block", [None, {}, {"rope_type": "default"}, {"type": "default"}]
)
def test_hf_no_scaling(block):
    """Null, an empty block and "default" all mean the plain ladder."""
    np.testing.assert_allclose(inv_freq(with_block(block)), plain(64))


def test_hf_su_and_the_yarn_of_phi3_are_longrope():
    """Old Phi-3 files call LongRoPE "su", or even "yarn"."""
    long = without(LONG, "rope_type")
    expected = inv_freq(with_block(LONG), seq_len=513)
    np.testing.assert_allclose(expected, plain(64) / 2)
    for name in ("su", "yarn"):
        config = with_block(long | {"type": name}, model_type="phi3")
        np.testing.assert_allclose(inv_freq(config, seq_len=513), expected)
    with pytest.raises(ValueError, match=r"yarn.* needs .*factor"):
        rope_from_hf(with_block(long | {"type": "yarn"}))


def test_hf_nested_by_layer_type_with_null_for_no_rotation():
    """One block per layer type; null means that those layers do not rotate."""
    blocks = {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 99.0},
    }
    config = without(LLAMA, "rope_theta") | {
        "rope_parameters": blocks,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
    }
    assert rope_from_hf(config, layer_type="full_attention") is None
    assert rope_from_hf(config, layer_index=2) is None
    for options in ({"layer_type": "sliding_attention"}, {"layer_index": 1}, {}):
        np.testing.assert_allclose(inv_freq(config, **options), plain(64, 99.0))
    blocks["sliding_attention"] = None
    assert rope_from_hf(config) is None
    labels = {"main": {"rope_theta": 5.0}, "compress": None}
    config = without(LLAMA, "rope_theta") | {"rope_parameters": labels}
    assert rope_from_hf(config, layer_type="compress") is None
    np.testing.assert_allclose(inv_freq(config, layer_type="main"), plain(64, 5.0))


def test_hf_leftovers_beside_nested_blocks():
    """transformers can leave flat keys there: they count as given in each block."""
    blocks = {
        "full_attention": {"rope_theta": 5.0},
        "sliding_attention": {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0},
        "rope_type": "default",
        "rope_theta": None,
    }
    config = without(LLAMA, "rope_theta") | {"rope_parameters": blocks}
    sliding = inv_freq(config, layer_type="sliding_attention")
    np.testing.assert_allclose(sliding, plain(64, 5.0) / 2)
    with pytest.raises(ValueError, match="layer_type"):
        rope_from_hf(config)
    blocks["partial_rotary_factor"] = 0.5
    sliding = inv_freq(config, layer_type="sliding_attention")
    np.testing.assert_allclose(sliding, plain(32, 5.0) / 2)
    blocks["rope_theta"] = 6.0
    with pytest.raises(ValueError, match="rope_theta is given twice"):
        rope_from_hf(config, layer_type="sliding_attention")


def test_hf_null_rope_parameters_mean_no_rotation():
    """From transformers 5 on; a base beside them is a contradiction."""
    config = without(LLAMA, "rope_theta") | {"rope_parameters": None}
    assert rope_from_hf(config) is None
    with pytest.raises(ValueError, match="rope_parameters is null"):
        rope_from_hf(LLAMA | {"rope_parameters": None})


def test_hf_layers_that_differ_must_be_named():
    """Without a layer the result is for all rotating layers, if they agree."""
    config = CONFIGS["gemma-3-27b-v5"]
    with pytest.raises(ValueError, match="layer_type"):
        rope_from_hf(config)
    same = copy.deepcopy(config)
    blocks = same["text_config"]["rope_parameters"]
    blocks["full_attention"] = blocks["sliding_attention"]
    np.testing.assert_allclose(inv_freq(same), plain(128))


# What raises.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_block({"rope_type": "lama3", "factor": 8.0}), "rope_type must be one of"),
        (with_block({"rope_type": ["linear"], "factor": 8.0}), "rope_type"),
        (with_block({"factor": 2.0}), "rope_type is missing"),
        (with_block("linear"), "rope_scaling must be a dict"),
        (with_block({"rope_type": "linear"}), r"needs \['factor'\]"),
        (with_block({"rope_type": "linear", "factor": "2"}), "factor must be a number"),
        (with_block({"rope_type": "linear", "factor": True}), "factor"),
        (with_block({"rope_type": "linear", "factor": 0.5}), "factor"),
        (with_block({"rope_type": "linear", "factor": 2.0, "fator": 4.0}), "fator"),
        (with_block({"rope_type": "default", "factor": 2.0}), "factor"),
        (with_block(YARN | {"attn_factor": 1.0}), "attn_factor"),
        (with_block(YARN | {"low_freq_factor": 1.0}), "low_freq_factor"),
        (with_block(YARN | {"truncate": 0}), "truncate"),
        (with_block(YARN | {"type": "linear"}), "rope_type is given twice"),
        (with_block(LONG | {"long_factor": [2.0] * 31}), "long_factor"),
        (with_block(LONG | {"long_factor": 2.0}), "long_factor must be a list"),
        (with_block(LLAMA3 | {"low_freq_factor": 8.0}), "high_freq_factor"),
        (LLAMA | {"rope_theta": "10000"}, "rope_theta must be a number"),
        (LLAMA | {"rope_theta": math.nan}, "rope_theta must be finite"),
        (LLAMA | {"rope_theta": -1.0}, "theta"),
        (LLAMA | {"rope_ratio": 2.0}, "rope_ratio"),
        (LLAMA | {"use_dynamic_ntk": True}, "use_dynamic_ntk"),
        (LLAMA | {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (LLAMA | {"rotary_dim": 80}, "rotary_dim"),
        (LLAMA | {"rotary_dim": 33}, "dim"),
        (LLAMA | {"num_attention_heads": 5}, "num_attention_heads must divide"),
        (without(LLAMA, "hidden_size"), "head_dim is missing"),
        (LLAMA | {"head_dim": 65}, "dim"),
        (without(LLAMA, "rope_theta", "model_type"), "rope_theta"),
        (LLAMA | {"model_type": 3}, "model_type"),
        (LLAMA | {"model_type": "ernie4_5_vl_moe"}, "ernie4_5_vl_moe.* not supported"),
        (LLAMA | {"model_type": "deepseek_v4"}, "deepseek_v4.* not supported"),
        (LLAMA | {"model_type": "gpt_oss"}, "rope_parameters is missing"),
        (
            with_block({"rope_type": "dynamic", "factor": 2.0})
            | {"original_max_position_embeddings": 512},
            "original_max_position_embeddings is given twice",
        ),
        (
            without(
                with_block({"type": "dynamic", "factor": 2}),
                *["max_position_embeddings"],
            ),
            "max_position_embeddings is missing",
        ),
    ],
)
def test_hf_unknown_missing_and_malformed_keys_raise(config, message):
    """ValueError that names the key; nothing falls back in silence."""
    with pytest.raises(ValueError, match=message):
        rope_from_hf(config)


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        (YARN, ["factor", "original_max_position_embeddings"]),
        (LLAMA3, [key for key in LLAMA3 if key != "rope_type"]),
        (LONG, [key for key in LONG if key != "rope_type"]),
        ({"rope_type": "dynamic", "factor": 2.0}, ["factor"]),
    ],
)
def test_hf_each_required_key_is_required(block, keys):
    """The whole block works; without any one of its keys it raises, naming it."""
    assert rope_from_hf(with_block(block)) is not None
    for key in keys:
        with pytest.raises(ValueError, match=key):
            rope_from_hf(with_block(without(block, key)))


@pytest.mark.parametrize("kind", ["llama3", "proportional"])
def test_hf_some_types_need_the_base_spelled_out(kind):
    """Even where the family has a default for it."""
    block = LLAMA3 if kind == "llama3" else {"rope_type": kind}
    with pytest.raises(ValueError, match="rope_theta"):
        rope_from_hf(without(with_block(block), "rope_theta"))


@pytest.mark.parametrize(
    "twice",
    [
        {"rope_parameters": {"rope_theta": 20_000.0}},
        {"rotary_emb_base": 20_000},
        {"partial_rotary_factor": 0.5, "rotary_pct": 0.25},
        {"partial_rotary_factor": 0.5, "rotary_dim": 16},
        {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
        {"rope_scaling": YARN | {"max_position_embeddings": 1024}},
        {"rope_scaling": {"full_attention": YARN, "rope_theta": 1.0}},
        {"rope_scaling": {"full_attention": YARN, "colour": 1.0}},
        {"rope_scaling": YARN, "rope_parameters": {"full_attention": YARN}},
    ],
)
def test_hf_a_value_given_twice_must_agree(twice):
    """The same pairs are accepted once they do agree."""
    with pytest.raises(ValueError, match=r"given twice|given too|mixes"):
        rope_from_hf(LLAMA | twice)


def test_hf_a_value_given_twice_that_agrees_is_accepted():
    """Files that transformers 5 upgraded say many things twice."""
    block = YARN | {
        "type": "yarn",
        "rope_theta": 10_000,
        "max_position_embeddings": 2048,
    }
    config = LLAMA | {
        "rope_scaling": YARN,
        "rope_parameters": block,
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": 0.5,
        "rotary_pct": 0.5,
        "rotary_dim": 32,
    }
    spec = rope_from_hf(config)
    expected = frequencies.yarn(32, factor=4, original_max_position_embeddings=512)
    assert spec.frequencies == expected


def test_hf_a_null_yarn_factor_is_the_ratio_of_the_lengths():
    """As the DeepSeek files of old; a missing one is an error."""
    assert rope_from_hf(with_block(YARN | {"factor": None})) == rope_from_hf(
        with_block(YARN)
    )


def test_hf_keys_that_do_not_touch_the_rotation_are_accepted():
    """The short list of them, and no others."""
    known = YARN | {"finetuned": True}
    assert rope_from_hf(with_block(known)) == rope_from_hf(with_block(YARN))
    assert rope_from_hf(LLAMA | {"rope_ratio": None}) == rope_from_hf(LLAMA)


def test_hf_the_scaling_of_queries_by_position_is_reported():
    """`llama_4_scaling_beta` (Ministral 3) is not part of the rotation, but acts."""
    plain_spec = rope_from_hf(with_block(YARN))
    assert (plain_spec.query_scaling_beta, plain_spec.query_scaling_length) == (0, None)
    spec = rope_from_hf(with_block(YARN | {"llama_4_scaling_beta": 0.1}))
    assert spec.frequencies == plain_spec.frequencies
    assert spec.query_scaling_beta == 0.1
    assert spec.query_scaling_length == YARN["original_max_position_embeddings"]
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta needs original_max"):
        rope_from_hf(with_block({"rope_type": "default", "llama_4_scaling_beta": 0.1}))
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta.*'much'"):
        rope_from_hf(with_block(YARN | {"llama_4_scaling_beta": "much"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_index": 4}, "layer_index must be below 4"),
        ({"layer_index": -1}, "layer_index"),
        ({"layer_type": "full"}, "layer_type must be one of"),
        ({"seq_len": 0}, "seq_len"),
    ],
)
def test_hf_impossible_requests_raise(options, message):
    """A layer that is not there, a type that no config has, no length."""
    config = with_block({"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match=message):
        rope_from_hf(config, **options)


def test_hf_layer_type_must_be_one_of_the_config():
    """And agree with the index."""
    config = LLAMA | {"layer_types": ["full_attention"] * 4}
    with pytest.raises(ValueError, match="layer_type must be one of"):
        rope_from_hf(config, layer_type="sliding_attention")
    with pytest.raises(ValueError, match="layer_type is given twice"):
        rope_from_hf(config, layer_type="sliding_attention", layer_index=0)
    nested = CONFIGS["gemma-3-27b-v5"]
    with pytest.raises(ValueError, match="layer_type"):
        rope_from_hf(nested, layer_type="chunked_attention")


def test_hf_length_dependent_types_without_a_length():
    """None means: no longer than the original context."""
    dynamic = with_block({"rope_type": "dynamic", "factor": 2.0})
    np.testing.assert_allclose(inv_freq(dynamic), plain(64))
    np.testing.assert_allclose(inv_freq(with_block(LONG)), plain(64))
