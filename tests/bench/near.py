"""`mpirun -n 3 python -m tests.bench near`: hardsync that keeps states on nodes, over hardsync that does not; AlexNet's shapes.

The even ranks and the odd one take themselves to be on two nodes, so that a state is written twice and sent once.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from mpisgd.bench.checkpoint import Tally, seen
from mpisgd.bench.checkpoint import lines_of as lines_of_checkpoints
from mpisgd.bench.parts.cases import CASES, WARM_UP
from mpisgd.bench.parts.measured import OFF, in_turn
from mpisgd.bench.parts.runs import run_of, scratch
from mpisgd.config import CheckpointOptions
from mpisgd.records.log.reader import Run

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

NEAR = "on nodes"


def measure(comm: MPI.Intracomm, repetitions: int, every_updates: int) -> list[dict[str, Any]]:
    """Images/s with a state on nodes every so many updates, over without; the rows are the same on every rank."""
    case = replace(CASES["alexnet-16"], updates=2 * every_updates)
    ways: dict[str, dict[str, Any]] = {OFF: {}, NEAR: {"checkpoint": CheckpointOptions(partner_updates=every_updates)}}
    tally, between_s = Tally(case, list(ways)), []
    with scratch(comm) as directory, mock.patch.object(socket, "gethostname", lambda: f"node{comm.Get_rank() % 2}"):
        for name in in_turn(list(ways), repetitions, told=comm.Get_rank() == 0):
            outcome = run_of(comm, directory, case, **ways[name])
            updated_s, events = comm.bcast(seen(Run(outcome.path)) if comm.Get_rank() == 0 else None)
            tally.add(name, updated_s, events)
            between_s.append(every_updates * float(np.diff(updated_s[WARM_UP:]).mean()))
    return [tally.row() | {"every_updates": every_updates, "every_s": float(np.median(between_s))}]


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [*lines_of_checkpoints(rows), *(f"  a state every {row['every_s']:.0f} s" for row in rows)]
