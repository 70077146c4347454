"""The examples of each task, against literal lines and independent checks."""

import numpy as np
import pytest

from rope_jax.experiment.data.tasks import (
    TASKS,
    Example,
    TaskOptions,
    check,
    row_length,
)


class Drawn:
    """A generator whose numbers are given."""

    def __init__(self, *numbers, order=()):
        self._numbers, self._order = list(numbers), order

    def integers(self, low, high, size=None):
        del low, high
        values = [self._numbers.pop(0) for _ in range(size or 1)]
        return np.array(values) if size else values[0]

    def choice(self, total, *, size, replace):
        assert not replace and max(self._numbers[:size]) < total
        return self.integers(0, total, size)

    def permutation(self, length):
        assert len(self._order) == length
        return np.array(self._order)


def marked(example: Example) -> list[str]:
    """The text, and under it a ^ for each scored byte."""
    assert len(example.text) == len(example.scored)
    return [example.text.decode(), "".join(" ^"[s] for s in example.scored.astype(int))]


def test_the_letters_again():
    letters = Drawn(0, 1, 2, 0, 1)
    assert marked(TASKS["copy"].make(letters, 5, TaskOptions())) == [
        "abcab>abcab.",
        "      ^^^^^^",
    ]


def test_the_letters_backwards():
    letters = Drawn(0, 1, 2, 0, 25)
    assert marked(TASKS["reverse"].make(letters, 5, TaskOptions())) == [
        "abcaz>zacba.",
        "      ^^^^^^",
    ]


@pytest.mark.parametrize(
    ("reverse", "text"),
    [("none", "12+94=106."), ("sum", "12+94=601."), ("all", "21+49=601.")],
)
def test_which_digit_comes_first(reverse, text):
    digits = Drawn(0, 2, 1, 5, 4, 9)  # the first digit is drawn again: never 0
    options = TaskOptions(reverse=reverse)
    expected = [text, "      ^^^^"]
    assert marked(TASKS["addition"].make(digits, 2, options)) == expected


def test_each_key_is_asked_once_and_its_value_scored():
    options = TaskOptions(alphabet=4, key_letters=2)  # number 6 is "c" + 4 * "b"
    drawn = Drawn(4, 6, 15, 3, 7, 1, order=(1, 2, 0))
    assert marked(TASKS["mqar"].make(drawn, 3, options)) == [
        "ab3cb7dd1>cb7dd1ab3",
        "            ^  ^  ^",
    ]


def test_sums_are_right_and_terms_have_their_digits():
    rng, carries = np.random.default_rng(0), set()
    for length in (1, 2, 7, 30):
        for _ in range(50):
            text = TASKS["addition"].make(rng, length, TaskOptions()).text.decode()
            left, right = text[:-1].split("=")[0].split("+")
            total = text[:-1].split("=")[1]
            assert text[-1] == "." and int(left) + int(right) == int(total)
            assert {left[0], right[0]} != {"0"} or length == 1
            assert len(left) == len(right) == length and total == str(int(total))
            carries.add(len(total) - length)
    assert carries == {0, 1}


def test_keys_differ_and_their_values_may_not():
    rng, options = np.random.default_rng(0), TaskOptions(alphabet=5)
    example = TASKS["mqar"].make(rng, 25, options)  # every key there is
    shown, asked = example.text.decode().split(">")
    pairs = [shown[i : i + 3] for i in range(0, 75, 3)]
    assert len({pair[:2] for pair in pairs}) == 25
    assert len({pair[2] for pair in pairs}) <= 10
    asked = [asked[i : i + 3] for i in range(0, 75, 3)]
    assert asked != pairs and sorted(asked) == sorted(pairs)
    right = [p in range(78, 151, 3) for p in range(151)]
    assert example.scored.tolist() == right


@pytest.mark.parametrize("source", TASKS)
def test_a_row_holds_the_longest_example_and_no_more(source):
    rng, options = np.random.default_rng(0), TaskOptions(alphabet=5, key_letters=2)
    for length in (1, 2, 9):
        made = [TASKS[source].make(rng, length, options) for _ in range(40)]
        sizes = {len(example.text) for example in made}
        assert row_length(source, options, length) == max(sizes) - 1
        assert all(example.scored[-1] for example in made)
        assert all(0 < b < 128 for example in made for b in example.text)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("copy", {"max_length": 0}, "max_length must be from 1 to .* copy, got 0"),
        ("copy", {"min_length": 21}, "min_length must be from 1 to .* 20, got 21"),
        ("copy", {"min_length": 0}, "min_length must be .*, got 0"),
        ("copy", {"alphabet": 27}, "alphabet must be from 2 to 26, got 27"),
        ("copy", {"reverse": "sum"}, "reverse=sum would have no effect .*source=copy"),
        ("addition", {"alphabet": 3}, "alphabet=3 would have no effect"),
        ("addition", {"reverse": "yes"}, "reverse must be one of none, sum, all, got"),
        ("addition", {"max_length": 4001}, "max_length must be from 1 to 4000"),
        ("mqar", {"key_letters": 5}, "key_letters must be from 1 to 4, got 5"),
        ("mqar", {"max_length": 677}, "max_length must be from 1 to 676, .* got 677"),
        (
            "mqar",
            {"key_letters": 1, "max_length": 27},
            "max_length must be from 1 to 26, .*got 27",
        ),
        ("enwik8", {"max_length": 30}, "max_length=30 would have no effect"),
    ],
)
def test_d04_wrong_options_name_their_flag(source, options, message):
    with pytest.raises(ValueError, match=r"--config\.data\.task\." + message):
        check(source, TaskOptions(**options))
