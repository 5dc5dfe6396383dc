"""What the options of every protocol say of it before it is made: what goes with it, and how its learners work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError, nearest
from mpisgd.rules.protocol import Protocol

#: How a gradient of staleness tau is weighted; `modulation.py` says what each is.
MODULATIONS = ("none", "inverse", "inverse_plus_one", "exponential:0.1")


@dataclass(frozen=True)
class ProtocolOptions(ABC):
    """What a user may choose of a protocol: a frozen dataclass beside its rules, which says in these words what else holds.

    Nothing else in the package names a protocol: whoever wants to know something of it asks here.
    """

    collective: ClassVar[bool] = False
    """Learners double as shards: gradients and weights move by collective calls."""
    duplex: ClassVar[bool] = False
    """A pull need not wait for its learner's own push, and may be asked for before it."""

    streams: ClassVar[bool] = False
    """An update is made at once when the pushes that it is made of are known, whatever is in them: they may come in chunks."""
    alike: ClassVar[bool] = False
    """All shards make an update of the gradients of the same mini-batches, and a learner's next one waits for all of them."""
    batch: ClassVar[bool] = False
    """The whole batch makes each step, under a coordinator of its own (`sandblaster/`): shards judge no gradients."""

    @property
    def fresh(self) -> bool:
        """Whether only gradients of staleness 0 are ever applied."""
        return False

    @property
    def rejects(self) -> bool:
        """Whether a gradient may be sent back, to be computed again."""
        return False

    @property
    def aborts(self) -> bool:
        """Whether learners that are still computing are told to give up."""
        return False

    @property
    def teams(self) -> bool:
        """Whether a team's sum may be pushed as one gradient: it is of one clock, and taken or dropped as a whole."""
        return False

    @property
    def mini_batches_per_push(self) -> int:
        """Mini-batches whose gradients a learner sums into one push."""
        return 1

    @property
    def mini_batches_per_pull(self) -> int:
        """Mini-batches after which a learner pulls; above 1 it steps by itself between."""
        return 1

    @property
    def own_alpha(self) -> float | None:
        """Learning rate of a learner's own steps; None = alpha0."""
        return None

    @property
    def deadline_s(self) -> float:
        """Seconds after an update (or the start) at which the protocol is told that the next takes long (`on_timeout`)."""
        return math.inf

    @abstractmethod
    def make(self, lambda_: int) -> Protocol:
        """The protocol of one shard among `lambda_` learners; ConfigError where these options do not fit so many."""

    def among(self, lambda_: int, learners: int) -> Self:
        """The options that mean the same among `learners` as these do among `lambda_`."""
        return self


def check_modulation(name: str) -> None:
    """A name, or two with a colon between them: which, `modulation.py` finds out. Raises ConfigError."""
    known = f"{', '.join(MODULATIONS)} (or another number), or package.module:function{nearest(name, MODULATIONS)}"
    require(name in MODULATIONS or ":" in name, "protocol.modulation", name, known)


def names_a_rule(modulation: str) -> bool:
    """Whether a weight of stale gradients is a function of the user's own, which may look at the clock."""
    return ":" in modulation and not modulation.startswith("exponential:")


def check_at_most(lambda_: int, **numbers: int | None) -> None:
    """Raises ConfigError where a number is above that of the learners."""
    for name, number in numbers.items():
        if number is not None and number > lambda_:
            raise ConfigError(f"protocol.{name} = {number}: expected at most lambda = {lambda_} learners")
