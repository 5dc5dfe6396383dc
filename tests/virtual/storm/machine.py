"""Virtual processes in virtual time, and what befalls them: killed, stopped, cut off, slow (`mpi.py` is how they talk).

Processes are greenlets, of which one runs at a time; who goes on when is a heap of events. One that has asked MPI in vain sleeps
until something has changed for it, or for a short, growing while, when it next looks at its clock: so polling costs little.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from tests.virtual.storm.mpi import Collective, Comm, Message

_LEAST_NS, _MOST_NS = 200_000, 50_000_000
"""A wait that looks in vain sleeps for so long, twice as long each time."""


class Hangs(Exception):
    """The virtual time is over, or nothing will ever happen any more, and ranks are left."""


class Task:
    """A thread of a rank."""

    def __init__(self, process: Process, main: Callable[[], None]) -> None:
        self.process = process
        self.turn = 0
        """Number of its pauses: what was to end an earlier one does nothing."""
        self.greenlet = greenlet(main)


class Process:
    """A rank. `vain`: times that it has looked for something in vain since it last looked away."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank = machine, rank
        self.dead = self.left = self.stopped = False
        self.knows_dead: set[int] = set()
        self.knows_revoked = False
        self.vain = self.waited = 0
        self.calls = 0
        self.at_call: dict[int, Callable[[], None]] = {}
        self.on_death: list[Callable[[], None]] = []
        self._sleepers: list[tuple[Task, int]] = []
        self._held: list[Callable[[], None]] = []

    @property
    def gone(self) -> bool:
        return self.dead or self.left

    def begin(self, main: Callable[[], None]) -> None:
        task = Task(self, main)
        self.machine.tasks.append(task)
        self.machine.at(self.rank + 1, lambda: self.machine.wake(task, 0))

    def at_work(self, action: Callable[[], None]) -> None:
        """Do it now, or when this rank, which is stopped, goes on."""
        if self.stopped:
            self._held.append(action)
        else:
            action()

    def changed(self) -> None:
        """Something has come of what this rank may be waiting for."""
        self.waited = 0
        sleepers, self._sleepers = self._sleepers, []
        for task, turn in sleepers:
            self.machine.at(self.machine.dice.randrange(1000, 30_000), partial(self.machine.wake, task, turn))

    def sleeps(self, task: Task) -> None:
        self._sleepers.append((task, task.turn))

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        held, self._held = self._held, []
        for action in held:  # in their order, and before what comes next
            self.at_work(action)


class Machine:
    """Ranks, links and a clock.

    Args:
        tells: whether MPI tells of failures (ULFM).
        latency_ns: of a message, on average; some take many times as long.
        eager_nbytes: bodies up to this size leave at once, from a copy.
        reorders: messages of one pair but of different tags may overtake each other, where who receives asks for a tag.
    """

    def __init__(
        self,
        size: int,
        dice: random.Random,
        *,
        tells: bool,
        latency_ns: int = 50_000,
        eager_nbytes: int = 0,
        reorders: bool = False,
    ) -> None:
        self.dice = dice
        self.tells = tells
        self.latency_ns = latency_ns
        self.eager_nbytes = eager_nbytes
        self.reorders = reorders
        self.now_ns = 0
        self.events = 0
        self.over_why = ""
        """Why the whole job was ended from outside; "" = it was not."""
        self.collectives: dict[tuple[int, tuple[int, ...], int], list[Collective]] = defaultdict(list)
        self.tasks: list[Task] = []
        self.processes = [Process(self, rank) for rank in range(size)]
        self.comms: list[list[Comm]] = []
        """Per context, each rank's communicator (`mpi.equip`)."""
        self.slow: dict[int, float] = {}
        """Per rank, how many times as long its messages take."""
        self.wall_s: dict[int, float] = defaultdict(float)
        """Per rank, by how much the clock that tells dates has jumped."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self._running: Task | None = None
        self._cut: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._last_ns: dict[tuple[int, ...], int] = {}
        self._hub = getcurrent()

    # -------------------------------------------------------------------------------------------------------------- events

    def at(self, in_ns: int, action: Callable[[], None]) -> None:
        self._serial += 1
        heappush(self._heap, (self.now_ns + max(0, in_ns), self._serial, action))

    def run(self, limit_ns: int) -> None:
        """Until all ranks are gone. Raises Hangs where virtual time comes to its limit before, or stands still."""
        self._hub = getcurrent()
        while not self.over_why and any(not each.gone for each in self.processes):
            if not self._heap:
                raise Hangs(f"nothing will ever happen: {self.left()}")
            self.now_ns, _, action = heappop(self._heap)
            if self.now_ns > limit_ns:
                raise Hangs(f"after {limit_ns * 1e-9:.0f} s: {self.left()}")
            self.events += 1
            action()

    def left(self) -> str:
        return ", ".join(f"rank {each.rank}{' (stopped)' * each.stopped}" for each in self.processes if not each.gone) + " left"

    def wake(self, task: Task, turn: int) -> None:
        process = task.process
        if task.turn != turn or process.dead or self.over_why:
            return
        if process.stopped:
            process.at_work(lambda: self.wake(task, turn))
            return
        task.turn += 1
        self._running = task
        task.greenlet.parent = self._hub
        task.greenlet.switch()
        self._running = None

    def pause(self, ns: int, *, until_change: bool = False) -> None:
        """The running rank does nothing for so long."""
        task = self._running
        assert task is not None
        turn = task.turn
        if until_change:
            task.process.sleeps(task)
        self.at(ns, lambda: self.wake(task, turn))
        self._hub.switch()

    def look_away(self) -> None:
        """The running rank has looked in vain: until something has changed, or for a while."""
        assert self._running is not None
        process = self._running.process
        process.vain = 0
        process.waited += 1
        self.pause(min(_MOST_NS, _LEAST_NS << min(process.waited, 10)), until_change=True)

    @property
    def rank(self) -> int:
        """Of the running rank."""
        assert self._running is not None
        return self._running.process.rank

    @property
    def runs(self) -> bool:
        """Whether a rank runs, and not what befalls them."""
        return self._running is not None

    @property
    def looks_in_vain(self) -> bool:
        return self._running is not None and self._running.process.vain > 0

    def calls(self, process: Process) -> None:
        """A rank calls MPI, which takes its time; and may be the last that it does."""
        process.calls += 1
        if process.calls in process.at_call:
            process.at_call[process.calls]()
        self.pause(self.dice.randrange(500, 5000))

    # ------------------------------------------------------------------------------------------------------------ messages

    def delay_ns(self) -> int:
        return 1 + round(self.latency_ns * (self.dice.expovariate(1.0) if self.dice.random() < 0.9 else self.dice.uniform(1, 40)))

    def send(self, message: Message) -> None:
        key = (message.sender.context, message.sender.rank, message.dest, *((message.tag,) * self.reorders))
        slow = max(self.slow.get(message.sender.rank, 1.0), self.slow.get(message.dest, 1.0))
        at_ns = max(self._last_ns.get(key, 0) + 1, self.now_ns + round(slow * self.delay_ns()))
        self._last_ns[key] = at_ns
        receiver = message.receiver

        def arrive() -> None:
            if not (receiver.process.dead or message.vanished):
                receiver.arrives(message)

        self.at(
            at_ns - self.now_ns, lambda: self._cross(message.sender.rank, message.dest, partial(receiver.process.at_work, arrive))
        )

    def over(self, source: int, dest: int, action: Callable[[], None]) -> None:
        """Something goes over a link."""
        self.at(self.delay_ns(), lambda: self._cross(source, dest, action))

    def _cross(self, source: int, dest: int, action: Callable[[], None]) -> None:
        held = self._cut.get((source, dest))
        if held is None:
            action()
        else:
            held.append(action)

    # ----------------------------------------------------------------------------------------------------- what befalls ranks

    def cut(self, source: int, dest: int) -> None:
        self._cut.setdefault((source, dest), [])

    def heal(self, source: int, dest: int) -> None:
        for action in self._cut.pop((source, dest), []):
            self._cross(source, dest, action)

    def free(self) -> None:
        """Cut links carry again: what they hold comes one by one, of any link next, in the order of each."""
        self.at(self.delay_ns(), partial(self._free, list(self._cut.items())))

    def _free(self, links: list[tuple[tuple[int, int], list[Callable[[], None]]]]) -> None:
        links = [(link, held) for link, held in links if self._cut.get(link) is held]
        if links:
            link, held = self.dice.choice(links)
            if held:
                held.pop(0)()
            if not held:
                del self._cut[link]
            self.at(self.delay_ns(), partial(self._free, links))

    def kill(self, rank: int) -> None:
        """Without a goodbye. Of what it was sending, some has left, the rest never will; the others are told, if MPI tells."""
        process = self.processes[rank]
        if process.gone:
            return
        process.dead, seen = True, f"the launcher sees that rank {rank} was killed"
        for action in process.on_death:
            action()
        self._lose_messages_of(rank)
        if self.tells:
            for other in self.processes:
                if other is not process:
                    self.at(self.dice.randrange(1_000_000, 80_000_000), partial(self._tell, other, rank))
        else:
            self.at(self.dice.randrange(1_000_000, 1_000_000_000), partial(self.end, seen))
        if all(each.dead for each in self.processes):  # nothing else happens until then
            self.end(seen)
        if self._running is not None and self._running.process is process:
            self._hub.switch()

    def _lose_messages_of(self, rank: int) -> None:
        for comms in self.comms:
            for comm in comms:
                mine: list[Message] = []
                for message in comm.inbox:
                    if message.sender.rank == rank:
                        mine = [] if message.arrived else [*mine, message]  # what came before one that is there was there, too
                lost = self.dice.randint(0, len(mine))
                for message in mine[len(mine) - lost :]:
                    message.vanished = True
                    comm.inbox.remove(message)

    @staticmethod
    def _tell(process: Process, rank: int) -> None:
        process.knows_dead.add(rank)
        process.changed()

    def leave(self, process: Process) -> None:
        """A rank's process ends. Where MPI tells of failures, that is one."""
        process.left = True
        if self.tells:
            for other in self.processes:
                self.at(self.dice.randrange(1_000_000, 80_000_000), partial(self._tell, other, process.rank))

    def revoke(self, rank: int) -> None:
        """The job is ended by a rank: the others come to know it, and the launcher ends those who do not."""
        for process in self.processes:
            delay_ns = 0 if process.rank == rank else self.dice.randrange(1_000_000, 300_000_000)
            self.at(delay_ns, partial(self._revoked, process))
        self.at(20 * 10**9, lambda: self.end("the launcher has waited long enough"))

    @staticmethod
    def _revoked(process: Process) -> None:
        process.knows_revoked = True
        process.changed()

    def end(self, why: str) -> None:
        """All ranks are killed."""
        if not self.over_why:
            self.over_why = why
            for process in self.processes:
                if not process.gone:
                    process.dead = True
                    for action in process.on_death:
                        action()
