"""The network of a job on three nodes fails (as root, in a cluster in a box): it ends with the reason, or goes on, and says which.

`python -m tests.faults.network --count 60 --seed 1 --out results/faults` writes network.json there. Each run draws what is trained
how, on which node what happens to the link, and at which point of the run: a link is cut in one direction or both, for good or for
a time that is shorter or longer than is patient; has a tenth of its rate; loses frames and is late.

A link that is slow, bad or cut for a moment must not end a job. One that is cut for longer may, and must end a fail-fast one where
the run would last; a fault-tolerant one goes on without learners that are cut off for good. No job hangs, no DONE is untrue, and
the launcher's status is 0 where there is a DONE, and only there; but for a link that is cut when there is a DONE already, and MPI
only ends. Counted apart are Open MPI's daemons behind a link that is cut: they wait as long as TCP does, and nobody for them; and
an mpirun that has lost its own daemons before it started a rank: nothing of ours is there yet.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisgd.job.interruption import newest
from mpisgd.records.log.reader import Run
from tests.faults.campaign import Found, configured, main
from tests.faults.job import ULFM
from tests.nodes.cluster import Cluster, Direction, missing
from tests.nodes.job import Job

WAYS: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "backup": {"protocol": {"name": "backup", "b": 1}},
    "async": {"protocol": {"name": "async"}},
    "layerwise": {"protocol": {"name": "async"}, "per_layer": True},
    "allreduce": {"protocol": {"name": "allreduce"}},
}
POINTS = ("start", "training", "checkpoint", "evaluation", "end")
FAULTS = ("cut for good", "cut for long", "cut for a moment", "slow", "bad")
DIRECTIONS: tuple[Direction, ...] = ("both", "from", "to")
PATIENCE_S = 3.0
LIMIT_S = 60.0
"""In which a job ends, from the fault on, if it is not to go on; and a short one that goes on."""
RATE, TENTH = "100mbit", "10mbit"


@dataclass(frozen=True)
class Draw:
    """One run; shard s is rank s, and `spread[k]` ranks are on node k."""

    way: str
    mode: str
    shards: int
    spread: tuple[int, ...]
    point: str
    node: int
    fault: str
    direction: Direction
    seconds: float
    """From the point to the fault."""
    heals_s: float

    @property
    def has_shard(self) -> bool:
        """Whether there is no job without the node."""
        return self.node == 0 or self.way == "allreduce" or sum(self.spread[: self.node]) < self.shards

    @property
    def goes_on(self) -> bool:
        """Whether the job must come to a DONE."""
        if self.fault in ("slow", "bad", "cut for a moment"):
            return True
        return self.mode == "tolerant" and self.fault == "cut for good" and self.point != "start" and not self.has_shard

    @property
    def lasts(self) -> bool:
        """Whether it is trained for longer than anybody waits."""
        return self.point in ("start", "training", "checkpoint") and not self.goes_on and self.fault == "cut for good"

    @property
    def cut_at_the_end(self) -> bool:
        """Whether the link may be cut when all is said, and MPI only ends: that fails then, without harm."""
        return self.point in ("evaluation", "end") and self.fault in ("cut for good", "cut for long")

    def settings(self, out: Path) -> dict[str, Any]:
        return WAYS[self.way] | {
            "out": str(out),
            "model": {"name": "mlp", "hidden": (64, 64)},
            "shards": 1 if self.way == "allreduce" else self.shards,
            "epochs": 10_000.0 if self.lasts else 5.0,
            "mu": 16,
            "alpha0": 0.02,
            "threads": 1,
            "straggler": {"delay": "constant", "delay_mean_s": 0.02},
            "evaluation": {"train": False, "every_epochs": 0.25 if self.point == "evaluation" else 1.0},
            "checkpoint": {"every_updates": 5},
            "log": {"progress": "plain", "progress_s": 0.1},
            "faults": {"mode": self.mode, "patience_s": PATIENCE_S},
        }


def draw(generator: random.Random, number: int) -> Draw:
    """Points and faults take turns; all else is drawn."""
    way, shards = generator.choice(list(WAYS)), generator.choice((1, 2))
    fault = FAULTS[number // len(POINTS) % len(FAULTS)]
    heals_s = {"cut for a moment": generator.uniform(0.2, 1.2), "cut for long": generator.uniform(8, 15)}
    return Draw(
        way=way,
        mode="fail-fast" if way == "allreduce" else generator.choice(("fail-fast", "tolerant")),
        shards=shards,
        spread=generator.choice(((2, 2, 1), (1, 2, 2))),
        point=POINTS[number % len(POINTS)],
        node=generator.choice((0, 1, 1, 2, 2)),
        fault=fault,
        direction=generator.choice(DIRECTIONS),
        seconds=generator.uniform(0, 4.0) if number % len(POINTS) == 0 else generator.uniform(0, 0.5),
        heals_s=heals_s.get(fault, 0.0),
    )


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    drawn = draw(generator, number)
    bad = drawn.fault == "bad"
    if why := missing(relay=bad):
        return Found(["left out"], failures=[why])
    out = directory / "run"
    found = Found([drawn.point, drawn.fault, drawn.way, drawn.mode, f"S = {drawn.shards}"])
    found.kinds.append("node with a shard" if drawn.has_shard else "node of learners")
    if "cut" in drawn.fault:
        found.kinds.append(f"direction: {drawn.direction}")
    with Cluster(len(drawn.spread), relayed=(drawn.node,) if bad else ()) as cluster:
        for node in cluster.nodes:
            cluster.shape(node, RATE)
        options = ULFM if drawn.mode == "tolerant" else []
        job = Job(cluster, drawn.spread, [configured(directory, drawn.settings(out))], options)
        try:
            _come_to(job, out, drawn)
        except TimeoutError as error:
            job.end(0)
            found.failures.append(f"did not come to the point: {error}")
            return found
        begun_s = time.monotonic()
        _hurt(cluster, job, drawn, generator)
        status = job.end(LIMIT_S)
        found.seconds["goes on, to its end" if status == 0 else "ends, after the fault"].append(time.monotonic() - begun_s)
        _look(job, out, status, drawn, found)
    return found


def _come_to(job: Job, out: Path, drawn: Draw) -> None:
    """Wait until the point of the run where it is to happen. Raises TimeoutError."""
    if drawn.point == "training":
        job.wait_for("epoch ")
    elif drawn.point in ("evaluation", "end"):
        job.wait_for("evaluations follow" if drawn.point == "evaluation" else "finished")
    elif drawn.point == "checkpoint":
        until_s = time.monotonic() + LIMIT_S
        while newest(out) is None:
            if time.monotonic() > until_s or job.over:
                raise TimeoutError(f"no checkpoint:\n{job.text}")
            time.sleep(0.01)
    if drawn.point != "end":
        time.sleep(drawn.seconds)


def _hurt(cluster: Cluster, job: Job, drawn: Draw, generator: random.Random) -> None:
    if drawn.fault == "slow":
        cluster.shape(drawn.node, TENTH)
    elif drawn.fault == "bad":
        cluster.disturb(drawn.node, generator.uniform(0, 0.03), generator.uniform(0.001, 0.01))
    else:
        cluster.cut(drawn.node, drawn.direction)
        if drawn.heals_s:
            until_s = time.monotonic() + drawn.heals_s
            while not job.over and time.monotonic() < until_s:
                time.sleep(0.02)
            cluster.heal(drawn.node)


def _look(job: Job, out: Path, status: int | None, drawn: Draw, found: Found) -> None:
    """What must hold of every run."""
    done = (out / "DONE").is_file()
    told = f"{drawn}\n{job.text}"
    if drawn.point == "start" and status is None and not job.pids:
        found.totals["mpirun hung before it had started a rank"] += 1
        return
    found.totals["ended without DONE"] += not done
    found.totals["DONE"] += done
    found.expect(status is not None, f"it hangs: no end after {LIMIT_S:g} s; DONE: {done}; {told}")
    found.expect(job.left_s is not None, f"somebody is left: {job.stayed}; {told}")
    found.totals["daemons left behind the link"] += job.daemons_left
    found.expect(drawn.fault.startswith("cut for") or not job.daemons_left, f"daemons are left: {job.stayed}; {told}")
    if done and status and drawn.cut_at_the_end:
        found.totals["DONE, then status 1"] += 1
    elif status is not None:
        found.expect((status == 0) == done, f"status {status}, DONE: {done}; {told}")
    if drawn.goes_on:
        found.expect(done, f"it was to go on; {told}")
    if drawn.lasts:
        found.expect(not done, f"there is a DONE; {told}")
    if done:
        found.balanced(Run(out))
        found.proved(out)


if __name__ == "__main__":
    sys.exit(main("network", "Links cut, slow and bad, at every point of a run.", 60, execute, sys.argv[1:]))
