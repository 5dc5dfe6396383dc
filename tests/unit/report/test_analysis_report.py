"""Reports of runs that ended well, are going on, were killed, are empty, do not balance, or are no runs at all."""

from __future__ import annotations

import csv
import io
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from rich.console import Console

from mpisgd.base.errors import ConfigError, DataError
from mpisgd.cli.reading import report as command
from mpisgd.records.log import schema
from mpisgd.report.single import Report, report
from tests.effort import spread
from tests.unit import fabricate
from tests.unit.fabricate import Log

pytestmark = pytest.mark.usefixtures("nothing_drawn")
SOFTSYNC = {"name": "softsync", "n": 1, "modulation": "inverse"}
BACKUP = {"name": "backup", "N": 2, "b": 1}


def quiet(path: Path, **options: Any) -> tuple[Report, str]:
    """A report, and what it printed."""
    sink = io.StringIO()
    return report(path, console=Console(file=sink, width=240), **options), sink.getvalue()


def headline(found: Report) -> dict[Any, Any]:
    table = found.table("run")
    return dict(zip(table.cells("what"), table.cells("value"), strict=True))


def with_evaluations() -> Log:
    log = fabricate.backup()
    found = [fabricate.evaluation(at, float(at), 0.9 / (at + 1)) for at in range(3)]
    log.evaluations = fabricate.rows("evaluations", found)
    return log


def test_a_finished_run(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", with_evaluations(), BACKUP, learners=3)
    found, text = quiet(path)
    assert found.exit_status == 0
    assert found.problems == ()
    what = headline(found)
    assert what["status"] == "finished"
    assert what["final test error"] == "30.00 % (theta) at epoch 2.00"
    assert what["epochs"] == "0.02 of 10.0"
    for table in found.tables:
        assert table.title in text
        with (path / "report" / f"{table.key}.csv").open(encoding="utf-8") as file:
            assert len(list(csv.reader(file))) == len(table.rows) + 1
    page = (path / "report" / "report.md").read_text(encoding="utf-8")
    assert page.startswith("# Report of run\n\nfinished\n")
    for drawing in found.drawings:
        assert f"]({drawing.key}.png)" in page
    assert set(found.files) == set((path / "report").iterdir())


def test_csv_holds_full_precision(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.softsync(), SOFTSYNC, learners=2)
    quiet(path)
    with (path / "report" / "throughput.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["updates/s"]) == 4 / 8.05
    assert float(row["training [s]"]) == 8.05


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_under_way(tmp_path: Path, shards: int) -> None:
    log = fabricate.softsync(shards)
    log.pushes, log.updates = log.pushes[: 7 * shards], log.updates[: 3 * shards]
    path = fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, shards=shards, ended=False)
    found, text = quiet(path)
    assert found.exit_status == 0
    assert "UNFINISHED: no DONE; under way or killed (log last written" in text
    assert headline(found)["final test error"] == "not evaluated"
    assert "no figure error_epochs: nothing was evaluated" in text
    assert not (path / "report" / "error_epochs.png").exists()


def test_books_of_a_run_under_way_need_not_balance(tmp_path: Path) -> None:
    log = fabricate.softsync()
    log.pushes = log.pushes[1:]
    path = fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, ended=False)
    assert quiet(path)[0].exit_status == 0


@pytest.mark.parametrize("done", [True, False])
def test_books_of_an_ended_run_must_balance(tmp_path: Path, done: bool, capsys: pytest.CaptureFixture[str]) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.softsync(), SOFTSYNC, learners=2, pushed={0: 12}, done=done)
    assert command.main([str(path)]) == 1
    line = "shard 0: pushed 12, but applied 8 + dropped 0 + rejected 0 + in flight 2 = 10"
    printed = capsys.readouterr().out
    assert f"books do not balance: {line}" in printed
    assert line in (path / "report" / "report.md").read_text(encoding="utf-8")
    assert ("there is no DONE" in printed) == (not done)


@pytest.mark.parametrize(
    ("protocol", "learners", "ended"),
    spread(itertools.product([{"name": "hardsync"}, SOFTSYNC, BACKUP], [1, 3], [True, False]), 5, unpack=True),
)
def test_an_empty_log(tmp_path: Path, protocol: dict[str, Any], learners: int, ended: bool) -> None:
    path = fabricate.write_run(tmp_path / "run", Log(), protocol, learners, ended=ended)
    found, text = quiet(path)
    assert found.exit_status == 0
    assert all(drawing.figure is None for drawing in found.drawings)
    assert "no figure collect: " in text
    assert not list((path / "report").glob("*.png"))
    page = (path / "report" / "report.md").read_text(encoding="utf-8")
    assert "no figure, no gradient was applied." in page


def test_pushes_but_no_update_yet(tmp_path: Path) -> None:
    log = Log(pushes=fabricate.softsync().pushes[:1])
    path = fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, ended=False)
    found, _ = quiet(path)
    assert found.table("books_shards").rows == ((0, 1, 0, 0, 0, 1, True),)
    assert found.table("throughput").rows[0][5:8] == (None, None, None)


def test_one_learner(tmp_path: Path) -> None:
    log = fabricate.simulated("hardsync", learners=1, wanted=1, updates=3)
    found, _ = quiet(fabricate.write_run(tmp_path / "run", log, {"name": "hardsync"}, learners=1))
    assert found.exit_status == 0
    assert found.table("staleness_histogram").rows == ((0, 3, 100.0, 100.0),)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wanted", "shards"), [("hardsync", 5, 1), ("softsync", 2, 2), ("backup", 4, 2)])
def test_simulated_runs_balance(tmp_path: Path, name: str, wanted: int, shards: int) -> None:
    log = fabricate.simulated(name, learners=5, wanted=wanted, updates=40, shards=shards)
    log.evaluations = fabricate.learning(log)
    environment = {"gradients_per_update": wanted}
    path = fabricate.write_run(tmp_path / "run", log, {"name": name}, 5, shards=shards, environment=environment)
    found, _ = quiet(path)
    assert found.problems == ()
    assert all(drawing.figure is not None for drawing in found.drawings) == (name != "softsync")


def test_little_is_essential_in_the_configuration(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.backup(), BACKUP, learners=3)
    (path / schema.CONFIG).write_text("shards = 1\n[environment]\nlearners = 3\n")
    found, _ = quiet(path)
    assert headline(found)["epochs"] == "? of ?"


def test_out(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.backup(), BACKUP, learners=3)
    quiet(path, out=tmp_path / "elsewhere" / "deep")
    assert (tmp_path / "elsewhere" / "deep" / "report.md").is_file()
    assert not (path / "report").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a writable folder"):
        quiet(path, out=tmp_path / "file" / "below")


# ------------------------------------------------------------------------------------------------ what is not a run


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run directory of mpisgd: config\.toml is missing"):
        report(tmp_path)
    with pytest.raises(DataError, match="no run directory"):
        report(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"shards = [", "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        (b"shards = 1\n", "\\[environment\\] is missing"),
        (b"shards = 1\n[environment]\nhosts = []\n", "learners = None, expected a number"),
        (b"[environment]\nlearners = 2\n", "shards = None, expected a number"),
    ],
)
def test_a_foreign_configuration(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / schema.CONFIG).write_bytes(content)
    with pytest.raises(DataError, match=why):
        report(tmp_path)


def test_no_log(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.softsync(2), SOFTSYNC, learners=2, shards=2)
    (path / schema.shard_file(1)).unlink()
    with pytest.raises(DataError, match=r"lacks shard-001\.attempt-0\.h5: was the run started without a log"):
        report(path)


def test_another_version(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", Log(), SOFTSYNC, learners=2)
    fabricate.write_file(path / schema.shard_file(0), {}, (0, -1, 0, 0, 0, 0), 0, version=1)
    with pytest.raises(DataError, match="has schema version 1, this mpisgd reads 4"):
        report(path)


def test_foreign_files(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", Log(), SOFTSYNC, learners=2)
    (path / schema.shard_file(0)).write_bytes(b"not HDF5")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        report(path)
    with h5py.File(path / schema.shard_file(0), "w", libver="latest") as file:
        file["something"] = 1
    with pytest.raises(DataError, match="has schema version None"):
        report(path)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_truncated_log_is_refused(tmp_path: Path, share: float) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.softsync(), SOFTSYNC, learners=2)
    file = path / schema.shard_file(0)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(DataError, match=r"shard-000\.attempt-0\.h5"):
        report(path)


def test_a_killed_shards_log_is_read_and_refused_where_truncated(tmp_path: Path) -> None:
    """Of a truncated file that a writer left open, HDF5 in SWMR mode would wait for ever for what is not there."""
    path = fabricate.write_run(tmp_path / "run", fabricate.softsync(), SOFTSYNC, learners=2, ended=False)
    file = path / schema.shard_file(0)
    code = f"import h5py, os; file = h5py.File({str(file)!r}, 'r+', libver='latest'); file.swmr_mode = True; os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with pytest.raises(OSError, match="already open"):
        h5py.File(file)
    assert quiet(path)[0].table("books_shards").rows == ((0, 10, 8, 0, 0, 2, True),)
    whole = file.read_bytes()
    for length in (len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match=f"shard-000.attempt-0.h5 is truncated: found {length} bytes"):
            report(path)


def test_a_damaged_done(tmp_path: Path) -> None:
    path = fabricate.write_run(tmp_path / "run", Log(), SOFTSYNC, learners=2)
    (path / schema.DONE).write_text("{")
    with pytest.raises(DataError, match="DONE is damaged"):
        report(path)


# ------------------------------------------------------------------------------------------------------- the command


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    assert "usage: mpisgd report" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command.main([])
    assert stopped.value.code == 2
