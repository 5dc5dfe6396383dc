"""`bench scale`: images/s over learners, measured and predicted.

*Weak*: mini-batches of 64 per learner. *Strong*: mu = 64 / learners. The speed-up is over one learner with mu = 64. A prediction
takes costs from the log of one learner with the same mu, as `mpisgd plan` does, and ignores the number of cores.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpisgd.bench.parts import runs
from mpisgd.bench.parts.cases import CASES, LEARNERS, Case, config_of
from mpisgd.bench.parts.measured import over, show, spread
from mpisgd.config import Config
from mpisgd.plan.costs.fit import fit
from mpisgd.plan.costs.predict import predict
from mpisgd.plan.costs.scale import with_learners
from mpisgd.protocols import HardsyncOptions, ProtocolOptions, SoftsyncOptions
from mpisgd.records.log.reader import Run

CASE = CASES["cnn-64"]


def up_to_the_cores() -> tuple[int, ...]:
    cores = len(os.sched_getaffinity(0))
    return tuple(sorted({1 << bit for bit in range(cores.bit_length())} | {cores}))


def measure(repetitions: int, learners: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure both protocols; no learners = `up_to_the_cores`. Raises ConfigError if a launch fails."""
    counts = learners or up_to_the_cores()
    for protocol in ("hardsync", "softsync"):
        yield from _rows(protocol, repetitions, counts)


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = f"{'protocol':<9} {'scaling':<7} {'learners':>8} {'mu':>4} {'images/s':>24} {'predicted':>24}"
    lines = [f"{head}   speed-up             over predicted"]
    for row in rows:
        measured, predicted = (show(row["images_per_s"][name], 0) for name in ("measured", "predicted"))
        what = f"{row['protocol']:<9} {row['scaling']:<7} {row['learners']:8} {row['mu']:4} {measured:>24} {predicted:>24}"
        lines.append(f"{what}   {show(row['speed_up'])}   {show(row['measured_over_predicted'])}")
    return lines


def _rows(protocol: str, repetitions: int, learners: Sequence[int]) -> list[dict[str, Any]]:
    points = {("weak", count): CASE for count in learners}
    points |= {("strong", count): _shared(count) for count in learners if count > 1 and CASE.mu % count == 0}
    alone: dict[int, list[float]] = {case.mu: [] for case in (CASE, *points.values())}
    measured: dict[tuple[str, int], list[float]] = {point: [] for point in points}
    predicted: dict[tuple[str, int], list[float]] = {point: [] for point in points}
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as directory:  # predictions draw from the seconds in the logs
            costs = {}
            for mu, rates in alone.items():
                case = replace(CASE, mu=mu, updates=CASE.updates * CASE.mu // mu)
                log = _trained(Path(directory, f"alone-{mu}"), case, protocol, 1)
                rates.append(runs.rate_of(log, case, 1))
                costs[mu] = fit(log)
            for (kind, count), case in points.items():
                virtual = predict(with_learners(costs[case.mu], count))
                predicted[kind, count].append(virtual.gradients_per_s * case.mu)
                log = _trained(Path(directory, f"{kind}-{count}"), case, protocol, count)
                measured[kind, count].append(runs.rate_of(log, case, count))
    return [
        {
            "protocol": protocol,
            "scaling": kind,
            "learners": count,
            "mu": case.mu,
            "images_per_s": {"measured": spread(measured[kind, count]), "predicted": spread(predicted[kind, count])},
            "speed_up": over(measured[kind, count], alone[CASE.mu]),
            "measured_over_predicted": over(measured[kind, count], predicted[kind, count]),
        }
        for (kind, count), case in points.items()
    ]


def _shared(learners: int) -> Case:
    return replace(CASE, mu=CASE.mu // learners, updates=CASE.updates)


def _trained(directory: Path, case: Case, protocol: str, learners: int) -> Run:
    directory.mkdir()
    options: ProtocolOptions = HardsyncOptions() if protocol == "hardsync" else SoftsyncOptions(n=learners)
    config: Config = config_of(directory, case, protocol=options)
    # `config.epochs` are for LEARNERS learners
    return runs.launched(replace(config, epochs=config.epochs * learners / LEARNERS), 1 + learners)
