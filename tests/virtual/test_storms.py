"""Whatever befalls the ranks of a job: laws hold, nothing waits for ever, what failed is named, replay proves what is DONE.

500 schedules; `python -m tests.faults.virtual` runs 20,000. A schedule that has found something is KEPT.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoint import Checkpoint
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.effort import spread, thinned
from tests.virtual.storm import aftermath, package
from tests.virtual.storm.draw import EVER_S, Damage, Draw, Fault, draw, draw_batch
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


PLAIN = Draw(
    "hardsync", shards=2, learners=3, evaluator=True, tolerant=True, seed=5, every_updates=1, latency_ns=5000, eager_nbytes=0,
    reorders=False, flush_rows=4, attempts=((Fault("end", at_s=0.15),),),
)  # fmt: skip


@pytest.mark.parametrize("number", [7, *spread([2, 13, 20], 1)])
def test_a_clock_that_jumps_changes_nothing(number: int, tmp_path: Path) -> None:
    """But the dates that are told."""
    drawn = replace(draw(random.Random(number), number), damages=())
    peaceful = [tuple(fault for fault in faults if fault.what != "jump") for faults in drawn.attempts]
    jumps = (Fault("jump", 0, by_s=-1e8), Fault("jump", 1, at_s=0.05, by_s=1e8), Fault("jump", 0, at_s=0.1, by_s=3e8))
    seen = []
    for name, more in (("peaceful", ()), ("jumps", jumps)):
        attempts = tuple((*faults, *more) for faults in peaceful)
        seen.append(aftermath.weather(replace(drawn, attempts=attempts), tmp_path / name, proven=False))
        assert not seen[-1].failures
    one, other = ([{**vars(end), "events": 0, "said": ""} for end in each.ends] for each in seen)
    assert one == other
    runs = [sorted((tmp_path / name).iterdir()) for name in ("peaceful", "jumps")]
    for before, after in zip(*runs, strict=True):
        for table in schema.TABLES:
            assert Run(before).table(table).tobytes() == Run(after).table(table).tobytes()
    began = [Run(each[0]).environment["started"] for each in runs]
    assert [date[:4] for date in began] == ["2033", "2030"]


def test_a_clock_that_jumps_is_that_of_a_lock(tmp_path: Path) -> None:
    job = aftermath.Job(PLAIN, tmp_path / "run", random.Random(1), (Fault("jump", 0, by_s=-1e8), Fault("end", at_s=0.01)))
    job.run()
    assert re.search('"since": "2030', (tmp_path / "run" / schema.LOCK).read_text())


def test_links_that_are_freed_let_go_one_message_at_a_time() -> None:
    """Those of each link in their order; of which link the next one is, is drawn."""
    machine = Machine(3, random.Random(1), tells=True)
    came: list[tuple[int, int]] = []
    for dest in (1, 2):
        machine.cut(0, dest)
    for number in range(20):
        for dest in (1, 2):
            machine._cross(0, dest, partial(came.append, (dest, number)))
    machine.free()
    machine.at(10**10, partial(machine.end, "all came"))
    machine.run(10**11)
    assert [[number for dest, number in came if dest == each] for each in (1, 2)] == [list(range(20))] * 2
    assert [dest for dest, _ in came] not in ([1] * 20 + [2] * 20, [1, 2] * 20)
    machine._cross(0, 1, partial(came.append, (1, 20)))
    assert came[-1] == (1, 20)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_disk_that_hangs_ends_no_job(rank: int, tmp_path: Path) -> None:
    """A shard's, or the evaluator's; it takes no harm but time."""
    hangs = Fault("hang", rank, at_s=0.01, lasts_s=11.0)
    seen = aftermath.weather(replace(PLAIN, attempts=((hangs,),)), tmp_path)
    assert not seen.failures
    assert [end.named for end in seen.ends] == [""]
    assert 11 < seen.ends[0].seconds < 13


@pytest.mark.parametrize(("what", "lasts_s"), [("kill", 0.0), ("stop", EVER_S)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_is_stopped_for_ever_ends_an_interrupted_job_without_learners(
    rank: int, what: str, lasts_s: float, tmp_path: Path
) -> None:
    """No rank but the other shard asks the shard for signs of life, from the last learner's loss to the shard's last call."""
    drawn = replace(PLAIN, evaluator=False)
    gone = (Fault("signal", rank, at_s=0.09), *(Fault(what, learner, at_s=0.1, lasts_s=lasts_s) for learner in (2, 3, 4)))
    whole = aftermath.Job(drawn, tmp_path / "whole", random.Random(drawn.seed), gone)
    whole.run()
    calls = whole.machine.processes[rank].calls
    for at_call in range(calls - 40, calls, 4):
        stopped = Fault("stop", rank, at_call=at_call, lasts_s=EVER_S)
        seen = aftermath.weather(replace(drawn, attempts=((*gone, stopped),)), tmp_path / str(at_call), proven=False)
        assert not seen.failures


@pytest.mark.parametrize("what", ["flipped", "torn", "missing"])
def test_a_damaged_checkpoint_is_passed_over(what: str, tmp_path: Path) -> None:
    seen = aftermath.weather(replace(PLAIN, damages=(Damage(what, "checkpoint", seed=1),)), tmp_path)
    assert not seen.failures
    assert seen.totals["passed over"] > 0
    assert seen.totals["replayed"] == 1


def test_who_reads_a_damaged_checkpoint_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were no checksum looked at, the laws would not hold."""
    monkeypatch.setattr(Checkpoint, "tensors", _unchecked)
    drawn = replace(PLAIN, damages=tuple(Damage("flipped", "checkpoint", seed=seed) for seed in (5, 12)))
    assert any("goes on from" in failure for failure in aftermath.weather(drawn, tmp_path).failures)


def _unchecked(found: Checkpoint, shard: int) -> dict[str, np.ndarray]:
    path = found.path / disk.part_file(shard)
    return disk._arrays(path, path.read_bytes())
