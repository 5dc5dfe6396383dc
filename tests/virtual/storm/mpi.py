"""An MPI in virtual time, with the calls that the package makes, and the failures that ULFM tells of.

What a transfer moves is read from the sender's memory, and written into the receiver's, while it is under way, in two halves: who
changes memory that is still being sent, or reads what has not come whole, is found out. Messages of one pair and tag come in their
order; those of other tags may overtake them, where who receives asks for a tag and the machine `reorders`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.virtual.storm.machine import Machine

ANY = -1
BYTE = "byte"


class MPIError(Exception):
    """What MPI raises."""

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(f"{kind}{f': {why}' if why else ''}")
        self.kind = kind

    def Get_error_class(self) -> str:
        return self.kind


class Status:
    def __init__(self) -> None:
        self.source = self.tag = ANY
        self.nbytes = 0

    def Get_elements(self, datatype: object) -> int:
        return self.nbytes

    def Get_tag(self) -> int:
        return self.tag

    def set(self, source: int, tag: int, nbytes: int) -> None:
        self.source, self.tag, self.nbytes = source, tag, nbytes


class Group:
    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.size = len(self.ranks)

    def Incl(self, places: Sequence[int]) -> Group:
        return Group([self.ranks[place] for place in places])

    @staticmethod
    def Translate_ranks(group: Group, places: Sequence[int], other: Group) -> list[int]:
        return [group.ranks[place] for place in places]


class Request:
    """What a rank waits for; `peer`: whose death ends it."""

    def __init__(self, comm: Comm, peer: int = ANY) -> None:
        self.comm = comm
        self.peer = peer
        self.done = False
        self.error: MPIError | None = None
        self.source, self.tag, self.nbytes = ANY, ANY, 0
        self.buffer: memoryview | None = None

    def Test(self, status: Status | None = None) -> bool:
        comm = self.comm
        if self.done:
            if status is not None:
                status.set(self.source, self.tag, self.nbytes)
            return True
        comm.check_revoked()
        if self.error is not None:
            raise self.error
        if any(rank in comm.process.knows_dead for rank in self.of()):
            raise MPIError("ERR_PROC_FAILED", f"rank {self.peer}")
        comm.process.vain += 1
        return False

    def of(self) -> Sequence[int]:
        return () if self.peer == ANY else (self.peer,)

    def Wait(self, status: Status | None = None) -> None:
        while not self.Test(status):
            self.comm.machine.look_away()

    def Cancel(self) -> None:
        posted = self.comm.posted
        if self in posted:
            posted.remove(self)
        self.done = True

    @staticmethod
    def Waitall(requests: Sequence[Request]) -> None:
        for request in requests:
            request.Wait()

    def ends(self, error: MPIError | None = None) -> None:
        self.done, self.error = error is None, error
        self.comm.process.changed()


class Collective(Request):
    """One rank's part in what these do together."""

    def __init__(self, comm: Comm, ranks: Sequence[int], said: Any, table: Any) -> None:
        super().__init__(comm)
        self.ranks, self.said, self.table = ranks, said, table

    def of(self) -> Sequence[int]:
        return self.ranks


class Subset:
    """Some ranks, that gather what each of them says."""

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        self._comm, self._ranks = comm, tuple(ranks)
        self._collectives = 0

    def Get_rank(self) -> int:
        return self._ranks.index(self._comm.rank)

    def Iallgather(self, said: Any, table: Any) -> Request:
        self._collectives += 1
        return self._comm.together(self._ranks, self._collectives, said, table)

    def Free(self) -> None:
        """Nobody counts them."""


class Message:
    """A message; until it is received, its `data` is the sender's memory, unless it was small enough to be copied."""

    def __init__(self, comm: Comm, dest: int, tag: int, body: Any, synchronous: bool) -> None:
        machine = comm.machine
        self.sender, self.dest, self.tag = comm, dest, tag
        view = memoryview(body).cast("B")
        self.nbytes = view.nbytes
        self.eager = self.nbytes <= machine.eager_nbytes or self.nbytes < 200  # headers are copied, as MPIs do
        self.data = memoryview(bytes(view)) if self.eager else view
        self.sending = Request(comm, dest)
        self.sending.done = self.nbytes <= machine.eager_nbytes and not synchronous
        self.arrived = self.vanished = False

    def Irecv(self, into: Any) -> Request:
        request = self.receiver.receiving(into, self.sender.rank, self.tag)
        self.meets(request)
        return request

    def Recv(self, into: Any) -> None:
        self.Irecv(into).Wait()

    @property
    def receiver(self) -> Comm:
        machine = self.sender.machine
        return machine.comms[self.sender.context][self.dest]

    def meets(self, request: Request) -> None:
        """The receive and the message have met: the bytes go over."""
        assert request.buffer is not None
        request.source, request.tag, request.nbytes = self.sender.rank, self.tag, self.nbytes
        if self.nbytes > request.buffer.nbytes:
            request.ends(MPIError("ERR_TRUNCATE"))
            self._taken()
        elif self.eager:
            request.buffer[: self.nbytes] = self.data
            request.ends()
            self._taken()
        else:
            self._moves(request, 0, self.nbytes // 2)

    def _moves(self, request: Request, start: int, end: int) -> None:
        """A half of a large message, as it is now; both ends must be at work."""
        machine = self.sender.machine

        def move() -> None:
            assert request.buffer is not None
            if self.sender.process.dead or self.receiver.process.dead:
                return  # whoever lives is told of the death
            request.buffer[start:end] = self.data[start:end]
            if end < self.nbytes:
                self._moves(request, end, self.nbytes)
            else:
                request.ends()
                self._taken()

        machine.over(self.sender.rank, self.dest, lambda: self.sender.process.at_work(lambda: self.receiver.process.at_work(move)))

    def _taken(self) -> None:
        if not self.sending.done:
            machine = self.sender.machine
            machine.over(self.dest, self.sender.rank, lambda: None if self.sending.done else self.sending.ends())


class Comm:
    """One rank's end of a communicator. `context`: its number among those that were duplicated of one another."""

    def __init__(self, machine: Machine, rank: int, context: int) -> None:
        self.machine, self.rank, self.context = machine, rank, context
        self.process = machine.processes[rank]
        self.inbox: list[Message] = []
        self.posted: list[Request] = []
        self._acknowledged: set[int] = set()
        self._collectives = 0

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return len(self.machine.processes)

    def Get_group(self) -> Group:
        return Group(range(self.Get_size()))

    # ------------------------------------------------------------------------------------------------------------ failures

    def check_revoked(self) -> None:
        if self.process.knows_revoked:
            raise MPIError("ERR_REVOKED")

    def Is_revoked(self) -> bool:
        return self.process.knows_revoked

    def Revoke(self) -> None:
        self.machine.revoke(self.rank)

    def Get_failed(self) -> Group:
        return Group(sorted(self.process.knows_dead))

    def Ack_failed(self, count: int) -> None:
        self._acknowledged = set(sorted(self.process.knows_dead)[:count])

    # ---------------------------------------------------------------------------------------------------------------- send

    def Isend(self, body: Any, dest: int, tag: int) -> Request:
        return self._send(body, dest, tag, synchronous=False)

    def Issend(self, body: Any, dest: int, tag: int) -> Request:
        return self._send(body, dest, tag, synchronous=True)

    def _send(self, body: Any, dest: int, tag: int, *, synchronous: bool) -> Request:
        self.machine.calls(self.process)
        self.check_revoked()
        if dest in self.process.knows_dead:
            raise MPIError("ERR_PROC_FAILED", f"rank {dest}")
        message = Message(self, dest, tag, body, synchronous)
        message.receiver.inbox.append(message)
        self.machine.send(message)
        return message.sending

    # ------------------------------------------------------------------------------------------------------------- receive

    def Irecv(self, into: Any, source: int, tag: int) -> Request:
        self.machine.calls(self.process)
        self.check_revoked()
        request = self.receiving(into, source, tag)
        for message in self.inbox:
            if message.sender.rank == source and message.tag == tag:
                if message.arrived:
                    self.inbox.remove(message)
                    message.meets(request)
                    return request
                break
        self.posted.append(request)
        return request

    def receiving(self, into: Any, source: int, tag: int) -> Request:
        request = Request(self, source)
        request.buffer, request.source, request.tag = memoryview(into).cast("B"), source, tag
        return request

    def arrives(self, message: Message) -> None:
        """A message is here: the first receive that was posted for it is its; or it waits to be looked for."""
        still = [each for each in self.inbox if (each.sender, each.tag, each.arrived) == (message.sender, message.tag, False)]
        assert still[0] is message, "messages of one pair and tag come in their order"
        message.arrived = True
        for request in self.posted:
            if (request.source, request.tag) == (message.sender.rank, message.tag):
                self.posted.remove(request)
                self.inbox.remove(message)
                message.meets(request)
                break
        self.process.changed()

    def Iprobe(self, source: int, tag: int, status: Status) -> bool:
        return self._look(source, tag, status) is not None

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None:
        message = self._look(source, tag, status)
        if message is not None:
            self.inbox.remove(message)
            self.machine.calls(self.process)
        return message

    def _look(self, source: int, tag: int, status: Status) -> Message | None:
        """Find a message; of each sender the first that it has sent, of that tag."""
        self.check_revoked()
        unknown = self.process.knows_dead - self._acknowledged
        if source == ANY and unknown:
            raise MPIError("ERR_PROC_FAILED_PENDING", f"ranks {sorted(unknown)}")
        seen: set[int] = set()
        found: list[Message] = []
        for message in self.inbox:
            sender = message.sender.rank
            if sender in seen or source not in (ANY, sender) or tag not in (ANY, message.tag):
                continue
            seen.add(sender)
            if message.arrived:
                found.append(message)
        if not found:
            if source in self.process.knows_dead:
                raise MPIError("ERR_PROC_FAILED", f"rank {source}")
            self.process.vain += 1
            return None
        chosen = found[0] if len(found) == 1 else self.machine.dice.choice(found)
        self.process.vain = self.process.waited = 0
        status.set(chosen.sender.rank, chosen.tag, chosen.nbytes)
        return chosen

    # ----------------------------------------------------------------------------------------------------------- all of them

    def Ibarrier(self) -> Request:
        return self.Iallgather(None, None)

    def Iallgather(self, said: Any, table: Any) -> Request:
        self._collectives += 1
        return self.together(range(self.Get_size()), self._collectives, said, table)

    def Igather(self, said: Any, table: Any, root: int) -> Request:
        return self.Iallgather(said, table if self.rank == root and table.size else None)

    def Ibcast(self, buffer: Any, root: int) -> Request:
        return self.Iallgather(buffer if self.rank == root else b"", buffer)

    def Create_group(self, group: Group) -> Subset:
        return Subset(self, group.ranks)

    def together(self, ranks: Sequence[int], number: int, said: Any, table: Any) -> Request:
        """The so-manieth gathering of these ranks; None is a barrier."""
        self.machine.calls(self.process)
        self.check_revoked()
        request = Collective(self, ranks, said, table)
        parts = self.machine.collectives[self.context, tuple(ranks), number]
        parts.append(request)
        if len(parts) == len(ranks):
            for each in parts:
                self.machine.at(self.machine.delay_ns(), partial(self._all_there, each, parts))
        return request

    @staticmethod
    def _all_there(request: Collective, parts: list[Collective]) -> None:
        if request.table is not None:
            into = memoryview(request.table).cast("B")
            for part in parts:
                said, place = memoryview(part.said).cast("B"), part.ranks.index(part.comm.rank)
                into[place * said.nbytes : (place + 1) * said.nbytes] = said
        request.ends()


def equip(machine: Machine) -> Machine:
    """Give each process of a machine its communicators: of the job, and of the heartbeat."""
    ranks = range(len(machine.processes))
    machine.comms = [[Comm(machine, rank, context) for rank in ranks] for context in range(2)]
    return machine
