"""The driver for ranks of a virtual cluster, learners and shards of any kind: one main for each.

    scene = Scene(3, wire=WatchedWire)                  wires that hold law 1, and write down what goes over them
    scene.run({0: shard, 1: learner})                   rank 2 leaves at once; `DeadlockError` where none can go on
    exchange = Exchange(2)                              messages that take exact nanoseconds: `times` are those that mains note
    exchange.run({0: exchange.sends(0, 1, Tag.PULL, PULL), 1: exchange.takes(1)})

A learner's and a shard's ends of the exchange on such ranks are `tests/unit/channels.Job`; whole jobs are `jobs.simulated`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mpisgd.comm.messages import Fields, Tag
from mpisgd.comm.virtual.cluster import Cluster
from mpisgd.comm.virtual.network import Network
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.exchange.roles import Roles
from mpisgd.vectors.memory import SizedVector

ANSWERS = (Tag.ANSWER, Tag.NOTICE, Tag.SNAPSHOT_ANSWER)
FREE = NetworkOptions(latency_s=0.0, overhead_s=0.0, bandwidth=1e18, node_bandwidth=1e18, local_bandwidth=1e18)
#: 10 ns for each message, 100 ns on the way, 1 byte/ns.
EXACT = NetworkOptions(latency_s=100e-9, overhead_s=10e-9, bandwidth=1e9, node_bandwidth=1e9, local_bandwidth=1e9)
ANYTHING = ((None, None),)
PULL, ANSWER, PUSH = (0, 0), (0,) * 5, (0,) * 12
BODY = 1000


def packed(shards: int = 1, learners: int = 2, evaluator: bool = False) -> Roles:
    """Shards, learners, evaluator."""
    learner_ranks = tuple(range(shards, shards + learners))
    return Roles(tuple(range(shards)), learner_ranks, shards + learners if evaluator else learner_ranks[0])


class WatchedWire(VirtualWire):
    """Holds law 1: an answer is sent only to a receive that is posted. `sent` and `posted` are in the order of calls."""

    def __init__(self, cluster: Cluster, network: Network, wires: list[VirtualWire]) -> None:
        super().__init__(cluster, network, wires)
        self.everybody = wires
        self.sent: list[tuple[int, Tag]] = []
        self.posted: list[tuple[int, Tag]] = []
        self.unmet: Counter[tuple[int, int]] = Counter()
        self.asking = False

    def ask(self, dest: int, tag: int, fields: Fields, answer_tag: int, bodies: tuple[Any, ...] = ()) -> Any:
        self._posts(dest, answer_tag)
        self._sends(dest, tag)
        self.asking = True
        try:
            return super().ask(dest, tag, fields, answer_tag, bodies)
        finally:
            self.asking = False

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        if not self.asking:
            self._sends(dest, tag)
        return super().start(dest, tag, fields, *bodies)

    def post(self, source: int, tag: int, *bodies: Any) -> Any:
        if not self.asking:
            self._posts(source, tag)
        return super().post(source, tag, *bodies)

    def _sends(self, dest: int, tag: int) -> None:
        self.sent.append((dest, Tag(tag)))
        if tag in ANSWERS:
            theirs = self.everybody[dest].unmet  # type: ignore[attr-defined]
            assert theirs[self.rank, tag] > 0, f"law 1: rank {self.rank} answers rank {dest}, which has posted no receive"
            theirs[self.rank, tag] -= 1

    def _posts(self, source: int, tag: int) -> None:
        self.posted.append((source, Tag(tag)))
        self.unmet[source, tag] += 1


class Scene:
    """A virtual cluster.

    Args:
        nodes: the node of each rank; by default each has one of its own.
    """

    def __init__(
        self,
        size: int,
        *,
        network: NetworkOptions = FREE,
        nodes: list[int] | None = None,
        name: Callable[[int], str] = "somebody {}".format,
        wire: type[VirtualWire] = VirtualWire,
    ) -> None:
        self.cluster = Cluster(name)
        links = Network(network, nodes or list(range(size)))
        self.wires: list[Any] = []
        for _ in range(size):
            wire(self.cluster, links, self.wires)
        self.left: list[int] = []

    def run(self, mains: Mapping[int, Callable[[], None]]) -> None:
        """Rank r runs `mains[r]`; the others leave at once. `left` are the ranks that have returned."""

        def main(rank: int) -> None:
            if rank in mains:
                mains[rank]()
            self.left.append(rank)

        self.cluster.run(self.wires, [lambda rank=rank: main(rank) for rank in range(len(self.wires))])  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------- exact nanoseconds


def body() -> Any:
    return SizedVector(BODY // 4)


class Exchange(Scene):
    """Ranks whose wires are w[0], w[1], ...; `times[name]` is what `note(rank, name)` wrote down."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, **{"network": EXACT, **options})
        self.w: list[VirtualWire] = self.wires
        self.times: dict[str, int] = {}

    def note(self, rank: int, name: str) -> None:
        self.times[name] = self.w[rank].clock.now_ns()

    def sends(self, rank: int, dest: int, tag: Tag, fields: tuple[int, ...], *bodies: Any, after_ns: int = 0) -> Callable[[], None]:
        """A main: at `after_ns`, send this, and note when it was begun and done."""

        def main() -> None:
            self.w[rank].work(after_ns)
            sending = self.w[rank].start(dest, tag, fields, *bodies)
            self.note(rank, f"{rank} begun")
            self.w[rank].finish(sending)
            self.note(rank, f"{rank} done")

        return main

    def takes(self, rank: int, *bodies: Any, after_ns: int = 0, count: int = 1) -> Callable[[], None]:
        def main() -> None:
            self.w[rank].work(after_ns)
            for place in range(count):
                self.w[rank].take(ANYTHING)
                self.note(rank, f"{rank} took{place or ''}")
                if bodies:
                    self.w[rank].take_body(*bodies)
                self.note(rank, f"{rank} has{place or ''}")

        return main

    def posts(self, rank: int, source: int, tag: Tag, *bodies: Any, after_ns: int = 0, looks_ns: int = 0) -> Callable[[], None]:
        """A main: at `after_ns` post a receive, look at it at `looks_ns` or later."""

        def main() -> None:
            self.w[rank].work(after_ns)
            posted = self.w[rank].post(source, tag, *bodies)
            self.w[rank].work(looks_ns - after_ns if looks_ns else 0)
            self.w[rank].header(posted)
            self.note(rank, f"{rank} began")
            self.w[rank].finish(posted)
            self.note(rank, f"{rank} has")

        return main
