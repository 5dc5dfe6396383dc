"""`python -m tests.bench pieces`: memory of the ranks that train a model which none of them has whole, a list of factories.

The run's directory, with weights of all pieces, lies below the directory for temporary files, and is removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mpisgd.records.log.reader import Run
from tests.bench import peaks

WIDTH = 2500
"""Units of each layer: 25 MB of parameters."""
STAGES, SHARDS, UPDATES = 8, 16, 3
"""Of 1.5 GB, a stage has 188 MB: it needs its weights, its gradient, and what a backward pass keeps of a few layers. A shard has 94
MB, and with one learner needs weights, one gradient, and a snapshot; at the start it makes the whole stage."""
LIMIT_MB = 700.0


def _first() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU())


def _middle() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def _last() -> nn.Module:
    return nn.Linear(WIDTH, 10)


def model(layers: int) -> list[Callable[[], nn.Module]]:
    """So many layers of 25 MB, and a first and a last one for the digits."""
    return [_first, *[_middle] * layers, _last]


def measure(nbytes: int) -> list[dict[str, Any]]:
    """One learner, a group, its shards and an evaluator train a model of so many bytes: each rank's peak. Raises ConfigError."""
    ranks = SHARDS + STAGES + 1
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        config = {
            "model": {"name": "tests.bench.pieces:model", "kwargs": {"layers": round(nbytes / (4 * WIDTH * (WIDTH + 1)))}},
            "optimizer": {"name": "sgd", "momentum": 0.0},
            "evaluation": {"every_epochs": 0.0},
            **{"group_size": STAGES, "shards": SHARDS, "evaluator": True, "micro_batches": 2, "mu": 8, "threads": 1},
            **{"epochs": UPDATES * 8 / 1437, "alpha0": 0.01, "out": str(out), "log": {"progress": "off"}},
        }
        found = peaks.of_job(Path(directory), ranks, config)
        run = Run(out)
        told = run.environment
        roles = {rank: f"shard {shard}" for shard, rank in enumerate(told["shard_ranks"])}
        roles |= {rank: f"stage {stage}" for stage, rank in enumerate(told["groups"][0])} | {told["evaluator_rank"]: "evaluator"}
        rows: list[dict[str, Any]] = [
            {
                "parameter_nbytes": told["parameter_nbytes"],
                "stages": STAGES,
                "shards": SHARDS,
                "updates": int(run.pushes["seq"].max()) + 1,
            }
        ]
        for rank, each in enumerate(found):
            of_torch, more = (1024 * kib / 1e6 for kib in (each["torch"], each["end"] - each["torch"]))
            rows.append({"rank": rank, "role": roles[rank], "torch_mb": of_torch, "more_mb": more})
        return rows


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    job, *ranks = rows
    most = max(row["more_mb"] for row in ranks)
    lines = [
        f"{job['parameter_nbytes'] / 1e9:.2f} GB of parameters, {job['stages']} stages, {job['shards']} shards, {job['updates']}"
        f" updates: at most {most:.0f} MB a rank beside torch (limit {LIMIT_MB:.0f})"
    ]
    return lines + [f"{row['role']:>10}: {row['torch_mb']:.0f} MB with torch, {row['more_mb']:.0f} more" for row in ranks]
