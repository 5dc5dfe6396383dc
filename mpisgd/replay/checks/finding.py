"""Place and reason of an impossible log entry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Finding:
    """A place in a log; `str()` is a single line.

    `row` counts from 0 in `table` of the shard's own file; -1 = the whole table. `shard` -1 = the whole run. Others: -1 = none.
    """

    why: str
    shard: int
    table: str
    row: int = -1
    clock: int = -1
    learner_id: int = -1
    seq: int = -1

    def __str__(self) -> str:
        named = {"clock": self.clock, "learner": self.learner_id, "mini-batch": self.seq}
        details = ", ".join(f"{name} {number}" for name, number in named.items() if number >= 0)
        row = f", row {self.row}" if self.row >= 0 else ""
        shard = f"shard {self.shard}, " if self.shard >= 0 else ""
        return f"{shard}{self.table}{row}{f' ({details})' if details else ''}: {self.why}"


class Untrue(Exception):
    """Impossible log; stays inside `replay`."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def refuse(why: str, shard: int, table: str, **place: int) -> NoReturn:
    raise Untrue(Finding(why, shard, table, **place))


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
