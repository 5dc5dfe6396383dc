"""Updates, a shard's last words, DONE, weights, the configuration, teams, and who left when."""

from __future__ import annotations

import math
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from mpisgd import replay
from mpisgd.base.errors import DataError
from mpisgd.records.log import sums
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from tests.forge import unsealed
from tests.unit.replay.tampered.hands import edit, here, rewrite, rows_of, summary, up

# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gradients": 2}, "gradients 2, run again 3"),
        ({"samples": up(2)}, r"samples \d+, run again \d+"),
        ({"learning_rate": up(1e-12)}, r"learning_rate 0.\d+, run again 0.\d+"),
        ({"mean_loss": up(1e-12)}, r"mean_loss \d.\d+, run again \d.\d+"),
        ({"clock": 9}, "clock 9, run again 6"),
        ({"shard": 3}, "shard 3, run again 0"),
        ({"time_s": 0.0}, "done at 0.0 s, before the previous update at .* s"),
        ({"time_s": math.nan}, "done at nan s, before"),
    ],
)
def test_an_update(changes: dict[str, Any], why: str, run: Path) -> None:
    rewrite(run, "updates", edit(5, **changes))
    assert re.match(r"shard 0, updates, row 5 \(clock \d+\): " + why, replay.check(run)), replay.check(run)


@pytest.mark.parametrize("norm", ["gradient_sq", "sum_sq"])
def test_a_norm(norm: str, run: Path) -> None:
    measured = np.flatnonzero(np.isfinite(rows_of(run, "updates")[norm]))
    row = int(measured[1])
    rewrite(run, "updates", edit(row, **{norm: lambda value: value * 1.01}))
    assert re.match(rf"shard 0, updates, row {row} \(clock {row + 1}\): {norm} .*, run again", replay.check(run))


@pytest.mark.parametrize("place", [0, 5, -1])
def test_an_update_is_missing(place: int, run: Path) -> None:
    updates = rows_of(run, "updates")
    row = range(len(updates))[place]
    rewrite(run, "updates", lambda rows: np.delete(rows, row))
    found = replay.check(run)
    assert f"updates, row {row}" in found or "pushes, row " in found, found


def test_an_update_too_many(run: Path) -> None:
    updates = rows_of(run, "updates")
    again = updates[-1:].copy()
    again["clock"] += 1
    again["time_s"] += 9
    rewrite(run, "updates", lambda rows: np.concatenate([rows, again]))
    assert replay.check(run).startswith("shard 0, updates, row ")
    (run / "DONE").unlink()
    assert f"{len(updates) + 1} rows, run again {len(updates)}" in replay.check(run)


# ---------------------------------------------------------------------------------------------------------- everything else


@pytest.mark.parametrize("name", ["received", "samples", "final_clock", "pushed"])
def test_the_last_words_of_a_shard(name: str, run: Path) -> None:
    summary(run, **{name: 1})
    assert re.match(rf"shard 0, summary: {name} \d+, run again \d+", replay.check(run))


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
    assert re.match(here(run, 0) + "loss .* run again", replay.check(run))
    (run / "config.toml").write_text(unsealed(text).replace("n = 2\n", "n = 3\n"))
    assert "gradients_per_update = 3, expected 2" in replay.check(run)


def test_another_count_of_a_teams_gradients(runs: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where the updates were made to fit, and where nothing came of the gradient."""
    path = shutil.copytree(runs("teams-S2"), tmp_path / "run")
    rows = rows_of(path)
    applied, dropped = (int(np.flatnonzero(rows["verdict"] == verdict)[0]) for verdict in (Verdict.APPLY, Verdict.DROP))
    for row in (dropped, applied):
        rewrite(path, "pushes", lambda _: rows.copy())
        rewrite(path, "pushes", edit(row, gradients=up(1)))
        if row == applied:
            rewrite(path, "updates", edit(int(rows["clock"][row]), gradients=up(1)))
        assert re.match(here(path, row) + "gradients (4|3), run again (3|2)", replay.check(path)), replay.check(path)


@pytest.mark.parametrize(
    ("teams", "why"),
    [
        ([[2, 3, 5], [4, 6], [7, 8]], r"config.toml: \[environment\] teams"),
        ([[2, 4, 3], [5, 6], [7, 8]], r"config.toml: \[environment\] teams"),
        ([[2, 3], [4, 5, 6], [7, 8]], r"config.toml: \[environment\] teams"),
    ],
)
def test_other_teams(teams: list[list[int]], why: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(runs("teams-S2"), tmp_path / "run")
    say(path, teams)
    assert re.match(why, replay.check(path)), replay.check(path)


@pytest.mark.parametrize("teams", [[], [[2, 3, 4], [5, 6]], [[2, 3, 4], [5, 6], []], [[2, 3, 4], [5, 6], [6, 7]]])
def test_teams_that_cannot_be(teams: list[list[int]], runs: Callable[[str], Path], tmp_path: Path) -> None:
    path = shutil.copytree(runs("teams-S2"), tmp_path / "run")
    say(path, teams)
    with pytest.raises(DataError, match=r"\[environment\] teams = .*, expected the ranks of 3 learners, each once"):
        replay.check(path)


def say(path: Path, teams: list[list[int]]) -> None:
    """Let config.toml say that these were the teams."""
    contents = tomllib.loads((path / "config.toml").read_text())
    assert contents["environment"]["teams"] == [[2, 3, 4], [5, 6], [7, 8]]
    contents["environment"]["teams"] = teams
    (path / "config.toml").write_text(tomli_w.dumps(contents))


@pytest.mark.parametrize(
    ("name", "kind", "changes", "why"),
    [
        ("leaving", Event.DEPARTED, None, ""),
        ("leaving", Event.DEPARTED, {"time_s": 0.0, "clock": 0}, ""),
        ("leaving", Event.DEPARTED, {"learner_id": 3}, ""),
        ("leaving", Event.DEPARTED, {"clock": 500}, ""),
        ("leaving", Event.DEPARTED, {"time_s": up(-0.1)}, r"at .* s, expected .* to .* s: the event before, and the next update"),
        ("timeout-S2", Event.TIMEOUT, None, ""),
        ("timeout-S2", Event.TIMEOUT, {"clock": up(1)}, ""),
        ("timeout-S2", Event.TIMEOUT, {"time_s": up(-0.05)}, r"a time-out at .* s, expected .* s or later|at .* s, expected"),
        ("timeout-S2", Event.TIMEOUT, {"time_s": up(1.0)}, ""),
    ],
)
def test_who_left_when_and_when_the_time_was_over(
    name: str, kind: Event, changes: dict[str, Any] | None, why: str, runs: Callable[[str], Path], tmp_path: Path
) -> None:
    """An event is missing, or another."""
    path = shutil.copytree(runs(name), tmp_path / "run")
    events = np.flatnonzero(rows_of(path, "events")["kind"] == kind)
    row = int(events[min(1, len(events) - 1)])
    rewrite(path, "events", (lambda rows: np.delete(rows, row)) if changes is None else edit(row, **changes))
    found = replay.check(path)
    assert found
    assert re.search(why, found), found


def test_one_who_never_left(run: Path) -> None:
    """After the last row, where nothing else depends on it."""
    last = rows_of(run, "events")[-1:].copy()
    last["kind"], last["learner_id"], last["clock"] = Event.DEPARTED, 2, 500
    rewrite(run, "events", lambda rows: np.concatenate([rows, last]))
    found = replay.check(run)
    assert re.match(r"shard 0, events, row \d+ \(clock 500\): clock 500", found), found
