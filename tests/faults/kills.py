"""Learners killed at random moments: the others finish, nothing is applied in part or twice, the books balance.

`python -m tests.faults.kills --count 300 --seed 1 --out results/faults` writes kills.json there. Each run draws its protocol, its
shards, its ranks (5 to 8), its model (350 kB or 8 MB), what carries its messages (shared memory or TCP), and who is killed, by
SIGKILL, when: 1 to lambda - 1 learners. `kinds` counts what was drawn.
"""

from __future__ import annotations

import collections
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd import replay
from mpisgd.records.reader import Run
from mpisgd.records.schema import Event, Reason, Verdict
from tests.faults.campaign import Found, configured, main
from tests.faults.job import Job

PROTOCOLS: dict[str, dict[str, Any]] = {
    "hardsync": {},
    "softsync": {"n": 2},
    "backup": {"b": 1},
    "ssp": {"slack": 1},
    "async": {},
}
MODELS = {"350 kB": (1165,), "8 MB": (1400, 1360)}
"""Hidden units of a network for 64 inputs and 10 classes."""
CARRIERS = {"shared memory": "sm,self", "TCP": "tcp,self"}
LIMIT_S = 150.0
OVER_S = 1.0
"""The kills of one run lie in so many seconds; EPOCHS last longer, also where nobody is killed before the end of them."""
EPOCHS = {"350 kB": 4.0, "8 MB": 1.5}


@dataclass(frozen=True)
class Draw:
    """One run of the campaign. Learner l is rank shards + l; `kills`: (learner_id, seconds after training was seen to go on)."""

    protocol: str
    shards: int
    ranks: int
    model: str
    carrier: str
    evaluator: bool
    kills: list[tuple[int, float]]

    @property
    def learners(self) -> int:
        return self.ranks - self.shards - self.evaluator


def draw(generator: random.Random) -> Draw:
    shards, ranks, evaluator = generator.choice((1, 2)), generator.randint(5, 8), generator.random() < 0.2
    learners = ranks - shards - evaluator
    victims = generator.sample(range(learners), generator.randint(1, learners - 1))
    return Draw(
        protocol=generator.choice(list(PROTOCOLS)),
        shards=shards,
        ranks=ranks,
        model=generator.choice(list(MODELS)),
        carrier=generator.choice(list(CARRIERS)),
        evaluator=evaluator,
        kills=sorted(((victim, generator.uniform(0, OVER_S)) for victim in victims), key=lambda kill: kill[1]),
    )


def config_of(drawn: Draw, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "protocol": {"name": drawn.protocol, **PROTOCOLS[drawn.protocol]},
        "model": {"name": "mlp", "hidden": MODELS[drawn.model]},
        "shards": drawn.shards,
        "evaluator": drawn.evaluator,
        "epochs": EPOCHS[drawn.model],
        "mu": 16,
        "alpha0": 0.02,
        "threads": 1,
        "straggler": {"delay": "exponential", "delay_mean_s": 0.02},
        "evaluation": {"train": False, "every_epochs": 1.0},
        "log": {"progress": "plain", "progress_s": 0.1, "flush_s": 0.2},
        "faults": {"mode": "tolerant"},
    }


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    """Run it, kill, and look at what is left."""
    drawn = draw(generator)
    found = Found([drawn.protocol, f"S = {drawn.shards}", drawn.model, drawn.carrier, f"{drawn.ranks} ranks"])
    out = directory / "run"
    options = ["--with-ft", "ulfm", "--mca", "btl", CARRIERS[drawn.carrier]]
    job = Job(drawn.ranks, [configured(directory, config_of(drawn, out))], options)
    killed: dict[int, float] = {}
    try:
        begun_s = job.wait_for("epoch ")
        for learner_id, after_s in drawn.kills:
            time.sleep(max(0.0, begun_s + after_s - time.monotonic()))
            killed[learner_id] = job.send(drawn.shards + learner_id, signal.SIGKILL)
    except (TimeoutError, ProcessLookupError, KeyError) as error:
        found.failures.append(f"not killed: {error}")
    status = job.end(LIMIT_S)
    well = status == 0 and job.left_s is not None and (out / "DONE").is_file()
    if not found.expect(well, f"status {status}, gone {job.left_s}, DONE {(out / 'DONE').is_file()}, {drawn}\n{job.text}"):
        return found
    _look_at_log(Run(out), drawn, killed, job, found)
    if number % 5 == 0:
        proof = replay.replay(out)
        found.expect(not proof.reason and proof.lines()[-1].startswith("identical"), f"replay: {proof.lines()[-2:]}")
        found.totals["replayed"] += 1
    return found


def _look_at_log(run: Run, drawn: Draw, killed: dict[int, float], job: Job, found: Found) -> None:
    pushes, events, updates = run.pushes, run.events, run.updates
    for books in run.books():
        found.expect(books.balanced, f"{books}")
    found.totals["torn"] += int(np.count_nonzero(pushes["reason"] == Reason.TORN))
    found.totals["gradients"] += int(np.count_nonzero(pushes["verdict"] == Verdict.APPLY))
    seen = collections.defaultdict(list)
    for shard in range(drawn.shards):
        for learner_id in range(drawn.learners):
            mine = pushes[(pushes["shard"] == shard) & (pushes["learner_id"] == learner_id)]
            seen[learner_id].append(len(mine))
            follow = np.all(np.diff(mine["seq"]) == 1)
            found.expect(follow, f"shard {shard}, learner {learner_id}: its mini-batches do not follow each other")
        lost = events[(events["shard"] == shard) & (events["kind"] == Event.LOST)]
        wrong = set(lost["learner_id"].tolist()) - set(killed)
        found.expect(not wrong, f"shard {shard} lost learners {wrong}, who were not killed")
        times = updates["time_s"][updates["shard"] == shard]
        for event in lost:
            learner_id = int(event["learner_id"])
            told = f"clock {event['clock']}: learner {learner_id} is lost"
            at = [at for at, line in job.lines if told in line and f"shard {shard} " in line]
            if found.expect(at, f"shard {shard} did not say that learner {learner_id} is lost"):
                noticed_s = at[0] - killed[learner_id]
                found.seconds["noticed_s"].append(noticed_s)
                kill_s = event["time_s"] - noticed_s
                before, after = times[times <= kill_s].max(initial=0.0), times[times > kill_s]
                if len(after):
                    found.seconds["stood_still_s"].append(float(after.min() - before - np.median(np.diff(times))))
    found.totals["uneven"] += sum(min(counts) != max(counts) for learner_id, counts in seen.items() if learner_id in killed)
    found.totals["killed"] += len(killed)


if __name__ == "__main__":
    sys.exit(main("kills", "Learners killed at random moments.", 300, execute, sys.argv[1:]))
