"""`python -m tests.bench stages`: a model in two stages on two cores, over one core; and messages of neighbours, over MPI's.

Both jobs have the same model, mini-batch, data and protocol, and are launched in turn. The two stages compute alike and have few
parameters: what is measured is the pipeline. One rank passes the whole mini-batch at once, which is what suits it best; beside that
stands one rank that passes it in as many parts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.bench.parts.measured import over, show, spread
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.pipeline.micro_batches import StagePasses
from mpisgd.pipeline.travelling import Rooms
from mpisgd.records.log.reader import Run
from mpisgd.vectors.memory import Memory

PARTS = 8
MU, UPDATES, WARM_UP = 64, 14, 3
CHANNELS, SIDE = 64, 16
#: name -> what differs; a learner is `group_size` ranks, bound to as many cores.
JOBS: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "one, in parts": {"micro_batches": PARTS},
    "whole": {"group_size": 2, "shards": 2},
    "gpipe, 4": {"group_size": 2, "shards": 2, "micro_batches": 4},
    "gpipe": {"group_size": 2, "shards": 2, "micro_batches": PARTS},
    "1f1b": {"group_size": 2, "shards": 2, "micro_batches": PARTS, "pipeline": "1f1b"},
}
#: Floats of a message: 0.25, 1, 4 and 16 MiB.
FLOATS = (2**16, 2**18, 2**20, 2**22)
_ROUNDS = 40
_ROOT = Path(__file__).resolve().parents[2]


def _half(first: bool) -> list[nn.Module]:
    """Five convolutions from channels to as many; before the first half's, one from the image's three, a twentieth of these."""
    begin: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1), nn.ReLU()] if first else []
    for _ in range(5):
        begin += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()]
    return begin


def model(classes: int) -> nn.Module:
    """Convolutions of the same shape in both halves."""
    return nn.Sequential(*_half(True), *_half(False), nn.AvgPool2d(SIDE), nn.Flatten(), nn.Linear(CHANNELS, classes))


def measure(repetitions: int) -> list[dict[str, Any]]:
    """Images/s of each job, and a message's ratio for each size. Raises ConfigError where a launch fails."""
    rates: dict[str, list[float]] = {name: [] for name in JOBS}
    for _ in range(repetitions):
        for name, changes in JOBS.items():
            with tempfile.TemporaryDirectory() as directory:
                rates[name].append(_images_per_s(_run(Path(directory) / "run", changes)))
    rows: list[dict[str, Any]] = [
        {"job": name, "images_per_s": spread(found), "over_one": over(found, rates["one"])} for name, found in rates.items()
    ]
    done = _launched([*mpirun(2), sys.executable, "-m", "tests.bench.stages", str(repetitions)])
    messages: list[dict[str, Any]] = json.loads(done.splitlines()[-1])
    return rows + messages


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    lines = [f"{'job':>15}   {'images/s':30} over one rank on one core"]
    for row in rows:
        if "job" in row:
            lines.append(f"{row['job']:>15}   {show(row['images_per_s'], 1):30} {show(row['over_one'])}")
    lines.append(f"{'KiB':>15}   {'microseconds':30} {'of MPI’s send and receive':30} over these")
    return lines + [
        f"{row['nbytes'] / 2**10:15.0f}   {show(row['message_us'], 1):30} {show(row['mpi_us'], 1):30} {show(row['over_mpi'])}"
        for row in rows
        if "nbytes" in row
    ]


def _launched(command: Sequence[str]) -> str:
    env = {**environment(), "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=_ROOT)
    if done.returncode != 0:
        raise ConfigError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _run(out: Path, changes: Mapping[str, Any]) -> Run:
    """Launch a job. One rank's may use one core."""
    config = {
        "model": {"name": "tests.bench.stages:model"},
        "data": {"name": "synthetic", "shape": [3, SIDE, SIDE], "samples": MU * 4, "test_samples": MU},
        **{"protocol": "hardsync", "mu": MU, "epochs": UPDATES / 4, "threads": 1, "alpha0": 0.001},
        **{"stages": {"at": [str(12)]} if "group_size" in changes else {}, "evaluation": {"every_epochs": 0.0}},
        **{"out": str(out), "log": {"progress": "off"}, **changes},
    }
    ranks = changes.get("shards", 1) + changes.get("group_size", 1)
    bound = [] if "group_size" in changes else ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    program = "import json, sys, mpisgd; mpisgd.train(config=json.loads(sys.argv[1]))"
    _launched([*bound, *mpirun(ranks), sys.executable, "-c", program, json.dumps(config)])
    return Run(out)


def _images_per_s(run: Run) -> float:
    """From the log: by the median cycle, after the first ones."""
    arrived = np.sort(run.pushes["arrival_s"][run.pushes["shard"] == 0])
    return MU / float(np.median(np.diff(arrived)[WARM_UP:]))


class _Echo(StagePasses):
    """Passes that compute nothing: tensors of one size go up, and come down again."""

    samples = 1
    loss = 0.0

    def __init__(self, floats: int, last: bool) -> None:
        self.memory = Memory.zeros(1)
        self._stage = 0
        self._rooms = Rooms()
        self._last = last
        self._tensor = torch.ones(floats)

    def prepare(self, seq: int) -> None: ...

    def begin(self, seq: int) -> None: ...

    def reported(self, loss: float) -> float:
        return loss

    def pass_on(self, micro: int, received: Any) -> Tensor | None:
        return None if self._last else self._tensor

    def pass_back(self, micro: int, received: Any) -> Tensor | None:
        return self._tensor if self._last else None


def main(repetitions: int) -> None:
    """On two ranks: the passes of a mini-batch, beside sends and receives of the same bytes, in turn; prints rows."""
    from mpisgd.comm.mpi.library import MPI
    from mpisgd.comm.mpi.wire import Wire
    from mpisgd.pipeline.stage import Stage

    comm = MPI.COMM_WORLD
    wire = Wire(comm, polite=False)
    rows = []
    for floats in FLOATS:
        stage = Stage(wire, (0, 1), _Echo(floats, comm.rank == 1), PARTS)
        # torch's memory on both sides, as tensors have it: numpy's large arrays lie in huge pages, which are copied faster
        sent, into = torch.ones(floats).numpy(), [torch.zeros(floats).numpy() for _ in range(PARTS)]

        def raw(_: int, sent: np.ndarray = sent, into: list[np.ndarray] = into) -> None:
            for up in (True, False):
                for part in range(PARTS):
                    if (comm.rank == 0) == up:
                        comm.Send(sent, 1 - comm.rank)
                    else:
                        comm.Recv(into[part], 1 - comm.rank)

        found: dict[str, list[float]] = {"ours": [], "mpi": []}
        for repetition in range(1 + max(repetitions, 5)):
            for name, way in (("ours", stage.compute), ("mpi", raw)):
                comm.Barrier()
                taken = []
                for seq in range(_ROUNDS):
                    begun_s = time.perf_counter()
                    way(seq)
                    taken.append(time.perf_counter() - begun_s)
                if repetition:
                    found[name].append(statistics.median(taken) / (2 * PARTS) * 1e6)
        microseconds = {"message_us": spread(found["ours"]), "mpi_us": spread(found["mpi"])}
        rows.append({"nbytes": 4 * floats, **microseconds, "over_mpi": over(found["ours"], found["mpi"])})
    if comm.rank == 0:
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
