"""Every number of the analyses, beside one that was found by hand or by another way."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mpisgd.analysis import about, arrivals, books, staleness, throughput, training
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason, Verdict
from tests.unit import fabricate
from tests.unit.fabricate import evaluation

SOFTSYNC = {"name": "softsync", "n": 1, "modulation": "inverse"}
BACKUP = {"name": "backup", "N": 2}


@pytest.fixture
def softsync(tmp_path: Path) -> Run:
    return Run(fabricate.write_run(tmp_path / "run", fabricate.softsync(), SOFTSYNC, learners=2))


@pytest.fixture
def backup(tmp_path: Path) -> Run:
    return Run(fabricate.write_run(tmp_path / "backup", fabricate.backup(), BACKUP, learners=3))


# ---------------------------------------------------------------------------------------------------------- staleness


def test_staleness_overall(softsync: Run) -> None:
    # applied: 0 0 1 0 1 0 3 0
    found = staleness.overall(softsync)
    assert (found.gradients, found.dropped, found.minimum, found.maximum) == (8, 0, 0, 3)
    assert found.mean == 5 / 8
    assert found.median == 0
    assert found.deviation == pytest.approx(math.sqrt(11 / 8 - (5 / 8) ** 2))
    assert found.unevenness == pytest.approx(math.sqrt(8 * (7 + 1 / 9)) / (7 + 1 / 3))
    assert found.beyond == 1 / 8  # of 8 gradients, one is above 2n = 2


def test_staleness_by_learner(softsync: Run) -> None:
    first, second = staleness.by_learner(softsync)
    assert (first.gradients, first.mean, first.median, first.maximum, first.beyond) == (6, 2 / 6, 0, 1, 0)
    assert (second.gradients, second.mean, second.median, second.maximum, second.beyond) == (2, 1.5, 1.5, 3, 0.5)
    assert second.deviation == 1.5


def test_equally_stale_gradients_are_even() -> None:
    assert staleness.of_histogram(np.array([0, 0, 0, 0, 7]), 0).unevenness == pytest.approx(1)
    assert staleness.of_histogram(np.array([3, 2]), 0).unevenness == pytest.approx(1), "1/tau weighs 0 and 1 alike"


def test_staleness_histogram_and_table(softsync: Run) -> None:
    assert staleness.histogram(softsync).tolist() == [5, 2, 0, 1]
    table = staleness.histogram_table(softsync)
    assert table.rows == ((0, 5, 62.5, 62.5), (1, 2, 25.0, 87.5), (2, 0, 0.0, 87.5), (3, 1, 12.5, 100.0))


def test_staleness_over_clock(softsync: Run) -> None:
    found = staleness.over_clock(softsync)
    assert found.clock.tolist() == [1, 2, 3, 4]
    assert found.mean.tolist() == [0, 0.5, 0.5, 1.5]
    assert found.minimum.tolist() == [0, 0, 0, 0]
    assert found.maximum.tolist() == [0, 1, 1, 3]


def test_staleness_tables_have_2n_only_for_softsync(softsync: Run, tmp_path: Path) -> None:
    table = staleness.shard_table(softsync)
    assert table.cells("shard") == [0, "all"]
    assert table.cells("P(τ > 2n)") == [12.5, 12.5]
    other = Run(fabricate.write_run(tmp_path / "other", fabricate.backup(), BACKUP, learners=3))
    assert "P(τ > 2n)" not in [column.name for column in staleness.shard_table(other).columns]
    assert staleness.learner_table(other).cells("dropped") == [0, 0, 1]
    assert staleness.learner_table(other).rows[2] == (2, 0, 1, None, None, None, None, None, None)


def test_staleness_against_numpy_on_a_large_log(tmp_path: Path) -> None:
    log = fabricate.simulated("softsync", learners=7, updates=120, wanted=2, shards=2)
    protocol = {"name": "softsync", "n": 3, "modulation": "none"}
    run = Run(fabricate.write_run(tmp_path / "run", log, protocol, learners=7, shards=2))
    used = log.pushes[(log.pushes["verdict"] == Verdict.APPLY) & (log.pushes["clock"] < 120)]
    assert len(used) == 2 * 2 * 120
    for learner_id, found in enumerate(staleness.by_learner(run)):
        tau = used["staleness"][used["learner_id"] == learner_id]
        assert (found.gradients, found.mean, found.median) == (len(tau), tau.mean(), np.median(tau))
        assert found.beyond == np.count_nonzero(tau > 6) / len(tau)
    for shard, found in enumerate(staleness.by_shard(run)):
        tau = used["staleness"][used["shard"] == shard]
        weights = 1 / np.maximum(1, tau)
        assert found.deviation == pytest.approx(np.std(tau))
        assert found.unevenness == pytest.approx(np.sqrt(np.mean(weights**2)) / np.mean(weights))
    assert staleness.histogram(run).tolist() == [
        np.count_nonzero(used["staleness"] == tau) for tau in range(used["staleness"].max() + 1)
    ]
    over = staleness.over_clock(run)
    assert over.mean.tolist() == [used["staleness"][used["clock"] == clock].mean() for clock in range(120)]


# -------------------------------------------------------------------------------------------------------------- books


def test_books_of_learners_and_coverage(softsync: Run, tmp_path: Path) -> None:
    assert [(book.pushed, book.applied, book.in_flight) for book in books.learner_books(softsync)] == [(7, 6, 1), (3, 2, 1)]
    assert [(covered.computed, covered.applied) for covered in books.coverage(softsync)] == [(7, 6), (3, 2)]
    assert books.imbalances(softsync) == []
    table = books.learner_table(softsync)
    assert table.rows == ((0, 7, 6, 0, 0, 1, True, 7, 0, 7, 6, 100 * (6 / 7)), (1, 3, 2, 0, 0, 1, True, 3, 0, 3, 2, 100 * (2 / 3)))
    assert books.shard_table(softsync).rows == ((0, 10, 8, 0, 0, 2, True),)


def test_books_of_backup(backup: Run) -> None:
    assert books.shard_table(backup).rows == ((0, 6, 4, 1, 0, 1, True),)
    assert [covered.share for covered in books.coverage(backup)] == [1, 1, 0]
    assert books.never_counted(backup) == [2]
    assert books.learner_table(backup).note.endswith("All learners: 66.7 %. The data of learner 2 never counted.")
    assert books.imbalances(backup) == []


def test_coverage_counts_what_every_shard_applied(tmp_path: Path) -> None:
    log = fabricate.softsync(shards=2)
    one = (log.pushes["shard"] == 1) & (log.pushes["learner_id"] == 1) & (log.pushes["seq"] == 1)
    log.pushes["verdict"][one] = Verdict.DROP
    log.updates["gradients"][(log.updates["shard"] == 1) & (log.updates["clock"] == 4)] = 1
    run = Run(fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, shards=2))
    assert [(covered.computed, covered.applied) for covered in books.coverage(run)] == [(7, 6), (3, 1)]
    assert books.learner_table(run).rows[1] == (1, 6, 3, 1, 0, 2, True, 3, 0, 3, 1, 100 * (1 / 3))
    assert books.imbalances(run) == []
    assert [found.gradients for found in staleness.by_shard(run)] == [8, 7]


def test_a_rejected_gradient_is_pushed_again_under_its_seq(tmp_path: Path) -> None:
    log = fabricate.backup()
    again = log.pushes[:1].copy()
    again["verdict"], again["arrival_s"] = Verdict.REJECT, 0.5
    log.pushes = np.concatenate([again, log.pushes])
    run = Run(fabricate.write_run(tmp_path / "run", log, BACKUP, learners=3))
    assert books.learner_table(run).rows[0] == (0, 3, 2, 0, 1, 0, True, 2, 0, 3, 2, 100)
    assert books.imbalances(run) == []


def test_a_mini_batch_that_one_shard_rejected_is_pushed_to_both_again_and_counted_once(tmp_path: Path) -> None:
    """Shard 1 rejected learner 0's first gradient; shard 0, which had applied it, does not apply it twice."""
    log = fabricate.softsync(shards=2)
    first = np.flatnonzero((log.pushes["learner_id"] == 0) & (log.pushes["seq"] == 0))
    for at in first[::-1]:
        again = log.pushes[at : at + 1].copy()
        if again["shard"][0] == 0:
            again["verdict"], again["reason"] = Verdict.DROP, Reason.REPEATED
            log.pushes = np.insert(log.pushes, at + 1, again)
        else:
            again["verdict"], again["reason"] = Verdict.REJECT, Reason.STALE
            log.pushes = np.insert(log.pushes, at, again)
    run = Run(fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, shards=2, pushed={0: 11, 1: 11}))
    assert books.imbalances(run) == []
    assert [(each.pushed, each.dropped, each.rejected) for each in books.learner_books(run)][:2] == [(8, 1, 0), (8, 0, 1)]
    assert [(each.sampled, each.computed, each.applied) for each in books.coverage(run)] == [(7, 8, 6), (3, 3, 2)]


def test_imbalance_names_shard_and_learner_with_the_numbers(tmp_path: Path) -> None:
    log = fabricate.softsync(shards=2)
    lost = (log.pushes["shard"] == 1) & (log.pushes["learner_id"] == 1) & (log.pushes["seq"] == 1)
    log.pushes = log.pushes[~lost]
    run = Run(fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, shards=2, pushed={1: 10}))
    lines = books.imbalances(run)
    assert lines[0] == "shard 1: pushed 10, but applied 7 + dropped 0 + rejected 0 + in flight 2 = 9"
    assert lines[1] == "learner 1 on shard 1: pushed 3, but applied 1 + dropped 0 + rejected 0 + in flight 1 = 2"
    assert lines[2] == "shard 1: 7 gradients applied, but the updates sum 8"
    assert len(lines) == 3


def continued(path: Path) -> Run:
    """The run of a log that its events divide into two attempts; here it lies in one file."""
    run = Run(path)
    assert run.counts and run.books() and run.begins and all(map(len, (run.pushes, run.updates, run.events)))
    run.attempt = 1
    return run


def test_a_gradient_that_came_again_in_a_later_attempt_may_lack_where_the_first_was_lost(tmp_path: Path) -> None:
    """Shard 0 applied it before the checkpoint from which the run goes on at 4.5 s; shard 1 had it, too, until the kill."""
    log = fabricate.softsync(shards=2)
    again = log.pushes[(log.pushes["shard"] == 0) & (log.pushes["learner_id"] == 0) & (log.pushes["seq"] == 2)].copy()
    again["verdict"], again["reason"], again["arrival_s"] = Verdict.DROP, Reason.REPEATED, 4.75
    log.pushes = np.concatenate([log.pushes, again])
    only = (log.pushes["shard"] == 1) & (log.pushes["learner_id"] == 0) & (log.pushes["seq"] == 2)
    log.pushes["arrival_s"][only] = 4.875
    log.events = fabricate.rows("events", [fabricate.row("events", shard=at, kind=Event.RESUMED, time_s=4.5) for at in range(2)])
    run = continued(fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, shards=2))
    assert books.imbalances(run) == []
    assert [(each.pushed, each.applied, each.dropped) for each in books.learner_books(run)][:2] == [(8, 6, 1), (7, 6, 0)]
    log.pushes["arrival_s"][only] = 4.0  # shard 1 had it before: then it lacks the second
    other = continued(fabricate.write_run(tmp_path / "other", log, SOFTSYNC, learners=2, shards=2))
    assert books.imbalances(other) == [
        "learner 0 on shard 1: pushed 8, but applied 6 + dropped 0 + rejected 0 + in flight 1 = 7",
    ]


def test_what_a_shard_lost_of_a_mini_batch_that_is_not_computed_again_may_lack(tmp_path: Path) -> None:
    """Shard 0 rejected learner 0's third gradient, and had it again before the checkpoint; it came to shard 1 again after that."""
    log = fabricate.softsync(shards=2)
    at = np.flatnonzero((log.pushes["shard"] == 0) & (log.pushes["learner_id"] == 0) & (log.pushes["seq"] == 2))[0]
    rejected = log.pushes[at : at + 1].copy()
    rejected["verdict"], rejected["reason"] = Verdict.REJECT, Reason.STALE
    log.pushes = np.insert(log.pushes, at, rejected)
    of_learner = log.pushes[(log.pushes["shard"] == 1) & (log.pushes["learner_id"] == 0)]
    third_s, fourth_s = (of_learner["arrival_s"][of_learner["seq"] == seq][0] for seq in (2, 3))

    def continued_at(time_s: float, name: str) -> Run:
        log.events = fabricate.rows(
            "events", [fabricate.row("events", shard=shard, kind=Event.RESUMED, time_s=time_s) for shard in range(2)]
        )
        return continued(fabricate.write_run(tmp_path / name, log, SOFTSYNC, learners=2, shards=2))

    run = continued_at((third_s + fourth_s) / 2, "run")
    assert books.imbalances(run) == []
    assert [(each.pushed, each.applied, each.rejected) for each in books.learner_books(run)][:2] == [(8, 6, 1), (7, 6, 0)]
    assert next((each.sampled, each.computed, each.applied) for each in books.coverage(run)) == (7, 8, 6)
    assert books.imbalances(continued_at(fourth_s + 0.01, "later")) == [  # then shard 1 has what was pushed next, but not this
        "learner 0 on shard 1: pushed 8, but applied 6 + dropped 0 + rejected 0 + in flight 1 = 7",
    ]


def test_the_last_gradient_of_a_learner_that_was_lost_may_lack(tmp_path: Path) -> None:
    log = fabricate.softsync(shards=2)
    torn = (log.pushes["shard"] == 1) & (log.pushes["learner_id"] == 1) & (log.pushes["seq"] == 2)
    log.pushes = log.pushes[~torn]
    told = {"kind": Event.LOST, "learner_id": 1, "value": 3, "time_s": 11.0}
    assert len(books.imbalances(Run(fabricate.write_run(tmp_path / "untold", log, SOFTSYNC, learners=2, shards=2)))) == 1
    log.events = fabricate.row("events", shard=0, **told)
    assert books.imbalances(Run(fabricate.write_run(tmp_path / "told", log, SOFTSYNC, learners=2, shards=2))) == []


def test_imbalance_of_clocks(tmp_path: Path) -> None:
    log = fabricate.backup()
    path = fabricate.write_run(tmp_path / "run", log, BACKUP, learners=3)
    (path / "DONE").write_text('{"clock": [3]}')
    assert books.imbalances(Run(path)) == ["DONE says clocks [3], but the log ends at [2]"]
    log.updates = log.updates[1:]
    second = Run(fabricate.write_run(tmp_path / "second", log, BACKUP, learners=3))
    assert books.imbalances(second) == [
        "shard 0: 4 gradients applied, but the updates sum 2",
        "shard 0: final clock 2, but 1 updates in the log",
    ]


# --------------------------------------------------------------------------------------------------------- throughput


def test_rates(softsync: Run) -> None:
    (rate,) = throughput.rates(softsync)
    assert (rate.updates, rate.gradients, rate.samples, rate.seconds, rate.update_seconds) == (4, 8, 32, 8.05, 1.0)
    assert rate.samples_per_s == 32 / 8.05
    assert rate.seconds_per_update == 8.05 / 4
    speeds = (4 / 8.05, 8 / 8.05, 32 / 8.05)
    assert throughput.rate_table(softsync).rows == ((0, 4, 8, 32, 8.05, *speeds, 1.0, 100 / 8.05, 250.0),)


@pytest.mark.parametrize("shards", [1, 2])
def test_learner_time_is_summed_over_the_rows_of_one_shard(tmp_path: Path, shards: int) -> None:
    log = fabricate.softsync(shards)
    run = Run(fabricate.write_run(tmp_path / "run", log, SOFTSYNC, learners=2, shards=shards))
    table = throughput.time_table(run)
    assert table.cells("learner") == ["mean", 0, 1]
    assert table.cells("pushes") == [5, 7, 3]
    assert table.cells("compute") == pytest.approx([4.0, 3.5, 4.5])
    assert table.cells("injected delay") == pytest.approx([0.625, 0.875, 0.375])
    assert table.cells("push") == pytest.approx([0.04, 0.06, 0.02])
    assert table.cells("wait") == pytest.approx([0.1, 0.14, 0.06])
    assert table.cells("pull") == pytest.approx([0.15, 0.21, 0.09])
    assert table.cells("elapsed") == [9.5, 9.0, 10.0]
    assert table.cells("other") == pytest.approx([4.585, 9 - 4.785, 10 - 5.045])


# ----------------------------------------------------------------------------------------------------------- arrivals


def test_arrivals_of_a_synchronous_run(backup: Run) -> None:
    # clock 0 starts at 0: 1, 2, 3 (dropped); clock 1 starts at 2.5: 1, 1.5, 3 (late)
    assert arrivals.times(backup).tolist() == [1, 1, 1.5, 2, 3, 3]
    assert arrivals.times_to(backup, 2).tolist() == [1.5, 2]
    assert arrivals.collect_table(backup).rows == (
        (1, 2, 1.0, 1.0, 1.0),
        (2, 2, 1.75, 1.75, 2.0),
        (3, 2, 3.0, 3.0, 3.0),
    )
    table = arrivals.arrival_table(backup)
    assert (table.cells("gradients"), table.cells("mean"), table.cells("median"), table.cells("longest")) == (
        [6],
        [11.5 / 6],
        [1.75],
        [3.0],
    )


def test_fewer_gradients_of_a_clock_are_not_counted_for_larger_k(tmp_path: Path) -> None:
    log = fabricate.backup()
    log.pushes = log.pushes[:-1]
    run = Run(fabricate.write_run(tmp_path / "run", log, BACKUP, learners=3))
    assert arrivals.collect_table(run).rows[2] == (3, 1, 3.0, 3.0, 3.0)


def test_arrivals_of_an_asynchronous_run_are_turnarounds(softsync: Run) -> None:
    # learner 0 is answered at 1.1 3.1 4.1 5.1 6.1 8.1 and pushes at 3 4 5 6 8 9; learner 1 at 2.1 7.1, pushes at 7 10
    assert arrivals.times(softsync) == pytest.approx([0.9, 0.9, 0.9, 0.9, 1.9, 1.9, 2.9, 4.9])
    assert arrivals.collect_table(softsync).rows == ()
    assert "softsync" in arrivals.collect_table(softsync).note


# ----------------------------------------------------------------------------------------------------------- training


def test_training_curves(tmp_path: Path) -> None:
    log = fabricate.backup()
    found = [(2, 2.0, 0.5), (0, 0.0, 0.9), (1, 1.0, 0.25)]  # written as the evaluator finished them
    log.evaluations = fabricate.rows(
        "evaluations",
        [evaluation(*row) for row in found] + [evaluation(2, 2.0, 0.2, averaged=True), evaluation(2, 2.0, 0.1, train=True)],
    )
    run = Run(fabricate.write_run(tmp_path / "run", log, BACKUP, learners=3, evaluator=True))
    curves = training.curves(run)
    assert [curve.name for curve in curves] == ["theta test", "thetabar test", "theta training"]
    assert curves[0].error.tolist() == [0.9, 0.25, 0.5]
    assert curves[0].seconds.tolist() == [0, 10, 20]
    assert curves[0].final == 0.5
    assert curves[0].best == 1
    assert training.final_text(run) == "50.00 % (theta), 20.00 % (thetabar) at epoch 2.00"
    assert training.summary_table(run).rows[0] == ("theta test", 3, 50.0, 1.0, 2.0, 20.0, 25.0, 1.0)
    assert training.evaluation_table(run).cells("snapshot") == [0, 1, 2, 2, 2]
    assert training.evaluation_table(run).cells("error") == [90.0, 25.0, 50.0, 20.0, 10.0]


def test_where_no_error_is_there_the_loss_is_shown(tmp_path: Path) -> None:
    log = fabricate.backup()
    log.evaluations = fabricate.rows("evaluations", [evaluation(0, 0.0, float("nan"))])
    log.evaluations["loss"] = 1.0
    run = Run(fabricate.write_run(tmp_path / "run", log, BACKUP, learners=3))
    assert not training.curves(run)[0].has_error
    assert training.curves(run)[0].best == 0
    assert training.final_text(run) == "loss 1 (theta) at epoch 0.00"
    assert training.summary_table(run).rows[0][4:] == (0.0, 1.0, 0.0)


# -------------------------------------------------------------------------------------------------------------- about


def test_label_and_epochs(softsync: Run, backup: Run, tmp_path: Path) -> None:
    assert about.label(softsync) == "run\nsoftsync n=1 modulation=inverse · λ=2 · shards=1 · μ=4"
    assert about.protocol_label(backup) == "backup N=2 b=1"
    assert about.epochs_reached(softsync) == 32 / 1000
    environment = {"gradients_per_update": 3}
    path = fabricate.write_run(tmp_path / "b", fabricate.backup(), {"name": "backup"}, 3, environment=environment)
    assert about.protocol_label(Run(path)) == "backup N=3 b=0"
    assert about.hosts(backup) == "n1 (1 rank), n2 (3 ranks)"


@pytest.mark.parametrize("how", ["DONE", "summary"])
def test_diverged(tmp_path: Path, how: str) -> None:
    path = fabricate.write_run(tmp_path / "run", fabricate.backup(), BACKUP, 3, done=how == "DONE", diverged=True)
    state = about.status(Run(path))
    assert state.diverged
    assert "DIVERGED" in state.text


def test_first_weights_are_pulled_once_more_where_a_run_goes_on(tmp_path: Path) -> None:
    """Three learners, vectors of 800 bytes."""
    log = fabricate.backup()
    log.events = fabricate.rows("events", [fabricate.row("events", kind=Event.RESUMED, learner_id=-1, time_s=2.0)])
    run = Run(fabricate.write_run(tmp_path / "run", log, BACKUP, learners=3, environment={"parameter_nbytes": 800}))
    rows = run.pushes[["arrival_s", "answer_s"]]
    for second, begun in ((1.9, 1), (2.0, 2)):
        moved = sum(int((rows[name] <= second).sum()) for name in ("arrival_s", "answer_s"))
        assert throughput.exchanged_until(run, second) == 800 * (moved + 3 * begun)
