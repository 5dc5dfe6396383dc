"""A wait that leaves the core to others: it asks, yields the core, then sleeps for short, growing times (TRAPS 3, 4).

The more ranks share a core the sooner a wait sleeps: each time that one of thirty waiting ranks comes to a core only to see that
nothing has come yet, it costs those that compute a change of context and their caches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

_SPIN_S = 20e-6
YIELD_S = 1e-3
"""Seconds of a wait in which the core is yielded before the first sleep, divided by the ranks that share the core (31 ranks on two
cores: softsync 6 % slower under Open MPI, 14 % under MPICH, if all yield for so long)."""
SLEEP_LEAST_S = 20e-6
SLEEP_MOST_S = 1e-3
BODY_SLEEP_S = 100e-6
"""The longest sleep while a transfer is under way: where it goes in parts, each is moved by whoever looks (TCP)."""


class Politeness:
    """The way in which one rank waits.

    Args:
        ranks_per_core: how many share its core.
    """

    __slots__ = ("_yield_s",)

    def __init__(self, ranks_per_core: float = 1.0) -> None:
        self._yield_s = YIELD_S / max(1.0, ranks_per_core)

    def until(self, ready: Callable[[], Any], most_s: float = SLEEP_MOST_S) -> Any:
        """Call `ready` until it gives something other than None, and return that; no sleep is longer than `most_s`."""
        result = ready()
        if result is not None:
            return result
        start_s, sleep_s = time.perf_counter(), SLEEP_LEAST_S
        while True:
            result = ready()
            if result is not None:
                return result
            waited_s = time.perf_counter() - start_s
            if waited_s > self._yield_s:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 1.5, most_s)
            elif waited_s > _SPIN_S:
                os.sched_yield()
