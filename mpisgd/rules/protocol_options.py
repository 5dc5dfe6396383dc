"""Base of all protocols' options: facts known before the protocol itself is made."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError, nearest
from mpisgd.rules.protocol import Protocol

#: Weights of stale gradients; defined in `modulation.py`.
MODULATIONS = ("none", "inverse", "inverse_plus_one", "exponential:0.1")


@dataclass(frozen=True)
class ProtocolOptions(ABC):
    """Options of a protocol; `fresh`, `rejects`, `aborts` and `teams` as in `Protocol`.

    No other part of the package names a protocol: all questions about a protocol come here.
    """

    collective: ClassVar[bool] = False
    """Learners double as shards; vectors move by collective calls."""
    duplex: ClassVar[bool] = False
    """A pull may come before its learner's own push."""

    streams: ClassVar[bool] = False
    """An update follows from the known pushes, whatever their content: they may come in chunks."""
    alike: ClassVar[bool] = False
    """All shards update from the same mini-batches; learners wait for all shards."""
    batch: ClassVar[bool] = False
    """Each step takes the whole batch, under a coordinator; shards judge no gradients."""

    @property
    def fresh(self) -> bool:
        return False

    @property
    def rejects(self) -> bool:
        return False

    @property
    def aborts(self) -> bool:
        return False

    @property
    def teams(self) -> bool:
        return False

    @property
    def mini_batches_per_push(self) -> int:
        return 1

    @property
    def mini_batches_per_pull(self) -> int:
        """Above 1, the learner takes own steps between pulls."""
        return 1

    @property
    def own_alpha(self) -> float | None:
        """Learning rate of own steps; None = alpha0."""
        return None

    @property
    def deadline_s(self) -> float:
        """Seconds from an update (or the start) to `on_timeout`."""
        return math.inf

    @abstractmethod
    def make(self, lambda_: int) -> Protocol:
        """Return a shard's protocol. Raises ConfigError where these options do not fit `lambda_` learners."""

    def among(self, lambda_: int, learners: int) -> Self:
        """Return options of the same meaning among `learners`."""
        return self


def check_modulation(name: str) -> None:
    """Raise ConfigError unless a name is known, or has a colon."""
    known = f"{', '.join(MODULATIONS)} (or another number), or package.module:function{nearest(name, MODULATIONS)}"
    require(name in MODULATIONS or ":" in name, "protocol.modulation", name, known)


def names_a_rule(modulation: str) -> bool:
    """Return whether a modulation is a user's function of (tau, clock)."""
    return ":" in modulation and not modulation.startswith("exponential:")


def check_at_most(lambda_: int, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number > lambda_:
            raise ConfigError(f"protocol.{name} = {number}: expected at most lambda = {lambda_} learners")
