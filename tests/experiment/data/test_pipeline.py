"""Windows, epochs, process slices: which bytes every update sees."""

import threading

import jax
import numpy as np
import pytest

from rope_jax.experiment.data.pipeline import train_dataset
from rope_jax.experiment.loss import token_nats


def numbered(windows, length=4):
    """Bytes that name their window, plus the one byte that the last target needs."""
    return np.repeat(np.arange(windows + 1, dtype=np.uint8), length)[: -length + 1]


def take(dataset, batches):
    iterator = iter(dataset)
    return [next(iterator) for _ in range(batches)]


def window_ids(batches):
    return [batch["inputs"][:, 0].tolist() for batch in batches]


def test_t08_targets_are_the_next_bytes():
    text = np.array([10, 11, 12, 13], np.uint8)
    (batch,) = take(train_dataset(text, length=3, batch_size=1, seed=0), 1)
    assert batch["inputs"].tolist() == [[10, 11, 12]]
    assert batch["targets"].tolist() == [[11, 12, 13]]
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32

    def nats(predicted):
        return token_nats(1e4 * jax.nn.one_hot(predicted, 256), batch["targets"])

    np.testing.assert_array_equal(nats(batch["inputs"] + 1), [[0.0, 0.0, 0.0]])
    np.testing.assert_allclose(nats(batch["inputs"]), [[1e4, 1e4, 1e4]])


def test_windows_are_a_length_apart_and_share_one_byte():
    text = np.arange(100, 115, dtype=np.uint8)  # 14 // 4 = 3 windows, 2 bytes left over
    (batch,) = take(train_dataset(text, length=4, batch_size=3, seed=0), 1)
    order = np.argsort(batch["inputs"][:, 0])
    assert batch["inputs"][order].tolist() == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108, 109, 110, 111],
    ]
    assert batch["targets"][order].tolist() == [
        [101, 102, 103, 104],
        [105, 106, 107, 108],
        [109, 110, 111, 112],
    ]


def test_every_window_once_an_epoch_and_batches_run_across_its_end():
    # 10 windows in batches of 4: the third batch has 2 of each epoch.
    batches = take(train_dataset(numbered(10), length=4, batch_size=4, seed=0), 15)
    ids = np.concatenate(window_ids(batches))
    assert ids.size == 60
    epochs = ids.reshape(6, 10)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(10))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 6  # each in its order
    assert (epochs != np.arange(10)).any(axis=1).all()


def test_order_is_a_function_of_the_seed():
    def ids(seed):
        data = train_dataset(numbered(100), length=4, batch_size=10, seed=seed)
        return window_ids(take(data, 20))

    assert ids(0) == ids(0)
    assert ids(0) != ids(1)
    # Runs of a sweep must not share epochs one after the other.
    first_of_1, second_of_0 = ids(1)[:10], ids(0)[10:]
    assert first_of_1 != second_of_0


def test_shuffle_is_one_of_the_whole_corpus():
    batches = take(train_dataset(numbered(250), length=4, batch_size=250, seed=0), 40)
    place = np.array(window_ids(batches))  # [epoch, place] -> window
    # Mean |place - window| of a uniform permutation of 250 is 83.3, its deviation over
    # 40 x 250 draws 0.6; a shuffle within buffers of 100 would give 33.
    moved = np.abs(place - np.arange(250)).mean()
    assert abs(moved - (250**2 - 1) / (3 * 250)) < 5.0


def test_t18_processes_share_each_batch():
    # 40 windows, global batch 8, two processes: 5 batches are one epoch.
    def ids(index, count):
        data = train_dataset(
            numbered(40),
            length=4,
            batch_size=8,
            seed=3,
            process_index=index,
            process_count=count,
        )
        return np.array(window_ids(take(data, 7)))

    whole, first, second = ids(0, 1), ids(0, 2), ids(1, 2)
    assert first.shape == second.shape == (7, 4)
    assert not set(first[:5].ravel()) & set(second[:5].ravel())
    assert set(first[:5].ravel()) | set(second[:5].ravel()) == set(range(40))
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
    for count in (4, 8):  # 8: one window per process and batch
        parts = [ids(index, count) for index in range(count)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_d05_windows_may_cut_a_character():
    text = np.frombuffer("a😀b".encode(), np.uint8)  # windows of 3 bytes
    (batch,) = take(train_dataset(text, length=2, batch_size=2, seed=0), 1)
    rows = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
    assert sorted(rows.tolist()) == [[97, 240, 159], [159, 152, 128]]
    (batch,) = take(
        train_dataset(np.full(9, 255, np.uint8), length=8, batch_size=1, seed=0), 1
    )
    assert batch["targets"].tolist() == [[255] * 8]


def test_enwik6_windows_are_its_bytes(enwik6):
    content = np.fromfile(enwik6, np.uint8)[:900_000]
    count = (900_000 - 1) // 512
    assert count == 1757
    data = train_dataset(content, length=512, batch_size=251, seed=0)
    batches = take(data, 7)  # 7 x 251 = 1757: exactly an epoch
    inputs = np.concatenate([batch["inputs"] for batch in batches])
    targets = np.concatenate([batch["targets"] for batch in batches])
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    seen = sorted(row.astype(np.uint8).tobytes() for row in inputs)
    cut = sorted(content[k * 512 : k * 512 + 512].tobytes() for k in range(count))
    assert seen == cut


def test_state_continues_on_a_new_iterator_across_an_epoch_end():
    data = train_dataset(numbered(10), length=4, batch_size=4, seed=0)
    straight = window_ids(take(data, 9))
    for stop in range(9):
        iterator = iter(data)
        for _ in range(stop):
            next(iterator)
        resumed = iter(train_dataset(numbered(10), length=4, batch_size=4, seed=0))
        resumed.set_state(iterator.get_state())
        assert window_ids([next(resumed) for _ in range(9 - stop)]) == straight[stop:]


def test_no_thread_or_process_is_started():
    before = threading.active_count()
    take(train_dataset(numbered(10), length=4, batch_size=4, seed=0), 3)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 11}, "batch_size must be at most 10.*got 11"),
        ({"batch_size": 0}, "batch_size.*got 0"),
        ({"batch_size": 9, "process_count": 2}, "multiple of the 2 processes, got 9"),
        ({"process_index": 2, "process_count": 2}, "process_index.*got 2 of 2"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"length": 400}, "batch_size must be at most 0.*length 400"),
        ({"seed": -1}, "seed must not be negative, got -1"),
    ],
)
def test_wrong_sizes_raise(change, words):
    arguments = {"length": 4, "batch_size": 2, "seed": 0} | change
    with pytest.raises(ValueError, match=words):
        train_dataset(numbered(10), **arguments)


def test_text_that_is_no_byte_array_raises():
    with pytest.raises(ValueError, match=r"content must be uint8.*int32"):
        train_dataset(np.arange(50, dtype=np.int32), length=4, batch_size=2, seed=0)
