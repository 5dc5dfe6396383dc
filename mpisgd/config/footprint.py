"""Bytes that a run keeps beyond weights, gradients and the optimiser's own, in words, and those it exchanges; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def of_compensation(lambda_: int, parameters: int, shards: int) -> str:
    """The copies that delay compensation keeps (`compensation.py`): how many, and MiB (2^20 bytes) for the longest slice."""
    nbytes = lambda_ * -(-parameters // shards) * 4
    return f"up to {lambda_:,} cop{'ies' if lambda_ > 1 else 'y'} of its slice on each shard, {nbytes / 2**20:,.1f} MiB"


def of_history(history: int, parameters: int, shards: int) -> str:
    """The vectors that L-BFGS keeps (`sandblaster/slots.py`): how many, and MiB for the longest slice."""
    slices = 2 * history + 13
    return f"{slices} slices on each shard, {slices * -(-parameters // shards) * 4 / 2**20:,.1f} MiB, and pushes that wait"


def of_exchange(config: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of a push, and of a pull that is not the first, for each parameter; `config`: as a run's config.toml has it."""
    nbytes = {"float32": 4.0, "bfloat16": 2.0, "topk": 8.0 * config.get("topk_share", 0.0)}
    return nbytes[config.get("push_format", "float32")], nbytes[config.get("pull_format", "float32")]
