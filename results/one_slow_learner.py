"""Sandblaster on real ranks with one learner of 8 five times slower: seconds of an evaluation over the ideal share [Dean12 4.2].

The batch would take a usual learner 25.6 s: each sleeps 25.6 s / portions for a portion (constant delays), learner 3 five times as
long, so that two cores can stand for ten ranks. The ideal share is 25.6 s / (7 + 1/5). Beside it, the same in virtual time. Ways
take turns, and each is run as often as `WAYS` says.

`mpirun --oversubscribe -n 10 python results/one_slow_learner.py`; some four minutes. The rows are kept in
results/bench/slow-learner.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.bench.parts.measured import describe, write
from mpisgd.bench.parts.runs import scratch
from mpisgd.comm.mpi.library import MPI
from mpisgd.config.config_file import from_mapping
from mpisgd.job.run import run
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate

BATCH_S, SAMPLES, LEARNERS, SLOW = 25.6, 1024, 8, 5.0
OUT = Path(__file__).parent / "bench" / "slow-learner.json"
IDEAL_S = BATCH_S / (LEARNERS - 1 + 1 / SLOW)
WAYS = {(32, True): 3, (8, False): 1, (8, True): 1, (32, False): 1}
"""Portions, whether the last are dealt twice: how many runs."""


def shares(run: Run) -> np.ndarray:
    """Mean seconds of an evaluation in each iteration, over the ideal share: float64, (iterations,)."""
    rows = run.of_coordinator("iterations")
    return np.asarray(rows["evaluating_s"] / rows["evaluations"] / IDEAL_S)


def job(out: Path, portions: int, duplicates: bool) -> dict[str, Any]:
    return {
        "protocol": {"name": "sandblaster", "iterations": 2, "duplicates": duplicates},
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
    comm, found = MPI.COMM_WORLD, {way: list[np.ndarray]() for way in WAYS}
    with scratch(comm) as folder:
        for turn in range(max(WAYS.values())):
            for way in (way for way, runs in WAYS.items() if turn < runs):
                real = shares(Run(run(from_mapping(job(folder / "run", *way)), comm).path))
                found[way].append(real)
                if comm.Get_rank() == 0:
                    print(way, real.round(3), flush=True)
                comm.Barrier()
        if comm.Get_rank() == 0:
            tell({way: shares(Run(simulate(from_mapping(job(folder / "run", *way))).path)) for way in WAYS}, found)


def tell(virtual: dict[tuple[int, bool], np.ndarray], found: dict[tuple[int, bool], list[np.ndarray]]) -> None:
    """As JSON, and as a table."""
    rows = [
        {"portions": portions, "duplicates": duplicates, "real": [each.round(4).tolist() for each in found[portions, duplicates]]}
        | {"virtual": virtual[portions, duplicates].round(4).tolist()}
        for portions, duplicates in WAYS
    ]
    write(OUT, {"rows": rows, "batch_s": BATCH_S, "learners": LEARNERS, "slow": SLOW, **describe(MPI.COMM_WORLD.Get_size())})
    columns = columns_of(
        "portions | dealt twice | runs | real ranks, mean :.2f | their slowest iteration :.2f | virtual, mean :.2f"
    )
    cells = list[tuple[Cell, ...]]()
    for (portions, duplicates), runs in found.items():
        real, twice = np.concatenate(runs), "yes" if duplicates else "no"
        cells.append((portions, twice, len(runs), *map(float, (real.mean(), real.max(), virtual[portions, duplicates].mean()))))
    print(Table("one-slow-learner", "Seconds of an evaluation over the ideal share", columns, tuple(cells)).markdown())


if __name__ == "__main__":
    main()
