"""A learner is stopped at a random moment, and goes on later: the others go on meanwhile, and the log names it.

`python -m tests.faults.stops --count 30 --seed 1 --out results/faults` writes stops.json there. What the others lose is the
longest time between two updates of a shard while the learner stood still, over the usual one.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests.faults.campaign import Found, configured, main
from tests.faults.job import ULFM, Job
from tests.faults.kills import CARRIERS, PROTOCOLS

PATIENCE_S = 0.3
LOSS_S = 0.5
LIMIT_S = 150.0


def settings(protocol: str, shards: int, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "protocol": {"name": protocol, **PROTOCOLS[protocol]},
        "model": {"name": "mlp", "hidden": (1165,)},
        "shards": shards,
        "epochs": 12.0,
        "mu": 16,
        "alpha0": 0.02,
        "threads": 1,
        "straggler": {"delay": "exponential", "delay_mean_s": 0.02},
        "evaluation": {"train": False, "every_epochs": 4.0},
        "log": {"progress": "plain", "progress_s": 0.1},
        "faults": {"mode": "tolerant", "patience_s": PATIENCE_S},
    }


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    protocol, shards, learners = generator.choice(list(PROTOCOLS)), generator.choice((1, 2)), generator.randint(3, 4)
    carrier, victim = generator.choice(list(CARRIERS)), generator.randrange(learners)
    found = Found([protocol, f"S = {shards}", carrier, f"{learners} learners"])
    out, ranks = directory / "run", shards + learners
    options = [*ULFM, "--mca", "btl", CARRIERS[carrier]]
    job = Job(ranks, [configured(directory, settings(protocol, shards, out))], options)
    try:
        job.wait_for("epoch ")
        time.sleep(generator.uniform(0.2, 1.0))
        stopped_s = job.send(shards + victim, signal.SIGSTOP)
        missed_s = job.wait_for(f"learner {victim} was not heard of for", 10, after_s=stopped_s)
        time.sleep(generator.uniform(0, 1.5))
        continued_s = job.send(shards + victim, signal.SIGCONT)
    except (TimeoutError, ProcessLookupError) as error:
        found.failures.append(f"not stopped: {error}\n{job.text}")
        return found
    status = job.end(LIMIT_S)
    if not found.well(job, status, out):
        return found
    run = Run(out)
    found.balanced(run)
    found.seconds["noticed_s"].append(missed_s - stopped_s)
    for shard in range(shards):
        mine = run.events[(run.events["shard"] == shard) & (run.events["learner_id"] == victim)]
        missed = mine["time_s"][mine["kind"] == Event.MISSED]
        if not found.expect(len(missed), f"shard {shard}: the log does not name learner {victim}"):
            continue
        back = mine["time_s"][mine["kind"] == Event.RETURNED]
        found.expect(len(back) or Event.LOST in mine["kind"], f"shard {shard}: learner {victim} neither came back nor was lost")
        found.totals["came back"] += bool(len(back))
        # The run's clock begins when the ranks meet; the second of the stop on it is told by what was noticed.
        stop_s = missed[0] - (missed_s - stopped_s)
        times = run.updates["time_s"][run.updates["shard"] == shard]
        gaps = np.diff(times)
        during = (times[1:] > stop_s) & (times[:-1] < stop_s + continued_s - stopped_s)
        if during.any():
            lost_s = float(gaps[during].max() - np.median(gaps))
            found.seconds["others_lost_s"].append(lost_s)
            found.expect(lost_s <= LOSS_S, f"shard {shard}: the others lost {lost_s:.3f} s")
    found.proved(out)
    found.totals["stops"] += 1
    return found


if __name__ == "__main__":
    sys.exit(main("stops", "A learner stopped for a while.", 30, execute, sys.argv[1:]))
