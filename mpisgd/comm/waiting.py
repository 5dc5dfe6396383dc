"""A rank's wait, for watching threads, and a printer of sent messages."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from mpisgd.base.terminal import say
from mpisgd.comm.messages import Tag


class Transfer(ABC):
    __slots__ = ()

    @property
    @abstractmethod
    def peer(self) -> int:
        """Rank at the other end."""

    @abstractmethod
    def describe(self, name: Callable[[int], str]) -> str:
        """Describe the wait for this message."""


class Meeting(Transfer):
    """A meeting of all ranks, held up by `peer`."""

    __slots__ = ("_peer",)

    def __init__(self, peer: int) -> None:
        self._peer = peer

    @property
    def peer(self) -> int:
        return self._peer

    def describe(self, name: Callable[[int], str]) -> str:
        return f"waits to meet {name(self._peer)}"


class Waiting:
    """The wait of a rank.

    Attributes:
        awaited: a message, patterns, or words; None = no wait.
        waits: number of finished waits.
        patient: whether a long wait is normal: no news for the watchdog.
    """

    def __init__(self) -> None:
        self.awaited: object = None
        self.waits = 0
        self.patient = False

    def goes_on(self) -> None:
        self.awaited, self.patient = None, False
        self.waits += 1

    @property
    def peer(self) -> int | None:
        """Rank of the awaited transfer's other end."""
        awaited = self.awaited
        return awaited.peer if isinstance(awaited, Transfer) else None

    def describe(self, name: Callable[[int], str]) -> str:
        """Describe the wait; empty for patterns."""
        awaited = self.awaited
        if isinstance(awaited, Transfer):
            return awaited.describe(name)
        return f"waits for {awaited}" if isinstance(awaited, str) else ""


class Printed:
    """Printer of sent messages, where MPISGD_MESSAGES=1."""

    def __init__(self, rank: int) -> None:
        self.on = os.environ.get("MPISGD_MESSAGES", "0") == "1"
        self._rank = rank

    def say(self, dest: int | str, tag: int, *bodies: Any) -> None:
        if self.on:
            say(f"r{self._rank} -> {dest} {Tag(tag).name} {sum(body.nbytes for body in bodies) / 1e6:.6g} MB")
