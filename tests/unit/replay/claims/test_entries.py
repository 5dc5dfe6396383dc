"""DONE, [environment] and weights; what was accepted before; what cannot be done again."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema, sums
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.replay.checks.trust_table import CLAIMS, Standing
from tests.effort import spread
from tests.unit.replay.claims.conftest import EVALUATED, LEARNERS, SOFTSYNC, Runs
from tests.unit.replay.claims.hands import change, configuration, environment, named, refused
from tests.unit.replay.test_replay import Sometimes, believed, simulated

# -------------------------------------------------------------------------------------------- DONE, [environment], weights


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case list():
            return [*value, value[-1]] if value else [1]
        case dict():
            return {**value, "mpisgd": "9.9"}
        case str():
            return f"{value} "
    return value + 1


@pytest.mark.parametrize("real", spread([True, False], 2))
@pytest.mark.parametrize("name", [*schema.DONE_ENTRIES, *schema.SUMMED, "files"])
def test_done(name: str, real: bool, run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=real)
    done = dict(Run(path).done or {})
    done[name] = other(done[name])
    (path / "DONE").write_text(sums.sealed_json(done))
    assert f"{name} " in refused(path) or name in ("books_balanced", *schema.SUMMED, "files")
    assert "DONE is damaged" not in refused(path) != ""


ON_TRUST = {name for claim in CLAIMS if claim.where == "[environment]" and claim.standing is Standing.TRUST for name in claim.names}


@pytest.mark.parametrize("name", spread(sorted({*named("[environment]")} - ON_TRUST - {"attempts"}), 2))
def test_the_environment(name: str, run_of: Callable[..., Path]) -> None:
    path = run_of(
        {"teams": "teams", "layers": "layers", "groups": "groups", "stages": "groups", "slices": "slices"}.get(name, "all"),
        real=True,
    )
    environment(path, **{name: other(Run(path).environment[name])})
    assert refused(path, evaluations="none")


@pytest.mark.parametrize(
    "names",
    [
        ON_TRUST - {"hosts", "threads", "virtual", "way", "chunks"},
        *(pytest.param({name}, marks=pytest.mark.slow) for name in ("threads", "virtual")),
    ],
)
def test_what_is_on_trust_in_the_environment(names: set[str], run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=True)
    said = Run(path).environment
    environment(path, **{name: other(said[name]) for name in names})
    assert refused(path, evaluations="none") == ""


def test_the_way(run_of: Callable[..., Path]) -> None:
    """On trust among the ways that are possible for this run, which have the same bits: of a softsync, whole and gathered."""
    path = run_of("all", real=True)
    for way in ("auto", "buckets", "in-place", "streamed", "whole ", 7):
        environment(path, way=way)
        assert "way = " in refused(path, evaluations="none"), way


@pytest.mark.parametrize("name", ["all", "slices"])
def test_the_chunks(name: str, run_of: Callable[..., Path]) -> None:
    """On trust, and looked at even where nothing is streamed."""
    path = run_of(name, real=True)
    assert ("chunks" in Run(path).environment) == (name == "slices")
    for chunks in (0, 64.0, "64", True, [64]):
        environment(path, chunks=chunks)
        assert f"[environment] chunks = {chunks!r}, expected an integer above 0" in refused(path, evaluations="none")
    environment(path, chunks=5)
    assert refused(path, evaluations="none") == ""


@pytest.mark.parametrize("real", [True, False])
def test_hosts(real: bool, run_of: Callable[..., Path]) -> None:
    """Their names are on trust, in a real run; their number is not."""
    path = run_of("all", real=real)
    hosts = Run(path).environment["hosts"]
    environment(path, hosts=[f"{host}-x" for host in hosts])
    assert bool(refused(path, evaluations="none")) == (not real)
    environment(path, hosts=hosts[:-1])
    assert refused(path, evaluations="none")


def test_attempts(run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=True)
    told = {"attempt": 0, "learners": LEARNERS, "shards": 2}
    environment(path, attempts=[told])
    assert refused(path) == ""
    for name in ("learners", "shards"):
        environment(path, attempts=[{**told, name: told[name] + 1}])
        assert refused(path)


def test_buffers(run_of: Callable[..., Path]) -> None:
    path = run_of("norms", real=True)
    states = torch.load(path / "weights.pt", weights_only=True)
    (name,) = (name for name in states["theta"] if name.endswith("running_mean"))
    states["theta"][name][3] += 1e-3
    torch.save(states, path / "weights.pt")
    believed(path)
    assert refused(path).endswith(f"theta: the buffer {name} is not of these weights")


# --------------------------------------------------------------------------------------------------- what was accepted before


@pytest.mark.parametrize(("real", "row"), spread(itertools.product([True, False], [-1, 5]), 3, unpack=True))
def test_an_error_of_one_per_cent(real: bool, row: int, run_of: Callable[..., Path]) -> None:
    """Of the last evaluation, or of one in between; where these are left out, it is said."""
    path = run_of("all", real=real)

    def edit(rows: np.ndarray) -> None:
        assert rows["error"][row] > 0.05
        rows["error"][row] = 0.01

    change(path, "evaluations", edit)
    assert "evaluated again 0." in refused(path)
    assert bool(refused(path, evaluations="last")) == (row == -1)
    proof = replay.replay(path, evaluations="none")
    assert proof.holds
    assert "loss" in dict((where, trust) for where, _, _, trust in proof.claims)["evaluations"]


def test_evaluations_that_are_missing_or_too_many(run_of: Callable[..., Path]) -> None:
    for edit in (lambda rows: rows[:-1], lambda rows: rows[4:], lambda rows: np.concatenate([rows, rows[-1:]])):
        path = run_of("all", real=True)
        change(path, "evaluations", edit)
        assert "evaluations, row" in refused(path)


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_late_rows_deleted_with_their_counts(says_goodbye: bool, run_of: Callable[..., Path]) -> None:
    """By what learners say that they pushed; and, in the log of an earlier mpisgd, by the weights that they were given."""
    path = run_of("all", real=True)
    deleted: dict[int, int] = {}

    def delete(rows: np.ndarray) -> np.ndarray:
        late = rows["verdict"] == Verdict.LATE
        deleted[int(rows["shard"][0])] = int(late.sum())
        return rows[~late]

    def count(rows: np.ndarray) -> None:
        for name in ("received", "pushed"):
            rows[name] -= deleted[int(rows["shard"][0])]

    change(path, "pushes", delete, every=True)
    change(path, "summary", count, every=True)
    assert min(deleted.values()) > 0
    if not says_goodbye:
        change(path, "events", lambda rows: rows[rows["kind"] != Event.GOODBYE], every=True)
    assert ("rows, run again" if says_goodbye else "the learner goes on after its last push") in refused(path)


def halve(path: Path) -> None:
    """All seconds, wherever they are."""
    for table, dtype in schema.TABLES.items():
        seconds = [name for name in dtype.names or () if name.endswith("_s")]

        def edit(rows: np.ndarray, seconds: list[str] = seconds) -> None:
            for name in seconds:
                rows[name] /= 2

        change(path, table, edit, every=True)
    done = dict(Run(path).done or {})
    (path / "DONE").write_text(sums.sealed_json({**done, "seconds": done["seconds"] / 2}))


def test_all_seconds_halved(run_of: Callable[..., Path]) -> None:
    """By the delays, which were drawn; by the simulation; else it is as the table says."""
    path = run_of("all", real=True)
    halve(path)
    assert "s were put in" in refused(path)
    path = run_of("bfloat16", real=False)
    halve(path)
    assert "simulated again" in refused(path)
    path = run_of("bfloat16", real=True)
    halve(path)
    assert refused(path) == ""


def test_what_was_rounded_off(run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=True)
    change(path, "pushes", lambda rows: rows["rounded"].__setitem__(slice(None), 0.25), every=True)
    assert "gradients were pushed as float32" in refused(path)
    path = run_of("bfloat16", real=True)
    change(path, "pushes", lambda rows: rows["rounded"].__setitem__(slice(None), 0.25), every=True)
    assert "rounded 0.25, run again 0.00" in refused(path)


@pytest.mark.parametrize(
    "changes",
    spread([
        {"network": {"bandwidth": 6e9}},
        {"network": {"latency_s": 3e-6}},
        {"service": {"update_s": 1e-3}},
        {"compute": {"mean_s": 0.11}},
        {"straggler": {"slowdown": {"1": 1.6}}},
        {"virtual": {"ranks_per_node": 2}},
        {"failures": {"at_s": {"1": 0.3}}},
    ], 3),
)  # fmt: skip
def test_the_costs_of_a_virtual_run(changes: dict[str, Any], run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=False)
    configuration(path, **changes)
    assert refused(path, evaluations="none")


# ------------------------------------------------------------------------------------------------- what cannot be done again


def test_a_model_with_buffers_of_its_own(tmp_path: Path) -> None:
    """It is evaluated again with learner 0's, as of each snapshot."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.calls += 1
            output: torch.Tensor = self.layers(inputs) * (1 + 0.01 * self.calls)
            return output if not self.training else self.layers(inputs)

    user_objects = UserObjects(model=Counting)
    path = simulated(tmp_path / "run", user_objects, protocol=SOFTSYNC, evaluation=EVALUATED)
    assert replay.check(path, user_objects) == ""
    change_all = lambda rows: rows["loss"].__setitem__(-1, 0.1)  # noqa: E731
    change(path, "evaluations", change_all)
    assert "loss 0.1, evaluated again" in replay.check(path, user_objects)


def test_costs_that_are_not_here_any_more(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs("bfloat16", real=False), tmp_path / "measured")
    path = simulated(tmp_path / "run", protocol=SOFTSYNC, compute={"name": "empirical", "run": str(tmp_path / "measured")})
    assert replay.replay(path).simulated
    shutil.rmtree(tmp_path / "measured")
    proof = replay.replay(path)
    assert proof.holds
    assert not proof.simulated
    assert any(", not found here" in line for line in proof.lines())
    assert proof.claims[0][2], "seconds are only checked, then"


def test_gradients_that_are_not_finite(tmp_path: Path) -> None:
    user_objects = UserObjects(model=Sometimes)
    path = simulated(tmp_path / "run", user_objects, protocol=SOFTSYNC, nonfinite="drop", shards=2)
    assert (Run(path).events["kind"] == Event.NONFINITE).any()
    assert replay.check(path, user_objects) == ""
    environment(path, virtual=False)
    assert replay.check(path, user_objects) == ""
    change(path, "events", lambda rows: rows[rows["kind"] != Event.NONFINITE])
    assert "run again" in replay.check(path, user_objects)
