"""What a rank waits for, as those see who watch it from another thread, and what it has sent, as they may print it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from mpisgd.base.speech import say
from mpisgd.comm.messages import Tag


class Transfer(ABC):
    """A message that is under way."""

    __slots__ = ()

    @abstractmethod
    def describe(self, name: Callable[[int], str]) -> str:
        """Describe the wait for it, where `name` says who a rank is."""


class Waiting:
    """The wait of one rank.

    Attributes:
        awaited: a message posted or being sent, patterns, or words; None = it does not wait.
        waits: how many are over.
        patient: it waits for what may well take long, so that the watchdog is told nothing.
    """

    def __init__(self) -> None:
        self.awaited: object = None
        self.waits = 0
        self.patient = False

    def goes_on(self) -> None:
        """A wait is over."""
        self.awaited = None
        self.waits += 1

    def describe(self, name: Callable[[int], str]) -> str:
        """Describe what this rank waits for, where `name` says who a rank is; empty where it takes whatever comes."""
        awaited = self.awaited
        if isinstance(awaited, Transfer):
            return awaited.describe(name)
        return f"waits for {awaited}" if isinstance(awaited, str) else ""


class Printed:
    """Messages that a rank sends, printed where MPISGD_MESSAGES=1."""

    def __init__(self, rank: int) -> None:
        self.on = os.environ.get("MPISGD_MESSAGES", "0") == "1"
        self._rank = rank

    def say(self, dest: int | str, tag: int, *bodies: Any) -> None:
        """Print a message that is sent, where that is switched on."""
        if self.on:
            say(f"r{self._rank} -> {dest} {Tag(tag).name} {sum(body.nbytes for body in bodies) / 1e6:.6g} MB")
