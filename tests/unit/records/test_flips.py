"""Damaged files of a run are refused or reported, by name, in a moment; the whole campaign is `tests.faults.flips`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpisgd.base.errors import DataError
from mpisgd.records.log import schema, sums
from mpisgd.records.log.rank_file import read_summary, read_table
from mpisgd.records.log.reader import Run
from mpisgd.records.log.superblock import was_left_open
from mpisgd.records.log.writer import TableFile
from tests.effort import REST
from tests.faults import flips
from tests.faults.campaign import table_of


@pytest.mark.slow
def test_a_hundred(tmp_path: Path) -> None:
    """Ten of each kind of file, in CI three, in runs of one, two and three shards."""
    times = 3 if REST else 10
    runs = [(number, flips.execute(random.Random(number), tmp_path, number), 0.0) for number in range(times * len(flips.KINDS))]
    table = table_of(runs)
    assert table["failures"] == []
    assert {kind: times for kind, times in table["kinds"].items() if kind in flips.KINDS} == dict.fromkeys(flips.KINDS, times)
    outcomes = table["totals"]
    assert outcomes["log of a finished run: reported"] > times // 5
    assert outcomes["log of a killed run: reported"] > times // 5
    assert outcomes["parts of a checkpoint: passed over"] == times
    assert outcomes["manifest of a checkpoint: passed over"] > times // 2
    assert outcomes["accounts of a checkpoint: harmless"] == times, "the manifest has what they say"
    assert outcomes["weights.pt: reported"] == times
    assert outcomes["snapshots: reported"] == times
    assert outcomes["log.h5, by h5py alone: refused by HDF5"] > times // 5
    assert outcomes["lock: harmless"] == times


EVENT = (0, 3, 4, -1, 0.5, 1.5)
PUSH = (0, 1, 1, 0, 0, 0, 4, 1, 0, 0, 1.0, 0.1, 0.5, np.nan, *[0.1] * 5, 0.0, 2.0)


def log(path: Path, rows: int = 40) -> TableFile:
    file = TableFile(path, shard=0, flush_rows=16, flush_s=1e9)
    for number in range(rows):
        file.append("pushes", PUSH)
        if number % 3 == 0:
            file.amend("pushes", number // 2, "answer_s", float(number))
    file.append("events", EVENT)
    file.flush()
    return file


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 16
    path.write_bytes(content)


def place_of(path: Path, name: str, row: int, field: str | None) -> int:
    """Where in the file a value lies."""
    with h5py.File(path, "r") as file:
        data = file[name]
        start = data.id.get_chunk_info(0).byte_offset if data.chunks else data.id.get_offset()
        return start + row * data.dtype.itemsize + (data.dtype.fields[field][1] if field else 0)


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("pushes", 0, "loss"),
        ("pushes", 39, "seq"),
        ("pushes", 7, "answer_s"),
        ("events", 0, "value"),
        ("committed", 0, None),
        ("sums", 0, None),
        ("sums", 1, None),
        ("closing", 0, None),
        ("closing", 1, None),
        ("summary", 0, "samples"),
    ],
)
def test_a_bit_of_a_closed_log(name: str, row: int, field: str | None, tmp_path: Path) -> None:
    path = tmp_path / "shard-000.attempt-0.h5"
    log(path).close((0, 3, 12, 40, 40, 0))
    assert len(read_table(path, "pushes")) == 40
    assert read_summary(path)["samples"] == 12
    flip(path, place_of(path, name, row, field))
    with pytest.raises(DataError, match=r"shard-000\.attempt-0\.h5: .*(damaged|were committed)"):
        for table in schema.TABLES:
            read_table(path, table)
        read_summary(path)


def test_a_sum_below_0_is_no_sum(tmp_path: Path) -> None:
    path = tmp_path / "shard-000.attempt-0.h5"
    log(path).close((0, 3, 12, 40, 40, 0))
    with h5py.File(path, "r+") as file:
        file["sums"][0, 1] = -1
    with pytest.raises(DataError, match="table pushes: the checksum of the rows does not match"):
        read_table(path, "pushes")


@pytest.mark.parametrize("field", ["loss", "timestamp", "arrival_s"])
def test_a_bit_of_an_open_log(field: str, tmp_path: Path) -> None:
    path, copy = tmp_path / "shard-000.attempt-0.h5", tmp_path / "copy.h5"
    file = log(path)
    copy.write_bytes(path.read_bytes())
    assert was_left_open(copy)
    assert len(read_table(copy, "pushes")) == 40
    file.close()
    flip(copy, place_of(path, "pushes", 11, field))
    with pytest.raises(DataError, match=r"copy\.h5: table pushes: the checksum of the rows does not match"):
        read_table(copy, "pushes")
    copy.write_bytes(path.read_bytes())
    flip(copy, 30)
    with pytest.raises(DataError, match=r"copy\.h5 is damaged: the checksum of the superblock"):
        read_table(copy, "pushes")


@pytest.mark.slow
def test_an_open_log_cut_short_does_not_hang(tmp_path: Path) -> None:
    """However short: HDF5's own SWMR reader would wait for the rest."""
    path, copy = tmp_path / "shard-000.attempt-0.h5", tmp_path / "copy.h5"
    file = log(path, rows=3000)
    content = path.read_bytes()
    said = set()
    for share in range(1, 20):
        copy.write_bytes(content[: len(content) * share // 20])
        with flips.limited(flips.LIMIT_S):
            try:
                assert len(read_table(copy, "pushes")) == len(read_table(path, "pushes"))
            except DataError as error:
                said.add(str(error).replace(str(copy), "")[:40])
                assert "copy.h5" in str(error)
    file.close()
    assert said


def test_a_log_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    path = tmp_path / "shard-000.attempt-0.h5"
    log(path).close()
    with h5py.File(path, "r+") as file:
        del file["sums"], file["closing"]
        row = file["pushes"][0]
        row["loss"] = 3
        file["pushes"][0] = row
    assert read_table(path, "pushes")["loss"][0] == 3


def test_while_it_grows(tmp_path: Path) -> None:
    """Another process reads whatever is there, at any time."""
    path = tmp_path / "shard-000.attempt-0.h5"
    pid = os.fork()
    if pid == 0:
        try:
            file = log(path)
            for number in range(40, 3000):
                file.append("pushes", PUSH)
                file.amend("pushes", number - 30, "answer_s", 1.0)
            file.close()
        finally:
            os._exit(0)  # whatever was raised: the rest of the test process is not this one's
    lengths = []
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if path.exists() and path.stat().st_size > 4000:
            try:
                lengths.append(len(read_table(path, "pushes")))
            except DataError as error:  # it has not begun with its rows
                assert not lengths, str(error)
    assert len(read_table(path, "pushes")) == 3000
    assert lengths == sorted(lengths)


def test_config_toml(tmp_path: Path) -> None:
    text = sums.sealed("shards = 1\n[environment]\nlearners = 2\n")
    path = tmp_path / schema.CONFIG
    path.write_text(text)
    assert Run(tmp_path).lambda_ == 2
    path.write_text(text.replace("learners = 2", "learners = 3"))
    with pytest.raises(DataError, match=r"config\.toml is damaged, or was edited: .*remove the first line"):
        Run(tmp_path)
    path.write_text(text.replace("learners = 2", "learners = 3").partition("\n")[2])
    assert Run(tmp_path).lambda_ == 3
