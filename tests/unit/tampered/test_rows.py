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
from mpisgd.replay.checks.finding import Untrue
from mpisgd.replay.checks.record import read
from mpisgd.replay.prove import check_log
from tests.effort import spread
from tests.unit.tampered.conftest import RUNS, Rows
from tests.unit.tampered.hands import edit, here, means, rewrite, rows_of, stale, up


@pytest.mark.parametrize("name", spread(RUNS, 9))
def test_an_honest_run_holds(name: str, runs: Callable[[str], Path]) -> None:
    assert replay.check(runs(name)) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    spread([
        ({"staleness": up(1)}, r"staleness 3 is not clock - timestamp = (\d+) - (\d+)"),
        ({"timestamp": up(1)}, "staleness 2 is not clock - timestamp"),
        ({"clock": up(1)}, "staleness 2 is not clock - timestamp"),
        ({"timestamp": up(-90), "staleness": up(90)}, "timestamp -.*: weights of clocks 0 to .* were there"),
        ({"timestamp": up(1), "staleness": 1, "weight": 1.0},
         r"timestamp \d+: the learner got the weights of clock \d+ at .* s, row"),
        ({"timestamp": up(-1), "staleness": 3, "weight": 1 / 3}, r"timestamp \d+: the learner got the weights of clock \d+ at"),
        ({"weight": 1.0}, "APPLY with weight 1.0, the protocol says APPLY with weight 0.5"),
        ({"weight": 0.5 + 1e-16}, "APPLY with weight 0.5000000000000001, the protocol says"),
        ({"verdict": Verdict.DROP, "reason": Reason.STALE, "weight": 0.0}, r"DROP with weight 0.0 \(STALE\), the protocol says"),
        ({"verdict": Verdict.LATE, "reason": Reason.FINISHED, "weight": 0.0}, "LATE with weight 0.0 .*, the protocol says APPLY"),
        ({"verdict": 77}, "verdict 77 with weight 0.5, the protocol says APPLY"),
        ({"reason": 9}, r"APPLY with weight 0.5 \(reason 9\), the protocol says"),
        ({"learning_rate": up(1e-9)}, r"learning rate 0.\d+, the schedule says 0.\d+"),
        ({"shard": 1}, "the row says shard 1"),
        ({"learner_id": 6}, "there are learners 0 to 5"),
        ({"learner_id": -1}, "there are learners 0 to 5"),
        ({"seq": up(1)}, r"the learner's mini-batch before was \d+, in row \d+"),
        ({"seq": up(-1)}, r"the learner's mini-batch before was \d+, in row \d+"),
        ({"samples": 0}, "0 samples"),
        ({"gradients": 2}, r"the sum of 2 gradient\(s\): 1 rank\(s\) compute for this learner"),
        ({"gradients": 0}, r"the sum of 0 gradient\(s\): 1 rank\(s\) compute for this learner"),
        ({"loss": math.nan}, "loss nan: the run would have ended here, for nonfinite = 'stop'"),
        ({"arrival_s": up(-0.5)}, "the push arrived at .* s, before"),
        ({"arrival_s": up(5)}, "the push arrived at .* s, after update .* was done"),
        ({"arrival_s": math.nan}, "the push arrived at nan s"),
        (
            {"clock": up(1), "timestamp": up(1)},
            r"the shard was at clock \d+: the protocol makes no update \d+ of \d+ gradient\(s\) before this row",
        ),
        ({"clock": up(-1), "timestamp": up(-1)}, r"the shard was at clock \d+: update \d+ was due after the row before"),
    ], 3, unpack=True),
)  # fmt: skip
def test_one_row(changes: dict[str, Any], why: str, run: Path) -> None:
    row = stale(rows_of(run))
    assert rows_of(run)["staleness"][row] == 2
    rewrite(run, "pushes", edit(row, **changes))
    place = "" if {"learner_id", "seq"} & set(changes) or changes.get("shard") else here(run, row)
    found = replay.check(run)
    assert f"pushes, row {row} " in found
    assert re.match(place + ".*" + why, found), found


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


def test_samples_of_a_gradient(run: Path) -> None:
    row = stale(rows_of(run))
    clock = int(rows_of(run)["clock"][row])
    rewrite(run, "pushes", edit(row, samples=3))
    found = replay.check(run)
    assert re.match(rf"shard 0, updates, row {clock} \(clock {clock + 1}\): samples (\d+): the gradients up to row", found), found


def test_samples_of_a_gradient_that_was_not_used(run: Path) -> None:
    """A late one: only computing shows it."""
    rows = rows_of(run)
    assert rows["verdict"][-1] == Verdict.LATE
    rewrite(run, "pushes", edit(-1, samples=3))
    assert re.match(here(run, len(rows) - 1) + "3 samples, recomputed 2", replay.check(run))


def test_a_loss(run: Path) -> None:
    row = stale(rows_of(run))
    clock = int(rows_of(run)["clock"][row])
    rewrite(run, "pushes", edit(row, loss=lambda loss: np.nextafter(np.float32(loss), np.float32(9))))
    assert replay.check(run).startswith(f"shard 0, updates, row {clock} (clock {clock + 1}): mean_loss ")


def test_a_loss_with_the_mean_that_goes_with_it(run: Path) -> None:
    """Only computing shows it: at that row."""
    row = stale(rows_of(run))
    clock = int(rows_of(run)["clock"][row])
    rewrite(run, "pushes", edit(row, loss=up(1e-9)))
    means(run)
    assert re.match(here(run, row) + r"loss \d.*, recomputed \d", replay.check(run))
    proof = replay.replay(run)
    assert (proof.other_losses, proof.largest_loss) == (1, pytest.approx(1e-9, rel=1e-3))
    assert [each.elements for each in proof.differences] == [0, 0]
    assert not proof.holds
    assert clock < proof.clocks[0]
    lines = proof.lines()
    assert [line.split(":")[0] for line in lines[2:]] == [
        "simulated again",
        "first disagreement",
        "1 gradients have another loss than the log says, by 1.000e-09 at most",
        "a difference this small may come from another kind of CPU",
        "not the same",
    ]


def test_what_is_said_of_a_log_that_cannot_be(run: Path) -> None:
    rewrite(run, "pushes", edit(24, weight=7.0))
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
    if place == "late":
        assert re.match(r"shard 0, summary: received \d+, but the rows of pushes and updates give \d+", found)
    else:
        clock = int(rows["clock"][row])
        last = np.flatnonzero(rows["clock"] == clock)[-1]
        later = [f"pushes, row {at} " for at in range(row, last + 1)]
        assert any(where in found for where in (*later, f"updates, row {clock} ")), found


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
        try:
            check_log(read(copy))
        except Untrue:  # the seconds tell it as well
            continue
        found.append(replay.check(copy))
    assert all("recomputed" in text or "theta" in text or "simulated again" in text for text in found)
    assert sum("simulated" not in text for text in found) > len(found) / 2 > 2


def trade(one: int, other: int) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        traded = rows.copy()
        traded[[one, other]] = rows[[other, one]]
        traded["arrival_s"] = rows["arrival_s"]
        for name in ("compute_s", "push_s", "wait_s", "pull_s"):
            traded[name] = 0.0
        return traded

    return change
