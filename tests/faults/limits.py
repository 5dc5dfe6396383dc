"""SLURM's time limits strike chains of jobs, again and again: each warning leads to a checkpoint, and all is gone on with.

`python -m tests.faults.limits --count 3 --seed 1 --out results/faults` writes limits.json there (as root; slurm.py). Each of the
`count` runs is four chains side by side on four virtual nodes, with real training and a limit of two minutes: SLURM warns them when
it likes, 30 to 90 s after their start, so each is warned several times before it is done.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from tests.faults.campaign import Found, main_on_slurm
from tests.jobs import slurm
from tests.jobs.submitting import ONE_EACH, Submitting

CHAINS = 4
SAVED_S = 2.0
WARNED, SAVED = "warned: the time is nearly over", "mpisgd: interrupted by SIGUSR1 at clock"
REQUEUED = "the job is queued again"
PROTOCOLS = ("hardsync", "softsync", "ssp", "async")
SETTINGS = """\
mu = 4
alpha0 = 0.02
placement = "spread"
straggler = {delay = "constant", delay_mean_s = 0.2}
log = {progress = "off"}
"""


class Chain:
    """A chain under way; its output is looked at until it has ended."""

    def __init__(self, directory: Path, cluster: slurm.Slurm, mpi: str, protocol: str, epochs: float) -> None:
        self.here = Submitting(directory, cluster, mpi)
        (directory / "jobs" / "job.toml").write_text(f"protocol = '{protocol}'\nepochs = {epochs}\n{SETTINGS}")
        self.here.edit("slurm-chain.sbatch", **ONE_EACH, time="00:02:00", signal="B:USR1@30")
        self.job = self.here.submit("slurm-chain.sbatch")
        self.saved_s: list[float] = []
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def _look(self) -> None:
        warned, warned_s = 0, 0.0
        while not self._ended.is_set():
            said = self.here.output(self.job)
            if said.count(WARNED) > warned:
                warned, warned_s = said.count(WARNED), time.monotonic()
            if said.count(SAVED) > len(self.saved_s):
                self.saved_s.append(time.monotonic() - warned_s)
            time.sleep(0.01)

    def end(self, found: Found) -> None:
        cluster, run = self.here.cluster, self.here.run(self.job)
        state = cluster.wait_until(self.job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", within_s=1500)
        self._ended.set()
        self._watch.join()
        said = self.here.output(self.job)
        if not found.expect(state == "COMPLETED" and (run / "DONE").exists(), f"{state}\n{said}"):
            return
        warned, saved = said.count(WARNED), said.count(SAVED)
        too_late = WARNED in said.rpartition(REQUEUED)[2]  # the last link was done before it could be interrupted
        found.totals["warnings"] += warned
        found.totals["when the run was complete"] += too_late
        found.expect(
            said.count("(nothing is lost)") == saved == warned - too_late == len(self.saved_s), f"not all was saved\n{said}"
        )
        found.expect(max(self.saved_s, default=0) <= SAVED_S, f"saved after {max(self.saved_s, default=0):.2f} s")
        found.seconds["saved_s"] += self.saved_s
        log = Run(run)
        resumed = (log.events["kind"] == Event.RESUMED) & (log.events["shard"] == 0)
        found.expect(resumed.sum() == saved, f"gone on {resumed.sum()} times, saved {saved}")
        found.balanced(log)
        for shard, summary in enumerate(log.summaries):
            found.no_update_lost(log, shard, summary["final_clock"])
        found.proved(run)


def execute(cluster: slurm.Slurm, mpi: str, generator: random.Random, directory: Path, number: int) -> Found:
    found, chains = Found(), []
    for index in range(CHAINS):
        protocol, epochs = PROTOCOLS[index % len(PROTOCOLS)], generator.uniform(4.0, 6.0)
        found.kinds.append(protocol)
        place = directory / str(index)
        place.mkdir()
        chains.append(Chain(place, cluster, mpi, protocol, epochs))
    for chain in chains:
        chain.end(found)
    cluster.heal()
    return found


if __name__ == "__main__":
    sys.exit(main_on_slurm("limits", "Time limits that strike chains of jobs.", 3, execute, sys.argv[1:]))
