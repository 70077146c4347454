"""Changes of a trained model at evaluation: their texts, and the rows they give."""

import dataclasses

import numpy as np
import pytest

from rope_jax.experiment import evaluation, scalings
from rope_jax.experiment.checkpoint import abstract_model, load_params
from rope_jax.experiment.config import Config, EvalConfig, MeshConfig, split
from rope_jax.experiment.data import sources
from rope_jax.experiment.evaluation import evaluate_run, evaluate_workdir
from rope_jax.experiment.measurement import measure
from rope_jax.experiment.protocols import plan
from rope_jax.experiment.scoring import ModelApply
from rope_jax.experiment.training import fit
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.rotations import RopeOptions

SMALL = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8}
LENGTH = 16
ROPE = RopeOptions(original_length=LENGTH)
EVERY = (
    "linear:4",
    "ntk:2.5",
    "dynamic_ntk",
    "ntk_by_parts:4",
    "yarn:4",
    "llama3:4",
    "rerope:12",
    "self_extend:4,8",
    "logn",
    "window:12",
    "yarn:4+logn+window:12",
)


def test_a_list_of_changes_is_split_between_them():
    text = "linear:4, self_extend:4,64,yarn:4+logn, self_extend:2, 8"
    parts = ["linear:4", "self_extend:4,64", "yarn:4+logn", "self_extend:2, 8"]
    assert split(text) == parts
    assert split("logn") == ["logn"] and split("") == split(",") == []


def test_a_text_becomes_numbers():
    assert scalings.parse("yarn:2.5 + logn") == [
        ("yarn", {"factor": 2.5}),
        ("logn", {}),
    ]
    right = [("self_extend", {"group": 2, "window": 8})]
    assert scalings.parse("self_extend:2, 8") == right


def changed(text, **options):
    config = DecoderConfig(**SMALL, **{"rope": ROPE, **options})
    return scalings.apply(config, text, train_length=LENGTH)


def test_changes_set_the_fields_that_a_config_could_have_set():
    yarn = changed("yarn:4")
    assert yarn == DecoderConfig(
        **SMALL, rope=RopeOptions(scaling="yarn", factor=4.0, original_length=LENGTH)
    )
    both = changed("self_extend:4,8+logn+window:12")
    assert both == DecoderConfig(
        **SMALL,
        rope=RopeOptions(
            scaling="self_extend", group=4, window=8, original_length=LENGTH
        ),
        temperature="logn",
        temperature_length=LENGTH,
        window=12,
    )
    assert changed("linear:2", rope=yarn.rope).rope == dataclasses.replace(
        yarn.rope, scaling="linear", factor=2.0
    )  # in place of the one that was trained with


@pytest.mark.parametrize("text", EVERY)
def test_parameters_stay_as_they_are(text):
    config = DecoderConfig(**SMALL, rope=ROPE)
    plain, plain_params = abstract_model(config)
    graphdef, params = abstract_model(changed(text))
    assert graphdef != plain and params == plain_params


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarm:4", r"--scaling \(.*eval.scaling\) .* linear:FACTOR, .*got 'yarm:4'"),
        ("yarn", "yarn:FACTOR.* got 'yarn'"),
        ("yarn:", "got 'yarn:'"),
        ("yarn:four", "got 'yarn:four'"),
        ("logn:2", "logn, .*got 'logn:2'"),
        ("self_extend:4", "self_extend:GROUP,WINDOW, .*got 'self_extend:4'"),
        ("rerope:2.5", "rerope:WINDOW, .*got 'rerope:2.5'"),
        ("yarn:4+", r"joined by \+; got 'yarn:4\+'"),
        ("", "got ''"),
        ("yarn:1", "the factor of yarn must be above 1, .*got 'yarn:1'"),
        ("yarn:nan", "the factor of yarn must be above 1"),
        ("self_extend:0,4", "the group of self_extend must be at least 1"),
        ("window:-1", "the window of window must be at least 1"),
        ("window:99999999999", r"at most 2\*\*31 - 1, got 'window:99999999999'"),
        ("yarn:4+rerope:8", "yarn and rerope in .* both set the rope"),
        ("logn+logn", "logn and logn in"),
    ],
)
def test_d04_malformed_texts_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        scalings.parse(text)


def test_d04_a_change_may_not_come_twice():
    with pytest.raises(ValueError, match=r"different changes, got 'yarn:4\.0' twice"):
        scalings.check(["yarn:4", "logn", "yarn:4.0"])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("yarn:4", {"encoding": "alibi"}, "rotary encoding, and 'alibi' is none"),
        ("yarn:4", {"encoding": "pope"}, "rotary encoding, and 'pope' is none"),
        ("window:8", {"window": 8}, "changes nothing"),
    ],
)
def test_what_does_not_apply_says_why(text, options, message):
    with pytest.raises(ValueError, match=message):
        changed(text, **options)


# Runs on disk.


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A rotary and another encoding, after a few steps on repeated words."""
    path = tmp_path_factory.mktemp("data") / "bytes"
    words = np.random.default_rng(0).integers(97, 123, (40, 6)).astype(np.uint8)
    path.write_bytes(words[np.random.default_rng(1).integers(0, 40, 1500)].tobytes())
    config = Config(mesh=MeshConfig(data=1))
    config.data.path, config.data.length = str(path), LENGTH
    config.train.steps, config.train.batch_size = 8, 8
    config.train.warmup_steps, config.train.learning_rate = 0, 3e-2
    config.eval = EvalConfig(
        lengths=(LENGTH, 64), anchors=8, block=8, bootstrap=50, batch_tokens=512
    )
    workdir = tmp_path_factory.mktemp("runs")
    for encoding in ("alibi", "rope"):
        config.model = DecoderConfig(encoding=encoding, mlp="plain", **SMALL)
        fit(config, workdir / f"{encoding}-seed0")
    return workdir


def rows_by(rows, scaling):
    return {r["length"]: r for r in rows if r["scaling"] == scaling}


BUILT = {
    "linear:4": {
        "rope": RopeOptions(scaling="linear", factor=4.0, original_length=LENGTH)
    },
    "logn+window:12": {
        "temperature": "logn",
        "temperature_length": LENGTH,
        "window": 12,
    },
    "self_extend:4,8": {
        "rope": RopeOptions(
            scaling="self_extend", group=4, window=8, original_length=LENGTH
        )
    },
}


def test_rows_are_those_of_a_model_that_was_built_so(workdir, capsys):
    """The run's parameters, in models whose config has the change from the start."""
    run = workdir / "rope-seed0"
    rows = evaluate_workdir(run, scaling=tuple(BUILT))
    assert "rope +self_extend:4,8" in capsys.readouterr().out
    order = ["", *BUILT]
    assert [row["scaling"] for row in rows] == [text for text in order for _ in "12"]
    config, _, params, _ = load_params(run)
    plain = rows_by(rows, "")
    assert list(plain.values()) == evaluate_run(run, config.eval)
    data = sources.load(config.data).validation
    cells = plan(len(data), config.eval, LENGTH)
    for text, options in BUILT.items():
        model = DecoderConfig(mlp="plain", **SMALL, **options)
        apply, found = ModelApply(abstract_model(model)[0]), rows_by(rows, text)
        for row in measure(
            apply, params, cells, data, config.eval, train_length=LENGTH
        ):
            one = found[row["length"]]
            assert one["bpc"] == pytest.approx(row["bpc"], rel=1e-6)
            # To the unchanged model at its training length.
            difference = one["bpc"] - plain[LENGTH]["bpc"]
            assert one["delta"] == pytest.approx(difference, abs=1e-9)
            assert one["delta_low"] <= one["delta"] <= one["delta_high"]
        assert abs(found[64]["bpc"] - plain[64]["bpc"]) > 1e-4, text


def test_a_change_that_does_not_apply_is_a_reason(workdir):
    config = load_params(workdir / "alibi-seed0")[0]
    config.eval.scaling = ("rerope:8", "logn")
    rows = evaluate_run(workdir / "alibi-seed0", config.eval)
    refused = rows_by(rows, "rerope:8")
    assert set(refused) == {LENGTH, 64}
    for row in refused.values():
        assert row["bpc"] is None and row["delta"] is None
        assert row["scored_bytes"] == 0
        assert row["reason"].endswith("rotary encoding, and 'alibi' is none")
    plain, logn = rows_by(rows, ""), rows_by(rows, "logn")
    assert logn[LENGTH]["bpc"] == pytest.approx(plain[LENGTH]["bpc"], rel=1e-6)
    assert abs(logn[64]["bpc"] - plain[64]["bpc"]) > 1e-6


def test_d04_malformed_texts_stop_before_any_model(workdir, monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(evaluation.checkpoint, "load_params", touched)
    with pytest.raises(ValueError, match=r"--scaling .*got 'yarm:4'"):
        evaluate_workdir(workdir, scaling=("linear:4", "yarm:4"))
