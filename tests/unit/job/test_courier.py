"""Files between nodes, by a communicator of fakes: in pieces, and taken to the end where they cannot be kept."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.base import durable
from mpisgd.base.errors import PeerError
from mpisgd.job.run import courier
from mpisgd.job.run.courier import Courier
from mpisgd.records.checkpoint.near import Near


class Wire:
    """Communicator of a rank that sends to itself.

    Args:
        hangs: no message moves after so many.
        slow: no message has moved at the first look.
    """

    def __init__(self, hangs: int = 1000, slow: bool = False) -> None:
        self.sent: list[np.ndarray] = []
        self._left, self._slow, self._looks = hangs, slow, 0

    def Dup(self) -> Wire:
        return self

    def Issend(self, content: np.ndarray, dest: int, tag: int) -> Any:
        self.sent.append(content.copy())
        return self

    def Irecv(self, room: np.ndarray, source: int, tag: int) -> Any:
        if self.sent:
            content = self.sent.pop(0)
            assert len(content) == len(room)
            room[:] = content
        return self

    def Recv(self, header: np.ndarray) -> None:
        header[:] = self.sent.pop(0)

    def Test(self) -> bool:
        self._looks += 1
        if self._slow and self._looks % 2:
            return False
        self._left -= 1
        return self._left >= 0


def couriers(wire: Wire, take: Any = None) -> Courier:
    made = Courier(wire, (), take, lambda why: None)  # type: ignore[arg-type]
    made._sources = frozenset({0})
    return made


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(courier, "_PIECE", 64)
    paths = tmp_path / "part", tmp_path / "account"
    for path, size in zip(paths, (1000, 64), strict=True):
        path.write_bytes(np.random.default_rng(size).bytes(size))
    return paths


def test_files_come_as_they_were_in_pieces(files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    wire, near = Wire(), Near(tmp_path / "run", "then", "node1", tmp_path / "root")
    made = couriers(wire, near.take)
    made.send(0, 10, 3, files)
    assert [len(message) for message in wire.sent] == [5, *[64] * 15, 40, 64]
    made._receive(0, 40, wire)  # type: ignore[arg-type]
    assert [path.read_bytes() for path in near.files(10, 3)] == [path.read_bytes() for path in files]


def test_a_full_node_takes_all_of_what_it_cannot_keep(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that sends is not held up, and what it sends next is taken for what it is."""
    (tmp_path / "root").mkdir()
    wire, near = Wire(), Near(tmp_path / "run", "then", "node1", tmp_path / "root")
    made = couriers(wire, near.take)
    write_all, written = durable.write_all, []

    def full(raw: Any, content: memoryview) -> None:
        written.append(len(content))
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "no space left on device")
        write_all(raw, content)

    made.send(0, 10, 3, files)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space left"):
        patched.setattr(durable, "write_all", full)
        made._receive(0, 40, wire)  # type: ignore[arg-type]
    assert wire.sent == [] and list((near.path / "clock-000010").iterdir()) == []
    made.send(0, 20, 3, files)
    made._receive(0, 40, wire)  # type: ignore[arg-type]
    assert near.files(20, 3)[0].read_bytes() == files[0].read_bytes()


def test_a_rank_that_hangs_is_given_up_once_and_memory_of_its_piece_stays(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, kept = Wire(hangs=3), []

    def take(clock: int, shard: int, *pieces: Iterable[np.ndarray]) -> None:
        for piece in itertools.chain(*pieces):
            kept.append(piece.size)

    made = couriers(wire, take)
    wire.sent = [np.array([courier.MAGIC, 10, 3, 1000, 64], np.int64), *[np.zeros(64, np.uint8)] * 3]
    monkeypatch.setattr(courier, "_LONGEST_S", 0.01)
    with pytest.raises(PeerError, match="has not moved a file for"):
        made._receive(0, 40, wire)  # type: ignore[arg-type]
    assert (kept, made._torn, len(made._kept)) == ([64, 64, 64], True, 1)


@pytest.mark.parametrize("takes", [False, True])
def test_a_slow_rank_is_given_up_when_the_whole_file_has_taken_too_long(
    takes: bool, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = couriers(Wire(slow=True))
    monkeypatch.setattr(courier, "_MOVE_S", 0.01)
    monkeypatch.setattr(courier, "_LONGEST_S", 0.08)
    with pytest.raises(PeerError, match="has not moved a file for"):
        if takes:
            list(made._pieces(0, 1000))
        else:
            made.send(0, 10, 3, files)
