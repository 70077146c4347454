"""Collectives are found with the right axes, sizes and counts."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from rope_jax.experiment.collectives import parse_collectives

SHAPE = {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2}


def _one(line, shape=SHAPE, computation="ENTRY %main (x: f32[4]) -> f32[4] {"):
    (found,) = parse_collectives(f"{computation}\n  {line}\n}}\n", shape)
    return found


# Device d of this mesh is 4 * fsdp + 2 * tensor + sequence.
@pytest.mark.parametrize(
    "groups, axes, size",
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("fsdp",), 2),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("sequence",), 2),
        ("{{0,1,4,5},{2,3,6,7}}", ("fsdp", "sequence"), 4),
        ("{}", ("fsdp", "tensor", "sequence"), 8),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
        ("[1,8]<=[8]", ("fsdp", "tensor", "sequence"), 8),
        ("[4,2]<=[8]", ("sequence",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("fsdp",), 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("tensor",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("fsdp", "tensor"), 4),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("tensor",), 2),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("fsdp",), 2),
        ("mesh['a'=2,'b'=4] {'b'}", ("tensor", "sequence"), 4),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ("tensor",), 2),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ("sequence",), 2),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ("fsdp", "sequence"), 4),
        ("mesh['a'=2,'b'=4], device_ids=(0,4,2,6,1,5,3,7) {'a'}", ("sequence",), 2),
    ],
)
def test_axes_of_every_notation_of_groups(groups, axes, size):
    found = _one(
        f"%r = f32[3]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    assert (found.kind, found.axes, found.group_size) == ("all-reduce", axes, size)


# The ring's factors: 2 (g - 1) / g, (g - 1) / g and 1, over g = 4 devices.
@pytest.mark.parametrize(
    "text, kind, payload, sent",
    [
        ("f32[6,4]{1,0} all-reduce(%x)", "all-reduce", 96, 144.0),
        ("bf16[8,2]{1,0} all-gather(%x)", "all-gather", 32, 24.0),
        (
            "((bf16[2,2]), bf16[8,2]) all-gather-start(%x)",
            "all-gather",
            32,
            24.0,
        ),
        ("f32[2]{0} reduce-scatter(%x)", "reduce-scatter", 32, 24.0),
        (
            "(f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0}) all-to-all(%a, %b, %c, %d)",
            "all-to-all",
            32,
            24.0,
        ),
    ],
)
def test_payload_and_bytes_sent(text, kind, payload, sent):
    found = _one(f"%r = {text}, channel_id=7, replica_groups=[2,4]<=[8]")
    assert found.kind == kind
    assert found.payload == payload
    assert found.sent == sent
    assert found.axes == ("tensor", "sequence")


def test_a_permutation_is_between_the_devices_of_its_pairs():
    found = _one(
        "%p = (f32[8,2]{1,0:T(8,128)S(1)}, f32[8,2]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, "
        "u32[]{:S(2)}) collective-permute-start(%x), channel_id=5, "
        "source_target_pairs={{0,0},{1,4},{4,1},{5,5}}, "
        'metadata={op_name="jit(train_step)/slice" stack_frame_id=2}'
    )
    assert found.axes == ("fsdp", "sequence")
    assert (found.payload, found.sent) == (64, 64.0)
    assert found.shapes == ("f32[8,2]",)
    assert found.op_name == "jit(train_step)/slice"


def test_an_all_reduce_that_is_sliced_at_once_is_a_reduce_scatter():
    text = """
%all-reduce-scatter.1 (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %r = f32[8,4]{1,0} all-reduce(%p), channel_id=9, replica_groups=[4,2]<=[8]
  ROOT %s = f32[4,4]{1,0} dynamic-slice(%r, %i, %j), dynamic_slice_sizes={4,4}
}

ENTRY %main (x: f32[8,4]) -> f32[4,4] {
  ROOT %f = f32[4,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    (found,) = parse_collectives(text, SHAPE)
    assert (found.kind, found.payload, found.sent) == ("reduce-scatter", 128, 64.0)


def test_a_collective_spread_over_fusions_counts_once():
    part = """
%{0} (p: bf16[2]) -> bf16[4] {{
  ROOT %g.{0} = bf16[4]{{0}} all-gather(%p), channel_id=3, replica_groups=[4,2]<=[8]{1}
}}
"""
    main = """
ENTRY %main (x: bf16[2]) -> bf16[4] {
  %a = bf16[4]{0} fusion(%x), kind=kCustom, calls=%start
  ROOT %b = bf16[4]{0} fusion(%a), kind=kCustom, calls=%done
}
"""
    chain = ', frontend_attributes={chain_id="0"}'
    text = part.format("start", chain) + part.format("done", chain) + main
    assert len(parse_collectives(text, SHAPE)) == 1
    # Two collectives may have one channel.
    text = part.format("start", "") + part.format("done", "") + main
    assert len(parse_collectives(text, SHAPE)) == 2


def test_unknown_groups_and_too_many_devices_raise():
    with pytest.raises(ValueError, match="not understood: %r = f32"):
        _one("%r = f32[] all-reduce(%x), replica_groups=@elsewhere")
    with pytest.raises(ValueError, match="device 7 does not fit a mesh of 4 devices"):
        _one("%r = f32[] all-reduce(%x), replica_groups=[4,2]<=[8]", {"data": 4})


@pytest.fixture(scope="module")
def compiled():
    """A loop of 5 rounds with a sum over tensor and a gather over fsdp and sequence."""
    sizes, types = tuple(SHAPE.values()), (jax.sharding.AxisType.Auto,) * 4
    mesh = jax.make_mesh(sizes, tuple(SHAPE), axis_types=types)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P(("fsdp", "sequence"), "tensor"),
        out_specs=P(None, None),
        check_vma=False,
    )
    def body(x):
        def round_(carry, _):
            carry = jnp.cos(jax.lax.psum(carry, "tensor"))
            return carry, None

        x = jax.lax.scan(round_, x, length=5)[0]
        whole = jax.lax.all_gather(x, ("fsdp", "sequence"), axis=0, tiled=True)
        return jax.lax.ppermute(whole, "tensor", [(0, 1), (1, 0)])

    x = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    return jax.jit(body).lower(x).compile().as_text()


def test_a_program_compiled_for_eight_devices(compiled):
    found = {c.kind: c for c in parse_collectives(compiled, SHAPE)}
    assert sorted(found) == ["all-gather", "all-reduce", "collective-permute"]
    reduce, gather = found["all-reduce"], found["all-gather"]
    assert (reduce.axes, reduce.times, reduce.exact) == (("tensor",), 5, True)
    assert reduce.payload == 2 * 3 * 4  # [2, 3] float32 on each device
    assert (gather.axes, gather.group_size) == (("fsdp", "sequence"), 4)
    assert (gather.payload, gather.times) == (8 * 3 * 4, 1)
    assert found["collective-permute"].axes == ("tensor",)
