"""Speed of a run, and where its learners' and shards' time went.

Training time of a shard is from the start barrier to its last update. A row of `pushes` describes what a learner did since
its previous push began: push (push_s), wait (wait_s), pull (pull_s), be delayed on purpose (delay_s), compute (compute_s).
Every shard logs the same row, so that shard 0's are enough; the cycle after a learner's last push is in no row. In a group of
ranks each stage of the model has seconds of its own, and waits for its neighbours (neighbour_s): those of stage 0 are on shard 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about, books
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.config import footprint
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, LogRows, Outcome

#: What learners spend time on, as columns of `pushes`, in the order of one cycle.
ACTIVITIES = ("compute_s", "delay_s", "push_s", "wait_s", "pull_s")
NEIGHBOURS = "neighbour_s"
"""Another one, of the ranks of a group, where the log tells it."""


@dataclass(frozen=True)
class Rates:
    """Work of one shard in `seconds` of training; `update_seconds` of them in the optimiser."""

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
        """Applied samples per second: the papers' images/s."""
        return self.per_second(self.samples)

    @property
    def seconds_per_update(self) -> float | None:
        return self.seconds / self.updates if self.updates else None


def rates(run: Run) -> list[Rates]:
    """Rates of each shard. Each has all samples, of which it applies its own slice of the gradient."""
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
    """Bytes that learners have pushed and pulled by then, with the first weights of each attempt; None: the log does not tell.

    Also those of shards on the learner's own node; but in an allreduce no learner sends its own slice to itself.
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
    """Seconds of each learner, by activity, up to its last push: arrays of float64, shape (learners,).

    `elapsed` is when its last push arrived; `other` is what no column accounts for, such as loading data.
    """

    mini_batches: np.ndarray
    activities: dict[str, np.ndarray]
    elapsed: np.ndarray

    @property
    def other(self) -> np.ndarray:
        return np.asarray(self.elapsed - sum(self.activities.values()))


def learner_time(run: Run) -> LearnerTime:
    """Sums over the rows of shard 0."""
    rows, learners = run.pushes[run.pushes["shard"] == 0], books.learners_of(run)
    learner_id = rows["learner_id"]
    elapsed = np.full(learners, run.begins.time_s)
    np.maximum.at(elapsed, learner_id, rows["arrival_s"])
    return LearnerTime(
        mini_batches=np.bincount(learner_id, minlength=learners),
        activities={name: np.bincount(learner_id, weights=rows[name], minlength=learners) for name in _activities(rows)},
        elapsed=elapsed - run.begins.time_s,
    )


def _activities(rows: LogRows) -> tuple[str, ...]:
    return (*ACTIVITIES, NEIGHBOURS) if NEIGHBOURS in (rows.dtype.names or ()) else ACTIVITIES


def tells_neighbours(run: Run) -> bool:
    """Whether learners were groups, and the log tells their waiting apart from computing."""
    return NEIGHBOURS in (run.pushes.dtype.names or ())


def bubble_table(run: Run) -> Table:
    """Where the ranks of groups were while they passed mini-batches: computing, or waiting for their neighbours."""
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
        f"Sums over the learners. Bubble: of the seconds between weights and gradient, those in which a {what} waited for its"
        f" neighbours; {what}s that take the same, and messages that take nothing, have {alike}."
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
    """What became of the portions that were dealt, and who waited: dealt = counted + duplicates + late + lost."""
    portions, iterations = run.of_coordinator("portions"), run.of_coordinator("iterations")
    evaluating_s, commanding_s = (float(iterations[name].sum()) for name in ("evaluating_s", "commanding_s"))
    rows = [_portions_of(str(each), portions[portions["learner_id"] == each], evaluating_s) for each in range(run.lambda_)]
    rows.append(_portions_of("all", portions, evaluating_s * run.lambda_))
    whole_s = evaluating_s + commanding_s
    for_learners = f"{100 * evaluating_s / whole_s:.1f} %" if whole_s else "–"
    headings = "learner | dealt | counted | duplicates | late | lost | computing [%] :.1f | pulling, asking [%] :.1f"
    headings += " | pushing, waiting [%] :.1f"
    note = (
        f"Shares: of the seconds of evaluations. The coordinator waited {for_learners} of its time for learners, and else commanded"
        " shards. Duplicate: another result had come before, or the evaluation was over; late: it was over before the learner had"
        " weights; lost: the learner left."
    )
    return Table("portions", "Portions of the batch [Dean12 4.2]", columns_of(headings), tuple(rows), note)


def _portions_of(name: str, rows: LogRows, seconds: float) -> tuple[Cell, ...]:
    counts = [int((rows["outcome"] == each).sum()) for each in Outcome]
    busy_s = float((rows["compute_s"] + rows["delay_s"]).sum())
    held_s = float(np.nansum(rows["done_s"] - rows["dealt_s"]))
    shares = [100 * each / seconds if seconds else None for each in (busy_s, held_s - busy_s, seconds - held_s)]
    return (name, len(rows), *counts, *shares)
