"""Train the runs of a config, then measure how each extrapolates.

    python train.py                               the quickstart
    python train.py --config=configs/enwik8.py:rope,alibi --workdir=runs/enwik8
    python train.py --config.train.steps=200 --config.sweep.encodings=rope,none
    python train.py --distributed                 in each process: docs/multiprocess.md

This file only starts things: see rope_jax/experiment/sweep.py.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from rope_jax.experiment import cli, distributed, host, sweep

_QUICKSTART = pathlib.Path(__file__).parent / "configs" / "quickstart.py"

distributed.define_flags()
_CONFIG = cli.define_config(str(_QUICKSTART))
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where runs are written; by default runs/NAME of the config."
)


def main(argv):
    """Train and evaluate."""
    del argv
    distributed.start()
    flag = flags.FLAGS["config"]
    name = pathlib.Path(config_flags.get_config_filename(flag)).stem
    config = sweep.select(_CONFIG.value, config_flags.get_override_values(flag))
    rows = config.train.batch_size // max(1, config.train.accumulate)
    host.prepare(rows, config.mesh)
    sweep.run(config, _WORKDIR.value or f"runs/{name}")


if __name__ == "__main__":
    cli.run(main)
