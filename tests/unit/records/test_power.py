"""What a loss of power leaves: a file system forgets what was not synced (`tests/faults/power.py`, which cuts real ranks)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpisgd.config.config_file import from_mapping
from mpisgd.records import directory
from mpisgd.records.checkpoint import checkpoint as checkpoints
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.writer import TableFile
from mpisgd.simulate import simulate
from tests.faults import flips, power
from tests.faults.campaign import Found


@pytest.fixture(scope="module")
def why_not(tmp_path_factory: pytest.TempPathFactory) -> str:
    return power.why_not(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def disk(tmp_path: Path, why_not: str) -> Iterator[power.Disk]:
    if why_not:
        pytest.skip(why_not)
    disk = power.Disk(tmp_path)
    yield disk
    disk.close()


def test_it_forgets_what_was_not_synced(disk: power.Disk) -> None:
    """The tool itself."""
    (disk.path / "forgotten").write_text("x")
    with (disk.path / "kept").open("w") as file:
        file.write("y")
        file.flush()
        os.fsync(file.fileno())
    with (disk.path / "kept").open("a") as file:
        file.write("z")
    disk.cut()
    disk.back()
    assert (disk.path / "kept").read_text() == "y"
    assert not (disk.path / "forgotten").exists() or not (disk.path / "forgotten").read_text()


def test_it_is_back_for_us_though_another_namespace_holds_it(disk: power.Disk) -> None:
    """As a test beside this one does that makes nodes of its own."""
    (disk.path / "kept").write_text("y")
    disk.write_back()
    holder = ["unshare", "--mount", "--propagation", "private", "cat"]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdin.write(b"\n")
        other.stdin.flush()
        other.stdout.read(1)
        disk.cut()
        disk.back()
        assert (disk.path / "kept").read_text() == "y"
        other.stdin.close()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("shards", [3, pytest.param(1, marks=pytest.mark.rare)])
def test_done_is_true_of_what_is_on_the_disk(shards: int, disk: power.Disk) -> None:
    """Cut at the moment when the run has ended."""
    out = disk.path / "runs" / "one"
    table = {"model": "softmax", "epochs": 0.5, "shards": shards, "virtual": {"learners": 3}, "log": {"progress": "off"}}
    simulate(from_mapping({**table, "threads": 1, "out": str(out)}))
    disk.cut()
    disk.back()
    assert (out / schema.DONE).is_file()
    found = Found()
    power.look(out, found)
    assert found.failures == []


def begun(run: Path) -> TableFile:
    """A run of two shards that is under way, with a checkpoint; the log of one shard stays open."""
    directory.claim(run, overwrite=False)
    directory.write_config(run, "shards = 2\n[environment]\nlearners = 3\n")
    files = [TableFile(run / schema.shard_file(shard), shard=shard, flush_rows=9, flush_s=1e9) for shard in range(2)]
    files[1].close()
    for shard in range(2):
        flips.checkpoint(run, shard, 8)
    return files[0]


def test_a_checkpoint_can_be_gone_on_with(disk: power.Disk) -> None:
    """What it needs besides itself is there, too: config.toml, the logs; and the lock says who held it."""
    run = disk.path / "run"
    pid = os.fork()
    if pid == 0:
        try:
            begun(run)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    disk.cut()
    disk.back()
    assert checkpoints.newest(run).clock == 8
    assert Run(run).lambda_ == 3
    assert len(Run(run).pushes) == 0
    Lock(run).release()
