"""How vectors travel between nodes is the program's choice: said, without a changed bit; runs go on with it, and are proved."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.base.errors import EXIT_INTERRUPTED
from mpisgd.job import interruption
from mpisgd.records.log.reader import Run
from tests.nodes.cluster import Cluster
from tests.nodes.job import Job

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
SETTINGS = {
    "threads": "1",
    "log.progress": "plain",
    "model": "mlp",
    "model.hidden": "2100",
    "data": "synthetic",
    "data.shape": "1000",
    "data.samples": "640",
    "mu": "16",
    "optimizer.momentum": "0.9",
    "epochs": "1",
    "straggler.delay": "constant",
    "straggler.delay-mean-s": "0.1",
    "evaluation.every-epochs": "0",
}
"""Slices of a little more than 8 MiB."""


def trained(cluster: Cluster, spread: tuple[int, ...], *words: str, **env: str) -> str:
    """What the run says."""
    job = Job(cluster, spread, words, **env)
    assert job.end(LIMIT_S) == 0, job.text
    return job.text


def anew(out: Path, **more: str) -> list[str]:
    options = SETTINGS | {"out": str(out)} | {name.replace("__", ".").replace("_", "-"): value for name, value in more.items()}
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def same(one: Path, other: Path) -> bool:
    ours, theirs = (torch.load(path / "weights.pt", weights_only=True)["theta"] for path in (one, other))
    return len(ours) == len(theirs) > 0 and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
def test_the_choice_is_said_changes_no_bit_and_goes_on(open_mpi: None, tmp_path: Path) -> None:
    spread = (2, 1)
    auto, whole, halves = (tmp_path / name for name in ("auto", "whole", "halves"))
    with Cluster(len(spread)) as cluster:
        said = trained(cluster, spread, *anew(auto))
        assert "2 host(s), exchange streamed, " in said
        said = trained(cluster, spread, *anew(whole), MPISGD_TRAVEL="whole")
        assert "2 host(s), exchange whole, " in said
        job = Job(cluster, spread, anew(halves, checkpoint__every_updates="2"))
        job.until(lambda: interruption.newest(halves))
        job.send(0, signal.SIGUSR1)
        assert job.end(LIMIT_S) == EXIT_INTERRUPTED, job.text
        assert "exchange streamed, " in trained(cluster, spread, "--resume", str(halves))
    assert same(auto, whole)
    assert same(auto, halves)
    for path in (auto, halves):
        assert replay.replay(path).reason == ""


@pytest.mark.long
def test_chunks_that_leave_during_the_backward_pass_change_no_bit(open_mpi: None, tmp_path: Path) -> None:
    """Without stragglers, whose delays follow computing; half of the first rounds are tried so."""
    prompt = {"straggler__delay": "none", "data__samples": "1600"}
    early, whole = tmp_path / "early", tmp_path / "whole"
    with Cluster(2) as cluster:
        trained(cluster, (2, 1), *anew(early, **prompt))
        trained(cluster, (2, 1), *anew(whole, **prompt), MPISGD_TRAVEL="whole")
    assert same(early, whole)
    assert np.count_nonzero(Run(early).pushes["backward_s"] > 0) >= 8
    assert replay.replay(early).reason == ""


@pytest.mark.long
def test_a_spare_node_has_a_larger_slice_and_a_run_keeps_its_slices(open_mpi: None, tmp_path: Path) -> None:
    """The bits are those of even slices; a run goes on with its slices on as many shards, wherever these are."""
    spread, spare = (2, 2, 2, 1, 1), {"shards": "5", "model__hidden": "5500"}
    even, uneven, halves = (tmp_path / name for name in ("even", "uneven", "halves"))
    with Cluster(len(spread)) as cluster:
        assert ", with slices of " in trained(cluster, spread, *anew(uneven, **spare))
        assert ", with slices of " not in trained(cluster, spread, *anew(even, **spare), MPISGD_TRAVEL="streamed")
        job = Job(cluster, spread, anew(halves, **spare, checkpoint__every_updates="2"))
        job.until(lambda: interruption.newest(halves))
        job.send(0, signal.SIGUSR1)
        assert job.end(LIMIT_S) == EXIT_INTERRUPTED, job.text
        assert ", with slices of " in trained(cluster, (2, 2, 2, 2), "--resume", str(halves))
    assert same(even, uneven)
    assert same(even, halves)
    sizes = Run(uneven).environment["slices"]
    assert sizes == Run(halves).environment["slices"]
    assert sizes[4] == pytest.approx(4 / 11 * sum(sizes), rel=0.01)  # [BytePS 3, Theorem 1]
    assert "slices" not in Run(even).environment
    for path in (even, uneven, halves):
        assert replay.replay(path).reason == ""


@pytest.mark.long
def test_an_allreduce_goes_in_buckets_where_links_are_slow(open_mpi: None, tmp_path: Path) -> None:
    """Timed before the choice. A run goes on over other links than it began with, whole, with the same bits."""
    spread = (2, 1)
    slow, fast, halves = (tmp_path / name for name in ("slow", "fast", "halves"))
    with Cluster(len(spread)) as cluster:
        for node in cluster.nodes:
            cluster.shape(node, "1gbit")
        assert "2 host(s), exchange buckets, " in trained(cluster, spread, *anew(slow, protocol="allreduce"))
        begun = Job(cluster, spread, anew(halves, checkpoint__every_updates="2", protocol="allreduce"))
        begun.until(lambda: interruption.newest(halves))
        begun.send(0, signal.SIGUSR1)
        assert begun.end(LIMIT_S) == EXIT_INTERRUPTED, begun.text
        for node in cluster.nodes:
            cluster.shape(node, "")
        assert "2 host(s), exchange whole, " in trained(cluster, spread, *anew(fast, protocol="allreduce"))
        assert "exchange whole, " in trained(cluster, spread, "--resume", str(halves))
    assert same(slow, fast)
    assert same(slow, halves)
    for path in (slow, fast, halves):
        assert replay.replay(path).reason == ""


@pytest.mark.long
def test_gradients_are_gathered_behind_a_slow_link(open_mpi: None, tmp_path: Path) -> None:
    spread, options = (2, 1, 1, 1), {"model__hidden": "200", "protocol": "softsync", "straggler__delay_mean_s": "0.01"}
    uneven, alike = (tmp_path / name for name in ("uneven", "alike"))
    with Cluster(len(spread)) as cluster:
        for node in cluster.nodes:
            cluster.shape(node, "1gbit")
        assert "4 host(s), exchange whole, " in trained(cluster, spread, *anew(alike, **options))
        cluster.shape(cluster.nodes[3], "100mbit")
        assert "4 host(s), exchange gathered, " in trained(cluster, spread, *anew(uneven, **options))
    for path in (uneven, alike):
        assert replay.replay(path).reason == ""


def test_within_a_node_vectors_travel_whole(open_mpi: None, tmp_path: Path) -> None:
    with Cluster(1) as cluster:
        assert "1 host(s), exchange in-place" in trained(cluster, (3,), *anew(tmp_path / "run"))
