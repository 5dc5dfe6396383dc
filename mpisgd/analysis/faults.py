"""Learners that died or hung: when shards noticed, waits, mini-batches under way (`serving/fault_tolerant.py`)."""

from __future__ import annotations

import numpy as np

from mpisgd.analysis.tables import Table, columns_of
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason

_KINDS = (Event.LOST, Event.MISSED, Event.RETURNED)


def happened(run: Run) -> bool:
    return bool(np.isin(run.events["kind"], _KINDS).any())


def table(run: Run) -> Table:
    events, pushes = run.events, run.pushes
    concerned = np.unique(events["learner_id"][np.isin(events["kind"], _KINDS)]).tolist()
    rows = []
    for learner_id in concerned:
        reached = _reached(run, learner_id)
        for shard in range(run.shards):
            mine = events[(events["learner_id"] == learner_id) & (events["shard"] == shard)]
            missed, lost = mine[mine["kind"] == Event.MISSED], mine[mine["kind"] == Event.LOST]
            theirs = pushes[(pushes["learner_id"] == learner_id) & (pushes["shard"] == shard)]
            rows.append(
                (
                    learner_id,
                    shard,
                    len(missed),
                    float(missed["value"].max()) if len(missed) else None,
                    int(np.count_nonzero(mine["kind"] == Event.RETURNED)),
                    int(lost["clock"][0]) if len(lost) else None,
                    float(lost["time_s"][0]) if len(lost) else None,
                    int(np.count_nonzero(theirs["reason"] == Reason.TORN)),
                    int(theirs["seq"].max(initial=-1)) + 1,
                    reached,
                )
            )
    columns = columns_of(
        "learner | shard | missed [times] | longest silence [s] :.2f | back [times] | lost at clock | lost at [s] :.2f"
        " | torn [gradients] | mini-batches here | on all shards"
    )
    note = (
        "Missed: the learner was silent for longer than faults.patience_s, and the others went on. Torn: only a part arrived;"
        " dropped. Where a shard has one mini-batch more than all shards have, the learner died between two shards."
    )
    return Table("faults", "Learners that died or hung", columns, tuple(rows), note)


def _reached(run: Run, learner_id: int) -> int:
    mine = run.pushes[run.pushes["learner_id"] == learner_id]
    return min((int(mine["seq"][mine["shard"] == shard].max(initial=-1)) + 1 for shard in range(run.shards)), default=0)
