"""`bench train`: images/s of every protocol, PyTorch DDP, and loops without communication.

One shard and two learners train on synthetic data, all ways interleaved. The better DDP counts, with or without gradients as bucket
views. Only applied gradients count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mpisgd.base.errors import ConfigError
from mpisgd.bench.parts import loops
from mpisgd.bench.parts.cases import ALL, CASES, LEARNERS, WAYS, Case, Device
from mpisgd.bench.parts.measured import Spread, in_turn, over, show, spread
from mpisgd.bench.parts.runs import among, rate_of, run_of, scratch
from mpisgd.comm.mpi.launch import words
from mpisgd.comm.mpi.library import MPI
from mpisgd.comm.mpi.wire import Wire
from mpisgd.config import kind_of
from mpisgd.records.log.reader import Run

FLOOR, OTHER_FORMAT = "loops", "loops, contiguous"
DDP, DDP_VIEWS = "DDP", "DDP, views"


def measure(
    comm: MPI.Intracomm,
    repetitions: int,
    cases: Sequence[str],
    ways: Sequence[str],
    device: Device = "cpu",
    shard_device: Device = "cpu",
) -> Iterator[dict[str, Any]]:
    """Measure cases in `cases.WAYS` or ALL; rows are equal on all ranks. Raises ConfigError if a way needs more ranks."""
    if ALL in ways:
        ways = [name for name, way in WAYS.items() if len(way.ranks) <= 3]
    for name in ways:
        most = 1 + max(WAYS[name].ranks)
        if comm.Get_size() < most:
            raise ConfigError(f"bench train --ways {name}: found {comm.Get_size()} ranks, expected {most}: {words(most)} ...")
    wire = Wire(comm, polite=True)
    loops.join_gloo(comm)
    with scratch(comm) as directory:
        for case in cases:
            yield _row(comm, wire, directory, CASES[case], ways, repetitions, device, shard_device)
    loops.leave_gloo(comm)


def _row(
    comm: MPI.Intracomm,
    wire: Wire,
    directory: Path,
    case: Case,
    ways: Sequence[str],
    repetitions: int,
    device: Device,
    shard_device: Device,
) -> dict[str, Any]:
    measures: dict[str, Callable[[], float]] = {
        FLOOR: lambda: loops.independent(comm, wire, case, device),
        OTHER_FORMAT: lambda: loops.independent(comm, wire, case, device, "contiguous"),
        DDP: lambda: loops.distributed(comm, wire, case, device, views=False),
        DDP_VIEWS: lambda: loops.distributed(comm, wire, case, device, views=True),
    }
    devices = {"device": device, "shard_device": shard_device}
    measures |= {name: partial(_trained, comm, directory, case, name, devices) for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for name in in_turn(list(measures), repetitions, told=comm.Get_rank() == 0):
        rates[name].append(measures[name]())
    return {
        "case": case.name,
        **devices,
        "images_per_s": {name: spread(values) for name, values in rates.items()},
        "ratios": ratios(rates),
        "best_synchronous": best_of(rates),
    }


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line for row in rows for line in _lines_of(row)]


def _lines_of(row: Mapping[str, Any]) -> list[str]:
    rates = ", ".join(f"{name} {value['median']:.0f}" for name, value in row["images_per_s"].items())
    lines = [f"{row['case']}: images/s {rates}"]
    lines += [f"  {name:<34} {show(ratio)}" for name, ratio in row["ratios"].items()]
    best = row["best_synchronous"]
    if best not in (None, "hardsync") and "hardsync" in row["images_per_s"]:
        gain = row["images_per_s"][best]["median"] / row["images_per_s"]["hardsync"]["median"]
        lines.append(f"  here {best} is {gain:.2f} times as fast as hardsync{_how(best)}")
    return lines


def _how(best: str) -> str:
    words = [f"--protocol {kind_of(WAYS[best].special['protocol'])}"]
    words += [f"--aggregation {WAYS[best].special['aggregation']}"] if "aggregation" in WAYS[best].special else []
    return f": {' '.join(words)}"


def best_of(rates: dict[str, list[float]]) -> str | None:
    names = [name for name in rates if name in WAYS and WAYS[name].synchronous]
    return max(names, key=lambda name: median(rates[name]), default=None)


def ratios(rates: dict[str, list[float]]) -> dict[str, Spread]:
    ddp = [max(pair) for pair in zip(rates[DDP], rates[DDP_VIEWS], strict=True)]
    found = {
        "loops / loops, contiguous": over(rates[FLOOR], rates[OTHER_FORMAT]),
        "best DDP / loops": over(ddp, rates[FLOOR]),
    }
    best = best_of(rates)
    if best is not None:
        found["best synchronous / best DDP"] = over(rates[best], ddp)
        found["best synchronous / loops"] = over(rates[best], rates[FLOOR])
    for name in (name for name in rates if name in WAYS):
        found[f"{name} / best DDP"] = over(rates[name], ddp)
        found[f"{name} / loops"] = over(rates[name], rates[FLOOR])
    return found


def _trained(comm: MPI.Intracomm, directory: Path, case: Case, name: str, devices: Mapping[str, Device]) -> float:
    way = WAYS[name]
    with among(comm, way.ranks) as part:
        outcome = run_of(part, directory, case, **devices, **way.special) if part is not None else None
    return float(comm.bcast(rate_of(Run(outcome.path), case) if outcome is not None else None, root=LEARNERS))
