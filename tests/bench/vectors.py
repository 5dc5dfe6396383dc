"""`python -m tests.bench vectors`: how many vectors of the model's size each kind of rank keeps, by way, learners and shards.

Every job is run with a large model and with a small one, and the difference of a rank's peaks is told in slices of the large one's
parameters: a learner's slice is all of them, a shard's is its own. What a learner keeps of a backward pass is not in it:
activations grow with the mini-batch, which is the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpisgd.records.log.reader import Run
from tests.bench import peaks

#: Units of the hidden layers: 44.1 MB of parameters, and next to nothing.
LARGE, SMALL = (2500, 1300), (8, 8)
_SAMPLES, _MU, _EACH = 2048, 4, 12
"""Each learner computes that many mini-batches."""

SOFTSYNC = {"protocol": "softsync"}
#: Name -> (settings, learners, shards).
JOBS: dict[str, tuple[dict[str, Any], int, int]] = {
    **{f"hardsync, lambda = {learners}": ({}, learners, 1) for learners in (2, 4, 8)},
    "hardsync, lambda = 4, S = 2": ({}, 4, 2),
    **{f"softsync, lambda = {learners}": (SOFTSYNC, learners, 1) for learners in (2, 4, 8)},
    "softsync, lambda = 4, S = 2": (SOFTSYNC, 4, 2),
    "softsync, gathered": ({**SOFTSYNC, "way": "gathered"}, 4, 1),
    "softsync, duplex": ({**SOFTSYNC, "ahead": 1}, 4, 1),
    "softsync, prefetch": ({**SOFTSYNC, "ahead": 2}, 4, 1),
    "backup, b = 1": ({"protocol": {"name": "backup", "b": 1}}, 4, 1),
    "hardsync, streamed": ({"way": "streamed"}, 4, 1),
    "hardsync, layerwise": ({"per_layer": True}, 4, 2),
    "hardsync, bfloat16 both ways": ({"push_format": "bfloat16", "pull_format": "bfloat16"}, 4, 1),
    "hardsync, momentum": ({"optimizer": {"name": "sgd", "momentum": 0.9}}, 4, 1),
    "hardsync, Adam": ({"optimizer": {"name": "adam"}}, 4, 1),
    "downpour, n_push = 5": ({"protocol": {"name": "downpour", "n_push": 5, "n_fetch": 5}}, 4, 1),
    "allreduce": ({"protocol": "allreduce"}, 4, 0),
}


def measure() -> Iterator[dict[str, Any]]:
    """Each job's shards and learners: the most that one of them keeps. Raises ConfigError where a job fails."""
    for name, (special, learners, shards) in JOBS.items():
        (large, slices), (small, _) = (_peaks_of(hidden, special, learners, shards) for hidden in (LARGE, SMALL))
        for role, slice_nbytes in slices.items():
            most = {which: max(found[role]) for which, found in (("large", large), ("small", small))}
            yield {
                "job": name,
                "role": role,
                "slice_nbytes": slice_nbytes,
                "large_nbytes": most["large"],
                "small_nbytes": most["small"],
                "slices": (most["large"] - most["small"]) / slice_nbytes,
            }


def _peaks_of(
    hidden: Sequence[int], special: Mapping[str, Any], learners: int, shards: int
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """By role, each rank's bytes beyond those that torch took by itself, and the bytes of its slice."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        config = {
            "model": {"name": "mlp", "hidden": list(hidden)},
            "data": {"name": "synthetic", "samples": _SAMPLES, "test_samples": 10},
            "optimizer": {"name": "sgd", "momentum": 0.0},
            "evaluation": {"every_epochs": 0.0},
            **{"mu": _MU, "epochs": _EACH * learners * _MU / _SAMPLES, "alpha0": 0.001, "threads": 1},
            **{"out": str(out), "log": {"progress": "off"}},
            **({"shards": shards} if shards else {}),
            **special,
        }
        found = peaks.of_job(Path(directory), shards + learners, config)
        told = Run(out).environment
    beyond = [1024 * (each["end"] - each["torch"]) for each in found]
    ranks = {"shard": list(told["shard_ranks"]) if shards else []}
    ranks["learner"] = [rank for rank in range(shards + learners) if rank not in ranks["shard"]]
    slices = {"shard": told["parameter_nbytes"] // max(shards, 1), "learner": told["parameter_nbytes"]}
    by_role = {role: [beyond[rank] for rank in those] for role, those in ranks.items() if those}
    return by_role, {role: slices[role] for role in by_role}


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    lines = [f"{'job':30} {'role':>8} {'slice':>8} {'slices kept':>11} {'besides':>9}"]
    for row in rows:
        slice_mb, besides_mb = row["slice_nbytes"] / 1e6, row["small_nbytes"] / 1e6
        lines.append(f"{row['job']:30} {row['role']:>8} {slice_mb:5.1f} MB {row['slices']:11.1f} {besides_mb:6.0f} MB")
    return lines
