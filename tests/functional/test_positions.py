"""Position arrays: cases R18, R19, R29 and R30, sampling, grids, and distances."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rope_jax.functional.positions import (
    grid_positions,
    positions_from_mask,
    positions_from_segments,
    random_positions,
    rerope_distances,
    self_extend_distances,
    zigzag_positions,
)


def test_r19_positions_restart_at_every_document():
    positions = positions_from_segments(jnp.array([1, 1, 1, 2, 2, 3, 0]))
    assert positions.dtype == jnp.int32
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 0]


def test_r19_rows_count_apart_and_an_id_that_returns_starts_anew():
    rows = jnp.array([[7, 7, 7, 7], [0, 0, 5, 0], [-1, 4, 4, 4]])
    expected = [[0, 1, 2, 3], [0, 1, 0, 0], [0, 0, 1, 2]]
    assert positions_from_segments(rows).tolist() == expected
    assert jax.jit(jax.vmap(positions_from_segments))(rows).tolist() == expected


def test_r19_any_segmentation_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    segments = rng.integers(0, 3, size=(4, 200)).cumsum(-1) // 3
    expected = np.zeros_like(segments)
    for row, t in itertools.product(range(4), range(1, 200)):
        if segments[row, t] == segments[row, t - 1]:
            expected[row, t] = expected[row, t - 1] + 1
    assert expected.max() >= 4
    np.testing.assert_array_equal(positions_from_segments(segments), expected)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.bool_])
def test_r19_counts_are_int32_whatever_holds_the_ids(dtype):
    positions = positions_from_segments(jnp.ones(700, dtype))
    assert positions.dtype == jnp.int32
    np.testing.assert_array_equal(positions, np.arange(700))


def test_r18_left_padding_does_not_shift_positions():
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = positions_from_mask(mask)
    assert positions.dtype == jnp.int32
    assert positions[0, 2:].tolist() == [0, 1, 2]
    assert positions[1].tolist() == [0, 1, 2, 3, 4]
    assert jax.vmap(positions_from_mask)(mask).tolist() == positions.tolist()


def test_r18_padding_between_tokens_is_not_counted():
    mask = np.array([True, False, True, False, False, True])
    positions = positions_from_mask(jnp.asarray(mask))
    assert positions.tolist() == [0, 1, 1, 2, 2, 2]
    assert positions[mask].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.bool_, jnp.int8]
)
def test_r30_positions_are_counted_in_int32(dtype):
    positions = positions_from_mask(jnp.ones(300, dtype))
    assert positions.dtype == jnp.int32
    assert positions[-1] == 299
    assert len(np.unique(positions)) == 300
    # A mask of other numbers says the same: nonzero is there.
    halves = positions_from_mask(jnp.ones(300, dtype) / 2)
    if dtype not in (jnp.bool_, jnp.int8):
        np.testing.assert_array_equal(halves, positions)


def test_r30_a_prefix_counts_as_in_the_full_pass():
    mask = jnp.asarray(np.random.default_rng(1).integers(0, 2, 600), jnp.bfloat16)
    full = positions_from_mask(mask)
    np.testing.assert_array_equal(positions_from_mask(mask[:450]), full[:450])


def test_r29_a_device_sees_the_positions_of_its_part_of_the_sequence():
    mesh = jax.make_mesh((8,), ("sequence",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("sequence"))
    segments = jax.device_put(jnp.ones(64, jnp.int32), sharding)
    positions = jax.jit(positions_from_segments, out_shardings=sharding)(segments)
    np.testing.assert_array_equal(positions, np.arange(64))
    for shard in positions.addressable_shards:
        start = shard.index[0].start
        np.testing.assert_array_equal(shard.data, np.arange(start, start + 8))


def test_random_positions_are_a_sorted_sample_without_replacement():
    draw = jax.jit(random_positions, static_argnums=(1, 2))
    key = jax.random.key(3)
    positions = draw(key, 16, 512)
    assert positions.shape == (16,) and positions.dtype == jnp.int32
    assert (np.diff(positions) > 0).all()
    assert positions[0] >= 0 and positions[-1] < 512
    np.testing.assert_array_equal(positions, draw(key, 16, 512))
    assert (positions != draw(jax.random.key(4), 16, 512)).any()
    # All of them leave no choice.
    assert random_positions(key, 5, 5).tolist() == [0, 1, 2, 3, 4]


def test_random_positions_hit_every_position_equally_often():
    keys = jax.random.split(jax.random.key(0), 4000)
    sample = functools.partial(random_positions, length=3, max_length=10)
    positions = np.asarray(jax.jit(jax.vmap(sample))(keys))
    frequency = np.bincount(positions.ravel(), minlength=10) / len(keys)
    assert len(frequency) == 10
    # Each is in a sample with probability 0.3: six standard deviations are 0.044.
    np.testing.assert_allclose(frequency, 0.3, atol=0.044)
    # All 120 subsets occur, 33 times on average.
    assert len(np.unique(positions, axis=0)) == 120


def test_grid_positions_number_the_cells_last_axis_fastest():
    grid = grid_positions(2, 3)
    assert grid.dtype == jnp.int32
    assert grid.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_positions(3).tolist() == [[0], [1], [2]]
    cells = list(itertools.product(range(2), range(1), range(4)))
    np.testing.assert_array_equal(grid_positions(2, 1, 4), cells)


def test_zigzag_gives_every_shard_a_front_and_a_back_chunk():
    expected = [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert zigzag_positions(12, 3).tolist() == expected
    assert zigzag_positions(6, 1).tolist() == list(range(6))


def test_zigzag_shares_causal_work_equally_and_inverts():
    length, num_shards = 96, 8
    positions = np.asarray(zigzag_positions(length, num_shards))
    assert positions.dtype == np.int32
    assert sorted(positions) == list(range(length))
    work = (positions.reshape(num_shards, -1) + 1).sum(-1)
    assert len(set(work.tolist())) == 1
    tokens = np.random.default_rng(0).normal(size=length)
    inverse = np.argsort(positions)
    np.testing.assert_array_equal(tokens[positions][inverse], tokens)


def test_rerope_distances_are_clipped_at_the_window():
    distances = rerope_distances(jnp.array([0, 5]), jnp.arange(7), window=3)
    assert distances.dtype == jnp.int32
    assert distances.tolist() == [
        [0, -1, -2, -3, -3, -3, -3],
        [3, 3, 3, 2, 1, 0, -1],
    ]


def self_extend_loop(query_positions, key_positions, window, group_size):
    """Distance of grouped positions, of which the queries are moved by a constant."""
    shift = window - window // group_size
    table = []
    for i in query_positions:
        row = []
        for j in key_positions:
            near = i - j
            far = (i // group_size + shift) - j // group_size
            row.append(near if near < window else far)
        table.append(row)
    return table


@pytest.mark.parametrize(("window", "group_size"), [(4, 2), (5, 3), (1, 4), (8, 1)])
def test_self_extend_distances_are_grouped_beyond_the_window(window, group_size):
    query, key = np.arange(30, 40), np.arange(40)
    distances = self_extend_distances(
        jnp.asarray(query), jnp.asarray(key), window=window, group_size=group_size
    )
    assert distances.dtype == jnp.int32
    expected = self_extend_loop(query.tolist(), key.tolist(), window, group_size)
    assert distances.tolist() == expected
    # No key is nearer than one behind it. Steps are of one at most, but for the edge of
    # the window, where two roundings meet.
    last = np.asarray(distances)[-1]
    steps = np.diff(last)
    assert steps.max() <= 0 and steps.min() >= -2
    assert (steps < -1).sum() <= 1
    if group_size == 1:
        assert last.tolist() == (39 - key).tolist()
    else:
        assert last[0] <= window + 39 // group_size + 1


def test_self_extend_literal():
    distances = self_extend_distances(
        jnp.array([9]), jnp.arange(10), window=4, group_size=2
    )
    assert distances.tolist() == [[6, 6, 5, 5, 4, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(rerope_distances, window=4),
        functools.partial(self_extend_distances, window=4, group_size=2),
    ],
)
def test_distances_take_batches_and_compile_once_for_all_offsets(function):
    query, key = jnp.array([[3, 9], [20, 21]]), jnp.arange(22)
    batch = function(query, key)
    assert batch.shape == (2, 2, 22)
    mapped = jax.vmap(function, in_axes=(0, None))(query, key)
    np.testing.assert_array_equal(mapped, batch)
    jitted = jax.jit(function)
    for offset in (0, 6, 1000, 2**30):
        shifted = jitted(query + offset, key + offset)
        # Offsets of whole groups change nothing.
        np.testing.assert_array_equal(shifted, batch)
    assert jitted._cache_size() == 1


def test_bad_input_raises_with_the_name_and_the_value():
    positions, key = jnp.arange(3), jax.random.key(0)
    with pytest.raises(ValueError, match=r"segment_ids must be integers.*bfloat16"):
        positions_from_segments(jnp.ones(3, jnp.bfloat16))
    with pytest.raises(ValueError, match="segment_ids must be integers with a time"):
        positions_from_segments(jnp.int32(1))
    with pytest.raises(ValueError, match="mask must have a time axis"):
        positions_from_mask(jnp.bool_(True))
    with pytest.raises(ValueError, match="max_length must be at least 9, got 8"):
        random_positions(key, 9, 8)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        random_positions(key, 0, 8)
    with pytest.raises(ValueError, match=r"length must be an integer, got 2\.5"):
        random_positions(key, 2.5, 8)
    with pytest.raises(ValueError, match="shape must have at least one axis"):
        grid_positions()
    with pytest.raises(ValueError, match="shape must be at least 1, got 0"):
        grid_positions(3, 0)
    with pytest.raises(ValueError, match=r"multiple of 2 \* num_shards = 8, got 12"):
        zigzag_positions(12, 4)
    with pytest.raises(ValueError, match="num_shards must be at least 1, got 0"):
        zigzag_positions(12, 0)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        rerope_distances(positions, positions, window=0)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        self_extend_distances(positions, positions, window=2, group_size=0)
    with pytest.raises(ValueError, match="key_positions must be integers"):
        rerope_distances(positions, positions.astype(float), window=2)


def test_ids_of_the_host_beyond_int32_are_refused():
    """Their lowest 32 bits are all 1: one document instead of two."""
    with pytest.raises(ValueError, match=r"segment_ids must fit int32.* 4294967297"):
        positions_from_segments(np.array([1, 1, 2**32 + 1, 2**32 + 1]))
    assert positions_from_segments(np.int64([1, 1, -(2**31)])).tolist() == [0, 1, 0]
