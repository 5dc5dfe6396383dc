"""Stand-ins without MPI: messages that lie before a rank, a communicator of threads."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import mpisgd

ROOM = Path(mpisgd.__file__).parent / "comm" / "mpi"


class Stuck(AssertionError):
    """A rank waits for what nobody will send: under MPI this would be a hang."""


# ---------------------------------------------------------------------------------------------------- MPI without MPI


class Envelope(NamedTuple):
    """A message that has arrived, whole, at the only rank there is."""

    source: int
    tag: int
    payload: bytes

    def Recv(self, into: Any) -> None:
        view = memoryview(into).cast("B")
        view[: len(self.payload)] = self.payload


class Status:
    source = tag = nbytes = -1

    def Get_elements(self, datatype: object) -> int:
        return self.nbytes

    def Get_tag(self) -> int:
        return self.tag


class TruncatedError(Exception):
    """What MPI raises where a message is longer than the memory that was posted for it."""

    def Get_error_class(self) -> int:
        return ERR_TRUNCATE


ERR_TRUNCATE = 15


class Done:
    """A request that needs no waiting for; of a receive, so many bytes have come."""

    def __init__(self, nbytes: int = -1, room: int = -1) -> None:
        self.nbytes, self.room = nbytes, room

    def Wait(self, status: Status | None = None) -> None:
        if self.nbytes > self.room:
            raise TruncatedError
        if status is not None:
            status.nbytes = self.nbytes

    def Test(self, status: Status | None = None) -> bool:
        self.Wait(status)
        return True


class Comm:
    """An mpi4py communicator of one rank before which messages lie; it says which of MPI's sends were used, and for what."""

    def __init__(self) -> None:
        self.inbox: list[Envelope] = []
        self.sent: list[tuple[str, int, int, bytes]] = []

    def Get_rank(self) -> int:
        return 0

    def Isend(self, buffer: Any, dest: int, tag: int) -> Done:
        return self._send("Isend", buffer, dest, tag)

    def Issend(self, buffer: Any, dest: int, tag: int) -> Done:
        return self._send("Issend", buffer, dest, tag)

    def _send(self, how: str, buffer: Any, dest: int, tag: int) -> Done:
        self.sent.append((how, dest, tag, bytes(memoryview(buffer).cast("B"))))
        return Done()

    def Irecv(self, into: Any, source: int, tag: int) -> Done:
        message = self.Improbe(source, tag, Status())
        if message is None:
            raise Stuck(f"nothing of tag {tag} from rank {source}; there are only {self.inbox}")
        room = memoryview(into).nbytes
        if len(message.payload) <= room:
            message.Recv(into)
        return Done(len(message.payload), room)

    def Improbe(self, source: int, tag: int, status: Status) -> Envelope | None:
        """The first that matches, taken out. Raises Stuck where there is nothing at all: nothing ever comes."""
        for message in self.inbox:
            if source in (-1, message.source) and tag in (-1, message.tag):
                self.inbox.remove(message)
                status.source, status.tag, status.nbytes = message.source, message.tag, len(message.payload)
                return message
        if not self.inbox:
            raise Stuck("the inbox is empty")
        return None

    def Iprobe(self, source: int, tag: int, status: Status) -> bool:
        """Whether one is there, which stays. Raises Stuck where there is nothing at all."""
        before = list(self.inbox)
        found = self.Improbe(source, tag, status) is not None
        self.inbox = before
        return found

    def Mprobe(self, source: int, tag: int, status: Status) -> Envelope:
        message = self.Improbe(source, tag, status)
        if message is None:
            raise Stuck(f"nothing of tag {tag} from rank {source}; there are only {self.inbox}")
        return message


def wire_without_mpi() -> types.ModuleType:
    """`mpisgd.comm.mpi.wire` and what it is made of, loaded beside the real ones, which would start MPI."""
    stub = types.ModuleType("mpisgd.comm.mpi.library")
    request = types.SimpleNamespace(Waitall=lambda requests: None)
    errors = {"Exception": TruncatedError, "ERR_TRUNCATE": ERR_TRUNCATE, "ERR_IN_STATUS": 18}
    mpi = types.SimpleNamespace(Status=Status, ANY_SOURCE=-1, ANY_TAG=-1, BYTE=object(), Request=request, **errors)
    stub.MPI = mpi  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:  # of these alone: what else is imported meanwhile stays
        patch.setitem(sys.modules, stub.__name__, stub)
        for name in ("clock", "transfers", "message_queue", "wire"):
            spec = importlib.util.spec_from_file_location(f"{name}_without_mpi", ROOM / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, f"mpisgd.comm.mpi.{name}", module)
            spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------- a communicator of threads


class Aborted(BaseException):
    """Stands for the end of the process that has called `Abort`."""


class Threads:
    """An mpi4py communicator of so many threads, of which each calls `allgather` as often as the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=10)
        self._values: list[Any] = [None] * size
        self._local = threading.local()
        self.aborted: list[int] = []

    def Get_rank(self) -> int:
        return int(getattr(self._local, "rank", 0))

    def Get_size(self) -> int:
        return self.size

    def Abort(self, status: int) -> None:
        self.aborted.append(status)
        raise Aborted(status)

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.Get_rank()] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def bcast(self, value: Any, root: int) -> Any:
        return self.allgather(value)[root]

    def everywhere(self, action: Callable[[int], Any]) -> list[Any]:
        """What `action(rank)` returned, or the exception it raised, on each rank."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = action(rank)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        return results


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error by hand."""
    return ((output - target) ** 2).mean()


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
