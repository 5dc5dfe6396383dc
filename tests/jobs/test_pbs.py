"""PBS's script for CPU nodes with real ranks on two hosts: its environment as PBS documents it, and a stand-in for `pbs_tmrsh`.

The hosts are namespaces of this machine. A real PBS cannot be had: what it makes of the directives is not tested.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from mpisgd.comm.mpi.launch import environment
from tests.jobs import slurm
from tests.jobs.checkout import Checkout, hosts_of

REASON = slurm.no_hosts()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON or "there can be hosts"), pytest.mark.slow]

#: `pbs_tmrsh [-n] [-l user] host command`: runs the command there, and takes no other option. Notes down what it was asked for.
TMRSH = f"""\
while [[ $1 == -* ]]; do
  case $1 in
    -n) shift ;;
    -l) shift 2 ;;
    *) echo "usage: pbs_tmrsh [-n][-l username] host [-n][-l username] command, not $1" >&2; exit 2 ;;
  esac
done
host=$1
shift
echo "$host" >>{{notes}}
exec {shlex.join(slurm.apart("HOST")).replace("HOST", "'$host'")} "$*"
"""


def test_a_run_on_two_hosts(tmp_path: Path, mpi: str) -> None:
    checkout = Checkout(tmp_path, mpi)
    checkout.install(TMRSH.replace("{notes}", str(tmp_path / "asked")), "pbs_tmrsh")
    checkout.configure('epochs = 1\nplacement = "spread"')
    checkout.edit("pbs-cpu.pbs", SHARDS=2, EVALUATOR=0)
    (tmp_path / "names").write_text("127.0.0.1 localhost\n127.0.0.2 hostA\n127.0.0.3 hostB\n")
    (tmp_path / "nodes").write_text("hostA\nhostA\nhostB\nhostB\n")
    env = environment() | {
        "PBS_JOBID": "4711.server",
        "PBS_JOBNAME": "mpisgd",
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "NCPUS": "2",
        "PATH": f"{os.environ['PATH']}:/usr/bin:/bin",
    }
    command = [*slurm.apart("hostA"), f"mount --bind {tmp_path / 'names'} /etc/hosts && bash {tmp_path / 'jobs' / 'pbs-cpu.pbs'}"]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done; look at it with: mpisgd report results/mpisgd-4711" in done.stdout
    assert (tmp_path / "asked").read_text().split()[-1] == "hostB"
    found, assigned = hosts_of(checkout.run("4711"))
    assert found == ("hostA", "hostA", "hostB", "hostB")
    assert [found[rank] for rank in assigned.shard_ranks] == ["hostA", "hostB"]
