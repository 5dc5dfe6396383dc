"""A node of a real SLURM loses its power: the job ends, without DONE, and nobody is left on the others (as root; slurm.py).

`python -m tests.faults.nodes --count 8 --seed 1 --out results/faults` writes nodes.json there. What counts is the shipped script's
exit status: mpirun alone may say 0.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from tests.faults.campaign import Found, main_on_slurm
from tests.jobs import slurm
from tests.jobs.submitting import NODES, Submitting

GONE_S = 10.0


def execute(cluster: slurm.Slurm, mpi: str, generator: random.Random, directory: Path, number: int) -> Found:
    node, tolerant = generator.choice(NODES), mpi == "openmpi" and generator.random() < 0.5
    found = Found([node, "fault-tolerant" if tolerant else "fail-fast"])
    here = Submitting(directory, cluster, mpi)
    try:
        job = here.start_endless(FAULT_TOLERANT=int(tolerant))
        time.sleep(generator.uniform(0, 2))
        found.expect(len(here.ranks()) >= len(NODES), f"ranks: {here.ranks()}")
        cluster.power_off(node)
        off_s = time.monotonic()
        while (left := here.ranks()) and time.monotonic() < off_s + 3 * GONE_S:
            time.sleep(0.02)
        gone_s = time.monotonic() - off_s
        found.seconds["until all ranks are gone"].append(gone_s)
        found.expect(gone_s < GONE_S, f"after {gone_s:.1f} s there are still {left}\n{here.output(job)}")
        cluster.power_on(node)
        state = cluster.wait_until(job, "FAILED", "NODE_FAIL", "COMPLETED", "CANCELLED", within_s=90)
        found.kinds.append(state)
        found.expect(state in ("FAILED", "NODE_FAIL"), f"SLURM says {state}\n{here.output(job)}")
        found.expect(not (here.run(job) / "DONE").exists(), "there is a DONE")
        if state == "FAILED":  # the script was there to say so
            found.expect("DONE: the run did not end well" in here.output(job), here.output(job))
    except AssertionError as error:
        found.failures.append(str(error))
    finally:
        if node not in cluster.daemons:
            cluster.power_on(node)
        cluster.call("scancel", "--user=root")
        cluster.heal()
    return found


if __name__ == "__main__":
    sys.exit(main_on_slurm("nodes", "Nodes that lose their power.", 8, execute, sys.argv[1:]))
