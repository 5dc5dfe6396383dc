"""Storms in which a rank was waited for that is stopped for ever, each the least that showed it (`serving/fault_tolerant.py`)."""

from __future__ import annotations

from typing import Any

from tests.virtual.storm.draw import EVER_S, Draw, Fault


def _job(*faults: Fault, **fields: Any) -> Draw:
    """A fault-tolerant job of one attempt, without checkpoints."""
    usual = {"evaluator": False, "tolerant": True, "every_updates": 0, "eager_nbytes": 0, "reorders": False, "flush_rows": 256}
    return Draw(**{**usual, **fields}, attempts=(faults,))


FOR_EVER = {
    "a dedicated evaluator is stopped for ever, and learners that are free were never asked to follow it": _job(
        Fault("stop", 7, at_s=0.11182896996717284, lasts_s=EVER_S),
        way="versioned-stale",
        shards=2,
        learners=5,
        evaluator=True,
        seed=176506624,
        latency_ns=5000,
        eager_nbytes=0,
        reorders=True,
    ),
    "one learner is missed, the other dies, and a shard waited for ever for the first one's group": _job(
        Fault("kill", 5, at_call=118),
        Fault("stop", 3, at_call=23, lasts_s=EVER_S),
        way="hardsync-local",
        shards=2,
        learners=2,
        evaluator=True,
        seed=1024765195,
        latency_ns=50000,
        eager_nbytes=0,
        group_size=2,
        micro_batches=4,
        alternating=True,
    ),
    "of the last learner's group, it is the other rank that is stopped for ever": _job(
        Fault("stop", 10, at_s=0.0966528184548725, lasts_s=EVER_S),
        way="versioned",
        shards=2,
        learners=5,
        seed=1165909601,
        latency_ns=500000,
        eager_nbytes=4096,
        group_size=2,
        micro_batches=4,
        alternating=True,
    ),
}
