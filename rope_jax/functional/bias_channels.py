"""A bias that is linear in the distance, as channels of a query and of a key.

The dot product of both is ratio * (row - column) for ages `row` of the query and
`column` of the key, counted back from one newest position. An age is three digits in
base 256 and a ratio three terms of 8 bits, so that each number has 8 significant bits,
exact in bfloat16, float16 and TF32, and each product is exact in float32.

Letters: T query time, S key time, N heads.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rope_jax.functional.distance import to_rank

MAX_DISTANCE = 2**24 - 1
EXTRA_CHANNELS = 16
_TERMS = 3
# Units that keep both factors of each product within the range of float16.
_DIGIT_UNITS = (256.0, 1.0, 1 / 256)
_RATIO_UNIT = 256.0
_ROW_UNIT = 2.0**15


def query_channels(ratio: jax.Array, age: jax.Array) -> jax.Array:
    """Channels `[..., T, N, 16]` of queries of `age` `[..., T]`; `ratio` is `[N]`."""
    ratio = to_rank(ratio, age.ndim + 1)
    row = ratio * age[..., None].astype(jnp.float32)
    channels = []
    for row_term, ratio_term in zip(_terms(row), _terms(ratio), strict=True):
        digit_factor = jnp.broadcast_to(-_RATIO_UNIT * ratio_term, row.shape)
        # A term of the row stands beside the digits that it cancels, so that a running
        # sum is small again before the next, finer, terms come.
        channels += [row_term / _ROW_UNIT, *[digit_factor] * len(_DIGIT_UNITS)]
    return _stack(channels)


def key_channels(age: jax.Array) -> jax.Array:
    """Channels `[..., S, 16]` of keys of `age` `[..., S]`."""
    digits = (age >> 16, (age >> 8) & 255, age & 255)
    digits = [
        digit.astype(jnp.float32) * unit
        for digit, unit in zip(digits, _DIGIT_UNITS, strict=True)
    ]
    return _stack([jnp.full(age.shape, _ROW_UNIT, jnp.float32), *digits] * _TERMS)


def _terms(x: jax.Array) -> list[jax.Array]:
    """Split float32 into terms of 8 significant bits that add up to it exactly."""
    terms = []
    for _ in range(_TERMS):
        # Not a round trip through bfloat16, which a compiler may leave out.
        terms.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - terms[-1]
    return terms


def _stack(channels: list[jax.Array]) -> jax.Array:
    zeros = [jnp.zeros_like(channels[0])] * (EXTRA_CHANNELS - len(channels))
    return jnp.stack(channels + zeros, axis=-1)
