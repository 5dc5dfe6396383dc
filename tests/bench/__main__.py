"""`[mpirun -n RANKS] python -m tests.bench WHAT`: benches of the project itself; the rest is as with `mpisgd bench`.

`python -m tests.bench all` runs those of a machine (`make bench`), `mpisgd bench` first, and launches the ranks of each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mpisgd.base.checks import require
from mpisgd.base.errors import EXIT_OK, EXIT_USAGE, ConfigError
from mpisgd.bench.parts.cases import CASES, USUAL
from mpisgd.cli import bench as of_users
from mpisgd.cli.bench import Bench, check
from mpisgd.comm.mpi.launch import mpirun
from tests import run
from tests.bench import nodes


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


BENCHES = {
    "peers": Bench(
        1,
        "images/s of hardsync, over other parameter servers and allreduces, where installed",
        ("repetitions", "cases", "peer_python"),
    ),
    "oversubscribed": Bench(31, "images/s of many more ranks than cores, over one loop on one core", ("repetitions",), least=3),
    "log": Bench(3, "images/s of hardsync with the run log, over without", ("repetitions", "cases")),
    "faults": Bench(
        1,
        "images/s of hardsync with checkpoints, watchdog and fault tolerance, over without",
        ("repetitions", "every_updates"),
    ),
    "near": Bench(
        3,
        "images/s of hardsync that keeps states on two nodes, over without, AlexNet's shapes",
        ("repetitions", "every_updates"),
    ),
    "state": Bench(2, "CPU seconds of a state of AlexNet's shapes, on its own node and on a partner's", ("repetitions",)),
    "settings": Bench(1, "images/s with other ways to wait, and to copy, over those that are usual", ("repetitions",)),
    "beside": Bench(
        1, "cycles and images/s of this checkout over another one's, each by its own benches", ("repetitions", "checkout")
    ),
    "clipping": Bench(1, "seconds of an update whose shards agree on the norm of an average, over one without", ("repetitions",)),
    "nodes": Bench(
        1,
        "seconds of a round over several nodes' links, beside DDP and the limit (as root)",
        ("repetitions", "cases", "nodes", "gbit", "exchanges", "hosts"),
    ),
    "start": Bench(1, "seconds from mpirun to the first update, beside launches that do less", ("repetitions", "ranks")),
    "crowd": Bench(1, "messages and bytes of each of thousands of ranks at a job's start and end", ("ranks",)),
    "memory": Bench(1, "memory of ranks that train on a file of 6 GB, and a sample's cost by how files are stored", ("nbytes",)),
    "pieces": Bench(1, "memory of ranks that train a model of 1.5 GB of which each has a piece", ("model_nbytes",)),
    "vectors": Bench(1, "vectors of the model's size that each kind of rank keeps, by way, learners and shards", ()),
    "stages": Bench(
        1, "images/s of two stages on two cores over one rank on one; neighbours' messages over MPI's", ("repetitions",)
    ),
}
ALL = ("oversubscribed", "log", "faults", "settings", "clipping", "start", "memory", "pieces", "stages")
"""Benches of `make bench`, after those of `mpisgd bench`."""


def every(words: list[str]) -> int:
    """Run each bench that measures a machine, up to one that fails."""
    ours = {name: BENCHES[name] for name in ALL}
    for module, benches in ((["mpisgd", "bench"], of_users.BENCHES), (["tests.bench"], ours)):
        for name, bench in benches.items():
            launcher = mpirun(bench.ranks) if bench.ranks > 1 else []
            if status := run.run([*launcher, sys.executable, "-m", *module, name, *words]):
                return status
    return EXIT_OK


def main(argv: list[str]) -> int:
    """Run one bench, or `all`, and say what is refused."""
    try:
        if argv[:1] == ["all"]:
            return every(argv[1:])
        return of_users.run(argv, "python -m tests.bench", "tests.bench", BENCHES, Options)
    except ConfigError as error:
        print(f"bench: ConfigError: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
