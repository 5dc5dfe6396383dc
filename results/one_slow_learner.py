"""Sandblaster on real ranks with one learner of 8 five times slower: seconds of an evaluation over the ideal share [Dean12 4.2].

The batch would take a usual learner 3.2 s: each sleeps 3.2 s / portions for a portion (constant delays), learner 3 five times as
long, so that two cores can stand for ten ranks. The ideal share is 3.2 s / (7 + 1/5). Beside it, the same in virtual time.

`mpirun --oversubscribe -n 10 python results/one_slow_learner.py`; a minute or two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.bench.train import scratch
from mpisgd.comm.mpi.library import MPI
from mpisgd.config.config_file import from_mapping
from mpisgd.job.run import run
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate

BATCH_S, SAMPLES, LEARNERS, SLOW = 3.2, 1024, 8, 5.0
IDEAL_S = BATCH_S / (LEARNERS - 1 + 1 / SLOW)
WAYS = [(32, True), (8, False), (8, True), (32, False)]
"""Portions, and whether the last are dealt twice."""


def shares(run: Run) -> np.ndarray:
    """Mean seconds of an evaluation in each iteration, over the ideal share: float64, (iterations,)."""
    rows = run.of_coordinator("iterations")
    return np.asarray(rows["evaluating_s"] / rows["evaluations"] / IDEAL_S)


def job(out: Path, portions: int, duplicates: bool) -> dict[str, Any]:
    return {
        "protocol": {"name": "sandblaster", "iterations": 6, "duplicates": duplicates},
        "model": "softmax",
        "data": {"name": "synthetic", "samples": SAMPLES, "test_samples": 10, "shape": [6], "classes": 4},
        "mu": SAMPLES // portions,
        "straggler": {"slowdown": {3: SLOW}, "delay": "constant", "delay_mean_s": BATCH_S / portions},
        "virtual": {"learners": LEARNERS},
        "compute": {"name": "constant", "mean_s": 0.0},
        "evaluation": {"every_epochs": 0.0},
        "log": {"progress": "off"},
        "threads": 1,
        "out": str(out),
        "overwrite": True,
    }


def main() -> None:
    comm, rows = MPI.COMM_WORLD, list[tuple[Cell, ...]]()
    with scratch(comm) as folder:
        for portions, duplicates in WAYS:
            config = from_mapping(job(folder / "run", portions, duplicates))
            real = shares(Run(run(config, comm).path))
            if comm.Get_rank() == 0:
                virtual = shares(Run(simulate(config).path))
                rows.append((portions, "yes" if duplicates else "no", *map(float, (real.mean(), real.max(), virtual.mean()))))
                print(rows[-1], flush=True)
            comm.Barrier()
    if comm.Get_rank() == 0:
        columns = columns_of("portions | dealt twice | real ranks, mean :.2f | their slowest iteration :.2f | virtual, mean :.2f")
        print(Table("one-slow-learner", "Seconds of an evaluation over the ideal share", columns, tuple(rows)).markdown())


if __name__ == "__main__":
    main()
