"""A protocol that the user brings, named on the command line: it is asked like any other, and refused where it is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, compatibility
from mpisgd.config.config_file import from_mapping
from mpisgd.protocols import OwnProtocolOptions
from tests import majority
from tests.virtual.jobs import TENSORS, simulated

OTHERS = """
from mpisgd.protocols import Protocol

class Half(Protocol):
    consistent = False
    def on_push(self, learner_id, timestamp, clock): ...

class Plain: ...

class Tuned(Protocol):
    consistent = False
    gradients_per_update = 1
    rejects = True
    def __init__(self, lambda_, *, gain):
        super().__init__(lambda_)
    def on_push(self, learner_id, timestamp, clock): ...
    def update_due(self): ...
    def on_update(self): ...
    next_clock = staticmethod(lambda timestamp: timestamp)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    majority.written(tmp_path, "own_majority")
    (tmp_path / "own_others.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(tmp_path)


def named(name: str, **more: Any) -> Config:
    return from_mapping({"protocol": {"name": name, **more}})


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_majority_runs_and_is_replayed(shards: int, tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, protocol="own_majority:Majority", shards=shards)
    summed = run.updates["gradients"]
    assert set(summed[:-4].tolist()) == {3}, "of four learners; fewer only where some have left"
    assert (run.pushes["verdict"] == 1).any(), "late gradients are dropped"
    assert replay.check(run.path, trust=True) == ""


def test_it_says_what_goes_with_it() -> None:
    assert "versioned" not in str(refused(from_mapping({"protocol": "own_others:Tuned", "per_layer": True})))
    assert refused(from_mapping({"protocol": "own_majority:Majority", "per_layer": True})) == ""
    expected = "compensation = 0.5: expected 0 beside protocol own_majority:Majority (applies no stale gradients)"
    assert expected in refused(from_mapping({"protocol": "own_majority:Majority", "compensation": 0.5}))


def refused(config: Config) -> str:
    try:
        compatibility.check(config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("own_nowhere:Majority", {}, "own_nowhere"),
        ("own_others:Missing", {}, "Missing"),
        ("own_others:Plain", {}, r"protocol.factory = 'own_others:Plain': expected a subclass of mpisgd.protocols.Protocol"),
        ("own_others:Half", {}, r"'own_others:Half': missing next_clock, on_update, update_due, expected in every protocol"),
        ("own_others:Tuned", {}, r"called with \(lambda_, \*\*\{\}\): .*gain"),
        ("own_others:Tuned", {"kwargs": {"gain": 1, "loss": 2}}, r"called with .*loss"),
        ("own_others:Tuned", {"kwargs": {"gain": 1}, "timeout_s": -1.0}, r"protocol.timeout_s = -1.0"),
    ],
)
def test_what_is_none_is_refused_by_name(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named(name, **more).protocol.make(3)


def test_its_class_gets_its_arguments() -> None:
    options = named("own_others:Tuned", kwargs={"gain": 1}).protocol
    assert options == OwnProtocolOptions(factory="own_others:Tuned", kwargs={"gain": 1})
    assert options.make(3).present == {0, 1, 2}
    assert options.rejects
    assert not options.teams
