"""`python -m tests.bench clipping`: seconds of an update of hardsync whose shards agree on a norm, over those of one that does not.

Where shards agree (`job/roles/agreement.py`), an update takes one more round trip of small messages, and one more pass over the
slice for its norm, which clipping each slice by itself takes, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpisgd.bench.parts import runs
from mpisgd.bench.parts.cases import CASES, LEARNERS, config_of
from mpisgd.bench.parts.measured import OFF, in_turn, over_off, show, spread
from mpisgd.config import replace

SHARDS = (2, 4)
WAYS: Mapping[str, Mapping[str, Any]] = {
    OFF: {},
    "slice": {"clip_average": 1.0, "clip_average_of": "slice"},
    "model": {"clip_average": 1.0},
}


def measure(repetitions: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of an update, of a small and of a large model. Raises ConfigError where a launch fails."""
    for key in ("cnn-16", "mlp-16"):
        case = CASES[key]
        for shards in SHARDS:
            found: dict[str, list[float]] = {name: [] for name in WAYS}
            for name in in_turn(list(WAYS), repetitions):
                with tempfile.TemporaryDirectory() as directory:
                    config = replace(config_of(Path(directory), case), shards=shards, **WAYS[name])
                    rate = runs.rate_of(runs.launched(config, shards + LEARNERS), case)
                found[name].append(1e3 * LEARNERS * case.mu / rate)
            ms = {name: spread(values) for name, values in found.items()}
            yield {"case": case.name, "shards": shards, "learners": LEARNERS, "update_ms": ms, "over_off": over_off(found)}


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [
        f"{row['case']}, S = {row['shards']}: an update takes {show(row['update_ms'][OFF], 1)} ms; clipped by slices"
        f" {show(row['over_off']['slice'])}, as a whole {show(row['over_off']['model'])}"
        for row in rows
    ]
