"""The real run: byte-level enwik8 at a training length of 512, about 10 M parameters.

    python train.py --config=configs/enwik8.py:rope,alibi --workdir=runs/enwik8

The argument lists the encodings. enwik8 is downloaded, checked and prepared through
TensorFlow Datasets on first use; `--config.data.path=FILE` takes a local enwik8,
enwik8.zip or any byte file instead. One update sees 64 * 512 bytes and 10,000
updates see 328 MB, 3.6 epochs of the 90 MB.

Hardware: one accelerator with bfloat16. This config has not been trained to its end
yet, so it states no time and no number; the README's table is from configs/lab.py.
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
            num_layers=8,
            model_dim=320,
            num_heads=5,
            head_dim=64,
            dropout=0.1,
            dtype="bfloat16",
        ),
        data=DataConfig(source="enwik8", length=512),
        train=TrainConfig(
            steps=10_000,
            batch_size=64,
            learning_rate=1e-3,
            final_learning_rate=1e-4,
            warmup_steps=500,
            checkpoint_every=1000,
            log_every=100,
        ),
        eval=EvalConfig(
            lengths=(512, 1024, 2048, 4096, 8192),
            anchors=512,
            block=128,
            batch_tokens=65_536,
        ),
        sweep=SweepConfig(encodings=tuple(encodings.split(","))),
    )
