"""What an evaluation protocol is asked, and what it answers.

A protocol plans and never sees a model or a text. It turns a `Request` into cells,
one for each row of the result: a context length, the windows to feed and the targets
to score. `scoring.score` runs any windows, `measurement.measure` any cells.

Indices: a window that starts at byte s is fed bytes s .. s+W-1 and predicts bytes
s+1 .. s+W; its target p, counted from 0, is byte s+1+p and has p+1 bytes of context.
Together that are W+1 tokens: token i is byte s+i, inputs are all but the last and
targets all but the first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rope_jax.experiment.config import EvalConfig

# (tokens uint8 [rows, W+1], data uint8 [N], which rows) -> tokens, as a new array.
Edit = Callable[[np.ndarray, np.ndarray, slice], np.ndarray]


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of one length, and in each the range of targets that is scored.

    Attributes:
      length: bytes fed, W.
      starts: int64 `[M]`, the first byte fed. A window may reach past the data,
        with `stop` below W: what lies past the last scored target is padding.
      first: int64 `[M]`, the first target scored, in [0, W).
      stop: int64 `[M]`, one past the last target scored, at most W.
      edit: changes what is fed and scored from what the data holds; None for the
        data as it is. It must not depend on how the rows are cut into batches.
      hidden: tokens at the beginning that no other attends to (each keeps its
        position); None where the model is given no mask.
    """

    length: int
    starts: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    edit: Edit | None = None
    hidden: int | None = None

    @property
    def last(self) -> int:
        """Targets at the end of the window that hold all of the scored ones."""
        return int(self.length - self.first.min())

    def scored(self, rows: slice = slice(None)) -> np.ndarray:
        """Which of each window's last targets are scored, bool `[M, last]`."""
        target = np.arange(self.length - self.last, self.length)
        first, stop = self.first[rows, None], self.stop[rows, None]
        return (first <= target) & (target < stop)

    def contexts(self) -> np.ndarray:
        """Bytes of context of each scored target, row by row, int64 `[n]`."""
        return np.nonzero(self.scored())[1] + self.length - self.last + 1

    def targets(self) -> np.ndarray:
        """The byte that each scored target is, row by row, int64 `[n]`."""
        row, column = np.nonzero(self.scored())
        return self.starts[row] + 1 + column + self.length - self.last


@dataclass(frozen=True, eq=False)
class Cell:
    """One row of a result, before it is measured.

    Attributes:
      length: the context length that the row is about.
      windows: what to feed; neighbouring cells that share it are fed once.
      shortest: the row holds the targets with at least this much context,
      longest: and at most this much.
      units: int64 `[U]`, ascending: the first byte of each stretch of text that
        the interval resamples.
      stride: bytes from one window's start to the next, or 0 if they are apart.
      control: the condition that the row is under, where a protocol has several.
      capped: the model attends to the bytes of the training length alone.
      versus: the cell that the row's gain compares it with, unit by unit.
      saves: the gain is what the row saves over `versus`; otherwise, what it costs.
      distance: bytes between the starts of two copies, where there are any.
    """

    length: int
    windows: Windows
    shortest: int
    longest: int
    units: np.ndarray
    stride: int = 0
    control: str = ""
    capped: bool = False
    versus: "Cell | None" = None
    saves: bool = False
    distance: int | None = None

    def holds(self, contexts: np.ndarray) -> np.ndarray:
        """Whether targets with so many bytes of context are the row's, bool `[n]`."""
        return (self.shortest <= contexts) & (contexts <= self.longest)

    def targets(self) -> np.ndarray:
        """The byte that each of the row's targets is, int64."""
        return self.windows.targets()[self.holds(self.windows.contexts())]


@dataclass(frozen=True)
class Request:
    """What a plan is wanted for.

    Attributes:
      size: bytes in the split.
      config: the protocol and its options.
      lengths: every length to plan, ascending; the training length is among them.
      train_length: the context that the model was trained with, in bytes.
    """

    size: int
    config: EvalConfig
    lengths: tuple[int, ...]
    train_length: int

    @property
    def text(self) -> str:
        """The split in words, for messages."""
        return f"the {self.size:,} bytes of the {self.config.split} split"

    def require(self, valid: bool, name: str, what: str) -> None:
        """Raise a ValueError that names an option's flag and value."""
        if not valid:
            got = getattr(self.config, name)
            raise ValueError(f"{flag(name)} must be {what}, got {got!r}")

    def too_long(self, length: int, longest: int, where: str) -> ValueError:
        """The error for a length above the longest that is possible."""
        if longest < 1:
            return ValueError(
                f"{flag('lengths')}: no length fits {where}, got {length}"
            )
        return ValueError(
            f"{flag('lengths')} must be at most {longest} {where}, got {length} "
            "(the training length is always among them)"
        )


def flag(name: str) -> str:
    """How a user sets a field of EvalConfig."""
    return f"--{name} (in train.py --config.eval.{name})"
