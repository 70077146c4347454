"""Streams of examples, their rows, and iterators that resume."""

import numpy as np
import pytest

from rope_jax.experiment.data.task_source import Task, rows, train_dataset
from rope_jax.experiment.data.tasks import TASKS, Example, TaskOptions


def text_of(row) -> bytes:
    return bytes([row["inputs"][0], *row["targets"]])


def take(dataset, batches):
    iterator = iter(dataset)
    return [next(iterator) for _ in range(batches)]


def test_weights_are_1_on_the_answer_alone():
    """An example that fills its row, one that does not, and one with gaps."""
    batch = rows(
        [
            Example(b"ab>ab.", np.array([0, 0, 0, 1, 1, 1], bool)),
            Example(b"a>a.", np.array([0, 0, 1, 1], bool)),
            Example(b"a1>a1", np.array([0, 0, 0, 0, 1], bool)),
        ],
        5,
    )
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert [bytes(row.tolist()) for row in batch["inputs"]] == [
        b"ab>ab",
        b"a>a.\0",
        b"a1>a1",
    ]
    assert [bytes(row.tolist()) for row in batch["targets"]] == [
        b"b>ab.",
        b">a.\0\0",
        b"1>a1\0",
    ]
    assert batch["weights"].tolist() == [
        [0, 0, 1, 1, 1],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
    ]


@pytest.mark.parametrize("source", TASKS)
def test_training_rows_hold_examples_of_every_length(source):
    task = Task(source, TaskOptions(min_length=3, max_length=6))
    (batch,) = take(train_dataset(task, batch_size=200, seed=0), 1)
    assert batch["inputs"].shape == (200, task.row_length(6))
    sizes = np.zeros(200, int)
    for index in range(200):
        example = task.train_example(0, index)
        row = {name: array[index] for name, array in batch.items()}
        assert text_of(row).rstrip(b"\0") == example.text
        sizes[index] = len(example.text)
        # Nothing is scored beyond the example, whose last byte always is.
        assert np.flatnonzero(row["weights"]).max() == len(example.text) - 2
    counts = np.unique(sizes, return_counts=True)[1]
    assert (len(counts) == 4 or source == "addition") and counts.min() > 10


def test_lengths_are_drawn_evenly():
    task = Task("copy", TaskOptions(max_length=4))
    lengths = [len(task.train_example(1, i).text) // 2 - 1 for i in range(2000)]
    # 500 of each are expected, with a deviation of 19.
    assert np.abs(np.bincount(lengths)[1:] - 500).max() < 90


def test_examples_are_functions_of_seed_and_number():
    task, same = (Task("copy", TaskOptions(min_length=20)) for _ in range(2))

    def texts(make, *arguments):
        return [make(*arguments, index).text for index in range(100)]

    train = texts(task.train_example, 0)
    assert train == texts(same.train_example, 0)
    assert len(set(train)) == 100
    streams = [
        train,
        texts(task.train_example, 1),
        texts(task.test_example, "validation", 20),
        texts(task.test_example, "test", 20),
    ]
    assert len(set().union(*streams)) == 400
    # More examples of a length leave the first ones as they are.
    assert texts(task.test_example, "test", 20) == streams[3]
    longer = texts(task.test_example, "test", 21)
    assert not {text[:10] for text in longer} & {text[:10] for text in streams[3]}


def test_resuming_gives_the_same_batches():
    def dataset():
        task = Task("mqar", TaskOptions(max_length=4))
        return train_dataset(task, batch_size=4, seed=7)

    straight = take(dataset(), 6)
    for stop in range(6):
        iterator = iter(dataset())
        for _ in range(stop):
            next(iterator)
        resumed = iter(dataset())
        resumed.set_state(iterator.get_state())
        for batch in straight[stop:]:
            again = next(resumed)
            for name, array in batch.items():
                np.testing.assert_array_equal(again[name], array)


def test_t18_processes_share_each_batch():
    def inputs(index, count):
        task = Task("copy", TaskOptions(max_length=5))
        part = {"process_index": index, "process_count": count}
        made = take(train_dataset(task, batch_size=8, seed=3, **part), 3)
        return np.stack([batch["inputs"] for batch in made])

    whole = inputs(0, 1)
    for count in (2, 8):
        parts = [inputs(index, count) for index in range(count)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    with pytest.raises(ValueError, match="multiple of the 3 processes, got 8"):
        inputs(0, 3)


def test_the_hash_tells_tasks_apart():
    def sha256(source="copy", **options):
        return Task(source, TaskOptions(**options)).sha256

    others = [
        sha256("reverse"),
        sha256(max_length=21),
        sha256(min_length=2),
        sha256(alphabet=25),
        sha256("addition"),
        sha256("addition", reverse="sum"),
    ]
    assert len({sha256(), *others}) == 7
    assert sha256() == sha256()


def test_names_say_what_is_unusual():
    assert Task("copy", TaskOptions()).name == "copy, 1 to 20 letters"
    task = Task("mqar", TaskOptions(max_length=9, key_letters=1))
    assert task.name == "mqar, 1 to 9 pairs, key_letters=1"
