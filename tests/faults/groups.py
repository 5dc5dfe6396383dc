"""Random jobs of groups, of every protocol, in virtual time; stages fail, and their learners leave.

`python -m tests.faults.groups --count 2000 --out results/faults` writes groups.json there. Every send blocks, and takes a drawn
time; the laws are those of `tests/virtual/test_laws.py`, and replay proves every run. A job that waits in a circle, or sends for
ever, fails.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisgd.base import durable
from mpisgd.records.log.schema import Event, Verdict
from tests.faults.campaign import Found, main
from tests.virtual.jobs import TENSORS
from tests.virtual.test_laws import obeys

WAYS: dict[str, dict[str, Any]] = {
    "hardsync": {"name": "hardsync"},
    "softsync": {"name": "softsync"},
    "backup": {"name": "backup"},
    "backup-late": {"name": "backup", "late": "apply"},
    "backup-abort": {"name": "backup", "abort": True},
    "timeout": {"name": "timeout"},
    "versioned": {"name": "versioned"},
    "ssp": {"name": "ssp"},
    "async": {"name": "async"},
    "downpour": {"name": "downpour"},
}
MU = 60
"""Any number of micro-batches up to 6 divides it."""


def job(dice: random.Random, number: int) -> dict[str, Any]:
    """Ways take turns; all else is drawn."""
    way, learners = list(WAYS)[number % len(WAYS)], dice.randint(1, 5)
    size = dice.randint(1, 4)
    protocol = {**WAYS[way], **_options(dice, way, learners)}
    deaths = {str(dice.randrange(learners)): dice.uniform(0, 1.5) for _ in range(dice.randint(1, 2))} if dice.random() < 0.4 else {}
    return {
        "protocol": protocol,
        "seed": dice.randrange(2**31),
        "evaluator": dice.random() < 0.3,
        "group_size": size,
        "shards": dice.randint(size, 6),
        "micro_batches": dice.randint(1, 6),
        "pipeline": dice.choice(("gpipe", "1f1b")) if size > 1 else "gpipe",
        "mu": MU,
        "alpha0": 0.001,
        "epochs": dice.choice((2, 4)) * learners / 2,
        "clip_norm": dice.choice((0.0, 0.0, 0.5)),
        "nonfinite": dice.choice(("stop", "drop")),
        "push_format": dice.choice(("float32", "float32", "bfloat16", "topk")),
        "pull_format": dice.choice(("float32", "float32", "bfloat16")),
        "model": {"name": "mlp", "hidden": [5, 4, 6], "batch_norm": dice.random() < 0.3},
        "virtual": {"learners": learners, "ranks_per_node": dice.choice((1, 2, 3)), "gradients": dice.random() < 0.5}
        | {"train_samples": 120},
        "compute": {"name": dice.choice(("constant", "lognormal"))},
        "straggler": {"delay": dice.choice(("none", "exponential")), "delay_mean_s": 0.05},
        "network": {"latency_s": dice.choice((0.0, 2e-6, 0.05)), "bandwidth": dice.choice((1e4, 1e7, 1e12))},
        "failures": {"at_s": deaths, "notice_s": dice.choice((0.0, 0.05, 1.0))} if deaths else {},
    }


def _options(dice: random.Random, way: str, learners: int) -> dict[str, Any]:
    match way:
        case "softsync":
            return {"n": dice.randint(1, learners)}
        case "backup" | "backup-late" | "backup-abort":
            return {"b": dice.randrange(learners)}
        case "timeout":
            wanted = dice.randint(1, learners)
            return {"N": wanted, "N_min": dice.randint(1, wanted), "timeout_s": dice.choice((0.05, 0.3))}
        case "versioned":
            return {"grads_to_wait": dice.randint(1, learners), "tolerance": dice.choice((0, 0, 2))}
        case "ssp":
            return {"slack": dice.randint(1, 3), "get_model_frequency": 1}
        case "downpour":
            return dice.choice(({"n_push": 1, "n_fetch": 1}, {"n_push": 2, "n_fetch": 4}))
    return {}


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    """One job, and all that must be true after it."""
    changes = job(generator, number)
    torch.set_num_threads(1)
    name = changes["protocol"]["name"]
    totals = Counter({f"K = {changes['group_size']}": 1, name: 1})
    try:
        with durable.thrown_away():
            run = obeys(directory / "run", TENSORS, changes, generator.choice((0.0, 0.01, 0.2))).run
    except Exception as error:  # whatever it is, it is written down, and the next job runs
        return Found(totals=totals, failures=[f"{type(error).__name__}: {error}\n{changes!r}"])
    first = run.pushes[run.pushes["shard"] == 0]
    events = run.events[run.events["shard"] == 0]["kind"]
    totals += Counter(
        {
            "gradients": len(first),
            "dropped": int(np.count_nonzero(first["verdict"] == Verdict.DROP)),
            "rejected": int(np.count_nonzero(first["verdict"] == Verdict.REJECT)),
            "given up": int(np.count_nonzero(events == Event.GAVE_UP)),
            "groups that left": int(np.count_nonzero(events == Event.DEPARTED)) * (changes["group_size"] > 1),
            "replayed": 1,
        }
    )
    return Found(totals=totals)


if __name__ == "__main__":
    sys.exit(main("groups", "Groups of every protocol in virtual time; stages fail.", 2000, execute, sys.argv[1:]))
