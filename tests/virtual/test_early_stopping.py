"""Training ends when evaluations are no better: in order, with balanced books, all shards alike, and replay proves it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpisgd import replay
from mpisgd.analysis.books import imbalances
from mpisgd.base.errors import ConfigError
from mpisgd.config import EvaluationOptions, compatibility
from mpisgd.protocols import HardsyncOptions
from mpisgd.records.best import Patience
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event
from mpisgd.rules.membership import Gone
from mpisgd.rules.rules import Do, Rules
from mpisgd.rules.verdict import LATE
from tests.effort import spread
from tests.forge import forget

from .jobs import TENSORS, config, simulated

#: Nothing is ever better than the initial weights by so much: two snapshots later it is over.
STOPPING = {"best": "loss", "patience": 2, "min_delta": 1e9, "every_epochs": 0.5}
JOB = {**TENSORS, "evaluator": True, "epochs": 8, "evaluation": STOPPING}
SLOW = {"slowdown": {"1": 3.0}, "delay": "exponential", "delay_mean_s": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "hardsync": {"shards": 2},
    "hardsync, one slow": {"shards": 3, "straggler": SLOW},
    "softsync": {"shards": 2, "protocol": {"name": "softsync", "n": 2}, "straggler": SLOW},
    "async": {"protocol": "async", "averaging": 0.9},
    "backup": {"shards": 2, "protocol": {"name": "backup", "b": 1}, "straggler": SLOW},
    "giving up": {"protocol": {"name": "backup", "b": 1, "abort": True}, "straggler": SLOW},
    "timeout": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.09}, "straggler": SLOW},
    "versioned": {"shards": 2, "protocol": "versioned", "straggler": SLOW},
    "ssp": {"protocol": {"name": "ssp", "slack": 2}, "straggler": SLOW},
    "downpour": {"protocol": {"name": "downpour", "n_fetch": 2}},
    "layers": {"protocol": "async", "shards": 2, "per_layer": True, "straggler": SLOW},
    "teams": {"aggregation": "node", "team_size": 2, "virtual": {"learners": 4, "ranks_per_node": 9}},
    "own steps": {"local_steps": 3, "shards": 2},
}


@pytest.mark.parametrize("name", spread(CASES, 7))
def test_it_ends_in_order_and_is_proved(name: str, tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", JOB, **CASES[name])
    told = run.events[run.events["kind"] == Event.ENOUGH]
    assert sorted(told["shard"].tolist()) == list(range(run.shards)), "each shard says it, once"
    assert 2.0 in told["value"].tolist(), "and at which snapshot"
    assert run.done is not None
    assert max(run.done["samples"]) < 4 * 120, "long before the 8 epochs"
    assert (told["clock"] <= run.done["clock"]).all()
    assert not imbalances(run)
    if run.config["protocol"]["name"] == "hardsync":
        assert len(set(run.done["clock"])) == 1, "the weights are those of one clock"
    assert run.evaluations["snapshot"].max() >= 3, "the last weights are evaluated"
    proof = replay.replay(run.path)
    assert proof.holds, proof.reason
    assert proof.simulated


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("stopped") / "run", JOB, **CASES["hardsync, one slow"]).path


def without_the_end(table: np.ndarray) -> None:
    table["kind"][table["kind"] == Event.ENOUGH] = Event.SKIPPED
    table["value"][table["kind"] == Event.SKIPPED] = math.nan


def at_another_snapshot(table: np.ndarray) -> None:
    table["value"][table["kind"] == Event.ENOUGH] = 1


@pytest.mark.parametrize("edit", [without_the_end, at_another_snapshot])
def test_a_log_that_ends_for_no_reason_is_refused(edit: Callable[[np.ndarray], None], stopped: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stopped, tmp_path / "copy")
    for path in copy.glob("shard-*.h5"):
        with h5py.File(path, "r+") as file:
            events = file["events"][:]
            edit(events)
            file["events"][:] = events
            del file["sums"], file["closing"]
    forget(copy)
    assert replay.check(copy)


def test_a_run_whose_config_has_no_patience_cannot_have_ended_so(stopped: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stopped, tmp_path / "copy")
    text = (copy / schema.CONFIG).read_text().replace("patience = 2", "patience = 0")
    (copy / schema.CONFIG).write_text("\n".join(text.splitlines()[1:]))
    assert "run again, ENOUGH never comes" in replay.check(copy)


def test_patience_of_more_evaluations_than_there_are_changes_nothing(tmp_path: Path) -> None:
    long, plain = ({**STOPPING, "patience": 99}, {"every_epochs": 0.5})
    runs = [simulated(tmp_path / str(at), {**JOB, "evaluation": each, "epochs": 2}) for at, each in enumerate((long, plain))]
    assert runs[0].pushes.tobytes() == runs[1].pushes.tobytes()
    assert not (runs[0].events["kind"] == Event.ENOUGH).any()


@pytest.mark.parametrize("signal_first", [True, False])
def test_a_signal_beside_it_does_not_make_it_an_interruption(signal_first: bool) -> None:
    """It wants an end, too, and there is one: the run is finished, and what comes late is late."""
    rules = Rules(HardsyncOptions().make(2), 2, math.inf)
    tell = (rules.on_interrupt, rules.on_enough) if signal_first else (rules.on_enough, rules.on_interrupt)
    assert [each() for each in tell] == [True, signal_first]
    assert not rules.on_enough(), "no news"
    assert rules.on_pull(0, 0) is Do.STOP
    rules.membership.on_departure(0, Gone.INTERRUPTED)
    assert not rules.membership.end_if_deserted()
    assert rules.on_push(1, 0) is Do.LEAVE
    rules.membership.on_departure(1, Gone.INTERRUPTED)
    assert rules.membership.end_if_deserted()
    assert rules.finished
    assert rules.judge(1, 0, 0) == LATE


def rows(*losses: float) -> list[dict[str, Any]]:
    return [{"snapshot": at, "loss": loss, "train": 0, "averaged": 0} for at, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("patience", "delta", "losses", "over_at"),
    [
        (2, 0.0, (3, 2, 1, 1, 1), 4), (2, 0.0, (3, 4, 2.9, 4, 4), 4), (2, 0.5, (3, 2.8, 2.6), 2), (2, 0.5, (3, 2.8, 2.4, 2.3), -1),
        (1, 0.0, (3, 3), 1), (3, 0.0, (3, 4, 4, math.nan), 3), (2, 0.0, (math.nan, math.nan), 1), (1, 0.0, (3, 2, 1), -1),
    ],
)  # fmt: skip
def test_the_rule(patience: int, delta: float, losses: tuple[float, ...], over_at: int) -> None:
    options = EvaluationOptions(best="loss", patience=patience, min_delta=delta)
    assert Patience(options).note_all(rows(*losses)).over_at == over_at


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluation": {"best": ""}}, "evaluation.best = '': expected error, loss or a metric beside evaluation.patience > 0"),
        ({"evaluation": {"every_epochs": 0}}, "evaluation.every_epochs = 0.*: expected above 0 beside evaluation.patience > 0"),
        ({"evaluation": {"patience": -1}}, "evaluation.patience = -1: expected a finite number >= 0"),
        ({"evaluation": {"min_delta": -0.5}}, "evaluation.min_delta = -0.5: expected a finite number >= 0"),
        ({"evaluator": False}, "evaluation.patience = 2: expected 0 beside evaluator = false: an evaluation after training"),
        ({"protocol": "allreduce"}, "evaluation.patience = 2: expected 0 beside protocol allreduce .*allowed with hardsync"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        compatibility.check(config(tmp_path, JOB, **changes))
