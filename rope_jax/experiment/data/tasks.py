"""Synthetic tasks whose length is a number: copy, reverse, addition and recall.

An example is a line of readable text, one byte a token, of which some bytes are
scored, here marked with ^. The length of a task is counted in its own units.

    copy       letters   abcab>abcab.            the same letters
                               ^^^^^^
    reverse    letters   abcab>bacba.            the letters from the last to the first
                               ^^^^^^
    addition   digits    12+34=46.               the sum, without leading zeros
                               ^^^
    mqar       pairs     ab3cd7ef1>cd7ab3ef1     the digit that stood behind each key
                                     ^  ^  ^

Letters are drawn evenly and with replacement. Both terms of an addition have exactly
as many digits as its length, and the first is 0 only in a term of one digit. Which
digit comes first matters: the least significant digit needs no other, so a sum that
begins with it depends on one digit of each term and a carry at a time. `reverse` is
"none" (`12+34=46.`), "sum" (`12+34=64.`, as in Lee et al. 2023) or "all"
(`21+43=64.`, as in Zhou et al. 2024, who found it to generalise better than the
plain form with each encoding that they tried; their index hints are not here).

mqar is multi-query associative recall: N different keys of `key_letters` letters,
each followed by its value, a digit; then every key once more, in random order, and
its value is scored. As in Arora et al. 2023 the keys differ within an example and
keys and values share no symbol; other than there a value may occur twice, nothing
stands between the queries, and their distances follow no power law.

References:
  Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466 (tasks and lengths)
  Lee et al. 2023, https://arxiv.org/abs/2307.03381
  Zhou et al. 2024, https://arxiv.org/abs/2402.09371
  Arora et al. 2023, https://arxiv.org/abs/2312.04927
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

_REVERSE = ("none", "sum", "all")
# Python turns no longer text than 4,300 digits into a number, unless told otherwise.
_DIGITS = 4000


@dataclass
class TaskOptions:
    """Lengths of a task in training, in its own units, and what it is made of."""

    min_length: int = 1
    max_length: int = 20
    alphabet: int = 26  # copy, reverse, mqar: how many letters there are
    reverse: str = "none"  # addition: what begins with the last digit: none, sum, all
    key_letters: int = 2  # mqar: letters in a key


class Example(NamedTuple):
    """A line of text, and which of its bytes are scored: bool `[len(text)]`."""

    text: bytes
    scored: np.ndarray


def copy(rng: np.random.Generator, length: int, options: TaskOptions) -> Example:
    """`length` letters, and the same again."""
    letters = _letters(rng, length, options)
    return _answered(letters + ">", letters + ".")


def reverse(rng: np.random.Generator, length: int, options: TaskOptions) -> Example:
    """`length` letters, and the same backwards."""
    letters = _letters(rng, length, options)
    return _answered(letters + ">", letters[::-1] + ".")


def addition(rng: np.random.Generator, length: int, options: TaskOptions) -> Example:
    """Two numbers of `length` digits, and their sum."""
    left, right = _number(rng, length), _number(rng, length)
    total = str(int(left) + int(right))
    if options.reverse == "all":
        left, right = left[::-1], right[::-1]
    if options.reverse != "none":
        total = total[::-1]
    return _answered(f"{left}+{right}=", total + ".")


def mqar(rng: np.random.Generator, length: int, options: TaskOptions) -> Example:
    """`length` keys with their values, and again in another order."""
    size, width = options.alphabet, options.key_letters
    numbers = rng.choice(size**width, size=length, replace=False)
    digits = numbers[:, None] // size ** np.arange(width) % size
    keys = ["".join(chr(ord("a") + d) for d in row) for row in digits]
    values = rng.integers(0, 10, length)
    pairs = [f"{key}{value}" for key, value in zip(keys, values, strict=True)]
    asked = "".join(pairs[i] for i in rng.permutation(length))
    example = _answered("".join(pairs) + ">", asked)
    is_digit = np.frombuffer(example.text, np.uint8) <= ord("9")
    return Example(example.text, example.scored & is_digit)


@dataclass(frozen=True)
class Kind:
    """A task: what its length counts, how an example is made, and how long it is.

    Attributes:
      unit: what a length is a number of.
      make: `(rng, length, options)` to an example.
      size: `(length, options)` to the bytes of the longest example.
      most: `options` to the longest length.
      options: the fields of `TaskOptions` that it has beside the lengths.
    """

    unit: str
    make: Callable[[np.random.Generator, int, TaskOptions], Example]
    size: Callable[[int, TaskOptions], int]
    most: Callable[[TaskOptions], int]
    options: tuple[str, ...]


TASKS: dict[str, Kind] = {
    "copy": Kind(
        "letters", copy, lambda n, _: 2 * n + 2, lambda _: 10**6, ("alphabet",)
    ),
    "reverse": Kind(
        "letters", reverse, lambda n, _: 2 * n + 2, lambda _: 10**6, ("alphabet",)
    ),
    # The sum may have one digit more than its terms.
    "addition": Kind(
        "digits", addition, lambda n, _: 3 * n + 4, lambda _: _DIGITS, ("reverse",)
    ),
    "mqar": Kind(
        "pairs",
        mqar,
        lambda n, options: 2 * n * (options.key_letters + 1) + 1,
        lambda options: options.alphabet**options.key_letters,
        ("alphabet", "key_letters"),
    ),
}


def row_length(source: str, options: TaskOptions, length: int) -> int:
    """Tokens that are fed for the longest example of a length: all but its last byte.

    >>> row_length("copy", TaskOptions(), 5)  # abcab>abcab
    11
    """
    return TASKS[source].size(length, options) - 1


def check(source: str, options: TaskOptions) -> None:
    """Raise ValueError, naming the flag, for options that make no task.

    Args:
      source: `data.source`; one that is no task takes no option at all.
      options: what `data.task` says.
    """
    kind, usual = TASKS.get(source), TaskOptions()
    used = ("min_length", "max_length", *kind.options) if kind else ()
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        if name not in used and value != getattr(usual, name):
            raise ValueError(
                f"--config.data.task.{name}={value} would have no effect with "
                f"--config.data.source={source}"
            )
    if kind is None:
        return
    for name, valid, what in (
        ("alphabet", range(2, 27), "from 2 to 26"),
        ("key_letters", range(1, 5), "from 1 to 4"),
        ("reverse", _REVERSE, f"one of {', '.join(_REVERSE)}"),
    ):
        _require(getattr(options, name) in valid, options, name, what)
    most = kind.most(options)
    limit = f"from 1 to {most}, the most {kind.unit} of {source}"
    _require(1 <= options.max_length <= most, options, "max_length", limit)
    valid = 1 <= options.min_length <= options.max_length
    limit = f"from 1 to data.task.max_length {options.max_length}"
    _require(valid, options, "min_length", limit)


def _require(ok: bool, options: TaskOptions, name: str, what: str) -> None:
    if not ok:
        got = getattr(options, name)
        raise ValueError(f"--config.data.task.{name} must be {what}, got {got!r}")


def _letters(rng, length: int, options: TaskOptions) -> str:
    return "".join(chr(ord("a") + n) for n in rng.integers(0, options.alphabet, length))


def _number(rng, length: int) -> str:
    digits = rng.integers(0, 10, length)
    if length > 1:
        digits[0] = rng.integers(1, 10)
    return "".join(map(str, digits))


def _answered(prompt: str, answer: str) -> Example:
    scored = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Example((prompt + answer).encode(), scored)
