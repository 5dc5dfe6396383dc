"""Whatever befalls the ranks of a job: laws hold, nothing waits for ever, what failed is named, replay proves what is DONE.

500 schedules; `python -m tests.faults.virtual` runs 20,000. A schedule that has found something is KEPT.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.effort import spread, thinned
from tests.virtual.storm import aftermath, package
from tests.virtual.storm.draw import Draw, draw, draw_batch
from tests.virtual.storm.for_ever import FOR_EVER
from tests.virtual.storm.kept import KEPT
from tests.virtual.storm.machine import Machine
from tests.virtual.storm.mpi import equip
from tests.virtual.storm.package import VIRTUAL

PARTS, OF_EACH = 100, 5
OF_BATCH = 2


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("part", spread(range(PARTS), PARTS))
def test_laws_hold_whatever_befalls_a_job(part: int, tmp_path: Path) -> None:
    """Replay, which takes a third of the time, proves every second run."""
    for number in range(part * OF_EACH, (part + 1) * OF_EACH):
        drawn = draw(random.Random(f"500:{number}"), number)
        seen = aftermath.weather(drawn, tmp_path / str(number), proven=number % 2 == 0)
        assert not seen.failures, f"{drawn}:\n{seen.failures[0]}\n{drawn!r}"


@pytest.mark.parametrize("part", spread(range(PARTS), PARTS))
def test_laws_hold_whatever_befalls_a_batch_optimisation(part: int, tmp_path: Path) -> None:
    """`python -m tests.faults.virtual_batch` runs 5,000."""
    for number in range(part * OF_BATCH, (part + 1) * OF_BATCH):
        seen = aftermath.weather(drawn := draw_batch(random.Random(f"batch:{number}"), number), tmp_path / str(number))
        assert not seen.failures, f"{drawn}:\n{seen.failures[0]}\n{drawn!r}"


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [pytest.param(drawn, id=name) for name, drawn in thinned((KEPT | FOR_EVER).items(), 9)])
def test_what_was_found_once_is_mended(drawn: Draw, tmp_path: Path) -> None:
    seen = aftermath.weather(drawn, tmp_path)
    assert not seen.failures, f"{drawn}:\n{seen.failures[0]}"


def test_who_dies_when_all_meet_holds_up_nobody() -> None:
    """It has said what it has to say, and is dead when the hub answers; MPI refuses at once to send to the dead."""
    machine = equip(Machine(3, random.Random(1), tells=True, latency_ns=1000, eager_nbytes=0, reorders=False))
    heard: dict[int, list[int]] = {}

    def main(rank: int) -> None:
        comm = machine.comms[0][rank]
        wire = VIRTUAL.tolerant.TolerantWire(comm, polite=True, vital=(0,), describe=str, patience_s=1.0)
        if rank == 0:
            package.sleep(1.0)
        heard[rank] = wire.settle(np.array([7 + rank]), lambda said: said[:, 0], 3).tolist()
        machine.leave(machine.processes[rank])

    for process in machine.processes:
        process.begin(partial(main, process.rank))
    machine.at(500_000_000, partial(machine.kill, 2))
    with package.on(machine):
        machine.run(10**10)
    assert heard == {0: [7, 8, 9], 1: [7, 8, 9]}


def test_a_schedule_is_a_function_of_its_draw(tmp_path: Path) -> None:
    drawn = draw(random.Random(3), 3)
    one, other = (aftermath.weather(drawn, tmp_path / name, proven=False) for name in ("one", "other"))
    assert [vars(end) for end in one.ends] == [vars(end) for end in other.ends]
    assert one.totals["events"] > 1000
