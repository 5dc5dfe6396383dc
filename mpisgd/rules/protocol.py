"""What a synchronisation protocol is: integers in, decisions out. No tensors, no seconds, no MPI.

The rules that are the same for all (`rules.py`) ask, in this order:

1. `expects()`   whose push must be summed next, or None = anybody's;
2. `on_push()`   for each push: apply with a weight, drop or reject. `on_discard()` instead, where the gradient is not finite;
3. `update_due()` whether the sum is now to become an update; then `on_update()`;
4. `may_pull()`  before it answers a pull that asks for a clock it has reached.

`on_timeout()` says that the time for an update is over, where the protocol's options give it one; the rules then ask 3 again.
`on_departure()` tells it that a learner leaves while the others go on; the rules then ask 3 and 4 again, so that nobody waits for
ever. `on_return()` tells it that one is back which was only missed (`faults.py`). `on_resume()` may come first of all,
where a run that was interrupted goes on. The learner asks `next_clock()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from mpisgd.rules.verdict import Verdict


class Protocol(ABC):
    """The rules of one shard. Each shard has its own and decides alone (law 2)."""

    consistent: bool
    """Whether a learner computes only on slices of one clock over all shards."""

    fresh: bool = False
    """Whether only gradients of staleness 0 are ever applied."""

    ordered: ClassVar[bool] = False
    """Whether `expects` ever names a learner."""

    lockstep: ClassVar[bool] = False
    """Whether no update is made without everybody, so that a stale gradient is nothing that could be judged."""

    rejects: ClassVar[bool] = False
    """Whether `on_push` ever sends a gradient back, to be computed again."""

    teams: ClassVar[bool] = False
    """Whether a team's sum may be pushed as one gradient: those of one clock are all taken, or all dropped."""

    aborts: bool = False
    """Whether learners that are still computing are told when an update is done, and then give up their mini-batch."""

    exact: ClassVar[bool] = False
    """Whether each learner leaves by itself when its own share of the run has been applied; otherwise the shards stop the run
    once enough samples, of whichever learners, have been."""

    gradients_per_update: int
    """How many gradients normally make one update; the divisor itself is counted (law 3)."""

    pushes_per_pull: int = 1
    """After how many pushes a learner pulls; between, it goes on with what it has."""

    def __init__(self, lambda_: int) -> None:
        self.present = set(range(lambda_))

    def expects(self) -> int | None:
        """The learner_id whose push the shard must sum next, or None; asked where the protocol is `ordered`."""
        return None

    @abstractmethod
    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        """A gradient computed from the weights of `timestamp` is here, whole and finite; timestamp <= clock."""

    def on_discard(self, learner_id: int, timestamp: int, clock: int) -> None:  # noqa: B027 - most just do not count it
        """A gradient of this learner, from the weights of `timestamp`, will not be used: not finite, or applied here before."""

    @abstractmethod
    def update_due(self) -> bool:
        """Whether the gradients summed so far make an update now."""

    @abstractmethod
    def on_update(self) -> None:
        """The update was made and the clock advanced by one."""

    def on_timeout(self) -> None:  # noqa: B027 - most wait as long as it takes
        """The time for the update in the making is over."""

    def on_departure(self, learner_id: int) -> None:
        """The learner will push and pull no more, or is not to be waited for until it returns."""
        self.present.discard(learner_id)

    def on_return(self, learner_id: int, clock: int) -> None:
        """A learner that had departed is there again, and has been given the weights of `clock`."""
        self.present.add(learner_id)

    def on_resume(self, next_seq: list[int]) -> None:  # noqa: B027 - most only know of the update in the making
        """Before anything else: the run goes on after an interruption, learner l with its mini-batch `next_seq[l]`; whoever is
        present does, and no update is in the making."""

    def may_pull(self, learner_id: int, clock: int) -> bool:
        """Whether a learner may be given the weights of `clock` now."""
        return True

    @staticmethod
    @abstractmethod
    def next_clock(timestamp: int) -> int:
        """Learner: the least clock of the weights for the mini-batch after one computed on `timestamp`."""
