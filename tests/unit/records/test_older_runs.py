"""Runs of commit 4b8dbc2 are read, reported and replayed as on the day they were written (`older_runs`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.__main__ import main
from mpisgd.analysis import about, timeline, training
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log.reader import Run
from tests.unit.older_runs import NAMES, unpack

#: name -> clocks that the shards' summaries tell, rows of `pushes`, gradients.
LEFT = {"hardsync": ((-1, -1), 78, 39), "softsync": ((27,), 29, 29), "virtual": ((27,), 31, 31)}


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_and_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = unpack(name, tmp_path)
    run = Run(path)
    assert (tuple(run.summaries["final_clock"].tolist()), len(run.pushes)) == LEFT[name][:2]
    assert all(books.balanced for books in run.books())
    done = name != "hardsync"
    assert about.status(run).done == done
    assert timeline.look(run).cycles.edges.min() >= 0
    if done:
        assert np.isfinite(training.curves(run)[0].final)
    assert main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    assert about.protocol_label(run) in said and ("UNFINISHED" in said) != done


@pytest.mark.parametrize("name", NAMES)
def test_it_is_replayed(name: str, tmp_path: Path) -> None:
    """Bit for bit; another torch, or another kind of CPU, may give other last bits, and no more than those."""
    path = unpack(name, tmp_path)
    proof = replay.replay(path)
    if not proof.holds:
        assert "recomputed" in proof.reason, "the protocol's decisions do not rest on the machine"
        proof = replay.replay(path, tolerance=1e-3)
    assert proof.holds, proof.reason
    assert (proof.gradients, len(proof.differences)) == (LEFT[name][2], name != "hardsync")


def test_its_checkpoint_is_read(tmp_path: Path) -> None:
    """What goes on from it, on real ranks, is `tests/mpi/test_older_run.py`."""
    path = unpack("hardsync", tmp_path)
    found = disk.newest(path)
    assert (found.clock, found.learners) == (13, 3)
    assert sum(len(found.tensors(shard)["weights"]) for shard in (0, 1)) == Run(path).environment["parameters"]
