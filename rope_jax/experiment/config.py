"""The experiment's configuration: plain dataclasses, filled by configs/ and flags.

A config is data. It is written to `config.json` beside each run and read back
from there, so that an evaluation never depends on the file that made it. The
classes stay mutable because absl flags set their fields; `validate` is called
once before any work, and only plain values go on into jitted code.
"""

import copy
import dataclasses
import functools
import math
import re
import typing
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.experiment.data import tasks
from rope_jax.experiment.data.tasks import TASKS, TaskOptions
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.encodings import ENCODINGS


@dataclass
class DataConfig:
    """Where the bytes come from, and how they are cut."""

    source: str = "embedded"  # "embedded", "enwik8" or a task: see data/tasks.py
    path: str = ""  # a local byte file (raw, .zip or .gz), used instead of `source`
    data_dir: str = ""  # where TensorFlow Datasets keeps enwik8; "" is its default
    length: int = 128  # training context in bytes; of a task 0: its longest example
    task: TaskOptions = field(default_factory=TaskOptions)

    @property
    def train_length(self) -> int:
        """The longest length of training, in bytes or in the units of a task."""
        return self.task.max_length if self.source in TASKS else self.length


@dataclass
class TrainConfig:
    """One run's optimisation. An update sees `batch_size * data.length` bytes."""

    steps: int = 1000
    batch_size: int = 16  # sequences per update, all devices together
    accumulate: int = 1  # micro-batches that one update is split into
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4  # cosine end, reached at `steps`
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    seed: int = 0
    log_every: int = 50
    checkpoint_every: int = 500
    keep_checkpoints: int = 2


@dataclass
class EvalConfig:
    """What is measured after training, and by eval.py.

    The protocol "task" measures a task and nothing else. Its lengths are in the
    task's units, and by default go to 8 times the longest of training.
    """

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    multiples: tuple[int, ...] = ()  # of each run's training length; if no `lengths`
    protocol: str = "anchored"  # or another of protocols.PROTOCOLS, or "task"
    split: str = "validation"  # or "test"
    # "anchored" below stands for every protocol that scores blocks of bytes:
    # last_token (blocks of one byte), control, window_cap and induction as well.
    anchors: int = 256  # anchored: blocks scored, spread over the split
    block: int = 32  # anchored: bytes scored in each block
    reach: int = 0  # anchored: no block before this byte; 0: before max(lengths)
    stride: int = 0  # sliding, per_position: bytes from window to window; 0: a part
    max_bytes: int = 0  # sliding, per_position, nonoverlap: bytes read; 0 is all
    examples: int = 256  # task: examples of each length
    batch_tokens: int = 16384  # tokens that one evaluation call is fed
    bootstrap: int = 2000  # resamples behind each 95 % interval
    seed: int = 0  # of the bootstrap, the shuffled bytes and the planted strings
    scaling: tuple[str, ...] = ()  # changes of the model that get rows too: `scalings`


@dataclass
class SweepConfig:
    """The grid that train.py runs. Empty means the one value in `model`/`train`."""

    encodings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()  # budgets: each is a run of its own, to its own end
    together: bool = False  # the seeds of an encoding in one compiled step


@dataclass
class MeshConfig:
    """Devices along each axis; one may be -1, which takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    shard_optimizer: bool = False  # the optimizer's moments over data, too (ZeRO-1)


@dataclass
class Config:
    """Everything that a run depends on."""

    model: DecoderConfig = field(default_factory=DecoderConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    init_from: str = ""  # a run, or a directory of runs, whose parameters it starts at


# Lengths of the model that follow from the training length: group, field, multiple.
_DERIVED = (
    ("learned", "max_length", 1),
    ("random_rope", "max_length", 16),
    ("rope", "original_length", 1),
    ("fire", "length", 1),
)


def to_dict(config: Config) -> dict:
    """The config as nested dictionaries of JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict) -> Config:
    """Rebuild a config from `to_dict`'s output.

    Raises:
      ValueError: an unknown field, or a value of the wrong type.
    """
    return _build(Config, values, "config")


def parse(config: Config) -> Config:
    """A copy of a config in which flags' texts have become what their types say.

    Flags give tuples as text ("rope,alibi"). An empty grid becomes the one encoding
    and the one seed of `model` and `train`. The model's fields are not looked at yet.

    Raises:
      ValueError: naming the field, the value and what is valid.
    """
    config = _build(Config, to_dict(config), "--config")
    _resolve_task(config)
    config.sweep.encodings = config.sweep.encodings or (config.model.encoding,)
    config.sweep.seeds = config.sweep.seeds or (config.train.seed,)
    config.sweep.steps = config.sweep.steps or (config.train.steps,)
    _check(config)
    return config


def resolve(config: Config) -> Config:
    """A checked copy of a config, with the fields that are derived filled in.

    It is parsed, and a learned table, say, gets the training length where none was
    chosen.

    Raises:
      ValueError: naming the field, the value and what is valid.
    """
    config = parse(config)
    model, length = config.model, config.data.length
    for group, name, multiple in _DERIVED:
        options = getattr(model, group)
        setattr(options, name, getattr(options, name) or multiple * length)
    if model.temperature != "none":
        model.temperature_length = model.temperature_length or length
    _check_models(config)
    return config


def with_lengths_of(config: Config, source: Config) -> Config:
    """A copy of a config, with its derived fields as another one has them.

    For a model that was trained already: what was 0 gets the length of that training,
    not of the one to come.
    """
    config = copy.deepcopy(config)
    model, trained = config.model, source.model
    for group, name, _ in _DERIVED:
        options = getattr(model, group)
        length = getattr(options, name) or getattr(getattr(trained, group), name)
        setattr(options, name, length)
    if model.temperature != "none" and not model.temperature_length:
        length = trained.temperature_length or source.data.length
        model.temperature_length = length
    return config


def _resolve_task(config: Config) -> None:
    """Derive the row and the lengths of a task; refuse what contradicts it."""
    data = config.data
    tasks.check(data.source, data.task)
    if data.source not in TASKS:
        valid = f"at least 1, or --config.data.source one of {', '.join(TASKS)}"
        valid = f"{valid} (it is {data.source!r})"
        _require(data.length >= 1, "data.length", data.length, valid)
        return
    task = f"empty for --config.data.source={data.source}"
    _require(not data.path, "data.path", data.path, task)
    trained = data.task.max_length
    row = tasks.row_length(data.source, data.task, trained)
    example = f"0 or {row}, the row of the longest example of {data.source}"
    _require(data.length in (0, row), "data.length", data.length, example)
    data.length = row
    if not config.eval.lengths:
        quarters = (4, 5, 6, 8, 16, 32)
        config.eval.lengths = tuple(sorted({trained * n // 4 for n in quarters}))


def differences(left: Config, right: Config) -> list[str]:
    """The fields in which two configs differ, as 'name: left != right'."""
    a, b = _flatten(to_dict(left)), _flatten(to_dict(right))
    return [f"{name}: {a[name]!r} != {b[name]!r}" for name in a if a[name] != b[name]]


def _build(cls, values, path):
    known = {f.name: f.type for f in dataclasses.fields(cls)}
    made = {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"unknown field {path}.{name}; valid fields: {', '.join(known)}"
            )
        build = _build if dataclasses.is_dataclass(known[name]) else _typed
        made[name] = build(known[name], value, f"{path}.{name}")
    return cls(**made)


def _typed(kind, value, path):
    if kind not in (int, float, str, bool):  # tuple[item, ...]
        item = typing.get_args(kind)[0]
        if not isinstance(value, tuple | list):
            raise ValueError(
                f"{path} must be a list of {item.__name__}s, got {value!r}"
            )
        parts = [p for v in value for p in (split(v) if type(v) is str else [v])]
        return tuple(_typed(item, p, path) for p in parts)
    if kind is int and isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value)  # an element of a tuple that came as text
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{path} must be {kind.__name__}, got {value!r}")
    return value


def split(text: str) -> list[str]:
    """The items of a flag's text: at its commas, but within a list of one's numbers.

    >>> split("rope, alibi"), split("128,256"), split("self_extend:4,64,yarn:4")
    (['rope', 'alibi'], ['128', '256'], ['self_extend:4,64', 'yarn:4'])
    """
    named = any(character.isalpha() for character in text)
    parts = re.split(r",(?=\s*[^\W\d_])" if named else ",", text)
    return [part.strip(" ,") for part in parts if part.strip(" ,")]


def _flatten(values: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _require(ok: bool, field: str, value, valid: str) -> None:
    if not ok:
        raise ValueError(f"--config.{field} must be {valid}, got {value!r}")


def _check(config: Config) -> None:
    # `data.source`, and all of `eval`, are checked by what uses them.
    train = config.train
    for name in ("steps", "batch_size", "accumulate", "log_every", "checkpoint_every"):
        value = getattr(train, name)
        _require(value >= 1, f"train.{name}", value, "at least 1")
    _require(
        train.batch_size % train.accumulate == 0,
        "train.accumulate",
        train.accumulate,
        f"a divisor of train.batch_size {train.batch_size}",
    )
    for name in ("learning_rate", "clip_norm"):
        value = getattr(train, name)
        _require(0 < value < math.inf, f"train.{name}", value, "positive and finite")
    for name in ("final_learning_rate", "weight_decay", "warmup_steps", "seed"):
        value = getattr(train, name)
        _require(0 <= value < math.inf, f"train.{name}", value, "0 or more, finite")
    _require(
        train.warmup_steps <= train.steps,
        "train.warmup_steps",
        train.warmup_steps,
        f"at most train.steps {train.steps}",
    )
    for name in ("beta1", "beta2"):
        value = getattr(train, name)
        _require(0 <= value < 1, f"train.{name}", value, "in [0, 1)")
    _require(
        train.keep_checkpoints >= 1,
        "train.keep_checkpoints",
        train.keep_checkpoints,
        "at least 1",
    )
    _check_sweep(config)


def _check_sweep(config: Config) -> None:
    seeds = config.sweep.seeds
    _require(
        all(0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) == len(seeds),
        "sweep.seeds",
        seeds,
        "different numbers from 0 to 2**32 - 1",
    )
    steps = config.sweep.steps
    _require(
        len(set(steps)) == len(steps)
        and min(steps) >= max(1, config.train.warmup_steps),
        "sweep.steps",
        steps,
        "different numbers, 1 or more and none below train.warmup_steps "
        f"{config.train.warmup_steps}",
    )
    names = config.sweep.encodings
    _require(len(set(names)) == len(names), "sweep.encodings", names, "different names")
    for encoding in names:
        _require(
            encoding in ENCODINGS,
            "sweep.encodings" if len(names) > 1 else "model.encoding",
            encoding,
            f"one of {', '.join(ENCODINGS)}",
        )


def _check_models(config: Config) -> None:
    """Build and call every model of the grid abstractly: its checks name the field."""
    for encoding in config.sweep.encodings:
        model = dataclasses.replace(config.model, encoding=encoding)
        try:
            jax.eval_shape(functools.partial(_logits, model, config.data.length))
        except ValueError as error:
            message = re.sub(r"(?<![\w.])model\.", "--config.model.", str(error))
            flag = "--config.model.attention_implementation"
            message = re.sub(r"^implementation '", f"{flag} '", message)
            raise ValueError(message) from error


def _logits(model: DecoderConfig, length: int) -> jax.Array:
    tokens = jnp.zeros((1, length), jnp.int32)
    return Decoder(model, rngs=nnx.Rngs(0))(tokens)
