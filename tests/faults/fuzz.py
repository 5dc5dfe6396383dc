"""Malformed messages between all roles on real ranks: they are refused by name, or never looked at; nothing hangs or grows.

`python -m tests.faults.fuzz --seed 1 --out results/faults` writes fuzz.json there. The runs take turns:

    at shards   a learner, an evaluator, another shard, the leader or a member of a team fires MESSAGES at shards, while all do
                what they do; S = 1 to 3, fail-fast and (with Open MPI) fault-tolerant. Each is refused, the shards live, the run
                is DONE, its books balance, its model is trained; and it says that something was wrong, and who it was.
    answers     a shard's one answer to a learner or an evaluator is malformed: the job ends, and says whose answer it was.
    unasked     ranks whose messages nobody receives send some: the run ends as if nothing had come.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base.errors import EXIT_FAILED
from mpisgd.comm.messages import LAYOUTS, Tag
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.vectors.flat import slice_bounds
from tests import travel
from tests.faults.campaign import Found, configured, main
from tests.faults.gun import Gun, spoilt
from tests.faults.job import HERE, ULFM, Job

MESSAGES = 920
"""Of one run at shards; FEW of one where nobody looks."""
FEW = 60
LIMIT_S = 200.0
ENDS_S = 10.0
EPOCHS = 8.0
GIB = 2**30
SLOWER = 50.0
"""The other learner, so that it does not do all the work while this one fires."""
PARAMETERS = 650
#: Role -> (what it calls again and again, in how many of these calls all messages are fired).
CALLS = {
    "learner": ("mpisgd.exchange.learner_channel", "LearnerChannel.push", 20),
    "leader": ("mpisgd.exchange.learner_channel", "LearnerChannel.push", 20),
    "member": ("mpisgd.gradient.gradient", "Gradient.compute", 20),
    "shard": ("mpisgd.shard", "Shard.serve_one", 60),
    "evaluator": ("mpisgd.exchange.evaluator_channel", "EvaluatorChannel.pull", 4),
}
ANSWERS = (
    "longer header",
    "shorter header",
    "magic",
    "shard",
    "nbytes",
    "clock",
    "ending",
    "notices",
    "longer body",
    "shorter body",
)


@dataclass(frozen=True)
class Case:
    """One run. Ranks: the shards, learners 0 and 1 (or two teams of two), the evaluator where one is needed."""

    kind: str
    sender: str
    target: str
    shards: int
    tolerant: bool
    answer: str = ""
    way: str = ""
    """In which vectors travel; "" = chosen."""

    @property
    def teams(self) -> bool:
        return bool({self.sender, self.target} & {"leader", "member"})

    @property
    def evaluator(self) -> bool:
        return "evaluator" in (self.sender, self.target)

    @property
    def ranks(self) -> int:
        return self.shards + (4 if self.teams else 2) + self.evaluator

    def rank_of(self, role: str) -> int:
        """That of the last of its role; of the first shard. The learner is learner 1, leader and member are its team's."""
        last = self.ranks - 1 - self.evaluator
        return {"shard": 0, "evaluator": self.ranks - 1, "leader": last - 1, "learner": last, "member": last}[role]

    def settings(self, out: Path) -> dict[str, Any]:
        return {
            "protocol": {"name": "softsync", "n": 2},
            "model": "softmax",
            "shards": self.shards,
            "evaluator": self.evaluator,
            "epochs": EPOCHS,
            "threads": 1,
            "nonfinite": "drop",
            "straggler": {"slowdown": {"0": SLOWER}},
            "out": str(out),
            "log": {"progress": "plain"},
            "faults": {"mode": "tolerant" if self.tolerant else "fail-fast"},
            **({"protocol": {"name": "backup", "b": 1}, "aggregation": "node", "team_size": 2} if self.teams else {}),
        }


def cases() -> list[Case]:
    found = []
    for tolerant, shards, sender in itertools.product((False, True), (1, 2, 3), CALLS):
        if not (sender == "shard" and shards == 1) and not (tolerant and sender in ("leader", "member")):
            found.append(Case("at shards", sender, "shard", shards, tolerant))
    found += [Case("at shards", "learner", "shard", shards, False, way="gathered") for shards in (1, 2, 3)]
    for number, (target, answer) in enumerate(itertools.product(("learner", "evaluator"), ANSWERS)):
        if not (target == "evaluator" and answer in ("ending", "notices")):  # it is told neither
            found.append(Case("answers", "shard", target, 1 + number % 3, number % 2 > 0, answer))
    for number, (sender, target) in enumerate(
        [("learner", "evaluator"), ("evaluator", "learner"), ("member", "leader"), ("leader", "member"), ("shard", "member")]
    ):
        found.append(Case("unasked", sender, target, 1 + number % 3, number < 2))
    return found


CASES = cases()


# ------------------------------------------------------------------------------------------------------- what is sent


# -------------------------------------------------------------------------------------------------- in the rank itself


def _send(comm: Any, shots: Iterable[tuple[int, int, bytes]]) -> None:
    """(rank, tag, bytes) each; until all have been taken."""
    for request in [comm.Isend(payload, rank, tag) for rank, tag, payload in shots]:
        while not request.Test():
            time.sleep(0.0002)


def fire(case: Case, seed: int, count: int, said: Path) -> None:
    """Let this rank send malformed messages when it does what its role does, so many in all; what it sent is written to a file."""
    import importlib

    from mpisgd.comm.mpi.library import MPI

    comm, generator = MPI.COMM_WORLD, random.Random(seed)
    module, path, calls = CALLS[case.sender]
    class_name, name = path.split(".")
    owner = getattr(importlib.import_module(module), class_name)
    honest, portion = getattr(owner, name), -(-count // calls)
    sizes = [4 * (end - start) for start, end in slice_bounds(PARAMETERS, case.shards)]
    guns = {shard: Gun(generator, size, case.sender, case.tolerant) for shard, size in enumerate(sizes)}
    if case.sender == "shard":
        del guns[0]  # itself
    fired: collections.Counter[str] = collections.Counter()
    pending: list[Any] = []

    def one(channel: Any) -> None:
        shard = generator.choice(list(guns))
        kind, shots = guns[shard].shoot()
        targets = {shard: shots}
        if kind == "NaN":  # whole, of a right size, and so in the books of all shards: the policy `nonfinite` drops it
            channel._pushes += 1
            targets = {each: gun.kinds[kind]() for each, gun in guns.items()}
        fired[kind] += 1
        _send(comm, ((rank, tag, payload) for rank in targets for tag, payload in targets[rank]))

    def unasked() -> None:
        kind, shots = guns[generator.choice(list(guns))].shoot() if guns else ("", [(77, b"")])
        fired[kind] += 1
        pending.extend(comm.Isend(payload, case.rank_of(case.target), tag) for tag, payload in shots if len(payload) < 4000)

    def doing(self: Any, *arguments: Any, **words: Any) -> Any:
        for _ in range(min(portion, count - fired.total())):
            if case.kind == "unasked":
                unasked()
            else:
                one(self)
        said.write_text(json.dumps(fired))
        return honest(self, *arguments, **words)

    setattr(owner, name, doing)


def answer_wrongly(case: Case, said: Path) -> None:
    """Let this shard's third answer to the target be malformed."""
    from mpisgd.comm.mpi import wire
    from mpisgd.comm.mpi.library import MPI
    from mpisgd.comm.mpi.transfers import Sending

    comm, asked = MPI.COMM_WORLD, Tag.ANSWER if case.target == "learner" else Tag.SNAPSHOT_ANSWER
    honest, counted = wire.Wire.start, itertools.count(1)

    def start(self: Any, dest: int, tag: int, fields: Any, *bodies: Any) -> Any:
        if tag != asked or dest != case.rank_of(case.target) or next(counted) != 3:
            return honest(self, dest, tag, fields, *bodies)
        said.touch()
        layout = LAYOUTS[tag]
        header, slices = spoilt(case.answer, layout, fields, [np.asarray(body).tobytes() for body in bodies])
        requests = [comm.Isend(header, dest, tag), *(comm.Isend(each, dest, layout.body) for each in slices)]
        return Sending(dest, tag, False, requests)

    wire.Wire.start = start  # type: ignore[method-assign]


def rank_main() -> int:
    """`python -m tests.faults.fuzz train CONFIG`, in each rank: mpisgd itself, but for what the sender does besides."""
    from mpisgd.__main__ import main as mpisgd

    case, said = Case(**json.loads(os.environ["FUZZ_CASE"])), Path(os.environ["FUZZ_SAID"])
    if int(os.environ["FUZZ_RANK"]) == int(
        next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)
    ):
        if case.kind == "answers":
            answer_wrongly(case, said)
        else:
            fire(case, int(os.environ["FUZZ_SEED"]), int(os.environ["FUZZ_COUNT"]), said)
    status = mpisgd()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if most > GIB:
        print(f"ALLOCATED {most / GIB:.1f} GiB", file=sys.stderr, flush=True)
    return status


# ------------------------------------------------------------------------------------------------------- the campaign


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    case = CASES[number % len(CASES)]
    return look(case, generator.randrange(2**31), FEW if case.kind == "unasked" else MESSAGES, directory)


def look(case: Case, seed: int, count: int, directory: Path) -> Found:
    """Run one case, and see what became of it."""
    form = "fault-tolerant" if case.tolerant else "fail-fast"
    found = Found([case.kind, f"from a {case.sender} to a {case.target}", form, f"S = {case.shards}"])
    out, said = directory / "run", directory / "said"
    told = {"FUZZ_CASE": json.dumps(vars(case)), "FUZZ_SAID": str(said), "FUZZ_SEED": str(seed), "FUZZ_COUNT": str(count)}
    told["FUZZ_RANK"] = str(case.rank_of(case.sender))
    told |= {"PYTHONPATH": HERE, travel.VARIABLE: case.way}
    options = ULFM if case.tolerant else []
    job = Job(case.ranks, [configured(directory, case.settings(out))], options, "tests.faults.fuzz", **told)
    if case.kind == "answers":
        _answered_wrongly(case, job, said, out, found)
        return found
    status = job.end(LIMIT_S)
    found.expect("Traceback" not in job.text and "ALLOCATED" not in job.text, f"a traceback, or GiB: {job.text[-2000:]}")
    if not found.expect(status is not None and (out / schema.DONE).is_file(), f"not DONE, status {status}: {job.text[-3000:]}"):
        return found
    fired = collections.Counter(json.loads(said.read_text()))
    found.totals["messages"] += fired.total()
    found.expect(fired.total() == count, f"{fired.total()} messages were fired")
    run = Run(out)
    found.expect(all(books.balanced for books in run.books()), "the books do not balance")
    if case.kind == "at shards":
        found.totals.update({f"fired: {kind}": times for kind, times in fired.items()})
        _refused(case, run, fired, status, job.text, found)
    else:
        found.expect(status == 0, f"exit status {status}: {job.text[-2000:]}")
        found.proved(out)
    return found


def _refused(case: Case, run: Run, fired: collections.Counter[str], status: int | None, text: str, found: Found) -> None:
    fuzzer, targets = case.rank_of(case.sender), case.shards - (case.sender == "shard")
    who = {"learner": "learner 1", "leader": "learner 1", "member": "member 1 of learner 1", "shard": "shard 0"}
    refused = run.events[run.events["kind"] == schema.Event.REFUSED]
    reasons = (schema.Reason.NONFINITE, schema.Reason.REPEATED)  # once its mini-batch has been applied, the same again is repeated
    dropped = int(np.count_nonzero((run.pushes["learner_id"] == 1) & np.isin(run.pushes["reason"], reasons)))
    nans = targets * fired["NaN"]
    malformed = fired.total() - fired["NaN"]
    loss, lines = run.evaluations["loss"], text.count("a message was refused")
    found.totals.update({"refused": len(refused), "dropped": dropped})
    found.expect(len(refused) >= malformed, f"{malformed} were malformed, {len(refused)} refused")
    found.expect((refused["value"] == fuzzer).all(), "others than the fuzzer's were refused")
    found.expect(dropped == nans, f"{nans} gradients of NaN, {dropped} dropped")
    found.expect(np.isfinite(loss).all() and loss[-1] < loss[0] / 2, f"it learned nothing: losses {loss.tolist()}")
    found.expect(status == EXIT_FAILED, f"exit status {status}")
    named = f"most of rank {fuzzer} ({who.get(case.sender, case.sender)})"
    found.expect(named in text, f"who it was is not said: {text[-1000:]}")
    found.expect(lines == 5 * targets, f"{lines} lines of refusals")


def _answered_wrongly(case: Case, job: Job, said: Path, out: Path, found: Found) -> None:
    found.kinds.append(f"answer: {case.answer}")
    deadline_s = time.monotonic() + LIMIT_S
    while not said.exists() and not job.over and time.monotonic() < deadline_s:
        time.sleep(0.01)
    fired_s = time.monotonic()
    status = job.end(ENDS_S + 20)
    found.totals["messages"] += 1
    found.seconds["a malformed answer: until all are gone"].append(time.monotonic() - fired_s)
    found.expect(said.exists(), f"it was not sent: {job.text[-2000:]}")
    found.expect(status not in (0, None), f"status {status}: {job.text[-2000:]}")
    found.expect(time.monotonic() - fired_s < ENDS_S, f"ended after {time.monotonic() - fired_s:.1f} s")
    found.expect(not (out / schema.DONE).exists(), "there is a DONE")
    found.expect("Traceback" not in job.text and "ALLOCATED" not in job.text, f"a traceback, or GiB: {job.text[-3000:]}")
    found.expect("PeerError: " in job.text and "rank 0" in job.text.partition("PeerError: ")[2], f"not named: {job.text[-2000:]}")


if __name__ == "__main__":
    if "FUZZ_CASE" in os.environ:
        sys.exit(rank_main())
    sys.exit(main("fuzz", "Malformed messages between all roles.", len(CASES), execute, sys.argv[1:]))
