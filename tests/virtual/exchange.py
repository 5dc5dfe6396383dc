"""Ranks that exchange messages in virtual time, and note when: for tests of exact nanoseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisgd.comm.messages import Tag
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.vectors.memory import SizedVector
from tests.virtual.scene import Scene

#: 10 ns for each message, 100 ns on the way, 1 byte/ns.
EXACT = NetworkOptions(latency_s=100e-9, overhead_s=10e-9, bandwidth=1e9, node_bandwidth=1e9, local_bandwidth=1e9)
ANYTHING = ((None, None),)
PULL, ANSWER, PUSH = (0, 0), (0,) * 5, (0,) * 12
BODY = 1000


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
