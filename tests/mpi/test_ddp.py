"""Real ranks against torch's DistributedDataParallel over gloo, which nobody tuned: same mini-batches, initial weights, optimiser.

DDP divides each gradient by lambda before it adds them, mpisgd divides the sum. With two learners both come to the same bits, for
halves are exact and a + b = b + a; with three, to those of another rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import Shared, launch

pytestmark = pytest.mark.slow

DDP = Path(__file__).parent / "ddp.py"
COMMON = {"mu": 8, "seed": 5, "epochs": 0.8, "threads": 1, "memory_format": "contiguous", "log": {"progress": "off"}}
MLP = {"model": {"name": "mlp", "hidden": [24]}, "alpha0": 0.02, "optimizer": {"name": "sgd", "momentum": 0.9}}
CNN = {
    "model": "small_cnn",
    "alpha0": 0.03,
    "sampling": "replacement",
    "optimizer": {"name": "sgd", "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
}
#: name -> learners, what differs from COMMON.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {"cnn-2": (2, CNN), "mlp-3": (3, MLP)}
#: protocol -> ranks that are shards only.
PROTOCOLS = {"allreduce": 0, "hardsync": 2}
TOLERANCE = 1e-5
"""Of the way that the weight went which went farthest. Measured with three learners: 3e-7; alpha0 off by 1 in 10,000 makes 1e-4."""


def job(directory: Path, name: str) -> dict:
    """Of a run and, behind the last hyphen, a protocol."""
    (learners, special), protocol = RUNS[name.rpartition("-")[0]], name.rpartition("-")[2]
    shards, out = PROTOCOLS[protocol], str(directory / name)
    config = {**COMMON, **special, "protocol": protocol, "shards": max(1, shards), "out": out}
    return {"ranks": learners + shards, "config": config, "record": f"{out}.npy"}


SHARED = Shared([("send", f"{name}-{protocol}") for name in RUNS for protocol in PROTOCOLS], job)


@pytest.fixture(scope="module")
def recorded(launched: Callable[[str], Path]) -> Path:
    """A directory with RUN-ddp.npy and RUN-PROTOCOL.npy, weights before each update."""
    directory = launched(__name__) / "send"
    theirs = [
        {"learners": learners, "config": {**COMMON, **special}, "record": str(directory / f"{name}-ddp.npy")}
        for name, (learners, special) in RUNS.items()
    ]
    listing = directory / "ddp.json"
    listing.write_text(json.dumps(theirs))
    done = launch(3, str(DDP), str(listing))
    assert done.status == 0, done.text
    return directory


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", RUNS)
def test_every_update_is_that_of_ddp(recorded: Path, name: str, protocol: str) -> None:
    ours, theirs = (np.load(recorded / f"{name}-{by}.npy") for by in (protocol, "ddp"))
    assert len(ours) == len(theirs) > 40
    moved = np.abs(theirs[-1] - theirs[0]).max()
    assert moved > 0.05, "the run must have gone somewhere"
    apart = np.abs(ours - theirs).max() / moved
    print(f"{name}, {protocol}: at most {apart:.1e} of the way apart")
    assert apart < TOLERANCE
    if RUNS[name][0] == 2:
        assert ours.tobytes() == theirs.tobytes()
