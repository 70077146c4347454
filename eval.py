"""Evaluate trained runs across context lengths.

    python eval.py --workdir=runs/quickstart
    python eval.py --workdir=runs/enwik8 --lengths=512,1024,8192 --split=test
    python eval.py --workdir=runs/enwik8 --scaling=linear:4,yarn:4+logn
    python eval.py --workdir=runs/big --distributed    in each process

Every field of `EvalConfig` is a flag; what is not given is taken from the config
that was saved with the runs. Prints a table and writes extrapolation.json, .csv, .png
and report.html into the workdir. Rows of other protocols and splits that are there
stay, and those of other scalings where the bytes are the same; remove
extrapolation.json to start afresh. This file only starts things: see
rope_jax/experiment/evaluation.py.
"""

from absl import flags

from rope_jax.experiment import cli, distributed, eval_flags, evaluation, host

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "One run's directory, or one above runs.", required=True
)


def main(argv):
    """Evaluate every run below the workdir."""
    del argv
    distributed.start()
    host.prepare()
    evaluation.evaluate_workdir(_WORKDIR.value, **eval_flags.chosen())


if __name__ == "__main__":
    distributed.define_flags()
    eval_flags.define()
    cli.run(main)
