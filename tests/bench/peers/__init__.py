"""`python -m tests.bench peers`: hardsync beside what people use in its place, in turn; what is missing is left out, and said.

All train the same network with two learners, SGD with momentum, one thread each, on random data that lies in memory. Each peer is a
script that is started once for each of its processes (`python SCRIPT CASE PLACE PORT`), some of which learn; a learner prints how
many images it has seen in how many seconds, after a warm-up. TensorFlow and Horovod may live in another environment, whose Python
is given: their scripts import nothing of mpisgd.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.bench.parts import runs
from mpisgd.bench.parts.cases import CASES, LEARNERS, WAYS, Case, config_of
from mpisgd.bench.parts.measured import in_turn, over, show, spread
from mpisgd.comm.mpi.launch import environment, mpirun

_HERE = Path(__file__).parent
OURS = ("hardsync", "allreduce")
"""By messages, and as fast as can be on one node."""
KNOWN = ("cnn-4", "cnn-16", "cnn-64", "mlp-16")
PATIENCE_S = 300.0
_OBJECT = re.compile(r'\{"images"[^{}]*\}')


@dataclass(frozen=True)
class Peer:
    """A script, what it must be able to import, and its processes.

    `awaited`: the place of the one whose end is that of all; None: each ends by itself. `launched`: by mpirun, which counts them.
    """

    script: str
    needs: str
    processes: int
    awaited: int | None = None
    launched: bool = False


PEERS = {
    "torch RPC server": Peer("torch_rpc.py", "torch.distributed.rpc", 1 + LEARNERS),
    "TensorFlow SyncReplicas": Peer("tensorflow_sync_replicas.py", "tensorflow", 1 + LEARNERS, awaited=1),
    "TensorFlow, 2 of 3": Peer("tensorflow_sync_replicas.py", "tensorflow", 2 + LEARNERS, awaited=1),
    "Horovod": Peer("horovod_mpi.py", "horovod.torch", LEARNERS, launched=True),
}


def installed(peer: Peer, python: str) -> bool:
    done = subprocess.run([python, "-c", f"import {peer.needs}"], capture_output=True, check=False)
    return done.returncode == 0


def measure(repetitions: int, cases: Sequence[str], python: str) -> Iterator[dict[str, Any]]:
    """Images/s of ours, and of every peer that `python` has, or else this Python.

    Raises ConfigError: a case whose network the peers do not know; a peer that is installed, and fails.
    """
    for key in cases:
        require(key in KNOWN, "cases", key, f"some of {', '.join(KNOWN)} for peers")
    pythons = {name: [each for each in (python, sys.executable) if installed(peer, each)] for name, peer in PEERS.items()}
    peers = {name: found[0] for name, found in pythons.items() if found}
    for key in cases:
        case = CASES[key]
        rates: dict[str, list[float]] = {name: [] for name in (*OURS, *peers)}
        for name in in_turn(list(rates), repetitions):
            if name in peers:
                rates[name].append(run(name, key, case, peers[name]))
                continue
            with tempfile.TemporaryDirectory() as directory:
                way = WAYS[name]
                log = runs.launched(config_of(Path(directory), case, **way.special), len(way.ranks))
                rates[name].append(runs.rate_of(log, case))
        yield {
            "case": case.name,
            "images_per_s": {name: spread(values) for name, values in rates.items()},
            "ratios": {f"{ours} / {peer}": over(rates[ours], rates[peer]) for ours in OURS for peer in peers},
            "not_installed": sorted(set(PEERS) - set(peers)),
        }


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [line for row in rows for line in _lines_of(row)]


def _lines_of(row: Mapping[str, Any]) -> list[str]:
    """Format one row."""
    rates = ", ".join(f"{name} {value['median']:.0f}" for name, value in row["images_per_s"].items())
    lines = [f"{row['case']}: images/s {rates}"]
    lines += [f"  {name:<40} {show(ratio)}" for name, ratio in row["ratios"].items()]
    return lines + [f"  not installed: {name}" for name in row["not_installed"]]


def run(name: str, key: str, case: Case, python: str) -> float:
    """Images/s of all learners of a peer, by the seconds of the slowest. Raises ConfigError where it fails, or does not end."""
    peer = PEERS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [python, str(_HERE / peer.script), key, str(case.mu), str(case.updates)]
    if peer.launched:
        commands = [[*mpirun(peer.processes), *words]]
    else:
        commands = [[*words, str(place), str(peer.processes), str(port)] for place in range(peer.processes)]
    env = environment() | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    processes = [_start(command, env) for command in commands]
    waited_for = processes if peer.awaited is None else [processes[peer.awaited]]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in waited_for]
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name}: no end after {PATIENCE_S:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = told_in("".join(said))
    if not found or any(process.returncode for process in waited_for):
        raise ConfigError(f"{name}: exit status {[process.returncode for process in waited_for]}\n{''.join(said)}")
    return float(sum(each["images"] for each in found) / max(each["seconds"] for each in found))


def told_in(text: str) -> list[dict[str, Any]]:
    """Find the JSON that learners printed, among whatever else was printed; a launcher may join lines of two of them."""
    return [json.loads(each) for each in _OBJECT.findall(text)]


def _start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
