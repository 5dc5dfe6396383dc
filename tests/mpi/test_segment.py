"""Memory that ranks share (`comm/mpi/segment.py`): without names, by files, or refused; nothing is left of killed ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from .conftest import launch

SHARED_MEMORY = Path("/dev/shm")

HEAD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from mpisgd.comm.mpi import segment
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire

comm = MPI.COMM_WORLD
wire = Wire(comm, polite=True)
def absent(*_):
    raise OSError("not here")
"""
WRITTEN = """
ranks = [2, 0, 1]
shared = wire.segment(ranks, [10, 20_000, 30])
assert ranks[shared.place] == comm.rank and shared.places == 3
assert [len(shared.bytes_of(place)) for place in range(3)] == [10, 20_000, 30]
assert not any(shared.bytes_of(place).any() for place in range(3))
shared.meet()
for round in range(200):  # each writes in the memory of all
    for place in range(3):
        shared.bytes_of(place)[shared.place :: 3] = (7 * shared.place + round) % 256
    shared.meet()
    for place in range(3):
        found = shared.bytes_of(place)
        assert all((found[other::3] == (7 * other + round) % 256).all() for other in range(3))
    shared.meet()
sys.stdout.write(f"shared {' '.join(kinds())}\\n")  # at once: others write, too
del found
shared.disband()
assert not kinds()
"""
KINDS = """
def kinds():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {name for name, path in (("memfd", "memfd:mpisgd"), ("file", "/dev/shm/mpisgd-")) if any(path in line for line in lines)}
"""


def left() -> set[str]:
    """Files of segments; other tests' checkpoints lie there, too."""
    return {path.name for path in SHARED_MEMORY.glob(f"mpisgd-{32 * '[0-9a-f]'}")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "kind"),
    [
        ("", "memfd"),
        ("os.memfd_create = absent", "file"),
        ("if comm.rank == 1: os.memfd_create = absent", "file"),
        ("if comm.rank == 1: segment._nameless = lambda nbytes, until: '/proc/1/fd/0'", "file"),
    ],
    ids=["memfd", "no memfd", "a rank without", "another file of that name"],
)
def test_what_each_writes_all_see(breaks: str, kind: str) -> None:
    before = left()
    done = launch(3, "-c", HEAD + KINDS + breaks + WRITTEN)
    assert done.status == 0, done.text
    assert done.out.count(f"shared {kind}") == 3, done.text
    assert left() == before


NEITHER = """
os.memfd_create = absent
if comm.rank == 1:
    segment._SHARED = Path("/nowhere")
assert wire.segment([0, 1, 2], [10, 10, 10]) is None
sys.stdout.write("none\\n")
"""


def test_ranks_that_can_share_nothing_learn_so_together() -> None:
    before = left()
    done = launch(3, "-c", HEAD + NEITHER)
    assert done.status == 0, done.text
    assert done.out == "none\n" * 3
    assert left() == before


REFUSED = """
import os
import mpisgd
from mpisgd.comm.mpi import segment
segment._shared = lambda *_: None
mpisgd.train(config={"out": os.environ["OUT"], "aggregation": "node", "threads": 1, "log": {"progress": "off"}})
"""


@pytest.mark.slow
def test_a_team_that_can_share_nothing_is_refused_with_a_way_out(tmp_path: Path) -> None:
    done = launch(3, "-c", REFUSED, OUT=str(tmp_path / "run"))
    assert done.status != 0
    assert "cannot share memory" in done.err, done.text
    assert "aggregation = 'none'" in done.err


KILLED = """
shared = wire.segment([0, 1], [2**24, 2**24])
for place in range(2):
    shared.bytes_of(place)[:] = 1
maps = Path("/proc/self/maps").read_text().splitlines()
Path(f"mapped-{comm.rank}").write_text("".join(f"{line.split()[4]}\\n" for line in maps if "memfd:mpisgd" in line))
shared.meet()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_nothing_is_left_of_killed_ranks(tmp_path: Path) -> None:
    before = left()
    done = launch(2, "-c", HEAD + KILLED, cwd=tmp_path)
    assert done.status != 0
    assert left() == before
    mapped = {inode for rank in range(2) for inode in (tmp_path / f"mapped-{rank}").read_text().split()}
    assert len(mapped) == 2
    assert not mapped & mapped_now()


def mapped_now() -> set[str]:
    """Inodes of the segments of all processes; jobs of other tests have some."""
    lines = list[str]()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # has ended, or is another user's
            lines += path.read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:mpisgd" in line}
