"""Attention compiled for devices that are not here: NVIDIA GPUs and TPUs."""

import functools
import os

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from rope_jax.functional.alibi import AlibiBias, alibi_bias, alibi_fold
from rope_jax.functional.attention import attention

LENGTH = 1024
SEGMENTS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
SLOPES = jax.ShapeDtypeStruct((8,), jnp.float32)


def arrays(dtype=jnp.bfloat16):
    shapes = ((2, LENGTH, 8, 64), (2, LENGTH, 2, 64), (2, LENGTH, 2, 64))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def gradient(bias, **arguments):
    """The gradient of attention in query, key, value and slopes, as one function."""

    def loss(query, key, value, slopes, segments):
        if bias == "fold":
            at, scale = jnp.arange(LENGTH), 0.125
            query, key = alibi_fold(query, key, slopes, at, at, scale=scale)
        term = bias(slopes) if callable(bias) else None
        out = attention(
            query, key, value, bias=term, segment_ids=segments, scale=0.125, **arguments
        )
        return jnp.sum(out.astype(jnp.float32))

    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))


def as_function(slopes):
    return functools.partial(alibi_bias, slopes)


@pytest.mark.parametrize("implementation", ["xla", "chunked", "blockwise"])
@pytest.mark.parametrize("bias", [as_function, "fold"])
def test_plain_implementations_and_the_fold_lower_for_cuda(implementation, bias):
    run = gradient(bias, implementation=implementation)
    exported = jax.export.export(run, platforms=["cuda"])(*arrays(), SLOPES, SEGMENTS)
    assert exported.platforms == ("cuda",)
    assert [out.shape for out in exported.out_avals] == [
        *(x.shape for x in arrays()),
        (8,),
    ]


@pytest.fixture(scope="module")
def tpu():
    """tpu(name) is a mesh of one chip that is described, not present."""
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, is not here")
    settings = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, os.environ.get(name, value))

        def mesh(name):
            chips = topologies.get_topology_desc(name, platform="tpu").devices
            return jax.sharding.Mesh(chips[:1], ("data",))

        yield mesh


@pytest.mark.parametrize("chip", ["v5e:2x2x1", "v5p:2x2x1", "v6e:2x2x1"])
def test_splash_compiles_for_tpus_with_linear_memory(chip, tpu):
    """Forward and backward, chosen by "auto", with ALiBi, segments, grouped heads."""
    with jax.set_mesh(tpu(chip)):
        lowered = gradient(AlibiBias).lower(*arrays(), SLOPES, SEGMENTS)
        compiled = lowered.compile()
    kernels = [line for line in compiled.as_text().splitlines() if "splash_" in line]
    for part in ("fwd", "dq", "dkv"):
        assert any(f"splash_mha_{part}" in line for line in kernels)
    # One head's weights in float32 would be 4 MiB for each row, 64 MiB in all.
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 2 * 8 * LENGTH * LENGTH * 4 / 2


def test_a09_splash_makes_no_array_of_all_pairs_for_a_mask(tpu):
    """In float32, with a window, and fewer queries than keys."""

    def loss(query, key, value, mask):
        out = attention(
            query, key, value, key_mask=mask, window=500, implementation="splash"
        )
        return jnp.sum(out)

    query = jax.ShapeDtypeStruct((1, 16_084, 2, 64), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 16_384, 1, 64), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 16_384), bool)
    with jax.set_mesh(tpu("v5e:2x2x1")):
        run = jax.jit(jax.grad(loss, (0, 1, 2)))
        compiled = run.lower(query, key, key, mask).compile()
    # All pairs would be 251 MiB as bytes; the results for 128 lanes are 8 MiB a head.
    assert compiled.memory_analysis().temp_size_in_bytes < 100 * 2**20
