"""Stopping a run when it is asked to, between two steps."""

import signal
import threading

import jax
from absl import logging
from jax.experimental import multihost_utils


class StopSignal:
    """Turns SIGTERM and the first Ctrl-C into a question that the loop asks.

    With several processes all have to stop at the same step, which jax's
    distributed service agrees upon; it listens for SIGTERM itself.
    """

    def __init__(self):
        self._asked = False
        self._previous = {}

    def __enter__(self):
        main = threading.current_thread() is threading.main_thread()
        if main and jax.process_count() == 1:
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

    def requested(self, step: int) -> bool:
        """Whether to stop after `step` updates."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked
