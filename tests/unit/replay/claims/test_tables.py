"""Each column of the tables, and each kind of event: proved, checked or on trust."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.records.log.schema import Event
from mpisgd.replay.checks import trust_table
from mpisgd.replay.checks.trust_table import CLAIMS, Claim, Standing
from tests.effort import spread
from tests.unit.replay.claims.hands import a_row, change, little, much, of_tables, refused

SPENT = ("compute_s", "push_s", "wait_s", "pull_s", "update_s")
"""Seconds that may be fewer than a run says, but not more than there was room for."""

# ------------------------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(("table", "column"), spread(of_tables(Standing.PROVED), 2, unpack=True))
def test_what_is_proved(table: str, column: str, run_of: Callable[..., Path]) -> None:
    for name in ("bfloat16", "all") if column == "rounded" else ("all",):
        path = run_of(name, real=True)

        def edit(rows: np.ndarray) -> None:
            row = 0 if table == "summary" else a_row(rows, column)
            rows[column][row] = little(column, rows[column][row])

        change(path, table, edit)
        assert refused(path), name


@pytest.mark.parametrize(("table", "column"), of_tables(Standing.CHECKED))
def test_what_is_checked(table: str, column: str, run_of: Callable[..., Path]) -> None:
    for which in range(2):
        path = run_of("all", real=True)

        def edit(rows: np.ndarray, which: int = which) -> None:
            row = 0 if table == "summary" else a_row(rows, column)
            rows[column][row] = much(rows[column][row])[which]

        change(path, table, edit)
        assert refused(path)


@pytest.mark.parametrize(("column", "name"), [("neighbour_s", "groups"), ("backward_s", "slices")])
def test_for_seconds_that_only_some_runs_have_there_was_room(column: str, name: str, run_of: Callable[..., Path]) -> None:
    """Of groups that wait for neighbours, and of chunks that leave during the backward pass."""
    assert trust_table.SOME[column].standing is Standing.TRUST
    assert column in trust_table.table(columns=(column,))[0][3] and column not in trust_table.table()[0][3]
    for which in range(2):
        path = run_of(name, real=True)

        def much_more(rows: np.ndarray, which: int = which) -> None:
            rows[column][a_row(rows, column)] = much(rows[column][0])[which]

        change(path, "pushes", much_more)
        assert refused(path)
    path = run_of(name, real=False)

    def a_little(rows: np.ndarray) -> None:
        rows[column][a_row(rows, column)] = little(column, rows[column][a_row(rows, column)])

    change(path, "pushes", a_little)
    assert f"{column} " in refused(path)


@pytest.mark.parametrize(("table", "column"), of_tables(Standing.TRUST))
def test_what_is_on_trust(table: str, column: str, run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=True)

    def edit(rows: np.ndarray) -> None:
        if column in SPENT:  # of learner 0, on all shards: the delays of a slow one follow from what it computed for
            rows[column][rows["learner_id"] == 0 if table == "pushes" else slice(None)] *= 0.5
        else:
            rows[column][a_row(rows, column)] += 1.0

    change(path, table, edit, every=column in SPENT)
    assert refused(path) == ""


@pytest.mark.parametrize(("table", "column"), [each for each in of_tables(Standing.TRUST) if each[1] in SPENT])
def test_for_what_was_spent_there_was_room(table: str, column: str, run_of: Callable[..., Path]) -> None:
    for wrong in (1e6, -1.0):
        path = run_of("all", real=True)

        def edit(rows: np.ndarray, wrong: float = wrong) -> None:
            rows[column][a_row(rows, column)] = wrong

        change(path, table, edit)
        assert refused(path)


@pytest.mark.parametrize(
    ("table", "column"), spread([each for standing in Standing for each in of_tables(standing)], 5, unpack=True)
)
def test_of_a_virtual_run_all_is_proved(table: str, column: str, run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=False)

    def edit(rows: np.ndarray) -> None:
        row = 0 if table == "summary" else a_row(rows, column)
        rows[column][row] = little(column, rows[column][row])

    change(path, table, edit)
    assert refused(path)


# ------------------------------------------------------------------------------------------------------------------ events

WHERE = {
    "NONFINITE": "nonfinite", "DEPARTED": "leaving", "TIMEOUT": "timeout", "GAVE_UP": "giving-up",
    "STARTED": "all", "STOPPED": "all", "SNAPSHOT": "all", "GOODBYE": "all",
}  # fmt: skip
"""Those that virtual runs have; of the others (of lost learners, of continued runs) tests of real ranks have honest ones."""


def of_events(*standings: Standing) -> list[Any]:
    found = [(kind, column) for claim in CLAIMS if claim.standing in standings for kind in claim.of for column in claim.names]
    return [pytest.param(kind, column, id=f"{kind}.{column}") for kind, column in found if kind in WHERE]


@pytest.mark.parametrize(("kind", "column"), of_events(Standing.PROVED, Standing.CHECKED))
def test_events(kind: str, column: str, run_of: Callable[..., Path]) -> None:
    path = run_of(WHERE[kind], real=True)

    def edit(events: np.ndarray) -> None:
        row = np.flatnonzero(events["kind"] == Event[kind])[-1]
        old = events[column][row]
        other = {"kind": Event.STOPPED if kind != "STOPPED" else Event.SNAPSHOT, "learner_id": old + 1, "value": 1e6}
        if column == "value" and kind == "NONFINITE":
            other["value"] = 0.5
        events[column][row] = other[column]

    change(path, "events", edit)
    assert refused(path)


def test_an_event_that_is_missing(run_of: Callable[..., Path]) -> None:
    for kind, name in WHERE.items():
        path = run_of(name, real=True)
        change(path, "events", lambda rows, kind=kind: np.delete(rows, np.flatnonzero(rows["kind"] == Event[kind])[-1]))
        if kind != "GAVE_UP":  # of which, without delays that it shifts, nobody else tells
            assert refused(path), kind


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.of and claim.standing is Standing.TRUST])
def test_events_on_trust(claim: Claim, run_of: Callable[..., Path]) -> None:
    """They may be there, or not."""
    path = run_of("leaving", real=True)

    def add(events: np.ndarray) -> np.ndarray:
        more = np.repeat(events[-1:], len(claim.of))
        for row, kind in zip(more, claim.of, strict=True):
            row["kind"], row["learner_id"], row["value"] = Event[kind], -1, math.nan if kind == "SKIPPED" else 1.0
        return np.concatenate([events, more])

    change(path, "events", add)
    assert refused(path) == ""
