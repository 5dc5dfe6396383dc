"""Whether a run has diverged: something was not finite, or its training loss is far above its start for long. Nothing else.

A run that learns little, a fine-tune that spoils its network a little, or a network that is stuck at chance (as the demo's
second run is, at a loss of log 10) has not diverged: what it came to is what its test error says.
"""

from __future__ import annotations

import numpy as np

_FIRST = 8
"""Mini-batches that the start is."""
_FAR = 3.0
"""Rise of the loss that counts as far, in units of the start (below): of a positive loss, to four times what it was."""
_LONG = 4
"""Share of the run, its end, that counts as long: one in so many mini-batches."""


def has_diverged(losses: np.ndarray) -> bool:
    """Whether training with these losses has diverged.

    Far above its start is a loss of more than the start's median + 3 u. The unit u is the size of that median, or, where it is
    larger, the range of the start: losses may be negative or near 0, and those of a network that is trained already are mostly
    tiny, with a large one now and then. For long is: more than half of the last quarter. A start of nothing but zeros has no unit,
    and nothing is far from it; nor is anything said of fewer than 32 mini-batches.

    What blows up within the first 8 mini-batches, and remains finite, may go unseen: as a rule it does not remain so.

    Args:
        losses: floats, (gradients,): of each mini-batch whose gradient was applied, in the order of the clock.
    """
    if not np.isfinite(losses).all():
        return True
    if len(losses) < _LONG * _FIRST:
        return False
    start = losses[:_FIRST]
    median = float(np.median(start))
    unit = max(abs(median), float(np.ptp(start)))
    return unit > 0 and float(np.median(losses[-(len(losses) // _LONG) :])) > median + _FAR * unit
