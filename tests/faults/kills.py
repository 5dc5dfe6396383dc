"""Learners and evaluators killed at random moments: the others finish, nothing is applied in part or twice, the books balance.

`python -m tests.faults.kills --count 100 --seed 1 --out results/faults` writes kills.json there. What is trained how (WAYS) takes
turns; each run draws its shards, its ranks (4 to 8), its model (350 kB or 8 MB), what carries its messages (shared memory or TCP),
and who is killed, by SIGKILL, when: 1 to lambda - 1 learners, and of the evaluators half. `kinds` counts what was drawn. Replay
proves every second run.
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

from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Reason, Verdict
from tests.faults.campaign import Found, configured, main
from tests.faults.job import ULFM, Job

PROTOCOLS: dict[str, dict[str, Any]] = {
    "hardsync": {},
    "softsync": {"n": 2},
    "backup": {"b": 1},
    "ssp": {"slack": 1},
    "async": {},
}
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"protocol": {"name": name, **options}} for name, options in PROTOCOLS.items()},
    "timeout": {"protocol": {"name": "timeout", "timeout_s": 0.1}},
    "versioned": {"protocol": "versioned"},
    "downpour": {"protocol": "downpour"},
    "layerwise": {"protocol": "async", "per_layer": True},
}
EVALUATOR = -1
"""In the place of a learner_id."""
MODELS = {"350 kB": (265, 255), "8 MB": (1400, 1360)}
"""Hidden units of a network for 64 inputs and 10 classes; as many layers as shards, at least."""
CARRIERS = {"shared memory": "sm,self", "TCP": "tcp,self"}
LIMIT_S = 150.0
OVER_S = 0.8
"""The kills of one run lie in so many seconds; EPOCHS last longer, also where nobody is killed before the end of them."""
EPOCHS = {"350 kB": 3.0, "8 MB": 1.5}


@dataclass(frozen=True)
class Draw:
    """One run. Learner l is rank shards + l; `kills`: (learner_id or EVALUATOR, seconds after training was seen to go on)."""

    way: str
    shards: int
    ranks: int
    model: str
    carrier: str
    evaluator: bool
    kills: list[tuple[int, float]]

    @property
    def learners(self) -> int:
        return self.ranks - self.shards - self.evaluator


def draw(generator: random.Random, number: int) -> Draw:
    shards, evaluator = generator.choice((1, 2, 3)), generator.random() < 0.4
    learners = generator.randint(2, 8 - shards - evaluator)
    victims = generator.sample(range(learners), generator.randint(1, learners - 1))
    if evaluator and generator.random() < 0.5:
        victims.append(EVALUATOR)
    return Draw(
        way=list(WAYS)[number % len(WAYS)],
        shards=shards,
        ranks=shards + learners + evaluator,
        model=generator.choice(list(MODELS)),
        carrier=generator.choice(list(CARRIERS)),
        evaluator=evaluator,
        kills=sorted(((victim, generator.uniform(0, OVER_S)) for victim in victims), key=lambda kill: kill[1]),
    )


def config_of(drawn: Draw, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        **WAYS[drawn.way],
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
    drawn = draw(generator, number)
    found = Found([drawn.way, f"S = {drawn.shards}", drawn.model, drawn.carrier, f"{drawn.ranks} ranks"])
    out = directory / "run"
    options = [*ULFM, "--mca", "btl", CARRIERS[drawn.carrier]]
    job = Job(drawn.ranks, [configured(directory, config_of(drawn, out))], options)
    killed: dict[int, float] = {}
    try:
        begun_s = job.wait_for("epoch ")
        for learner_id, after_s in drawn.kills:
            time.sleep(max(0.0, begun_s + after_s - time.monotonic()))
            rank = drawn.ranks - 1 if learner_id == EVALUATOR else drawn.shards + learner_id
            killed[learner_id] = job.send(rank, signal.SIGKILL)
            found.totals[f"killed: training / {'evaluator' if learner_id == EVALUATOR else 'learner'}"] += 1
    except (TimeoutError, ProcessLookupError, KeyError) as error:
        found.failures.append(f"not killed: {error}")
    status = job.end(LIMIT_S)
    if not found.well(job, status, out, drawn):
        return found
    _look_at_log(Run(out), drawn, killed, job, found)
    if number % 2 == 0:
        found.proved(out)
        found.totals["replayed"] += 1
    return found


def _look_at_log(run: Run, drawn: Draw, killed: dict[int, float], job: Job, found: Found) -> None:
    pushes, events, updates = run.pushes, run.events, run.updates
    found.balanced(run)
    found.totals["torn"] += int(np.count_nonzero(pushes["reason"] == Reason.TORN))
    found.totals["gradients"] += int(np.count_nonzero(pushes["verdict"] == Verdict.APPLY))
    seen = collections.defaultdict(list)
    for shard in range(drawn.shards):
        for learner_id in range(drawn.learners):
            mine = pushes[(pushes["shard"] == shard) & (pushes["learner_id"] == learner_id)]
            seen[learner_id].append(len(mine))
            steps = np.diff(mine["seq"])
            follow = np.all((steps == 1) | (steps == 0) & (drawn.way == "versioned"))  # which has it computed again
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


if __name__ == "__main__":
    sys.exit(main("kills", "Learners and evaluators killed at random moments.", 100, execute, sys.argv[1:]))
