"""A model for two CPU cores, at a training length of 128.

    python train.py --config=configs/small.py:rope,alibi,sinusoidal,learned,none \
        --config.data.path=PATH/TO/enwik6 --workdir=runs/enwik6

The argument lists the encodings. enwik6 is the first 1,000,000 bytes of enwik8; any
byte file will do. Without --config.data.path all of enwik8 is downloaded.

Hardware and time: two busy cores of an AMD EPYC, about 8 minutes of training for an
encoding and one of evaluation. Reached on enwik6, in bits per byte at 128 bytes of
context: rope 2.28, alibi 2.34, sinusoidal 2.49, learned 2.59, none 3.29.
"""

from rope_jax.experiment.config import (
    Config,
    DataConfig,
    EvalConfig,
    SweepConfig,
    TrainConfig,
)
from rope_jax.nn.config import DecoderConfig


def get_config(encodings: str = "rope") -> Config:
    """The config for a comma-separated list of encodings."""
    return Config(
        model=DecoderConfig(
            num_layers=3,
            model_dim=128,
            num_heads=4,
            head_dim=32,
        ),
        data=DataConfig(source="enwik8", length=128),
        train=TrainConfig(
            steps=1200,
            batch_size=16,
            learning_rate=2e-3,
            final_learning_rate=2e-4,
            warmup_steps=100,
            checkpoint_every=400,
        ),
        eval=EvalConfig(lengths=(128, 256, 512, 1024, 2048)),
        sweep=SweepConfig(encodings=tuple(encodings.split(","))),
    )
