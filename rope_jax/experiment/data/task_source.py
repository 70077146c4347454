"""Examples of a task without end: to train on, and others to test with.

An example is a function of its stream, a seed and its number alone. So an iterator's
whole state is how many batches it has handed out, as with text; and the examples of a
test are the same for every encoding and every seed of training, which draw from
another stream. Beyond the longest length of training no test example can have been
trained on; within it two streams may draw the same short one.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import grain
import numpy as np

from rope_jax.experiment.data import pipeline, tasks
from rope_jax.experiment.data.tasks import TASKS, Example, TaskOptions

_TRAIN = 0
TEST_STREAMS = {"validation": 1, "test": 2}


@dataclass(frozen=True, eq=False)
class Task:
    """One task with its options: where a text would have its corpus.

    Attributes:
      source: a name in `tasks.TASKS`.
      options: checked by `tasks.check`.
    """

    source: str
    options: TaskOptions

    @property
    def name(self) -> str:
        """What the examples are, for reports.

        >>> Task("addition", TaskOptions(reverse="sum")).name
        'addition, 1 to 20 digits, reverse=sum'
        """
        options, kind = self.options, TASKS[self.source]
        lengths = f"{options.min_length} to {options.max_length} {kind.unit}"
        usual = TaskOptions()
        changed = [
            f"{name}={getattr(options, name)}"
            for name in kind.options
            if getattr(options, name) != getattr(usual, name)
        ]
        return ", ".join([self.source, lengths, *changed])

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of the options and of some examples, which stand for all.

        It changes with the options and where an example is made in another way.
        """
        digest = hashlib.sha256(repr(dataclasses.astuple(self.options)).encode())
        longest = self.options.max_length
        for index in range(16):
            for example in (
                self.train_example(0, index),
                self.test_example("validation", longest, index),
            ):
                digest.update(example.text + np.packbits(example.scored).tobytes())
        return digest.hexdigest()

    def row_length(self, length: int) -> int:
        """Tokens in a row that holds every example of a length."""
        return tasks.row_length(self.source, self.options, length)

    def train_example(self, seed: int, index: int) -> Example:
        """Example `index` of training with a seed, its length drawn evenly."""
        rng = _generator(seed, _TRAIN, index)
        low, high = self.options.min_length, self.options.max_length
        return self._make(rng, int(rng.integers(low, high + 1)))

    def test_example(self, split: str, length: int, index: int) -> Example:
        """Example `index` of a length in the validation or the test stream."""
        return self._make(_generator(0, TEST_STREAMS[split], length, index), length)

    def _make(self, rng: np.random.Generator, length: int) -> Example:
        return TASKS[self.source].make(rng, length, self.options)


def rows(examples: Sequence[Example], length: int) -> dict[str, np.ndarray]:
    """Examples as rows of one length, padded at the end.

    Args:
      examples: of at most `length` + 1 bytes.
      length: T.

    Returns:
      dict(inputs, targets, weights), int32 [number of examples, T] each. Weights are 1
      where the target is scored, 0 elsewhere and on the padding, whose bytes are 0.

    >>> answer = np.arange(4) >= 2
    >>> batch = rows([Example(b"a>a.", answer)], 5)
    >>> batch["targets"].tolist(), batch["weights"].tolist()
    ([[62, 97, 46, 0, 0]], [[0, 1, 1, 0, 0]])
    """
    tokens = np.zeros((len(examples), length + 1), np.int32)
    scored = np.zeros_like(tokens)
    for row, example in enumerate(examples):
        tokens[row, : len(example.text)] = np.frombuffer(example.text, np.uint8)
        scored[row, : len(example.text)] = example.scored
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return {"inputs": inputs, "targets": targets, "weights": scored[:, 1:]}


def train_dataset(
    task: Task,
    *,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """Endless batches of a task's training examples; this process's rows of each.

    Args:
      task: what to draw from.
      batch_size: examples per update over all processes.
      seed: of the examples.
      process_index: as for `pipeline.train_dataset`.
      process_count: as for `pipeline.train_dataset`.

    Returns:
      A dataset of `rows` of the task's longest example, with iterators as those of
      `pipeline.train_dataset`.

    Raises:
      ValueError: as for `pipeline.batches`.
    """
    length = task.row_length(task.options.max_length)

    def make(indices: np.ndarray) -> dict[str, np.ndarray]:
        return rows([task.train_example(seed, int(i)) for i in indices], length)

    return pipeline.batches(
        grain.MapDataset.range(pipeline.ENDLESS),
        make,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )


def _generator(seed: int, *key: int) -> np.random.Generator:
    # The key of a SeedSequence: no two streams or examples share their numbers.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
