"""Nothing in a run's directory leads out of it, or to no end: links are not followed, files are as large as they are."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpisgd import replay
from mpisgd.api import train
from mpisgd.base import safe_read
from mpisgd.base.errors import DataError
from mpisgd.cli.reading import compare as compare_command
from mpisgd.cli.reading import plan as plan_command
from mpisgd.cli.reading import report as report_command
from mpisgd.cli.reading import timeline as timeline_command
from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.replay.checks.record import read
from tests.effort import spread
from tests.forge import forget
from tests.virtual.jobs import simulated

SHARD = schema.shard_file(0, 0)
TEXTS = np.array(["a" * 99], h5py.string_dtype())


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("contained") / "run"
    simulated(path)
    return path


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest, tmp_path / "run")


READERS: dict[str, Callable[[Path], object]] = {
    "report": lambda run: report_command.main([str(run)]),
    "compare": lambda run: compare_command.main([str(run), str(run), "--out", str(run.parent / "both")]),
    "timeline": lambda run: timeline_command.main([str(run)]),
    "plan": lambda run: plan_command.main([str(run)]),
    "replay": replay.replay,
    "resume": lambda run: train(resume=run),
}


@pytest.mark.parametrize(  # each of both comes up
    ("reader", "what"),
    spread(itertools.product(READERS, ["report", "plan", SHARD, schema.CHECKPOINTS, "below/deep"]), 4, unpack=True),
)
def test_no_reader_follows_a_link(reader: str, what: str, run: Path, tmp_path: Path) -> None:
    """To write through one would be worse than to read."""
    outside = tmp_path / "outside"
    (run / what).parent.mkdir(exist_ok=True)
    if (run / what).exists():
        (run / what).rename(outside)
    else:
        outside.mkdir()
        (outside / "clock-000010").mkdir()
    (run / what).symlink_to(outside)
    with pytest.raises(DataError, match=rf"{what} is a link to .*outside.*not followed"):
        READERS[reader](run)
    assert outside.is_file() or [each.name for each in outside.iterdir()] == ["clock-000010"]


def test_a_pipe_is_not_waited_for(run: Path) -> None:
    os.mkfifo(run / schema.shard_file(1, 0))
    with pytest.raises(DataError, match=r"shard-001\.attempt-0\.h5 is neither a file nor a directory"):
        Run(run)


def test_the_run_itself_may_be_had_by_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    assert len(Run(tmp_path / "latest").pushes) == len(Run(run).pushes)


def other(path: Path) -> Path:
    """Somebody's HDF5 file, whose rows are to be shown as the run's."""
    with h5py.File(path, "w") as file:
        for table, dtype in schema.TABLES.items():
            file[table] = np.ones(7, dtype)
        file["committed"] = np.full(len(schema.TABLES), 7)
    return path


def external_link(file: h5py.File, name: str, outside: Path) -> None:
    del file[name]
    file[name] = h5py.ExternalLink(str(outside), f"/{name}")


def soft_link(file: h5py.File, name: str, outside: Path) -> None:
    del file[name]
    file[name] = h5py.SoftLink(f"/{name}")  # to itself


def virtual(file: h5py.File, name: str, outside: Path) -> None:
    shape, dtype = file[name].shape, file[name].dtype
    del file[name]
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(str(outside), f"/{name}", shape=shape)
    file.create_virtual_dataset(name, layout)


def external(file: h5py.File, name: str, outside: Path) -> None:
    shape, dtype = file[name].shape, file[name].dtype
    del file[name]
    file.create_dataset(name, shape, dtype, external=[(str(outside), 0, h5py.h5f.UNLIMITED)])


def objects(file: h5py.File, name: str, outside: Path) -> None:
    count = len(file[name])
    del file[name]
    file.create_dataset(name, (count,), h5py.string_dtype())


def group(file: h5py.File, name: str, outside: Path) -> None:
    del file[name]
    file[name] = file["/"]  # a group that is in itself


WHYS = {
    external_link: "is a link: links are not followed",
    soft_link: "is a link: links are not followed",
    virtual: "lies in other files: expected data in this file",
    external: "lies in other files: expected data in this file",
    objects: "has elements of any length, expected numbers",
    group: "is no data set",
}


@pytest.mark.parametrize(  # each of both comes up
    ("instead", "name"),
    spread(itertools.product(WHYS, ["pushes", "updates", "events", "committed", "sums", "closing", "summary"]), 5, unpack=True),
)
def test_rows_are_those_of_the_file(instead: Callable[[h5py.File, str, Path], None], name: str, run: Path, tmp_path: Path) -> None:
    outside = other(tmp_path / "outside.h5")
    with h5py.File(run / SHARD, "a") as file:
        instead(file, name, outside)
    with pytest.raises(DataError, match=rf"{SHARD}: .*{name} {WHYS[instead]}"):
        read(run)
    with pytest.raises(DataError, match=rf"{SHARD}: .*{name} {WHYS[instead]}"):
        found = Run(run)
        found.books()
        assert found.updates is not found.events


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_are_not_there_fill_no_memory(packed: bool, run: Path) -> None:
    """A data set may say any size, and take no room: a table of 10^12 rows, or one that a filter has packed."""
    count = 10**5 if packed else 10**12
    with h5py.File(run / SHARD, "a") as file:
        del file["pushes"]
        more = {"compression": "gzip"} if packed else {}
        data = file.create_dataset("pushes", (count,), schema.TABLES["pushes"], chunks=(10**5,), **more)
        if packed:
            data[...] = np.zeros(count, data.dtype)
        file["committed"][0] = count
        file["sums"][0] = (count, 0)
    forget(run)
    with pytest.raises(DataError, match=r"rows are [\d,]+ bytes, and the file has fewer: the file is damaged"):
        read(run)
    with pytest.raises(DataError, match="the file has fewer"):
        Run(run).books()


@pytest.mark.parametrize(
    ("name", "value"),
    spread(itertools.product(["schema_version", "continues", "before"], [np.zeros(3 << 20), "text" * 9, TEXTS]), 4, unpack=True),
)
def test_attributes_are_a_few_numbers(name: str, value: object, run: Path) -> None:
    with h5py.File(run / SHARD, "r") as file:
        rest = {key: np.asarray(item) for key, item in file.attrs.items() if key != name}
        tables = {key: (np.asarray(item), item.maxshape) for key, item in file.items()}
    with h5py.File(run / SHARD, "w", libver="latest") as file:
        for key, item in rest.items():
            file.attrs[key] = item
        for key, (rows, shape) in tables.items():
            file.create_dataset(key, data=rows, maxshape=shape)
        file.attrs[name] = value
    with pytest.raises(DataError, match=rf"the attribute {name} is [\d,]+ bytes of .*, expected a few numbers"):
        read(run)


@pytest.mark.parametrize(
    ("name", "value"), [("continues", [[0, 0, 0, 0, 0]]), ("before", [[0, 0, 0, 0, 0, 0]]), ("before", [[2**40, 0, 0, 0, 0, 0]])]
)
def test_no_attempt_comes_before_itself(name: str, value: list[list[int]], run: Path) -> None:
    with h5py.File(run / SHARD, "a") as file:
        file.attrs[name] = np.array(value)
        for more in ("continues_clock", "begins_samples", "begins_s"):
            file.attrs[more] = 0
        file.attrs["begins_seq"] = np.zeros(4, np.int64)
    for look in (read, lambda run: Run(run).earlier):
        with pytest.raises(DataError, match=f"the attribute {name} (names|has) .*attempt"):
            look(run)


def test_a_linked_directory_is_not_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (run / "report").symlink_to(tmp_path / "outside")
    with pytest.raises(Exception, match="no run directory of mpisgd: not replaced"):
        directory.claim(run, overwrite=True)
    assert (run / SHARD).exists()


def test_what_vanishes_meanwhile_was_not_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is under way writes aside, and renames."""
    (run / "gone").mkdir()
    scandir = os.scandir

    def removing(path: str) -> object:
        (run / "gone").rmdir() if path.endswith("gone") else None
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    safe_read.check_directory(run)
    assert not (run / "gone").exists()
