"""A wait that leaves the core to others: ask, yield, then sleep for short, growing times (TRAPS 3, 4).

The more ranks share a core, the sooner a wait sleeps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

_SPIN_S = 20e-6
YIELD_S = 1e-3
"""Seconds of yielding before the first sleep, divided by the ranks of a core (TRAPS 11)."""
SLEEP_LEAST_S = 20e-6
SLEEP_MOST_S = 1e-3
BODY_SLEEP_S = 100e-6
"""Longest sleep during a transfer: over TCP, each look moves a part."""


class Politeness:
    __slots__ = ("_yield_s",)

    def __init__(self, ranks_per_core: float = 1.0) -> None:
        self._yield_s = YIELD_S / max(1.0, ranks_per_core)

    def until(self, ready: Callable[[], Any], most_s: float = SLEEP_MOST_S) -> Any:
        """Return the first result of `ready` that is not None; sleep at most `most_s` at a time."""
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
