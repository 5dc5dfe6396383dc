"""Faults in virtual time: ranks die, hang and are cut off, disks fail, jobs are killed and gone on with (`tests/virtual/storm`).

`python -m tests.faults.virtual --count 20000 --out results/faults` writes virtual.json there. Loops, rules, wires, heartbeat and
records are the real ones, on a virtual MPI. Protocols and numbers of shards take turns; all else is drawn (`draw_any` of
`storm/draw.py`). Replay
proves every run that is DONE.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

from mpisgd.base import durable
from tests.faults.campaign import Found, main
from tests.virtual.storm import aftermath
from tests.virtual.storm.draw import Draw, draw_any

EACH = 100
"""Schedules of one process: ranks that have died keep their memory, for theirs are greenlets that nobody goes on with."""


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    return apart(draw_any(generator, number), directory, number)


def apart(drawn: Draw, directory: Path, number: int) -> Found:
    """One schedule, and all that must be true after it."""
    return _process(number // EACH).submit(weather_of, drawn, directory).result()


@lru_cache(maxsize=1)
def _process(_: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("fork"))


def weather_of(drawn: Draw, directory: Path) -> Found:
    torch.set_num_threads(1)
    with durable.thrown_away():
        seen = aftermath.weather(drawn, directory)
    failures = [f"{failure}\n{drawn!r}" for failure in seen.failures]
    return Found(seen.kinds, seen.totals, failures=failures)


if __name__ == "__main__":
    sys.exit(main("virtual", "Ranks die, hang and are cut off in virtual time.", 20000, execute, sys.argv[1:]))
