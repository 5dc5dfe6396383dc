"""Memory besides weights, gradients and optimiser, in words; bytes of an exchange; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def of_compensation(lambda_: int, parameters: int, shards: int) -> str:
    """Describe the copies of `compensation.py`: number, MiB (2^20 bytes) per longest slice."""
    nbytes = lambda_ * -(-parameters // shards) * 4
    return f"up to {lambda_:,} cop{'ies' if lambda_ > 1 else 'y'} of the slice on each shard, {nbytes / 2**20:,.1f} MiB"


def of_history(history: int, parameters: int, shards: int) -> str:
    """Describe the vectors of `sandblaster/slots.py`, likewise."""
    slices = 2 * history + 13
    return f"{slices} slices on each shard, {slices * -(-parameters // shards) * 4 / 2**20:,.1f} MiB, and waiting pushes"


def of_exchange(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return bytes per parameter of a push, and of a pull after the first."""
    nbytes = {"float32": 4.0, "bfloat16": 2.0, "topk": 8.0 * config.get("topk_share", 0.0)}
    return nbytes[config.get("push_format", "float32")], nbytes[config.get("pull_format", "float32")]
