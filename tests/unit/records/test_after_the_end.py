"""Changes of a run's directory after the end are seen: of `log.h5`, the best weights, ranks' files, with or without new sums."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.analysis.opened import open_run
from mpisgd.base.errors import DataError
from mpisgd.records import directory
from mpisgd.records.log import schema, sums
from mpisgd.records.log.rank_file import read_sums
from mpisgd.records.log.reader import Directory, Run
from mpisgd.records.weights import of_run
from mpisgd.report import single
from tests.virtual.jobs import TENSORS, simulated


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("honest") / "run"
    evaluation = {"every_epochs": 0.1, "best": "error"}
    simulated(path, TENSORS, protocol={"name": "softsync", "n": 2}, shards=2, evaluation=evaluation)
    return path


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def sum_anew(run: Path) -> None:
    """DONE has the sums of the files as they are now: a forger can do that."""
    done = json.loads((run / schema.DONE).read_text())
    del done["crc32"]
    for name, file in schema.SUMMED.items():
        if name in done:
            done[name] = sums.of_file(run / file)
    done["files"] = {name: read_sums(run / name) for name in done["files"]}
    (run / schema.DONE).write_text(sums.sealed_json(done))


@pytest.fixture
def linked(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose log is so large that log.h5 refers to the ranks' rows."""
    monkeypatch.setattr(directory, "LINKED_NBYTES", 0)
    (run / schema.LOG).unlink()
    done = (run / schema.DONE).read_bytes()
    (run / schema.DONE).unlink()
    directory.join(Run(run))
    (run / schema.DONE).write_bytes(done)
    sum_anew(run)
    return run


def halve(path: Path, table: str, column: str) -> None:
    with h5py.File(path, "r+") as log:
        rows = log[table][:]
        rows[column] = rows[column] // 2 if rows[column].dtype.kind in "iu" else rows[column] / 2
        log[table][:] = rows


def refused(run: Path) -> str:
    try:
        return replay.check(run)
    except DataError as error:
        return str(error)


def test_an_honest_run_holds(run: Path) -> None:
    assert refused(run) == ""
    sum_anew(run)
    assert refused(run) == ""
    assert set(json.loads((run / schema.DONE).read_text())["files"]) == {
        "shard-000.attempt-0.h5", "shard-001.attempt-0.h5", "evaluator.attempt-0.h5"
    }  # fmt: skip


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("table", "column"), [("evaluations", "error"), ("pushes", "staleness"), ("updates", "time_s")])
def test_the_joined_log_is_that_of_the_ranks(table: str, column: str, summed: bool, run: Path) -> None:
    halve(run / schema.LOG, table, column)
    if summed:
        sum_anew(run)
    assert re.search(
        rf"log\.h5, row \d+: {table} differs from the row of the rank" if summed else r"log\.h5 is damaged", refused(run)
    )


def _without_a_table(log: h5py.File) -> None:
    del log["events"]


def _with_fewer_rows(log: h5py.File) -> None:
    rows = log["updates"][:-1]
    del log["updates"]
    log["updates"] = rows


def _with_another_table(log: h5py.File) -> None:
    log["staleness"] = np.zeros(3)


def _with_another_column(log: h5py.File) -> None:
    rows = log["updates"][:]
    del log["updates"]
    log["updates"] = rows.astype([(name, "f8") for name in rows.dtype.names])


def _in_another_file(log: h5py.File) -> None:
    del log["updates"]
    log["updates"] = h5py.ExternalLink("shard-000.attempt-0.h5", "updates")


def _without_end(log: h5py.File) -> None:
    log["layouts"] = log["/"]


def _of_another_version(log: h5py.File) -> None:
    log.attrs["schema_version"] = 99


@pytest.mark.parametrize(
    "change",
    [
        _without_a_table, _with_fewer_rows, _with_another_table, _with_another_column, _in_another_file, _without_end,
        _of_another_version,
    ],
)  # fmt: skip
def test_no_other_table_passes_for_the_log(change: Callable[[h5py.File], None], run: Path) -> None:
    with h5py.File(run / schema.LOG, "r+") as log:
        change(log)
    sum_anew(run)
    assert "log.h5" in refused(run)


def test_a_log_that_was_taken_away_misleads_nobody(run: Path) -> None:
    (run / schema.LOG).unlink()
    assert refused(run) == ""


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("what", ["weights", "evaluation"])
def test_the_best_weights_are_those_of_the_best_evaluation(what: str, summed: bool, run: Path) -> None:
    best: dict[str, Any] = torch.load(run / schema.BEST, weights_only=True)
    if what == "weights":
        next(iter(best["weights"].values()))[0] += 1e-3
    else:
        best["evaluation"]["error"] /= 2
    torch.save(best, run / schema.BEST)
    if summed:
        sum_anew(run)
    assert "best" in refused(run)


@pytest.mark.parametrize("reader", [single.report, lambda run: open_run(run).pushes, lambda run: Run(run).updates])
def test_whoever_reads_a_ranks_file_is_told_that_it_was_changed(reader: Callable[[Path], object], run: Path) -> None:
    """Also where its own sums were taken from it, as if an earlier mpisgd had written it."""
    reader(run)
    with h5py.File(run / "shard-001.attempt-0.h5", "r+") as log:
        del log["sums"]
        log["pushes"]["loss"] = 0.0
    with pytest.raises(DataError, match=r"shard-001\.attempt-0\.h5 is damaged, or was edited"):
        reader(run)


@pytest.mark.parametrize("what", [*schema.SUMMED, "files"])
@pytest.mark.parametrize("told", [5, [], "x", {"nbytes": 1}, None])
def test_sums_of_another_kind_are_refused_and_nothing_fails(told: object, what: str, run: Path) -> None:
    done = json.loads((run / schema.DONE).read_text())
    del done["crc32"]
    (run / schema.DONE).write_text(sums.sealed_json({**done, what: told}))
    readers = [lambda: Run(run).pushes, lambda: replay.replay(run)]
    if what != "files" or not isinstance(told, dict):  # weights are read without a look at the log
        readers.append(lambda: of_run(Directory(run)))
    for reader in readers:
        with pytest.raises(DataError, match=r"DONE is damaged|damaged, or was edited"):
            reader()


def test_a_large_log_is_joined_by_reference(linked: Path, honest: Path) -> None:
    with h5py.File(linked / schema.LOG) as log, h5py.File(honest / schema.LOG) as copied:
        assert log["pushes"].is_virtual and log["updates"].is_virtual
        for name in copied:
            assert log[name][:].tobytes() == copied[name][:].tobytes()
            assert log[name].attrs["rows"] == len(copied[name])
            assert log[name].attrs["meanings"].tolist() == copied[name].attrs["meanings"].tolist()
    assert (linked / schema.LOG).stat().st_size < 0.7 * (honest / schema.LOG).stat().st_size
    assert refused(linked) == ""
    assert open_run(linked).balanced


def _of_another_file(layout: Any, name: str, rows: int, dtype: np.dtype) -> None:
    layout[:rows] = h5py.VirtualSource("shard-000.attempt-0.h5", "pushes", (rows,), dtype)[:rows]


def _of_a_file_elsewhere(layout: Any, name: str, rows: int, dtype: np.dtype) -> None:
    layout[:rows] = h5py.VirtualSource("../shard-001.attempt-0.h5", "pushes", (rows,), dtype)[:rows]


def _of_other_rows(layout: Any, name: str, rows: int, dtype: np.dtype) -> None:
    layout[: rows - 1] = h5py.VirtualSource(name, "pushes", (rows,), dtype)[1:]


def _of_every_second_row(layout: Any, name: str, rows: int, dtype: np.dtype) -> None:
    layout[: rows // 2] = h5py.VirtualSource(name, "pushes", (rows,), dtype)[: 2 * (rows // 2) : 2]


def _of_another_table(layout: Any, name: str, rows: int, dtype: np.dtype) -> None:
    layout[:rows] = h5py.VirtualSource(name, "events", (rows,), dtype)[:rows]


def _of_rows_turned_round(layout: Any, name: str, rows: int, dtype: np.dtype) -> None:
    source = h5py.VirtualSource(name, "pushes", (rows,), dtype)
    layout[: rows - 5], layout[rows - 5 : rows] = source[5:], source[:5]


def _of_no_file(layout: Any, name: str, rows: int, dtype: np.dtype) -> None:
    pass


@pytest.mark.parametrize(
    "lead",
    [
        *(_of_another_file, _of_a_file_elsewhere, _of_other_rows, _of_every_second_row, _of_another_table),
        *(_of_rows_turned_round, _of_no_file),
    ],
)
def test_references_of_a_large_log_lead_to_the_rows_of_its_ranks(
    lead: Callable[[Any, str, int, np.dtype], None], linked: Path
) -> None:
    with h5py.File(linked / "shard-001.attempt-0.h5") as file, h5py.File(linked / "shard-000.attempt-0.h5") as before:
        rows, first, dtype = int(file["committed"][0]), int(before["committed"][0]), file["pushes"].dtype
    with h5py.File(linked / schema.LOG, "r+") as log:
        del log["pushes"]
        layout = h5py.VirtualLayout((first + rows,), dtype)
        layout[:first] = h5py.VirtualSource("shard-000.attempt-0.h5", "pushes", (first,), dtype)[:first]
        moved = _Moved(layout, first)
        lead(moved, "shard-001.attempt-0.h5", rows, dtype)
        log.create_virtual_dataset("pushes", layout)
    sum_anew(linked)
    assert re.search(r"log\.h5: pushes (refers to|is not made of)", refused(linked))


class _Moved:
    """A layout from some row on."""

    def __init__(self, layout: Any, first: int) -> None:
        self._layout, self._first = layout, first

    def __setitem__(self, rows: slice, source: Any) -> None:
        self._layout[self._first + (rows.start or 0) : self._first + rows.stop] = source
