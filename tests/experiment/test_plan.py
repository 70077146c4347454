"""Plans: of virtual devices, of GPUs by lowering, of a TPU if its compiler is here."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest

from rope_jax.experiment.abstract_step import state_init, train_call
from rope_jax.experiment.chips import CHIPS, parse_topology
from rope_jax.experiment.config import (
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    TrainConfig,
    resolve,
)
from rope_jax.experiment.mesh import make_mesh
from rope_jax.experiment.plan import plan
from rope_jax.experiment.plan_table import render
from rope_jax.experiment.roofline import estimate
from rope_jax.nn.config import DecoderConfig


def config(**mesh):
    return Config(
        model=DecoderConfig(
            num_layers=2, model_dim=16, num_heads=2, head_dim=8, mlp_dim=32
        ),
        data=DataConfig(length=16),
        train=TrainConfig(batch_size=8, steps=200),
        eval=EvalConfig(lengths=(16, 32), block=8, batch_tokens=128),
        mesh=MeshConfig(**mesh),
    )


@pytest.fixture(scope="module")
def virtual():
    """The plan of a tiny run on 8 virtual devices, weights over 4 of them."""
    return plan(config(data=2, fsdp=4), parse_topology("cpu:8"))


def test_the_state_of_a_chip_is_its_part_of_each_array(virtual):
    # Norms (5 x 16) are whole; an embedding and a head of 256 x 16 and two layers of
    # 4 * 16 * 16 + 3 * 16 * 32 are over fsdp.
    local = 4 * (80 + (2 * 4096 + 2 * 2560) // 4)
    assert virtual["state"]["parameters"] == local
    # Two moments of each, and two counts of updates.
    assert virtual["state"]["optimizer"] == 2 * local + 2 * 4
    arguments = virtual["train"]["memory"]["arguments"]
    assert arguments - 3 * local < 1000  # the batch, the key, the counts


def test_collectives_are_named_with_their_axes(virtual):
    found = {(r["kind"], *r["axes"]): r for r in virtual["train"]["collectives"]}
    sums = [row for name, row in found.items() if "data" in name]
    assert sums and all(row["exact"] for row in found.values())
    # At least the gradients of a chip's matrices are summed over data, in float32.
    assert sum(row["payload"] for row in sums) >= 4 * (2 * 4096 + 2 * 2560) // 4
    assert virtual["train"]["fits"] and virtual["eval"]["fits"]
    assert virtual["eval"]["length"] == 32


def test_the_text_has_it_all_and_claims_no_roofline(virtual):
    text = render(virtual)
    assert "cpu:8: 8 chips as data 2 x fsdp 4 x tensor 1 x sequence 1" in text
    assert "13,392 parameters, float32, remat none" in text
    assert "train step: collectives" in text and "eval step: " in text
    assert "no roofline: virtual devices have no stated numbers" in text
    assert json.loads(json.dumps(virtual))["work"]["parameters"] == 13392


def test_gpus_are_lowered_for_and_planned_by_arithmetic():
    made = plan(config(data=2, fsdp=2, tensor=2), parse_topology("cuda:h100:8"))
    assert made["train"]["fits"] is None and made["train"]["lowered_bytes"] > 1000
    assert made["estimate"]["network"] > 0
    text = render(made)
    assert "no compiler for it here; activations by arithmetic" in text
    assert "train: would fit by arithmetic" in text
    assert "estimated by roofline, at best: NVIDIA H100 SXM at 989 TFLOP/s" in text


@pytest.mark.parametrize(
    ("topology", "mesh", "message"),
    [
        ("cpu:8", {"data": 4}, "must use the 8 of --topology=cpu:8"),
        ("cuda:h100:16", {"data": 1, "tensor": 16}, "must divide the 2 heads"),
        ("cpu:9", {"data": 3, "fsdp": 3}, "must divide the 8 sequences"),
        ("cpu:16", {"data": 8, "tensor": 2}, "set JAX_NUM_CPU_DEVICES=16"),
    ],
)
def test_sizes_that_do_not_fit_raise(topology, mesh, message):
    with pytest.raises(ValueError, match=message):
        plan(config(**mesh), parse_topology(topology))


def test_a_plan_is_of_one_encoding():
    several = config(data=8)
    several.sweep.encodings = ("rope", "alibi")
    with pytest.raises(ValueError, match="must be one for a plan, got rope,alibi"):
        plan(several, parse_topology("cpu:8"))
    several.sweep.encodings = ("alibi",)
    assert plan(several, parse_topology("cuda:h100:8"))["encoding"] == "alibi"


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs .* libtpu: pip install '\.\[tpu\]'"):
        plan(config(data=4), parse_topology("v5e:2x2"))


def test_a_wrong_topology_ends_the_command(run):
    code, output = run("rope_jax.experiment.plan", "--topology=v5e:3x3")
    assert code == 2
    assert "error: --topology must be one of v5e:SHAPE" in output


def test_the_command_prints_and_writes_the_plan(run, tmp_path):
    configs = pathlib.Path(__file__).parents[2] / "configs"
    code, output = run(
        "rope_jax.experiment.plan",
        f"--config={configs}/scaling.py:10m",
        "--config.model.num_layers=1",
        "--topology=cuda:h100:8",
        "--json=plan.json",
    )
    assert code == 0, output
    assert "cuda:h100:8: 8 chips as data 1 x fsdp 8 x tensor 1 x sequence 1" in output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["work"]["tokens"] == 2**19
    assert f"{written['work']['parameters']:,} parameters" in output


def test_the_roofline_by_hand():
    work = {
        "model_flops": 4 * 197e12,
        "executed_flops": 8 * 197e12,
        "memory_traffic_per_chip": 3 * 819e9,
    }
    rows = [{"sent": 10e9}, {"sent": 40e9}]
    made = {"work": work, "train": {"memory": {}, "collectives": rows}}
    found = estimate(parse_topology("v5e:2x2"), made)
    times = {name: found[name] for name in ("compute", "memory", "network", "sum")}
    assert times == {"compute": 2.0, "memory": 3.0, "network": 0.5, "sum": 5.5}
    assert (found["best"], found["limit"]) == (3.0, "memory")
    assert found["mfu_best"] == pytest.approx(1 / 3)  # 1 s of the model's arithmetic
    assert found["intensity"] == 2 * 197e12 / (3 * 819e9)
    assert found["ridge"] == CHIPS["v5e"].ridge


def test_gpus_beyond_one_machine_have_no_network_time():
    work = {
        "model_flops": 16 * 989e12,
        "executed_flops": 16 * 989e12,
        "memory_traffic_per_chip": 3350e9 / 2,
        "network_traffic_per_chip": {"data": 1e12},
    }
    made = {"work": work, "train": {"memory": None}}
    found = estimate(parse_topology("cuda:h100:16"), made)
    assert found["network"] is None and found["best"] == 1.0


def test_moments_over_data_change_no_number():
    """ZeRO-1: a part of the moments on each device, and the same parameters after."""
    made = {}
    for shard in (False, True):
        one = resolve(config(data=4, fsdp=2, shard_optimizer=shard))
        mesh = make_mesh(one.mesh)
        with jax.set_mesh(mesh):
            step, (state, batch) = train_call(one, mesh)
            place = jax.tree.map(lambda x: x.sharding, state)
            begin = jax.jit(state_init(one), out_shardings=place)(jax.random.key(0))
            tokens = np.arange(8 * 16).reshape(8, 16) % 256
            tokens = jax.device_put(tokens.astype(np.int32), batch["inputs"].sharding)
            after, _ = step(begin, {"inputs": tokens, "targets": tokens})
        made[shard] = jax.device_get(after.params)
        parts = {"scale": set(), "others": set()}
        for path, x in jax.tree_util.tree_leaves_with_path(after.opt_state):
            if x.ndim:
                kind = "scale" if path[-1].key == "scale" else "others"
                parts[kind].add(x.size // x.addressable_shards[0].data.size)
        # A norm's scale is whole on every device, and so are its moments.
        assert parts == {"scale": {1}, "others": {8 if shard else 2}}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        made[True],
        made[False],
    )


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the compiler for TPUs, libtpu, is not installed",
)
def test_a_tpu_that_is_not_here():
    made = plan(config(data=2, fsdp=2), parse_topology("v5e:2x2"))
    assert made["train"]["fits"] and made["train"]["memory"]["total"] > 0
    assert made["train"]["collectives"]
    assert made["estimate"]["best"] > 0
    assert "train: fits" in render(made)
