"""What several shards say must agree; and no cell and no row of any table slips through."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mpisgd import replay
from mpisgd.records.log.schema import Verdict
from mpisgd.replay.checks.finding import Untrue
from mpisgd.replay.checks.learners import compare_shards
from mpisgd.replay.checks.order import serial_order
from mpisgd.replay.checks.record import Record, read
from mpisgd.replay.prove import check_log
from tests.effort import spread, thinned
from tests.unit.tampered.conftest import RUNS, Rows
from tests.unit.tampered.hands import edit, goodbye, here, means, rewrite, rows_of, stale, summary, up

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


def test_one_clock_over_all_shards(runs: Callable[[str], Path]) -> None:
    record = read(runs("backup-S2"))
    rows = record.shards[1].pushes.copy()
    rows["timestamp"][20] -= 1
    with pytest.raises(Untrue, match=r"shard 1, pushes, row 20 .*: timestamps \d+, \d+ on the shards: expected the same on all"):
        compare_shards(changed(record, 1, "pushes", rows))


def test_weights_that_were_not_asked_for(runs: Callable[[str], Path]) -> None:
    """After a mini-batch at clock t a synchronous learner asks for clock t + 1."""
    record = read(runs("backup-S2"))
    rows = record.shards[0].rows_of[2]
    for shard in (0, 1):
        pushes = record.shards[shard].pushes.copy()
        first, second = record.shards[shard].rows_of[2][2:4]
        pushes["timestamp"][second] = pushes["timestamp"][first]
        record = changed(record, shard, "pushes", pushes)
    with pytest.raises(
        Untrue, match=rf"shard 0, pushes, row {rows[3]} .*: timestamp \d+: the mini-batch before asked for clock \d+ or later"
    ):
        compare_shards(record)


def test_a_mini_batch_is_computed_again_only_where_it_was_rejected(runs: Callable[[str], Path]) -> None:
    record = read(runs("softsync-S2"))
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
            with pytest.raises(Untrue, match="the same mini-batch again, rejected by no shard"):
                compare_shards(tampered)


def test_weights_cannot_come_from_the_gradients_that_they_gave(runs: Callable[[str], Path]) -> None:
    """On each shard alone it could be; between the shards it is a circle."""
    record = read(runs("softsync-S2"))
    for shard in (0, 1):
        pushes = record.shards[shard].pushes.copy()
        early = np.flatnonzero(pushes["clock"] == 0)[shard]
        other = record.shards[1 - shard]
        at = other.rows_of[pushes["learner_id"][early]][0]
        theirs = other.pushes.copy()
        theirs["timestamp"][at] = 1
        record = changed(record, 1 - shard, "pushes", theirs)
    with pytest.raises(Untrue, match=r"pushes, row \d .*: the gradient was computed from weights made, by way of other shards"):
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


@pytest.mark.deeper
@pytest.mark.parametrize("name", spread(RUNS, 4))
def test_every_cell(name: str, runs: Callable[[str], Path]) -> None:
    """Each cell of the last shard's log is changed a little, up and down in turn; all is seen without computing."""
    record = read(runs(name))
    shard = len(record.shards) - 1
    slipped = []
    for number, (table, column, row) in enumerate(thinned(cells(record, shard), 33)):
        by = 1 - 2 * (number % 2)
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


@pytest.mark.deeper
@pytest.mark.parametrize(("name", "table"), spread(itertools.product(RUNS, PROVEN), 7, unpack=True))
def test_every_row(name: str, table: str, runs: Callable[[str], Path]) -> None:
    """Each row of the last shard's log is left out, doubled, or trades places with the next."""
    record = read(runs(name))
    shard = len(record.shards) - 1
    rows = getattr(record.shards[shard], table)
    order = list(range(len(rows)))
    for row in thinned(order, 6):
        ways = [order[:row] + order[row + 1 :], order[: row + 1] + order[row:]]
        if row + 1 < len(rows):
            ways.append([*order[:row], row + 1, row, *order[row + 2 :]])
        for way in ways:
            with pytest.raises(Untrue):
                check_log(changed(record, shard, table, rows[way]))
