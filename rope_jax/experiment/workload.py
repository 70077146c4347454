"""What a step has to compute, keep and touch, by arithmetic on the sizes alone.

It needs no compiler, so it also serves machines that none is here for, and it is the
yardstick beside what a compiler says. D is the model dim, N and K the heads of queries
and keys, H their width, F that of the feed-forward layer, V the vocabulary, L the
layers. A multiplication and its addition are two operations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rope_jax.experiment.checkpoint import abstract_model
from rope_jax.experiment.config import Config
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.linear import count_features

_F32 = 4


@dataclass(frozen=True)
class Work:
    """The arithmetic of an update, all chips together.

    Attributes:
      parameters: all of them.
      matrix_parameters: those that every token is multiplied with.
      weight_flops: operations with weights, 6 for each matrix parameter and token: 2
        forward, 4 backward.
      attention_flops: 12 H for each head of queries and pair of tokens of which one
        attends to the other: scores and mixing forward, twice that backward. Linear
        attention: 12 H for each feature and token.
      recomputed_flops: what `model.remat` adds.
    """

    parameters: int
    matrix_parameters: int
    weight_flops: float
    attention_flops: float
    recomputed_flops: float

    @property
    def model_flops(self) -> float:
        """What the update needs, and what MFU counts."""
        return self.weight_flops + self.attention_flops

    @property
    def executed_flops(self) -> float:
        """What is computed for it."""
        return self.model_flops + self.recomputed_flops


def work(config: Config) -> Work:
    """The arithmetic of one update of a run.

    An encoding's own arithmetic (the bias of each pair, say) is left out, as are norms,
    activations, the softmax and the optimizer.

    Args:
      config: a resolved one.

    Example:
      >>> config = Config(model=DecoderConfig(num_layers=1, model_dim=8, num_heads=2,
      ...                                     head_dim=4, mlp_dim=16, vocab_size=32))
      >>> config.data.length, config.train.batch_size = 4, 1
      >>> made = work(config)  # 4 * 8 * 8 + 3 * 8 * 16 + 8 * 32 matrix parameters
      >>> made.matrix_parameters, made.weight_flops, made.attention_flops
      (896, 21504.0, 960.0)
    """
    model, rows, length = config.model, config.train.batch_size, config.data.length
    parameters = _parameters(model)
    matrices = _matrix_parameters(parameters, model)
    weights = 6.0 * matrices * rows * length
    per_head = 12 * model.head_dim * model.num_heads * model.num_layers
    attention = float(per_head * rows * _pairs(model, length))
    head = model.model_dim * model.vocab_size * rows * length  # not in a layer
    again = {
        "none": 0.0,
        "dots": attention / 3,
        "full": (weights - 6 * head + attention) / 3,
    }
    total = sum(math.prod(shape) for shape in parameters.values())
    return Work(total, matrices, weights, attention, again[model.remat])


def memory_traffic(config: Config, mesh_shape: Mapping[str, int]) -> float:
    """Bytes that an update moves between a chip and its memory, at the least.

    Every product with weights reads its operands and writes its result once, attention
    its queries, keys, values and results; each micro-batch does so forward and twice
    backward, once more forward if recomputed. The optimizer reads and writes each
    parameter of the chip and its two moments, and its gradient. Everything else is
    taken to be fused into these.
    """
    model, train = config.model, config.train
    tensor, size = mesh_shape["tensor"], _dtype_bytes(model)
    parameters = _parameters(model)
    local = sum(map(math.prod, parameters.values())) / (mesh_shape["fsdp"] * tensor)
    weights = _matrix_parameters(parameters, model) * size / tensor
    passes = 3 + (model.remat == "full")
    mlp = _mlp_width(model) * (3 if model.mlp == "gated" else 2) / tensor
    kv_heads = model.num_kv_heads or model.num_heads
    heads = (2 * model.num_heads + 2 * kv_heads) * model.head_dim / tensor
    layer = 4 * model.model_dim + mlp + 2 * heads  # heads: of products, of attention
    activations = model.num_layers * layer * size * tokens_per_chip(config, mesh_shape)
    return passes * (train.accumulate * weights + activations) + 8 * _F32 * local


def network_traffic(config: Config, mesh_shape: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a chip sends along each mesh axis in an update, as it should be.

    All of it in the compute type. Each micro-batch gathers the weights over fsdp,
    forward and backward, and scatters their gradients; their parts are summed over
    data, and over sequence. Over tensor, the results of attention and of the
    feed-forward layer are summed, forward and backward, and again if all is recomputed.
    Over sequence, keys and values of whole rows are gathered, forward and backward if
    they are recomputed, and their gradients scattered.
    """
    model, train = config.model, config.train
    size, layers = _dtype_bytes(model), model.num_layers
    fsdp, tensor = mesh_shape["fsdp"], mesh_shape["tensor"]
    part = {axis: (count - 1) / count for axis, count in mesh_shape.items()}
    whole = sum(map(math.prod, _parameters(model).values())) / tensor
    again = model.remat == "full"
    tokens = tokens_per_chip(config, mesh_shape)
    kv_heads = model.num_kv_heads or model.num_heads
    keys = 2 * kv_heads * model.head_dim / tensor * size * layers
    rows = tokens * mesh_shape["sequence"]
    recomputed = model.remat != "none"  # gathers are no products with weights
    summed = 2 * size * train.accumulate * whole / fsdp
    return {
        "data": part["data"] * summed,
        "fsdp": part["fsdp"] * train.accumulate * whole * 3 * size,
        "tensor": part["tensor"]
        * (2 * (4 + 2 * again) * tokens * model.model_dim * size * layers),
        "sequence": part["sequence"] * (summed + (2 + recomputed) * rows * keys),
    }


def saved_activations(config: Config, mesh_shape: Mapping[str, int]) -> float:
    """Bytes that a chip keeps of a micro-batch for the backward pass, about.

    Of each layer its input, and by `model.remat` what was computed from it, apart from
    scores, which fused and blockwise attention never keep; one layer in full; the
    logits and their gradient; and the sum of the gradients, with those of the
    micro-batch.
    """
    model, train = config.model, config.train
    tensor, size = mesh_shape["tensor"], _dtype_bytes(model)
    kv_heads = model.num_kv_heads or model.num_heads
    heads = (model.num_heads + 2 * kv_heads) * model.head_dim / tensor
    inner = _mlp_width(model) * (2 if model.mlp == "gated" else 1) / tensor
    kept = {
        "none": 4 * model.model_dim
        + heads
        + (model.num_heads * model.head_dim + _mlp_width(model)) / tensor
        + inner,
        "dots": 2 * model.model_dim + heads + inner,
        "full": model.model_dim,
    }
    micro = tokens_per_chip(config, mesh_shape) / train.accumulate
    logits = 2 * _F32 * model.vocab_size / tensor
    per_token = size * (model.num_layers * kept[model.remat] + kept["none"]) + logits
    parameters = sum(map(math.prod, _parameters(model).values()))
    local = parameters / (mesh_shape["fsdp"] * tensor)
    return micro * per_token + _F32 * local * (1 + (train.accumulate > 1))


def tokens_per_chip(config: Config, mesh_shape: Mapping[str, int]) -> float:
    """Tokens of an update that one chip computes, of all its micro-batches."""
    parts = math.prod(mesh_shape[axis] for axis in ("data", "fsdp", "sequence"))
    return config.train.batch_size * config.data.length / parts


def _parameters(model: DecoderConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(abstract_model(model)[1])
    return {tuple(str(key.key) for key in path): leaf.shape for path, leaf in flat}


def _matrix_parameters(parameters, model: DecoderConfig) -> int:
    used = ("head",) if not model.tied_output else ("embedding",)
    return sum(
        math.prod(shape)
        for path, shape in parameters.items()
        if path == used or (path[-1] == "kernel" and "encoding" not in path)
    )


def _pairs(model: DecoderConfig, length: int) -> int:
    """Pairs of tokens that attend in a row; features times tokens if linear."""
    if model.attention == "linear":
        return length * count_features(model)
    window = min(model.window or length, length)
    return window * length - window * (window - 1) // 2


def _mlp_width(model: DecoderConfig) -> int:
    shapes = _parameters(model)
    return shapes[("blocks", "mlp", "up", "kernel")][-1]


def _dtype_bytes(model: DecoderConfig) -> int:
    return jnp.dtype(model.dtype).itemsize
