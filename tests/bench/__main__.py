"""`[mpirun -n RANKS] python -m tests.bench WHAT`: benches of the project itself; the rest is as with `mpisgd bench`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mpisgd.base.checks import require
from mpisgd.base.errors import EXIT_USAGE, ConfigError
from mpisgd.bench import checkpoint
from mpisgd.bench.parts.cases import CASES, USUAL
from mpisgd.bench.parts.spread import show
from mpisgd.cli.bench import Bench, Measured, check, run
from tests.bench import beside, clipping, crowd, faults, memory, nodes, peers, pieces, settings, stages, start, vectors


@dataclass(frozen=True)
class Options:
    """Options of all benches."""

    repetitions: int = 5
    """Interleaved repetitions; median and range are told."""
    cases: tuple[str, ...] = USUAL
    """peers, log, nodes: model and mini-batch size."""
    peer_python: str = sys.executable
    """peers: the Python of an environment that has them, TensorFlow, say; default: this one."""
    every_updates: int = 50
    """faults, near: clocks from one checkpoint to the next."""
    ranks: tuple[int, ...] = (2, 8, 32)
    """start, crowd: how many are started."""
    nbytes: int = 6_000_000_000
    """memory: of the images in the file."""
    model_nbytes: int = 1_500_000_000
    """pieces: of the model's parameters."""
    exchanges: tuple[str, ...] = tuple(nodes.WAYS)
    """nodes: what is compared with DDP."""
    nodes: tuple[int, ...] = (2, 4)
    """nodes: how many there are."""
    gbit: tuple[float, ...] = (1.0, 10.0)
    """nodes: rate of each link, Gbit/s in each direction."""
    hosts: tuple[str, ...] = ()
    """nodes: those of a cluster, as mpirun --host takes them, in the place of namespaces; one more for a shard apart."""
    checkout: str = ""
    """beside: where the project is checked out at another commit."""
    out: str = "results/bench"
    """Directory for the JSON file, <out>/<what>.json."""

    def __post_init__(self) -> None:
        require(self.repetitions >= 1, "repetitions", self.repetitions, "a number >= 1")
        require(self.nbytes >= 2**20, "nbytes", self.nbytes, "a MiB at least")
        check("cases", self.cases, {**CASES, **nodes.NETWORKS})
        check("exchanges", self.exchanges, nodes.WAYS)


def _log(options: Options) -> Measured:
    from mpisgd.comm.mpi.library import MPI
    from tests.bench import log

    rows = log.measure(MPI.COMM_WORLD, options.repetitions, options.cases)
    return rows, [f"{row['case']}: log on / off {show(row['on_over_off'], 3)}" for row in rows]


def _oversubscribed(options: Options) -> Measured:
    from mpisgd.comm.mpi.library import MPI
    from tests.bench import oversubscribed

    rows = oversubscribed.measure(MPI.COMM_WORLD, options.repetitions)
    return rows, oversubscribed.lines_of(rows)


def _peers(options: Options) -> Measured:
    rows = peers.measure(options.repetitions, options.cases, options.peer_python)
    return rows, peers.lines_of(rows)


def _faults(options: Options) -> Measured:
    rows = faults.measure(options.repetitions, options.every_updates)
    return rows, checkpoint.lines_of(rows)


def _near(options: Options) -> Measured:
    from mpisgd.comm.mpi.library import MPI
    from tests.bench import near

    rows = near.measure(MPI.COMM_WORLD, options.repetitions, options.every_updates)
    return rows, near.lines_of(rows)


def _state(options: Options) -> Measured:
    from mpisgd.comm.mpi.library import MPI
    from tests.bench import state

    rows = state.measure(MPI.COMM_WORLD, options.repetitions)
    return rows, state.lines_of(rows)


def _settings(options: Options) -> Measured:
    rows = settings.measure(options.repetitions)
    return rows, settings.lines_of(rows)


def _beside(options: Options) -> Measured:
    rows = beside.measure(options.repetitions, options.checkout)
    return rows, beside.lines_of(rows)


def _clipping(options: Options) -> Measured:
    rows = clipping.measure(options.repetitions)
    return rows, clipping.lines_of(rows)


def _start(options: Options) -> Measured:
    rows = start.measure(options.repetitions, options.ranks)
    return rows, start.lines_of(rows)


def _crowd(options: Options) -> Measured:
    rows = crowd.measure(options.ranks)
    return rows, crowd.lines_of(rows)


def _memory(options: Options) -> Measured:
    rows = memory.measure(options.nbytes)
    return rows, memory.lines_of(rows)


def _pieces(options: Options) -> Measured:
    rows = pieces.measure(options.model_nbytes)
    return rows, pieces.lines_of(rows)


def _vectors(options: Options) -> Measured:
    rows = vectors.measure()
    return rows, vectors.lines_of(rows)


def _stages(options: Options) -> Measured:
    rows = stages.measure(options.repetitions)
    return rows, stages.lines_of(rows)


def _nodes(options: Options) -> Measured:
    rows = nodes.measure(options.repetitions, options.cases, options.nodes, options.gbit, options.exchanges, options.hosts)
    return rows, nodes.lines_of(rows)


BENCHES = {
    "peers": Bench(1, "images/s of hardsync, over other parameter servers and allreduces, where installed", _peers),
    "oversubscribed": Bench(31, "images/s of many more ranks than cores, over one loop on one core", _oversubscribed, least=3),
    "log": Bench(3, "images/s of hardsync with the run log, over without", _log),
    "faults": Bench(1, "images/s of hardsync with checkpoints, watchdog and fault tolerance, over without", _faults),
    "near": Bench(3, "images/s of hardsync that keeps states on two nodes, over without, AlexNet's shapes", _near),
    "state": Bench(2, "CPU seconds of a state of AlexNet's shapes, on its own node and on a partner's", _state),
    "settings": Bench(1, "images/s with other ways to wait, and to copy, over those that are usual", _settings),
    "beside": Bench(1, "cycles and images/s of this checkout over another one's, each by its own benches", _beside),
    "clipping": Bench(1, "seconds of an update whose shards agree on the norm of an average, over one without", _clipping),
    "nodes": Bench(1, "seconds of a round over several nodes' links, beside DDP and the limit (as root)", _nodes),
    "start": Bench(1, "seconds from mpirun to the first update, beside launches that do less", _start),
    "crowd": Bench(1, "messages and bytes of each of thousands of ranks at a job's start and end", _crowd),
    "memory": Bench(1, "memory of ranks that train on a file of 6 GB, and a sample's cost by how files are stored", _memory),
    "pieces": Bench(1, "memory of ranks that train a model of 1.5 GB of which each has a piece", _pieces),
    "vectors": Bench(1, "vectors of the model's size that each kind of rank keeps, by way, learners and shards", _vectors),
    "stages": Bench(1, "images/s of two stages on two cores over one rank on one; neighbours' messages over MPI's", _stages),
}


def main(argv: list[str]) -> int:
    """Run one bench, and say what is refused."""
    try:
        return run(argv, "python -m tests.bench", BENCHES, Options)
    except ConfigError as error:
        print(f"bench: ConfigError: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
