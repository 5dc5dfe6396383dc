"""Base of a synchronisation protocol: integers in, decisions out; no tensors, no seconds, no MPI.

The common rules (`rules.py`) ask in this order:

1. `expects()`     learner of the push to sum next;
2. `on_push()`     apply with a weight, drop or reject;
3. `update_due()`  whether to make an update; then `on_update()`;
4. `may_pull()`    whether to answer a pull for a clock already reached.

After `on_timeout()` the rules ask 3 again; after `on_departure()`, 3 and 4: nobody waits for ever. A missed learner comes back with
`on_return()` (`faults.py`). The learner asks `next_clock()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from mpisgd.rules.verdict import Verdict


class Protocol(ABC):
    """Rules of one shard, which decides alone (law 2)."""

    consistent: bool
    """Learners compute only on slices of equal clocks."""

    fresh: bool = False
    """Only gradients of staleness 0 are applied."""

    ordered: ClassVar[bool] = False
    """`expects` may name a learner."""

    lockstep: ClassVar[bool] = False
    """Every update needs all learners; a stale gradient is then an error."""

    rejects: ClassVar[bool] = False
    """`on_push` may reject a gradient."""

    teams: ClassVar[bool] = False
    """A team's sum may be pushed as a single gradient: all gradients of a clock are taken, or all dropped."""

    aborts: bool = False
    """Learners still computing at an update are told to give up."""

    exact: ClassVar[bool] = False
    """Each learner leaves once its own share is applied; else shards stop the run after enough samples."""

    gradients_per_update: int
    """Usual number of gradients in an update; the divisor is counted (law 3)."""

    pushes_per_pull: int = 1
    """Pushes from pull to pull; between, the learner steps by itself."""

    def __init__(self, lambda_: int) -> None:
        self.present = set(range(lambda_))

    def expects(self) -> int | None:
        """Return the learner to sum next, or None; asked where `ordered`."""
        return None

    @abstractmethod
    def on_push(self, learner_id: int, timestamp: int, clock: int) -> Verdict:
        """Judge a whole, finite gradient from the weights of `timestamp` <= `clock`."""

    def on_discard(self, learner_id: int, timestamp: int, clock: int) -> None:  # noqa: B027 - most do not count it
        """Note a gradient not to be used: not finite, torn, or applied here before."""

    @abstractmethod
    def update_due(self) -> bool:
        """Return whether the sum makes an update now."""

    @abstractmethod
    def on_update(self) -> None:
        """Note an update; the clock has advanced."""

    def on_timeout(self) -> None:  # noqa: B027 - most wait as long as it takes
        """Note that `deadline_s` of the options has passed."""

    def on_departure(self, learner_id: int) -> None:
        """Stop counting on a learner, for good or until `on_return`."""
        self.present.discard(learner_id)

    def on_return(self, learner_id: int, clock: int) -> None:
        """Count on a departed learner again."""
        self.present.add(learner_id)

    def on_resume(self, next_seq: list[int]) -> None:  # noqa: B027 - most only know the next update
        """Go on, before any other call: learner l with mini-batch `next_seq[l]`."""

    def may_pull(self, learner_id: int, clock: int) -> bool:
        return True

    @staticmethod
    @abstractmethod
    def next_clock(timestamp: int) -> int:
        """Return the least clock of weights for the mini-batch after one on `timestamp`."""
