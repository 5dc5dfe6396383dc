"""`python -m tests.bench oversubscribed`: many more ranks than cores, against one loop on one core over as many mini-batches.

The papers run 31 ranks where they have the nodes; their users begin on a laptop. One shard and all other ranks as learners train
the CIFAR-10 network, mu = 4; beside them, in the same job and interleaved, one rank does the same number of mini-batches alone
while the others sleep. Above 1, the cores that the one loop leaves idle are worth more than what waiting and switching cost. As
many loops at once as there are learners, which do not communicate, tell how far above 1 it can come on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpisgd.bench.parts import loops
from mpisgd.bench.parts.cases import CASES, WARM_UP, Case
from mpisgd.bench.parts.measured import over, show, spread
from mpisgd.bench.parts.runs import rate_of, run_of, scratch
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire
from mpisgd.protocols import HardsyncOptions, ProtocolOptions, SoftsyncOptions
from mpisgd.records.log.reader import Run

UPDATES = 60
"""Mini-batches of each learner: a few seconds of each way."""
SERIAL = "one serial loop"
APART = "loops apart"
_SLEEP_S = 0.05


def measure(comm: MPI.Intracomm, repetitions: int) -> list[dict[str, Any]]:
    """Measure; returns one row, the same on every rank."""
    learners = comm.Get_size() - 1
    case = replace(CASES["cnn-4"], updates=UPDATES)
    protocols: dict[str, ProtocolOptions] = {"hardsync": HardsyncOptions(), "softsync": SoftsyncOptions(n=learners)}
    wire = Wire(comm, polite=True)
    rates: dict[str, list[float]] = {SERIAL: [], APART: [], **{name: [] for name in protocols}}
    with scratch(comm) as directory:
        for _ in range(repetitions):
            rates[SERIAL].append(_by_one(comm, lambda: _serial(case, learners)))
            rates[APART].append(loops.independent(comm, wire, case, "cpu", learners=learners))
            for name, protocol in protocols.items():
                rates[name].append(_trained(comm, directory, case, learners, protocol))
    return [
        {
            "case": case.name,
            "ranks": comm.Get_size(),
            "images_per_s": {name: spread(values) for name, values in rates.items()},
            "over_serial": {name: over(rates[name], rates[SERIAL]) for name in (*protocols, APART)},
            "over_apart": {name: over(rates[name], rates[APART]) for name in protocols},
        }
    ]


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [line for row in rows for line in _lines_of(row)]


def _lines_of(row: Mapping[str, Any]) -> list[str]:
    """Format one row."""
    rates = ", ".join(f"{name} {value['median']:.0f}" for name, value in row["images_per_s"].items())
    lines = [f"{row['case']}, {row['ranks']} ranks: images/s {rates}"]
    for key, floor in (("over_serial", SERIAL), ("over_apart", APART)):
        lines += [f"  {name} / {floor} {show(ratio)}" for name, ratio in row[key].items()]
    return lines


def _serial(case: Case, learners: int) -> float:
    step = loops.alone(case, 0)
    for seq in range(WARM_UP):
        step(seq)
    start_s = time.perf_counter()
    for seq in range(WARM_UP, WARM_UP + learners * case.updates):
        step(seq)
    return learners * case.updates * case.mu / (time.perf_counter() - start_s)


def _by_one(comm: MPI.Intracomm, images_per_s: Callable[[], float]) -> float:
    """Measure on rank 0 while the others sleep, and look up so seldom that they take nothing of a core."""
    rate = images_per_s() if comm.Get_rank() == 0 else 0.0
    met = comm.Ibarrier()
    while not met.Test():
        time.sleep(_SLEEP_S)
    return float(comm.bcast(rate))


def _trained(comm: MPI.Intracomm, directory: Path, case: Case, learners: int, protocol: ProtocolOptions) -> float:
    epochs = (WARM_UP + case.updates) * learners * case.mu / case.data.samples
    outcome = run_of(comm, directory, case, protocol=protocol, epochs=epochs)
    return float(comm.bcast(rate_of(Run(outcome.path), case, learners) if comm.Get_rank() == 0 else None))
