"""Malformed messages: those that a rank fires at a shard, and answers with a fault (`fuzz.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from mpisgd.comm.messages import FINAL, LAYOUTS, NOTHING_MORE, Ending, Tag

Shots = list[tuple[int, bytes]]


class Gun:
    """Makes malformed messages for a shard whose slices have so many bytes, from a role; the learner is learner 1 of 2."""

    def __init__(self, generator: random.Random, nbytes: int, role: str, tolerant: bool) -> None:
        self.random = generator
        self.nbytes = nbytes
        self.gradients = 2 if role in ("leader", "member") else 1
        may_pull = role == "evaluator" or (role == "shard" and tolerant)  # there shard 0 evaluates, or speaks for the evaluator
        self.kinds: dict[str, Callable[[], Shots]] = {
            "size of the header": lambda: [(self._tag(), self.random.randbytes(self.random.choice([0, 1, 8, 95, 105, 5000])))],
            "magic": lambda: [(tag := self._tag(), self.random.randbytes(LAYOUTS[tag].nbytes))],
            "learner_id": lambda: self._push(learner_id=self.random.choice([-1, 0, 2, 2**31, -(2**63)])),
            "timestamp": lambda: self._push(timestamp=self.random.choice([-1, 2**40, 2**63 - 1])),
            "seq": lambda: self._push(seq=self.random.choice([-1, -(2**63), 2**62])),
            "samples": lambda: self._push(samples=self.random.choice([0, -5, 2**31, 2**50])),
            "gradients": lambda: self._push(gradients=self.random.choice([0, 3, -1, 2**31])),
            "nbytes": lambda: self._push(nbytes=self.random.choice([0, self.nbytes - 4, -self.nbytes, 2**40])),
            "slice without header": lambda: [(Tag.GRADIENT, self._slice())],
            # and something else at once: with the next slice without header, as pulls go first, it would make a whole push
            "header without slice": lambda: [*self._push()[:1], (77, b"")],
            "longer slice": lambda: [self._push()[0], (Tag.GRADIENT, self._slice() + bytes(self.random.choice([1, 4, 10**6])))],
            "shorter slice": lambda: [
                self._push()[0],
                (Tag.GRADIENT, self._slice()[: self.random.choice([0, 4, self.nbytes - 4])]),
            ],
            "unknown tag": lambda: [(self.random.randrange(40, 30000), self.random.randbytes(self.random.randrange(200)))],
            "not for shards": lambda: [(tag := self.random.choice([Tag.ANSWER, Tag.NOTICE]), self._header(tag))],
            "goodbye of another": lambda: [(Tag.GOODBYE, LAYOUTS[Tag.GOODBYE].pack((0, 3, 1)))],
            "ending of a goodbye": lambda: [
                (Tag.GOODBYE, LAYOUTS[Tag.GOODBYE].pack((1, 3, self.random.choice([-1, 1 + max(Ending), 2**40]))))
            ],
            "snapshot": lambda: self._snapshot([-3, -9, -(2**62)] if may_pull else [0, FINAL, -9]),
            "enough of what": lambda: self._snapshot([0], enough=self.random.choice([-1, -(2**62)])),
            "signal": lambda: [(Tag.INTERRUPT, LAYOUTS[Tag.INTERRUPT].pack((self.random.choice([0, -1, 9, 2**40]),)))],
            "end of the run": lambda: [(self.random.choice([Tag.HERE, Tag.MET]), self._words())],
            "news of the dead": lambda: [(self.random.choice([Tag.LOST, Tag.STUCK, Tag.ROUND]), self._words())],
            "long": lambda: [(self.random.randrange(40, 30000), bytes(3 * 2**20 + 1))],
        }
        if not may_pull:
            self.kinds["nothing more to evaluate"] = lambda: self._snapshot([NOTHING_MORE])
        if role == "learner":  # a team's may come late
            self.kinds["NaN"] = lambda: self._push(seq=0, body=np.full(self.nbytes // 4, np.nan, np.float32).tobytes())
        if role == "learner" and tolerant:  # elsewhere books that do not balance are our own bug, and end the job
            wrong = (-1, 10**9, 2**62)
            self.kinds["pushes of a goodbye"] = lambda: [
                (Tag.GOODBYE, LAYOUTS[Tag.GOODBYE].pack((1, self.random.choice(wrong), Ending.FINISHED)))
            ]

    def shoot(self) -> tuple[str, Shots]:
        kind = self.random.choice(list(self.kinds))
        return kind, self.kinds[kind]()

    def _tag(self) -> int:
        return self.random.choice([Tag.PUSH, Tag.PULL, Tag.GOODBYE, Tag.GAVE_UP, Tag.SNAPSHOT_PULL])

    def _snapshot(self, numbers: list[int], enough: int = 0) -> Shots:
        return [(Tag.SNAPSHOT_PULL, LAYOUTS[Tag.SNAPSHOT_PULL].pack((self.random.choice(numbers), enough)))]

    def _words(self) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 8, 24, 72, 5000]))

    def _header(self, tag: int) -> bytes:
        return LAYOUTS[tag].pack(tuple(0 for _ in LAYOUTS[tag].fields))

    def _slice(self) -> bytes:
        return bytes(self.nbytes)

    def _push(self, body: bytes | None = None, **fields: float) -> Shots:
        told = {**dict.fromkeys(LAYOUTS[Tag.PUSH].fields, 0), "learner_id": 1, "samples": 16, "nbytes": self.nbytes}
        header = LAYOUTS[Tag.PUSH].pack(tuple((told | {"gradients": self.gradients, "loss": 1.0} | fields).values()))
        return [(Tag.PUSH, header), (Tag.GRADIENT, self._slice() if body is None else body)]


def spoilt(answer: str, layout: Any, fields: tuple[Any, ...], bodies: list[bytes]) -> tuple[bytes, list[bytes]]:
    """The header and bodies of an answer with this fault."""
    told = dict(zip(layout.fields, fields, strict=True))
    if answer in ("longer body", "shorter body"):
        return layout.pack(fields), [body + bytes(64) if answer == "longer body" else body[:-4] for body in bodies]
    wrong = {"shard": 7, "nbytes": 2**40, "clock": -5, "ending": 77, "notices": 10**6}
    if answer in wrong:
        told[answer] = wrong[answer]
        if answer == "ending":
            told["nbytes"], bodies = 0, [b"" for _ in bodies]
    header = layout.pack(tuple(told.values()))
    if answer == "magic":
        header = bytes(byte ^ 255 for byte in header)
    return header + bytes(8) if answer == "longer header" else header[:-8] if answer == "shorter header" else header, bodies
