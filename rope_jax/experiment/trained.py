"""One trained run, by its directory: what sampling, scoring and compression load."""

import os
import pathlib
from typing import NamedTuple

from flax import nnx

from rope_jax.experiment import checkpoint, run_directory
from rope_jax.experiment.config import Config
from rope_jax.nn.decoder import Decoder


class Trained(NamedTuple):
    """A checkpoint of a run, on one device."""

    run_dir: pathlib.Path
    config: Config
    graphdef: nnx.GraphDef
    params: dict
    step: int

    @property
    def model(self) -> Decoder:
        """The model itself."""
        return nnx.merge(self.graphdef, self.params)

    def refused(self, flag: str, error: ValueError) -> ValueError:
        """An error of the model's cache, with the flag and the run that led to it."""
        encoding = self.config.model.encoding
        return ValueError(f"{flag}: {error} (encoding {encoding!r} of {self.run_dir})")


def load(workdir: str | os.PathLike, step: int | None = None) -> Trained:
    """A run's checkpoint.

    Args:
      workdir: a run, or a directory above exactly one.
      step: of the checkpoint; None is the newest.

    Raises:
      FileNotFoundError: no run or no complete checkpoint is there.
      ValueError: there are several runs, no such step, or its tokens are not bytes.
      RunError: the files cannot be read.
    """
    trained = Trained(
        run_dir := run_directory.find_run(workdir),
        *checkpoint.load_params(run_dir, step),
    )
    size = trained.config.model.vocab_size
    if size != 256:
        raise ValueError(
            f"--workdir {run_dir} has model.vocab_size {size}; text needs the 256 "
            "values of a byte"
        )
    return trained
