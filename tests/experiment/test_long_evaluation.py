"""What evaluating long windows needs besides the model, as the compiler says."""

import jax
import jax.numpy as jnp
import pytest

from rope_jax.experiment.checkpoint import abstract_model
from rope_jax.experiment.config import Config, resolve
from rope_jax.experiment.loss import token_nats
from rope_jax.experiment.scoring import ModelApply, window_values


def temporary_mib(encoding, length):
    """Of one window with all of its bytes scored, by a layer with 8 heads."""
    config = Config()
    sizes = {"num_layers": 1, "model_dim": 256, "num_heads": 8, "head_dim": 32}
    for name, value in (sizes | {"encoding": encoding}).items():
        setattr(config.model, name, value)
    graphdef, params = abstract_model(resolve(config).model)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.uint8)
    arguments = ModelApply(graphdef), params, tokens, tokens, None
    options = {"mesh": None, "statistic": token_nats}
    compiled = window_values.lower(*arguments, **options).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def test_an_encoding_that_needs_whole_rows_goes_by_chunks_of_queries():
    """All the logits of 32,768 bytes at once would be 32 GiB."""
    by_length = {n: temporary_mib("cope", n) for n in (16384, 32768)}
    assert by_length[32768] <= 1024
    assert by_length[32768] <= 2.1 * by_length[16384]


@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "kerple", "fire"])
def test_a09_t16_memory_is_linear_and_holds_no_bias_and_no_logits(encoding):
    """Dense, 16,384 bytes would need 8 GiB for the bias, and 32,768 four times that."""
    by_length = {n: temporary_mib(encoding, n) for n in (16384, 32768, 65536)}
    assert by_length[32768] <= 512
    assert by_length[65536] <= 4.1 * by_length[16384]
