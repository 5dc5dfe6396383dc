"""Whether a change leaves runs as they were: the rows of some 200 small virtual jobs over all protocols, before it and after.

    python -m tests.virtual.same before.json       # in the checkout before the change; where that has no such file, by
                                                   # PYTHONPATH=BEFORE python tests/virtual/same.py before.json
    python -m tests.virtual.same after.json before.json

The second says which jobs have other rows, or are refused otherwise, and fails where any do. A minute.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from mpisgd.base.errors import MpisgdError
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests.virtual.jobs import SIZES, TENSORS, config, merged

PROTOCOLS: dict[str, dict[str, Any]] = {
    "hardsync": {"name": "hardsync"},
    "softsync1": {"name": "softsync"},
    "softsync3": {"name": "softsync", "n": 3, "modulation": "inverse_plus_one"},
    "async": {"name": "async"},
    "async_b": {"name": "async", "most_staleness": 2, "warm_up": 3, "ramp": 4},
    "backup": {"name": "backup", "b": 1},
    "backup_abort": {"name": "backup", "b": 2, "abort": True},
    "backup_late": {"name": "backup", "b": 1, "late": "apply"},
    "versioned": {"name": "versioned"},
    "ssp": {"name": "ssp"},
    "downpour": {"name": "downpour"},
    "timeout": {"name": "timeout"},
    "allreduce": {"name": "allreduce"},
    "sandblaster": {"name": "sandblaster"},
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"shards": 2},
    {"shards": 3, "network": {"bandwidth": 1e7}, "virtual": {"ranks_per_node": 2}},
    {"virtual": {"learners": 9}, "compute": {"name": "heavy_tail"}, "evaluator": False},
    {"network": {"bandwidth": 2e6}, "service": {"gradient_s": 1e-3}, "virtual": {"learners": 6}},
    {"ahead": 1},
    {"ahead": 2},
    {"per_layer": True, "shards": 2},
    {"pull_format": "bfloat16"},
    {"sampling": "dealt", "shards": 2},
    {"straggler": {"slowdown": {"1": 3.0}}, "shards": 2},
    {"push_format": "bfloat16", "shards": 2},
    {"compute": {"name": "constant"}, "shards": 2},
]
WITH_TENSORS = (1, 4, 5, 7, 9)
"""Variants that are computed, too: that takes longer."""


def found() -> dict[str, Any]:
    """By job: of each table, how many rows and their hash; or why the job is refused."""
    result: dict[str, Any] = {}
    for (name, protocol), (number, variant) in itertools.product(PROTOCOLS.items(), enumerate(VARIANTS)):
        for what, base in (("sizes", SIZES), ("tensors", TENSORS))[: 1 + (number in WITH_TENSORS)]:
            result[f"{name}/{number}/{what}"] = _rows(base, merged({"protocol": protocol}, variant))
    return result


def _rows(base: dict[str, Any], changes: dict[str, Any]) -> Any:
    if changes["protocol"]["name"] == "sandblaster":
        changes["epochs"] = 10
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        try:
            simulate(config(run, base, **changes))
        except MpisgdError as error:
            return f"{type(error).__name__} {str(error)[:160].replace(directory, '')}"
        tables = {name: Run(run).table(name) for name in ("pushes", "updates", "events", "evaluations")}
        return {name: [len(rows), hashlib.sha1(rows.tobytes()).hexdigest()] for name, rows in tables.items()}


def main(out: str, before: str = "") -> int:
    after = found()
    Path(out).write_text(json.dumps(after, indent=1))
    ran = sum(isinstance(each, dict) for each in after.values())
    print(f"{ran} jobs were run, {len(after) - ran} are refused")
    if not before:
        return 0
    other = [job for job, rows in json.loads(Path(before).read_text()).items() if rows != after.get(job)]
    print(f"{len(other)} differ", *other, sep="\n")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
