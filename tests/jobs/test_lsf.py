"""LSF's script for CPU nodes with real ranks on two hosts: its environment as LSF documents it, and a stand-in for `blaunch`.

The hosts are namespaces of this machine. A real LSF cannot be had: what it makes of the directives is not tested.
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

#: `blaunch [options] host command`: runs the command there. Notes down what it was asked for.
BLAUNCH = f"""\
while [[ $1 == -* ]]; do shift; done
host=$1
shift
echo "$host" >>blaunched
exec {shlex.join(slurm.apart("HOST")).replace("HOST", "'$host'")} "$*"
"""

ENVIRONMENT = {
    "LSB_JOBID": "4711",
    "LSB_JOBNAME": "mpisgd",
    "LSB_JOBINDEX": "0",
    "LSB_DJOB_NUMPROC": "4",
    "LSB_MCPU_HOSTS": "hostA 2 hostB 2 ",
}


def test_a_run_on_two_hosts(tmp_path: Path, mpi: str) -> None:
    checkout = Checkout(tmp_path, mpi)
    checkout.install(BLAUNCH, "blaunch")
    checkout.configure('epochs = 1\nplacement = "spread"')
    checkout.edit("lsf-cpu.bsub", SHARDS=2, EVALUATOR=0)
    (tmp_path / "names").write_text("127.0.0.1 localhost\n127.0.0.2 hostA\n127.0.0.3 hostB\n")
    hosts = tmp_path / "hosts"
    hosts.write_text("hostA\nhostA\nhostB\nhostB\n")  # which LSF writes, too, and MPICH reads
    env = environment() | ENVIRONMENT | {"LSB_DJOB_HOSTFILE": str(hosts), "LSB_HOSTS": "hostA hostA hostB hostB"}
    env |= {"LSF_BINDIR": str(checkout.programs), "PATH": f"{os.environ['PATH']}:/usr/bin:/bin"}
    done = subprocess.run(
        [*slurm.apart("hostA"), "mount --bind names /etc/hosts && bash jobs/lsf-cpu.bsub"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done; look at it with: mpisgd report results/mpisgd-4711" in done.stdout
    assert (tmp_path / "blaunched").read_text().split()[-1] == "hostB"
    found, assigned = hosts_of(checkout.run("4711"))
    assert found == ("hostA", "hostA", "hostB", "hostB")
    assert [found[rank] for rank in assigned.shard_ranks] == ["hostA", "hostB"]
