"""A cluster in a box: nodes with networks, host names, processes and shared memory of their own on this machine (as root).

Each node is a set of namespaces held by one process, its *holder*; a switch, which is a namespace with a bridge, joins them, one
cable each. The holder of the first node, where the launcher runs, is the ancestor of the others, and dies with this process however
that is killed; with a holder dies all that runs on its node, and with the last process of a namespace go its devices. So nothing
has a name outside, and nothing is left. The file system is common to all nodes, as on a cluster; /dev/shm is each node's own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

Direction = Literal["both", "from", "to"]
"""Of a link: what its node sends, what is sent to it, or both."""

_NEEDS = ("ip", "tc", "nsenter", "setpriv", "unshare", "mount", "hostname", "env")
_DIES_WITH_ME = ("setpriv", "--pdeathsig", "KILL")
#: Of a node's name and all hosts' names. Nobody waits for what is orphaned there: a holder that ignores SIGCHLD leaves no zombies.
_HOLD = """
mount -t tmpfs none /dev/shm && hostname "$0" && echo "$1" >/dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts &&
ip link set lo up && echo held && exec env --ignore-signal=CHLD sleep infinity
"""
_HOLDER = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _HOLD)
AGENT = "/dev/shm/agent"
#: In the place of ssh: takes a host, and the words of a command, into that node. What becomes of it there the launcher is to learn
#: over the network alone, as of a daemon that ssh has left behind.
_AGENT_TEXT = """\
#!/bin/sh
while case $1 in -*) true;; *) false;; esac; do shift; done
host=$1; shift
nsenter --target "$(cat /dev/shm/holder-$host)" --net --uts --mount --pid env -C "$PWD" /bin/sh -c "$*" </dev/null >/dev/null 2>&1 &
"""
_LATENCY = "20ms"
"""Longer queues make every second swap of 44 MB take twice as long."""


class ClusterError(Exception):
    """A program that makes or changes a cluster has failed."""


@cache
def missing(relay: bool = False) -> str:
    """Why there can be no cluster here, or none with a relay; empty where there can."""
    if os.geteuid() != 0:
        return "a cluster of network namespaces needs root"
    absent = [name for name in _NEEDS if shutil.which(name) is None]
    if absent:
        return f"a cluster of network namespaces needs {', '.join(absent)} (Debian: apt-get install iproute2 util-linux)"
    if relay and not Path("/dev/net/tun").exists():
        return "links with loss and delay need /dev/net/tun"
    try:
        with Cluster(1, relayed=(0,) if relay else ()) as cluster:
            cluster.shape(0, "1gbit")
            cluster.cut(0, "to")
    except ClusterError as error:
        return f"there can be no cluster of network namespaces here: {error}"
    return ""


class Cluster:
    """Nodes `node0`, `node1` ..., at 10.77.0.1, 10.77.0.2 ...; a context, at whose end they are gone.

    Args:
        relayed: nodes whose cable can lose and delay frames (`disturb`); such a cable is slow: a process of Python's.
    """

    def __init__(self, nodes: int, relayed: Collection[int] = ()) -> None:
        self.nodes = range(nodes)
        self._relayed = frozenset(relayed)
        self._rates = [""] * nodes
        self._holders: list[int] = []
        self._own: set[int] = set()
        """Processes that are the cluster itself."""
        self._processes: list[subprocess.Popen[str]] = []
        self._relays: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        """The last node first: with the first one all that is left of the others dies."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    # ------------------------------------------------------------------------------------------------------- how it is made

    def _make(self) -> None:
        switch = self._start("unshare", "--net", "sh", "-c", "echo held && exec sleep infinity")
        self._switch = switch.pid
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._on_switch("ip", "link", "set", "bridge", "up")
        hosts = "\n".join(["127.0.0.1 localhost", *(f"{self.address(node)} {self.name(node)}" for node in self.nodes)])
        for node in self.nodes:
            within = ["nsenter", "--target", str(self._holders[0]), "--pid"] if node else []
            line = _line_of(self._start(*within, *_HOLDER, self.name(node), hosts).pid)
            self._holders.append(line[-1])
            self._own.update(line)
            self._lay_cable(node)
            self._write(node, AGENT, _AGENT_TEXT)  # each daemon wants to see it
            self._write(0, f"/dev/shm/holder-{self.address(node)}", str(_pid_within(self._holders[node])))

    def _start(self, *words: str) -> subprocess.Popen[str]:
        """Start a process that dies with this one, and wait for its first line."""
        process = subprocess.Popen(
            [*_DIES_WITH_ME, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != "held":
            raise ClusterError(f"{' '.join(words)}: {said}")
        return process

    def _lay_cable(self, node: int) -> None:
        port, holder = f"port{node}", str(self._holders[node])
        if node in self._relayed:
            inside = ["nsenter", "--target", str(self._switch), "--net"]
            self._relays[node] = self._start(*inside, sys.executable, str(Path(__file__).with_name("relay.py")), port, f"far{node}")
            self._on_switch("ip", "link", "set", f"far{node}", "netns", holder)
            self.call(node, "ip", "link", "set", f"far{node}", "name", "eth0")
        else:
            self._on_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", holder)
        self._on_switch("ip", "link", "set", port, "master", "bridge", "up")
        self.call(node, "ip", "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        self.call(node, "ip", "link", "set", "eth0", "up")

    def _write(self, node: int, path: str, text: str) -> None:
        """Into a file that this node alone has."""
        self.call(node, "sh", "-c", f"cat > {path} && chmod +x {path}", said=text)

    # -------------------------------------------------------------------------------------------------------- what it is

    def name(self, node: int) -> str:
        return f"node{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{1 + node}"

    def inside(self, node: int) -> list[str]:
        """What, put before a command, has it run on that node, in this directory."""
        return [*_enter(self._holders[node]), "env", "-C", str(Path.cwd()), "TMPDIR=/dev/shm"]

    def call(self, node: int, *words: str, said: str = "") -> str:
        """Run a command on a node; what it printed. Raises ClusterError where it fails."""
        return _call([*_enter(self._holders[node]), *words], said)

    def _on_switch(self, *words: str) -> str:
        return _call(["nsenter", "--target", str(self._switch), "--net", *words])

    def launching(self, ranks: Sequence[int]) -> list[str]:
        """Options of Open MPI's mpirun, on the first node, for so many ranks on each: rank 0 and the next ones on the first."""
        hosts = ",".join(f"{self.address(node)}:{number}" for node, number in enumerate(ranks) if number)
        prte = {"plm_ssh_agent": AGENT, "prte_if_include": "eth0"}
        mca = {"btl_tcp_if_include": "eth0", "pml": "ob1"}
        return [
            *(word for key, value in prte.items() for word in ("--prtemca", key, value)),
            *(word for key, value in mca.items() for word in ("--mca", key, value)),
            "--host",
            hosts,
            "--map-by",
            "slot:oversubscribe",
        ]

    def processes(self, node: int) -> list[int]:
        """All that run there, as they are called here; but for what makes the node."""
        pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - self._own
        here = _namespace(self._holders[node])
        return sorted(pid for pid in pids if here and _namespace(pid) == here)

    def adopt(self, pid: int) -> None:
        """Count a process, and what it has started, as none of a job's."""
        self._own.update(_line_of(pid))

    def nbytes(self, node: int) -> tuple[int, int]:
        """How many a node has sent and received."""
        stats = json.loads(self.call(node, "ip", "-json", "-statistics", "link", "show", "eth0"))[0]["stats64"]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]

    # -------------------------------------------------------------------------------------------------- what is done to it

    def shape(self, node: int, rate: str) -> None:
        """A node's link has this rate (`100mbit`) in each direction; "" = as fast as can be."""
        self._rates[node] = rate
        self.heal(node)

    def cut(self, node: int, direction: Direction = "both") -> None:
        """Nothing comes through any more, and nobody is told: sockets stay open."""
        if direction == "both":
            self._on_switch("ip", "link", "set", f"port{node}", "down")
        else:
            self._queue(node, direction, "blackhole")

    def heal(self, node: int) -> None:
        """The link is whole again, and has its rate."""
        rate = self._rates[node]
        words = ("tbf", "rate", rate, "burst", "128k", "latency", _LATENCY) if rate else ("pfifo",)
        self._queue(node, "from", *words)
        self._queue(node, "to", *words)
        self._on_switch("ip", "link", "set", f"port{node}", "up")

    def disturb(self, node: int, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """A `relayed` link loses this share of frames, and is late by this, in each direction."""
        pipe = self._relays[node].stdin
        assert pipe is not None
        pipe.write(f"{loss} {delay_s}\n")
        pipe.flush()

    def _queue(self, node: int, direction: Direction, *words: str) -> None:
        """How frames leave the node's end of a cable, or the switch's."""
        change = ("tc", "qdisc", "replace", "dev")
        if direction == "from":
            self.call(node, *change, "eth0", "root", *words)
        else:
            self._on_switch(*change, f"port{node}", "root", *words)


def _call(words: Sequence[str], said: str = "") -> str:
    done = subprocess.run(words, input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(words)}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def _enter(holder: int) -> list[str]:
    return ["nsenter", "--target", str(holder), "--net", "--uts", "--mount", "--pid"]


def _line_of(pid: int) -> list[int]:
    """A process, its only child, and so on."""
    line = [pid]
    while children := Path(f"/proc/{line[-1]}/task/{line[-1]}/children").read_text().split():
        line.append(int(children[0]))
    return line


def _pid_within(holder: int) -> int:
    """What a process is called by those on the first node."""
    status = Path(f"/proc/{holder}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[2])


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""
