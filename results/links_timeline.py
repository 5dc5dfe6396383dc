"""Some rounds over two shaped links, as the log has them: what a round at 1 Gbit/s is made of.

`PYTHONPATH=. python results/links_timeline.py`, as root: trains the MLP of 11 M parameters on two namespaces of this machine
(`tests/bench/nodes.py`), once in each way, and draws three rounds of each, behind those that warm up. A minute, on a machine that
has nothing else to do.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mpisgd.analysis.timeline import look
from mpisgd.bench.parts.cases import WARM_UP
from mpisgd.records.log.reader import Run
from mpisgd.report import figures_timeline, style
from tests.bench.nodes import NETWORKS, UPDATES, WAYS, trained
from tests.bench.sites import Boxes
from tests.nodes.cluster import Cluster

NODES, GBIT, ROUNDS = 2, 1.0, 3
ROUNDED = "allreduce, in buckets, bfloat16 both ways"
SHOWN = {"allreduce": "allreduce, in buckets", "allreduce-bfloat16": ROUNDED, "hardsync": "hardsync"}
FIGURES = Path(__file__).parent / "figures"


def drawn(run: Run, title: str) -> Figure:
    """Rounds from the middle of a run: from one arrival of learner 0's on shard 0 to a later one."""
    rows = run.pushes[(run.pushes["shard"] == 0) & (run.pushes["learner_id"] == 0)]
    arrivals = np.sort(rows["arrival_s"])
    first = WARM_UP + UPDATES // 2
    found = look(run, from_s=float(arrivals[first]), to_s=float(arrivals[first + ROUNDS]))
    return figures_timeline.draw(title, found)


def main() -> None:
    case = replace(NETWORKS["mlp-16"], updates=UPDATES)
    with Cluster(NODES) as cluster, tempfile.TemporaryDirectory() as directory:
        site = Boxes(cluster)
        site.shape(GBIT)
        for name, way in SHOWN.items():
            place = Path(directory) / name
            place.mkdir()
            run, _ = trained(site, NODES, place, case, WAYS[way])
            title = f"{way}: MLP of 11 M parameters, {NODES} nodes, {GBIT:g} Gbit/s"
            for path in style.save(drawn(run, title), FIGURES / f"links-timeline-{name}"):
                print(path)


if __name__ == "__main__":
    main()
