"""A model through its cache, in the form that `scoring.score` runs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from rope_jax.experiment.scoring import Outputs
from rope_jax.nn import decoding


@dataclass(frozen=True)
class CachedApply:
    """`scoring.ModelApply` through a cache: a row's beginning, then the rest over it.

    Attributes:
      graphdef: of the model.
      after: tokens at the end of a row that come in the second call.
    """

    graphdef: nnx.GraphDef
    after: int

    def __call__(self, params, inputs: jax.Array, *, last: int) -> Outputs:
        """What gives the logits after the last tokens of inputs `[B, W]`."""
        model = nnx.merge(self.graphdef, params)
        rows, length = inputs.shape
        cache = decoding.init_cache(model, rows, length)
        border = max(0, length - self.after)
        hidden = []
        for part in (inputs[:, :border], inputs[:, border:]):
            if part.shape[1]:
                found, cache = decoding.extend_hidden(model, part, cache)
                hidden.append(found)
        return Outputs(jnp.concatenate(hidden, axis=1)[:, -last:], model.logits)
