"""Stopping a run when it is asked to, between two steps, in all processes at once."""

import collections
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Calls from a process's vote to its count: the devices have passed it by then, and
# nobody waits for them.
_LAG = 2


class StopSignal:
    """Turns SIGTERM and the first Ctrl-C into a question that the loop asks.

    Several processes have to stop after the same update, whichever of them was
    signalled. So all vote at every call, by a maximum over the devices of the mesh, and
    act on what the votes were two calls ago. (jax has a service for this, but its
    count of steps has to rise, which it does not from one run to the next, and it
    keeps SIGTERM for itself when nothing is trained any more.)
    """

    def __init__(self, mesh: Mesh):
        """Prepare for a loop.

        Args:
          mesh: of the run; each process has some of its devices.
        """
        self._asked = False
        self._previous = {}
        self._mesh = mesh
        self._votes = collections.deque()
        whole = NamedSharding(mesh, PartitionSpec())
        self._count = jax.jit(jnp.max, out_shardings=whole)

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception):
        self._give_back()

    def _ask(self, number, frame):
        del frame
        self._asked = True
        self._give_back()
        logging.warning("%s: saving, then stopping", signal.Signals(number).name)

    def _give_back(self):
        while self._previous:
            number, handler = self._previous.popitem()
            # None stands for a handler that Python did not install.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def requested(self) -> bool:
        """Whether to stop; to be asked before every update, in all processes."""
        if jax.process_count() == 1:
            return self._asked
        each = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        own = np.full(1, self._asked, np.int32)
        votes = jax.make_array_from_callback((self._mesh.size,), each, lambda _: own)
        self._votes.append(self._count(votes))
        return len(self._votes) > _LAG and bool(self._votes.popleft())
