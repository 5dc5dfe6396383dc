"""Plans from logs of real ranks whose shard, on a node of its own, never rests: each predicts the other protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.config import replace
from mpisgd.config.config_file import from_mapping
from mpisgd.plan.costs.fit import fitted
from mpisgd.plan.costs.observe import observe
from mpisgd.plan.costs.predict import predict
from mpisgd.records.log.reader import Run
from tests.nodes.cluster import Cluster
from tests.nodes.job import Job

pytestmark = [pytest.mark.alone, pytest.mark.slow]

APART = (1, 1, 1)
ROUNDS = 12
RATE = "100mbit"
"""4 MB take 0.33 s, a mini-batch and an update next to nothing: how a busy machine schedules the ranks hardly matters."""
SETTINGS = {
    "threads": "1",
    "log.progress": "off",
    "model": "mlp",
    "model.hidden": "1000",
    "data": "synthetic",
    "data.shape": "1000",
    "data.samples": "960",
    "mu": "16",
    "epochs": str(ROUNDS * 2 * 16 / 960),
    "evaluation.every-epochs": "0",
}
WAYS = {"hardsync": {"protocol": "hardsync"}, "softsync": {"protocol": "softsync", "protocol.n": "2"}}


def test_a_log_of_a_shard_that_never_rests_predicts_another_protocol(open_mpi: None, tmp_path: Path) -> None:
    runs = {}
    with Cluster(len(APART)) as cluster:
        for node in cluster.nodes:
            cluster.shape(node, RATE)
        for name, way in WAYS.items():
            words = [word for key, value in (SETTINGS | way).items() for word in (f"--{key}", value)]
            job = Job(cluster, APART, [*words, "--out", str(tmp_path / name)])
            assert job.end(120) == 0, job.text
            runs[name] = Run(tmp_path / name)
    for of, run in runs.items():
        fit = fitted(run)
        for name, other in runs.items():
            real = observe(other)
            assert real is not None
            found = predict(replace(fit.config, protocol=from_mapping(other.config).protocol), 2 * ROUNDS)
            rel = 0.1 if of == name else 0.25
            assert found.gradients_per_s == pytest.approx(real.gradients_per_s, rel=rel), (of, name, fit.costs)
