"""Learners and shards of a node in shared memory (`exchange/in_place.py`): the bits of messages, however slow a shard is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.job.parts import UserObjects
from mpisgd.records.log.reader import Run
from tests.in_place import JOBS, model

from .conftest import launch

SCRIPT = """
import contextlib, io, os, sys, time
from pathlib import Path
import torch, mpisgd
from mpi4py import MPI
from mpisgd.exchange.travel import in_place
from mpisgd.records.log import schema
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors import flat
from tests.in_place import COMMON, JOBS, model

world = MPI.COMM_WORLD
accumulate = SliceUpdate.accumulate
def late(self, body, *arguments, **named):  # learners have long gone on: their next mini-batch is prepared
    time.sleep(0.004)
    accumulate(self, body, *arguments, **named)
SliceUpdate.accumulate = late
if len(sys.argv) > 1:
    flat.outbox_of = in_place.outbox_of = lambda outboxes, seq: outboxes[0]
differs = []
for name, (ranks, special) in JOBS.items():
    comm = world.Split(0 if world.rank < ranks else MPI.UNDEFINED)
    if comm == MPI.COMM_NULL:
        continue
    states, said = [], []
    for asked in ("", "messages"):
        os.environ["MPISGD_TRAVEL"] = asked
        made = []
        def kept():
            made.append(model())
            return made[-1]
        config = {**COMMON, **special, "out": f"{asked or 'chosen'}/{name}", "log": {"progress": "plain"}}
        with contextlib.redirect_stderr(io.StringIO()) as words:
            mpisgd.train(model=kept, data=None, loss=None, config=config, comm=comm)
        said.append("exchange in-place" in words.getvalue())
        states.append(torch.load(Path(config["out"]) / schema.WEIGHTS, weights_only=True)["theta"])
        with torch.no_grad():  # the user goes on alone: nobody else's weights change
            for parameter in made[-1].parameters():
                comm.Barrier()
                parameter.fill_(comm.rank)
                comm.Barrier()
                assert (parameter == comm.rank).all()
    assert said == [comm.rank == 0, False], said
    if any(not torch.equal(states[0][key], states[1][key]) for key in states[0]):
        differs.append(name)
    comm.Free()
if world.rank == 0:
    print(*differs)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("in_place")
    done = launch(max(ranks for ranks, _ in JOBS.values()), "-c", SCRIPT, cwd=directory, PYTHONPATH=str(Path.cwd()))
    assert done.status == 0, done.text
    assert done.out == "\n", f"other bits than messages: {done.out}"
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", list(JOBS))
def test_the_log_of_a_run_in_place_is_replayed_to_the_bit(trained: Path, name: str) -> None:
    path = trained / "chosen" / name
    assert replay.check(path, UserObjects(model=model)) == ""
    run, other = Run(path), Run(trained / "messages" / name)
    names: list[Any] = ["learner_id", "seq", "timestamp", "verdict", "loss"]
    ours, theirs = (sorted(each.pushes[names].tolist()) for each in (run, other))
    assert ours == theirs
    assert run.updates["gradient_sq"].tolist() == pytest.approx(other.updates["gradient_sq"].tolist(), nan_ok=True, rel=0)


@pytest.mark.slow
@pytest.mark.rare
def test_a_single_outbox_would_be_cleared_while_a_shard_sums(tmp_path: Path) -> None:
    done = launch(max(ranks for ranks, _ in JOBS.values()), "-c", SCRIPT, "one", cwd=tmp_path, PYTHONPATH=str(Path.cwd()))
    assert done.status == 0, done.text
    assert set(done.out.split()) == set(JOBS) - {"dealt"}  # whose next mini-batch waits for the answer


SMALL = """
import os, sys
from mpisgd.comm.mpi import segment
import mpisgd

def absent(*_):
    raise OSError("not here")
def full(file, offset, nbytes, fallocate=os.posix_fallocate):
    if nbytes > int(sys.argv[1]):
        raise OSError("no space left")
    fallocate(file, offset, nbytes)
segment._nameless, segment.os.posix_fallocate = absent, full
config = {"protocol": "hardsync", "epochs": 0.1, "mu": 8, "threads": 1, "out": "run", "log": {"progress": "plain"}}
mpisgd.train(config=config)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("room", "said"), [(10**9, "exchange in-place"), (8192, "exchange whole")])
def test_where_shared_memory_has_no_room_vectors_are_sent(tmp_path: Path, room: int, said: str) -> None:
    done = launch(3, "-c", SMALL, str(room), cwd=tmp_path)
    assert done.status == 0, done.text
    assert said in done.text
