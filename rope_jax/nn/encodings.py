"""The one table of positional encodings: name -> class with hooks.

The decoder, the evaluation protocols and the flags know encodings by these names
alone. A new one is an entry here, a class with the hooks it needs (see
`rope_jax.nn.encoding`), and a pure function in `rope_jax.functional`.
"""

import jax.numpy as jnp
from flax import nnx

from rope_jax.nn import absolute, biases, contextual, rotations
from rope_jax.nn.encoding import Encoding

ENCODINGS: dict[str, type[Encoding]] = {
    "none": Encoding,
    "integer": absolute.Integer,
    "binary": absolute.Binary,
    "sinusoidal": absolute.Sinusoidal,
    "learned": absolute.Learned,
    "rope": rotations.Rope,
    "prope": rotations.Prope,
    "xpos": rotations.Xpos,
    "random_rope": rotations.RandomRope,
    "pope": rotations.Pope,
    "alibi": biases.Alibi,
    "t5": biases.T5,
    "kerple": biases.Kerple,
    "fire": biases.Fire,
    "sandwich": biases.Sandwich,
    "shaw": contextual.Shaw,
    "fox": contextual.Fox,
    "cable": contextual.Cable,
    "cope": contextual.Cope,
    "dape": contextual.Dape,
}


def make_encoding(config, *, rngs: nnx.Rngs) -> Encoding:
    """Build the encoding that `config.encoding` names.

    Raises:
      ValueError: an option does not fit; the message says where it is set.
    """
    kind = ENCODINGS[config.encoding]
    try:
        encoding = kind(config, rngs=rngs)
        if encoding.bias is not None:  # some options are looked at only here
            encoding.bias(jnp.arange(1), jnp.arange(1))
        return encoding
    except ValueError as error:
        if "model." in str(error):
            raise
        where = ", ".join(f"model.{name}" for name in kind.options)
        message = f"encoding {config.encoding!r} ({where}): {error}"
        raise ValueError(message) from error
