"""Memory that a run keeps beyond weights, gradients and the optimiser's own, in words; without torch, for reports too."""

from __future__ import annotations


def of_compensation(lambda_: int, parameters: int, shards: int) -> str:
    """The copies that delay compensation keeps (`compensation.py`): how many, and MiB (2^20 bytes) for the longest slice."""
    nbytes = lambda_ * -(-parameters // shards) * 4
    return f"up to {lambda_:,} cop{'ies' if lambda_ > 1 else 'y'} of its slice on each shard, {nbytes / 2**20:,.1f} MiB"


def of_history(history: int, parameters: int, shards: int) -> str:
    """The vectors that L-BFGS keeps (`sandblaster/slots.py`): how many, and MiB for the longest slice."""
    slices = 2 * history + 9
    return f"{slices} slices on each shard, {slices * -(-parameters // shards) * 4 / 2**20:,.1f} MiB, and pushes that wait"
