"""Checkpoints: what is written is loaded, bit for bit, or refused; never something else (DESIGN 6)."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import re
import shutil
import time
import types
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch

from mpisgd.base.errors import CheckpointError
from mpisgd.config import (
    AdagradOptions,
    AdamOptions,
    AdamwOptions,
    CheckpointOptions,
    LambOptions,
    LarsOptions,
    OptimizerOptions,
    RmspropOptions,
    SgdOptions,
)
from mpisgd.job import resume
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.checkpoint.checkpoints import Checkpoints, Share, remove
from mpisgd.records.log import schema
from mpisgd.update.average import Average
from mpisgd.update.compensation import Compensation
from mpisgd.update.slice_update import SliceUpdate
from tests.effort import thinned
from tests.unit.update.give import give

SIZE = 50
OPTIMIZERS = {
    "sgd": SgdOptions(momentum=0.0),
    "momentum": SgdOptions(momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": AdagradOptions(),
    "rmsprop": RmspropOptions(momentum=0.5),
    "adam": AdamOptions(),
    "adamw": AdamwOptions(),
    "lars": LarsOptions(),
    "lamb": LambOptions(),
}


def make_update(
    options: OptimizerOptions | None = None, size: int = SIZE, averaging: float = 0.9, dc: float = 0.0, corrected: bool = False
) -> SliceUpdate:
    weights = torch.arange(size, dtype=torch.float32)
    return SliceUpdate(
        weights,
        options or SgdOptions(),
        learning_rate=0.1,
        schedule=lambda epochs: 1 / (1 + epochs),
        train_samples=8,
        average=Average.of(weights, averaging, corrected),
        compensation=Compensation(weights, dc, 0.5) if dc else None,
    )


def go_on(update: SliceUpdate, first: int, updates: int) -> None:
    for number in range(first, first + updates):
        if update.compensation is not None:
            update.compensation.given(0, number)
        give(update, np.random.default_rng(number).normal(size=len(update.weights)), 1.0, 4, timestamp=number)
        update.step()


def checkpoints(run: Path, update: SliceUpdate, shard: int = 0, shards: int = 1, **special: Any) -> Checkpoints:
    size = len(update.weights)
    beside = {name: special.pop(name) for name in ("beside", "complain") if name in special}
    share = Share(run, shard, bounds=(size * shard, size * (shard + 1)), shards=shards, learners=2, model="3 (abc)", **special)
    return Checkpoints(share, CheckpointOptions(every_updates=10, keep=2), update, **beside)


def take(writer: Checkpoints, clock: int, **special: Any) -> None:
    account = {"now_s": clock / 10, "received": 2 * clock, "applied_seq": [clock - 1] * 2, "next_seq": [clock] * 2}
    account |= {"rows": [2 * clock, clock, 0, 1], "snapshots": [(0, 0, 0.0)], "diverged": False, **special}
    writer.due(clock)
    writer.wait()
    writer.take(clock=clock, **account)  # type: ignore[arg-type]
    writer.wait()


def clocks(run: Path) -> list[int]:
    return [int(path.name.removeprefix("clock-")) for path in disk.directories(run)]


# ----------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dc", [0.0, 0.5])
def test_a_run_goes_on_with_the_same_bits(name: str, dc: float, tmp_path: Path) -> None:
    corrected = dc > 0
    whole, cut = (make_update(OPTIMIZERS[name], dc=dc, corrected=corrected) for _ in range(2))
    for update in (whole, cut):
        go_on(update, 0, 7)
    take(checkpoints(tmp_path, cut), 10)
    go_on(cut, 100, 3)  # what comes after is lost
    found = disk.newest(tmp_path)
    again = make_update(OPTIMIZERS[name], dc=dc, corrected=corrected)
    again.restore({key: torch.from_numpy(value) for key, value in found.tensors(0).items()}, found.parts[0].account.samples)
    assert (again.samples, again.learning_rate) == (whole.samples, whole.learning_rate)
    for update in (whole, again):
        go_on(update, 7, 5)
    assert whole.state().keys() == again.state().keys()
    for key, value in whole.state().items():
        assert torch.equal(value, again.state()[key]), key
    assert len(whole.state()) >= 2 + (name != "sgd") + 2 * (dc > 0)


@pytest.mark.parametrize(
    "shapes",
    [[], [()], [(0,)], [(7,), (), (7,)], [(3,), (0, 4), (5,)], [(600, 900), (), (2, 3, 4)], [(300_000,)] * 9, [(1,)] * 300],
    ids=range(8),
)
def test_the_bytes_and_the_sum_that_are_told_are_those_of_the_file(shapes: list[tuple[int, ...]], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"{-number}": rng.normal(size=shape).astype(np.float32) for number, shape in enumerate(shapes)}
    path = tmp_path / "part.h5"
    nbytes, crc32 = disk.write_tensors(path, tensors, {"clock": 10, "shard": 0})
    content = path.read_bytes()
    assert (nbytes, crc32) == (len(content), zlib.crc32(content))
    with h5py.File(path) as file:
        assert dict(file.attrs) == {"clock": 10, "shard": 0} and file.keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(file[name][()], tensor)


def test_what_the_account_says_comes_back(tmp_path: Path) -> None:
    update = make_update()
    writer = checkpoints(tmp_path, update, attempt=3, continues=[[0, 5, 2, 0, 1]])
    take(writer, 10, applied_seq=[4, 7], next_seq=[5, 9], snapshots=[(0, 0, 0.1), (8, 32, 1 / 3)], diverged=True)
    found = disk.newest(tmp_path)
    account = found.parts[0].account
    assert (found.clock, found.attempt, found.learners, found.model) == (10, 3, 2, "3 (abc)")
    assert (account.bounds, account.applied_seq, account.next_seq, account.diverged) == ((0, SIZE), [4, 7], [5, 9], True)
    assert account.rows == [[0, 5, 2, 0, 1], [3, 20, 10, 0, 1]]
    assert account.snapshots == [[0, 0, 0.1], [8, 32, 1 / 3]]
    with h5py.File(found.path / disk.part_file(0)) as file:  # as anybody may read it
        assert dict(file.attrs) == {"clock": 10, "shard": 0, "attempt": 3}
        np.testing.assert_array_equal(file["weights"][:], update.weights)


def test_learners_go_on_with_what_any_shard_lacks(tmp_path: Path) -> None:
    for shard, wanted in enumerate(([5, 9, 2], [6, 7, 2])):
        take(checkpoints(tmp_path, make_update(), shard, 2), 10, next_seq=wanted, now_s=1.0 + shard)
    found = disk.newest(tmp_path)
    assert (found.next_seq, found.now_s) == ([5, 7, 2], 2.0)


def test_another_optimiser_is_refused() -> None:
    adam, momentum = make_update(AdamOptions()), make_update()
    go_on(adam, 0, 1)
    with pytest.raises(CheckpointError, match="exp_avg, exp_avg_sq, step, not kept by SGD"):
        momentum.restore(adam.state(), 4)
    with pytest.raises(CheckpointError, match="has averaged, weights: expected weights"):
        make_update(averaging=0.0).restore(momentum.state(), 4)
    with pytest.raises(CheckpointError, match=r"weights has shape \(50,\), expected \(49,\)"):
        make_update(size=49).restore(momentum.state(), 4)


# --------------------------------------------------------------------------------------------------- which one is loaded


def test_the_newest_that_is_complete_and_the_rest_is_pruned(tmp_path: Path) -> None:
    writers = [checkpoints(tmp_path, make_update(), shard, 2, pinned={10}) for shard in (0, 1)]
    for clock in (10, 20, 30, 40):
        for writer in writers:
            take(writer, clock)
    assert clocks(tmp_path) == [40, 30, 10], "two are kept, and that which the run was continued from"
    take(writers[1], 50)
    assert disk.newest(tmp_path).clock == 40, "shard 0 did not come so far"
    assert clocks(tmp_path) == [50, 40, 30, 10]
    take(writers[0], 50)
    assert disk.newest(tmp_path).clock == 50
    take(writers[0], 60)
    for writer in writers:
        take(writer, 70)
    assert clocks(tmp_path) == [70, 60, 50, 10], "one that stayed incomplete is no better than none"
    assert [path.name for path in tmp_path.rglob(".*")] == [], "nothing is left aside"


def test_parts_of_two_attempts_make_no_checkpoint(tmp_path: Path) -> None:
    take(checkpoints(tmp_path, make_update(), 0, 2), 10)
    take(checkpoints(tmp_path, make_update(), 1, 2, attempt=1), 10)
    with pytest.raises(CheckpointError, match="has no complete checkpoint, and cannot be continued"):
        disk.newest(tmp_path)


def test_they_are_due_at_multiples(tmp_path: Path) -> None:
    writer = checkpoints(tmp_path, make_update())
    assert [clock for clock in range(1, 25) if writer.due(clock)] == [10, 20]


def exponent_flipped(path: Path) -> None:
    """No JSON has such a number: it is infinite."""
    text, count = re.subn(r'("now_s": )[^,]*', r"\g<1>1e999", path.read_text(), count=1)
    assert count
    path.write_text(text)


DAMAGE = {
    "manifest.json is missing": lambda path: (path / disk.MANIFEST).unlink(),
    "manifest.json is torn": lambda path: os.truncate(path / disk.MANIFEST, 100),
    "manifest.json is torn: ValueError": lambda path: exponent_flipped(path / disk.MANIFEST),
    "shard-001.h5 cannot be read": lambda path: (path / disk.part_file(1)).unlink(),
    "shard-001.h5 is torn: 1000 bytes": lambda path: os.truncate(path / disk.part_file(1), 1000),
    "shard-000.h5 is torn": lambda path: (path / disk.part_file(0)).write_bytes((path / disk.part_file(1)).read_bytes()),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_one_that_is_torn_is_passed_over(why: str, tmp_path: Path) -> None:
    updates = [make_update(), make_update()]
    go_on(updates[1], 0, 1)
    for clock in (10, 20):
        for shard, update in enumerate(updates):
            take(checkpoints(tmp_path, update, shard, 2), clock)
    DAMAGE[why](disk.directory_of(tmp_path, 20))
    said: list[str] = []
    assert disk.newest(tmp_path, said.append).clock == 10
    assert len(said) == 1
    assert said[0].startswith("clock-000020 is passed over: ")
    assert why in said[0]


@pytest.mark.parametrize("name", ["shard-000.h5", "manifest.json"])
def test_no_flipped_bit_goes_unseen(name: str, tmp_path: Path) -> None:
    update = make_update(AdamOptions())
    go_on(update, 0, 2)
    take(checkpoints(tmp_path, update), 10)
    path = disk.directory_of(tmp_path, 10) / name
    whole = path.read_bytes()
    disk.newest(tmp_path)
    generator = random.Random(1)
    for place in generator.sample(range(len(whole)), 200):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << generator.randrange(8)
        path.write_bytes(spoilt)
        with pytest.raises(CheckpointError):
            disk.newest(tmp_path)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            disk.newest(tmp_path)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("text", r"optimizer\.step is no data set of float32"),
        ("link", r"optimizer\.step is a link: links are not followed"),
        ("outside", r"optimizer\.step lies in other files"),
        ("empty", r"optimizer\.step is no data set of float32, or larger than the file"),
    ],
)
def test_only_numbers_are_read(what: str, why: str, tmp_path: Path) -> None:
    """A part that somebody else made, with sums that fit: no objects, no links, nothing that is executed, or fills the memory."""
    take(checkpoints(tmp_path, make_update()), 10)
    path = disk.directory_of(tmp_path, 10)
    with h5py.File(path / disk.part_file(0), "a") as file:
        if what == "text":
            file.create_dataset("optimizer.step", data=np.array([b"cos\nsystem\n(S'false'\ntR."]))
        elif what == "link":
            file["optimizer.step"] = h5py.ExternalLink("/elsewhere.h5", "/weights")
        elif what == "empty":
            file.create_dataset("optimizer.step", (2**50,), np.float32, chunks=(1024,))
        else:
            file.create_dataset("optimizer.step", (3,), np.float32, external=[("/elsewhere", 0, 12)])
    content = (path / disk.part_file(0)).read_bytes()
    table = disk.read_json(path / disk.MANIFEST)
    table["parts"][0] |= {"nbytes": len(content), "crc32": disk.zlib.crc32(content)}
    disk.write_json(path / disk.MANIFEST, table)
    with pytest.raises(CheckpointError, match=why):
        disk.read(path).tensors(0)


def test_where_none_is_whole_each_is_named(tmp_path: Path) -> None:
    """The newest may be one that a killed job has only begun."""
    take(checkpoints(tmp_path, make_update()), 10)
    path = disk.directory_of(tmp_path, 10) / disk.part_file(0)
    path.write_bytes(path.read_bytes()[:-1])
    disk.directory_of(tmp_path, 20).mkdir()
    with pytest.raises(CheckpointError, match=f"clock-000020: manifest.json is missing; clock-000010: {path} is torn"):
        disk.newest(tmp_path)


def test_a_checkpoint_in_the_place_of_another_is_passed_over(tmp_path: Path) -> None:
    """Whole as it is: what comes before it in the log, and what is removed after it, is of another clock."""
    update = make_update()
    writer = checkpoints(tmp_path, update)
    take(writer, 10)
    take(writer, 20)
    path = disk.directory_of(tmp_path, 20)
    shutil.rmtree(path)
    shutil.copytree(disk.directory_of(tmp_path, 10), path)
    complaints: list[str] = []
    assert disk.newest(tmp_path, complaints.append).clock == 10
    (why,) = complaints
    assert str(path / disk.MANIFEST) in why
    assert "is of clock 10" in why


def test_a_manifest_of_another_time(tmp_path: Path) -> None:
    take(checkpoints(tmp_path, make_update()), 10)
    path = disk.directory_of(tmp_path, 10) / disk.MANIFEST
    table = disk.read_json(path)
    disk.write_json(path, {**table, "schema_version": 99})
    with pytest.raises(CheckpointError, match=f"schema version 99, this mpisgd reads {schema.SCHEMA_VERSION}"):
        disk.read(path.parent)
    del table["learners"]
    disk.write_json(path, table)
    with pytest.raises(CheckpointError, match="is no manifest: KeyError: 'learners'"):
        disk.read(path.parent)


def test_counts_that_an_earlier_mpisgd_wrote_are_passed_over(tmp_path: Path) -> None:
    take(checkpoints(tmp_path, make_update()), 10)
    path = disk.directory_of(tmp_path, 10) / disk.MANIFEST
    before, table = disk.read(path.parent), disk.read_json(path)
    table["parts"][0]["account"]["counts"] = []
    disk.write_json(path, table)
    assert disk.read(path.parent) == before


# -------------------------------------------------------------------------------------------------- writing beside the loop


def test_the_copy_is_of_its_moment(tmp_path: Path) -> None:
    """The shard goes on while the thread writes."""
    update = make_update(size=2_000_000)
    writer = checkpoints(tmp_path, update)
    before = update.weights.clone()
    writer.due(10)
    writer.wait()
    writer.take(clock=10, now_s=1.0, received=1, applied_seq=[0], next_seq=[1], rows=[0] * 4, snapshots=[], diverged=False)
    update.weights.fill_(-1.0)
    writer.wait()
    np.testing.assert_array_equal(disk.newest(tmp_path).tensors(0)["weights"], before)


def test_what_cannot_be_written_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writer = checkpoints(tmp_path, make_update(), complain=said.append)
    take(writer, 10)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr("mpisgd.base.durable.os.fsync", Mock(side_effect=[None, None, full, full]))
        for clock in (20, 30):  # after the tensors have been written, and before
            take(writer, clock)
            assert not writer.busy()
    assert disk.newest(tmp_path).clock == 10
    assert [path.name for path in disk.directories(tmp_path)] == ["clock-000010"], "the room of what is incomplete is given back"
    take(writer, 40)
    assert disk.newest(tmp_path).clock == 40
    assert writer.lost() == [20, 30]
    assert writer.lost() == [], "each is told once"
    assert said == [
        f"the checkpoint of clock 20 could not be written: {disk.directory_of(tmp_path, 20)}: No space left on device: make room;"
        " training goes on, and tries again at the next",
        "the checkpoint of clock 40 could be written again",
    ]


def test_a_run_that_has_vanished_is_not_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "run").mkdir()
    writer = checkpoints(tmp_path / "run", make_update(), complain=said.append)
    (tmp_path / "run").rmdir()
    take(writer, 10)
    assert not list(tmp_path.iterdir())
    assert "No such file or directory: check that the file system is mounted" in said[0]


def test_a_bug_in_the_thread_is_no_full_disk(tmp_path: Path) -> None:
    writer = checkpoints(tmp_path, make_update())
    with pytest.raises(CheckpointError, match=r"could not be made: .*JSON"):
        take(writer, 10, now_s=float("nan"))


def test_the_way_on(tmp_path: Path) -> None:
    assert disk.way_on(tmp_path) == "", "no run yet"
    (tmp_path / schema.CONFIG).write_text("")
    assert disk.way_on(tmp_path) == f"{tmp_path} has no complete checkpoint to go on from: begin anew with --overwrite"
    writer = checkpoints(tmp_path, make_update())
    take(writer, 10)
    take(writer, 20)
    assert disk.way_on(tmp_path) == f"to go on from the checkpoint of clock 20: mpisgd train --resume {tmp_path}"
    told = disk.way_on(tmp_path, 1_037, f"mpirun -n 4 mpisgd train --resume {tmp_path}")
    lost = "1,017 later updates are lost, as far as is known here"
    assert told == f"to go on from the checkpoint of clock 20 ({lost}): mpirun -n 4 mpisgd train --resume {tmp_path}"
    assert "(0 later updates are lost" in disk.way_on(tmp_path, 19), "a learner may know less than the checkpoint"
    (disk.directory_of(tmp_path, 20) / disk.MANIFEST).unlink()
    assert "of clock 10:" in disk.way_on(tmp_path)
    (tmp_path / schema.DONE).write_text("{}")
    assert disk.way_on(tmp_path) == ""


def test_the_newest_is_that_of_the_largest_clock_not_of_the_latest_date(tmp_path: Path) -> None:
    writer = checkpoints(tmp_path, make_update())
    for clock in (10, 20, 30, 40):
        take(writer, clock)
        for path in (disk.directory_of(tmp_path, clock), *disk.directory_of(tmp_path, clock).iterdir()):
            os.utime(path, (2e9 - 1e6 * clock,) * 2)
    assert [path.name for path in disk.directories(tmp_path)] == ["clock-000040", "clock-000030"]
    assert disk.newest(tmp_path).clock == 40


def test_a_folder_of_the_users_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / schema.CHECKPOINTS / "clock-mine").mkdir(parents=True)
    assert disk.directories(tmp_path) == []


def write_on(run: Path, first: int) -> None:
    """Both shards of a job, until it is killed."""
    writers = [checkpoints(run, make_update(size=20_000), shard, 2) for shard in (0, 1)]
    for clock in range(first, first + 10_000):
        for writer in writers:
            take(writer, clock)


@pytest.mark.deeper
def test_whenever_it_is_killed_the_newest_that_is_complete_loads(tmp_path: Path) -> None:
    generator, newest = random.Random(2), 0
    for _ in thinned(range(8), 3):
        job = multiprocessing.get_context("fork").Process(target=write_on, args=(tmp_path, newest + 1))
        job.start()
        deadline_s = time.monotonic() + 20
        while max(clocks(tmp_path), default=0) <= newest + 1 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.03))
        job.kill()
        job.join()
        before, newest = newest, disk.newest(tmp_path).clock
        assert newest > before
        assert newest >= max(clocks(tmp_path)) - 1, "all but the one that was being written"
        for path in disk.directories(tmp_path):  # as the run that goes on does
            if int(path.name.removeprefix("clock-")) > newest:
                remove(path)


def test_teams_of_other_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many learners as before, but one of them with a rank less."""
    monkeypatch.setattr(resume, "Run", lambda path: types.SimpleNamespace(teams=[[1, 2], [3, 4]]))
    resume.check_teams(Path("run"), [(1, 2), (3, 4)])
    with pytest.raises(CheckpointError, match=r"run had teams of \[2, 2\] ranks, here \[2, 1\]"):
        resume.check_teams(Path("run"), [(1, 2), (3,)])
