"""Exact phases of integer positions: a numerically controlled oscillator.

A position p turns pair i by p * f_i radians, and only the fraction of a turn matters.
With F_i = round(f_i / (2 pi) * 2**64), that fraction is p * F_i modulo 2**64, in units
of 2**-64 turn: integer arithmetic, which wraps around exactly where a turn does. The
top 32 bits of it are the phase here. One turn is 2**32, so phases add and subtract
modulo 2**32 as they should, and only the last step, to radians or to cosine and sine,
rounds to float32.
"""

import jax
import jax.numpy as jnp
import numpy as np

# round(2**256 / (2 pi)): far more digits than the 2**-64 turn that is kept needs, also
# for frequencies of many turns per position.
_TURNS_PER_RADIAN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E4107F9458EAF7AEF158
_TURNS_BITS = 256
_LIMIT = 2.0**64
_LARGEST = 2**40


def turn_words(inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return inv_freq / (2 pi), modulo one turn, as two uint32 words of a fraction.

    Args:
      inv_freq: float64 host array of any shape, radians per position.

    Returns:
      (high, low), uint32 arrays of the same shape: high / 2**32 + low / 2**64 turns.

    Raises:
      ValueError: when an entry is not finite or its magnitude reaches 2**64.
    """
    if not (np.abs(inv_freq) < _LIMIT).all():
        raise ValueError(
            f"inv_freq must be finite and below 2**64 in magnitude, got {inv_freq}"
        )
    fractions = []
    for value in inv_freq.ravel().tolist():
        numerator, denominator = value.as_integer_ratio()
        scaled = numerator * _TURNS_PER_RADIAN
        divisor = denominator << (_TURNS_BITS - 64)
        # Floor division of twice the ratio plus one half rounds to nearest.
        fractions.append((2 * scaled + divisor) // (2 * divisor) % 2**64)
    words = np.array(fractions, dtype=np.uint64).reshape(inv_freq.shape)
    high = (words >> np.uint64(32)).astype(np.uint32)
    return high, words.astype(np.uint32)


def _position_words(
    positions: np.ndarray | jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Return positions modulo 2**32, and what is above, as two's complement words.

    The upper word is None where every value of the type lies within 0 .. 2**32 - 1.
    """
    bits = positions.dtype.itemsize * 8
    signed = jnp.issubdtype(positions.dtype, jnp.signedinteger)
    low = jnp.asarray(positions.astype(np.uint32))
    if bits == 64:
        # NumPy integers, or JAX ones in x64 mode. F is rounded at 2**-65 turn.
        if isinstance(positions, np.ndarray) and positions.size:
            # Apart, and not by magnitude: the lowest int64 has none.
            least, most = int(positions.min()), int(positions.max())
            if least < -_LARGEST or most > _LARGEST:
                raise ValueError(
                    f"positions must be within 2**40 of 0, got {least} to {most}"
                )
        return low, jnp.asarray((positions >> 32).astype(np.uint32))
    if not signed:
        return low, None
    return low, jnp.asarray(-(positions < 0).astype(np.int32)).astype(jnp.uint32)


def _multiply_high(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the upper 32 bits of the 64-bit product of two uint32 arrays."""
    half = jnp.uint32(0xFFFF)
    left_high, left_low = left >> 16, left & half
    right_high, right_low = right >> 16, right & half
    carry = left_high * right_low + ((left_low * right_low) >> 16)
    middle = left_low * right_high + (carry & half)
    return left_high * right_high + (carry >> 16) + (middle >> 16)


def phase(positions: np.ndarray | jax.Array, inv_freq: np.ndarray) -> jax.Array:
    """Return the fraction of a turn of positions * inv_freq in units of 2**-32.

    Args:
      positions: integer array of any integer type.
      inv_freq: float64 host array, radians per position, of the same rank as
        `positions`; the two are broadcast.

    Returns:
      uint32 array, phases modulo one turn of 2**32.
    """
    return _multiply(*_position_words(positions), *turn_words(inv_freq))


@jax.jit
def _multiply(
    position: jax.Array, upper: jax.Array | None, high: jax.Array, low: jax.Array
) -> jax.Array:
    """Return the top word of a position times a fraction of two words."""
    total = position * high + _multiply_high(position, low)
    if upper is None:
        return total
    # A negative position is its low word minus 2**32: without this term it would be off
    # by `low` units of 2**-32 turn, whole radians.
    return total + upper * low


def radians(phases: jax.Array) -> jax.Array:
    """Return uint32 phases as float32 radians in [-pi, pi]."""
    signed = jax.lax.bitcast_convert_type(phases, jnp.int32)
    return signed.astype(jnp.float32) * jnp.float32(2 * np.pi / 2**32)


def cos_sin(phases: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the float32 cosines and sines of uint32 phases, within 1.1e-7.

    The nearest quarter turn is taken off in integers, so that nothing is lost, and the
    polynomials need to hold on [-pi/4, pi/4] only. They cost a fraction of general
    cosines and sines, which have to reduce an angle of any size.

    Source: the coefficients are those of sinf.c in Moshier's Cephes library 2.2.
    """
    shifted = phases + jnp.uint32(2**29)
    quarter = shifted >> 30
    rest = (shifted & jnp.uint32(2**30 - 1)).astype(jnp.int32) - 2**29
    x = rest.astype(jnp.float32) * jnp.float32(2 * np.pi / 2**32)
    z = x * x
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cosine = (2.443315711809948e-5 * z - 1.388731625493765e-3) * z
    cosine = (cosine + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    swapped = quarter & 1 == 1
    first = jnp.where(swapped, sine, cosine)
    second = jnp.where(swapped, cosine, sine)
    # The signs of the cosine are + - - + over the quarters, of the sine + + - -.
    return (
        jnp.where((quarter + 1) & 2 == 2, -first, first),
        jnp.where(quarter & 2 == 2, -second, second),
    )
