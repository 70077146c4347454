"""RoPE in linear attention: the Performer experiment of the RoFormer paper.

    python train.py --config=configs/performer.py:paper --workdir=runs/performer
    python train.py --config=configs/performer.py:cpu:none,rope,sinusoidal \
        --config.data.path=PATH/TO/enwik6 --workdir=runs/performer-cpu

The argument is a setting and, after a colon, the encodings, by default none and rope.
With `--config.model.attention=softmax` the same model is trained with exact attention.

Setting "paper": what the paper's section 4.5 states (12 layers, width 768, 12 heads,
1,024 bytes of context, batches of 128, learning rate 1e-4), and FAVOR+ features as in
the example of the code that it used: 256, redrawn every 1,000 steps. 100,000 steps is
where its curve ends. What the paper leaves open (optimizer, schedule, the layers) is
as elsewhere in this project. It needs accelerators and has not been trained here.

Setting "cpu": 3 layers of width 96 for two CPU cores, at 128 bytes of context, three
seeds. Nothing is redrawn in so short a run.

Neither normalizes queries and keys: nor does the paper, nor the softmax model beside
which the rows are read. `--config.model.qk_norm` bounds their norms, with which the
error of FAVOR+ grows: see benchmarks/favor.py.
"""

from rope_jax.experiment.config import (
    Config,
    DataConfig,
    EvalConfig,
    SweepConfig,
    TrainConfig,
)
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.linear import LinearOptions


def get_config(argument: str = "cpu") -> Config:
    """The config for SETTING or SETTING:ENCODINGS, these with commas between."""
    setting, _, encodings = argument.partition(":")
    settings = {"paper": _paper, "cpu": _cpu}
    if setting not in settings:
        raise ValueError(
            "configs/performer.py takes a setting, one of "
            f"{', '.join(settings)}; got {setting!r}"
        )
    config = settings[setting]()
    config.sweep.encodings = tuple((encodings or "none,rope").split(","))
    return config


def _paper() -> Config:
    return Config(
        model=DecoderConfig(
            num_layers=12,
            model_dim=768,
            num_heads=12,
            head_dim=64,
            mlp="plain",
            dtype="bfloat16",
            attention="linear",
            linear=LinearOptions(num_features=256, redraw_every=1000),
        ),
        data=DataConfig(source="enwik8", length=1024),
        train=TrainConfig(
            steps=100_000,
            batch_size=128,
            learning_rate=1e-4,
            final_learning_rate=1e-4,
            warmup_steps=1000,
            checkpoint_every=5000,
            log_every=100,
        ),
        eval=EvalConfig(
            lengths=(1024, 2048, 4096, 8192, 16384),
            anchors=512,
            block=128,
            batch_tokens=65_536,
        ),
    )


def _cpu() -> Config:
    return Config(
        model=DecoderConfig(
            num_layers=3,
            model_dim=96,
            num_heads=4,
            head_dim=24,
            attention="linear",
        ),
        data=DataConfig(source="enwik8", length=128),
        train=TrainConfig(
            steps=640,
            batch_size=16,
            learning_rate=3e-3,
            final_learning_rate=3e-4,
            warmup_steps=40,
            checkpoint_every=320,
        ),
        # As in configs/lab.py, so that its softmax models are scored on the same bytes.
        eval=EvalConfig(
            lengths=(), multiples=(1, 2, 4, 8, 16), anchors=128, reach=4096
        ),
        sweep=SweepConfig(seeds=(0, 1, 2)),
    )
