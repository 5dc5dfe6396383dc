"""The account of every gradient: pushed = applied + dropped + rejected + in flight (law 4).

Each shard has books of its own slices; `pushed` comes from learners' goodbyes. A learner pushes mini-batches, numbered by `seq`
without gaps, to all shards: a gradient per mini-batch up to the largest `seq`, and more where a shard has more rows, as a rejected
mini-batch keeps its number.

A continued run computes again a mini-batch that its checkpoint has on some shards only. The log lacks other shards' pushes until
the kill, and a second push to a shard that had applied what another had rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisgd.analysis.tables import Table, columns_of
from mpisgd.records.log.reader import Books, Run
from mpisgd.records.log.schema import Event, Reason, Verdict

_FAULTS = (Event.LOST, Event.MISSED, Event.RETURNED)


@dataclass(frozen=True)
class LearnerBooks(Books):
    learner_id: int


@dataclass(frozen=True)
class Coverage:
    """Mini-batches sampled, given up to begin anew, computed, and applied by every shard."""

    learner_id: int
    sampled: int
    given_up: int
    computed: int
    applied: int

    @property
    def share(self) -> float | None:
        return self.applied / self.sampled if self.sampled else None


def final_clocks(run: Run) -> np.ndarray:
    return np.array([run.final_clock(shard) for shard in range(run.shards)], np.int64)


def applied_rows(run: Run) -> np.ndarray:
    """Mark rows of `run.pushes` in a finished update; APPLY without an update is in flight."""
    rows = run.pushes
    return np.asarray((rows["verdict"] == Verdict.APPLY) & (rows["clock"] < final_clocks(run)[rows["shard"]]))


def learners_of(run: Run) -> int:
    """Return λ, or more for a larger learner_id in the log."""
    return max(run.lambda_, *(len(counts.pushes.next_seq) for counts in run.counts))


def learner_books(run: Run) -> list[LearnerBooks]:
    learners, became = learners_of(run), counted_learners(run)[:, :, 1:]
    pushed = _pushed(run, learners)
    return [
        LearnerBooks(shard, *map(int, (pushed[shard, learner_id], *became[shard, learner_id], learner_id)))
        for learner_id in range(learners)
        for shard in range(run.shards)
    ]


def counted_learners(run: Run) -> np.ndarray:
    """Return `counts.Pushes.books`: int64 (shards, learners, 5)."""
    found = np.zeros((run.shards, learners_of(run), 5), np.int64)
    for shard, counts in enumerate(run.counts):
        books = counts.pushes.books(run.final_clock(shard))
        found[shard, : len(books)] = books
    return found


def _given_up(run: Run, learners: int) -> np.ndarray:
    told = run.events[(run.events["kind"] == Event.GAVE_UP) & (run.events["shard"] == 0)]
    return np.bincount(told["learner_id"], minlength=learners)


def coverage(run: Run) -> list[Coverage]:
    """Return each learner's coverage. Data that are always dropped bias training."""
    learners = learners_of(run)
    told = (_sampled(run, learners), _given_up(run, learners), _computed(run, learners))
    each = zip(*(counts.tolist() for counts in told), _applied_everywhere(run, learners), strict=True)
    return [Coverage(learner_id, *columns) for learner_id, columns in enumerate(each)]


def _applied_everywhere(run: Run, learners: int) -> list[int]:
    taken = run.pushes[applied_rows(run)]
    most = int(taken["seq"].max(initial=0)) + 1
    batches = taken["learner_id"].astype(np.int64) * most + taken["seq"]
    on_shard = np.unique(batches * run.shards + taken["shard"]) // run.shards
    batch, shards = np.unique(on_shard, return_counts=True)
    everywhere: list[int] = np.bincount(batch[shards == run.shards] // most, minlength=learners).tolist()
    return everywhere


def never_counted(run: Run) -> list[int]:
    """Return learners whose computed data had no part in the weights."""
    return [covered.learner_id for covered in coverage(run) if covered.computed and not covered.applied]


def imbalances(run: Run) -> list[str]:
    """List imbalances. Meaningful for ended runs only."""
    lines = [f"shard {book.shard}: {_equation(book)}" for book in run.books() if not book.balanced]
    lines += [
        f"learner {book.learner_id} on shard {book.shard}: {_equation(book)}" for book in learner_books(run) if not book.balanced
    ]
    applied, divisors, updates = _sums(run)
    for shard in np.flatnonzero(applied != divisors).tolist():
        lines.append(f"shard {shard}: {applied[shard]} gradients applied, but the updates sum {divisors[shard]}")
    for shard, clock in enumerate(final_clocks(run).tolist()):
        if updates[shard] != clock:
            lines.append(f"shard {shard}: final clock {clock}, but {updates[shard]} updates in the log")
    said = None if run.done is None else run.done.get("clock")
    if said is not None and list(said) != final_clocks(run).tolist():
        lines.append(f"DONE says clocks {list(said)}, but the log ends at {final_clocks(run).tolist()}")
    return lines


def _sums(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return gradients applied, gradients summed by updates, and updates, by shard."""
    each = [(counts.pushes.applied(run.final_clock(shard)), counts.updates) for shard, counts in enumerate(run.counts)]
    found = np.array([(tally.gradients, made.gradients, run.begins.clock + made.rows) for tally, made in each])
    return found[:, 0], found[:, 1], found[:, 2]


def shard_table(run: Run) -> Table:
    rows = [
        (book.shard, book.pushed, book.applied, book.dropped, book.rejected, book.in_flight, book.balanced) for book in run.books()
    ]
    return Table("books_shards", "Books of the shards", columns_of(f"shard | {_ACCOUNT}"), tuple(rows), _EQUATION)


def learner_table(run: Run) -> Table:
    rows = []
    shards, books, followed = run.shards, learner_books(run), coverage(run)
    for covered in followed:
        mine = books[covered.learner_id * shards : (covered.learner_id + 1) * shards]
        sums = [sum(getattr(book, name) for book in mine) for name in ("pushed", "applied", "dropped", "rejected", "in_flight")]
        account = (*sums, all(book.balanced for book in mine))
        share = None if covered.share is None else 100 * covered.share
        counts = (covered.sampled, covered.given_up, covered.computed, covered.applied)
        rows.append((covered.learner_id, *account, *counts, share))
    columns = columns_of(f"learner | {_ACCOUNT} | mini-batches | given up | computed | applied everywhere | coverage [%] :.1f")
    note = "Computed: gradients of the learner's mini-batches, repeats too. Coverage: share of mini-batches applied on every shard."
    total = [sum(getattr(covered, name) for covered in followed) for name in ("applied", "sampled")]
    if total[1] and total[0] < total[1]:
        note = f"{note} All learners: {100 * total[0] / total[1]:.1f} %."
    if never := never_counted(run):
        note = f"{note} The data of learner {', '.join(map(str, never))} never counted."
    if shards > 1:
        note = f"Pushed to in flight: slices, summed over {shards} shards. {note}"
    return Table("books_learners", "Books of the learners", columns, tuple(rows), note)


_ACCOUNT = "pushed | applied | dropped | rejected | in flight | balanced"
_EQUATION = "Balanced: pushed = applied + dropped + rejected + in flight."


def has_faults(run: Run) -> bool:
    return bool(np.isin(run.events["kind"], _FAULTS).any())


def fault_table(run: Run) -> Table:
    events, pushes = run.events, run.pushes
    concerned = np.unique(events["learner_id"][np.isin(events["kind"], _FAULTS)]).tolist()
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


def _sampled(run: Run, learners: int) -> np.ndarray:
    first = np.zeros(learners, np.int64)
    first[: len(run.begins.next_seq)] = run.begins.next_seq
    last = first - 1
    for counts in run.counts:
        seen = len(counts.pushes.next_seq)
        last[:seen] = np.maximum(last[:seen], counts.pushes.next_seq - 1)
    return np.asarray(last + 1 - first)


def _computed(run: Run, learners: int) -> np.ndarray:
    whose, pushed = _of_mini_batches(run)
    return np.asarray(_sampled(run, learners) + _sums_of(pushed.max(axis=1, initial=1) - 1, whose, learners))


def _pushed(run: Run, learners: int) -> np.ndarray:
    """Return pushed gradients that the log should have, (shards, learners).

    Each time a learner was lost or missed, some shards may lack a gradient.
    """
    pushed = np.repeat(_computed(run, learners)[np.newaxis], run.shards, axis=0)
    if run.attempt:
        whose, each = _of_mini_batches(run)
        lost = each.max(axis=1, keepdims=True, initial=0) - each
        pushed -= np.array([_sums_of(of_shard, whose, learners) for of_shard in lost.T])
    return np.asarray(np.clip(counted_learners(run)[:, :, 0], pushed - _times_lost(run, learners), pushed))


def _times_lost(run: Run, learners: int) -> np.ndarray:
    """Return losses and misses of each learner, by the shard with most."""
    told = run.events[np.isin(run.events["kind"], (Event.LOST, Event.MISSED, Event.STUCK)) & (run.events["learner_id"] >= 0)]
    times = np.zeros((run.shards, learners), np.int64)
    np.add.at(times, (told["shard"], told["learner_id"]), 1)
    return np.asarray(times.max(axis=0))


def _of_mini_batches(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return each mini-batch's learner, (batches,), and gradients pushed, (batches, shards), but for losses of earlier attempts.

    The last attempt should have equally many on all shards. But a continued attempt ends at a checkpoint, which may be a push later
    on some shards: a learner's last pushes may be missing.
    """
    rows, shards = run.pushes, run.shards
    most = int(rows["seq"].max(initial=0)) + 1
    batches, place = np.unique(rows["learner_id"].astype(np.int64) * most + rows["seq"], return_inverse=True)
    whose, attempt = batches // most, _attempts(run)
    last = np.zeros(len(batches), np.int64)
    np.maximum.at(last, place, attempt)
    before, newest = np.zeros((2, len(batches), shards), np.int64)
    np.add.at(before, (place, rows["shard"]), attempt < last[place])
    np.add.at(newest, (place, rows["shard"]), attempt == last[place])
    pushed = np.repeat(newest.max(axis=1, keepdims=True, initial=0), shards, axis=1)
    continued = np.count_nonzero((run.events["kind"] == Event.RESUMED) & (run.events["shard"] == 0))
    for cut_off in range(continued):
        its_rows, its_batches = rows[attempt == cut_off], np.flatnonzero(last == cut_off)
        newest_seq = np.full((learners_of(run), shards), -1, np.int64)
        np.maximum.at(newest_seq, (its_rows["learner_id"], its_rows["shard"]), its_rows["seq"])
        may_lack = (batches % most)[its_batches, np.newaxis] >= newest_seq[whose[its_batches]]
        pushed[its_batches] = np.where(may_lack, newest[its_batches], pushed[its_batches])
    return whose, before + pushed


def _attempts(run: Run) -> np.ndarray:
    """Return each push's attempt: its shard's continuations before."""
    resumed, rows = run.events[run.events["kind"] == Event.RESUMED], run.pushes
    found = np.zeros(len(rows), np.int64)
    for shard in range(run.shards):
        mine = rows["shard"] == shard
        found[mine] = np.searchsorted(np.sort(resumed["time_s"][resumed["shard"] == shard]), rows["arrival_s"][mine], side="right")
    return found


def _sums_of(counts: np.ndarray, whose: np.ndarray, learners: int) -> np.ndarray:
    return np.bincount(whose, weights=counts, minlength=learners).astype(np.int64)


def _equation(book: Books) -> str:
    total = book.applied + book.dropped + book.rejected + book.in_flight
    return (
        f"pushed {book.pushed}, but applied {book.applied} + dropped {book.dropped} + rejected {book.rejected}"
        f" + in flight {book.in_flight} = {total}"
    )
