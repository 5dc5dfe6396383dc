"""`mpisgd simulate`: the directory of a real run, repeatable bit for bit; the papers' claims; failures; what is refused."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpisgd.__main__ import main
from mpisgd.base.errors import ConfigError
from mpisgd.config.config_file import from_mapping
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict
from mpisgd.simulate import simulate
from tests.effort import spread
from tests.virtual.jobs import SIZES, TENSORS, bits, config, merged, simulated, tables

pytestmark = pytest.mark.timeout(300)  # a virtual job may also go on for ever


# -------------------------------------------------------------------------------------------------- from the command line

SHELL = shlex.split(
    "--data synthetic --data.shape 6 --data.classes 3 --data.samples 120 --data.test-samples 30 --model softmax --mu 4 --epochs 2"
    " --threads 1 --protocol softsync --protocol.n 2 --virtual.learners 4 --shards 2 --evaluator --averaging 0.9"
)


@pytest.mark.slow
def test_the_shell_gets_the_directory_of_a_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mpisgd", "simulate", *SHELL, "--out", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    first, last = done.stderr.splitlines()[0], done.stderr.splitlines()[-1]
    assert "virtual cluster: softsync (n = 2, modulation = inverse), 4 learners x 4 samples, 2 shards, 21 parameters" in first
    assert "mpisgd: finished: 30 updates in " in last
    assert f"see: mpisgd report {tmp_path / 'run'}" in last
    files = {path.name for path in (tmp_path / "run").iterdir()}
    shards = {schema.shard_file(0), schema.shard_file(1)}
    assert files == {schema.CONFIG, schema.LOG, schema.DONE, schema.WEIGHTS, schema.evaluator_file(), *shards}
    run = Run(tmp_path / "run")
    assert run.environment["virtual"] is True
    assert run.environment["learners"] == 4
    assert run.config["protocol"] == {"name": "softsync", "n": 2, "modulation": "inverse"}
    assert json.loads((run.path / schema.DONE).read_text())["clock"] == [30, 30]
    with h5py.File(run.path / schema.LOG) as log:
        assert log["pushes"][:].tobytes() == run.pushes.tobytes()
    assert set(torch.load(run.path / schema.WEIGHTS, weights_only=True)) == {"theta", "thetabar"}


@pytest.mark.parametrize("umask", [0o002, pytest.param(0o027, marks=pytest.mark.slow)])
def test_files_have_the_users_mode_and_not_his_environment(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "xyzzy-17")
    before = os.umask(umask)
    try:
        out = {"out": str(tmp_path / "run"), "log": {"progress": "off"}}
        simulate(from_mapping({"model": "softmax", "epochs": 0.2, "virtual": {"learners": 2}, **out}))
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").iterdir() if path.is_file()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o666 & ~umask for path in files}
    assert not [path.name for path in files if b"SECRET_TOKEN" in path.read_bytes() or b"xyzzy-17" in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("base", [SIZES, TENSORS], ids=["sizes", "tensors"])
@pytest.mark.parametrize("evaluator", [False, True])
def test_a_report_works_on_it(base: dict[str, Any], evaluator: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = simulated(tmp_path / "run", base, shards=2, protocol="backup", evaluator=evaluator)
    assert main(["report", str(run.path)]) == 0
    assert "yes" in capsys.readouterr().out, "the books balance"
    report = {path.name for path in (run.path / "report").iterdir()}
    assert {"staleness_distribution.png", "arrivals.png", "learner_time.png"} <= report
    assert ("error_epochs.png" in report) is (base is TENSORS)


def test_print_config_prints_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--print-config", "--virtual.learners", "7", "--out", str(tmp_path / "run")]) == 0
    assert "learners = 7" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_job_file_serves_both_worlds(tmp_path: Path) -> None:
    """What `simulate` wrote is read back as the same configuration, virtual tables and all."""
    slow = {"virtual": {"slow_nodes": {"1": 2.0}}, "failures": {"at_s": {"2": 3.0}}, "compute": {"name": "heavy_tail"}}
    run = simulated(tmp_path / "run", SIZES, **slow)
    again = tmp_path / "again"
    assert main(["simulate", str(run.path / schema.CONFIG), "--out", str(again)]) == 0
    assert tables(Run(again)) == tables(run)


def test_without_a_log_there_are_weights_and_done(tmp_path: Path) -> None:
    outcome = simulate(config(tmp_path / "run", TENSORS, log={"enabled": False}))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {schema.CONFIG, schema.DONE, schema.WEIGHTS}
    assert outcome.samples[0] >= 240


# --------------------------------------------------------------------------------------------------------- bit for bit

RUNS: dict[str, dict[str, Any]] = {
    "softsync": {"protocol": {"name": "softsync", "n": 2}, "shards": 2},
    "backup": {"protocol": {"name": "backup", "b": 2}, "shards": 3, "compute": {"name": "heavy_tail"}, "evaluator": True},
    "hardsync": {"protocol": "hardsync", "straggler": {"delay": "exponential"}, "virtual": {"pause_mean_s": 0.2}},
    "failing": {"protocol": "softsync", "failures": {"mean_s": 2.0}, "virtual": {"ranks_per_node": 2}},
}


@pytest.mark.parametrize(("name", "base"), spread(itertools.product(RUNS, (SIZES, TENSORS)), 5, unpack=True))
def test_the_same_configuration_gives_the_same_bytes_and_another_seed_others(
    name: str, base: dict[str, Any], tmp_path: Path
) -> None:
    first, again, other = (
        simulated(tmp_path / label, base, **RUNS[name], seed=seed) for label, seed in (("1", 5), ("2", 5), ("3", 6))
    )
    assert tables(first) == tables(again)
    assert tables(first)["pushes"] != tables(other)["pushes"]
    if base is TENSORS:
        assert bits(first) == bits(again)
        assert bits(first) != bits(other)


def test_a_log_flushed_otherwise_is_the_same_log(tmp_path: Path) -> None:
    """Real seconds decide when a shard's file is flushed, and nothing else."""
    runs = [simulated(tmp_path / str(rows), log={"flush_rows": rows}) for rows in (1, 7, 5000)]
    assert tables(runs[0]) == tables(runs[1]) == tables(runs[2])


# ------------------------------------------------------------------------------------------------------------- by hand


def test_three_mini_batches_by_hand(tmp_path: Path) -> None:
    """1 us to send or take a message, 10 us on the way, 1 ns/byte for 1000 bytes; 2 us a gradient, 3 us an update; 1 ms compute.

    The weights are there at 24 us: pull sent at 1, there at 11, taken at 12, answer sent at 13, there at 23, over at 24. The push
    is sent at 1025, there at 1035, taken at 1036, received at 1037, summed at 1039, applied at 1042; the pull, sent at 1038, is
    taken at 1049; the next weights are there at 1061.
    """
    run = simulated(
        tmp_path / "run",
        protocol={"name": "softsync", "n": 1},
        virtual={"learners": 1, "parameters": 250, "train_samples": 12},
        compute={"name": "constant", "mean_s": 1e-3},
        network={"latency_s": 1e-5, "overhead_s": 1e-6, "bandwidth": 1e9, "node_bandwidth": 1e9},
        service={"gradient_s_per_byte": 0.0, "update_s_per_byte": 0.0, "gradient_s": 2e-6, "update_s": 3e-6},
    )
    rounds = 1037e-6 * np.arange(3)
    pushes, updates = run.pushes, run.updates
    assert pushes["arrival_s"] == pytest.approx(1036e-6 + rounds, abs=1e-12)
    assert pushes["answer_s"][:2] == pytest.approx(1049e-6 + rounds[:2], abs=1e-12)
    assert np.isnan(pushes["answer_s"][2])
    assert pushes["compute_s"] == pytest.approx([1e-3] * 3)
    assert pushes["push_s"] == pytest.approx([0.0, 13e-6, 13e-6])
    assert pushes["wait_s"] == pytest.approx([23e-6] * 3)
    assert pushes["pull_s"] == pytest.approx([1e-6] * 3)
    assert updates["time_s"] == pytest.approx(1042e-6 + rounds, abs=1e-12)
    assert updates["update_s"] == pytest.approx([3e-6] * 3)
    assert run.done is not None
    assert run.done["seconds"] == pytest.approx(1042e-6 + rounds[-1], abs=1e-9)


def test_service_costs_by_the_byte(tmp_path: Path) -> None:
    """Of each shard's own slice: two slices of 2000 bytes take half the time each of one of 4000; with gradients too."""
    for name, base, nbytes in (("sizes", SIZES, 4 * 1000), ("tensors", TENSORS, 4 * 83)):
        for shards in (1, 2):
            run = simulated(tmp_path / f"{name}-{shards}", base, shards=shards, service={"update_s_per_byte": 1e-6})
            assert run.updates["update_s"] == pytest.approx([nbytes / shards * 1e-6] * len(run.updates), abs=3e-6)


@pytest.mark.parametrize("base", [SIZES, TENSORS], ids=["sizes", "tensors"])
def test_a_gradient_takes_its_service_time(base: dict[str, Any], tmp_path: Path) -> None:
    """hardsync with equal learners: the shard is busy with one gradient of 0.25 s after the other."""
    service = {"gradient_s": 0.25, "gradient_s_per_byte": 0.0, "update_s_per_byte": 0.0}
    run = simulated(tmp_path / "run", base, protocol="hardsync", compute="constant", service=service)
    assert np.diff(run.updates["time_s"]) == pytest.approx([0.1 + 4 * 0.25] * (len(run.updates) - 1), abs=1e-3)


# -------------------------------------------------------------------------------------------------- stragglers, slow nodes


def compute_seconds(run: Run, column: str = "compute_s") -> dict[int, np.ndarray]:
    rows = run.pushes[run.pushes["shard"] == 0]
    return {learner_id: rows[column][rows["learner_id"] == learner_id] for learner_id in range(run.lambda_)}


def test_slow_nodes_slow_all_their_learners_and_nobody_else(tmp_path: Path) -> None:
    """Ranks two by two: shard and learner 0 on node 0, learners 1 and 2 on node 1, learner 3 on node 2."""
    plain, slow = (
        compute_seconds(simulated(tmp_path / name, virtual={"ranks_per_node": 2, "slow_nodes": nodes}, seed=3))
        for name, nodes in (("plain", {}), ("slow", {"1": 3.0, "2": 5.0}))
    )
    for learner_id, factor in enumerate((1.0, 3.0, 3.0, 5.0)):
        assert slow[learner_id] == pytest.approx(factor * plain[learner_id], rel=1e-6)


def test_pauses_lengthen_some_mini_batches(tmp_path: Path) -> None:
    common: dict[str, Any] = {"compute": {"name": "constant", "mean_s": 0.1}, "protocol": "hardsync"}
    run = simulated(tmp_path / "run", **common, virtual={"pause_mean_s": 0.5, "pause_every_s": 1.0})
    seconds = np.concatenate(list(compute_seconds(run).values()))
    assert seconds.min() == pytest.approx(0.1)
    assert 0.02 < (seconds > 0.11).mean() < 0.3, "one in ten"
    assert seconds.max() > 0.3


def test_stragglers_are_the_ones_of_a_real_run(tmp_path: Path) -> None:
    """The factor is of compute seconds; a pause comes every so many mini-batches."""
    straggler = {"slowdown": {"2": 4.0}, "pause_learner": 1, "pause_every": 5, "pause_s": 2.0}
    run = simulated(tmp_path / "run", straggler=straggler, protocol={"name": "softsync", "n": 4})
    compute, delay = compute_seconds(run), compute_seconds(run, "delay_s")
    assert delay[2] == pytest.approx(3 * compute[2], abs=1e-8)
    assert delay[1] == pytest.approx([2.0 * (seq % 5 == 4) for seq in range(len(delay[1]))])
    assert not delay[0].any()
    assert not delay[3].any()
    assert len(compute[2]) < 0.5 * len(compute[0]), "a slow one pushes less often"


# -------------------------------------------------------------------------------------------- [Zhang16 2.4, Fig. 1]

LAMBDA = 30
FIGURE_1 = {"virtual": {"learners": LAMBDA, "train_samples": 101_000}, "mu": 1, "log": {"flush_rows": 5000}}


@pytest.mark.slow
@pytest.mark.parametrize("n", [15, pytest.param(30, marks=pytest.mark.rare)])
def test_mean_staleness_is_n_and_twice_n_is_hardly_ever_exceeded(n: int, tmp_path: Path) -> None:
    """[Zhang16] P(tau > 2n) < 0.0001, over 100,000 gradients. In fact the mean is (lambda - 1) / c, whatever the spread.

    The first 2 lambda come from clock 0 all at once. Of learners that differ much: `test_papers.py`.
    """
    run = simulated(tmp_path / "run", merged(SIZES, FIGURE_1), protocol={"name": "softsync", "n": n}, compute={"sigma": 0.1})
    settled = run.pushes["staleness"][run.pushes["verdict"] == Verdict.APPLY][2 * LAMBDA :]
    assert len(settled) >= 100_000
    assert settled.mean() == pytest.approx(n, rel=0.05)
    assert settled.mean() == pytest.approx((LAMBDA - 1) / (LAMBDA // n), rel=0.001)
    assert (settled > 2 * n).mean() < 0.0001


# ------------------------------------------------------------------------------------------------------------ no gradients


def test_parameters_of_the_model_are_counted(tmp_path: Path) -> None:
    """Without gradients and without a number: those of the model, on its own data."""
    changes = {"virtual": {"gradients": False, "parameters": 0, "train_samples": 200}}
    run = simulated(tmp_path / "run", TENSORS, **changes)
    assert run.environment["parameters"] == 6 * 8 + 8 + 8 * 3 + 3
    assert not (run.path / schema.WEIGHTS).exists()
    assert len(run.evaluations) == 0
    assert run.summaries["samples"][0] >= 2 * 200
    assert not run.pushes["loss"].any()


@pytest.mark.slow
def test_ten_thousand_learners(tmp_path: Path) -> None:
    """One mini-batch each and a bit, in seconds; each learner is heard."""
    big = {"learners": 10_000, "train_samples": 12_000, "ranks_per_node": 16}
    run = simulated(tmp_path / "run", virtual=big, mu=1, protocol={"name": "softsync", "n": 100}, log={"flush_rows": 10_000})
    assert set(run.pushes["learner_id"].tolist()) == set(range(10_000))
    assert all(books.balanced for books in run.books())


# ----------------------------------------------------------------------------------------------------------- what is refused

SMALL = "--virtual.no-gradients --virtual.parameters 10 "


REFUSED = [
    ("--virtual.learners 0", ["virtual.learners", "0", ">= 1"]),
    ("--compute.mean-s -1", ["compute.mean_s", "-1", ">= 0"]),
    ("--network.latency-s -1e-6", ["network.latency_s", "-1e-06", ">= 0"]),
    ("--network.bandwidth 0", ["network.bandwidth", "0", ">= 1"]),
    ("--service.update-s -2", ["service.update_s", "-2", ">= 0"]),
    ("--failures.notice-s -0.5", ["failures.notice_s", "-0.5", ">= 0"]),
    ("--failures.at-s 1 -0.5", ["failures.at_s[1]", "-0.5", ">= 0"]),
    ("--failures.at-s 4 0.5", ["failures.at_s[4]", "0.5", "a learner_id from 0 to 3"]),
    ("--failures.at-s -1 0.5", ["failures.at_s[-1]", "0.5", "a learner_id from 0 to 3"]),
    ("--virtual.slow-nodes 9 2.0", ["virtual.slow_nodes[9]", "2.0", "a node of learners, from 1 to 4"]),
    ("--virtual.slow-nodes 0 2.0", ["virtual.slow_nodes[0]", "2.0", "a node of learners, from 1 to 4"]),
    ("--virtual.slow-nodes 1 -2.0", ["virtual.slow_nodes[1]", "-2.0", ">= 0"]),
    ("--network.slow-links 5 2.0", ["network.slow_links[5]", "2.0", "a node, from 0 to 4"]),
    ("--network.slow-links 1 -2.0", ["network.slow_links[1]", "-2.0", ">= 0"]),
    ("--virtual.pause-mean-s -1", ["virtual.pause_mean_s", "-1", ">= 0"]),
    ("--virtual.ranks-per-node 0", ["virtual.ranks_per_node", "0", ">= 1"]),
    ("--virtual.batched", ["virtual.batched", "True", "virtual.gradients = true beside batched"]),
    ("--shard-device cuda", ["shard_device", "'cuda'", "'cpu'"]),
    ("--protocol softsync --protocol.n 5", ["protocol.n", "5", "1 <= n <= lambda = 4"]),
    ("--protocol backup --protocol.b 4", ["protocol.b", "4", "N = lambda - b = 4 - 4 >= 1"]),
    ("--straggler.slowdown 7 2.0", ["straggler.slowdown[7]", "there is no learner 7", "0 ... 3"]),
]
READ = [  # what only the simulation itself looks for
    ("--compute empirical", ["compute.run", "''", "the directory of a run"]),
    ("--compute empirical --compute.run /nowhere", ["/nowhere is no run directory of mpisgd"]),
]


@pytest.mark.parametrize(
    ("words", "said", "more"), [(*each, "") for each in REFUSED + READ] + [(*each, "--print-config") for each in REFUSED[::5]]
)
def test_bad_input_is_refused_with_field_value_and_what_was_expected(
    words: str, said: list[str], more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learners = "" if "learners" in words else "--virtual.learners 4 "
    argv = ["simulate", *(SMALL + learners + words).split(), "--out", str(tmp_path / "run"), *more.split()]
    assert main(argv) == 2
    captured = capsys.readouterr()
    text = " ".join((captured.err + captured.out).replace("│", " ").split())
    for part in said:
        assert part in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_mpirun_is_not_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks refuse, and leave together."""
    left: list[int] = []
    monkeypatch.setattr("mpisgd.__main__.leave_together", lambda status, reason: left.append(status) or status)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert main(["simulate", "--out", str(tmp_path / "run")]) == 2
    assert "simulate runs in one process, but the launcher started 4: leave mpirun out" in capsys.readouterr().err
    assert left == [2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data hdf5 --data.path /nowhere", "DataError: data.path = '/nowhere': found no file"),
        ("--model mnist_cnn", "virtual.parameters = 0: the model's are counted, but model = 'mnist_cnn'"),
        ("--model nowhere:factory", "virtual.parameters = 0: the model's are counted, but model.factory = 'nowhere:factory'"),
    ],
)
def test_a_model_that_cannot_be_counted(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--virtual.no-gradients", *words.split(), "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err


def test_a_directory_is_not_replaced_unless_it_is_said(tmp_path: Path) -> None:
    simulated(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"exists: choose another, or replace the directory by --overwrite"):
        simulate(config(tmp_path / "run"))
    simulated(tmp_path / "run", overwrite=True, seed=2)
