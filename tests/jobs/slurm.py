"""A real SLURM on this machine, for as long as the tests last: one controller and virtual nodes, started from Debian's packages.

Each node is a slurmd in namespaces of its own, so that its ranks see a host name and shared memory of their own, and so that all
of a node's processes can be found, and killed at once, as a power cut would. Nothing is installed here, nothing outside the
directory is written, and SLURM_CONF names this cluster, so that one which the machine may have is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "unshare", "hostname")
_SBIN = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"

_CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for as long as its old credential lasts, by default two minutes.
AuthInfo=socket={directory}/munge/socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool-%n
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdLogFile={directory}/slurmd-%n.log
# Several nodes on one machine: nobody may own its cgroups or pin its cores.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
# The plugin for PMIx makes directories there, each node its own.
TmpFS={directory}/tmp-%n
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdTimeout={node_timeout_s}
KillWait=2
MessageTimeout=10
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def missing() -> str:
    """Why no SLURM can be started here; empty where one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_SBIN) is None]
    if absent:
        return f"no SLURM on this machine: {', '.join(absent)} not found (Debian: apt-get install slurm-wlm munge)"
    return no_hosts()


def apart(host: str) -> list[str]:
    """What runs a shell command as on another host: with a name of its own, and shared memory of its own.

    (MPICH calls its segments after the job: two nodes with one /dev/shm take each other's.)
    """
    setup = f'mount -t tmpfs none /dev/shm && hostname {host} && eval "$0"'
    return ["unshare", "--uts", "--mount", "bash", "-c", setup]


def no_hosts() -> str:
    """Why no process can have a host name of its own here; empty where one can."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return "processes with host names of their own, as of several hosts, need unshare (util-linux), and root"
    tried = subprocess.run([*apart("n1"), "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"there can be no namespaces here: {tried.stderr.strip()}"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Slurm:
    """A running cluster."""

    directory: Path
    nodes: tuple[str, ...]
    cpus: int
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.directory / "slurm.conf"), "PATH": _SBIN}

    def call(self, *words: str, **more: Any) -> str:
        """Run a client; what it printed."""
        done: subprocess.CompletedProcess[str] = subprocess.run(
            words, env=os.environ | self.environment, capture_output=True, text=True, timeout=300, check=False, **more
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}{self.told()}"
        return done.stdout

    def told(self) -> str:
        """What SLURM says of its nodes and jobs, and the last lines of all daemons' logs."""
        said = ""
        for words in (["sinfo", "--Node", "--long"], ["sinfo", "--list-reasons"], ["squeue", "--long"]):
            done = subprocess.run(words, env=os.environ | self.environment, capture_output=True, text=True, check=False)
            said += f"\n--- {' '.join(words)}\n{done.stdout}{done.stderr}"
        logs = sorted(self.directory.glob("*.log"))
        return said + "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    # ---------------------------------------------------------------------------------------------------------- nodes

    def start(self) -> None:
        """Raises AssertionError, with the daemons' logs, where the nodes do not come up."""
        for name in ("munge", "state", *(f"{what}-{node}" for node in self.nodes for what in ("spool", "tmp"))):
            (self.directory / name).mkdir(parents=True)
        controller_port, *ports = free_ports(1 + len(self.nodes))
        nodes = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(),
                controller_port=controller_port,
                directory=self.directory,
                node_timeout_s=10,
                nodes="\n".join(nodes),
            )
        )
        munge = self.directory / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = [f"--{what}-file={munge / what}" for what in ("key", "pid", "log", "seed")]
        self._daemon("munged", ["munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files])
        wait_for((munge / "socket").exists, 10, "munged's socket")
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self.power_on(node)
        wait_for(lambda: self.states() == {"idle"}, 30, "nodes that are idle", self.told)

    def power_on(self, node: str) -> None:
        self._daemon(node, [*apart(node), f"exec slurmd -D -N {node}"])

    def power_off(self, node: str) -> None:
        """Kill every process of a node at once."""
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons.pop(node).wait()

    def processes(self, node: str) -> list[int]:
        """All processes that live on a node."""
        namespace = _namespace(self.daemons[node].pid)
        return [int(each.name) for each in Path("/proc").glob("[0-9]*") if _namespace(int(each.name)) == namespace]

    def heal(self) -> None:
        """Wait until all nodes are idle; one that is down although it answers is told to serve again."""
        until_s = time.monotonic() + 60
        while (states := self.states()) != {"idle"}:
            assert time.monotonic() < until_s, f"nodes are {states}, not idle{self.told()}"
            if any(state.startswith(("down", "drain")) for state in states):
                words = ["scontrol", "update", f"nodename={','.join(self.nodes)}", "state=resume"]
                subprocess.run(words, env=os.environ | self.environment, capture_output=True, check=False)
            time.sleep(0.2)

    def states(self) -> set[str]:
        return set(self.call("sinfo", "--noheader", "--Node", "--format=%t").split())

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.directory / f"{name}.out.log").open("wb") as log:
            env = os.environ | self.environment
            self.daemons[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def stop(self) -> None:
        """The controller first, so that it starts nothing more; then each node as a whole."""
        self.daemons["slurmctld"].terminate()
        for node in self.nodes:
            if node in self.daemons:
                self.power_off(node)
        for daemon in self.daemons.values():
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    # ----------------------------------------------------------------------------------------------------------- jobs

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, NODE_FAIL ..."""
        return self.show(job)["JobState"]

    def show(self, job: str) -> dict[str, str]:
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, job: str, *states: str, within_s: float) -> str:
        found: str = wait_for(lambda: self.state(job) in states and self.state(job), within_s, f"job {job} {states}", self.told)
        return found


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/uts").readlink())
    except OSError:
        return ""


def wait_for(condition: Callable[[], Any], within_s: float, what: str, told: Callable[[], str] = lambda: "") -> Any:
    """What the condition says, once it is true."""
    until_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < until_s, f"no {what} within {within_s} s{told()}"
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def cluster(directory: Path, nodes: Sequence[str], cpus: int = 4) -> Iterator[Slurm]:
    """A cluster, from munge to the last node; all its processes are gone afterwards."""
    slurm = Slurm(directory, tuple(nodes), cpus)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
