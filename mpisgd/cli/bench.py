"""`mpirun -n RANKS mpisgd bench WHAT`: measure this machine; ratios side by side in one run, one JSON file per bench."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from mpisgd.base.checks import require
from mpisgd.base.errors import EXIT_OK, EXIT_USAGE, ConfigError, nearest
from mpisgd.bench.parts.cases import CASES, USUAL, WAYS, Device
from mpisgd.comm.mpi.launch import version, words
from mpisgd.config import OPTIMIZERS
from mpisgd.liveness.guard import failing_fast, launched_rank, launched_size


@dataclass(frozen=True)
class Bench:
    """`ranks` it is started with; 1: one process, which starts its own. `least`: others are possible, so many at least."""

    ranks: int
    about: str
    least: int = 0

    def fits(self, ranks: int) -> bool:
        return ranks == self.ranks or (self.least > 0 and ranks >= self.least)


BENCHES = {
    "wire": Bench(4, "push+pull cycle with the update, over raw Send+Recv and the least memory traffic of the update", least=2),
    "train": Bench(3, "images/s of every protocol, over PyTorch DDP with gloo and over loops that do not communicate"),
    "peers": Bench(1, "images/s of hardsync, over other parameter servers and allreduces, where installed; starts its own ranks"),
    "oversubscribed": Bench(31, "images/s of many more ranks than cores, over one loop on one core", least=3),
    "log": Bench(3, "images/s of hardsync with the run log, over without"),
    "checkpoint": Bench(3, "images/s of hardsync with checkpoints, over without; the seconds that one stands in the loop"),
    "faults": Bench(1, "images/s of hardsync with checkpoints, watchdog and fault tolerance, over without; starts its own ranks"),
    "settings": Bench(1, "images/s with other ways to wait, and to copy, over those that are usual; starts its own ranks"),
    "scale": Bench(1, "images/s over the number of learners, and what the virtual cluster predicts; starts its own ranks"),
    "start": Bench(1, "seconds from mpirun to the first update, beside launches that do less; starts its own ranks"),
    "virtual": Bench(1, "gradients/s of the virtual cluster, from 30 to 100,000 learners"),
}


ALL = "all"


@dataclass(frozen=True)
class Options:
    """Options of all benches."""

    repetitions: int = 5
    """Interleaved repetitions; median and range are told."""
    sizes: tuple[int, ...] = (350_000, 4_000_000, 44_000_000, 289_000_000)
    """wire: bytes of the gradient."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """wire: on the shards; the first one with one and two learners and shards."""
    cases: tuple[str, ...] = USUAL
    """train, peers, log: model and mini-batch size; train also cnn-4, alexnet-16."""
    ways: tuple[str, ...] = ("hardsync", "hardsync-node", "allreduce", "allreduce-node", "softsync")
    """train: protocols; also async, ssp, downpour, versioned, backup, timeout, hardsync-bfloat16 (--push-format), or all."""
    device: Device = "cpu"
    """train: what learners compute on; GPUs are taken in turn."""
    shard_device: Device = "cpu"
    """train: what shards sum and update on."""
    peer_python: str = sys.executable
    """peers: the Python of an environment that has them, TensorFlow, say; default: this one."""
    every_updates: int = 50
    """checkpoint, faults: clocks from one to the next."""
    ranks: tuple[int, ...] = (2, 8, 32)
    """start: how many are started."""
    learners: tuple[int, ...] = ()
    """scale: how many; default: 1, 2, 4, ... up to the cores."""
    out: str = "results/bench"
    """Directory for the JSON file, <out>/<what>.json."""

    def __post_init__(self) -> None:
        require(self.repetitions >= 1, "repetitions", self.repetitions, "a number >= 1")
        require(all(size >= 4 for size in self.sizes), "sizes", self.sizes, "bytes of at least one float32")
        _check("optimizers", self.optimizers, OPTIMIZERS)
        _check("cases", self.cases, CASES)
        _check("ways", self.ways, (*WAYS, ALL))


def _check(field: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names or ("none",):
        require(name in known, field, name, f"some of {', '.join(known)}{nearest(name, known)}")


def usage() -> str:
    launch = {name: f"{words(bench.ranks)} " if bench.ranks > 1 else "" for name, bench in BENCHES.items()}
    width = max(map(len, launch.values()))
    lines = [f"  {launch[name]:<{width}}mpisgd bench {name:<14} {bench.about}" for name, bench in BENCHES.items()]
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
    bench = BENCHES[what]
    if bench.ranks == 1:
        if launched_size() > 1:
            raise ConfigError(f"bench {what}: found {launched_size()} processes, expected 1: start it without mpirun")
        _tell(what, options, *_MEASURES[what](options), mpi=version(), ranks=1)
        return EXIT_OK
    from mpisgd.comm.mpi.library import MPI

    comm = MPI.COMM_WORLD
    if not bench.fits(comm.Get_size()):
        expected = f"expected {bench.ranks}{f', or at least {bench.least}' if bench.least else ''}: {words(bench.ranks)} ..."
        raise ConfigError(f"bench {what}: found {comm.Get_size()} rank(s), {expected}")
    with failing_fast(comm, lambda: f"bench {what}"):
        rows, lines = _MEASURES[what](options)
    if comm.Get_rank() == 0:
        mpi = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        _tell(what, options, rows, lines, mpi=mpi, ranks=comm.Get_size())
    return EXIT_OK


def _tell(what: str, options: Options, rows: list[dict[str, Any]], lines: list[str], *, mpi: str, ranks: int) -> None:
    from mpisgd.bench.parts.machine import describe, write

    print("\n".join(lines))
    write(Path(options.out) / f"{what}.json", {"bench": what, "machine": describe(ranks, mpi), "rows": rows})


Measured = tuple[list[dict[str, Any]], list[str]]


def _wire(options: Options) -> Measured:
    from mpisgd.bench import wire
    from mpisgd.comm.mpi.library import MPI

    rows = wire.measure(MPI.COMM_WORLD, options.sizes, options.repetitions, options.optimizers)
    return rows, wire.lines_of(rows)


def _train(options: Options) -> Measured:
    from mpisgd.bench import train
    from mpisgd.comm.mpi.library import MPI

    ways = tuple(WAYS) if ALL in options.ways else options.ways
    rows = train.measure(MPI.COMM_WORLD, options.repetitions, options.cases, ways, options.device, options.shard_device)
    return rows, train.lines_of(rows)


def _peers(options: Options) -> Measured:
    from mpisgd.bench import peers

    rows = peers.measure(options.repetitions, options.cases, options.peer_python)
    return rows, peers.lines_of(rows)


def _oversubscribed(options: Options) -> Measured:
    from mpisgd.bench import oversubscribed
    from mpisgd.comm.mpi.library import MPI

    rows = oversubscribed.measure(MPI.COMM_WORLD, options.repetitions)
    return rows, oversubscribed.lines_of(rows)


def _log(options: Options) -> Measured:
    from mpisgd.bench import log
    from mpisgd.bench.parts.spread import told
    from mpisgd.comm.mpi.library import MPI

    rows = log.measure(MPI.COMM_WORLD, options.repetitions, options.cases)
    return rows, [f"{row['case']}: log on / off {told(row['on_over_off'], 3)}" for row in rows]


def _checkpoint(options: Options) -> Measured:
    from mpisgd.bench import on_off
    from mpisgd.comm.mpi.library import MPI

    rows = on_off.measure_checkpoints(MPI.COMM_WORLD, options.repetitions, options.every_updates)
    return rows, on_off.lines_of(rows)


def _faults(options: Options) -> Measured:
    from mpisgd.bench import faults, on_off

    rows = faults.measure(options.repetitions, options.every_updates)
    return rows, on_off.lines_of(rows)


def _settings(options: Options) -> Measured:
    from mpisgd.bench import settings

    rows = settings.measure(options.repetitions)
    return rows, settings.lines_of(rows)


def _scale(options: Options) -> Measured:
    from mpisgd.bench import scale

    rows = scale.measure(options.repetitions, options.learners or scale.up_to_the_cores())
    return rows, scale.lines_of(rows)


def _start(options: Options) -> Measured:
    from mpisgd.bench import start

    rows = start.measure(options.repetitions, options.ranks)
    return rows, start.lines_of(rows)


def _virtual(options: Options) -> Measured:
    from mpisgd.bench import virtual

    rows, batched = virtual.measure(options.repetitions), virtual.measure_batched(options.repetitions)
    return rows + batched, virtual.lines_of(rows, batched)


_MEASURES: dict[str, Callable[[Options], Measured]] = {
    "wire": _wire,
    "train": _train,
    "peers": _peers,
    "oversubscribed": _oversubscribed,
    "log": _log,
    "checkpoint": _checkpoint,
    "faults": _faults,
    "settings": _settings,
    "scale": _scale,
    "start": _start,
    "virtual": _virtual,
}
