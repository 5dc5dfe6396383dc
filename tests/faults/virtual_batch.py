"""The same of batch optimisation as `virtual.py`: shards 1 to 4, learners 1 to 12; each portion is counted exactly once.

`python -m tests.faults.virtual_batch --count 5000 --out results/faults` writes virtual_batch.json there. Jobs are small, 1 to 3
iterations of 1 to 10 portions, for there are many; larger ones are in `tests/virtual/test_storms.py`. Each eighth has a log, and is
replayed; of the others what the coordinator says of portions is kept in memory.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.faults.campaign import Found, main
from tests.faults.virtual import apart
from tests.virtual.storm.draw import draw_batch


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    """One schedule, and all that must be true after it."""
    return apart(draw_batch(generator, number, small=True), directory, number)


if __name__ == "__main__":
    sys.exit(main("virtual_batch", "Ranks of a batch optimisation die, hang and are cut off.", 5000, execute, sys.argv[1:]))
