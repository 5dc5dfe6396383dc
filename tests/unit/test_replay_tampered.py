"""A log that was tampered with is refused, and the first place that cannot be is named (DESIGN 4, law 6)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tomli_w
import torch

from mpisgd import replay
from mpisgd.base.errors import DataError
from mpisgd.records.log import schema, sums
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Reason, Verdict
from mpisgd.replay.checks.finding import Untrue
from mpisgd.replay.checks.learners import compare_shards
from mpisgd.replay.checks.order import serial_order
from mpisgd.replay.checks.record import Record, read
from mpisgd.replay.prove import check_log
from tests.effort import thinned
from tests.forge import forge, unsealed
from tests.unit.test_replay import UNEVEN, simulated

Rows = np.ndarray
SOFTSYNC = {"name": "softsync", "n": 2}
#: Six learners and c = 3, so that each update sums gradients of different staleness; two samples make the losses uneven.
RUNS: dict[str, dict[str, Any]] = {
    "softsync": {"protocol": SOFTSYNC, "averaging": 0.9, "schedule": "linear"},
    "softsync-S2": {"protocol": SOFTSYNC, "shards": 2},
    "hardsync": {"protocol": "hardsync"},
    "backup-S2": {"protocol": {"name": "backup", "b": 2}, "shards": 2},
    "timeout-S2": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.09}, "shards": 2},
    "versioned-S2": {"protocol": {"name": "versioned", "grads_to_wait": 3}, "shards": 2},
    "ssp": {"protocol": {"name": "ssp", "slack": 1, "modulation": "inverse_plus_one"}},
    "teams-S2": {
        "protocol": {"name": "backup", "b": 1},
        "shards": 2,
        "aggregation": "node",
        "team_size": 3,
        "virtual": {"learners": 7, "ranks_per_node": 100},
    },
    "leaving": {"protocol": SOFTSYNC, "failures": {"at_s": {"1": 0.25}}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tampered")
    for name, special in RUNS.items():
        simulated(directory / name, learners=6, epochs=0.12, mu=2, compute=UNEVEN, alpha0=0.1, **special)
        assert replay.check(directory / name) == ""
    return directory


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """The softsync run with one shard, to be tampered with."""
    return shutil.copytree(runs / "softsync", tmp_path / "run")


@pytest.fixture
def sharded(runs: Path, tmp_path: Path) -> Path:
    """The softsync run with two shards."""
    return shutil.copytree(runs / "softsync-S2", tmp_path / "sharded")


def rewrite(path: Path, table: str, change: Callable[[Rows], Rows | None], shard: int = 0) -> None:
    """Change the rows of a table, in place or for others; where they become fewer, the count of committed rows follows."""
    with h5py.File(path / schema.shard_file(shard), "r+") as file:
        forge(file)
        index = list(schema.TABLES).index(table)
        rows = file[table][: file["committed"][index]]
        changed = change(rows)
        rows = rows if changed is None else changed
        file[table].resize(len(rows), axis=0)
        file[table][:] = rows
        file["committed"][index] = len(rows)


def summary(path: Path, shard: int = 0, **fields: int) -> None:
    with h5py.File(path / schema.shard_file(shard), "r+") as file:
        forge(file)
        row = file["summary"][0]
        for name, value in fields.items():
            row[name] += value
        file["summary"][0] = row


def goodbye(path: Path, learner_id: int, by: int, shard: int = 0) -> None:
    """A learner says that it pushed so many gradients more."""

    def change(rows: Rows) -> None:
        rows["value"][(rows["kind"] == schema.Event.GOODBYE) & (rows["learner_id"] == learner_id)] += by

    rewrite(path, "events", change, shard)


def rows_of(path: Path, table: str = "pushes", shard: int = 0) -> Rows:
    with h5py.File(path / schema.shard_file(shard)) as file:
        rows: Rows = file[table][:]
        return rows


def stale(rows: Rows, least: int = 2) -> int:
    """A row of a gradient that was applied, of at least this staleness; not among the first, so that all have pushed before."""
    return next(at for at in range(24, len(rows)) if rows["staleness"][at] >= least and rows["verdict"][at] == Verdict.APPLY)


def here(path: Path, row: int, shard: int = 0) -> str:
    """How a place in `pushes` is named, as a pattern."""
    its = rows_of(path, shard=shard)[row]
    return re.escape(
        f"shard {shard}, pushes, row {row} (clock {its['clock']}, learner {its['learner_id']}, mini-batch {its['seq']}): "
    )


def edit(row: int, **changes: Any) -> Callable[[Rows], None]:
    """Set columns of one row; a function is given the old value."""

    def change(rows: Rows) -> None:
        for name, value in changes.items():
            rows[name][row] = value(rows[name][row]) if callable(value) else value

    return change


def up(by: float) -> Callable[[float], float]:
    return lambda value: value + by


# ---------------------------------------------------------------------------------------------------- rows of one shard


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"staleness": up(1)}, r"staleness 3 is not clock - timestamp = (\d+) - (\d+)"),
        ({"timestamp": up(1)}, "staleness 2 is not clock - timestamp"),
        ({"clock": up(1)}, "staleness 2 is not clock - timestamp"),
        ({"timestamp": up(-90), "staleness": up(90)}, "timestamp -.*: weights of clocks 0 to .* were there"),
        ({"timestamp": up(1), "staleness": 1, "weight": 1.0}, r"timestamp \d+: it was given the weights of clock \d+ at .* s, row"),
        ({"timestamp": up(-1), "staleness": 3, "weight": 1 / 3}, r"timestamp \d+: it was given the weights of clock \d+ at"),
        ({"weight": 1.0}, "APPLY with weight 1.0, the protocol says APPLY with weight 0.5"),
        ({"weight": 0.5 + 1e-16}, "APPLY with weight 0.5000000000000001, the protocol says"),
        ({"verdict": Verdict.DROP, "reason": Reason.STALE, "weight": 0.0}, r"DROP with weight 0.0 \(STALE\), the protocol says"),
        ({"verdict": Verdict.LATE, "reason": Reason.FINISHED, "weight": 0.0}, "LATE with weight 0.0 .*, the protocol says APPLY"),
        ({"verdict": 77}, "verdict 77 with weight 0.5, the protocol says APPLY"),
        ({"reason": 9}, r"APPLY with weight 0.5 \(reason 9\), the protocol says"),
        ({"learning_rate": up(1e-9)}, r"learning rate 0.\d+, the schedule says 0.\d+"),
        ({"shard": 1}, "it says shard 1"),
        ({"learner_id": 6}, "there are learners 0 to 5"),
        ({"learner_id": -1}, "there are learners 0 to 5"),
        ({"seq": up(1)}, r"its mini-batch before was \d+, in row \d+"),
        ({"seq": up(-1)}, r"its mini-batch before was \d+, in row \d+"),
        ({"samples": 0}, "0 samples"),
        ({"gradients": 2}, r"the sum of 2 gradient\(s\): 1 rank\(s\) compute for this learner"),
        ({"gradients": 0}, r"the sum of 0 gradient\(s\): 1 rank\(s\) compute for this learner"),
        ({"loss": math.nan}, "loss nan: the run would have ended here, for nonfinite = 'stop'"),
        ({"arrival_s": up(-0.5)}, "it arrived at .* s, before"),
        ({"arrival_s": up(5)}, "it arrived at .* s, after update .* was done"),
        ({"arrival_s": math.nan}, "it arrived at nan s"),
        ({"clock": up(1), "timestamp": up(1)}, r"the shard was at clock \d+: update \d+ of \d+ gradient\(s\) before this row"),
        ({"clock": up(-1), "timestamp": up(-1)}, r"the shard was at clock \d+: update \d+ was due after the row before"),
    ],
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
        found = re.match(r"shard 0, pushes, row (\d+) .*: its mini-batch before|shard 0, pushes, row (\d+)", replay.check(run))
        assert found
        at = int(found[1] or found[2])
        assert at == row or (at > row and rows["learner_id"][at] in (other, rows["learner_id"][row]))


def test_samples_of_a_gradient(run: Path) -> None:
    row = stale(rows_of(run))
    clock = int(rows_of(run)["clock"][row])
    rewrite(run, "pushes", edit(row, samples=3))
    found = replay.check(run)
    assert re.match(rf"shard 0, updates, row {clock} \(clock {clock + 1}\): samples (\d+): its gradients, up to row", found), found


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
        "so small a difference may come from another kind of CPU",
        "not the same",
    ]


def test_what_is_said_of_a_log_that_cannot_be(run: Path) -> None:
    rewrite(run, "pushes", edit(24, weight=7.0))
    lines = replay.replay(run).lines()
    assert lines[1].startswith("the log cannot be true: shard 0, pushes, row 24 (")
    assert lines[2:] == ["not the same"]


def means(path: Path, shard: int = 0) -> None:
    """Make the mean losses of the updates agree with the pushes."""
    pushes = rows_of(path, shard=shard)

    def change(updates: Rows) -> None:
        for update in updates:
            losses = pushes["loss"][(pushes["verdict"] == Verdict.APPLY) & (pushes["clock"] == update["clock"] - 1)]
            update["mean_loss"] = sum(losses.tolist()) / len(losses)

    rewrite(path, "updates", change, shard)


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


# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gradients": 2}, r"gradients 2: its gradients, up to row \d+ of pushes, give 3"),
        ({"samples": up(2)}, r"samples \d+: .* give \d+"),
        ({"learning_rate": up(1e-12)}, r"learning_rate 0.\d+: .* give 0.\d+"),
        ({"mean_loss": up(1e-12)}, r"mean_loss \d.\d+: .* give \d.\d+"),
        ({"clock": 9}, "clock 9: .* give 6"),
        ({"shard": 3}, "shard 3: .* give 0"),
        ({"time_s": 0.0}, "done at 0.0 s, before the one before at .* s"),
        ({"time_s": math.nan}, "done at nan s, before"),
    ],
)
def test_an_update(changes: dict[str, Any], why: str, run: Path) -> None:
    rewrite(run, "updates", edit(5, **changes))
    assert re.match(r"shard 0, updates, row 5 \(clock 6\): " + why, replay.check(run)), replay.check(run)


@pytest.mark.parametrize("norm", ["gradient_sq", "sum_sq"])
def test_a_norm(norm: str, run: Path) -> None:
    measured = np.flatnonzero(np.isfinite(rows_of(run, "updates")[norm]))
    row = int(measured[1])
    rewrite(run, "updates", edit(row, **{norm: lambda value: value * 1.01}))
    assert re.match(rf"shard 0, updates, row {row} \(clock {row + 1}\): {norm} .*, recomputed", replay.check(run))


@pytest.mark.parametrize("place", [0, 5, -1])
def test_an_update_is_missing(place: int, run: Path) -> None:
    updates = rows_of(run, "updates")
    row = range(len(updates))[place]
    rewrite(run, "updates", lambda rows: np.delete(rows, row))
    found = replay.check(run)
    expected = "it is missing: due after row" if place == -1 else f"clock {row + 2}: its gradients, up to row .* give {row + 1}"
    assert re.match(rf"shard 0, updates, row {row} \(clock {row + 1}\): {expected}", found) or "pushes, row " in found, found
    assert f"updates, row {row} (" in found


def test_an_update_too_many(run: Path) -> None:
    updates = rows_of(run, "updates")
    again = updates[-1:].copy()
    again["clock"] += 1
    again["time_s"] += 9
    rewrite(run, "updates", lambda rows: np.concatenate([rows, again]))
    assert re.match(rf"shard 0, updates, row {len(updates)} .*: the protocol does not make it of \d", replay.check(run))


# ---------------------------------------------------------------------------------------------------------- everything else


@pytest.mark.parametrize("name", ["received", "samples", "final_clock", "pushed"])
def test_the_last_words_of_a_shard(name: str, run: Path) -> None:
    summary(run, **{name: 1})
    assert re.match(rf"shard 0, summary: {name} \d+, but the rows of pushes and updates give \d+", replay.check(run))


def test_what_done_says(run: Path) -> None:
    done = json.loads((run / "DONE").read_text())
    done["clock"][0] += 1
    del done["crc32"]
    (run / "DONE").write_text(sums.sealed_json(done))
    assert re.match(r"shard 0, updates, row \d+: DONE says that it ended at clock \d+", replay.check(run))


@pytest.mark.parametrize("name", ["theta", "thetabar"])
def test_a_bit_of_the_weights(name: str, run: Path) -> None:
    states = torch.load(run / "weights.pt", weights_only=True)
    states[name][next(iter(states[name]))].view(-1).view(torch.int32)[70] ^= 1
    torch.save(states, run / "weights.pt")
    with pytest.raises(DataError, match=r"weights\.pt is damaged: \d+ bytes with CRC-32 [0-9a-f]{8}, written were "):
        replay.check(run)
    done = {**(Run(run).done or {}), "weights": sums.of_file(run / "weights.pt")}
    (run / "DONE").write_text(sums.sealed_json(done))
    found = replay.check(run)
    assert found.startswith(f"{name}: 1 parameters differ, by ")
    assert found.endswith("place 70 of the flat vector, in the slice 0 to 909 of shard 0")


def test_another_configuration(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(unsealed(text).replace("seed = 1\n", "seed = 2\n"))
    assert re.match(here(run, 0) + "loss .* recomputed", replay.check(run))
    (run / "config.toml").write_text(unsealed(text).replace("n = 2\n", "n = 3\n"))
    assert "the protocol says" in replay.check(run) or "give 2" in replay.check(run)


def test_another_count_of_a_teams_gradients(runs: Path, tmp_path: Path) -> None:
    """Also where the updates were made to fit, and where nothing came of the gradient."""
    path = shutil.copytree(runs / "teams-S2", tmp_path / "run")
    rows = rows_of(path)
    applied, dropped = (int(np.flatnonzero(rows["verdict"] == verdict)[0]) for verdict in (Verdict.APPLY, Verdict.DROP))
    for row in (dropped, applied):
        rewrite(path, "pushes", lambda _: rows.copy())
        rewrite(path, "pushes", edit(row, gradients=up(1)))
        if row == applied:
            rewrite(path, "updates", edit(int(rows["clock"][row]), gradients=up(1)))
        expected = r"the sum of (4|3) gradient\(s\): (3|2) rank\(s\) compute for this learner"
        assert re.match(here(path, row) + expected, replay.check(path)), replay.check(path)


@pytest.mark.parametrize(
    ("teams", "why"),
    [
        ([[2, 3, 5], [4, 6], [7, 8]], r"shard 0, pushes, row \d+ .*: loss .*, recomputed"),
        ([[2, 4, 3], [5, 6], [7, 8]], r"theta: \d+ parameters differ|shard 0, pushes, row \d+ .*: loss .*, recomputed"),
        ([[2, 3], [4, 5, 6], [7, 8]], r"shard 0, pushes, row \d+ .*: the sum of \d gradient\(s\): \d rank\(s\) compute"),
    ],
)
def test_other_teams(teams: list[list[int]], why: str, runs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(runs / "teams-S2", tmp_path / "run")
    say(path, teams)
    assert re.match(why, replay.check(path)), replay.check(path)


@pytest.mark.parametrize("teams", [[], [[2, 3, 4], [5, 6]], [[2, 3, 4], [5, 6], []], [[2, 3, 4], [5, 6], [6, 7]]])
def test_teams_that_cannot_be(teams: list[list[int]], runs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(runs / "teams-S2", tmp_path / "run")
    say(path, teams)
    with pytest.raises(DataError, match=r"\[environment\] teams = .*, expected the ranks of 3 learners, each once"):
        replay.check(path)


def say(path: Path, teams: list[list[int]]) -> None:
    """Let config.toml say that these were the teams."""
    contents = tomllib.loads((path / "config.toml").read_text())
    assert contents["environment"]["teams"] == [[2, 3, 4], [5, 6], [7, 8]]
    contents["environment"]["teams"] = teams
    (path / "config.toml").write_text(tomli_w.dumps(contents))


def test_who_left_when(runs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(runs / "leaving", tmp_path / "run")
    events = rows_of(path, "events")
    (departed,) = np.flatnonzero(events["kind"] == schema.Event.DEPARTED)
    rewrite(path, "events", lambda rows: np.delete(rows, departed))
    assert replay.check(path)
    for changes, why in (
        ({"time_s": 0.0, "clock": 0}, ""),
        ({"learner_id": 3}, ""),
        ({"clock": 500}, ""),
        ({"time_s": up(-0.1)}, r"it left at .* s, but clock \d+ was from .* to .* s"),
    ):
        shutil.rmtree(path)
        shutil.copytree(runs / "leaving", path)
        rewrite(path, "events", edit(departed, **changes))
        found = replay.check(path)
        assert found
        assert re.search(why, found), found


def test_when_the_time_was_over(runs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(runs / "timeout-S2", tmp_path / "run")
    over = np.flatnonzero(rows_of(path, "events")["kind"] == schema.Event.TIMEOUT)
    assert len(over) > 3
    rewrite(path, "events", lambda rows: np.delete(rows, over[1]))
    assert replay.check(path)
    for changes, why in (
        ({"clock": up(1)}, ""),
        ({"time_s": up(-0.05)}, r"a time-out at .* s: clock \d+ had its time-out at .* s, its end at .* s"),
        ({"time_s": up(1.0)}, ""),
    ):
        shutil.rmtree(path)
        shutil.copytree(runs / "timeout-S2", path)
        rewrite(path, "events", edit(over[1], **changes))
        found = replay.check(path)
        assert found
        assert re.search(why, found), found


def test_one_who_never_left(run: Path) -> None:
    """After the last row, where nothing else depends on it."""
    last = rows_of(run, "events")[-1:].copy()
    last["kind"], last["learner_id"], last["clock"] = schema.Event.DEPARTED, 2, 500
    rewrite(run, "events", lambda rows: np.concatenate([rows, last]))
    found = replay.check(run)
    assert re.match(r"shard 0, events \(clock 500, learner 2\): it left at clock 500, but what comes after it is of", found), found


# ------------------------------------------------------------------------------------------------------------ two shards


def test_shards_that_say_different_things_of_a_gradient(sharded: Path) -> None:
    row = stale(rows_of(sharded, shard=1))
    rewrite(sharded, "pushes", edit(row, loss=up(1e-9)), shard=1)
    means(sharded, shard=1)
    assert re.match(here(sharded, row, shard=1) + r"loss .*; row \d+ of shard 0 says", replay.check(sharded))


def test_a_row_that_one_shard_alone_has(sharded: Path) -> None:
    """A late one: nothing else depends on it."""
    learner_id = int(rows_of(sharded, shard=1)["learner_id"][-1])
    rewrite(sharded, "pushes", lambda rows: rows[:-1], shard=1)
    summary(sharded, shard=1, received=-1, pushed=-1)
    goodbye(sharded, learner_id, -1, shard=1)
    assert re.match("shard 0, pushes, row .*: shard 1 has no row of this gradient", replay.check(sharded))


def changed(record: Record, shard: int, table: str, rows: Rows) -> Record:
    shards = list(record.shards)
    shards[shard] = dataclasses.replace(shards[shard], **{table: rows})
    return dataclasses.replace(record, shards=shards)


def test_one_clock_over_all_shards(runs: Path) -> None:
    record = read(runs / "backup-S2")
    rows = record.shards[1].pushes.copy()
    rows["timestamp"][20] -= 1
    with pytest.raises(Untrue, match=r"shard 1, pushes, row 20 .*: timestamps \d+, \d+ on the shards: expected the same on all"):
        compare_shards(changed(record, 1, "pushes", rows))


def test_weights_that_were_not_asked_for(runs: Path) -> None:
    """After a mini-batch at clock t a synchronous learner asks for clock t + 1."""
    record = read(runs / "backup-S2")
    rows = record.shards[0].rows_of[2]
    for shard in (0, 1):
        pushes = record.shards[shard].pushes.copy()
        first, second = record.shards[shard].rows_of[2][2:4]
        pushes["timestamp"][second] = pushes["timestamp"][first]
        record = changed(record, shard, "pushes", pushes)
    with pytest.raises(Untrue, match=rf"shard 0, pushes, row {rows[3]} .*: timestamp \d+: .* it asked for clock \d+ or later"):
        compare_shards(record)


def test_a_mini_batch_is_computed_again_only_where_it_was_rejected(runs: Path) -> None:
    record = read(runs / "softsync-S2")
    for verdict in (Verdict.REJECT, Verdict.APPLY):
        for shard in (0, 1):
            pushes = record.shards[shard].pushes.copy()
            first, second = record.shards[shard].rows_of[2][2:4]
            pushes["seq"][second:][pushes["learner_id"][second:] == 2] -= 1
            pushes["verdict"][first] = verdict
            tampered = changed(tampered if shard else record, shard, "pushes", pushes)  # noqa: F821
        if verdict == Verdict.REJECT:
            compare_shards(tampered)
        else:
            with pytest.raises(Untrue, match="the same mini-batch again, though no shard rejected it"):
                compare_shards(tampered)


def test_weights_cannot_come_from_the_gradients_that_they_gave(runs: Path) -> None:
    """On each shard alone it could be; between the shards it is a circle."""
    record = read(runs / "softsync-S2")
    for shard in (0, 1):
        pushes = record.shards[shard].pushes.copy()
        early = np.flatnonzero(pushes["clock"] == 0)[shard]
        other = record.shards[1 - shard]
        at = other.rows_of[pushes["learner_id"][early]][0]
        theirs = other.pushes.copy()
        theirs["timestamp"][at] = 1
        record = changed(record, 1 - shard, "pushes", theirs)
    with pytest.raises(Untrue, match=r"pushes, row \d .*: it was computed from weights that were made, by way of other shards"):
        list(serial_order(record))


# ------------------------------------------------------------------------------------------------------- nothing slips through

#: Columns of which not a bit can be another (seconds can, as long as their order is the same).
PROVEN = {
    "pushes": ("shard", "clock", "timestamp", "staleness", "learner_id", "seq", "samples", "gradients", "verdict",
               "reason", "weight", "learning_rate", "loss"),
    "updates": ("shard", "clock", "gradients", "samples", "learning_rate", "mean_loss"),
}  # fmt: skip


def cells(record: Record, shard: int) -> Iterator[tuple[str, str, int]]:
    """Of gradients that are in the weights; what became of others, only their verdict says (and, computed, their loss)."""
    log = record.shards[shard]
    for table, names in PROVEN.items():
        for name in names:
            for row in range(len(getattr(log, table))):
                used = log.pushes[row]["verdict"] == Verdict.APPLY and log.pushes[row]["clock"] < log.final_clock
                if table == "updates" or used or name not in ("samples", "loss"):
                    yield table, name, row


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("name", RUNS)
def test_every_cell(name: str, by: int, runs: Path) -> None:
    """Each cell of the last shard's log is changed a little; all is seen without computing."""
    record = read(runs / name)
    shard = len(record.shards) - 1
    slipped = []
    for table, column, row in thinned(cells(record, shard), 11):
        rows = getattr(record.shards[shard], table).copy()
        values = rows[column].astype(np.int64 if rows.dtype[column].kind in "iu" else np.float64)
        if values.dtype == np.int64:
            values[row] += by
        else:  # a smaller change of a loss might not change the mean
            kind = np.float32 if column == "loss" else np.float64
            values[row] = np.nextafter(kind(values[row]), kind(by * np.inf))
        rows[column] = values
        try:
            check_log(changed(record, shard, table, rows))
            slipped.append((table, column, row))
        except Untrue as untrue:
            assert untrue.finding.shard == shard
    assert slipped == []


@pytest.mark.parametrize("table", PROVEN)
@pytest.mark.parametrize("name", RUNS)
def test_every_row(name: str, table: str, runs: Path) -> None:
    """Each row of the last shard's log is left out, doubled, or trades places with the next."""
    record = read(runs / name)
    shard = len(record.shards) - 1
    rows = getattr(record.shards[shard], table)
    order = list(range(len(rows)))
    for row in thinned(order, 3):
        ways = [order[:row] + order[row + 1 :], order[: row + 1] + order[row:]]
        if row + 1 < len(rows):
            ways.append([*order[:row], row + 1, row, *order[row + 2 :]])
        for way in ways:
            with pytest.raises(Untrue):
                check_log(changed(record, shard, table, rows[way]))
