"""Exact match of models with known answers, the table, and a run from end to end."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.experiment import evaluation, sweep, task_plots, task_report
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig, resolve
from rope_jax.experiment.data.task_source import Task
from rope_jax.experiment.data.tasks import TaskOptions
from rope_jax.experiment.mesh import make_mesh
from rope_jax.experiment.protocols import plan
from rope_jax.experiment.task_evaluation import check, measure, wilson
from rope_jax.nn.config import DecoderConfig

EVAL = EvalConfig(protocol="task", lengths=(3, 6), examples=40, bootstrap=50)

# Bits of a byte that the models below are sure of: 255 others are e**10 less likely.
SURE = np.log2(1 + 255 * np.exp(-10))


@dataclasses.dataclass(frozen=True)
class Solver:
    """Copies or reverses: it looks for the ">" and answers from before it.

    `wrong_at` names an answer's byte that it gets wrong where the first letter of the
    example is the letter "a".
    """

    reverse: bool = False
    wrong_at: int | None = None

    def __call__(self, params, inputs, *, last):
        del params
        index = jnp.arange(inputs.shape[1])[None]
        end = jnp.argmax(inputs == ord(">"), axis=1)[:, None]
        place = index - end  # of the next byte in the answer
        source = end - 1 - place if self.reverse else place
        source = jnp.clip(source, 0, inputs.shape[1] - 1)
        answer = jnp.take_along_axis(inputs, source, axis=1)
        answer = jnp.where(place >= end, ord("."), answer)
        if self.wrong_at is not None:
            wrong = (place == self.wrong_at) & (inputs[:, :1] == ord("a"))
            answer = jnp.where(wrong, ord("?"), answer)
        answer = jnp.where(place >= 0, answer, ord("?"))  # the prompt: no idea
        return 10 * jax.nn.one_hot(answer[:, -last:], 256)


def task_of(source="copy", **options):
    return Task(source, TaskOptions(max_length=3, alphabet=4, **options))


def rows_of(apply, task, config=EVAL, **options):
    return {row["length"]: row for row in measure(apply, (), task, config, **options)}


@pytest.mark.parametrize("source", ["copy", "reverse"])
def test_a_model_that_solves_the_task_is_always_right(source):
    solved = rows_of(Solver(source == "reverse"), task_of(source))
    assert list(solved) == [3, 6]
    for length, row in solved.items():
        assert row["exact_match"] == row["token_accuracy"] == 1.0
        assert row["exact_low"] == pytest.approx(40 / (40 + 1.959964**2))
        assert row["exact_high"] == 1.0
        assert row["bpc"] == pytest.approx(SURE, rel=1e-4)
        assert row["scored_bytes"] == 40 * (length + 1)
        assert row["window"] == 2 * length + 1
        assert row["longest_solved"] == 6
    # It is the task that is solved, not any.
    other = rows_of(Solver(source == "copy"), task_of(source))
    assert 0 < other[3]["exact_match"] < 0.5 and other[3]["longest_solved"] is None


@pytest.mark.parametrize("wrong_at", [0, 2, 3])
def test_one_wrong_byte_costs_the_example(wrong_at):
    """Also the last one: of 4 scored bytes, number 3 is the end."""
    task = task_of()
    texts = [task.test_example("validation", 3, i).text for i in range(40)]
    share = np.mean([text[:1] == b"a" for text in texts])
    assert 0 < share < 0.5
    row = rows_of(Solver(wrong_at=wrong_at), task)[3]
    assert row["exact_match"] == pytest.approx(1 - share)
    assert row["token_accuracy"] == pytest.approx(1 - share / 4)
    assert (row["exact_low"], row["exact_high"]) == wilson(round(40 - 40 * share), 40)
    assert row["bpc"] == pytest.approx(SURE + share / 4 * 10 / np.log(2), rel=1e-4)
    assert row["bpc_low"] < row["bpc"] < row["bpc_high"]


def digits_by_place(params, inputs, *, last):
    """Always answers 7, which is right for the values that are 7."""
    del params
    answer = jnp.full((len(inputs), last), ord("7"))
    return jax.nn.one_hot(answer, 256)


def test_of_mqar_only_the_values_are_scored():
    task = task_of("mqar")
    config = dataclasses.replace(EVAL, lengths=(1, 3), examples=100)
    sevens = [
        np.mean([b == ord("7") for b in example.text[2::3][:n]])
        for n in (1, 3)
        for example in [task.test_example("validation", n, i) for i in range(100)]
    ]
    one, three = np.array(sevens).reshape(2, 100)
    rows = rows_of(digits_by_place, task, config)
    assert rows[1]["scored_bytes"] == 100 and rows[3]["scored_bytes"] == 300
    assert rows[1]["token_accuracy"] == pytest.approx(one.mean())
    assert rows[1]["exact_match"] == pytest.approx(one.mean()) != 0
    assert rows[3]["token_accuracy"] == pytest.approx(three.mean())
    assert rows[3]["exact_match"] == pytest.approx((three == 1).mean())


def test_batches_meshes_and_lengths_do_not_change_a_number():
    """Sums of unequal length in one row length: padding is at their ends."""
    task = Task("addition", TaskOptions(max_length=3))
    sizes = {len(task.test_example("validation", 3, i).text) for i in range(40)}
    assert sizes == {12, 13}
    right = rows_of(Solver(), task)
    assert right[3]["scored_bytes"] == sum(
        int(task.test_example("validation", 3, i).scored.sum()) for i in range(40)
    )
    small = dataclasses.replace(EVAL, batch_tokens=50, lengths=(6,))
    assert rows_of(Solver(), task, small) == right
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    with jax.set_mesh(mesh):
        assert rows_of(Solver(), task, mesh=mesh) == right


def test_a_row_beyond_the_model_has_a_reason():
    rows = rows_of(Solver(), task_of(), max_length=7)  # the row of 3 letters
    assert rows[3]["exact_match"] == 1.0 and rows[3]["reason"] is None
    assert rows[6]["exact_match"] is rows[6]["bpc"] is None
    assert rows[6]["reason"] == "the model's positions end at 7"
    assert rows[6]["longest_solved"] == 3


def test_wilson_against_its_definition():
    """Its limits are the shares whose own deviation reaches the estimate."""
    for successes, trials in ((0, 20), (7, 20), (20, 20), (255, 256)):
        estimate = successes / trials
        for limit in wilson(successes, trials):
            deviation = np.sqrt(limit * (1 - limit) / trials)
            if 0 < limit < 1:
                assert abs(limit - estimate) / deviation == pytest.approx(1.959964)
    assert wilson(0, 20)[0] == 0 and wilson(20, 20)[1] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "anchored"}, "--protocol .* must be 'task' .*got 'anchored'"),
        ({"split": "train"}, "--split .* must be one of validation, test, got 'train'"),
        ({"examples": 0}, "--examples .* must be at least 1, got 0"),
        ({"stride": 8}, "--stride .* must be left at 0: it has no effect .*, got 8"),
        ({"scaling": ("logn",)}, r"--scaling .* must be left at \(\): it has no eff"),
        ({"lengths": ()}, "--lengths .* must be different numbers of pairs"),
        ({"lengths": (3, 3)}, "--lengths .* must be different numbers of pairs"),
        ({"lengths": (3, 17)}, r"from 1 to 16 for mqar, got \(3, 17\)"),
    ],
)
def test_d04_what_cannot_be_evaluated_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(EVAL, **change), task_of("mqar"))


def test_a_text_has_no_task_to_evaluate():
    with pytest.raises(ValueError, match=r"--protocol .*must be one of anchored"):
        plan(10_000, EVAL, 32)


@pytest.fixture(scope="module")
def config():
    config = Config(mesh=MeshConfig(data=1))
    config.model = DecoderConfig(
        num_layers=1, model_dim=16, num_heads=2, head_dim=8, mlp="plain"
    )
    config.data.source, config.data.length = "copy", 0
    config.data.task = TaskOptions(max_length=4, alphabet=3)
    config.train.steps, config.train.batch_size = 3, 8
    config.train.warmup_steps, config.train.log_every = 0, 1
    config.eval = EvalConfig(protocol="task", lengths=(), examples=16, bootstrap=50)
    config.sweep.encodings = ("alibi", "learned")
    return config


def test_the_row_and_the_lengths_follow_the_task(config):
    made = resolve(config)
    assert made.data.length == made.model.learned.max_length == 9
    assert made.data.train_length == 4
    assert made.eval.lengths == (4, 5, 6, 8, 16, 32)
    assert resolve(made) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 128}, "--config.data.length must be 0 or 9, .* copy, got 128"),
        ({"path": "x"}, "--config.data.path must be empty for .*source=copy, got 'x'"),
        ({"task": TaskOptions(reverse="sum")}, "data.task.reverse=sum would have no"),
        ({"source": "embedded"}, "task.max_length=4 would have no effect"),
    ],
)
def test_d04_what_contradicts_the_task_is_named(config, change, message):
    data = dataclasses.replace(config.data, **change)
    with pytest.raises(ValueError, match=message):
        resolve(dataclasses.replace(config, data=data))


def test_a_run_from_end_to_end(config, tmp_path, capsys):
    short = dataclasses.replace(config.eval, lengths=(4, 6))
    rows = sweep.run(dataclasses.replace(config, eval=short), tmp_path)
    about = {(r["encoding"], r["length"]): r for r in rows}
    assert len(about) == len(rows) == 2 * 2
    assert {(r["train_length"], r["protocol"], r["split"]) for r in rows} == {
        (4, "task", "validation")
    }
    assert {r["corpus"] for r in rows} == {"copy, 1 to 4 letters, alphabet=3"}
    for (encoding, length), row in about.items():
        # The table of `learned` ends with the longest example of training.
        refused = encoding == "learned" and length > 4
        assert (row["bpc"] is None) == bool(row["reason"]) == refused
        if not refused:
            assert 0 <= row["exact_low"] <= row["exact_match"] <= row["exact_high"] <= 1
            assert row["bpc"] < 8 and row["step"] == 3
    logged = (tmp_path / "alibi-seed0" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(logged[0])["bpc"] == pytest.approx(8.0, abs=1e-5)
    printed = capsys.readouterr().out
    assert "copy, 1 to 4 letters, alphabet=3: 16 examples of each length" in printed
    assert "no value for learned at 6: the model's positions end at 9" in printed
    assert (tmp_path / "extrapolation.png").read_bytes()[:4] == b"\x89PNG"
    again = evaluation.evaluate_workdir(tmp_path, lengths=(6,), split="test")
    assert [r["length"] for r in again] == [4, 6, 4, 6]  # and the training length
    assert again[0]["bpc"] != about["alibi", 4]["bpc"]  # the examples of the test
    written = json.loads((tmp_path / "extrapolation.json").read_text())
    assert written == [*rows, *again]  # those of the other split stay


def made_rows(encoding, values, *, seed=0):
    lengths = (20, 40, 80)
    task = {"corpus": "copy, 1 to 20 letters", "split": "validation", "step": 1000}
    task |= {"encoding": encoding, "seed": seed, "train_length": 20, "examples": 256}
    solved = max((n for n, v in zip(lengths, values, strict=True) if v), default=None)
    rows = []
    for length, value in zip(lengths, values, strict=True):
        row = {"length": length, "exact_match": value, "longest_solved": solved}
        row["reason"] = "the model's positions end at 41" if value is None else None
        row["token_accuracy"] = None if value is None else (1 + value) / 2
        low, high = (None, None) if value is None else wilson(round(256 * value), 256)
        rows.append(task | row | {"exact_low": low, "exact_high": high})
    return rows


def test_the_table_has_a_line_for_each_run_and_the_mean_of_seeds(tmp_path):
    rows = made_rows("rope", [1.0, 0.5, 0.0]) + made_rows("learned", [1.0, None, None])
    rows += made_rows("alibi", [0.75, 0.5, 0.25])
    rows += made_rows("alibi", [1.0, 0.25, 0.25], seed=1)
    table = task_report.format_table(rows)
    lines = [line.split() for line in table.splitlines()]
    assert ["encoding", "trained", "seed", "90%", "20", "40", "80"] in lines
    assert ["rope", "20", "0", "40", "100.0±0.7", "50.0±6.1", "0.0±0.7"] in lines
    assert ["rope", "20", "0", "40", "100.0", "75.0", "50.0"] in lines
    assert ["learned", "20", "0", "20", "100.0±0.7", "-", "-"] in lines
    assert ["alibi", "20", "mean", "87.5±17.7", "37.5±17.7", "25.0±0.0"] in lines
    assert "no value for learned at 40, 80: the model's positions end at 41" in table
    assert max(map(len, table.splitlines())) <= 100
    task_plots.plot(rows, tmp_path / "task.png")
    assert (tmp_path / "task.png").read_bytes()[:4] == b"\x89PNG"


def test_no_values_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="rows must not be empty"):
        task_report.format_table([])
    with pytest.raises(ValueError, match="at least one with an exact_match"):
        task_plots.plot(made_rows("learned", [None] * 3), tmp_path / "task.png")
    assert "-" in task_report.format_table(made_rows("learned", [None] * 3))
