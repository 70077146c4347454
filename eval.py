"""Evaluate trained runs across context lengths.

    python eval.py --workdir=runs/quickstart
    python eval.py --workdir=runs/enwik8 --lengths=512,1024,8192 --split=test
    python eval.py --workdir=runs/enwik8 --scaling=linear:4,yarn:4+logn

Every field of `EvalConfig` is a flag; what is not given is taken from the config
that was saved with the runs. Prints a table and writes extrapolation.json, .csv, .png
and report.html into the workdir. Rows of other protocols, splits and scalings that are
there stay; remove extrapolation.json to start afresh. This file only starts things:
see rope_jax/experiment/evaluation.py.
"""

import dataclasses

from absl import flags

from rope_jax.experiment import cli, evaluation
from rope_jax.experiment.config import EvalConfig, split

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "One run's directory, or one above runs.", required=True
)
_HELP = {
    "lengths": "Context lengths in bytes, as 128,256,512; of a task in its units.",
    "multiples": "Instead of lengths: multiples of each run's training length.",
    "protocol": f"How bytes are scored: {', '.join(evaluation.PROTOCOLS)}; or task.",
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


def _define_flags() -> None:
    define = {int: flags.DEFINE_integer, str: flags.DEFINE_string}
    for field in dataclasses.fields(EvalConfig):
        kind = define.get(field.type, flags.DEFINE_list)
        if field.name == "scaling":  # its items hold commas, so it may be given again
            kind = flags.DEFINE_multi_string
        kind(field.name, None, _HELP[field.name])


def _changes() -> dict:
    changes = {name: flags.FLAGS[name].value for name in _HELP}
    changes = {name: value for name, value in changes.items() if value is not None}
    if "lengths" in changes and "multiples" in changes:
        raise ValueError(
            "--lengths and --multiples both say at which lengths to evaluate; give one "
            f"of them, got {changes['lengths']} and {changes['multiples']}"
        )
    for name in ("lengths", "multiples"):
        if name in changes:
            changes[name] = _integers(name, changes[name])
    if "multiples" in changes:
        changes["lengths"] = ()
    if "scaling" in changes:
        texts = changes["scaling"]
        changes["scaling"] = tuple(item for text in texts for item in split(text))
    return changes


def _integers(name: str, texts: list[str]) -> tuple[int, ...]:
    if texts and all(text.strip().lstrip("-").isdigit() for text in texts):
        return tuple(map(int, texts))
    got = ",".join(texts)
    raise ValueError(
        f"--{name} must be one or more integers with commas between, got {got!r}"
    )


def main(argv):
    """Evaluate every run below the workdir."""
    del argv
    evaluation.evaluate_workdir(_WORKDIR.value, **_changes())


if __name__ == "__main__":
    _define_flags()
    cli.run(main)
