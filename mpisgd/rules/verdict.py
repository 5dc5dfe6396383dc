"""Verdicts on a push (DESIGN 2)."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """Verdicts; stored in the run log as `pushes.verdict`."""

    APPLY = 0
    """Added to the sum of update `clock` + 1, with `weight`; in flight at the end if the final clock is not above `clock`."""
    DROP = 1
    """Not used: too old, not finite, torn, applied before, or of a missed learner (`reason`)."""
    REJECT = 2
    """Not used; the learner computes the same mini-batch again."""
    LATE = 3
    """Arrived after the shard had finished: in flight at the end."""


class Reason(enum.IntEnum):
    """Reasons why a push was not applied; stored as `pushes.reason`."""

    NONE = 0
    STALE = 1
    NONFINITE = 2
    FINISHED = 3
    REPEATED = 4
    """Applied here before: another shard had rejected this mini-batch, and it was computed again."""
    MISSED = 5
    """Its learner had been silent for too long; the others had gone on."""
    TORN = 6
    """Only a part came: its learner was lost or hung."""
    DUPLICATE = 7
    """Its portion of the data was applied here before: dealt to another learner as well, or computed again."""


@dataclass(frozen=True)
class Verdict:
    """Decision on a push; `weight` multiplies the gradient in the sum."""

    kind: Kind
    weight: float = 1.0
    reason: Reason = Reason.NONE


APPLY = Verdict(Kind.APPLY)
DROP_STALE = Verdict(Kind.DROP, weight=0.0, reason=Reason.STALE)
DROP_NONFINITE = Verdict(Kind.DROP, weight=0.0, reason=Reason.NONFINITE)
DROP_REPEATED = Verdict(Kind.DROP, weight=0.0, reason=Reason.REPEATED)
DROP_MISSED = Verdict(Kind.DROP, weight=0.0, reason=Reason.MISSED)
DROP_DUPLICATE = Verdict(Kind.DROP, weight=0.0, reason=Reason.DUPLICATE)
DROP_TORN = Verdict(Kind.DROP, weight=0.0, reason=Reason.TORN)
REJECT = Verdict(Kind.REJECT, weight=0.0, reason=Reason.STALE)
LATE = Verdict(Kind.LATE, weight=0.0, reason=Reason.FINISHED)
