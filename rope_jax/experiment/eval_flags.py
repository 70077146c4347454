"""The flags of eval.py: every field of `EvalConfig` under its own name."""

import dataclasses

from absl import flags

from rope_jax.experiment.config import EvalConfig, split
from rope_jax.experiment.protocols import PROTOCOLS

_HELP = {
    "lengths": "Context lengths in bytes, as 128,256,512; of a task in its units.",
    "multiples": "Instead of lengths: multiples of each run's training length.",
    "protocol": f"How bytes are scored: {', '.join(PROTOCOLS)}; or task.",
    "split": "validation or test.",
    "anchors": "How many blocks the protocols on the same bytes at every length score.",
    "block": "Bytes in each of those blocks; for last_token always 1.",
    "reach": "No block begins before this byte, or before the longest length.",
    "stride": "sliding, per_position: bytes from window to window.",
    "max_bytes": "sliding, nonoverlap, per_position: bytes read; 0 is all.",
    "examples": "task: examples of each length.",
    "batch_tokens": "Tokens that one call of the model is fed.",
    "bootstrap": "Resamples behind each 95 % interval.",
    "seed": "Seed of the resamples, the shuffled bytes and the planted strings.",
    "scaling": "Changes of the trained model that get rows too, as yarn:4,window:128.",
}


def define() -> None:
    """Define a flag for each field; None stands for what the runs say."""
    kinds = {int: flags.DEFINE_integer, str: flags.DEFINE_string}
    for field in dataclasses.fields(EvalConfig):
        kind = kinds.get(field.type, flags.DEFINE_list)
        if field.name == "scaling":  # its items hold commas, so it may be given again
            kind = flags.DEFINE_multi_string
        kind(field.name, None, _HELP[field.name])


def chosen() -> dict:
    """The fields that were given on the command line, by name.

    Raises:
      ValueError: naming the flag; lengths that are no integers, or given twice.
    """
    given = {name: flags.FLAGS[name].value for name in _HELP}
    given = {name: value for name, value in given.items() if value is not None}
    if "lengths" in given and "multiples" in given:
        raise ValueError(
            "--lengths and --multiples both say at which lengths to evaluate; give one "
            f"of them, got {given['lengths']} and {given['multiples']}"
        )
    for name in ("lengths", "multiples"):
        if name in given:
            given[name] = _integers(name, given[name])
    if "multiples" in given:
        given["lengths"] = ()
    if "scaling" in given:
        given["scaling"] = tuple(x for text in given["scaling"] for x in split(text))
    return given


def _integers(name: str, texts: list[str]) -> tuple[int, ...]:
    if texts and all(text.strip().lstrip("-").isdigit() for text in texts):
        return tuple(map(int, texts))
    got = ",".join(texts)
    raise ValueError(
        f"--{name} must be one or more integers with commas between, got {got!r}"
    )
