"""Byte-level models of 10M, 100M, 1B and 8B parameters, for accelerators and pods.

    python -m rope_jax.experiment.plan --config=configs/scaling.py:100m-8k \
        --topology=v5e:16x16 --config.mesh.data=4 --config.mesh.fsdp=16 \
        --config.mesh.sequence=4
    python train.py --config=configs/scaling.py:100m --config.data.path=FILE

The argument is SIZE or SIZE-CONTEXT: 10m, 100m, 1b or 8b, and 512, 8k or 128k bytes
(512 by default). Compute is bfloat16, parameters and optimizer float32. An update sees
half a million bytes up to 100m, two million for 1b and eight for 8b. Mesh sizes that
suit a topology are in docs/scaling.md; here everything is on the axis fsdp.

Hardware: see docs/scaling.md for what each needs. None of these has been trained, so
no time and no number is stated.
"""

from rope_jax.experiment.config import (
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    TrainConfig,
)
from rope_jax.nn.config import DecoderConfig

# Layers, model dim, heads, key/value heads, feed-forward width, learning rate, bytes
# of an update.
_SIZES = {
    "10m": (8, 320, 5, 5, 896, 1e-3, 2**19),
    "100m": (14, 768, 12, 12, 2048, 6e-4, 2**19),
    "1b": (20, 2048, 16, 16, 5632, 3e-4, 2**21),
    "8b": (32, 4096, 32, 8, 17_408, 2e-4, 2**23),
}
_CONTEXTS = {"512": 512, "8k": 8192, "128k": 131_072}


def get_config(name: str = "100m") -> Config:
    """The config of a size, and of a context after a dash."""
    size, _, context = name.partition("-")
    context = context or "512"
    if size not in _SIZES or context not in _CONTEXTS:
        raise ValueError(
            f"--config=configs/scaling.py takes SIZE or SIZE-CONTEXT with SIZE one of "
            f"{', '.join(_SIZES)} and CONTEXT one of {', '.join(_CONTEXTS)}; got "
            f"{name!r}"
        )
    layers, dim, heads, kv_heads, width, rate, update = _SIZES[size]
    length = _CONTEXTS[context]
    return Config(
        model=DecoderConfig(
            num_layers=layers,
            model_dim=dim,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim // heads,
            mlp_dim=width,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(source="enwik8", length=length),
        train=TrainConfig(
            steps=20_000,
            batch_size=max(1, update // length),
            learning_rate=rate,
            final_learning_rate=rate / 10,
            warmup_steps=1000,
            checkpoint_every=1000,
            log_every=100,
        ),
        eval=EvalConfig(
            lengths=(length, 2 * length),
            block=128,
            batch_tokens=max(2**18, 2 * length),
        ),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
