"""Speed of a run, and the time of learners and shards.

A shard trains from the start barrier to its last update. A row of `pushes`, the same on every shard, covers a learner since its
previous push began: push_s, wait_s, pull_s, delay_s (injected), compute_s; the cycle after the last push is in no row. In a group,
each stage has its own seconds and waits for neighbours (neighbour_s); stage 0's are on shard 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about, books
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.config import footprint
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, LogRows, Outcome

#: Activities of learners, as columns of `pushes`, in the order of a cycle.
ACTIVITIES = ("compute_s", "delay_s", "push_s", "wait_s", "pull_s")
NEIGHBOURS = "neighbour_s"
"""A further activity, of ranks in groups, if logged."""


@dataclass(frozen=True)
class Rates:
    shard: int
    updates: int
    gradients: int
    samples: int
    seconds: float
    update_seconds: float

    def per_second(self, count: int) -> float | None:
        return count / self.seconds if self.seconds > 0 else None

    @property
    def samples_per_s(self) -> float | None:
        """The papers' images/s."""
        return self.per_second(self.samples)

    @property
    def seconds_per_update(self) -> float | None:
        return self.seconds / self.updates if self.updates else None


def rates(run: Run) -> list[Rates]:
    """Return each shard's rates; every shard counts all samples."""
    begins, result = run.begins, []
    for shard, counts in enumerate(run.counts):
        made = counts.updates
        result.append(
            Rates(
                shard=shard,
                updates=made.rows,
                gradients=int(counts.pushes.applied(run.final_clock(shard)).learners.sum()),
                samples=max(made.samples, begins.samples) - begins.samples,
                seconds=max(made.time_s, begins.time_s) - begins.time_s,
                update_seconds=made.update_s,
            )
        )
    return result


def exchanged_until(run: Run, second: float) -> float | None:
    """Return bytes pushed and pulled by then, with each attempt's first weights; None = not logged.

    Transfers within a node count; in allreduce, no learner sends its own slice to itself.
    """
    nbytes = run.environment.get("parameter_nbytes")
    if run.is_batch or not isinstance(nbytes, int):
        return None
    push, pull = (nbytes / 4 * each for each in footprint.of_exchange(run.config))
    pushes, pulls = ((run.pushes[name] <= second).sum() / run.shards for name in ("arrival_s", "answer_s"))
    others = 1 - 1 / run.lambda_ if run.config["protocol"].get("name") == "allreduce" else 1.0
    events = run.events[(run.events["shard"] == 0) & (run.events["time_s"] <= second)]
    begun = 1 + np.count_nonzero(events["kind"] == Event.RESUMED)
    return float(others * (pushes * push + pulls * pull + begun * nbytes * run.lambda_))


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of each learner to its last push's arrival: float64, (learners,). `other` is in no column, e.g. loading data."""

    mini_batches: np.ndarray
    activities: dict[str, np.ndarray]
    elapsed: np.ndarray

    @property
    def other(self) -> np.ndarray:
        return np.asarray(self.elapsed - sum(self.activities.values()))


def learner_time(run: Run) -> LearnerTime:
    rows, learners = run.pushes[run.pushes["shard"] == 0], books.learners_of(run)
    learner_id = rows["learner_id"]
    activities = (*ACTIVITIES, NEIGHBOURS) if tells_neighbours(run) else ACTIVITIES
    elapsed = np.full(learners, run.begins.time_s)
    np.maximum.at(elapsed, learner_id, rows["arrival_s"])
    return LearnerTime(
        mini_batches=np.bincount(learner_id, minlength=learners),
        activities={name: np.bincount(learner_id, weights=rows[name], minlength=learners) for name in activities},
        elapsed=elapsed - run.begins.time_s,
    )


def tells_neighbours(run: Run) -> bool:
    return NEIGHBOURS in (run.pushes.dtype.names or ())


def bubble_table(run: Run) -> Table:
    what = "piece" if about.partitioned(run) else "stage"
    columns = columns_of(f"{what} | shards | pushes | computing [s] | neighbours [s] | cycle [s] | bubble [%] :.1f")
    rows: list[tuple[Cell, ...]] = []
    for stage, shards in enumerate(run.environment["stages"]):
        own = run.pushes[run.pushes["shard"] == shards[0]]
        computing, neighbours = float(own["compute_s"].sum()), float(np.nansum(own[NEIGHBOURS]))
        cycle = neighbours + float(sum(own[name].sum() for name in ACTIVITIES))
        passing = computing + neighbours
        bubble = 100 * neighbours / passing if passing > 0 else None
        rows.append((stage, ", ".join(map(str, shards)), len(own), computing, neighbours, cycle, bubble))
    parts, size = run.config.get("micro_batches", 1), len(rows)
    ideal = 100 * (size - 1) / (parts + size - 1)
    alike = f"{ideal:.1f} % with {parts} micro-batches" if what == "stage" else "none"
    note = (
        f"Sums over the learners. Bubble: share of the seconds between weights and gradient that a {what} waited for"
        f" neighbours; with equal {what}s, and messages that take no time: {alike}."
    )
    return Table("stages", f"{what.capitalize()}s of the model [Dean12 3]", columns, tuple(rows), note)


def rate_table(run: Run) -> Table:
    columns = columns_of(
        "shard | updates | gradients | samples | training [s] | updates/s | gradients/s | images/s | in updates [s]"
        " | in updates [%] :.2f | per update [ms]"
    )
    rows: list[tuple[Cell, ...]] = []
    for rate in rates(run):
        share = 100 * rate.update_seconds / rate.seconds if rate.seconds > 0 else None
        each = 1e3 * rate.update_seconds / rate.updates if rate.updates else None
        speeds = (rate.per_second(rate.updates), rate.per_second(rate.gradients), rate.samples_per_s)
        counts = (rate.updates, rate.gradients, rate.samples, rate.seconds)
        rows.append((rate.shard, *counts, *speeds, rate.update_seconds, share, each))
    note = "Training: from the start barrier to the last update. Images: samples whose gradients were applied."
    return Table("throughput", "Throughput", columns, tuple(rows), note)


def time_table(run: Run) -> Table:
    spent = learner_time(run)
    parts = [*spent.activities.values(), spent.other, spent.elapsed]
    rows: list[tuple[Cell, ...]] = []
    pushing = spent.mini_batches > 0
    if pushing.any():
        rows.append(("mean", float(spent.mini_batches[pushing].mean()), *(float(part[pushing].mean()) for part in parts)))
    for learner_id, pushes in enumerate(spent.mini_batches.tolist()):
        rows.append((learner_id, pushes, *(float(part[learner_id]) for part in parts)))
    heads = "learner | pushes | compute [s] | injected delay [s] | push [s] | wait [s] | pull [s]"
    neighbours = " | neighbours [s]" if NEIGHBOURS in spent.activities else ""
    columns = columns_of(f"{heads}{neighbours} | other [s] | elapsed [s]")
    note = "Up to the arrival of each learner's last push on shard 0. Mean: over learners that pushed at all."
    return Table("learner_time", "Where the learners' time went", columns, tuple(rows), note)


def portion_table(run: Run) -> Table:
    """Tabulate portions, dealt = counted + duplicates + late + lost, and waits."""
    portions, iterations = run.of_coordinator("portions"), run.of_coordinator("iterations")
    evaluating_s, commanding_s = (float(iterations[name].sum()) for name in ("evaluating_s", "commanding_s"))
    rows = [_portions_of(str(each), portions[portions["learner_id"] == each], evaluating_s) for each in range(run.lambda_)]
    rows.append(_portions_of("all", portions, evaluating_s * run.lambda_))
    whole_s = evaluating_s + commanding_s
    for_learners = f"{100 * evaluating_s / whole_s:.1f} %" if whole_s else "–"
    headings = "learner | dealt | counted | duplicates | late | lost | computing [%] :.1f | pulling, asking [%] :.1f"
    headings += " | pushing, waiting [%] :.1f"
    note = (
        f"Shares: of the seconds of evaluations. The coordinator waited for learners {for_learners} of the time, and else commanded"
        " shards. Duplicate: another result had come before, or the evaluation was over; late: the evaluation was over before the"
        " learner had weights; lost: the learner left."
    )
    return Table("portions", "Portions of the batch [Dean12 4.2]", columns_of(headings), tuple(rows), note)


def _portions_of(name: str, rows: LogRows, seconds: float) -> tuple[Cell, ...]:
    counts = [int((rows["outcome"] == each).sum()) for each in Outcome]
    busy_s = float((rows["compute_s"] + rows["delay_s"]).sum())
    held_s = float(np.nansum(rows["done_s"] - rows["dealt_s"]))
    shares = [100 * each / seconds if seconds else None for each in (busy_s, held_s - busy_s, seconds - held_s)]
    return (name, len(rows), *counts, *shares)
