"""The cluster in a box is what it says: names, addresses, bytes, links that are cut and lose frames; nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.nodes.cluster import Cluster, Direction, missing

pytestmark = pytest.mark.slow

#: Says what it hears, to whoever has sent it.
ECHO = """
import socket
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind(("", 5000))
print("listens", flush=True)
while True:
    heard.sendto(*heard.recvfrom(2000))
"""
#: Sends numbers; prints how many came back, and seconds until the first one did.
ASK = """
import socket, sys, time
asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asked.settimeout(float(sys.argv[3]))
back, first_s = 0, None
for number in range(int(sys.argv[2])):
    begun_s = time.monotonic()
    asked.sendto(b"%d" % number, (sys.argv[1], 5000))
    try:
        while asked.recv(2000) != b"%d" % number:
            pass
    except OSError:
        continue
    back += 1
    first_s = first_s or time.monotonic() - begun_s
print(back, first_s or 0)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        yield made


@contextlib.contextmanager
def echo(cluster: Cluster, node: int) -> Iterator[None]:
    process = subprocess.Popen([*cluster.inside(node), sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listens\n"
    yield
    for pid in cluster.processes(node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def ask(cluster: Cluster, node: int, of: int, times: int = 1, within_s: float = 0.3) -> tuple[int, float]:
    """How often a node is answered by another."""
    words = [*cluster.inside(node), sys.executable, "-c", ASK, cluster.address(of), str(times), str(within_s)]
    back, first_s = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return int(back), float(first_s)


def test_each_node_has_a_name_processes_and_shared_memory_of_its_own(cluster: Cluster) -> None:
    for node in cluster.nodes:
        assert cluster.call(node, "hostname").strip() == f"node{node}"
        cluster.call(node, "touch", f"/dev/shm/of-{node}")
        assert [name for name in cluster.call(node, "ls", "/dev/shm").split() if name.startswith("of-")] == [f"of-{node}"]
    seen = cluster.call(1, "sh", "-c", "for each in /proc/[0-9]*; do cat $each/comm; done 2>/dev/null").split()
    assert set(seen) <= {"sleep", "sh", "cat"}


def test_a_link_is_cut_in_either_direction_and_healed(cluster: Cluster) -> None:
    with echo(cluster, 1):
        assert ask(cluster, 0, of=1)[0] == 1
        for direction in get_args(Direction):
            cluster.cut(1, direction)
            before = cluster.nbytes(1)
            assert ask(cluster, 0, of=1)[0] == 0, direction
            heard = cluster.nbytes(1)[1] > before[1]
            assert heard == (direction == "from"), "what was asked has come, and the answer has not gone"
            cluster.heal(1)
            assert ask(cluster, 0, of=1, times=5)[0] >= 1, direction


def test_bytes_are_counted_and_rates_kept(cluster: Cluster) -> None:
    sent, received = cluster.nbytes(0)
    with echo(cluster, 1):
        assert ask(cluster, 0, of=1, times=100)[0] == 100
    now_sent, now_received = cluster.nbytes(0)
    assert 100 * 40 < now_sent - sent < 100 * 100
    assert 100 * 40 < now_received - received < 100 * 100
    cluster.shape(0, "100mbit")
    cluster.cut(0, "from")
    cluster.heal(0)
    assert "rate 100Mbit" in cluster.call(0, "tc", "qdisc", "show", "dev", "eth0"), "a link that is healed has its rate"
    cluster.shape(0, "")


def test_a_relayed_link_loses_and_delays() -> None:
    if why := missing(relay=True):
        pytest.skip(why)
    with Cluster(2, relayed=(1,)) as cluster, echo(cluster, 1):
        assert ask(cluster, 0, of=1, times=20)[0] == 20
        cluster.disturb(1, delay_s=0.05)
        back, first_s = ask(cluster, 0, of=1, within_s=2)
        assert back == 1
        assert first_s >= 0.1, "there and back"
        cluster.disturb(1, loss=0.5)
        assert 0 < ask(cluster, 0, of=1, times=40, within_s=0.05)[0] < 40
        cluster.cut(1)
        assert ask(cluster, 0, of=1)[0] == 0
        cluster.heal(1)
        cluster.disturb(1)
        assert ask(cluster, 0, of=1, times=5)[0] >= 1


def test_nothing_is_left_of_a_cluster_whose_maker_is_killed(tmp_path: Path) -> None:
    text = "import sys, time; from tests.nodes.cluster import Cluster\n"
    text += "with Cluster(2) as made: print(*made._own, made._switch, flush=True); time.sleep(60)"
    maker = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert maker.stdout is not None
    pids = [int(word) for word in maker.stdout.readline().split()]
    assert pids
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    maker.kill()
    maker.communicate()
    until_s = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until_s, f"{left} are left"
        time.sleep(0.01)
