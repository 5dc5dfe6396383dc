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
from mpisgd.records.log.schema import Event
from mpisgd.replay.checks.record import Record, read
from tests.effort import spread, thinned
from tests.unit.replay.tampered.conftest import RUNS, Rows
from tests.unit.replay.tampered.hands import edit, finding_of, goodbye, here, means, rewrite, rows_of, stale, summary, up

# ------------------------------------------------------------------------------------------------------------ two shards


def test_shards_that_say_different_things_of_a_gradient(sharded: Path) -> None:
    row = stale(rows_of(sharded, shard=1))
    rewrite(sharded, "pushes", edit(row, loss=up(1e-9)), shard=1)
    means(sharded, shard=1)
    assert re.match(here(sharded, row, shard=1) + "loss .*, run again ", replay.check(sharded))


def test_a_row_that_one_shard_alone_has(sharded: Path) -> None:
    """A late one: nothing else depends on it."""
    learner_id = int(rows_of(sharded, shard=1)["learner_id"][-1])
    rewrite(sharded, "pushes", lambda rows: rows[:-1], shard=1)
    summary(sharded, shard=1, received=-1, pushed=-1)
    goodbye(sharded, learner_id, -1, shard=1)
    assert "run again" in replay.check(sharded)


def changed(record: Record, shard: int, table: str, rows: Rows) -> Record:
    shards = list(record.shards)
    shards[shard] = dataclasses.replace(shards[shard], **{table: rows})
    return dataclasses.replace(record, shards=shards)


def test_weights_that_were_not_asked_for(runs: Callable[[str], Path]) -> None:
    """After a mini-batch at clock t a synchronous learner asks for clock t + 1."""
    record = read(runs("backup-S2"))
    for shard in (0, 1):
        pushes = record.shards[shard].pushes.copy()
        first, second = record.shards[shard].rows_of[2][2:4]
        pushes["timestamp"][second] = pushes["timestamp"][first]
        record = changed(record, shard, "pushes", pushes)
    assert finding_of(record) is not None


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
    assert finding_of(record) is not None


# ------------------------------------------------------------------------------------------------------- nothing slips through

#: Columns of which not a bit can be another (seconds can, as long as their order is the same).
PROVEN = {
    "pushes": ("shard", "clock", "timestamp", "staleness", "learner_id", "seq", "samples", "gradients", "verdict",
               "reason", "weight", "learning_rate", "loss"),
    "updates": ("shard", "clock", "gradients", "samples", "learning_rate", "mean_loss"),
    "events": ("shard", "clock", "kind", "learner_id", "value"),
}  # fmt: skip


def cells(record: Record, shard: int) -> Iterator[tuple[str, str, int]]:
    log = record.shards[shard]
    for table, names in PROVEN.items():
        rows = getattr(log, table)
        there = rows["kind"] != Event.GAVE_UP if table == "events" else np.full(len(rows), True)  # nobody else tells of these
        for name in names:
            for row in np.flatnonzero(there & ~np.isnan(rows[name].astype(float))):
                yield table, name, int(row)


@pytest.mark.deeper
@pytest.mark.parametrize("name", spread(RUNS, 4))
def test_every_cell(name: str, runs: Callable[[str], Path]) -> None:
    """Each cell of the last shard's log that has a number is changed a little, up and down in turn."""
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
        if finding_of(changed(record, shard, table, rows)) is None:
            slipped.append((table, column, row))
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
        if table == "events" and rows["kind"][row] == Event.GAVE_UP:
            continue
        ways = [order[:row] + order[row + 1 :], order[: row + 1] + order[row:]]
        if row + 1 < len(rows) and table != "events":  # of one clock, in any order
            ways.append([*order[:row], row + 1, row, *order[row + 2 :]])
        for way in ways:
            assert finding_of(changed(record, shard, table, rows[way])) is not None
