"""Every encoding of the table learns, and scores bytes at four times its length."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rope_jax.experiment.config import (
    Config,
    DataConfig,
    EvalConfig,
    TrainConfig,
    resolve,
)
from rope_jax.experiment.measurement import measure
from rope_jax.experiment.optimizer import make_optimizer
from rope_jax.experiment.protocols import plan
from rope_jax.experiment.scoring import ModelApply
from rope_jax.experiment.train_step import init_state, make_train_step
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder
from rope_jax.nn.encodings import ENCODINGS
from rope_jax.nn.rotations import RopeOptions

LENGTH = 16
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 30, np.uint8)
SCALINGS = ("linear", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3")


def config_of(encoding, **options):
    return resolve(
        Config(
            model=DecoderConfig(
                encoding=encoding,
                num_layers=1,
                model_dim=32,
                num_heads=2,
                head_dim=16,
                **options,
            ),
            data=DataConfig(length=LENGTH),
            train=TrainConfig(steps=6, learning_rate=1e-2, warmup_steps=1),
            eval=EvalConfig(
                lengths=(4 * LENGTH,),
                anchors=8,
                block=8,
                bootstrap=20,
                batch_tokens=512,
            ),
        )
    )


@pytest.mark.parametrize("encoding", list(ENCODINGS))
def test_it_trains_and_evaluates_at_four_times_its_length(encoding):
    config = config_of(encoding)
    optimizer = make_optimizer(config.train)

    def build(*, rngs):
        return Decoder(config.model, rngs=rngs)

    state = jax.jit(lambda key: init_state(build, optimizer, key))(jax.random.key(0))
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
    step = make_train_step(graphdef, optimizer, accumulate=1)
    rows = np.stack([TEXT[i : i + LENGTH + 1] for i in range(8)]).astype(np.int32)
    batch = {"inputs": jnp.asarray(rows[:, :-1]), "targets": jnp.asarray(rows[:, 1:])}
    start = jax.device_get(state.params)
    losses = []
    for _ in range(6):
        state, sums = step(state, batch)
        losses.append(float(sums["nats"] / sums["targets"]))
    assert losses[0] == pytest.approx(np.log(256), abs=1e-5)
    assert losses[-1] < losses[0] - 0.5
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), start, state.params)
    still = [
        jax.tree_util.keystr(p) for p, m in jax.tree.leaves_with_path(moved) if not m
    ]
    assert not still, f"no gradient reached {still}"
    (row,) = [
        row
        for row in measure(
            ModelApply(graphdef),
            state.params,
            plan(len(TEXT), config.eval, LENGTH),
            TEXT,
            config.eval,
            train_length=LENGTH,
            max_length=config.model.learned.max_length
            if encoding == "learned"
            else None,
        )
        if row["length"] == 4 * LENGTH
    ]
    if encoding == "learned":
        assert (row["bpc"], row["reason"]) == (None, "the model's positions end at 16")
        return
    assert 0 < row["bpc"] < 8
    assert row["scored_bytes"] == 8 * 8


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings_change_the_model_beyond_its_length(scaling):
    """Same parameters; every scaling changes the logits of a row of 4x the length."""
    options = RopeOptions(scaling=scaling, factor=4.0)
    plain = config_of("rope").model
    scaled = config_of("rope", rope=options).model
    assert scaled.rope.original_length == LENGTH
    model = Decoder(dataclasses.replace(plain, tied_output=True), rngs=nnx.Rngs(0))
    other = Decoder(dataclasses.replace(scaled, tied_output=True), rngs=nnx.Rngs(0))
    text = jnp.asarray(TEXT[None, : 4 * LENGTH].astype(np.int32))
    with jax.disable_jit():
        gap = np.abs(model(text) - other(text)).max(-1)[0]
    assert gap[-1] > 1e-3
    if scaling == "dynamic_ntk":  # the length of the row decides
        short = text[:, :LENGTH]
        np.testing.assert_array_equal(model(short), other(short))
