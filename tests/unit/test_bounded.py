"""A log with a bound (`log.max_bytes`): which rows it keeps, and that its counts are those of all."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import ConfigError
from mpisgd.config import LEAST_LOG_BYTES, LogOptions
from mpisgd.records.log import continuing, schema
from mpisgd.records.log import counts as counting
from mpisgd.records.log.bounded import BoundedFile, open_tables, room_of
from mpisgd.records.log.counts import Counts
from mpisgd.records.log.rank_file import read_table
from mpisgd.records.log.schema import Verdict
from mpisgd.records.log.thinning import Thinning
from mpisgd.records.log.writer import TableFile
from tests.effort import examples

# -------------------------------------------------------------------------------------------------------------- the rule


def test_the_rule_by_hand() -> None:
    """Eight rows of room: 0 to 3; two of every 4th from 4 on; one of every 16th from 12 on, which stands for 12 to 27; one more."""
    rule = Thinning(8)
    assert [number for number in range(200) if rule.is_kept(number)] == [0, 1, 2, 3, 4, 8, 12, 28] == rule.numbers(0, 8).tolist()
    assert rule.every(0, 8).tolist() == [1, 1, 1, 1, 4, 4, 16, 64]
    assert rule.stretches(6) == [(0, 1), (4, 4)]
    assert rule.whole == 4
    assert Thinning(0).kept(100) == 0


@settings(deadline=None)
@given(room=st.integers(1, 3000), count=st.integers(0, 20_000), cuts=st.lists(st.integers(0, 20_000), max_size=5))
def test_rows_stand_for_all(room: int, count: int, cuts: list[int]) -> None:
    """However rows are flushed: never more than there is room for, each k four times the one before, none left uncounted."""
    rule = Thinning(room)
    at = sorted({0, count, *(cut for cut in cuts if cut < count)})
    kept = [start + int(place) for start, stop in pairwise(at) for place in rule.chosen(start, stop - start)]
    assert kept == rule.numbers(0, len(kept)).tolist() == [number for number in range(count) if rule.is_kept(number)]
    assert len(kept) == rule.kept(count) <= room
    every = rule.every(0, len(kept))
    assert all(more in (1, 4) for more in every[1:] // every[:-1])
    if len(kept) < room:  # each stands for itself and those until the next
        assert np.diff(kept).tolist() == every[:-1].tolist()
        assert not count or kept[-1] < count <= kept[-1] + every[-1]
    assert room == 1 or (len(kept) == count) == (len(kept) <= rule.whole or kept[-1] == count - 1 == rule.whole)


@pytest.mark.parametrize("room", [1 << 62, 7_000_000])
def test_the_rule_goes_far(room: int) -> None:
    rule = Thinning(room)
    assert rule.kept(10**9) <= room
    assert rule.kept(10**9) > rule.kept(10**9 // 2), "a billion rows in a gigabyte, and still some are kept"


def test_a_bound_that_holds_nothing_is_refused() -> None:
    LogOptions(max_bytes=LEAST_LOG_BYTES)
    for few in (1, LEAST_LOG_BYTES - 1, -1):
        with pytest.raises(ConfigError, match=rf"log\.max_bytes = {few}: expected"):
            LogOptions(max_bytes=few)
    assert min(room_of(LEAST_LOG_BYTES).values()) >= 1024


# -------------------------------------------------------------------------------------------------------------- the file


def rows_of(count: int, seed: int, learners: int = 3) -> dict[str, np.ndarray]:
    """Pushes and updates as a shard has them: clocks never fall, some pushes are dropped, the last are late."""
    random = np.random.default_rng(seed)
    pushes, updates = np.zeros(count, schema.PUSHES), np.zeros(count // 2, schema.UPDATES)
    pushes["clock"] = np.minimum(np.arange(count) // 2, len(updates))
    pushes["staleness"] = np.minimum(random.geometric(0.3, count) - 1, pushes["clock"])
    pushes["learner_id"], pushes["seq"] = random.integers(0, learners, count), np.arange(count)
    pushes["gradients"] = random.integers(1, 4, count)
    pushes["verdict"] = random.choice([Verdict.APPLY, Verdict.APPLY, Verdict.DROP, Verdict.REJECT], count)
    pushes["verdict"][-2:] = Verdict.LATE
    pushes["answer_s"] = np.nan
    updates["clock"], updates["samples"] = 1 + np.arange(len(updates)), 4 * (1 + np.arange(len(updates)))
    updates["gradients"], updates["time_s"] = random.integers(0, 9, len(updates)), np.arange(len(updates)) / 7
    updates["update_s"] = 0.25
    return {"pushes": pushes, "updates": updates}


def append(file: TableFile, rows: dict[str, np.ndarray], start: int = 0, stop: int | None = None) -> None:
    """As a shard does: an update after its pushes; and each push is answered, some when it is on disk already."""
    waiting = []
    for number, row in enumerate(rows["pushes"][start:stop].tolist(), start):
        waiting.append((file.append("pushes", row), number))
        if number % 2 and number // 2 < len(rows["updates"]):
            file.append("updates", rows["updates"][number // 2].tolist())
        if len(waiting) > 40:
            place, earlier = waiting.pop(0)
            file.amend("pushes", place, "answer_s", float(earlier))


def counted(path: Path) -> Counts:
    with h5py.File(path, swmr=True) as file:
        return counting.read(str(path), file)


def direct(rows: dict[str, np.ndarray]) -> Counts:
    found = Counts()
    found.pushes.add(rows["pushes"])
    found.updates.add(rows["updates"])
    return found


@pytest.mark.deeper
@settings(max_examples=examples(60, 10), deadline=None)
@given(count=st.integers(0, 12_000), flush_rows=st.integers(1, 700), extra=st.integers(0, 1 << 20), seed=st.integers(0, 9))
def test_the_file_is_bounded_and_its_counts_are_exact(
    tmp_path_factory: pytest.TempPathFactory, count: int, flush_rows: int, extra: int, seed: int
) -> None:
    path, most = tmp_path_factory.mktemp("log") / schema.shard_file(0), LEAST_LOG_BYTES + extra
    rows = rows_of(count, seed)
    file = BoundedFile(path, max_bytes=most, shard=0, flush_rows=max(flush_rows, count // 100 + 1), flush_s=1e9)
    append(file, rows)
    file.close((0, 0, 0, count, count, 0))
    assert path.stat().st_size <= most
    assert counted(path).numbers().tolist() == direct(rows).numbers().tolist()
    for table, room in room_of(most).items():
        kept, rule = read_table(path, table), Thinning(room)
        numbers = rule.numbers(0, rule.kept(len(rows[table])))
        if table == "pushes":
            answered = numbers < count - 40
            assert kept["answer_s"][answered].tolist() == numbers[answered].tolist(), "amended where they are"
            kept["answer_s"] = np.nan
        assert kept.tobytes() == rows[table][numbers].tobytes()


def test_counts_by_hand() -> None:
    """Learner 0: applied, dropped, in flight; learner 1: rejected, then applied in the same update, late."""
    pushes = np.zeros(6, schema.PUSHES)
    pushes["learner_id"] = [0, 1, 0, 1, 0, 1]
    pushes["verdict"] = [Verdict.APPLY, Verdict.REJECT, Verdict.DROP, Verdict.APPLY, Verdict.APPLY, Verdict.LATE]
    pushes["clock"] = [4, 4, 4, 4, 5, 5]
    pushes["staleness"] = [1, 0, 9, 3, 7, 0]
    pushes["gradients"] = 2
    found = Counts()
    found.pushes.add(pushes)
    assert found.pushes.books(5).tolist() == [[3, 1, 1, 0, 1], [3, 1, 0, 1, 1]]
    assert found.pushes.books(6).tolist() == [[3, 2, 1, 0, 0], [3, 1, 0, 1, 1]]
    assert found.pushes.applied(5).staleness.tolist() == [0, 1, 0, 1]
    assert found.pushes.applied(5).learners.tolist() == [[1, 1], [1, 3]]
    assert found.pushes.applied(6).gradients == 6


def test_a_checkpoint_has_the_counts_of_its_clock_and_the_next_attempt_goes_on_from_them(tmp_path: Path) -> None:
    """Whatever was flushed after the mark, or lies in the same flush."""
    rows = rows_of(9000, seed=3)
    for mark, ends in ((5000, 5000), (5000, 5002), (5000, 7000), (4864, 9000)):
        first = BoundedFile(tmp_path / f"{mark}-{ends}.h5", max_bytes=LEAST_LOG_BYTES, shard=0, flush_rows=256, flush_s=1e9)
        append(first, rows, 0, mark)
        before = first.rows()
        append(first, rows, mark, ends)
        first.flush()
        numbers = json.loads(json.dumps(first.counts()))
        at_mark = {"pushes": rows["pushes"][:mark], "updates": rows["updates"][: mark // 2]}
        assert numbers == direct(at_mark).numbers().tolist()
        assert before[0] == Thinning(room_of(LEAST_LOG_BYTES)["pushes"]).kept(mark)
        path = tmp_path / f"{mark}-{ends}-on.h5"
        on = open_tables(path, max_bytes=0, counts=numbers, shard=0, flush_rows=256, flush_s=1e9)
        append(on, rows, mark)
        on.close()
        assert counted(path).numbers().tolist() == direct(rows).numbers().tolist()
        assert len(read_table(path, "pushes")) == 9000 - mark, "without a bound all that come are kept"


def test_rows_before_a_bound_was_asked_for_are_counted(tmp_path: Path) -> None:
    """`--resume` with `--log.max-bytes`: of the rows that belong to the run, those before its checkpoint."""
    rows = rows_of(3000, seed=2)
    for attempt, (start, stop) in enumerate(((0, 2000), (2000, 3000))):
        path, attributes = tmp_path / schema.shard_file(0, attempt), {"attempt": attempt}
        file = TableFile(path, shard=0, flush_rows=256, flush_s=1e9, attributes=attributes)
        append(file, rows, start, stop)
        file.close()
    before = {"pushes": rows["pushes"][:2500], "updates": rows["updates"][:1250]}
    assert continuing.counted(tmp_path, 0, [[0, 2000, 1000, 0, 0], [1, 500, 250, 0, 0]]) == direct(before).numbers().tolist()


def test_a_killed_writer_leaves_the_counts_of_its_last_flush(tmp_path: Path) -> None:
    path, rows = tmp_path / schema.shard_file(0), rows_of(9000, seed=1)
    child = os.fork()
    if child == 0:
        file = BoundedFile(path, max_bytes=LEAST_LOG_BYTES, shard=0, flush_rows=1000, flush_s=1e9)
        append(file, rows, 0, 8500)
        os._exit(0)
    os.waitpid(child, 0)
    # The push fills the buffer before the update that it makes is told.
    as_of = {"pushes": rows["pushes"][:8000], "updates": rows["updates"][:3999]}
    assert counted(path).numbers().tolist() == direct(as_of).numbers().tolist()


def test_counts_that_are_torn_are_those_of_the_flush_before(tmp_path: Path) -> None:
    path, rows = tmp_path / schema.shard_file(0), rows_of(600, seed=1)
    file = BoundedFile(path, max_bytes=LEAST_LOG_BYTES, shard=0, flush_rows=100, flush_s=1e9)
    append(file, rows, 0, 400)
    file.flush()
    before = counted(path).numbers().tolist()
    append(file, rows, 400, 450)
    file.close()
    with h5py.File(path, "r+") as there:
        newest = max(counting.SLOTS, key=lambda name: int(there[name][0]))
        there[newest][9] += 1
    assert counted(path).numbers().tolist() == before


def test_without_a_bound_the_file_has_nothing_more(tmp_path: Path) -> None:
    file = open_tables(tmp_path / "a.h5", max_bytes=0, shard=0, flush_rows=9, flush_s=1e9)
    assert type(file) is TableFile
    file.close()
    with h5py.File(tmp_path / "a.h5") as there:
        assert set(there) == {*schema.TABLES, "committed", "sums", "closing", "summary"}
        assert "room" not in there.attrs
