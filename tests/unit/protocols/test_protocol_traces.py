"""Every protocol worked out by hand: what a shard decides at each event (`tracing.py`), beside the algorithm of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd.protocols import (
    PROTOCOLS,
    AllreduceOptions,
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)
from tests import majority
from tests.unit.tracing import Traced, disagreements

TRACES: dict[str, tuple[int, ProtocolOptions, str]] = {
    # [Zhang16 2.2, eq. 1]: everybody's gradient, in the order of learner_id.
    "hardsync": (
        3,
        HardsyncOptions(),
        """
        pull 0     -> weights 0
        whose      -> 0
        push 0 @0  -> apply 1
        whose      -> 1
        push 1 @0  -> apply 1
        whose      -> 2
        push 2 @0  -> apply 1, update 1
        whose      -> 0
        push 0 @1  -> apply 1
        bad 1 @1   -> -
        leave 2    -> update 2
        push 0 @2  -> apply 1
        push 1 @2  -> apply 1, update 3
        """,
    ),
    # [Chen16 5]: hardsync's decisions about the slice that a learner owns:
    # gradients come in the order of learner_id, one that is not finite is none to all, and nobody leaves before the end.
    "allreduce": (
        3,
        AllreduceOptions(),
        """
        whose      -> 0
        push 0 @0  -> apply 1
        push 1 @0  -> apply 1
        whose      -> 2
        push 2 @0  -> apply 1, update 1
        push 0 @1  -> apply 1
        bad 1 @1   -> -
        push 2 @1  -> apply 1, update 2
        bad 0 @2   -> -
        bad 1 @2   -> -
        bad 2 @2   -> update 3
        push 0 @3  -> apply 1
        """,
    ),
    # [Zhang16 2.2, eq. 2, 3]: c = floor(4/2) = 2, alpha0/tau each.
    "softsync": (
        4,
        SoftsyncOptions(n=2),
        """
        push 0 @0  -> apply 1
        pull 0     -> weights 0
        push 0 @0  -> apply 1, update 1
        push 1 @0  -> apply 1
        push 2 @0  -> apply 1, update 2
        push 3 @0  -> apply 0.5
        pull 3     -> weights 2
        push 0 @1  -> apply 1, update 3
        push 1 @0  -> apply 0.333
        bad 2 @3   -> -
        leave 0    -> update 4
        leave 1    -> -
        push 2 @2  -> apply 0.5, update 5
        """,
    ),
    # [Chen16 Alg. 2]: each is an update; here no more than 2 old, and 1/(tau + 1).
    "async": (
        3,
        AsyncOptions(most_staleness=2, modulation="inverse_plus_one"),
        """
        push 0 @0  -> apply 1, update 1
        pull 0     -> weights 1
        push 1 @0  -> apply 0.5, update 2
        push 2 @0  -> apply 0.333, update 3
        push 0 @1  -> apply 0.333, update 4
        push 1 @1  -> drop
        pull 1     -> weights 4
        bad 2 @3   -> -
        push 1 @4  -> apply 1, update 5
        leave 0    -> -
        push 2 @4  -> apply 0.5, update 6
        """,
    ),
    # [Chen16 Alg. 4]: N = 2 of 3; Alg. 3, the learner: newer weights than those of its last gradient.
    "backup": (
        3,
        BackupOptions(b=1),
        """
        push 0 @0  -> apply 1
        push 2 @0  -> apply 1, update 1
        push 1 @0  -> drop
        push 1 @1  -> apply 1
        pull 1     -> weights 1
        push 0 @1  -> apply 1, update 2
        push 0 @2  -> apply 1
        push 2 @1  -> drop
        bad 2 @2   -> -
        bad 1 @2   -> update 3
        push 0 @3  -> apply 1
        leave 1    -> -
        leave 2    -> update 4
        """,
    ),
    "backup, late ones are applied": (
        3,
        BackupOptions(b=1, late="apply", modulation="inverse_plus_one"),
        """
        push 0 @0  -> apply 1
        push 2 @0  -> apply 1, update 1
        push 1 @0  -> apply 0.5
        push 0 @1  -> apply 1
        push 1 @1  -> apply 1, update 2
        push 0 @2  -> apply 1
        push 1 @2  -> apply 1, update 3
        push 2 @1  -> apply 0.333
        push 0 @3  -> apply 1
        bad 1 @1   -> -
        push 2 @3  -> apply 1, update 4
        """,
    ),
    # [Chen16 6]: N = 3, or 2 once the time is over.
    "timeout": (
        3,
        TimeoutOptions(N=3, N_min=2),
        """
        push 0 @0  -> apply 1
        push 1 @0  -> apply 1
        timeout    -> update 1
        push 2 @0  -> drop
        push 0 @1  -> apply 1
        timeout    -> -
        push 2 @1  -> apply 1, update 2
        push 1 @1  -> drop
        push 1 @2  -> apply 1
        push 0 @2  -> apply 1
        push 2 @2  -> apply 1, update 3
        push 1 @3  -> apply 1
        leave 0    -> -
        leave 2    -> update 4
        """,
    ),
    # [ElasticDL]: two of the present version; another version is computed again; nobody waits.
    "versioned": (
        3,
        VersionedOptions(grads_to_wait=2),
        """
        push 0 @0  -> apply 1
        pull 0     -> weights 0
        push 1 @0  -> apply 1, update 1
        push 2 @0  -> reject
        pull 2     -> weights 1
        push 0 @0  -> reject
        push 2 @1  -> apply 1
        push 0 @1  -> apply 1, update 2
        push 1 @1  -> reject
        bad 1 @1   -> -
        bad 1 @2   -> -
        push 2 @2  -> apply 1, update 3
        leave 0    -> -
        push 1 @3  -> apply 1
        push 1 @3  -> apply 1, update 4
        """,
    ),
    "versioned, one version of tolerance": (
        3,
        VersionedOptions(grads_to_wait=1, tolerance=1, modulation="exponential:0.5"),
        """
        push 0 @0  -> apply 1, update 1
        push 1 @0  -> apply 0.607, update 2
        push 2 @0  -> reject
        pull 2     -> weights 2
        push 2 @2  -> apply 1, update 3
        push 0 @1  -> reject
        push 0 @3  -> apply 1, update 4
        bad 1 @2   -> -
        push 1 @3  -> apply 0.607, update 5
        push 1 @3  -> reject
        """,
    ),
    # [Dean12 4.1]: learner 0 alone for two updates; then as async, whatever learners do between.
    "downpour": (
        3,
        DownpourOptions(n_push=2, n_fetch=4, warm_up=2),
        """
        pull 0     -> weights 0
        pull 1     -> wait
        push 0 @0  -> apply 1, update 1
        pull 2     -> wait
        push 0 @0  -> apply 1, update 2
        pull 1     -> weights 2
        pull 2     -> weights 2
        push 1 @2  -> apply 1, update 3
        push 0 @0  -> apply 1, update 4
        leave 1    -> -
        push 2 @2  -> apply 1, update 5
        """,
    ),
    "async, learners join one after the other": (
        3,
        AsyncOptions(warm_up=1, ramp=4),
        """
        pull 0     -> weights 0
        pull 1     -> wait
        push 0 @0  -> apply 1, update 1
        pull 1     -> wait
        push 0 @1  -> apply 1, update 2
        push 0 @2  -> apply 1, update 3
        pull 1     -> weights 3
        pull 2     -> wait
        leave 0    -> -
        pull 2     -> weights 3
        push 1 @3  -> apply 1, update 4
        push 2 @3  -> apply 1, update 5
        pull 1     -> weights 5
        pull 2     -> weights 5
        """,
    ),
    # [Ho13 3]: s = 1; learner 2 is the slowest.
    "ssp": (
        3,
        SspOptions(slack=1),
        """
        push 0 @0  -> apply 1, update 1
        pull 0     -> weights 1
        push 0 @1  -> apply 1, update 2
        pull 0     -> wait
        push 1 @0  -> apply 1, update 3
        pull 0     -> wait
        pull 1     -> weights 3
        push 2 @0  -> apply 1, update 4
        pull 0     -> weights 4
        push 0 @4  -> apply 1, update 5
        pull 0     -> wait
        bad 2 @4   -> update 6
        pull 0     -> wait
        leave 1    -> -
        pull 0     -> weights 6
        """,
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_every_decision_of_a_trace(name: str) -> None:
    lambda_, options, text = TRACES[name]
    assert text.count(" -> ") >= 10
    assert disagreements(text, Traced(options.make(lambda_), lambda_).decide) == []


def test_every_protocol_has_a_trace() -> None:
    assert {type(options) for _, options, _ in TRACES.values()} == set(PROTOCOLS.values())


def test_the_worked_example_of_contributing(tmp_path: Path) -> None:
    """The page there, as it stands, decides what it says."""
    names: dict[str, Any] = {}
    exec(majority.written(tmp_path).read_text(), names)
    shard = Traced(names["Majority"](3), 3)
    events = ("push 0 @0", "push 1 @0", "push 2 @0", "push 2 @1", "leave 0", "leave 1", "push 2 @2")
    assert [shard.decide(event) for event in events] == [
        "apply 1",
        "apply 1, update 1",
        "drop",
        "apply 1",
        "-",
        "update 2",
        "apply 1, update 3",
    ]
