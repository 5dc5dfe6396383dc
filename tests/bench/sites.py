"""Where the bench of several nodes runs: namespaces of this machine, whose links are shaped, or hosts that mpirun reaches."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi.launch import environment, mpirun, version
from tests import travel
from tests.nodes.cluster import Cluster
from tests.nodes.job import Job

PATIENCE_S = 600
_PORT = 29500
_DDP = Path(__file__).with_name("peers") / "ddp.py"
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_FORWARDED = ("OMP_NUM_THREADS", "PYTHONPATH", "GLOO_SOCKET_IFNAME", "MPISGD_WAIT", travel.VARIABLE)
"""Open MPI's launcher starts ranks elsewhere without them."""


class Site(ABC):
    """Nodes, whose ranks are started one node's after the other's."""

    directory: str | None = None
    """All nodes see it; None: any."""
    shapes = False
    """Whether links have the rate that `shape` says."""

    @abstractmethod
    def shape(self, gbit: float) -> None:
        """Let all links have this rate, if that can be."""

    @abstractmethod
    def run(
        self, spread: Sequence[int], words: Sequence[str], options: Sequence[str] = (), module: str = "mpisgd", **env: str
    ) -> str:
        """`mpirun [options] python -m module train words...` with so many ranks on each node; what it said. Raises ConfigError."""

    @abstractmethod
    def ddp(self, places: int, case: str, numbers: Sequence[int], hook: str) -> str:
        """`peers/ddp.py` with these numbers (mu, updates) in so many places, one on each node; what all said."""


class Boxes(Site):
    shapes = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def shape(self, gbit: float) -> None:
        for node in self._cluster.nodes:
            self._cluster.shape(node, f"{gbit * 1000:.0f}mbit")

    def run(
        self, spread: Sequence[int], words: Sequence[str], options: Sequence[str] = (), module: str = "mpisgd", **env: str
    ) -> str:
        job = Job(self._cluster, spread, words, options, module=module, **env)
        if job.end(PATIENCE_S) != 0:
            raise ConfigError(job.text)
        return job.text

    def ddp(self, places: int, case: str, numbers: Sequence[int], hook: str) -> str:
        cluster, first = self._cluster, f"{self._cluster.address(0)}:{_PORT}"
        env = environment() | _ONE_THREAD | {"GLOO_SOCKET_IFNAME": "eth0"}
        processes = [
            subprocess.Popen(
                [*cluster.inside(node), sys.executable, *_words_of_ddp(case, numbers, str(node), places, first, hook)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
            )
            for node in range(places)
        ]
        try:
            return "".join(process.communicate(timeout=PATIENCE_S)[0] for process in processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


class Hosts(Site):
    """Hosts by name, as `mpirun --host` takes them; runs lie below the current directory, which all of them see."""

    directory = "."

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def shape(self, gbit: float) -> None:
        """Links are as they are."""

    def run(
        self, spread: Sequence[int], words: Sequence[str], options: Sequence[str] = (), module: str = "mpisgd", **env: str
    ) -> str:
        return self._launch(spread, ["-m", module, "train", *words], options, **env)

    def ddp(self, places: int, case: str, numbers: Sequence[int], hook: str) -> str:
        return self._launch([1] * places, _words_of_ddp(case, numbers, "-", places, f"{self._names[0]}:{_PORT}", hook), ())

    def _launch(self, spread: Sequence[int], words: Sequence[str], options: Sequence[str], **more: str) -> str:
        launcher, *rest = mpirun(sum(spread))
        hosts = ",".join(f"{name}:{count}" for name, count in zip(self._names, spread, strict=False) if count)
        env = environment() | _ONE_THREAD | more
        where = ["-hosts", hosts]
        if "Open MPI" in version():
            where = ["--host", hosts, *(word for name in _FORWARDED if name in env for word in ("-x", name))]
        command = [launcher, *options, *where, *rest, sys.executable, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{' '.join(command)}: not at its end after {PATIENCE_S} s") from error
        if done.returncode != 0:
            raise ConfigError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def _words_of_ddp(case: str, numbers: Sequence[int], place: str, places: int, first: str, hook: str) -> list[str]:
    return [str(_DDP), case, *map(str, numbers), place, str(places), first, *([hook] if hook else [])]
