"""`mpirun -n RANKS mpisgd bench WHAT`: measure this machine; ratios side by side in one run, one JSON file per bench."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from mpisgd.errors import EXIT_OK, EXIT_USAGE, ConfigError, nearest
from mpisgd.guard import failing_fast, launched_rank, launched_size

BENCHES = {
    "wire": (2, "push+pull cycle with the update, over raw Send+Recv and the least memory traffic of the update"),
    "train": (3, "images/s of hardsync, over PyTorch DDP with gloo and over loops that do not communicate"),
    "log": (3, "images/s of hardsync with the run log, over without"),
    "checkpoint": (3, "images/s of hardsync with checkpoints, over without; the seconds that one stands in the loop"),
    "faults": (1, "images/s of hardsync with checkpoints, watchdog and fault tolerance, over without; starts its own ranks"),
    "start": (1, "seconds from mpirun to the first update, beside launches that do less; starts its own ranks"),
    "virtual": (1, "gradients/s of the virtual cluster, from 30 to 100,000 learners"),
}


@dataclass(frozen=True)
class Options:
    """What all benches take."""

    repetitions: int = 5
    """Interleaved repetitions; median and range are told."""
    sizes: tuple[int, ...] = (350_000, 4_000_000, 44_000_000, 289_000_000)
    """wire: bytes of the gradient."""
    every_updates: int = 50
    """checkpoint, faults: clocks from one to the next."""
    ranks: tuple[int, ...] = (2, 8, 32)
    """start: how many are started."""
    out: str = "results/bench"
    """Directory for the JSON file, <out>/<what>.json."""


def usage() -> str:
    launch = {name: f"mpirun -n {ranks} " if ranks > 1 else "" for name, (ranks, _) in BENCHES.items()}
    lines = [f"  {launch[name]:<12}mpisgd bench {name:<10} {text}" for name, (_, text) in BENCHES.items()]
    return "\n".join(["usage: [mpirun -n RANKS] mpisgd bench WHAT [options]", "", *lines])


def main(argv: list[str]) -> int:
    """Run one bench on the ranks of this job; rank 0 prints and writes.

    Raises ConfigError where there are too few ranks or no such bench.
    """
    if not argv or argv[0] in ("-h", "--help"):
        if launched_rank() == 0:
            print(usage(), file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_USAGE
    what, *rest = argv
    if what not in BENCHES:
        raise ConfigError(f"bench {what!r} is unknown{nearest(what, BENCHES)}")
    options = tyro.cli(Options, args=rest, prog=f"mpisgd bench {what}", console_outputs=launched_rank() == 0)
    needed = BENCHES[what][0]
    if needed == 1:
        if launched_size() > 1:
            raise ConfigError(f"bench {what}: found {launched_size()} processes, expected 1: start it without mpirun")
        _tell(what, options, *_MEASURES[what](options), mpi="")
        return EXIT_OK
    from mpisgd.mpi import MPI

    comm = MPI.COMM_WORLD
    if comm.Get_size() != needed:
        raise ConfigError(f"bench {what}: found {comm.Get_size()} rank(s), expected {needed}: mpirun -n {needed} ...")
    with failing_fast(comm, lambda: f"bench {what}"):
        rows, lines = _MEASURES[what](options)
    if comm.Get_rank() == 0:
        _tell(what, options, rows, lines, mpi=MPI.Get_library_version().split("\n")[0].strip("\0 "))
    return EXIT_OK


def _tell(what: str, options: Options, rows: list[dict[str, Any]], lines: list[str], mpi: str) -> None:
    from mpisgd.bench.machine import describe, write

    print("\n".join(lines))
    write(Path(options.out) / f"{what}.json", {"bench": what, "machine": describe(BENCHES[what][0], mpi), "rows": rows})


def _told(value: dict[str, float], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"


Measured = tuple[list[dict[str, Any]], list[str]]


def _wire(options: Options) -> Measured:
    from mpisgd.bench import wire
    from mpisgd.mpi import MPI

    rows = wire.measure(MPI.COMM_WORLD, options.sizes, options.repetitions)
    lines = [f"{'bytes':>12} {'raw':>11} {'update':>11} {'in place':>11} {'cycle':>11}   cycle/(raw+update)    cycle/in place"]
    for row in rows:
        ms = " ".join(f"{1e3 * row[key]['median']:8.3f} ms" for key in ("raw_s", "update_s", "in_place_s", "cycle_s"))
        lines.append(f"{row['nbytes']:12,} {ms}   {_told(row['over_stream'])}   {_told(row['over_in_place'])}")
    return rows, lines


def _train(options: Options) -> Measured:
    from mpisgd.bench import train
    from mpisgd.mpi import MPI

    rows = train.measure(MPI.COMM_WORLD, options.repetitions)
    lines = []
    for row in rows:
        rates = ", ".join(f"{name} {value['median']:.0f}" for name, value in row["images_per_s"].items())
        lines.append(f"{row['case']}: images/s {rates}")
        lines.append(f"  hardsync / best DDP {_told(row['hardsync_over_ddp'])}, / loops {_told(row['hardsync_over_loops'])}")
    return rows, lines


def _log(options: Options) -> Measured:
    from mpisgd.bench import train
    from mpisgd.mpi import MPI

    rows = train.measure_log(MPI.COMM_WORLD, options.repetitions)
    return rows, [f"{row['case']}: log on / off {_told(row['on_over_off'], 3)}" for row in rows]


def _checkpoint(options: Options) -> Measured:
    from mpisgd.bench import on_off
    from mpisgd.mpi import MPI

    rows = on_off.measure_checkpoints(MPI.COMM_WORLD, options.repetitions, options.every_updates)
    return rows, [line for row in rows for line in on_off.lines_of(row)]


def _faults(options: Options) -> Measured:
    from mpisgd.bench import faults, on_off

    rows = faults.measure(options.repetitions, options.every_updates)
    return rows, [line for row in rows for line in on_off.lines_of(row)]


def _start(options: Options) -> Measured:
    from mpisgd.bench import start

    rows = start.measure(options.repetitions, options.ranks)
    names = ("python", "mpi", "torch", "first_update")
    lines = [f"{'ranks':>5} {'python':>8} {'+ MPI':>8} {'+ torch':>8} {'first update':>13}   over + torch"]
    for row in rows:
        told = [f"{row['seconds'][name]['median']:{13 if name == 'first_update' else 8}.2f}" for name in names]
        lines.append(f"{row['ranks']:5} {' '.join(told)}   {_told(row['first_update_over_torch'])}")
    return rows, lines


def _virtual(options: Options) -> Measured:
    from mpisgd.bench import virtual

    rows = virtual.measure(options.repetitions)
    lines = [f"virtual cluster, {'compiled' if rows[0]['compiled'] else 'interpreted'}"]
    lines += [f"{'learners':>9} {'gradients':>10} {'log':>4} {'real':>9} {'gradients/s':>32} {'peak':>9}"]
    for row in rows:
        log, peak = "on" if row["log"] else "off", f"{row['peak_nbytes'] / 1e9:.2f} GB"
        real, rate = f"{row['real_s']['median']:.2f} s", _told(row["gradients_per_s"], 0)
        lines.append(f"{row['learners']:9,} {row['gradients']:10,} {log:>4} {real:>9} {rate:>32} {peak:>9}")
    batched = virtual.measure_batched(options.repetitions)
    lines += [f"gradients of 30 learners in batches, over one by one, {row['model']}: {_told(row['speed_up'])}" for row in batched]
    return rows + batched, lines


_MEASURES: dict[str, Callable[[Options], Measured]] = {
    "wire": _wire,
    "train": _train,
    "log": _log,
    "checkpoint": _checkpoint,
    "faults": _faults,
    "start": _start,
    "virtual": _virtual,
}
