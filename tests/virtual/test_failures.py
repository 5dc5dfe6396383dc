"""Failures of virtual learners: at given seconds, or drawn as functions of names; the others go on, or the run ends."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.__main__ import main
from mpisgd.base.errors import MpisgdError, PeerError
from mpisgd.config.config_virtual import FailureOptions
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from mpisgd.simulate import simulate
from mpisgd.simulate.failures import Failures, LearnerFailed
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, config, simulated


def moments(*, lambda_: int = 4, seed: int = 1, **fields: Any) -> list[int | None]:
    """Nanosecond of every learner's failure."""
    failures = Failures(FailureOptions(**fields), seed)
    return [failures.nanosecond_of(learner_id) for learner_id in range(lambda_)]


def test_they_live_for_ever_by_default() -> None:
    assert moments() == [None] * 4


def test_at_given_seconds() -> None:
    assert moments(at_s={1: 2.5, 3: 0.0}) == [None, 2_500_000_000, None, 0]


def test_lives_are_exponential() -> None:
    drawn = 1e-9 * np.array(moments(lambda_=5000, mean_s=20.0), float)
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(20.0, rel=0.05)
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx([2.107, 13.863, 46.05], rel=0.1)


def test_a_life_depends_on_its_names_alone() -> None:
    few, many, other = (moments(lambda_=lambda_, seed=seed, mean_s=20.0) for lambda_, seed in ((4, 1), (9, 1), (9, 2)))
    assert few == many[:4]
    assert len({*many, *other}) == 18
    failures = Failures(FailureOptions(mean_s=20.0), 1)
    assert [failures.nanosecond_of(learner_id) for learner_id in (5, 2, 5)] == [many[5], many[2], many[5]]


def test_the_earlier_of_both_counts() -> None:
    drawn = moments(mean_s=20.0)
    assert moments(mean_s=20.0, at_s={0: 1e-9, 2: 1e9}) == [1, *drawn[1:]]


def test_the_exception_says_who_and_when() -> None:
    error = LearnerFailed(3, 1_500_000_000)
    assert isinstance(error, MpisgdError)
    assert (error.learner_id, error.now_ns) == (3, 1_500_000_000)
    assert str(error) == "learner 3 failed at 1.5 s of virtual time"


# ----------------------------------------------------------------------------------------------------------------- failures

SMALL = "--virtual.no-gradients --virtual.parameters 10 "
FAILING: dict[str, Any] = {"compute": {"name": "constant", "mean_s": 0.1}, "failures": {"at_s": {"1": 0.75, "2": 1.25}}}


def departures(run: Run, shard: int = 0) -> list[tuple[int, float]]:
    rows = run.events[(run.events["kind"] == Event.DEPARTED) & (run.events["shard"] == shard)]
    return [(int(row["learner_id"]), float(row["time_s"])) for row in rows]


@pytest.mark.parametrize(
    ("protocol", "before", "after"),
    spread(
        [
            ("backup", 3, 2),
            ({"name": "softsync", "n": 1}, 4, 2),
            ({"name": "softsync", "n": 2}, 2, 1),
            ("hardsync", 4, 2),
            ({"name": "softsync", "n": 3}, 1, 1),
        ],
        2,
        unpack=True,
    ),
    ids=["backup", "n=1", "n=2", "hardsync", "n=3"],
)
def test_the_others_go_on_when_learners_fail(protocol: Any, before: int, after: int, tmp_path: Path) -> None:
    """The mini-batch under way is lost, the shards know 0.05 s later, and count with those who are left."""
    run = simulated(tmp_path / "run", protocol=protocol, shards=2, **FAILING)
    assert run.summaries["samples"].tolist() >= [400, 400]
    for shard in range(2):
        assert [who for who, _ in departures(run, shard)] == [1, 2]
        assert [when for _, when in departures(run, shard)] == pytest.approx([0.8, 1.3], abs=1e-3)
    rows = run.pushes[run.pushes["shard"] == 0]
    for learner_id, last_s in ((1, 0.75), (2, 1.25)):
        own = rows["arrival_s"][rows["learner_id"] == learner_id]
        assert last_s - 0.15 < own.max() < last_s
    gradients = run.updates["gradients"][run.updates["shard"] == 0]
    assert gradients[0] == before
    assert (gradients[-10:] == after).all()


def test_all_learners_fail_and_the_end_is_orderly(tmp_path: Path) -> None:
    """Before the samples are done: the books balance, DONE says how far it came."""
    for protocol in ("hardsync", "softsync", "backup"):
        at_s = {str(learner_id): 0.35 + 0.2 * learner_id for learner_id in range(4)}
        run = simulated(tmp_path / protocol, protocol=protocol, shards=2, evaluator=True, failures={"at_s": at_s})
        assert len(departures(run)) == 4
        assert 0 < run.summaries["samples"][0] < 400
        assert all(books.balanced for books in run.books())


def test_all_learners_fail_before_anything(tmp_path: Path) -> None:
    for base in (SIZES, TENSORS):
        at_s = {str(learner_id): 0.0 for learner_id in range(4)}
        run = simulated(tmp_path / str(base is SIZES), base, failures={"at_s": at_s})
        assert run.summaries[["final_clock", "samples", "received"]].tolist() == [(0, 0, 0)]


def test_lives_may_be_drawn(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", failures={"mean_s": 0.5}, virtual={"learners": 8}, protocol="softsync", epochs=20)
    assert 2 <= len(departures(run)) <= 8


def test_a_fail_fast_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, the learner and its second, no DONE; as on real ranks."""
    changes = {**FAILING, "failures": {"at_s": {"1": 0.75}, "then": "stop"}}
    with pytest.raises(PeerError, match=r"learner 1 failed at 0\.75 s of virtual time: the job is ended, as a fail-fast run is"):
        simulate(config(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / schema.DONE).exists()
    assert len(Run(tmp_path / "run").pushes) > 0
    words = shlex.split(f"{SMALL} --failures.at-s 1 0.75 --failures.then stop --out {tmp_path / 'again'}")
    assert main(["simulate", *words]) == 1
    assert "mpisgd simulate: PeerError: learner 1 failed" in capsys.readouterr().err
