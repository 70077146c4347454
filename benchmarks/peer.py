"""A peer in a Python of its own: a process that answers lines of JSON."""

import contextlib
import json
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

import jax
import numpy as np


class Peer:
    """A process that reads a line of JSON and writes one, until its input ends.

    Attributes:
      name: of the side, for tables.
    """

    def __init__(self, name: str, command: Sequence[str]):
        self.name = name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def ask(self, **request) -> dict:
        """The answer to a request.

        Raises:
          RuntimeError: the process has ended; with the last line that it said.
        """
        # A process that has ended has said why; that is read below.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            said = self._said.read().strip().splitlines()
            raise RuntimeError(said[-1] if said else "it ended and said nothing")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._said.close()


def save_weights(params: dict, path: pathlib.Path) -> None:
    """Write a model's parameters for a peer: an .npz, each named by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }
    np.savez(path, **arrays)
