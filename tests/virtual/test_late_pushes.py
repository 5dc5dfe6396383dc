"""Training ends early while pushes are under way: what learners had begun is taken, judged and proved; nobody is given weights.

The evaluator takes virtual time here, as it does on real ranks, so that its word comes in the middle of whatever goes on.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpisgd import replay
from mpisgd.analysis.books import imbalances
from mpisgd.evaluator import Evaluator
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from mpisgd.rules.verdict import Kind
from tests.effort import examples, spread
from tests.forge import rewrite

from .jobs import simulated
from .test_early_stopping import JOB, SLOW

STOPPING = {"every_epochs": 0.1, "patience": 1}
CASES: dict[str, dict[str, Any]] = {
    "softsync": {"shards": 2, "protocol": {"name": "softsync", "n": 2}},
    "softsync, n = 1": {"shards": 3, "protocol": {"name": "softsync", "n": 1}, "straggler": SLOW},
    "softsync, duplex": {"shards": 2, "protocol": {"name": "softsync", "n": 4}, "ahead": 1},
    "softsync, prefetch": {"shards": 2, "protocol": {"name": "softsync", "n": 4}, "ahead": 2},
    "softsync, layers": {"shards": 2, "protocol": {"name": "softsync", "n": 2}, "per_layer": True},
    "softsync, own steps": {"shards": 2, "protocol": {"name": "softsync", "n": 1}, "local_steps": 2},
    "hardsync": {"shards": 2},
    "hardsync, streamed": {"shards": 2, "way": "streamed"},
    "backup": {"shards": 2, "protocol": {"name": "backup", "b": 1}, "straggler": SLOW},
    "versioned": {"shards": 2, "protocol": "versioned"},
    "downpour": {"protocol": {"name": "downpour", "n_push": 1, "n_fetch": 2}},
    "ssp": {"protocol": {"name": "ssp", "slack": 2}},
}
#: Shard 1's node has a slow link: it still receives a gradient when shard 0 has given the others their weights.
UNEVEN: dict[str, Any] = {
    "shards": 2,
    "protocol": "hardsync",
    "virtual": {"ranks_per_node": 1},
    "network": {"latency_s": 1e-3, "bandwidth": 1e4, "node_bandwidth": 1e4, "slow_links": {"1": 10.0}},
    "straggler": {"slowdown": {"1": 3.0}},
}


@pytest.fixture(scope="module")
def slow_evaluator() -> Iterator[list[float]]:
    """Virtual seconds that an evaluation takes."""
    seconds, pull = [0.3], Evaluator._pull

    def later(self: Evaluator, number: int) -> Any:
        self._channel._wire.clock.sleep(seconds[0])  # type: ignore[attr-defined]
        return pull(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "_pull", later)
        yield seconds


@pytest.fixture
def evaluate_s(slow_evaluator: list[float]) -> list[float]:
    slow_evaluator[0] = 0.3
    return slow_evaluator


def over(run: Run, shard: int) -> Any:
    """When a shard was told, as a row of `events`."""
    (row,) = run.events[(run.events["kind"] == Event.ENOUGH) & (run.events["shard"] == shard)]
    return row


def after(run: Run, shard: int) -> np.ndarray:
    """What came to a shard after that."""
    rows = run.pushes[run.pushes["shard"] == shard]
    return rows[rows["arrival_s"] > over(run, shard)["time_s"]]


def check_proved(run: Run) -> None:
    assert not imbalances(run)
    proof = replay.replay(run.path)
    assert (proof.reason, proof.other_losses) == ("", 0)
    assert all(each.elements == 0 for each in proof.differences)


@pytest.mark.parametrize("name", spread(CASES, 6))
def test_what_is_under_way_is_taken_and_proved(name: str, evaluate_s: list[float], tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", JOB, evaluation=STOPPING, **CASES[name])
    for shard in range(run.shards):
        assert len(after(run, shard)), "pushes were under way"
        assert not (after(run, shard)["answer_s"] > over(run, shard)["time_s"]).any()
        if name.startswith("softsync"):
            assert run.done is not None
            assert set(after(run, shard)["verdict"]) == {Kind.APPLY}
            assert run.done["clock"][shard] > over(run, shard)["clock"], "they make updates"
    check_proved(run)


@pytest.fixture(scope="module")
def late_run(slow_evaluator: list[float], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One learner is told to stop by shard 0 and leaves; the others have weights, and push towards an update that is never made."""
    slow_evaluator[0] = 0.54
    return simulated(tmp_path_factory.mktemp("late") / "run", JOB, evaluation=STOPPING, **UNEVEN)


@pytest.fixture
def late(late_run: Run, evaluate_s: list[float]) -> Run:
    evaluate_s[0] = 0.54
    return late_run


def test_a_gradient_for_an_update_that_is_never_made_is_late_and_proved(late: Run) -> None:
    for shard in (0, 1):
        rows = after(late, shard)
        assert Kind.LATE in rows["verdict"]
        assert (rows["clock"][rows["verdict"] == Kind.LATE] == late.done["clock"][shard]).all()  # type: ignore[index]
    check_proved(late)


@pytest.mark.slow
@settings(
    max_examples=examples(24), deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    name=st.sampled_from(sorted(CASES)),
    uneven=st.booleans(),
    seconds=st.floats(0.0, 1.2),
    latency_s=st.sampled_from([1e-6, 1e-3, 0.1]),
    every_epochs=st.sampled_from([0.1, 0.25]),
    patience=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_whenever_it_is_said_the_run_is_proved(
    evaluate_s: list[float],
    name: str,
    uneven: bool,
    seconds: float,
    latency_s: float,
    every_epochs: float,
    patience: int,
    seed: int,
) -> None:
    evaluate_s[0] = seconds
    changes = {**CASES[name], "evaluation": {"every_epochs": every_epochs, "patience": patience}, "seed": seed}
    changes |= {"network": {**UNEVEN["network"], "latency_s": latency_s}, "virtual": UNEVEN["virtual"]} if uneven else {}
    with tempfile.TemporaryDirectory() as directory:
        run = simulated(Path(directory) / "run", JOB, **changes)
        for shard in np.unique(run.events["shard"][run.events["kind"] == Event.ENOUGH]):
            assert not (run.pushes["answer_s"][run.pushes["shard"] == shard] > over(run, shard)["time_s"]).any()
        check_proved(run)


# ---------------------------------------------------------------------------------------------------- logs that cannot be


def given_weights_afterwards(pushes: np.ndarray, events: np.ndarray) -> None:
    pushes["answer_s"][-1] = events["time_s"][-1]


def late_one_applied(pushes: np.ndarray, events: np.ndarray) -> None:
    pushes["verdict"][-1], pushes["weight"][-1], pushes["reason"][-1] = Kind.APPLY, 1.0, 0


def applied_one_late(pushes: np.ndarray, events: np.ndarray) -> None:
    pushes["verdict"][-1], pushes["weight"][-1], pushes["reason"][-1] = Kind.LATE, 0.0, schema.Reason.FINISHED


def told_twice(pushes: np.ndarray, events: np.ndarray) -> np.ndarray:
    at = int(np.flatnonzero(events["kind"] == Event.ENOUGH)[0])
    return np.insert(events, at, events[at])


def told_before_the_snapshot(pushes: np.ndarray, events: np.ndarray) -> None:
    at = np.flatnonzero(events["kind"] == Event.ENOUGH)
    events["time_s"][at], events["clock"][at] = 0.0, 0
    events[:] = events[np.argsort(events["time_s"], kind="stable")]


def check_refused(run: Run, copy: Path, edit: Callable[[np.ndarray, np.ndarray], Any], said: str) -> None:
    """The log of shard 0, edited."""
    path = shutil.copytree(run.path, copy) / schema.shard_file(0, 0)
    pushes, events = run.pushes[run.pushes["shard"] == 0], run.events[run.events["shard"] == 0]
    changed = edit(pushes, events)
    rewrite(path, "pushes", lambda _: pushes)
    rewrite(path, "events", lambda _: events if changed is None else changed)
    reason = replay.check(copy)
    assert said in reason, reason


FORGED: dict[str, tuple[Callable[[np.ndarray, np.ndarray], Any], str]] = {
    "weights": (given_weights_afterwards, "after evaluations had ended training"),
    "applied": (late_one_applied, "APPLY"),
    "twice": (told_twice, "ENOUGH never comes"),
    "too early": (told_before_the_snapshot, "was taken at"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_log_of_late_pushes_that_says_otherwise_is_refused(name: str, late: Run, tmp_path: Path) -> None:
    check_refused(late, tmp_path / "copy", *FORGED[name])


def test_what_was_applied_cannot_have_been_late(evaluate_s: list[float], tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", JOB, evaluation=STOPPING, **CASES["softsync"])
    check_refused(run, tmp_path / "copy", applied_one_late, "LATE")
