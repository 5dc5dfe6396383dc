"""What must be true after a storm: the laws of what is DONE, who is named, what can be gone on with.

What damage to files may come to is in `damage.py`. A clock that jumps changes nothing, and a disk that hangs for less than the
limit ends no job: neither is grave. Links that are freed early are no fault of their own.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpisgd import replay
from mpisgd.analysis.books import imbalances
from mpisgd.base.errors import CheckpointError, DataError, MpisgdError
from mpisgd.exchange.roles import Role
from mpisgd.job import interruption
from mpisgd.liveness.heartbeat import LEAST_S
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import PORTIONS, Event, Outcome, Reason, Verdict
from tests.virtual.storm.damage import Files
from tests.virtual.storm.draw import Draw, Fault
from tests.virtual.storm.job import End, Job

MOST_ATTEMPTS = 5
REFUSALS = (CheckpointError, DataError)


@dataclass
class Seen:
    """What a schedule has shown. `failures`: what was not as promised."""

    drawn: Draw
    ends: list[End] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)

    def expect(self, true: object, what: str) -> bool:
        if not true:
            self.failures.append(what)
        return bool(true)


def weather(drawn: Draw, path: Path, *, proven: bool = True) -> Seen:
    """One schedule: a job, its faults, and its attempts until it is DONE; the last ones are left in peace.

    What happens is a function of `drawn` alone. `proven`: replay computes again what was DONE.
    """
    dice = random.Random(drawn.seed)
    seen = Seen(drawn, kinds=[drawn.way, f"S = {drawn.shards}", "tolerant" if drawn.tolerant else "fail-fast"])
    seen.kinds += sorted({fault.what for faults in drawn.attempts for fault in faults})
    seen.kinds += sorted({f"{damage.of} {damage.what}" for damage in drawn.damages})
    seen.kinds += ["links freed"] * bool(drawn.freed)
    jobs, files = list[Job](), Files(path / "run-0")
    for attempt in range(MOST_ATTEMPTS):
        faults = drawn.attempts[attempt] if attempt < len(drawn.attempts) else ()
        job = _gone_on(seen, files, dice, faults) if files.run.exists() else None
        if job is None:  # the first of a run
            files = files.anew() if files.run.exists() else files
            job = Job(drawn, files.run, dice, faults)
        jobs.append(job)  # held on to: what a dead rank had not handed to the kernel must not be when its file is collected
        end = job.run()
        seen.ends.append(end)
        seen.totals["events"] += end.events
        seen.totals["attempts"] += 1
        if end.hangs:
            seen.failures.append(f"attempt {attempt} hangs: {end.hangs}\n{end.said}")
            return seen
        refused = _is_refused(end, files)
        if not refused:
            _look_at_the_end(seen, job, end, attempt, faults)
        if (end.done and not end.named) or seen.failures:
            break
        seen.totals["ended"] += 1
        if end.done:
            break  # a fault in the very last moment: all is there
        files = _between(seen, files, attempt, refused)
    if seen.expect(seen.ends[-1].done, f"not DONE after {len(seen.ends)} attempts: {seen.ends[-1].named}"):
        seen.totals["DONE"] += 1
        try:
            _look_at_what_is_done(seen, jobs, proven)
        except MpisgdError as error:
            if not _names_damaged(f"{type(error).__name__}: {error}", files):
                seen.failures.append(f"DONE, but {type(error).__name__}: {error}")
            seen.totals["DONE, and refused by who reads it"] += 1
    return seen


def _look_at_what_is_done(seen: Seen, jobs: list[Job], proven: bool) -> None:
    """Raises MpisgdError where it cannot be read."""
    job = jobs[-1]
    if not job.drawn.logged:
        _each_portion_once(seen, job, _remembered(jobs), _clock(job))
        return
    _look_at_the_run(seen, job)
    if proven:
        proof = replay.replay(job.path)
        seen.totals["replayed"] += 1
        seen.expect(proof.holds and any("identical" in line for line in proof.lines()), f"replay: {proof.lines()}")


def _between(seen: Seen, files: Files, attempt: int, refused: bool) -> Files:
    """What happens to the files when an attempt has ended: those of the run that goes on, or of one that begins anew."""
    anew = refused or interruption.newest(files.run) is None
    seen.totals["refused by an attempt"] += refused
    seen.totals["begun anew" if anew else "gone on with"] += 1
    if anew:
        return files.anew()
    files.damage([damage for damage in seen.drawn.damages if damage.after == attempt])
    seen.totals["damaged"] += len(files.spoilt)
    return files


def _gone_on(seen: Seen, files: Files, dice: random.Random, faults: tuple[Fault, ...]) -> Job | None:
    """The next attempt of a run, some of whose files may be damaged; None where it is refused."""
    try:
        job = Job(seen.drawn, files.run, dice, faults, resumed=True)
    except REFUSALS as error:
        seen.totals["refused"] += 1
        wrong = files.wrong(error)
        seen.expect(not wrong, f"a run whose files were damaged is {wrong}")
        return None
    found = job.setup.resumption
    assert found is not None
    seen.totals["passed over"] += sum(note.startswith(f"{path.name} is passed over") for path in files.said for note in found.notes)
    wrong = files.wrong(found) if files.spoilt else ""
    seen.expect(not wrong, f"a run whose files were damaged: {wrong}")
    return job


def _is_refused(end: End, files: Files) -> bool:
    """Whether an attempt ended for a file that was damaged, and is not DONE."""
    return not end.done and any(_names_damaged(why, files) for why in end.why.values())


def _names_damaged(text: str, files: Files) -> bool:
    return any(f"{refusal.__name__}: " in text for refusal in REFUSALS) and files.named(text)


def _is_grave(fault: Fault, job: Job) -> bool:
    """Whether a job may end, by name, for this."""
    vital_ranks, size = job.roles.vital_ranks, len(job.hosts)
    if fault.rank >= size or fault.other >= size:
        return False
    vital = fault.rank in vital_ranks
    match fault.what:
        case "kill":
            return vital or not job.drawn.tolerant
        case "stop":
            patience_s = LEAST_S if vital or not job.drawn.tolerant else np.inf
            return fault.lasts_s > 0.9 * patience_s
        case "cut":  # for the hub's patience, or, from a shard on, that of who waits for it
            return fault.lasts_s > 0.9 * LEAST_S
        case "slow" | "unsaved" | "hang" | "jump":
            return False
    return True


def _look_at_the_end(seen: Seen, job: Job, end: End, attempt: int, faults: tuple[Fault, ...]) -> None:
    """Whether it may have ended so, and says why."""
    drawn, roles = job.drawn, job.roles
    learners = roles.groups or roles.teams
    grave = [fault for fault in faults if _is_grave(fault, job)]
    seen.expect(not end.let_in, f"attempt {attempt}: another job was let into its directory")
    if end.done and end.named:
        seen.expect(grave, f"attempt {attempt} is DONE, and failed: {end.named}\n{end.said}")
    elif not end.done:
        seen.expect(end.named or end.interrupted, f"attempt {attempt} ended without a word\n{end.said}")
        nobody = drawn.tolerant and all(set(ranks) & set(end.killed) for ranks in learners)
        gone = {fault.rank for fault in faults if fault.what in ("kill", "stop", "cut")} | {
            fault.other for fault in faults if fault.what == "cut"
        }
        seen.expect(
            grave or nobody or (drawn.tolerant and all(set(ranks) & gone for ranks in learners)),
            f"attempt {attempt} ended for nothing: {end.named}\n{end.said}",
        )


def _look_at_the_run(seen: Seen, job: Job) -> None:
    """The laws of `DESIGN 4`."""
    run = Run(job.path)
    protocol = job.config.protocol.make(run.lambda_)
    clocks = run.summaries["final_clock"].tolist()
    of_mini_batch: dict[tuple[int, int, float], set[int]] = defaultdict(set)
    recut = bool(run.earlier)
    for books, summary in zip(run.books(), run.summaries, strict=True):
        shard = books.shard
        rows, updates = (table[table["shard"] == shard] for table in (run.pushes, run.updates))
        seen.expect(books.balanced, f"shard {shard}: the books do not balance: {books}")
        seen.expect(summary["received"] == summary["pushed"] == books.pushed, f"shard {shard}: {summary}, {books}")
        seen.expect((rows["staleness"] >= 0).all(), f"shard {shard}: a negative staleness")
        seen.expect((rows["staleness"] == rows["clock"] - rows["timestamp"]).all(), f"shard {shard}: staleness")
        begin = run.begins.clock
        seen.expect(updates["clock"].tolist() == list(range(begin + 1, clocks[shard] + 1)), f"shard {shard}: its clock jumps")
        applied = rows[rows["verdict"] == Verdict.APPLY]
        named = ("portion",) if job.config.sampling == "dealt" else ("learner_id", "seq")
        twice = Counter(applied[list(named)].tolist()).most_common(1)
        seen.expect(not twice or twice[0][1] == 1, f"shard {shard}: {twice} applied twice")
        for clock, gradients in updates[["clock", "gradients"]].tolist():
            summed = int(applied["gradients"][applied["clock"] == clock - 1].sum())
            seen.expect(summed == gradients, f"shard {shard}: {summed} gradients at clock {clock}, the divisor is {gradients}")
        for row in rows:
            of_mini_batch[int(row["learner_id"]), int(row["seq"]), float(row["compute_s"])].add(int(row["timestamp"]))
        budget = 0 if job.config.protocol.batch else job.config.epochs * job.meta.train_samples
        lost = (run.events["kind"] == Event.LOST).any()
        left = (run.events["kind"] == Event.DEPARTED).any()
        seen.expect(
            protocol.exact or lost or left or updates["samples"].max(initial=0) >= budget or _uneven(run),
            f"shard {shard}: it has ended after {updates['samples'].max(initial=0)} samples of {budget}",
        )
    if protocol.consistent and not recut:
        mixed = [key for key, timestamps in of_mini_batch.items() if len(timestamps) > 1]
        seen.expect(not mixed, f"computed on slices of different clocks: (learner, seq, seconds) {mixed[:3]}")
    seen.expect(not (unbalanced := imbalances(run)), f"books: {unbalanced}")
    kinds = Counter(run.events["kind"].tolist())
    for kind in (
        Event.LOST,
        Event.MISSED,
        Event.RETURNED,
        Event.STUCK,
        Event.PASSED,
        Event.UNSAVED,
        Event.REFUSED,
    ):
        seen.totals[kind.name.lower()] += kinds[kind]
    seen.totals["torn"] += int((run.pushes["reason"] == Reason.TORN).sum())
    seen.totals["gradients"] += int((run.pushes["shard"] == 0).sum())
    if job.config.protocol.batch:
        _each_portion_once(seen, job, run.of_coordinator("portions"), int(max(run.summaries["final_clock"])))
    _who_is_named(seen, job, run)


def _clock(job: Job) -> int:
    """How many evaluations there were."""
    return job.built[job.roles.coordinator_rank].newest_clock() or 0


def _remembered(jobs: list[Job]) -> np.ndarray:
    """Rows of `portions` of attempts that go on from each other, where there is no log: what a later one does again is left out."""
    rows = np.empty(0, PORTIONS)
    for job in jobs:
        begun = 0 if job.setup.resumption is None else job.setup.resumption.checkpoint.clock
        rows = np.concatenate([rows[rows["clock"] < begun], np.array(job.portions, PORTIONS)])
    return rows


def _each_portion_once(seen: Seen, job: Job, dealt: np.ndarray, evaluations: int) -> None:
    """In each evaluation of a batch optimisation."""
    portions = getattr(job.tensors.sampling, "portions")  # noqa: B009 - of `PortionSampling`
    counted = dealt[dealt["outcome"] == Outcome.COUNTED]
    for clock in range(evaluations):
        found = sorted(counted["portion"][counted["clock"] == clock].tolist())
        seen.expect(found == list(range(portions)), f"at clock {clock}, portions {found} of {portions} are counted")
    for outcome in Outcome:
        seen.totals[f"portions {outcome.name.lower()}"] += int((dealt["outcome"] == outcome).sum())
    seen.totals["evaluations"] += evaluations


def _uneven(run: Run) -> bool:
    """The first shard that is done ends the run for all."""
    samples = [run.updates["samples"][run.updates["shard"] == shard].max(initial=0) for shard in range(run.shards)]
    return bool(max(samples) >= run.config["epochs"] * run.environment["train_samples"])


def _who_is_named(seen: Seen, job: Job, run: Run) -> None:
    """Of each learner that was killed, or given up, every shard says so, or that it had said goodbye before."""
    events = run.events
    for rank in seen.ends[-1].killed:
        if job.roles.of(rank) is not Role.LEARNER:
            continue
        learner_id = job.roles.index(rank)
        mine = events[events["learner_id"] == learner_id]
        for shard in range(run.shards):
            told = set(mine["kind"][mine["shard"] == shard].tolist())
            seen.expect(told & {Event.LOST, Event.GOODBYE}, f"shard {shard} does not say that learner {learner_id} is lost")
