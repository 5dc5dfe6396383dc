"""The bytes on the links of several nodes are those that a run's first line says, and the report names a slow one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpisgd.records.log.reader import Run
from mpisgd.report import link_speed
from tests.nodes.cluster import Cluster
from tests.nodes.job import Job

pytestmark = pytest.mark.slow

SPREAD = (2, 2)
OVERHEAD = 1.08
"""Headers of TCP, of Ethernet (66 of 1514 bytes), and acknowledgements of what goes the other way."""
START_MB = 6.0
"""What the launcher and MPI say to each other, with the evaluation at the end."""
SETTINGS = {
    "threads": "1",
    "log.progress": "plain",
    "model": "mlp",
    "model.hidden": "1000",
    "data": "synthetic",
    "data.shape": "1000",
    "data.samples": "960",
    "mu": "16",
    "epochs": "1",
    "shards": "2",
    "evaluation.every-epochs": "0",
}


@pytest.mark.parametrize(("placement", "vectors"), [pytest.param("spread", 1, marks=pytest.mark.rare), ("packed", 2)])
def test_links_carry_what_the_first_line_says(open_mpi: None, tmp_path: Path, placement: str, vectors: int) -> None:
    out = tmp_path / "run"
    words = [word for name, value in (SETTINGS | {"placement": placement}).items() for word in (f"--{name}", value)]
    with Cluster(len(SPREAD)) as cluster:
        before = [cluster.nbytes(node) for node in cluster.nodes]
        job = Job(cluster, SPREAD, [*words, "--out", str(out)])
        assert job.end(120) == 0, job.text
        after = [cluster.nbytes(node) for node in cluster.nodes]
    busiest_mb = max(now - then for each in zip(after, before, strict=True) for now, then in zip(*each, strict=True)) / 1e6
    log = Run(out)
    parameters, rounds = log.environment["parameters"], log.final_clock(0)
    found = re.search(r"links carry up to ([\d.,]+) MB one way", job.text)
    assert found is not None, job.text
    said_mb = float(found[1].replace(",", ""))
    assert said_mb == pytest.approx(vectors * parameters * 4e-6, rel=1e-3)
    assert rounds * said_mb <= busiest_mb < OVERHEAD * rounds * said_mb + START_MB
    assert ("warning: the link of" in job.text) == (placement == "packed")


def test_the_report_names_the_link_that_is_slow(open_mpi: None, tmp_path: Path) -> None:
    """A tenth of the rate, at one of three nodes. The first has the shard, and a learner that uses no link."""
    out, changes = tmp_path / "run", {"shards": "1", "protocol": "softsync"}
    words = [word for name, value in (SETTINGS | changes).items() for word in (f"--{name}", value)]
    with Cluster(3) as cluster:
        for node, rate in enumerate(("1gbit", "1gbit", "100mbit")):
            cluster.shape(node, rate)
        job = Job(cluster, (2, 1, 1), [*words, "--out", str(out)], MPISGD_TRAVEL="whole")  # gathered, it would push too little
        assert job.end(120) == 0, job.text
    found = link_speed.links(Run(out))
    table = link_speed.table(Run(out), found)
    assert table.cells("node") == ["node0", "node1", "node2"]
    assert table.cells("rate")[0] is None
    assert list(link_speed.slow(found)) == ["node2"], table.markdown()
    rate = table.cells("rate")[2]
    assert isinstance(rate, float) and 0.5 * 12.5 < rate < 1.1 * 12.5, table.markdown()
    assert table.note.startswith("The link of node2 is slow: ")
