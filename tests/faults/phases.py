"""Signals at each phase of a run, ranks that are stopped there for good, and deaths while a checkpoint is written.

`python -m tests.faults.phases --seed 1 --out results/faults` writes phases.json there. The cells of the table take turns: each act
at each phase (points of `dying.py`), and a shard's death at each step of a checkpoint; what is trained, with how many shards, and
who is hit, is drawn.

No job hangs; its status is 0 where there is a DONE, and only there, but for a signal to the launcher, and for who is stopped when
all is said. It says why, but where the launcher was sent the signal: that passes nothing on any more. What was interrupted with a
checkpoint goes on to a DONE that replay proves, and a synchronous job to the bits of the same job left alone.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mpisgd.job.interruption import newest
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.faults.campaign import Found, configured, left_alone, main
from tests.faults.dying import ANY, SAID, SAVING
from tests.faults.job import HERE, ULFM, Job

WAYS: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "backup": {"protocol": {"name": "backup", "b": 0}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "async": {"protocol": {"name": "async"}},
    "allreduce": {"protocol": {"name": "allreduce"}},
}
SYNCHRONOUS = ("hardsync", "backup", "allreduce")
"""Whose bits are the same each time."""
PHASES = ("look-around", "data", "first gradient", "training", "written aside", "evaluation", "finish")
ACTS = ("INT launcher", "TERM launcher", "INT ranks", "TERM ranks", "STOP", "STOP, fault-tolerant")
STEPS = tuple(name for name in SAVING if name != "room")
_TURNS = [[(phase, ACTS[(turn + at) % len(ACTS)]) for at, phase in enumerate(PHASES)] for turn in range(len(ACTS))]
CELLS = [*_TURNS[0], *((step, "KILL") for step in STEPS), *(cell for turn in _TURNS[1:] for cell in turn)]
"""Each act at each phase; the first few come to all phases."""
AGREED = PHASES[2:]
WAITS_S = 2
"""How long the rank that has come to the point stays there, where others are told."""
PATIENCE_S = 5.0
LIMIT_S = 60.0
"""In which a job that goes on must have ended."""
ENDS_S = 30.0
"""In which one that is to end must have, patience and reapers included."""
WHY = {
    "INT ranks": ("SIGINT", "signal 2", "KeyboardInterrupt"),
    "TERM ranks": ("SIGTERM", "signal 15"),
    "STOP": ("has heard nothing of", "gave no sign of life", "lost"),
    "KILL": ("signal 9", "lost", "Killed"),
}


@dataclass(frozen=True)
class Draw:
    """One run; shard s is rank s, and two learners follow."""

    phase: str
    act: str
    way: str
    shards: int
    victim: int
    all_ranks: bool

    @property
    def ranks(self) -> int:
        return self.shards + (0 if self.way == "allreduce" else 2)

    @property
    def tolerant(self) -> bool:
        return "tolerant" in self.act

    @property
    def goes_on(self) -> bool:
        """Whether the job must come to a DONE without the victim."""
        return self.tolerant and self.phase in AGREED and self.victim >= self.shards

    def settings(self, out: Path) -> dict[str, Any]:
        return settings(self.way, self.shards, out) | {
            "faults": {"mode": "tolerant" if self.tolerant else "fail-fast", "patience_s": PATIENCE_S}
        }


def settings(way: str, shards: int, out: Path) -> dict[str, Any]:
    """A run of some three seconds."""
    return WAYS[way] | {
        "out": str(out),
        "model": {"name": "mlp", "hidden": (64, 64)},
        "shards": 1 if way == "allreduce" else shards,
        "epochs": 3.0,
        "mu": 16,
        "alpha0": 0.02,
        "threads": 1,
        "straggler": {"delay": "constant", "delay_mean_s": 0.02},
        "evaluation": {"train": False, "every_epochs": 1.0},
        "checkpoint": {"every_updates": 5},
        "log": {"progress": "plain", "progress_s": 0.1, "flush_s": 0.2},
    }


@cache
def whole(way: str, shards: int) -> Path:
    """The same job left alone."""
    return left_alone(shards if way == "allreduce" else shards + 2, partial(settings, way, shards), LIMIT_S)


def draw(generator: random.Random, number: int) -> Draw:
    """The cells take turns; all else is drawn."""
    phase, act = CELLS[number % len(CELLS)]
    ways = [way for way in WAYS if not (way == "allreduce" and ("tolerant" in act))]
    way, shards = generator.choice(ways), generator.choice((1, 2))
    if way == "allreduce":
        shards = 2
    elif "manifest" in phase or phase == "pruning":  # who is last writes it
        shards = 1
    learners = [0, 1] if way == "allreduce" else [shards, shards + 1]
    if phase in STEPS:
        victims = list(range(shards))
    else:
        evaluator = [0] if "tolerant" in act else learners[:1]
        victims = {"evaluation": evaluator, "finish": [0], "look-around": [*range(shards), *learners]}.get(phase, learners)
    return Draw(phase, act, way, shards, generator.choice(victims), generator.random() < 0.5)


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    drawn, out = draw(generator, number), directory / "run"
    found = Found([drawn.phase, drawn.act, drawn.way, f"S = {drawn.shards}"])
    to_others = "launcher" in drawn.act or ("ranks" in drawn.act and drawn.all_ranks)
    if "ranks" in drawn.act:
        found.kinds.append("all ranks" if drawn.all_ranks else "one rank")
    signum = signal.Signals[f"SIG{drawn.act.split(',')[0].split()[0]}"]
    victim = ANY if drawn.phase == "evaluation" else str(drawn.victim)
    told = {"DIE_MARK": str(directory / "mark"), "DIE_AT": drawn.phase, "DIE_RANK": victim}
    told["DIE_BY"] = str(WAITS_S) if to_others else signum.name
    options = ULFM if drawn.tolerant else []
    words = [configured(directory, drawn.settings(out))]
    job = Job(drawn.ranks, words, options, module="tests.faults.dying", PYTHONPATH=HERE, **told)
    try:
        at_s = job.wait_for(SAID, LIMIT_S)
    except TimeoutError as error:
        return Found(found.kinds, failures=[f"it did not come to the point: {error}"])
    if len(job.pids) < job.ranks:
        found.totals["ranks not seen"] += 1
    if "launcher" in drawn.act:
        job.send_launcher(signum)
    elif to_others:
        for rank in job.pids:
            job.send(rank, signum)
    status = job.end(LIMIT_S)
    took_s = time.monotonic() - at_s
    kind = "launcher" if "launcher" in drawn.act else drawn.act.partition(",")[0]
    late = "launcher" in drawn.act or (drawn.phase in ("finish", "evaluation") and "STOP" in drawn.act)
    done = ended(job, out, status, found, WHY.get(kind, ("",)), may_fail_late=late)
    found.expect(done or took_s < ENDS_S, f"ended after {took_s:.1f} s\n{job.text}")
    found.expect(done or not drawn.goes_on, f"it was to go on\n{job.text}")
    if not done:
        found.seconds[f"{kind}: until all are gone"].append(took_s)
    synchronous = drawn.way in SYNCHRONOUS and not (done and drawn.tolerant)
    proved(out, done, drawn.ranks, found, whole(drawn.way, drawn.shards) if synchronous else None, options)
    return found


def ended(job: Job, out: Path, status: int | None, found: Found, why: tuple[str, ...], *, may_fail_late: bool = False) -> bool:
    """Whether there is a DONE; what must hold of every job that something was done to, with one of the words that say `why`."""
    done = (out / schema.DONE).is_file()
    found.totals["DONE" if done else "ended"] += 1
    found.expect(status is not None, f"it hangs; DONE: {done}\n{job.text}")
    found.expect(job.left_s is not None, f"somebody was left\n{job.text}")
    if not (done and may_fail_late):
        found.expect((status == 0) == done, f"status {status}, DONE: {done}\n{job.text}")
    last = "\n".join(job.text.splitlines()[-30:])  # the launcher has its own
    found.expect(done or any(word in last for word in why), f"the reason is not told\n{job.text}")
    return done


def proved(out: Path, done: bool, ranks: int, found: Found, same: Path | None, options: list[str]) -> None:
    """Go on, where it was interrupted with a checkpoint; replay it, and compare it with the run that was left `alone`."""
    if not done and newest(out) is None:
        found.totals["begun anew"] += 1  # what is there may be replaced
        job = Job(ranks, [str(out.parent / "job.toml"), "--overwrite"], options)
    elif not done:
        found.totals["gone on with"] += 1
        job = Job(ranks, ["--resume", str(out)], options)
    if not done and not found.expect(job.end(LIMIT_S) == 0 and (out / schema.DONE).is_file(), f"not gone on with\n{job.text}"):
        return
    found.balanced(Run(out))
    found.proved(out)
    found.totals["replayed"] += 1
    if same is not None:
        found.same_bits(out, same)


if __name__ == "__main__":
    sys.exit(main("phases", "Signals, stops and deaths at each phase of a run.", len(CELLS), execute, sys.argv[1:]))
