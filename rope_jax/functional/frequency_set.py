"""The frequency set: what every frequency builder returns and every rotation takes.

A rotary encoding turns pair i of the channels by `position * inv_freq[i]` radians.
Where the frequencies are known on the host they stay float64 there, so that the phase
of an integer position can be formed exactly; where they are learned or traced they are
ordinary JAX arrays.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

# The key of config.json that several formulas and their messages name.
ORIGINAL = "original_max_position_embeddings"


def check_count(name: str, value: int, *, at_least: int = 1) -> int:
    """Return `value` as an int, or raise naming it unless it is a large enough one."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return int(value)


def check_width(name: str, width: int, *, multiple: int = 2) -> int:
    """Return `width` as an int, or raise naming it unless a multiple of `multiple`."""
    if width != int(width) or width <= 0 or int(width) % multiple:
        kind = "even" if multiple == 2 else f"a multiple of {multiple}"
        raise ValueError(f"{name} must be positive and {kind}, got {width}")
    return int(width)


def check_number(
    name: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf
) -> float:
    """Return `value` as a float, or raise naming it and its bound."""
    number = float(value)
    if not math.isfinite(number) or number <= above or number < at_least:
        bound = f">= {at_least:g}" if at_least > above else f"> {above:g}"
        if bound == "> -inf":
            bound = "finite"
        raise ValueError(f"{name} must be {bound}, got {value}")
    return number


def ladder(dim: int, theta: float) -> np.ndarray:
    """Return `theta ** (-2i / dim)` for i < dim/2 in float64, after checking both."""
    dim = check_width("dim", dim)
    theta = check_number("theta", theta, above=0.0)
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _host_or_leaf(value: Any) -> np.ndarray | jax.Array:
    """Keep a JAX array; turn anything else into a read-only float64 host array."""
    if isinstance(value, jax.Array):
        return value
    array = np.array(value, dtype=np.float64)
    array.setflags(write=False)
    return array


def _check(inv_freq: np.ndarray | jax.Array, attention_factor: Any) -> None:
    if inv_freq.ndim not in (1, 2, 3) or inv_freq.size == 0:
        raise ValueError(
            "inv_freq must be [R], [N, R] or [axes, N, R] with R >= 1, got shape "
            f"{inv_freq.shape}"
        )
    if isinstance(inv_freq, np.ndarray) and not np.isfinite(inv_freq).all():
        raise ValueError(f"inv_freq must be finite, got {inv_freq}")
    if isinstance(attention_factor, jax.Array):
        if attention_factor.ndim:
            raise ValueError(
                f"attention_factor must be a scalar, got shape {attention_factor.shape}"
            )
    else:
        check_number("attention_factor", attention_factor, above=0.0)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Frequencies:
    r"""Inverse frequencies of a rotary encoding, and its attention factor.

    The rotation of position p turns pair i by `p * inv_freq[i]` radians and
    multiplies it by `attention_factor`, so that scores carry the factor squared.

    As a pytree: host numbers (a NumPy array or a list, a Python float) are static data
    of the node. They pass through `jax.jit` as float64, and the compiled function is
    reused for any equal set. A `jax.Array` is a leaf: it can be learned, traced, mapped
    and sharded. Sets made of host numbers alone are hashable and compare by value.

    Attributes:
      inv_freq: [R], or [N, R] for one ladder per head, radians per position; or
        [axes, N, R], radians per step of each axis (see `mixed`). A read-only
        float64 NumPy array, or a `jax.Array`.
      attention_factor: the factor on cosine and sine, a Python float or a scalar
        `jax.Array`. Greater than 0.

    Raises:
      ValueError: when `inv_freq` is empty, not finite or of another rank, or when
        `attention_factor` is not a positive scalar.

    >>> frequencies = Frequencies([1.0, 0.01])
    >>> frequencies.inv_freq.dtype, frequencies.rotary_dim
    (dtype('float64'), 4)
    >>> jax.tree.leaves(frequencies)
    []
    """

    inv_freq: np.ndarray | jax.Array
    attention_factor: float | jax.Array = 1.0

    def __init__(self, inv_freq: Any, attention_factor: float | jax.Array = 1.0):
        inv_freq = _host_or_leaf(inv_freq)
        _check(inv_freq, attention_factor)
        if not isinstance(attention_factor, jax.Array):
            attention_factor = float(attention_factor)
        self._set(
            inv_freq,
            attention_factor,
            (isinstance(inv_freq, jax.Array), isinstance(attention_factor, jax.Array)),
        )

    def _set(self, inv_freq: Any, attention_factor: Any, leaves: tuple) -> None:
        object.__setattr__(self, "inv_freq", inv_freq)
        object.__setattr__(self, "attention_factor", attention_factor)
        # Which fields are leaves is fixed at construction: after `jax.device_get` a
        # learned ladder is a NumPy array, and the tree must keep its structure.
        object.__setattr__(self, "_leaves", leaves)

    @property
    def rotary_dim(self) -> int:
        """Number of channels that turn, 2R."""
        return 2 * self.inv_freq.shape[-1]

    def _static(self) -> tuple:
        inv_leaf, factor_leaf = self._leaves
        host = self.inv_freq
        return (
            None if inv_leaf else (host.shape, host.tobytes()),
            None if factor_leaf else self.attention_factor,
        )

    def tree_flatten_with_keys(self) -> tuple:
        """Give JAX the array fields as leaves and the host fields as static data."""
        fields = ("inv_freq", "attention_factor")
        children = tuple(
            (jax.tree_util.GetAttrKey(name), getattr(self, name))
            for name, leaf in zip(fields, self._leaves, strict=True)
            if leaf
        )
        return children, self._static()

    @classmethod
    def tree_unflatten(cls, static: tuple, children: tuple) -> "Frequencies":
        """Rebuild a set from `tree_flatten_with_keys`, without checks."""
        # JAX unflattens with placeholders of any type, so nothing is checked here.
        children = iter(children)
        host, factor = static
        if host is None:
            inv_freq = next(children)
        else:
            inv_freq = np.frombuffer(host[1], dtype=np.float64).reshape(host[0])
        attention_factor = next(children) if factor is None else factor
        frequencies = object.__new__(cls)
        frequencies._set(inv_freq, attention_factor, (host is None, factor is None))
        return frequencies

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frequencies):
            return NotImplemented
        if any(self._leaves) or any(other._leaves):
            return self is other
        return self._static() == other._static()

    def __hash__(self) -> int:
        return id(self) if any(self._leaves) else hash(self._static())
