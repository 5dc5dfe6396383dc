"""Divergence of a run: a value was not finite, or the training loss stays far above its start.

A run learning little, a fine-tune slightly spoiling its network, or a network stuck at chance has not diverged.
"""

from __future__ import annotations

import numpy as np

_FIRST = 8
"""Mini-batches of the start."""
_FAR = 3.0
"""Rise of the loss counted as far, in units of the start: a positive loss becomes four times as large."""
_LONG = 4
"""Divisor of a run: its last quarter counts as long."""


def has_diverged(losses: np.ndarray) -> bool:
    """Return whether training with these losses has diverged.

    Far above its start is a loss of more than the start's median + 3 u. The unit u is the median's size, or the start's range if
    larger: losses may be negative, and a trained network's are mostly tiny, now and then large. Long is more than half of the last
    quarter. Nothing is far from a start of zeros; fewer than 32 mini-batches are not judged.

    `losses`: (gradients,) floats, of each applied mini-batch in the order of the clock.
    """
    if not np.isfinite(losses).all():
        return True
    if len(losses) < _LONG * _FIRST:
        return False
    start = losses[:_FIRST]
    median = float(np.median(start))
    unit = max(abs(median), float(np.ptp(start)))
    return unit > 0 and float(np.median(losses[-(len(losses) // _LONG) :])) > median + _FAR * unit
