"""Rows of gradients: another value, another order, one that is missing."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.records.log.schema import Reason, Verdict
from tests.effort import spread
from tests.unit.replay.tampered.conftest import RUNS, Rows
from tests.unit.replay.tampered.hands import edit, here, means, rewrite, rows_of, stale, up


@pytest.mark.parametrize("name", spread(RUNS, 9))
def test_an_honest_run_holds(name: str, runs: Callable[[str], Path]) -> None:
    assert replay.check(runs(name)) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    spread([
        ({"staleness": up(1)}, "staleness 3, run again 2"),
        ({"timestamp": up(1)}, r"timestamp \d+: the learner got the weights of clock \d+ at .* s, row"),
        ({"timestamp": up(-90), "staleness": up(90)}, "timestamp -.*"),
        ({"timestamp": up(1), "staleness": 1, "weight": 1.0}, r"timestamp \d+: the learner got the weights of clock \d+ at"),
        ({"timestamp": up(-1), "staleness": 3, "weight": 1 / 3}, r"timestamp \d+: the learner got the weights of clock \d+ at"),
        ({"weight": 1.0}, "weight 1.0, run again 0.5"),
        ({"weight": 0.5 + 1e-16}, "weight 0.5000000000000001, run again 0.5"),
        ({"verdict": Verdict.DROP, "reason": Reason.STALE, "weight": 0.0}, "verdict DROP, run again APPLY"),
        ({"verdict": Verdict.LATE, "reason": Reason.FINISHED, "weight": 0.0}, "verdict LATE, run again APPLY"),
        ({"verdict": 77}, "verdict 77, run again APPLY"),
        ({"reason": 9}, "reason 9, run again NONE"),
        ({"learning_rate": up(1e-9)}, r"learning_rate 0.\d+, run again 0.\d+"),
        ({"shard": 1}, "shard 1, run again 0"),
        ({"learner_id": 6}, "learner_id 6"),
        ({"learner_id": -1}, "learner_id -1"),
        ({"seq": up(1)}, "seq 5, run again 4"),
        ({"seq": up(-1)}, "seq 3, run again 4"),
        ({"samples": 0}, "samples 0, run again 2"),
        ({"gradients": 2}, "gradients 2, run again 1"),
        ({"gradients": 0}, "gradients 0, run again 1"),
        ({"loss": math.nan}, "loss nan, run again 2.3"),
        ({"loss": lambda loss: np.nextafter(np.float32(loss), np.float32(9))}, r"loss \d.*, run again \d"),
        ({"arrival_s": up(-0.5)}, "arrival_s -0.08"),
        ({"arrival_s": up(-0.1)}, "the push arrived at .* s, before"),
        ({"arrival_s": up(5)}, "the push arrived at .* s, after the next update was done"),
        ({"arrival_s": math.nan}, "arrival_s nan"),
        ({"clock": up(1), "timestamp": up(1)}, "the push arrived at .* s, before the entry above in the log"),
        ({"clock": up(-1), "timestamp": up(-1)}, "the push arrived at .* s, after the next update was done"),
    ], 3, unpack=True),
)  # fmt: skip
def test_one_row(changes: dict[str, Any], why: str, run: Path) -> None:
    row = stale(rows_of(run))
    assert rows_of(run)["staleness"][row] == 2
    rewrite(run, "pushes", edit(row, **changes))
    found = replay.check(run)
    assert f"pushes, row {row} " in found
    assert re.search(r"\): " + why, found), found


def test_another_learner(run: Path) -> None:
    """One has a mini-batch too many then, the other a gap: seen at this row, or at the next of one of the two."""
    rows = rows_of(run)
    row = stale(rows)
    for other in set(range(6)) - {rows["learner_id"][row]}:
        rewrite(run, "pushes", edit(row, learner_id=other))
        found = re.match(
            r"shard 0, pushes, row (\d+) .*: the learner's mini-batch before|shard 0, pushes, row (\d+)", replay.check(run)
        )
        assert found
        at = int(found[1] or found[2])
        assert at == row or (at > row and rows["learner_id"][at] in (other, rows["learner_id"][row]))


def test_samples_of_a_gradient_that_was_not_used(run: Path) -> None:
    """A late one."""
    rows = rows_of(run)
    assert rows["verdict"][-1] == Verdict.LATE
    rewrite(run, "pushes", edit(-1, samples=3))
    assert re.match(here(run, len(rows) - 1) + "samples 3, run again 2", replay.check(run))


def test_a_loss_with_the_mean_that_goes_with_it(run: Path) -> None:
    row = stale(rows_of(run))
    clock = int(rows_of(run)["clock"][row])
    rewrite(run, "pushes", edit(row, loss=up(1e-9)))
    means(run)
    assert re.match(here(run, row) + r"loss \d.*, run again \d", replay.check(run))
    proof = replay.replay(run)
    assert (proof.other_losses, proof.largest_loss) == (1, pytest.approx(1e-9, rel=1e-3))
    assert not proof.holds
    assert clock < proof.clocks[0]
    lines = proof.lines()
    assert [line.split(":")[0] for line in lines[2:]] == [
        "first disagreement",
        "1 gradients have another loss than the log says, by 1.000e-09 at most",
        "a difference this small may come from another kind of CPU",
        "not the same",
    ]


def test_what_is_said_of_a_log_that_cannot_be(run: Path) -> None:
    rewrite(run, "pushes", edit(24, learner_id=7))
    lines = replay.replay(run).lines()
    assert lines[1].startswith("the log cannot be true: shard 0, pushes, row 24 (")
    assert lines[2:] == ["not the same"]


@pytest.mark.parametrize("place", ["first", "middle", "last", "late"])
def test_a_row_is_missing(place: str, run: Path) -> None:
    rows = rows_of(run)
    applied = np.flatnonzero((rows["verdict"] == Verdict.APPLY) & (rows["clock"] < rows["clock"].max()))
    row = {"first": 0, "middle": applied[len(applied) // 2], "last": applied[-1], "late": len(rows) - 1}[place]
    rewrite(run, "pushes", lambda rows: np.delete(rows, row))
    found = replay.check(run)
    assert found
    clock = int(rows["clock"][row])
    last = np.flatnonzero(rows["clock"] == clock)[-1]
    later = [f"pushes, row {at}" for at in range(row, last + 1)]
    assert place in ("last", "late") or any(
        where in found for where in (*later, f"updates, row {clock} ", f"learner {rows['learner_id'][row]}, ")
    ), found


@pytest.mark.parametrize("apart", [1, 2, 3, 10])
def test_two_rows_are_swapped(apart: int, run: Path) -> None:
    """At the first of them, or where the row after it should be above it."""
    row = stale(rows_of(run))
    order = np.arange(len(rows_of(run)))
    order[[row, row + apart]] = row + apart, row
    rewrite(run, "pushes", lambda rows: rows[order])
    found = replay.check(run)
    assert f"pushes, row {row} " in found or f"pushes, row {row + 1} " in found, found


@pytest.mark.slow
def test_gradients_of_one_update_trade_places(run: Path) -> None:
    """All their columns but the seconds: (a + b) + c becomes (c + b) + a. Only the last bits of the sum can tell, or seconds.

    Now and then not one of 910 weights is another for it; then only the simulation shows it.
    """
    clocks, found = rows_of(run)["clock"], []
    for at in (at for at in range(12, 60) if clocks[at] == clocks[at + 2]):
        copy = shutil.copytree(run, run.with_name(f"copy-{at}"))
        rewrite(copy, "pushes", trade(at, at + 2))
        found.append(replay.check(copy))
    assert all(found)


def trade(one: int, other: int) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        traded = rows.copy()
        traded[[one, other]] = rows[[other, one]]
        traded["arrival_s"] = rows["arrival_s"]
        for name in ("compute_s", "push_s", "wait_s", "pull_s"):
            traded[name] = 0.0
        return traded

    return change
