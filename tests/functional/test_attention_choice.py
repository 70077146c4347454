"""Which implementation `attention` takes on which device, and what each refuses."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from rope_jax.functional import attention_cudnn
from rope_jax.functional.alibi import AlibiBias, alibi_bias
from rope_jax.functional.attention import attention
from rope_jax.functional.attention_choice import log_choice

SLOPES = np.float32([0.5, 0.25])
ALIBI = AlibiBias(SLOPES)
FUNCTION = functools.partial(alibi_bias, SLOPES)


def mesh_of(platform, devices=1, kind=AxisType.Auto):
    device = AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    mesh = AbstractMesh((devices,), ("data",), (kind,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def attend(length, dtype=jnp.bfloat16, width=64, num_keys=None, **arguments):
    """Trace attention of two heads; nothing is computed or compiled."""
    query = jax.ShapeDtypeStruct((2, length, 2, width), dtype)
    key = jax.ShapeDtypeStruct((2, num_keys or length, 2, width), dtype)
    run = functools.partial(attention, **arguments)
    return jax.eval_shape(run, query, key, key)


@pytest.fixture
def chosen(caplog):
    """chosen(...) gives the log line of the choice for arguments of `attend`."""

    def call(length, **arguments):
        log_choice.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="rope_jax"):
            attend(length, **arguments)
        (record,) = caplog.records
        assert record.name == "rope_jax"
        return record.getMessage()

    return call


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of Ampere's kind, as far as tracing can tell; cuDNN is a stand-in."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention_cudnn, "_compute_capability", lambda: (8, 0))
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda query, **arguments: query
    )


def test_a_cpu_goes_by_size_alone(chosen):
    for bias in (None, ALIBI, FUNCTION):
        for dtype in (jnp.float32, jnp.bfloat16):
            for length, name in ((384, "chunked"), (385, "blockwise")):
                line = chosen(length, bias=bias, dtype=dtype)
                sizes = f"{length} x {length} logits a head on cpu"
                assert line == f"attention by {name}: {sizes}"


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        ({"length": 2048}, "splash", "2048 x 2048 logits a head on tpu"),
        ({"length": 2048, "bias": ALIBI, "window": 99}, "splash", "on tpu"),
        ({"length": 2048, "key_mask": jnp.ones(2048, bool)}, "splash", "on tpu"),
        ({"length": 2048, "dtype": jnp.float32}, "splash", "on tpu"),
        ({"length": 2048, "bias": FUNCTION}, "blockwise", "takes no bias function"),
        ({"length": 1024, "bias": FUNCTION}, "xla", "takes no bias function"),
        ({"length": 2048, "dtype": jnp.float16}, "blockwise", "got float16"),
        ({"length": 128}, "xla", "too short to gain"),
        (
            {"length": 512, "query_positions": jnp.arange(512)},
            "xla",
            "causal mask goes by index",
        ),
    ],
)
def test_a_tpu_takes_splash_where_it_serves(arguments, name, reason, chosen):
    with mesh_of("tpu"):
        line = chosen(**arguments)
    assert line.startswith(f"attention by {name}: ") and reason in line


def test_a_mosaic_kernel_is_not_left_to_the_partitioner(chosen, caplog):
    with mesh_of("tpu", devices=8):
        assert "blockwise" in (line := chosen(2048)) and "needs a shard_map" in line
        with pytest.raises(ValueError, match=r"shard_map.*; xla, chunked, blockwise"):
            attend(2048, implementation="splash")
    device = AbstractDevice(device_kind="any", num_cores=1, platform="tpu")
    auto = (AxisType.Auto,)  # what a mesh without a word has is another in newer jax
    mesh = AbstractMesh((2,), ("data",), auto, abstract_device=device)
    rows = jax.ShapeDtypeStruct((2, 2048, 2, 64), jnp.bfloat16)
    inside = jax.shard_map(
        lambda x: attention(x, x, x),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,  # the kernel's results do not say what they vary over
    )
    log_choice.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rope_jax"):
        assert jax.eval_shape(inside, rows).shape == rows.shape
    assert caplog.messages == ["attention by splash: 2048 x 2048 logits a head on tpu"]


def test_several_devices_and_no_mesh_are_not_known_to_be_used_singly(
    chosen, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert jax.device_count() == 8
    assert "xla: 512 x 512" in (line := chosen(512)) and "no mesh that says" in line


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        ({"length": 2048}, "cudnn", "2048 x 2048 logits a head on gpu"),
        ({"length": 2048, "bias": ALIBI, "window": 99}, "cudnn", "on gpu"),
        ({"length": 1024, "key_mask": jnp.ones(1024, bool)}, "cudnn", "on gpu"),
        ({"length": 2048, "key_mask": jnp.ones(2048, bool)}, "blockwise", "all pairs"),
        ({"length": 2048, "num_keys": 4096}, "blockwise", "all pairs"),
        ({"length": 2048, "dtype": jnp.float32}, "blockwise", "got float32"),
        ({"length": 512, "bias": FUNCTION}, "xla", "takes no bias function"),
        ({"length": 512, "width": 120, "bias": ALIBI}, "xla", "128 channels, got 136"),
        ({"length": 128}, "xla", "too short to gain"),
    ],
)
def test_a_gpu_takes_cudnn_where_it_serves(arguments, name, reason, chosen, gpu):
    line = chosen(**arguments)
    assert line.startswith(f"attention by {name}: ") and reason in line


def test_each_choice_is_logged_once(caplog):
    log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="rope_jax"):
        for length in (64, 64, 65, 64):
            attend(length)
        attend(64, implementation="xla")
        attend(64, implementation="xla")
    assert [record.getMessage() for record in caplog.records] == [
        "attention by chunked: 64 x 64 logits a head on cpu",
        "attention by chunked: 65 x 65 logits a head on cpu",
        "attention by xla: asked for",
    ]


ABLE = "; xla, chunked, blockwise"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cudnn", {}, f"'cudnn' cannot serve.*NVIDIA GPU.*got cpu{ABLE} can"),
        ("splash", {"dtype": jnp.float16}, f"float32 and bfloat16, got float16{ABLE}"),
        ("splash", {"bias": FUNCTION}, f"no bias function.*AlibiBias.*{ABLE} can"),
        ("splash", {"bias": jnp.ones((1, 1, 8))}, f"no array as bias{ABLE} can"),
        ("splash", {"bias": ALIBI, "causal": False}, f"causal=False{ABLE} can"),
        ("splash", {"key_positions": jnp.arange(8)}, f"positions were given{ABLE} can"),
    ],
)
def test_a_refusal_says_why_and_which_can(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        attend(8, implementation=name, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": jnp.float32}, f"bfloat16 and float16, got float32{ABLE} can"),
        ({"width": 129}, f"up to 128 channels, got 136{ABLE} can"),
        ({"bias": jnp.ones((8, 8))}, f"a bias of float32 to bfloat16{ABLE} can"),
        ({"bias": FUNCTION}, f"no bias function.*{ABLE} can"),
        ({"bias": ALIBI, "causal": False}, f"causal=False{ABLE} can"),
        ({"bias": ALIBI, "scale": -1}, f"positive scale only, got -1.0{ABLE} can"),
    ],
)
def test_cudnn_refuses_what_it_would_round_or_cannot_hold(arguments, message, gpu):
    with pytest.raises(ValueError, match=message):
        attend(8, implementation="cudnn", **arguments)


def test_hopper_takes_wider_heads_and_older_gpus_none(gpu, monkeypatch):
    monkeypatch.setattr(attention_cudnn, "_compute_capability", lambda: (9, 0))
    attend(8, width=256, implementation="cudnn")
    monkeypatch.setattr(attention_cudnn, "_compute_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        attend(8, implementation="cudnn")
    with mesh_of("tpu"), pytest.raises(ValueError, match=r"NVIDIA GPU.*got tpu"):
        attend(8, implementation="cudnn")


@pytest.mark.parametrize("window", [0, -1, 2.0])
def test_a_window_is_a_count(window):
    with pytest.raises(ValueError, match=f"window must be an integer.*got {window}"):
        attend(8, window=window)


def test_a_window_ends_causal_attention_only():
    with pytest.raises(ValueError, match="window needs causal=True, got 4"):
        attend(8, window=4, causal=False)


def test_a10_masks_given_to_cudnn_stay_finite(monkeypatch, gpu):
    """The lowest number, minus infinity and a mask on one key, in float16 too."""
    given = {}

    def record(query, *, bias, **arguments):
        given["bias"] = bias
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    for dtype in (jnp.bfloat16, jnp.float16):
        x, lowest = jnp.ones((4, 1, 8), dtype), jnp.finfo(dtype).min
        bias = jnp.zeros((4, 4), dtype).at[:, 0].set(lowest).at[:, 3].set(-jnp.inf)
        mask = jnp.array([False, True, True, False])
        attention(x, x, x, bias=bias, key_mask=mask, implementation="cudnn")
        got = np.float64(given["bias"][0, 0])
        assert np.isfinite(got).all()
        assert (got[2, [0, 3]] < -3e4).all() and (got[2, [1, 2]] == 0).all()


def test_splash_takes_ids_and_masks_of_rows_or_of_all():
    rows, alone = jnp.ones((2, 8), int), jnp.ones(8, int)
    for query_ids in (rows, alone):
        for key_ids in (rows, alone):
            for mask in (rows, alone):
                out = attend(
                    8,
                    implementation="splash",
                    segment_ids=(query_ids, key_ids),
                    key_mask=mask.astype(bool),
                )
                assert out.shape == (2, 8, 2, 64)
