"""Small virtual jobs for tests, from nested mappings as a TOML file gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpisgd.config import Config
from mpisgd.config.config_file import from_mapping
from mpisgd.job.parts import NOTHING_BROUGHT, Brought
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate

#: No gradients: 100 mini-batches of four learners.
SIZES = {
    "virtual": {"learners": 4, "gradients": False, "parameters": 1000, "train_samples": 400},
    "compute": {"name": "lognormal"},
    "mu": 4,
    "epochs": 1,
    "log": {"progress": "off"},
}

#: Real gradients, of a model that is quickly computed.
TENSORS = {
    "virtual": {"learners": 4},
    "compute": {"name": "lognormal"},
    "data": {"name": "synthetic", "shape": [6], "classes": 3, "samples": 120, "test_samples": 30},
    "model": {"name": "mlp", "hidden": [8]},
    "mu": 4,
    "epochs": 2,
    "threads": 1,
    "log": {"progress": "off"},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; tables are merged, unless the change names another kind."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        same_kind = isinstance(old, dict) and isinstance(value, dict) and value.get("name") in (None, old.get("name"))
        result[key] = merged(old, value) if same_kind else value  # type: ignore[arg-type]
    return result


def config(out: Path, base: Mapping[str, Any] = SIZES, **changes: Any) -> Config:
    return from_mapping(merged({**base, "out": str(out)}, changes))


def simulated(out: Path, base: Mapping[str, Any] = SIZES, brought: Brought = NOTHING_BROUGHT, **changes: Any) -> Run:
    """The log of a virtual job that has ended in order."""
    outcome = simulate(config(out, base, **changes), brought)
    run = Run(out)
    assert outcome.path == out
    assert run.done is not None
    assert run.done["clock"] == list(outcome.clocks) == run.summaries["final_clock"].tolist()
    return run


def tables(run: Run) -> dict[str, bytes]:
    """Every row of a log, as bytes: NaN equals NaN, and 0 is not -0."""
    return {name: run.table(name).tobytes() for name in ("pushes", "updates", "events", "evaluations")}
