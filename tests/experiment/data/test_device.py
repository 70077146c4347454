"""Batches on the devices: values, placement, and a state that resumes exactly."""

import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import grain
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from rope_jax.experiment.data import pipeline


def dataset(batch_size=4, windows=10):
    text = np.repeat(np.arange(windows + 1, dtype=np.uint8), 4)[:-3]
    return pipeline.train_dataset(text, length=4, batch_size=batch_size, seed=0)


@pytest.fixture(scope="module")
def sharding():
    mesh = jax.make_mesh(
        (2, 2, 2),
        ("data", "tensor", "sequence"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    return NamedSharding(mesh, P("data", "sequence"))


def window_ids(batches):
    return [np.asarray(batch["inputs"])[:, 0].tolist() for batch in batches]


def test_batches_are_sharded_and_equal_to_the_host_ones(sharding):
    host = list(itertools.islice(iter(dataset()), 6))
    device = list(itertools.islice(pipeline.to_device(dataset(), sharding), 6))
    for one, two in zip(host, device, strict=True):
        for name in ("inputs", "targets"):
            assert two[name].sharding == sharding and two[name].dtype == np.int32
            assert two[name].addressable_shards[0].data.shape == (2, 2)
            np.testing.assert_array_equal(two[name], one[name])


@pytest.mark.parametrize("depth", [1, 3])
def test_c01_state_is_that_of_the_batch_handed_out_last(sharding, depth):
    # 10 windows in batches of 4: epochs end within batches 3, 5 and 8.
    straight = window_ids(
        itertools.islice(pipeline.to_device(dataset(), sharding, depth=depth), 9)
    )
    assert sorted(itertools.chain(*straight[:5])) == sorted([*range(10), *range(10)])
    for stop in (0, 1, 2, 3, 5, 8):
        iterator = pipeline.to_device(dataset(), sharding, depth=depth)
        for _ in range(stop):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        assert state == {"next_index": stop}
        next(iterator)  # what happens after the save does not matter
        resumed = pipeline.to_device(dataset(), sharding, depth=depth)
        next(resumed)  # nor what happened before the restore
        resumed.set_state(state)
        assert resumed.get_state() == state
        rest = list(itertools.islice(resumed, 9 - stop))
        assert window_ids(rest) == straight[stop:]


def test_c01_six_steps_are_three_and_a_restart_and_three(sharding, tmp_path):
    straight = window_ids(itertools.islice(pipeline.to_device(dataset(), sharding), 6))
    iterator = pipeline.to_device(dataset(), sharding)
    first = window_ids(itertools.islice(iterator, 3))
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        saved = checkpointer.save_checkpointables_async(3, {"data": iterator})
        next(iterator)  # training goes on while the save is written
        saved.result()
    restored = pipeline.to_device(dataset(), sharding)
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load_checkpointables(3, {"data": restored})
    assert first + window_ids(itertools.islice(restored, 3)) == straight


def test_a_finite_dataset_ends_after_its_last_batch(sharding):
    finite = grain.MapDataset.range(3).map(lambda k: np.full((4, 4), k, np.int32))
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    iterator = pipeline.to_device(finite.to_iter_dataset(read), sharding)
    assert [int(batch[0, 0]) for batch in iterator] == [0, 1, 2]
    assert iterator.get_state() == {"next_index": 3}


def test_no_thread_is_left(sharding):
    before = set(threading.enumerate())
    iterator = pipeline.to_device(dataset(), sharding)
    next(iterator)
    iterator.close()
    assert set(threading.enumerate()) <= before


def test_depth_below_one_raises(sharding):
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        pipeline.to_device(dataset(), sharding, depth=0)


def test_one_process_supplies_every_row(sharding):
    assert pipeline.process_slice(sharding) == (0, 1)
    assert pipeline.process_slice(NamedSharding(sharding.mesh, P())) == (0, 1)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert pipeline.process_slice(one) == (0, 1)


PROCESS = """
import json, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from jax.sharding import NamedSharding, PartitionSpec as P
from rope_jax.experiment.data import pipeline
text = np.repeat(np.arange(41, dtype=np.uint8), 4)[:-3]
found = {}
for axes, sizes in [("rows", (4, 1, 1)), ("tensor", (1, 4, 1)), ("both", (2, 1, 2)),
                    ("sequence", (1, 1, 4))]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), ("d", "t", "s"))
    sharding = NamedSharding(mesh, P("d", "s"))
    index, count = pipeline.process_slice(sharding)
    data = pipeline.train_dataset(text, length=4, batch_size=8, seed=3,
                                  process_index=index, process_count=count)
    batch = next(pipeline.to_device(data, sharding))["targets"]
    found[axes] = [index, count, batch.shape,
                   [[*(s.indices(8)[:2] for s in shard.index), shard.data.tolist()]
                    for shard in batch.addressable_shards]]
print(json.dumps(found))
"""


def test_t18_two_processes_hold_the_global_batch_of_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index)],
            cwd=pathlib.Path(pipeline.__file__).parents[3],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        found = [json.loads(p.communicate(timeout=120)[0]) for p in processes]
    finally:
        for process in processes:
            process.kill()
    text = np.repeat(np.arange(41, dtype=np.uint8), 4)[:-3]
    data = pipeline.train_dataset(text, length=4, batch_size=8, seed=3)
    whole = next(iter(data))["targets"]
    # Only where the data axis spans the processes does each read its own part.
    slices = {name: [one[name][:2] for one in found] for name in found[0]}
    assert slices == {
        "rows": [[0, 2], [1, 2]],
        "tensor": [[0, 1], [0, 1]],
        "both": [[0, 2], [1, 2]],
        "sequence": [[0, 1], [0, 1]],
    }
    for one in found:
        for index, count, shape, shards in one.values():
            assert shape == [8, 4] and len(shards) == 2 and 0 <= index < count
            for rows, columns, values in shards:
                part = whole[rows[0] : rows[1], columns[0] : min(columns[1], 4)]
                np.testing.assert_array_equal(values, part)
