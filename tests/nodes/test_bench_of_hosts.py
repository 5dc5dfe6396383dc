"""The bench of several nodes, started on one of them with the names of all, as on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpisgd.base.errors import ConfigError
from tests.bench import nodes
from tests.nodes.cluster import AGENT, Cluster

pytestmark = pytest.mark.slow

#: What a site's MPI knows by itself: how to reach its hosts, and by which interface.
SITE = {
    "PRTE_MCA_plm_ssh_agent": AGENT,
    "PRTE_MCA_prte_if_include": "eth0",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_pml": "ob1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "MPISGD_WAIT": "polite",
}
EXCHANGES = ["hardsync", "hardsync, 1 shard apart"]
COMMAND = "-m tests.bench nodes --nodes 2 --gbit 1 --repetitions 1 --cases cnn-4"


@pytest.mark.rare
@pytest.mark.usefixtures("open_mpi")
def test_a_row_of_hosts(tmp_path: Path) -> None:
    """A shard on each, and one apart, on the third; both DDPs beside them."""
    with Cluster(3) as cluster:
        hosts = [cluster.address(node) for node in cluster.nodes]
        words = [*COMMAND.split(), "--out", str(tmp_path), "--exchanges", *EXCHANGES, "--hosts", *hosts]
        command = [*cluster.inside(0), sys.executable, *words]
        done = subprocess.run(command, env=os.environ | SITE, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "nodes.json").read_text())["rows"]
    assert set(row["round_s"]) == {"DDP", "DDP, fp16 hook", "hardsync", "hardsync, 1 shard apart"}
    assert all(0 < each["median"] < 10 for each in row["round_s"].values())
    assert row["megabytes"]["hardsync, 1 shard apart"] == pytest.approx(2 * row["megabytes"]["hardsync"], rel=0.01)


def test_too_few_hosts_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"hosts = .*: expected 3 of them"):
        list(nodes.measure(1, ["cnn-4"], [2], [1.0], EXCHANGES, ["10.77.0.1", "10.77.0.2"]))
