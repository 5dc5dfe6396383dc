"""What happens to a run's files when the disk does not play along; real disks that are full: `tests/mpi/test_storage.py`."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest

from mpisgd.base import storage
from mpisgd.base.errors import StorageError
from mpisgd.records.log import schema
from mpisgd.records.log.writer import TableFile

_open = h5py.File


def lockless(number: int) -> Any:
    """h5py on a file system that refuses locks with this error: the file is made, and then cannot be locked."""

    def open_file(path: Path, mode: str, *, locking: str | bool, **options: Any) -> h5py.File:
        if locking is False:
            return _open(path, mode, locking=False, **options)
        _open(path, mode).close()
        raise OSError(number, f"Unable to synchronously create file (unable to lock file, errno = {number})")

    return open_file


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_log_where_there_are_no_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.h5py, "File", lockless(number))
    file = TableFile(tmp_path / "a.h5", shard=0, flush_rows=4, flush_s=1.0)
    file.close()
    with pytest.raises(StorageError, match="File exists"):
        TableFile(tmp_path / "a.h5", shard=0, flush_rows=4, flush_s=1.0)


def test_a_log_that_another_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.h5py, "File", lockless(errno.EAGAIN))
    with pytest.raises(
        StorageError, match=r"a\.h5 cannot be written: Resource temporarily unavailable: find the process with the lock"
    ):
        TableFile(tmp_path / "a.h5", shard=0, flush_rows=4, flush_s=1.0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "x"), "No space left on device: make room"),
        (
            RuntimeError("Unable to flush (time = 1\n, errno = 122, error"),
            "Disk quota exceeded: remove something",
        ),
        (OSError(errno.EROFS, "x"), "Read-only file system: mount it for writing"),
        (OSError(errno.ESTALE, "x"), "Stale file handle: check that the file system is mounted"),
        (OSError(errno.EIO, "x"), "Input/output error: ask the administrator of the disk"),
        (OSError(errno.ENAMETOOLONG, "x"), "File name too long"),
        (RuntimeError("something\n else"), "something else"),
        (ValueError(), "ValueError"),
    ],
)
def test_causes(error: Exception, said: str) -> None:
    assert storage.cause(error).startswith(said)


FAILING = """
import resource, sys
from pathlib import Path
from mpisgd.records.log.writer import TableFile
file = TableFile(Path(sys.argv[1]), shard=0, flush_rows=4, flush_s=1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
try:
    for clock in range(4000):
        file.append("events", (0, clock, 0, -1, 0.0, 0.0))
except Exception as error:
    print(type(error).__name__, error)
file.append("events", (0, 0, 0, -1, 0.0, 0.0))
file.close()
print("end")
"""


@pytest.mark.slow
def test_a_process_whose_log_failed_ends_without_a_crash(tmp_path: Path) -> None:
    """HDF5 would try to write again at exit, and crash (TRAPS 8)."""
    path = tmp_path / schema.shard_file(0)
    done = subprocess.run([sys.executable, "-c", FAILING, str(path)], capture_output=True, text=True, check=False, timeout=3000)
    assert done.stdout == f"StorageError {path} cannot be written: File too large: {storage.MENDS[errno.EFBIG]}\nend\n"
    assert done.stderr == ""
    assert done.returncode == 1


REMOVED = """
import os, sys
from pathlib import Path
from mpisgd.base.errors import StorageError
from mpisgd.records.log.writer import TableFile
path = Path(sys.argv[1])
file = TableFile(path, shard=0, flush_rows=4, flush_s=1e9)
file.append("events", (0, 0, 0, -1, 0.0, 0.0))
file.flush()
os.rename(path, sys.argv[2])
if sys.argv[3] == "replaced":
    path.write_text("")
try:
    file.flush()
except StorageError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", pytest.param("replaced", marks=pytest.mark.rare)])
def test_a_log_that_somebody_removed_is_missed(how: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", REMOVED, str(tmp_path / "a.h5"), str(tmp_path / "b.h5"), how]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=3000)
    why = "No such file or directory: check that the file system is mounted"
    assert done.stdout.startswith(f"{tmp_path / 'a.h5'} cannot be written: {why}")
    assert (tmp_path / "b.h5").stat().st_size > 0


def test_what_else_cannot_be_raised_is_told_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come while Python drops an object of the file that is being written."""
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))

    class Dropped:
        def __init__(self, said: str) -> None:
            self.said = said

        def __del__(self) -> None:
            raise RuntimeError(self.said)

    with storage.writing(tmp_path / "file"):
        for said in ("Can't decrement id ref count (...)", "Ctrl-C"):
            Dropped(said)
    assert told == ["Ctrl-C"]
