"""The run log: what is written is read, also while the run goes on and after it was killed (DESIGN 6; TRAPS 8)."""

from __future__ import annotations

import json
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

from mpisgd.base.errors import ConfigError, DataError, StorageError
from mpisgd.config import config_file
from mpisgd.job import resume
from mpisgd.records import directory
from mpisgd.records.lock import Lock
from mpisgd.records.log import continuing, rank_file, schema
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.reader import Run
from mpisgd.records.log.superblock import was_left_open
from mpisgd.records.log.writer import EvaluatorLog, TableFile

FORK = multiprocessing.get_context("fork")
Elsewhere = Callable[[Path, str], np.ndarray]
EVENT = (0, 1, schema.Event.STOPPED, -1, 0.5, 2.0)


def random_rows(table: str, count: int, seed: int = 0) -> np.ndarray:
    """Rows of which every byte matters; floats are finite, so that they compare equal."""
    random = np.random.default_rng(seed)
    rows = np.zeros(count, schema.TABLES[table])
    for name in schema.TABLES[table].names or ():
        whole = rows.dtype[name].kind != "f"
        rows[name] = random.integers(0, 100, count) if whole else random.normal(size=count)
    return rows


def table_file(path: Path | None, *, flush_rows: int = 1000, flush_s: float = 1e9, shard: int = 0) -> TableFile:
    return TableFile(path, shard=shard, flush_rows=flush_rows, flush_s=flush_s)


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
    (tmp_path / ".shard.h5.new").write_bytes(b"half")
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


def run_of(path: Path, shards: int = 3) -> dict[str, list[np.ndarray]]:
    """A directory as a run leaves it, but for log.h5; returns its tables, file by file."""
    directory.claim(path, overwrite=False)
    directory.write_config(path, f"shards = {shards}\n[environment]\nlearners = 2\n")
    tables: dict[str, list[np.ndarray]] = {table: [] for table in schema.TABLES}
    for place, name in enumerate([*map(schema.shard_file, range(shards)), schema.evaluator_file()]):
        last = place == shards
        file = table_file(path / name, shard=-1 if last else place)
        for table in schema.TABLES:
            count = ((table == "evaluations") is last and (3 + place) * 10) or 0
            rows = random_rows(table, count, seed=place)
            rows[(rows.dtype.names or ("shard",))[0]] = place
            for row in rows:
                file.append(table, tuple(row.tolist()))
            tables[table].append(rows)
        file.close(None if last else (place, 30, 120, 30, 30, 0))
    return tables


def test_the_joined_log_is_the_concatenation_and_can_be_moved(tmp_path: Path) -> None:
    tables = run_of(tmp_path / "run")
    directory.join(tmp_path / "run", 3)
    (tmp_path / "run").rename(tmp_path / "moved")
    with h5py.File(tmp_path / "moved" / schema.LOG, "r") as log:
        assert log.attrs["schema_version"] == schema.SCHEMA_VERSION
        for table, parts in tables.items():
            np.testing.assert_array_equal(log[table][:], np.concatenate(parts))
            assert log[table].attrs["rows"] == sum(map(len, parts))
    run = Run(tmp_path / "moved")
    for table in ("pushes", "updates", "events"):
        np.testing.assert_array_equal(run.table(table), np.concatenate(tables[table]))
    np.testing.assert_array_equal(run.evaluations, tables["evaluations"][-1])
    assert (run.shards, run.lambda_, run.name) == (3, 2, "moved")
    assert run.summaries["shard"].tolist() == [0, 1, 2]


def test_the_joined_log_needs_no_other_file(tmp_path: Path) -> None:
    """Virtual data sets would show zeros in the place of what is missing."""
    tables = run_of(tmp_path / "run")
    directory.join(tmp_path / "run", 3)
    (tmp_path / "run" / schema.shard_file(1)).unlink()
    with h5py.File(tmp_path / "run" / schema.LOG) as log:
        for table, parts in tables.items():
            np.testing.assert_array_equal(log[table][:], np.concatenate(parts))
            assert log[table].fletcher32 or not len(log[table])


def test_an_evaluators_log_that_a_loss_of_power_tore_is_passed_over(tmp_path: Path) -> None:
    """No checkpoint waits for it: what it said is evaluated again, or what came after the attempt before."""
    for attempt in range(2):
        attributes = {"attempt": attempt, "continues": np.array([[0, 0, 0, 4, 0]] if attempt else [], np.int64).reshape(-1, 5)}
        path = tmp_path / schema.evaluator_file(attempt)
        file = TableFile(path, shard=-1, flush_rows=9, flush_s=1e9, attributes=attributes)
        for number in range(2):
            row = random_rows("evaluations", 2)
            row["snapshot"] = 2 * attempt + number
            for each in row:
                file.append("evaluations", tuple(each.tolist()))
        file.close()
    said: list[str] = []
    assert continuing.evaluated(tmp_path, [0, 1], 4, 2, said.append) == (4, [[0, 0, 0, 4, 0], [1, 0, 0, 4, 0]])
    path.write_bytes(bytes(path.stat().st_size))
    assert continuing.evaluated(tmp_path, [0, 1], 4, 2, said.append) == (2, [[0, 0, 0, 4, 0]])
    (tmp_path / schema.evaluator_file(0)).write_bytes(b"")
    assert continuing.evaluated(tmp_path, [0, 1], 4, 2, said.append) == (0, [])
    assert len(said) == 3
    assert all("evaluator.attempt-" in each and each.endswith("what was evaluated then is evaluated again") for each in said)


def test_a_damaged_log_is_not_joined(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    path = tmp_path / "run" / schema.shard_file(1)
    with h5py.File(path, "r+") as file:
        row = file["updates"][3]
        row["time_s"] += 1
        file["updates"][3] = row
    with pytest.raises(DataError, match=r"shard-001\.attempt-0\.h5: table updates: the rows do not have the checksum"):
        directory.join(tmp_path / "run", 3)
    assert not list((tmp_path / "run").glob("*log.h5*"))


@pytest.mark.parametrize("step", [1, 7, 10, 30])
def test_rows_are_read_some_at_a_time(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = run_of(tmp_path / "run")
    monkeypatch.setattr(schema, "STEP", step)
    run = Run(tmp_path / "run")
    for table in ("pushes", "updates", "events"):
        chunks = list(run.chunks(table))
        assert max(map(len, chunks)) <= step
        np.testing.assert_array_equal(np.concatenate(chunks), np.concatenate(tables[table]))
        np.testing.assert_array_equal(run.table(table), np.concatenate(tables[table]))


def test_a_missing_file_is_missed(tmp_path: Path) -> None:
    """HDF5 itself would show it as no rows."""
    run_of(tmp_path / "run")
    (tmp_path / "run" / schema.shard_file(1)).unlink()
    with pytest.raises(DataError, match=r"lacks shard-001\.attempt-0\.h5"):
        directory.join(tmp_path / "run", 3)
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
    with pytest.raises(DataError, match=r"copy\.h5 is truncated: it has 1000 bytes, and says"):
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


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for read in (read_summary, lambda path: read_table(path, "pushes")):
        with pytest.raises(DataError, match="cannot be read as HDF5"):
            read(tmp_path / "nowhere.h5")


# ------------------------------------------------------------------------------------------------------------- the directory


def test_done_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    run_of(tmp_path / "run")
    run = Run(tmp_path / "run")
    with (
        monkeypatch.context() as patched,
        pytest.raises(StorageError, match="DONE cannot be written: No space left on device: make room"),
    ):
        patched.setattr("mpisgd.base.durable.os.fsync", full)
        directory.mark_done(run.path, {"clock": [30]})
    assert run.done is None
    directory.mark_done(run.path, {"clock": [30], "diverged": False})
    assert run.done == {"clock": [30], "diverged": False}
    assert json.loads((run.path / schema.DONE).read_text()).items() > run.done.items()
    assert not list(run.path.glob(".DONE*"))
    (run.path / schema.DONE).write_text('{"clock": [30')
    with pytest.raises(DataError, match="DONE is damaged"):
        _ = run.done


def test_a_directory_is_claimed_once(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    directory.claim(path, overwrite=False)
    assert path.is_dir()
    with pytest.raises(ConfigError, match=r"out = '.*/a/b' exists: choose another, or say --overwrite"):
        directory.claim(path, overwrite=False)


def test_only_a_run_is_overwritten(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    (tmp_path / "run" / "report").mkdir()
    with pytest.raises(ConfigError, match="is being written by another job"):
        directory.claim(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / schema.CONFIG).exists(), "before anything of it is removed"
    (tmp_path / "run" / schema.LOCK).unlink()
    directory.claim(tmp_path / "run", overwrite=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [schema.LOCK]


def test_a_run_that_was_killed_before_its_config_toml(tmp_path: Path) -> None:
    """At any moment between mkdir and then; what resumes it is told to begin anew."""
    run = tmp_path / "run"
    for left in ([], [".LOCK.host.7"], [schema.LOCK, ".LOCK.host.7", ".config.toml.host.7"]):
        run.mkdir()
        for name in left:
            (run / name).write_text("")
        if schema.LOCK in left:  # of a process that is no more
            pid = os.fork()
            if pid == 0:
                (run / schema.LOCK).unlink()
                Lock(run)
                os._exit(0)
            os.waitpid(pid, 0)
            with pytest.raises(ConfigError, match="it was killed before it had written that: begin anew with --overwrite"):
                config_file.of_run(run)
        with pytest.raises(ConfigError, match="say --overwrite to replace it"):
            directory.claim(run, overwrite=False)
        directory.claim(run, overwrite=True).release()
        assert not list(run.iterdir())
        run.rmdir()


@pytest.mark.parametrize("config", [None, "", "mu = 4\nshards = 2\n", "not TOML"])
def test_a_folder_that_is_no_run_is_never_removed(config: str | None, tmp_path: Path) -> None:
    """Also not one in which the user keeps a job file that happens to be called config.toml."""
    path = tmp_path / "experiments"
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    if config is not None:
        (path / schema.CONFIG).write_text(config)
    with pytest.raises(ConfigError, match="is no run directory of mpisgd: it is not replaced"):
        directory.claim(path, overwrite=True)
    assert (path / "thesis.tex").read_text() == "years of work"


def test_a_run_that_another_is_replacing_is_named_as_his(tmp_path: Path) -> None:
    """Meanwhile it has no config.toml; where nobody holds the lock, it is not ours to replace, and is left as it was."""
    (tmp_path / "mine.txt").write_text("")
    other = Lock(tmp_path)
    with pytest.raises(ConfigError, match="is being written by another job"):
        directory.claim(tmp_path, overwrite=True)
    other.release()
    with pytest.raises(ConfigError, match="is no run directory of mpisgd: it is not replaced"):
        directory.claim(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("place", ["file", "file/run"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_way(place: str, overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=f"out = '{tmp_path}/{place}'"):
        directory.claim(tmp_path / place, overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_configuration_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out = '.*nowhere' cannot be written: .*No such file"):
        directory.write_config(tmp_path / "nowhere", "mu = 4\n")


def test_evaluations_may_have_columns_of_metrics_and_other_tables_may_not() -> None:
    """And attempts with other metrics make one table: what one lacks is NaN there."""
    one, other = (np.zeros(2, schema.with_metrics(names)) for names in (("accuracy",), ("accuracy", "bleu")))
    one["accuracy"], other["bleu"] = 0.5, 3.0
    assert schema.fits("evaluations", one.dtype)
    assert schema.fits("evaluations", schema.EVALUATIONS)
    assert not schema.fits("evaluations", np.dtype([*schema.EVALUATIONS.descr, ("n", np.int64)]))
    assert not schema.fits("updates", np.dtype([*schema.UPDATES.descr, ("n", np.float64)]))
    rows = schema.joined("evaluations", [np.empty(0, schema.EVALUATIONS), one, other])
    assert schema.metrics_of(rows.dtype) == ("accuracy", "bleu")
    assert rows["accuracy"].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert np.isnan(rows["bleu"][:2]).all()
    assert rows["bleu"][2:].tolist() == [3.0, 3.0]
    assert schema.joined("evaluations", [np.empty(0, schema.EVALUATIONS)]).dtype == schema.EVALUATIONS


def described(data: h5py.Dataset) -> dict[str, tuple[str, str]]:
    """Unit and meaning of each column, as a user reads them."""
    texts = ([text.decode() for text in data.attrs[name]] for name in ("units", "meanings"))
    return dict(zip(data.dtype.names, zip(*texts, strict=True), strict=True))


def test_each_column_says_its_unit_and_meaning_in_every_file(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    evaluator, coordinator = tmp_path / "evaluator.h5", tmp_path / "coordinator.h5"
    TableFile(evaluator, shard=-1, flush_rows=1, flush_s=1e9, metrics=("bleu",)).close()
    TableFile(coordinator, shard=-1, flush_rows=1, flush_s=1e9, tables=schema.COORDINATOR).close()
    directory.join(tmp_path / "run", 3)
    for path in (*(tmp_path / "run").glob("*.h5"), evaluator, coordinator):
        with h5py.File(path) as file:
            tables = [name for name in schema.ABOUT if name in file]
            assert set(schema.COORDINATOR if path == coordinator else schema.TABLES) <= set(tables), path
            for table in tables:
                columns = described(file[table])
                assert all(meaning for _, meaning in columns.values()), (path, table)
                assert all((unit == "s") == name.endswith("_s") for name, (unit, _) in columns.items()), (path, table)
            if path != coordinator:
                assert described(file["pushes"])["staleness"] == ("updates", "clock - timestamp")
    with h5py.File(evaluator) as file:
        assert described(file["evaluations"])["bleu"] == ("", "metric of an own step")


def test_meanings_are_ascii() -> None:
    """HDF5's texts of a fixed length, which everything reads."""
    assert list(schema.COLUMNS) == [*schema.TABLES, *schema.COORDINATOR, "summary", "learners", "staleness"] == list(schema.ABOUT)
    for columns in schema.COLUMNS.values():
        assert all((each.unit + each.meaning).isascii() and each.meaning for each in columns)


def test_pushes_of_groups_and_others_are_joined() -> None:
    """A run of groups that an earlier mpisgd has begun has rows without `neighbour_s`."""
    one, other = np.zeros(2, schema.PUSHES), np.ones(1, schema.PUSHES_OF_GROUPS)
    assert schema.fits("pushes", one.dtype) and schema.fits("pushes", other.dtype)
    rows = schema.joined("pushes", [one, other])
    assert rows.dtype == schema.PUSHES_OF_GROUPS
    assert np.isnan(rows["neighbour_s"]).tolist() == [True, True, False] and rows["seq"].tolist() == [0, 0, 1]
    assert schema.joined("pushes", [one, one]).dtype == schema.joined("pushes", []).dtype == schema.PUSHES
