"""What every attention layer has: the way to heads and back, and the norms there."""

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.nn import sharding
from rope_jax.nn.products import widening


class Projections(nnx.Module):
    """Queries, keys and values of a layer's input, and the projection of its output."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        heads, width = config.num_heads, config.head_dim
        kv_heads = config.num_kv_heads or heads
        dtype, dim = jnp.dtype(config.dtype), config.model_dim

        def project(out_heads):
            return nnx.LinearGeneral(
                dim,
                (out_heads, width),
                use_bias=False,
                dtype=dtype,
                kernel_init=nnx.initializers.normal(dim**-0.5),
                dot_general=widening,
                rngs=rngs,
            )

        self.query, self.key, self.value = map(project, (heads, kv_heads, kv_heads))
        self.out = nnx.LinearGeneral(
            (heads, width),
            dim,
            axis=(-2, -1),
            use_bias=False,
            dtype=dtype,
            kernel_init=residual_init(heads * width, config.num_layers),
            rngs=rngs,
        )
        norm = (lambda: rms_norm(width, dtype, rngs)) if config.qk_norm else _nothing
        self.query_norm, self.key_norm = norm(), norm()

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[B, T, N, H]`, keys and values `[B, T, K, H]` of `x` `[B, T, D]`."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = map(sharding.heads, (query, key, value))
        return query, key, value


def residual_init(fan_in: int, num_layers: int):
    """Keep the residual stream's variance independent of depth (GPT-2)."""
    return nnx.initializers.normal((2 * num_layers * fan_in) ** -0.5)


def rms_norm(dim: int, dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """The norm of every place: RMSNorm with a trained scale."""
    return nnx.RMSNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs)


def _nothing() -> None:
    return None
