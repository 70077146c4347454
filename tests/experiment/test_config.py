"""The config: JSON round trip, derived fields, and a named error for what is wrong."""

import json

import pytest

from rope_jax.experiment.config import Config, differences, from_dict, resolve, to_dict


def changed(path, value):
    config = Config()
    *groups, name = path.split(".")
    record = config
    for group in groups:
        record = getattr(record, group)
    setattr(record, name, value)
    return config


def test_round_trip_through_json():
    config = changed("eval.lengths", (128, 512))
    config.sweep.encodings = ("rope", "alibi")
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert differences(again, config) == []


def test_differences_name_the_field():
    found = differences(Config(), changed("model.num_layers", 7))
    assert found == ["model.num_layers: 4 != 7"]


def test_resolve_fills_what_is_derived():
    config = resolve(changed("data.length", 64))
    assert config.model.learned.max_length == 64
    assert config.sweep.encodings == ("rope",)
    assert config.sweep.seeds == (0,)
    assert config.sweep.steps == (1000,)


def test_tuples_may_come_as_text():
    assert resolve(changed("sweep.encodings", ("rope,alibi",))).sweep.encodings == (
        "rope",
        "alibi",
    )
    assert resolve(changed("eval.lengths", ("128, 256",))).eval.lengths == (128, 256)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("eval.lengths", ("512,abc",), r"config.eval.lengths must be int, got 'abc'"),
        ("train.steps", 10.5, "config.train.steps must be int, got 10.5"),
        ("train.steps", True, "config.train.steps must be int, got True"),
        ("train.steps", 0, "--config.train.steps must be at least 1, got 0"),
        ("train.accumulate", 3, "train.accumulate must be a divisor of .* 16, got 3"),
        ("train.learning_rate", 0.0, "train.learning_rate must be positive"),
        ("train.learning_rate", float("nan"), "train.learning_rate must be positive"),
        ("train.seed", 2**32, r"different numbers from 0 to 2\*\*32 - 1"),
        ("train.learning_rate", float("inf"), "train.learning_rate must be positive"),
        ("train.warmup_steps", 2000, "warmup_steps must be at most train.steps 1000"),
        ("train.seed", -1, "train.seed must be 0 or more.*got -1"),
        (
            "data.length",
            0,
            "--config.data.length must be at least 1, .*'embedded'.*, got 0",
        ),
        ("model.encoding", "ropee", "model.encoding must be one of none, .*'ropee'"),
        ("sweep.encodings", ("rope", "rope"), "sweep.encodings must be different"),
        ("sweep.encodings", ("rope", "x"), "sweep.encodings must be one of none"),
        ("sweep.seeds", (1, 1), "sweep.seeds must be different"),
        ("sweep.steps", (200, 200), "sweep.steps must be different"),
        ("sweep.steps", (50, 200), "none below train.warmup_steps 100"),
        ("model.head_dim", 15, "model.head_dim"),
        (
            "model.attention_implementation",
            "flash",
            "attention_implementation must be one of",
        ),
        (
            "model.attention_implementation",
            "cudnn",
            "^--config.model.attention_implementation 'cudnn' .*, blockwise can",
        ),
    ],
)
def test_d04_wrong_values_are_named(path, value, message):
    with pytest.raises(ValueError, match=message):
        resolve(changed(path, value))


def test_unknown_fields_are_refused():
    values = to_dict(Config())
    values["train"]["learing_rate"] = 1.0
    with pytest.raises(ValueError, match=r"unknown field config\.train\.learing_rate"):
        from_dict(values)
