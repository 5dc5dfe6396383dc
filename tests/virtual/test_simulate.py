"""`mpisgd simulate`: the directory of a real run, repeatable bit for bit; the papers' claims; failures; what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import data, models, replay
from mpisgd.__main__ import main
from mpisgd.base.errors import ConfigError, DivergenceError, PeerError
from mpisgd.config import DigitsOptions, MlpOptions
from mpisgd.config.config_file import from_mapping
from mpisgd.data.sampling import EpochSampling
from mpisgd.job.parts import Brought
from mpisgd.liveness import guard
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.simulate import simulate
from tests.virtual.jobs import SIZES, TENSORS, config, merged, recording, simulated, tables

pytestmark = pytest.mark.timeout(300)  # a virtual job may also go on for ever


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves run inside a batch job."""
    for name in (*guard.SIZE_VARIABLES, *guard._RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def weights(run: Run, kind: str = "theta") -> dict[str, np.ndarray]:
    states = torch.load(run.path / schema.WEIGHTS, weights_only=True)
    return {name: tensor.numpy() for name, tensor in states[kind].items()}


def flat(run: Run, kind: str = "theta") -> np.ndarray:
    return np.concatenate([vector.ravel() for vector in weights(run, kind).values()])


def bits(run: Run) -> dict[str, bytes]:
    return {name: vector.tobytes() for name, vector in weights(run).items()}


# -------------------------------------------------------------------------------------------------- from the command line

SHELL = shlex.split(
    "--data synthetic --data.shape 6 --data.classes 3 --data.samples 120 --data.test-samples 30 --model softmax --mu 4 --epochs 2"
    " --threads 1 --protocol softsync --protocol.n 2 --virtual.learners 4 --shards 2 --evaluator --averaging 0.9"
)


@pytest.mark.slow
def test_the_shell_gets_the_directory_of_a_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mpisgd", "simulate", *SHELL, "--out", str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
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


@pytest.mark.parametrize("umask", [0o027, 0o002])
def test_files_have_the_users_mode_and_not_his_environment(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "xyzzy-17")
    before = os.umask(umask)
    try:
        simulate(from_mapping({"model": "softmax", "epochs": 1, "out": str(tmp_path / "run"), "log": {"progress": "off"}}))
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


@pytest.mark.parametrize("base", [SIZES, TENSORS], ids=["sizes", "tensors"])
@pytest.mark.parametrize("name", RUNS)
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


def staleness(out: Path, n: int, sigma: float, **changes: Any) -> np.ndarray:
    """Of the gradients after the first 2 lambda, which come from clock 0 all at once."""
    run = simulated(out, merged(SIZES, FIGURE_1), protocol={"name": "softsync", "n": n}, compute={"sigma": sigma}, **changes)
    settled: np.ndarray = run.pushes["staleness"][run.pushes["verdict"] == Verdict.APPLY][2 * LAMBDA :]
    return settled


@pytest.mark.slow
@pytest.mark.parametrize("n", [15, 30])
def test_mean_staleness_is_n_and_twice_n_is_hardly_ever_exceeded(n: int, tmp_path: Path) -> None:
    """[Zhang16] P(tau > 2n) < 0.0001, over 100,000 gradients. In fact the mean is (lambda - 1) / c, whatever the spread."""
    settled = staleness(tmp_path / "run", n, sigma=0.1)
    assert len(settled) >= 100_000
    assert settled.mean() == pytest.approx(n, rel=0.05)
    assert settled.mean() == pytest.approx((LAMBDA - 1) / (LAMBDA // n), rel=0.001)
    assert (settled > 2 * n).mean() < 0.0001


def test_1_softsync_has_staleness_0_1_2(tmp_path: Path) -> None:
    settled = staleness(tmp_path / "run", 1, sigma=0.1, epochs=0.3)
    assert set(settled.tolist()) == {0, 1, 2}
    assert settled.mean() == pytest.approx((LAMBDA - 1) / LAMBDA, rel=0.001)


def test_where_mini_batches_differ_much_the_mean_holds_and_the_bound_does_not(tmp_path: Path) -> None:
    """The claim needs learners alike: at sigma = 0.3 one gradient in 200 is older than 2n, at 0.2 still one in 25,000."""
    settled = staleness(tmp_path / "run", 30, sigma=0.5, epochs=0.2)
    assert settled.mean() == pytest.approx(LAMBDA - 1, rel=0.005)
    assert 0.02 < (settled > 60).mean() < 0.08


# ------------------------------------------------------------------------------------------------------- the oracle

MU, ALPHA0, SEED = 8, 0.02, 3
ORACLE = {
    "protocol": "hardsync",
    "virtual": {"learners": 4},
    "model": {"name": "mlp", "hidden": [24]},
    "mu": MU,
    "alpha0": ALPHA0,
    "seed": SEED,
    "epochs": 0.4,
    "threads": 1,
    "memory_format": "contiguous",
    "log": {"progress": "off"},
}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=ALPHA0, momentum=0.9)),
    "adagrad": ({"name": "adagrad", "eps": 1e-3}, lambda p: torch.optim.Adagrad(p, lr=ALPHA0, eps=1e-3)),
}


def serial(batch: int, updates: int, optimizer: str) -> np.ndarray:
    """Weights before each update and after the last, (updates + 1, parameters), of torch.optim with `batch` samples each."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24,)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    steps = OPTIMIZERS[optimizer][1](model.parameters())
    sampling = EpochSampling(len(digits.train), batch, 1, SEED)
    seen = []
    for seq in range(updates + 1):
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy())
        inputs, targets = digits.train.batch(sampling.indices(0, seq))
        steps.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        steps.step()
    return np.array(seen)


@pytest.mark.parametrize(("optimizer", "learners", "shards"), [("sgd", 4, 1), ("sgd", 3, 2), ("adagrad", 4, 3), ("sgd", 1, 1)])
def test_hardsync_is_serial_sgd_with_lambda_mu_samples(optimizer: str, learners: int, shards: int, tmp_path: Path) -> None:
    seen: list[np.ndarray] = []
    changes = {"optimizer": OPTIMIZERS[optimizer][0], "shards": shards, "virtual": {"learners": learners}, "averaging": 0.75}
    run = simulated(tmp_path / "run", ORACLE, recording(seen, SEED), **changes)
    updates = -(-int(0.4 * 1437 + 0.999) // (learners * MU))
    assert run.summaries["final_clock"].tolist() == [updates] * shards
    expected = serial(learners * MU, updates, optimizer)
    moved = np.abs(expected[-1] - expected[0]).max()
    assert moved > 0.01, "the serial run must have gone somewhere"
    recorded = np.array(seen).reshape(updates, learners, -1)
    assert (recorded == recorded[:, :1]).all(), "all learners compute at the same weights"
    assert np.abs(recorded[:, 0] - expected[:-1]).max() < 2e-4 * moved
    assert np.abs(flat(run) - expected[-1]).max() < 2e-4 * moved
    averaged = expected[0]
    for theta in expected[1:]:
        averaged = 0.75 * averaged + 0.25 * theta
    assert np.abs(flat(run, "thetabar") - averaged).max() < 2e-4 * moved


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"compute": "constant"},
    "normal": {"compute": {"name": "normal", "deviation_s": 0.1}},
    "heavy tail": {"compute": {"name": "heavy_tail", "tail_probability": 0.5}, "evaluator": True},
    "slow": {"virtual": {"slow_nodes": {"2": 20.0}, "pause_mean_s": 1.0, "pause_every_s": 0.5}},
    "queues": {"network": {"latency_s": 0.5, "bandwidth": 1e5}, "service": {"update_s": 0.5}, "virtual": {"ranks_per_node": 3}},
    "nothing takes time": {"compute": {"name": "constant", "mean_s": 0.0}, "network": {"latency_s": 0.0, "overhead_s": 0.0}},
}


@pytest.mark.slow
def test_the_schedule_does_not_matter_to_hardsync(tmp_path: Path) -> None:
    """Not one bit, on two shards; whoever comes first, and however long it takes."""
    runs = {name: simulated(tmp_path / name, ORACLE, **changes, shards=2) for name, changes in SCHEDULES.items()}
    assert len({tuple(bits(run).values()) for run in runs.values()}) == 1
    assert len({tables(run)["pushes"] for run in runs.values()}) == len(runs)


def test_it_does_matter_to_softsync(tmp_path: Path) -> None:
    runs = [
        simulated(tmp_path / name, ORACLE, **SCHEDULES[name], protocol={"name": "softsync", "n": 4}) for name in ("normal", "slow")
    ]
    assert bits(runs[0]) != bits(runs[1])


# ------------------------------------------------------------------------------------------------------------ training


def test_it_learns_and_is_evaluated_as_a_real_run_is(tmp_path: Path) -> None:
    """Snapshots by epochs, each of theta and thetabar, on test and training data; with a rank for it, and without."""
    for evaluator in (True, False):
        changes: dict[str, Any] = {"evaluation": {"train": True}, "evaluator": evaluator, "averaging": 0.5, "alpha0": 0.2}
        run = simulated(tmp_path / str(evaluator), TENSORS, **changes, protocol="softsync", shards=2, epochs=4)
        rows = run.evaluations
        assert rows["snapshot"].tolist() == [number for number in range(5) for _ in range(4)]
        assert set(zip(rows["averaged"].tolist(), rows["train"].tolist(), strict=True)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
        losses = rows["loss"][(rows["averaged"] == 0) & (rows["train"] == 1)]
        assert losses[-1] < 0.7 * losses[0]
        assert (np.diff(rows["taken_s"]) >= 0).all()
        assert run.summaries["diverged"].tolist() == [0, 0]


def test_batch_norm_and_dropout_work_one_by_one(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, model={"name": "mlp", "hidden": [8], "batch_norm": True})
    assert run.environment["batch_norm_policy"] == "recalibrate on 120 of 120 training samples, drawn at random (1 layer)"


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="not finite; lower alpha0"):
        simulate(config(tmp_path / "run", TENSORS, protocol="softsync", alpha0=1e30, optimizer={"name": "sgd", "momentum": 0.0}))
    assert not (tmp_path / "run" / schema.DONE).exists()
    assert len(Run(tmp_path / "run").pushes), "the last rows are what one wants to see then"


# ------------------------------------------------------------------------------------------------------------- batched

BATCHED = {**ORACLE, "virtual": {"learners": 8}, "epochs": 1.0, "clip_norm": 0.5}


BATCHED_COLUMNS = ["learner_id", "seq", "clock", "timestamp", "arrival_s", "samples", "weight"]


def one_by_one_and_batched(directory: Path, **changes: Any) -> tuple[Run, Run]:
    one, together = (
        simulated(directory / str(batched), merged(BATCHED, {"virtual": {"batched": batched}}), **changes)
        for batched in (False, True)
    )
    return one, together


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", {"name": "softsync", "n": 8}], ids=["hardsync", "n=1", "n=8"])
def test_batched_gradients_are_those_computed_one_by_one(protocol: Any, tmp_path: Path) -> None:
    one, together = one_by_one_and_batched(tmp_path, protocol=protocol, compute="lognormal")
    assert one.pushes[BATCHED_COLUMNS].tolist() == together.pushes[BATCHED_COLUMNS].tolist(), "the schedule is the same"
    first, second = flat(one), flat(together)
    moved = np.abs(first - flat_start()).max()
    assert moved > 0.02
    assert np.abs(first - second).max() < 1e-4 * moved
    assert one.pushes["loss"] == pytest.approx(together.pushes["loss"], abs=1e-4)


def test_learners_that_give_up_are_batched(tmp_path: Path) -> None:
    """What they had begun is forgotten: each gradient is of the weights that they pulled then, as one by one."""
    changes = {"protocol": {"name": "backup", "b": 3, "abort": True}, "compute": {"name": "lognormal", "sigma": 0.7}}
    one, together = one_by_one_and_batched(tmp_path, **changes)
    assert len(one.table("events")[one.table("events")["kind"] == schema.Event.GAVE_UP]) > 10
    assert one.pushes[BATCHED_COLUMNS].tolist() == together.pushes[BATCHED_COLUMNS].tolist()
    assert one.pushes["loss"] == pytest.approx(together.pushes["loss"], abs=1e-4)
    assert replay.check(together.path) == ""


# Where nothing is drawn, messages arrive at the very same nanosecond; the order must not follow that in which the ranks' code
# happened to run, which batching changes.
def test_batched_keeps_the_schedule_also_where_messages_tie(tmp_path: Path) -> None:
    one, together = one_by_one_and_batched(tmp_path, protocol="softsync", compute="constant")
    assert one.pushes[BATCHED_COLUMNS].tolist() == together.pushes[BATCHED_COLUMNS].tolist()


def flat_start() -> np.ndarray:
    start: np.ndarray = serial(1, 0, "sgd")[0]
    return start


class Dropping(nn.Sequential):
    """Its mini-batches draw random numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_models_that_cannot_be_batched_are_refused(tmp_path: Path) -> None:
    norm = config(tmp_path / "run", TENSORS, model={"name": "mlp", "batch_norm": True}, virtual={"batched": True})
    with pytest.raises(ConfigError, match=r"virtual\.batched = True: torch\.func\.vmap refuses this model"):
        simulate(norm)
    with pytest.raises(ConfigError, match=r"virtual\.batched = True: .*random"):
        simulate(config(tmp_path / "run", TENSORS, virtual={"batched": True}), Brought(Dropping))
    simulate(config(tmp_path / "run", TENSORS), Brought(Dropping))


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


# ----------------------------------------------------------------------------------------------------------------- failures

FAILING: dict[str, Any] = {"compute": {"name": "constant", "mean_s": 0.1}, "failures": {"at_s": {"1": 0.75, "2": 1.25}}}


def departures(run: Run, shard: int = 0) -> list[tuple[int, float]]:
    rows = run.events[(run.events["kind"] == Event.DEPARTED) & (run.events["shard"] == shard)]
    return [(int(row["learner_id"]), float(row["time_s"])) for row in rows]


@pytest.mark.parametrize(
    ("protocol", "before", "after"),
    [
        ("hardsync", 4, 2),
        ("backup", 3, 2),
        ({"name": "softsync", "n": 1}, 4, 2),
        ({"name": "softsync", "n": 2}, 2, 1),
        ({"name": "softsync", "n": 3}, 1, 1),
    ],
    ids=["hardsync", "backup", "n=1", "n=2", "n=3"],
)
def test_the_others_go_on_when_learners_fail(protocol: Any, before: int, after: int, tmp_path: Path) -> None:
    """The mini-batch under way is lost, the shards know 0.05 s later, and count with those who are left."""
    run = simulated(tmp_path / "run", protocol=protocol, shards=2, **FAILING)
    assert run.summaries["samples"].tolist() >= [400, 400]
    for shard in range(2):
        assert [who for who, _ in departures(run, shard)] == [1, 2]
        assert [when for _, when in departures(run, shard)] == pytest.approx([0.8, 1.3], abs=1e-3)
    rows = run.pushes[run.pushes["shard"] == 0]
    for learner_id, last_s in ((1, 0.75), (2, 1.25)):
        own = rows["arrival_s"][rows["learner_id"] == learner_id]
        assert last_s - 0.15 < own.max() < last_s
    gradients = run.updates["gradients"][run.updates["shard"] == 0]
    assert gradients[0] == before
    assert (gradients[-10:] == after).all()


def test_all_learners_fail_and_the_end_is_orderly(tmp_path: Path) -> None:
    """Before the samples are done: the books balance, DONE says how far it came."""
    for protocol in ("hardsync", "softsync", "backup"):
        at_s = {str(learner_id): 0.35 + 0.2 * learner_id for learner_id in range(4)}
        run = simulated(tmp_path / protocol, protocol=protocol, shards=2, evaluator=True, failures={"at_s": at_s})
        assert len(departures(run)) == 4
        assert 0 < run.summaries["samples"][0] < 400
        assert all(books.balanced for books in run.books())


def test_all_learners_fail_before_anything(tmp_path: Path) -> None:
    for base in (SIZES, TENSORS):
        at_s = {str(learner_id): 0.0 for learner_id in range(4)}
        run = simulated(tmp_path / str(base is SIZES), base, failures={"at_s": at_s})
        assert run.summaries[["final_clock", "samples", "received"]].tolist() == [(0, 0, 0)]


def test_lives_may_be_drawn(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", failures={"mean_s": 0.5}, virtual={"learners": 8}, protocol="softsync", epochs=20)
    assert 2 <= len(departures(run)) <= 8


def test_a_fail_fast_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, the learner and its second, no DONE; as on real ranks."""
    changes = {**FAILING, "failures": {"at_s": {"1": 0.75}, "then": "stop"}}
    with pytest.raises(PeerError, match=r"learner 1 failed at 0\.75 s of virtual time: the job is ended, as a fail-fast run is"):
        simulate(config(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / schema.DONE).exists()
    assert len(Run(tmp_path / "run").pushes) > 0
    words = shlex.split(f"{SMALL} --failures.at-s 1 0.75 --failures.then stop --out {tmp_path / 'again'}")
    assert main(["simulate", *words]) == 1
    assert "mpisgd simulate: PeerError: learner 1 failed" in capsys.readouterr().err


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
    ("--virtual.pause-mean-s -1", ["virtual.pause_mean_s", "-1", ">= 0"]),
    ("--virtual.ranks-per-node 0", ["virtual.ranks_per_node", "0", ">= 1"]),
    ("--virtual.batched", ["virtual.batched", "True", "virtual.gradients = true beside it"]),
    ("--device cuda", ["device", "'cuda'", "'cpu'"]),
    ("--protocol softsync --protocol.n 5", ["protocol.n", "5", "1 <= n <= lambda = 4"]),
    ("--protocol backup --protocol.b 4", ["protocol.b", "4", "N = lambda - b = 4 - 4 >= 1"]),
    ("--straggler.slowdown 7 2.0", ["straggler.slowdown[7]", "there is no learner 7", "0 ... 3"]),
]
READ = [  # what only the simulation itself looks for
    ("--compute empirical", ["compute.run", "''", "the directory of a run"]),
    ("--compute empirical --compute.run /nowhere", ["/nowhere is no run directory of mpisgd"]),
]


@pytest.mark.parametrize(
    ("words", "said", "more"), [(*each, "") for each in REFUSED + READ] + [(*each, "--print-config") for each in REFUSED]
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
    assert "simulate runs in one process, but the launcher started 4: start it without mpirun" in capsys.readouterr().err
    assert left == [2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data hdf5 --data.path /nowhere", "DataError: data.path = '/nowhere': there is no such file"),
        ("--model mnist_cnn", "virtual.parameters = 0: the model's are counted, but model = 'mnist_cnn'"),
        ("--model nowhere:factory", "virtual.parameters = 0: the model's are counted, but model.factory = 'nowhere:factory'"),
    ],
)
def test_a_model_that_cannot_be_counted(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--virtual.no-gradients", *words.split(), "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err


def test_a_directory_is_not_replaced_unless_it_is_said(tmp_path: Path) -> None:
    simulated(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"exists: choose another, or say --overwrite"):
        simulate(config(tmp_path / "run"))
    simulated(tmp_path / "run", overwrite=True, seed=2)
