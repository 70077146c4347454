"""The extrapolation sweep: nine encodings, three seeds, two byte budgets, two lengths.

    python train.py --config=configs/lab.py:128 --config.data.path=PATH/TO/enwik6 \
        --workdir=runs/lab/128
    python train.py --config=configs/lab.py:256 --config.data.path=PATH/TO/enwik6 \
        --workdir=runs/lab/256

The argument is the training length. At 128 bytes every encoding sees 0.33 MB and
1.31 MB in all; at 256 five of them see 1.31 MB. An update has 2,048 bytes at either
length. Runs of one seed see their bytes in the same order, and every run of both
commands is scored on the same held-out bytes, all of them behind byte 4,096 of the
split (`eval.reach`), at 1 to 16 times its training length. The other protocols, and
the report of both together, are commands of docs/extrapolation.md.

Hardware and time: two cores of an AMD EPYC; a run of 1.31 MB takes two and a half
minutes on one core that is otherwise idle, the whole of both commands about two hours
on two. Reached: see README.md and results/lab.
"""

from rope_jax.experiment.config import (
    Config,
    DataConfig,
    EvalConfig,
    SweepConfig,
    TrainConfig,
)
from rope_jax.nn.config import DecoderConfig

_ENCODINGS = {
    "128": "rope alibi sinusoidal none learned t5 kerple fire fox",
    "256": "rope alibi sinusoidal fire fox",
}
_STEPS = {"128": (160, 640), "256": (640,)}


def get_config(length: str = "128") -> Config:
    """The config for a training length, 128 or 256."""
    if length not in _ENCODINGS:
        raise ValueError(
            "configs/lab.py takes a training length, one of "
            f"{', '.join(_ENCODINGS)}; got {length!r}"
        )
    return Config(
        model=DecoderConfig(num_layers=3, model_dim=96, num_heads=4, head_dim=24),
        data=DataConfig(source="enwik8", length=int(length)),
        train=TrainConfig(
            batch_size=2048 // int(length),
            learning_rate=3e-3,
            final_learning_rate=3e-4,
            warmup_steps=40,
            log_every=20,
            checkpoint_every=160,
        ),
        eval=EvalConfig(
            lengths=(), multiples=(1, 2, 4, 8, 16), anchors=128, reach=4096
        ),
        sweep=SweepConfig(
            encodings=tuple(_ENCODINGS[length].split()),
            seeds=(0, 1, 2),
            steps=_STEPS[length],
        ),
    )
