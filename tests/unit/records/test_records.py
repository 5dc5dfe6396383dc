"""The run log: what is written is read, also while the run goes on and after it was killed (DESIGN 6; TRAPS 8)."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpisgd.base.errors import DataError, StorageError
from mpisgd.job import resume
from mpisgd.records import directory
from mpisgd.records.log import continuing, rank_file, schema
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.reader import Run
from mpisgd.records.log.superblock import was_left_open
from mpisgd.records.log.writer import EvaluatorLog, TableFile
from tests.effort import spread
from tests.unit.fabricate import random_rows, run_of, table_file

FORK = multiprocessing.get_context("fork")
Elsewhere = Callable[[Path, str], np.ndarray]


EVENT = (0, 1, schema.Event.STOPPED, -1, 0.5, 2.0)


def seqs(path: Path) -> list[int]:
    return [int(seq) for seq in read_table(path, "pushes")["seq"]]


def answer(pipe: Connection) -> None:
    while (request := pipe.recv()) is not None:
        path, table = request
        pipe.send(read_summary(path) if table == "summary" else read_table(path, table))


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    """`read_table` in another process, as a user would; one process cannot open a file twice in different ways."""
    here, there = FORK.Pipe()
    reader = FORK.Process(target=answer, args=(there,), daemon=True)
    reader.start()

    def read(path: Path, table: str) -> np.ndarray:
        here.send((path, table))
        assert here.poll(20)
        rows: np.ndarray = here.recv()
        return rows

    yield read
    here.send(None)
    reader.join(20)


def append(file: TableFile, seq: int) -> int:
    row = np.zeros(1, schema.PUSHES)
    row["seq"] = seq
    return file.append("pushes", tuple(row[0].tolist()))


# ------------------------------------------------------------------------------------------------------------ the writer


@pytest.mark.parametrize(("flush_rows", "count"), [(1, 50), (70, 1500), (1024, 1500), (5000, 1500)])
def test_every_table_is_read_back_as_it_was_written(flush_rows: int, count: int, tmp_path: Path) -> None:
    """Across flushes and across HDF5's chunks of 1024 rows, tables in turn."""
    path = tmp_path / "shard.h5"
    written = {table: random_rows(table, count) for table, count in zip(schema.TABLES, (count, 40, 0, 3), strict=True)}
    file = table_file(path, flush_rows=flush_rows, shard=3)
    for number in range(count):
        for table, rows in written.items():
            if number < len(rows):
                assert file.append(table, tuple(rows[number].tolist())) == number
    file.close((3, 40, 160, count, count, 0))
    for table, rows in written.items():
        np.testing.assert_array_equal(read_table(path, table), rows)
    assert read_summary(path).tolist() == [(3, 40, 160, count, count, 0)]
    with h5py.File(path) as plain:  # without mpisgd
        assert plain["pushes"].shape == (count,)
        assert plain.attrs["shard"] == 3


def test_rows_are_in_memory_only_until_the_flush(tmp_path: Path, elsewhere: Elsewhere) -> None:
    path = tmp_path / "shard.h5"
    file = table_file(path, flush_rows=3)
    for seq in range(2):
        append(file, seq)
    assert len(elsewhere(path, "pushes")) == 0
    append(file, 2)
    assert elsewhere(path, "pushes")["seq"].tolist() == [0, 1, 2]
    append(file, 3)
    file.append("events", EVENT)
    assert [len(elsewhere(path, table)) for table in ("pushes", "events")] == [3, 0]
    file.flush()
    assert [len(elsewhere(path, table)) for table in ("pushes", "events")] == [4, 1]
    assert elsewhere(path, "summary")["final_clock"].tolist() == [-1]
    file.close((0, 7, 0, 0, 0, 0))
    assert elsewhere(path, "summary")["final_clock"].tolist() == [7]


def test_a_flush_comes_after_some_seconds_too(tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("mpisgd.records.log.writer.time.monotonic", lambda: now_s[0])
    path = tmp_path / "shard.h5"
    file = table_file(path, flush_s=2.0)
    for seq, second, flushed in [(0, 100.0, 0), (1, 102.0, 0), (2, 102.1, 3), (3, 104.0, 3), (4, 105.0, 5)]:
        now_s[0] = second
        append(file, seq)
        assert elsewhere(path, "pushes")["seq"].tolist() == list(range(flushed))
    file.close()


def test_a_row_is_amended_before_and_after_its_flush(tmp_path: Path) -> None:
    """The answer of a pull becomes known after its push was logged, and perhaps flushed."""
    path = tmp_path / "shard.h5"
    file = table_file(path, flush_rows=3)
    numbers = [append(file, seq) for seq in range(4)]
    assert numbers == [0, 1, 2, 3]
    for number in numbers:
        file.amend("pushes", number, "answer_s", number + 0.5)
    file.close()
    rows = read_table(path, "pushes")
    assert rows["answer_s"].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert rows["seq"].tolist() == [0, 1, 2, 3]


def test_a_log_that_is_off_keeps_nothing() -> None:
    file = table_file(None)
    assert append(file, 0) == 0
    file.amend("pushes", 0, "answer_s", 1.0)
    file.flush()
    file.close((0, 0, 0, 0, 0, 0))


def test_an_existing_file_is_never_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    table_file(path).close()
    with pytest.raises(StorageError, match="File exists"):
        table_file(path)
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_who_follows_a_writer_that_may_have_died_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "evaluator.h5"
    first = table_file(path)
    append(first, 0)
    first.flush()
    second = TableFile(path, shard=0, flush_rows=9, flush_s=1e9, instead=True)
    append(second, 7)
    second.close()
    append(first, 1)
    with pytest.raises(StorageError, match=r"evaluator\.h5 cannot be written"):
        first.flush()
    assert seqs(path) == [7]


def test_nobody_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that begins may be looked at; what is left of one that was killed meanwhile is taken away when it goes on."""
    begin, seen = TableFile._begin, []

    def looked_at(self: TableFile, file: h5py.File, *arguments: Any) -> None:
        begin(self, file, *arguments)
        seen.extend(path.name for path in tmp_path.iterdir())

    monkeypatch.setattr(TableFile, "_begin", looked_at)
    table_file(tmp_path / "shard.h5").close()
    assert seen == [".shard.h5.new"]
    assert [path.name for path in tmp_path.iterdir()] == ["shard.h5"]
    for half in (".shard.h5.new", ".log.h5.host.17", f".{schema.SPOOL}learner-1.4.host.17"):
        (tmp_path / half).write_bytes(b"half")
    resume.forget_newer(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["shard.h5"]


def test_a_log_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its superblock may promise more than is there yet: then it is looked at again."""
    file = table_file(tmp_path / schema.shard_file(0))
    append(file, 0)
    file.close()
    looked: list[Path] = []

    def short_at_first(path: Path) -> bool:
        looked.append(path)
        if len(looked) == 1:
            raise DataError(f"{path} is truncated")
        return was_left_open(path)

    monkeypatch.setattr(rank_file, "was_left_open", short_at_first)
    assert len(read_table(tmp_path / schema.shard_file(0), "pushes")) == 1


def test_an_evaluation_is_flushed_at_once_and_has_no_summary(tmp_path: Path, elsewhere: Elsewhere) -> None:
    path = tmp_path / schema.evaluator_file()
    log = EvaluatorLog(lambda: table_file(path, shard=-1))
    log.begin()
    row = random_rows("evaluations", 1)[0]
    log.evaluation(**dict(zip(schema.EVALUATIONS.names or (), row.tolist(), strict=True)))
    assert elsewhere(path, "evaluations")[0] == row
    log.close()
    assert len(read_summary(path)) == 0


# ---------------------------------------------------------------------------------------------- other processes, and kills


def write_for_ever(path: Path, told: Any) -> None:
    file = table_file(path, flush_rows=64)
    seq = 0
    while True:
        append(file, seq)
        seq += 1
        if seq % 64 == 0:
            told.send(seq)


@pytest.mark.parametrize("flushes", [1, 5, 30])
def test_a_killed_writers_rows_are_there_up_to_the_last_flush(flushes: int, tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    receiver, sender = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=write_for_ever, args=(path, sender), daemon=True)
    writer.start()
    flushed = 0
    for _ in range(flushes):
        assert receiver.poll(20)
        flushed = receiver.recv()
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join(20)
    found = seqs(path)
    assert len(found) >= flushed
    assert found == list(range(len(found)))
    assert read_summary(path)["final_clock"].tolist() == [-1]


# -------------------------------------------------------------------------------------------------------------- a whole run


def test_an_evaluators_log_that_a_loss_of_power_tore_is_passed_over(tmp_path: Path) -> None:
    """No checkpoint waits for it: what it said is evaluated again, or what came after the attempt before."""
    for attempt in range(2):
        attributes = {"attempt": attempt, "continues": np.array([[0, 0, 0, 4, 0]] if attempt else [], np.int64).reshape(-1, 5)}
        path = tmp_path / schema.evaluator_file(attempt)
        file = TableFile(path, shard=-1, flush_rows=9, flush_s=1e9, attributes=attributes)
        for number in range(2):
            row = random_rows("evaluations", 2)
            row["snapshot"] = row["clock_max"] = 2 * attempt + number
            for each in row:
                file.append("evaluations", tuple(each.tolist()))
        file.close()
    said: list[str] = []
    begun = {0: 0, 1: 1}
    anew = continuing.evaluated(tmp_path, {**begun, 2: 2}, 4, 2)
    assert anew == (3, [[0, 0, 0, 4, 0], [1, 0, 0, 2, 0]]), "attempt 2 began at clock 2, and made snapshot 3 anew"
    assert continuing.evaluated(tmp_path, begun, 4, 2, said.append) == (4, [[0, 0, 0, 4, 0], [1, 0, 0, 4, 0]])
    path.write_bytes(bytes(path.stat().st_size))
    assert continuing.evaluated(tmp_path, begun, 4, 2, said.append) == (2, [[0, 0, 0, 4, 0]])
    (tmp_path / schema.evaluator_file(0)).write_bytes(b"")
    assert continuing.evaluated(tmp_path, begun, 4, 2, said.append) == (0, [])
    assert len(said) == 3
    assert all("evaluator.attempt-" in each and each.endswith("the evaluations of this file are made again") for each in said)


@pytest.mark.parametrize("step", spread([7, 1, 10, 30], 2))
def test_rows_are_read_some_at_a_time(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = run_of(tmp_path / "run")
    monkeypatch.setattr(schema, "STEP", step)
    monkeypatch.setattr(rank_file, "_SHORT", 0)
    run = Run(tmp_path / "run")
    for table in ("pushes", "updates", "events"):
        chunks = list(run.chunks(table))
        assert max(map(len, chunks)) <= step
        np.testing.assert_array_equal(np.concatenate(chunks), np.concatenate(tables[table]))
        np.testing.assert_array_equal(run.table(table), np.concatenate(tables[table]))


def test_short_tables_are_read_once_and_a_damaged_one_keeps_no_other_from_it(tmp_path: Path) -> None:
    """Whoever looks at rows that are kept finds them when the file is gone; nobody can write to them."""
    tables = run_of(tmp_path / "run")
    path = tmp_path / "run" / schema.shard_file(0)
    with h5py.File(path, "r+") as file:
        file["updates"][0, "samples"] += 1
    rows = rank_file.Rows(path)
    assert rows.length("events") == len(tables["events"][0])
    with pytest.raises(DataError, match="table updates: the checksum of the rows does not match"):
        rows.rows("updates")
    path.unlink()
    for found in (rows.rows("pushes"), *rows.chunks("pushes")):
        np.testing.assert_array_equal(found, tables["pushes"][0])
        assert not found.flags.writeable


def test_a_missing_file_is_missed(tmp_path: Path) -> None:
    """HDF5 itself would show it as no rows."""
    run_of(tmp_path / "run")
    (tmp_path / "run" / schema.shard_file(1)).unlink()
    with pytest.raises(DataError, match=r"lacks shard-001\.attempt-0\.h5"):
        directory.join(Run(tmp_path / "run"))
    with pytest.raises(DataError, match=r"lacks shard-001\.attempt-0\.h5: was the run started without a log"):
        _ = Run(tmp_path / "run").pushes


@pytest.mark.slow
def test_a_truncated_file_is_refused_or_whole(tmp_path: Path) -> None:
    """At whatever length; never fewer rows without a word."""
    path = tmp_path / "shard.h5"
    rows = random_rows("pushes", 2000)
    file = table_file(path, flush_rows=256)
    for row in rows:
        file.append("pushes", tuple(row.tolist()))
    file.close((0, 1, 2, 3, 4, 0))
    whole = path.read_bytes()
    refused = 0
    for length in [0, 1, 100, *range(500, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:length])
        try:
            np.testing.assert_array_equal(read_table(path, "pushes"), rows)
        except DataError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 30


def test_a_truncated_file_whose_writer_was_killed_is_refused_at_once(tmp_path: Path) -> None:
    """HDF5 itself would wait, practically for ever, for a writer to complete what is missing."""
    path, copy = tmp_path / "shard.h5", tmp_path / "copy.h5"
    file = table_file(path)
    copy.write_bytes(path.read_bytes()[:1000])
    file.close()
    with pytest.raises(DataError, match=r"copy\.h5 is truncated: found 1000 bytes, expected"):
        read_table(copy, "pushes")


def foreign(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_text("clock,timestamp\n")
        return
    table_file(path).close()
    with h5py.File(path, "r+") as file:
        if kind == "no version":
            del file.attrs["schema_version"]
        elif kind == "version 1":
            file.attrs["schema_version"] = 1
        elif kind == "no table":
            del file["pushes"]
        elif kind == "no count":
            del file["committed"]
        elif kind == "other layout":
            del file["pushes"]
            file["pushes"] = np.zeros(3, [("shard", np.int64)])
        elif kind == "fewer rows":
            file["committed"][0] = 5


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "cannot be read as HDF5"),
        ("no version", "has schema version None, this mpisgd reads 4"),
        ("version 1", "has schema version 1, this mpisgd reads 4"),
        ("no table", "table pushes cannot be read"),
        ("no count", "table pushes cannot be read"),
        ("other layout", "table pushes has another layout than this mpisgd writes"),
        ("fewer rows", "table pushes has 0 rows, but 5 were committed"),
    ],
)
def test_a_foreign_file_is_refused_and_named(kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "shard.h5"
    foreign(path, kind)
    with pytest.raises(DataError, match=f"{path}.*{message}"):
        read_table(path, "pushes")


@pytest.mark.parametrize(
    ("moved", "place", "whose"),
    [
        (schema.shard_file(1), schema.shard_file(0), "shard 1 in attempt 0"),
        (schema.shard_file(1), schema.shard_file(1, 2), "shard 1 in attempt 0"),
        (schema.evaluator_file(), schema.shard_file(2), "shard -1 in attempt 0"),
    ],
)
def test_a_log_file_in_the_place_of_another_is_refused_and_named(moved: str, place: str, whose: str, tmp_path: Path) -> None:
    """Whole as it is; whoever goes on with the run would have another's rows before its own."""
    run_of(tmp_path / "run")
    (tmp_path / "run" / moved).replace(tmp_path / "run" / place)
    with pytest.raises(DataError, match=f"{place} is of {whose}"):
        read_table(tmp_path / "run" / place, "pushes")
    with pytest.raises(DataError, match=f"{place} is of {whose}"):
        continuing.check_rows(tmp_path / "run", int(place[6:9]), [[int(place[18]), 10, 0, 0, 0]])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for read in (read_summary, lambda path: read_table(path, "pushes")):
        with pytest.raises(DataError, match="cannot be read as HDF5"):
            read(tmp_path / "nowhere.h5")
