"""`mpirun -n RANKS mpisgd bench WHAT`: ratios, side by side; a JSON file per bench."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import isgenerator
from pathlib import Path
from typing import Any

import tyro

from mpisgd.base.checks import require
from mpisgd.base.errors import EXIT_OK, EXIT_USAGE, ConfigError, nearest
from mpisgd.bench.parts.cases import ALL, CASES, USUAL, WAYS, Device
from mpisgd.comm.mpi.launch import version, words
from mpisgd.config import OPTIMIZERS
from mpisgd.liveness.guard import failing_fast, launched_rank, launched_size


@dataclass(frozen=True)
class Options:
    """Options of all benches."""

    repetitions: int = 5
    """Interleaved repetitions, for median and range."""
    sizes: tuple[int, ...] = (350_000, 4_000_000, 44_000_000, 289_000_000)
    """wire: bytes of the gradient."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """wire: on the shards; the first with one and two learners and shards."""
    cases: tuple[str, ...] = USUAL
    """train: model and mini-batch size; also cnn-4, mlp-1024, alexnet-16."""
    ways: tuple[str, ...] = ("hardsync", "hardsync-node", "allreduce", "softsync")
    """train: protocols; also async, ssp, downpour, versioned, backup, timeout, hardsync-bfloat16 (--push-format), or all; and
    sandblaster, on four ranks."""
    device: Device = "cpu"
    """train: learners' device; GPUs are taken in turn."""
    shard_device: Device = "cpu"
    """train: shards' device."""
    every_updates: int = 50
    """checkpoint: updates between checkpoints."""
    learners: tuple[int, ...] = ()
    """scale: numbers of learners; default: 1, 2, 4, ... up to the cores."""
    out: str = "results/bench"
    """Directory of the JSON file, <out>/<what>.json."""

    def __post_init__(self) -> None:
        require(self.repetitions >= 1, "repetitions", self.repetitions, "a number >= 1")
        require(all(size >= 4 for size in self.sizes), "sizes", self.sizes, "bytes of at least one float32")
        check("optimizers", self.optimizers, OPTIMIZERS)
        check("cases", self.cases, CASES)
        check("ways", self.ways, (*WAYS, ALL))


def check(field: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise ConfigError unless there are names, all known."""
    for name in names or ("none",):
        require(name in known, field, name, f"some of {', '.join(known)}{nearest(name, known)}")


@dataclass(frozen=True)
class Bench:
    """A module: `measure([communicator,] ...)` returns JSON rows, `lines_of(rows)` lines.

    `ranks`: 1 = a process that starts its own; `takes`: options measured with; `least`: fewest others possible, 0 = none.
    """

    ranks: int
    about: str
    takes: tuple[str, ...]
    least: int = 0

    def fits(self, ranks: int) -> bool:
        return ranks == self.ranks or (self.least > 0 and ranks >= self.least)


BENCHES = {
    "wire": Bench(
        4,
        "push+pull cycle with the update, over raw Send+Recv and the least memory traffic of the update",
        ("sizes", "repetitions", "optimizers"),
        least=2,
    ),
    "train": Bench(
        3,
        "images/s of every protocol, over PyTorch DDP with gloo and over loops that do not communicate",
        ("repetitions", "cases", "ways", "device", "shard_device"),
        least=4,
    ),
    "checkpoint": Bench(
        3,
        "images/s of hardsync with checkpoints, over without; the loop's seconds per checkpoint",
        ("repetitions", "every_updates"),
    ),
    "scale": Bench(
        1,
        "images/s over the number of learners, and the virtual cluster's prediction; starts ranks itself",
        ("repetitions", "learners"),
    ),
    "virtual": Bench(1, "gradients/s of the virtual cluster, from 30 to 100,000 learners", ("repetitions",)),
}


def main(argv: list[str]) -> int:
    return run(argv, "mpisgd bench", "mpisgd.bench", BENCHES, Options)


def run(argv: list[str], prog: str, package: str, benches: Mapping[str, Bench], options_type: type[Any]) -> int:
    """Run a bench on this job's ranks; rank 0 prints and writes. Raises ConfigError: ranks, or no bench."""
    if not argv or argv[0] in ("-h", "--help"):
        if launched_rank() == 0:
            print(usage(prog, benches), file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_USAGE
    what, *rest = argv
    if what not in benches:
        raise ConfigError(f"bench {what!r} is unknown{nearest(what, benches)}")
    options = tyro.cli(options_type, args=rest, prog=f"{prog} {what}", console_outputs=launched_rank() == 0)
    bench = benches[what]
    taken = [getattr(options, name) for name in bench.takes]
    if bench.ranks == 1:
        if launched_size() > 1:
            raise ConfigError(f"bench {what}: found {launched_size()} processes, expected 1: leave mpirun out")
        page: Any = import_module(f"{package}.{what}")
        _tell(what, options.out, page.measure(*taken), page.lines_of, mpi=version(), ranks=1)
        return EXIT_OK
    from mpisgd.comm.mpi.library import MPI

    comm = MPI.COMM_WORLD
    if not bench.fits(comm.Get_size()):
        expected = f"expected {bench.ranks}{f', or at least {bench.least}' if bench.least else ''}: {words(bench.ranks)} ..."
        raise ConfigError(f"bench {what}: found {comm.Get_size()} rank(s), {expected}")
    with failing_fast(comm, lambda: f"bench {what}"):
        page, mpi = import_module(f"{package}.{what}"), MPI.Get_library_version().split("\n")[0].strip("\0 ")
        _tell(
            what,
            options.out,
            page.measure(comm, *taken),
            page.lines_of,
            mpi=mpi,
            ranks=comm.Get_size(),
            speaks=comm.Get_rank() == 0,
        )
    return EXIT_OK


def usage(prog: str, benches: Mapping[str, Bench]) -> str:
    launch = {name: f"{words(bench.ranks)} " if bench.ranks > 1 else "" for name, bench in benches.items()}
    width = max(map(len, launch.values()))
    lines = [f"  {launch[name]:<{width}}{prog} {name:<14} {bench.about}" for name, bench in benches.items()]
    return "\n".join([f"usage: [mpirun -n RANKS] {prog} WHAT [options]", "", *lines])


def _tell(
    what: str,
    out: str,
    rows: Iterable[dict[str, Any]],
    lines_of: Callable[[list[dict[str, Any]]], list[str]],
    *,
    mpi: str,
    ranks: int,
    speaks: bool = True,
) -> None:
    from mpisgd.bench.parts.measured import describe, write

    kept, said = list[dict[str, Any]](), 0
    singly = isgenerator(rows)
    for found in ([row] for row in rows) if singly else [rows]:
        kept += found
        if speaks:
            lines = lines_of(kept)
            print("\n".join(lines[said:]), flush=True)
            said = len(lines)
            write(Path(out) / f"{what}.json", {"bench": what, "machine": describe(ranks, mpi), "rows": kept})
