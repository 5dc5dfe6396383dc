"""A log may have more rows than memory holds: its writer and the end of a run go through it some rows at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpisgd.base.errors import ProtocolError
from mpisgd.job.finish import Outcome, check_books, finish
from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict
from mpisgd.records.log.writer import TableFile

PUSHES = 1_000_000
AT_ONCE = 50_000
NBYTES = PUSHES * schema.PUSHES.itemsize


@contextmanager
def measured(most: int) -> Iterator[None]:
    """Fails where more bytes were held at a time. What HDF5 itself holds is not seen: its caches are bounded."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak / 1e6:.0f} MB were held, of a table of {NBYTES / 1e6:.0f} MB"


def append(file: TableFile, table: str, rows: np.ndarray) -> None:
    """Many at once, as `TableFile.append` puts them one by one."""
    file._tables[table].rows[: len(rows)] = rows
    file._tables[table].filled = len(rows)
    file.flush()


def big_run(path: Path) -> None:
    """Two gradients to an update, of one shard."""
    directory.claim(path, overwrite=False)
    directory.write_config(path, "shards = 1\n[environment]\nlearners = 2\n")
    file = TableFile(path / schema.shard_file(0), shard=0, flush_rows=AT_ONCE, flush_s=1e9)
    random = np.random.default_rng(1)
    for start in range(0, PUSHES, AT_ONCE):
        pushes = np.zeros(AT_ONCE, schema.PUSHES)
        pushes["clock"] = np.arange(start, start + AT_ONCE) // 2
        pushes["verdict"] = Verdict.APPLY
        pushes["answer_s"] = random.random(AT_ONCE)
        append(file, "pushes", pushes)
        updates = np.zeros(AT_ONCE // 2, schema.UPDATES)
        updates["clock"] = np.arange(start // 2, (start + AT_ONCE) // 2) + 1
        append(file, "updates", updates)
    assert file._file is not None
    assert file._file.id.get_mdc_config().max_size <= 4 << 20, "HDF5's own cache is bounded"
    with measured(NBYTES // 4):
        file.close((0, PUSHES // 2, 0, PUSHES, PUSHES, 0))
    TableFile(path / schema.evaluator_file(), shard=-1, flush_rows=9, flush_s=1e9).close()


@pytest.mark.slow
def test_the_end_of_a_long_run(tmp_path: Path) -> None:
    big_run(tmp_path / "run")
    outcome = Outcome(tmp_path / "run", (PUSHES // 2,), (0,), False, 1.0)
    with measured(NBYTES // 4):
        check_books(Run(outcome.path), 0, PUSHES // 2)
        finish(outcome, Run(outcome.path))
    run = Run(tmp_path / "run")
    assert run.done
    with h5py.File(run.path / schema.LOG) as log:
        assert log["pushes"][:].tobytes() == run.pushes.tobytes()
    with pytest.raises(ProtocolError, match=rf"{PUSHES // 2} logged updates at clock {PUSHES // 2 + 1}"):
        check_books(Run(run.path), 0, PUSHES // 2 + 1)
