"""Updates to a target, measured or from the noise scale, and the time that they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.analysis.training import Target, make_target, on_test_data
from mpisgd.base.errors import ConfigError
from mpisgd.plan.backup import choices, table
from mpisgd.plan.collect import Collecting
from mpisgd.plan.target import Convergence, convergence
from mpisgd.records.log.reader import Run
from tests.unit import fabricate

ERROR = Target("error", 0.2)


def evaluated(
    folder: Path,
    name: str,
    wanted: int,
    errors: list[float],
    protocol: str = "backup",
    averaged: Sequence[float] = (),
    **fields: Any,
) -> Run:
    """A log with an evaluation every 100 updates, from 0 on."""
    log = fabricate.backup()
    log.evaluations = fabricate.rows(
        "evaluations",
        [
            fabricate.row(
                "evaluations", snapshot=at, clock_min=100 * at, clock_max=100 * at, error=error, loss=10 * error, averaged=kind
            )
            for kind, values in enumerate((errors, averaged))
            for at, error in enumerate(values)
        ],
    )
    environment = {"gradients_per_update": wanted}
    return Run(fabricate.write_run(folder / name, log, {"name": protocol}, learners=8, environment=environment, **fields))


def reached(run: Run, target: Target) -> tuple[float | None, float | None]:
    """Updates until the target, and the least value."""
    curve = on_test_data(run)
    assert curve is not None
    found = curve.reached(target)
    return None if found is None else found.updates, curve.least(target.what)


def test_updates_are_interpolated_between_evaluations(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "run", 8, [0.9, 0.5, 0.3, 0.1, 0.2])
    assert reached(run, ERROR) == (pytest.approx(250), 0.1)
    assert reached(run, Target("error", 0.5)) == (pytest.approx(100), 0.1)
    assert reached(run, Target("error", 0.05)) == (None, 0.1)
    assert reached(run, Target("loss", 4.0)) == (pytest.approx(150), 1.0)
    assert reached(run, Target("error", 0.95))[0] == 0


def test_errors_that_are_not_numbers_are_passed_over(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "run", 8, [0.9, math.nan, 0.5, math.nan])
    assert reached(run, Target("error", 0.7)) == (pytest.approx(100), 0.5)
    assert reached(evaluated(tmp_path, "lost", 8, [math.nan]), ERROR) == (None, None)


def test_thetabar_tells_where_a_run_has_it(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "a", 8, [0.9, 0.5, 0.1], averaged=[0.9, 0.1, 0.1])
    assert convergence([run], ERROR, None).updates(8) == pytest.approx(100 * 0.7 / 0.8)


def test_several_runs_give_a_line_between_their_numbers(tmp_path: Path) -> None:
    """Two runs of N = 8, at 100 and 200 updates to the target, one of N = 4, at 300."""
    runs = [
        evaluated(tmp_path, "a", 8, [0.9, 0.2]),
        evaluated(tmp_path, "b", 8, [0.9, 0.5, 0.2]),
        evaluated(tmp_path, "c", 4, [0.9, 0.5, 0.3, 0.2]),
        evaluated(tmp_path, "stale", 2, [0.9, 0.2], protocol="softsync"),
        evaluated(tmp_path, "late", 6, [0.9, 0.8]),
    ]
    found = convergence(runs, ERROR, None)
    assert found.absolute
    assert found.measured == {4: pytest.approx(300), 8: pytest.approx(150)}
    assert found.updates(6) == pytest.approx(225)
    assert found.updates(3) is None
    assert "measured at N = 4, 8, linear between" in found.source


def test_one_run_is_scaled_by_the_noise_scale(tmp_path: Path) -> None:
    """1 + 64/(N mu) with mu = 4: 3 at N = 8, 5 at N = 4."""
    found = convergence([evaluated(tmp_path, "a", 8, [0.9, 0.2])], ERROR, 64.0)
    assert found.absolute
    assert found.updates(8) == pytest.approx(100)
    assert found.updates(4) == pytest.approx(100 * 5 / 3)
    assert "measured at N = 8; elsewhere by the noise scale given" in found.source


def test_without_target_updates_are_relative(tmp_path: Path) -> None:
    runs = [evaluated(tmp_path, "a", 8, [0.9, 0.2])]
    found = convergence(runs, None, 64.0)
    assert not found.absolute
    assert (found.updates(8), found.updates(4)) == (1, pytest.approx(5 / 3))
    unknown = convergence(runs, None, None)
    assert unknown.updates(4) == pytest.approx(2), "as many samples whatever N is"
    assert "unknown" in unknown.source
    assert convergence(runs, None, math.inf).updates(2) == pytest.approx(4)
    assert convergence(runs, None, 0.0).updates(2) == pytest.approx(1)


def test_a_target_that_is_never_reached_is_refused(tmp_path: Path) -> None:
    runs = [evaluated(tmp_path, "a", 8, [0.9, 0.4]), evaluated(tmp_path, "b", 4, [0.9, 0.35])]
    with pytest.raises(
        ConfigError, match=r"--target-error 0\.2: test error 20 % is reached by no run.*a: 40\.00 % of theta, b: 35\.00 % of theta"
    ):
        convergence(runs, ERROR, None)
    with pytest.raises(ConfigError, match=r"--target-loss 2: .*a: 4 of theta, b: 3\.5 of theta"):
        convergence(runs, Target("loss", 2.0), None)
    with pytest.raises(ConfigError, match="never measured"):
        convergence([evaluated(tmp_path, "c", 8, [])], ERROR, None)
    with pytest.raises(ConfigError, match=r"met by the initial weights of a"):
        convergence(runs, Target("error", 0.95), None)


def test_targets_that_cannot_be() -> None:
    assert make_target(None, None) is None
    assert str(make_target(0.02, None)) == "test error 2 %"
    assert str(make_target(None, 0.5)) == "test loss 0.5"
    with pytest.raises(ConfigError, match=r"--target-error 2: expected a share between 0 and 1; 2 % is 0\.02"):
        make_target(2.0, None)
    with pytest.raises(ConfigError, match=r"--target-loss nan"):
        make_target(None, math.nan)
    with pytest.raises(ConfigError, match="expected only one target"):
        make_target(0.1, 0.1)


# --------------------------------------------------------------------------------------------------------- the best N and b

SECONDS = np.array([1.0, 1.5, 1.75, 3.5])
COLLECTING = Collecting(np.arange(1, 5), SECONDS, SECONDS, SECONDS, np.ones(4, bool))


def test_time_is_updates_times_seconds_per_update() -> None:
    """N = 4, 3, 2, 1 take 3.5, 1.75, 1.5, 1 s for one update, and 60, 80, 120, 240 updates."""
    found = choices(COLLECTING, Convergence({4: 60.0}, True, math.inf, 1, "for the test"))
    assert [one.time for one in found.choices] == pytest.approx([210, 140, 180, 240])
    assert (found.best.wanted, found.best.b) == (3, 1)
    shown = table(found)
    assert shown.cells("time to target") == pytest.approx([210, 140, 180, 240])
    assert shown.cells("choice") == [None, "best", None, None]
    assert "for the test" in shown.note


def test_relative_times_are_those_of_no_backup_learners() -> None:
    found = choices(COLLECTING, Convergence({4: 1.0}, False, math.inf, 1, "for the test"))
    assert [one.time for one in found.choices] == pytest.approx([1, 2 / 3, 6 / 7, 8 / 7])
    assert "time / that of b = 0" in [column.name for column in table(found).columns]


def test_beyond_what_was_measured_nothing_is_said() -> None:
    found = choices(COLLECTING, Convergence({2: 100.0, 3: 50.0}, True, None, 1, "for the test"))
    assert [(one.wanted, one.time) for one in found.choices] == [(3, pytest.approx(87.5)), (2, pytest.approx(150))]
    assert found.of(0) is None
