"""Text from a run: what it sees, what is printed, and what is refused."""

import io

import jax
import numpy as np
import pytest

from rope_jax.experiment import trained
from rope_jax.experiment.sample import Request, Samples, sample
from rope_jax.experiment.text_stream import TextStream
from rope_jax.nn.cache import Rolling
from rope_jax.nn.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def run_of(write_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return lambda encoding: trained.load(write_run(folder / encoding, encoding))


@pytest.fixture(scope="module")
def rope(run_of):
    return run_of("rope")


# One shape for all that is compiled: three rows, a byte of prompt, 20 more.
SHAPE = {"length": 20, "num_samples": 3}


def texts(run, request):
    """The samples, `[num_samples, length]`."""
    return np.concatenate(list(Samples(run, request)), axis=1)


def printed(run, request, *, echo=True):
    out = io.BytesIO()
    sample(run, request, TextStream(out), echo=echo)
    return out.getvalue()


@pytest.mark.parametrize("prompt", [b"\xff", b""], ids=["a byte", "none"])
def test_greedy_text_is_the_arg_max_of_full_passes(rope, prompt):
    """Without a prompt it goes on from a line break."""
    found = texts(rope, Request(prompt, sampling=GREEDY, **SHAPE))
    row = np.concatenate([np.frombuffer(prompt or b"\n", np.uint8), found[0]])
    logits = jax.jit(rope.model)(row[None, :-1].astype(np.int32))
    np.testing.assert_array_equal(logits[0].argmax(axis=-1), found[0])
    np.testing.assert_array_equal(found, found[:1].repeat(3, axis=0))


def test_g04_samples_differ_by_row_and_seed_and_repeat_by_seed(rope):
    request = Request(b"a", **SHAPE)
    found = texts(rope, request)
    assert found.shape == (3, 20) and found.dtype == np.uint8
    assert len({row.tobytes() for row in found}) == 3
    np.testing.assert_array_equal(found, texts(rope, request))
    other = texts(rope, Request(b"a", seed=1, **SHAPE))
    assert (found != other).any(axis=1).all()


def test_the_prompt_and_every_sample_are_printed(rope, capsys):
    request = Request(b"a", **SHAPE)
    rule = b"\n" + b"-" * 15 + b"\n"
    rows = [row.tobytes() for row in texts(rope, request)]
    for echo, head in ((True, b"a"), (False, b"")):
        shown = rule.join(head + row for row in rows) + b"\n"
        expected = shown.decode(errors="replace").encode()
        assert printed(rope, request, echo=echo) == expected
    assert "60 bytes in" in capsys.readouterr().err


def test_no_new_bytes_gives_the_prompt_back(rope):
    assert printed(rope, Request(b"caf\xc3\xa9", length=0)) == "café\n".encode()
    assert printed(rope, Request(length=0)) == b"\n"


def test_a_reader_that_goes_away_ends_it(rope):
    class Gone(io.BytesIO):
        def write(self, content):
            raise BrokenPipeError

    out = TextStream(Gone())
    sample(rope, Request(b"a", **SHAPE), out, echo=True)
    assert out.closed


@pytest.mark.parametrize(
    ("encoding", "request_", "words"),
    [
        (
            "learned",
            Request(b"abcd", length=13),
            "--length must be at most 12 after a prompt of 4 bytes, got 13: .* at 16",
        ),
        ("sinusoidal", Request(rolling=Rolling(4, 8)), "--window=8 --sinks=4: .*sinus"),
        ("fox", Request(rolling=Rolling(4, 8)), "--window=8 --sinks=4: .*sinks.*fox"),
        ("random_rope", Request(length=4), "--length=4: .*random_rope"),
    ],
)
def test_what_an_encoding_cannot_do_is_refused(run_of, encoding, request_, words):
    with pytest.raises(ValueError, match=words):
        Samples(run_of(encoding), request_)


def test_a_table_can_be_used_to_its_end(run_of):
    run = run_of("learned")
    assert printed(run, Request(b"a" * 16, length=0)) == b"a" * 16 + b"\n"
    with pytest.raises(ValueError, match="--length must be at most 0"):
        printed(run, Request(b"a" * 17, length=0))


@pytest.mark.parametrize(
    ("name", "value"), [("length", -1), ("num_samples", 0), ("seed", -1)]
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"--{name} must be .* got {value}"):
        Request(**{name: value})
