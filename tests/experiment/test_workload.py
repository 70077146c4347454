"""The arithmetic of a step, by hand."""

import dataclasses
import pathlib
import runpy

import pytest

from rope_jax.experiment.config import Config, DataConfig, TrainConfig
from rope_jax.experiment.workload import (
    memory_traffic,
    network_traffic,
    saved_activations,
    tokens_per_chip,
    work,
)
from rope_jax.nn.config import DecoderConfig

ONE = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}


def config(*, accumulate=1, rows=8, **model):
    """2 layers of 4 * 16 * 16 + 3 * 16 * 32 = 2560 and a head of 16 * 32 = 512."""
    options = {
        "num_layers": 2,
        "model_dim": 16,
        "num_heads": 4,
        "head_dim": 4,
        "mlp_dim": 32,
        "vocab_size": 32,
        "dtype": "bfloat16",
    }
    return Config(
        model=DecoderConfig(**options | model),
        data=DataConfig(length=6),
        train=TrainConfig(batch_size=rows, accumulate=accumulate),
    )


def test_the_work_of_a_small_model():
    made = work(config())
    # And an embedding of 32 * 16, and five norms of 16.
    assert (made.parameters, made.matrix_parameters) == (6224, 5632)
    assert made.weight_flops == 6 * 5632 * 48
    # 21 pairs in a row of 6; scores and mixing are 2 * 2 * 4 for each of 4 heads.
    assert made.attention_flops == 3 * 8 * 21 * 2 * 4 * 16
    assert made.executed_flops == made.model_flops


@pytest.mark.parametrize(
    ("model", "pairs"),
    [
        ({"window": 2}, 11),  # 1 + 5 * 2
        ({"window": 9}, 21),
        ({"attention": "linear"}, 6 * 8),  # head_dim * ceil(ln 4) features
    ],
)
def test_pairs_of_a_window_and_features_of_linear_attention(model, pairs):
    assert work(config(**model)).attention_flops == 12 * 8 * pairs * 2 * 4 * 4


def test_what_is_computed_again():
    none, dots, full = (work(config(remat=name)) for name in ("none", "dots", "full"))
    attention = none.attention_flops / 3
    layers = 2 * (5632 - 512) * 48  # once more forward, without the head
    assert none.recomputed_flops == 0
    assert dots.recomputed_flops == attention
    assert full.recomputed_flops == attention + layers


def test_tied_and_grouped_parameters():
    made = work(config(tied_output=True, num_kv_heads=2, mlp="plain"))
    # Keys and values have half the heads: 3 * 16 * 16 + 2 * 16 * 32 in a layer.
    assert made.matrix_parameters == 2 * (768 + 1024) + 512
    assert made.parameters == made.matrix_parameters + 5 * 16


def test_tokens_of_a_chip():
    mesh = ONE | {"data": 2, "tensor": 4, "sequence": 3}
    assert tokens_per_chip(config(), mesh) == 8


def test_memory_traffic_by_hand():
    # Of a layer and token: 4 * 16 for the products' ends at D, 96 at F, and twice the
    # 64 of queries, keys, values and results; 2 bytes each, 3 passes.
    activations = 2 * (64 + 96 + 128) * 2 * 48
    expected = 3 * (2 * 5632 + activations) + 8 * 4 * 6224
    assert memory_traffic(config(), ONE) == expected
    twice = memory_traffic(config(accumulate=2), ONE)
    assert twice - expected == 3 * 2 * 5632  # the weights once more
    halved = memory_traffic(config(), ONE | {"data": 2})
    assert expected - halved == 3 * activations / 2


def test_network_traffic_by_hand():
    none = dict.fromkeys(ONE, 0.0)
    assert network_traffic(config(), ONE) == none
    data = network_traffic(config(), ONE | {"data": 4})
    assert data == none | {"data": 2 * 3 / 4 * 2 * 6224}
    # Weights forward and backward, and gradients, 2 bytes each.
    fsdp = network_traffic(config(), ONE | {"fsdp": 2})
    assert fsdp == none | {"fsdp": 0.5 * 6224 * 6}
    # Four sums of [48, 16] in a layer.
    tensor = network_traffic(config(), ONE | {"tensor": 2})
    assert tensor == none | {"tensor": 0.5 * 2 * 4 * 48 * 16 * 2 * 2}
    full = network_traffic(config(remat="full"), ONE | {"fsdp": 2, "tensor": 2})
    assert full["fsdp"] == 0.5 * 3112 * 6
    assert full["tensor"] == 0.5 * 2 * 6 * 24 * 16 * 2 * 2
    # Keys and values of whole rows, and their gradients.
    split = network_traffic(config(), ONE | {"sequence": 2})
    assert split["sequence"] == 0.5 * (2 * 2 * 6224 + 2 * 48 * 2 * 16 * 2 * 2)


def test_less_is_kept_the_more_is_computed_again():
    kept = [
        saved_activations(config(remat=name), ONE) for name in ("none", "dots", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    # One layer more costs its input alone, if all is computed again: 16 bfloat16.
    deeper = saved_activations(config(remat="full", num_layers=3), ONE)
    assert deeper - kept[2] == 48 * 16 * 2 + 4 * (2560 + 32)


def test_a_half_of_the_tokens_keeps_a_half():
    made = dataclasses.replace(config(remat="full"))
    whole = saved_activations(made, ONE)
    half = saved_activations(made, ONE | {"sequence": 2})
    assert half - 4 * 6224 == (whole - 4 * 6224) / 2


@pytest.fixture(scope="module")
def scaling():
    path = pathlib.Path(__file__).parents[2] / "configs" / "scaling.py"
    return runpy.run_path(str(path))["get_config"]


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("10m", 10_327_360),
        ("100m", 99_505_920),
        ("1b", 1_028_737_024),
        ("8b", 8_189_644_800),
    ],
)
def test_the_sizes_of_the_scaling_configs(scaling, size, parameters):
    assert work(scaling(size)).parameters == parameters


def test_the_contexts_of_the_scaling_configs(scaling):
    long = scaling("1b-128k")
    assert (long.data.length, long.train.batch_size) == (131_072, 16)
    assert scaling("1b").train.batch_size == 4096
    with pytest.raises(ValueError, match=r"one of 10m, 100m, 1b, 8b .* got '7b'"):
        scaling("7b")
    with pytest.raises(ValueError, match="CONTEXT one of 512, 8k, 128k; got '1b-4k'"):
        scaling("1b-4k")
