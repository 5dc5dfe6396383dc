"""The benches: what they compare and tell, and what is refused before anything is measured. Launches are virtual runs here."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch

from mpisgd import models
from mpisgd.__main__ import main
from mpisgd.base.errors import ConfigError
from mpisgd.bench import scale, train, wire
from mpisgd.bench.checkpoint import lines_of
from mpisgd.bench.parts import runs
from mpisgd.bench.parts.cases import CASES, LEARNERS, USUAL, WARM_UP, WAYS, config_of
from mpisgd.bench.parts.measured import over, show, spread
from mpisgd.cli.bench import BENCHES, Bench, Options, _tell
from mpisgd.comm.mpi.launch import version
from mpisgd.config import CheckpointOptions, Config, ConstantComputeOptions, FaultOptions, VirtualOptions, compatibility, replace
from mpisgd.exchange.roles import of_job
from mpisgd.protocols import AllreduceOptions
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from tests import run
from tests.bench import faults, log, peers, settings
from tests.bench.__main__ import BENCHES as OWN_BENCHES
from tests.bench.__main__ import Options as OwnOptions
from tests.bench.__main__ import main as own_benches
from tests.bench.peers import torch_networks
from tests.effort import spread as spread_cases
from tests.unit.fabricate import Log, row, rows, write_run


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, int, dict[str, str]]]:
    """Each launch is a virtual run, in which a mini-batch takes 1 ms for each of its samples; those of politeness, half of it."""
    seen: list[tuple[Config, int, dict[str, str]]] = []

    def fake(config: Config, ranks: int, options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Run:
        env = dict(env or {})
        seen.append((config, ranks, env))
        faster = 0.5 if env.get("MPISGD_WAIT") == "polite" else 1.0
        learners = ranks - (0 if isinstance(config.protocol, AllreduceOptions) else 1)
        virtual = VirtualOptions(
            learners=learners, ranks_per_node=100, gradients=False, parameters=1000, train_samples=config.data.samples
        )
        mine = replace(
            config,
            virtual=virtual,
            compute=ConstantComputeOptions(mean_s=1e-3 * config.mu * faster),
            faults=FaultOptions(),
            checkpoint=CheckpointOptions(),
        )
        return Run(simulate(mine).path)

    monkeypatch.setattr(runs, "launched", fake)
    monkeypatch.setattr(scale, "CASE", dataclasses.replace(scale.CASE, updates=24))
    for each in (settings, faults):
        monkeypatch.setattr(each, "LONGER", 1)
    return seen


# ------------------------------------------------------------------------------------------------------- how it is told


def test_median_and_range_and_ratios_of_neighbours() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "min": 1.0, "max": 10.0}
    assert over([2.0, 9.0], [1.0, 3.0]) == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert show({"median": 0.0123, "min": 0.01, "max": 0.02}, 1, 1e3) == "12.3 (10.0 to 20.0)"
    with pytest.raises(ValueError, match="shorter"):
        over([1.0, 2.0], [1.0])


RATES = {
    "loops": [100.0, 110.0],
    "loops, contiguous": [50.0, 55.0],
    "DDP": [70.0, 90.0],
    "DDP, views": [80.0, 60.0],
    "hardsync": [80.0, 90.0],
    "allreduce": [88.0, 99.0],
    "softsync": [95.0, 105.0],
}


def test_the_best_way_is_one_without_staleness_and_the_better_ddp_counts() -> None:
    assert train.best_of(RATES) == "allreduce"
    found = train.ratios(RATES)
    assert found["best synchronous / best DDP"] == over([88.0, 99.0], [80.0, 90.0])
    assert found["best synchronous / loops"] == over([88.0, 99.0], [100.0, 110.0])
    assert found["loops / loops, contiguous"]["median"] == 2.0
    assert found["softsync / loops"]["max"] == pytest.approx(105 / 110)
    row = {
        "case": "a case",
        "images_per_s": {name: spread(values) for name, values in RATES.items()},
        "ratios": found,
        "best_synchronous": train.best_of(RATES),
    }
    lines = train.lines_of([row])
    assert lines[0].startswith("a case: images/s loops 105, ")
    assert lines[-1] == "  here allreduce is 1.10 times as fast as hardsync: --protocol allreduce"
    without = {name: values for name, values in row["images_per_s"].items() if name != "hardsync"}
    assert train.lines_of([row | {"images_per_s": without}])[-1].startswith("  softsync / loops"), (
        "nothing to compare the best with"
    )
    asynchronous = {name: values for name, values in RATES.items() if not (name in WAYS and WAYS[name].synchronous)}
    assert train.best_of(asynchronous) is None
    assert "best synchronous / loops" not in train.ratios(asynchronous)


@pytest.mark.parametrize("name", WAYS)
def test_each_way_is_one_that_two_learners_can_go(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    config = config_of(tmp_path, CASES["cnn-16"], **way.special)
    roles = of_job(config, ["n"] * len(way.ranks))
    protocol = config.protocol.make(roles.lambda_)
    assert len(protocol.present) == roles.lambda_
    compatibility.check(config)
    assert len(way.ranks) <= 3 or (roles.coordinator_rank, roles.lambda_) == (1, LEARNERS)
    if way.synchronous:
        assert protocol.fresh and protocol.gradients_per_update == roles.lambda_


def test_images_are_counted_from_the_end_of_the_warm_up(tmp_path: Path) -> None:
    case = CASES["cnn-4"]
    updates = [
        row("updates", clock=clock, samples=8 * clock, time_s=clock if clock <= WARM_UP else 2.0 * clock) for clock in range(1, 21)
    ]
    write_run(tmp_path / "run", Log(updates=rows("updates", updates)), {"name": "hardsync"}, 2)
    assert runs.rate_of(Run(tmp_path / "run"), case) == 8 * 10 / (40.0 - WARM_UP)


@pytest.mark.parametrize("layout", wire.LAYOUTS)
def test_a_layout_has_first_its_shards_then_its_learners(layout: wire.Layout) -> None:
    assert [layout.learns(rank) for rank in range(layout.ranks + 1)] == [False] * layout.shards + [True] * layout.learners + [False]
    assert sum(end - start for start, end in map(lambda shard: layout.slice_of(shard, 11), range(layout.shards))) == 11


# ------------------------------------------------------------------------------------------------- launches of their own


@pytest.mark.slow
def test_settings_name_what_is_worth_an_export(launches: list[tuple[Config, int, dict[str, str]]]) -> None:
    rows = list(settings.measure(2))
    assert {len(each) for _, _, each in launches} == {1, 2}, "vectors are sent"
    for each in rows:
        assert each["over_off"]["MPISGD_WAIT=polite"]["median"] == pytest.approx(2.0, rel=0.1)
        assert each["over_off"]["MPISGD_WAIT=blocking"]["median"] == pytest.approx(1.0)
        assert settings.lines_of([each])[-1] == "  export MPISGD_WAIT=polite  # for a model of this size"
        none = {"over_off": {"A=1": spread([1.01])}, "images_per_s": each["images_per_s"], "case": ""}
        assert settings.lines_of([none])[-1] == "  leave all as it is: nothing tried here is faster by 3 %"


@pytest.mark.slow
def test_scaling_and_what_is_predicted_of_it(
    launches: list[tuple[Config, int, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction draws from the seconds in the logs of real ranks, which must still be there."""
    predict = scale.predict

    def predict_where_logs_are(config: Config) -> Any:
        assert Path(launches[-1][0].out).exists()
        return predict(config)

    monkeypatch.setattr(scale, "predict", predict_where_logs_are)
    rows = list(scale.measure(1, [1, 2, 4]))
    points = {(each["protocol"], each["scaling"], each["learners"]): each for each in rows}
    assert len(points) == len(rows) == 2 * (3 + 2)
    for (_, kind, learners), each in points.items():
        assert each["mu"] == (64 if kind == "weak" else 64 // learners)
        assert each["speed_up"]["median"] == pytest.approx(learners, rel=0.1), "a sample takes as long wherever it is"
        assert each["measured_over_predicted"]["median"] == pytest.approx(1.0, abs=0.05)
    assert len(scale.lines_of(rows)) == 1 + len(rows)
    assert {ranks for _, ranks, _ in launches} == {2, 3, 5}


def test_up_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert scale.up_to_the_cores() == expected


@pytest.mark.slow
def test_the_cost_of_faults_is_that_of_three_ways_in_turn(launches: list[tuple[Config, int, dict[str, str]]]) -> None:
    rows = list(faults.measure(3, every_updates=20))
    ways = [(config.checkpoint.every_updates > 0, config.log.quiet_s > 0, config.faults.mode) for config, _, _ in launches[:9]]
    off, watched, tolerant = (False, False, "auto"), (True, True, "auto"), (True, True, "tolerant")
    modes = [(a, b, "tolerant" if mode == "tolerant" else "auto") for a, b, mode in ways]
    assert modes == [off, watched, tolerant, watched, tolerant, off, tolerant, off, watched]
    for each in rows:
        assert all(math.isclose(ratio["median"], 1.0) for ratio in each["over_off"].values())
        assert len(lines_of([each])) == 3


# --------------------------------------------------------------------------------------------------------------- peers


@pytest.mark.slow
@pytest.mark.parametrize("key", spread_cases(USUAL, 3))
def test_a_peer_that_knows_nothing_of_mpisgd_trains_the_same_network(key: str) -> None:
    ours = models.make(CASES[key].model, input_shape=(3, 32, 32), classes=10, seed=1)
    theirs = torch_networks.make(key)
    theirs.load_state_dict(ours.state_dict())
    inputs, targets = torch_networks.Batches(5, seed=1).next()
    assert inputs.shape == (5, 3, 32, 32) and targets.shape == (5,)
    torch.testing.assert_close(theirs(inputs), ours(inputs))


def test_what_two_learners_say_in_one_line_is_heard() -> None:
    said = 'W0: {now}\n{"images": 960, "seconds": 0.5}{"images": 960, "seconds": 0.75}\n\nbye\n'
    assert peers.told_in(said) == [{"images": 960, "seconds": 0.5}, {"images": 960, "seconds": 0.75}]


def test_peers_that_are_not_installed_are_left_out_and_said(
    launches: list[tuple[Config, int, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "installed", lambda peer, python: peer.needs == "tensorflow")
    monkeypatch.setattr(peers, "run", lambda name, key, case, python: 1000.0)
    (row,) = peers.measure(1, ["cnn-16"], "python")
    assert set(row["images_per_s"]) == {*peers.OURS, "TensorFlow SyncReplicas", "TensorFlow, 2 of 3"}
    assert row["not_installed"] == ["Horovod", "torch RPC server"]
    assert row["ratios"]["hardsync / TensorFlow, 2 of 3"]["median"] == row["images_per_s"]["hardsync"]["median"] / 1000
    assert peers.lines_of([row])[-1] == "  not installed: torch RPC server"


def test_a_network_that_peers_do_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cases = 'alexnet-16': expected some of cnn-4, .* for peers"):
        list(peers.measure(1, ["cnn-16", "alexnet-16"], sys.executable))


def test_what_is_installed() -> None:
    assert peers.installed(peers.Peer("", "json", 1), sys.executable)
    assert not peers.installed(peers.Peer("", "no_such_module", 1), sys.executable)


def test_a_launch_that_left_no_run_is_told_of_whatever_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "mpirun", lambda ranks: ["true"])
    with pytest.raises(ConfigError, match=r"mpisgd train .*: exit status 0"):
        runs.launched(replace(Config(), out=str(tmp_path / "run")), 2)


def test_a_peer_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "broken", peers.Peer("__init__.py", "json", 1))
    monkeypatch.setattr(peers, "_HERE", Path("/no/such/place"))
    with pytest.raises(ConfigError, match=r"broken: exit status \[2\]\n.*No such file"):
        peers.run("broken", "cnn-4", CASES["cnn-4"], sys.executable)


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["wirre"], "bench 'wirre' is unknown; did you mean 'wire'?"),
        (["virtual", "--repetitions", "0"], "repetitions = 0: expected a number >= 1"),
        (
            ["train", "--ways", "hardsink"],
            "ways = 'hardsink': expected some of hardsync, hardsync-in-place, hardsync-whole, hardsync-node, allreduce",
        ),
        (["train", "--cases", "cnn-5"], "cases = 'cnn-5': expected some of cnn-4, cnn-16"),
        (
            ["wire", "--optimizers", "sdg"],
            "optimizers = 'sdg': expected some of sgd, adagrad, rmsprop, adam, adamw, lars, lamb; did",
        ),
        (["virtual", "--sizes", "3"], "sizes = (3,): expected bytes of at least one float32"),
    ],
)
def test_what_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_bench_that_starts_its_own_ranks_is_started_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert main(["bench", "scale"]) == 2
    assert "bench scale: found 3 processes, expected 1: leave mpirun out" in capsys.readouterr().err


def test_the_usual_cases_are_known_and_numbers_of_ranks_make_sense() -> None:
    assert Options().cases == USUAL and set(USUAL) <= set(CASES) and set(Options().ways) <= set(WAYS)
    assert set(Options().optimizers) == set(wire.OPTIMIZERS)
    assert [ranks for ranks in range(1, 7) if BENCHES["wire"].fits(ranks)] == [2, 3, 4, 5, 6]
    assert [ranks for ranks in range(1, 7) if BENCHES["train"].fits(ranks)] == [3, 4, 5, 6]


@pytest.mark.parametrize(("package", "benches"), [("mpisgd.bench", BENCHES), ("tests.bench", OWN_BENCHES)])
def test_each_bench_takes_options_that_there_are(package: str, benches: Mapping[str, Bench]) -> None:
    options = Options if benches is BENCHES else OwnOptions
    for what, bench in benches.items():
        page = importlib.import_module(f"{package}.{what}")
        taken: list[Any] = [getattr(options(), name) for name in bench.takes]
        inspect.signature(page.measure).bind(*(["communicator"] if bench.ranks > 1 else []), *taken)
        inspect.signature(page.lines_of).bind([])


def test_all_are_run_each_on_its_ranks_to_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "run", lambda command: (seen.append(command), 7 if command[-3] == "log" else 0)[1])
    assert own_benches(["all", "--repetitions", "1"]) == 7
    assert [command[-3] for command in seen] == [*BENCHES, "oversubscribed", "log"]
    ranks = [int(command[command.index("-n") + 1]) if "-n" in command else 1 for command in seen]
    assert ranks == [4, 3, 3, 1, 1, 31, 3]
    assert [command[-4] for command in seen] == ["bench"] * 5 + ["tests.bench"] * 2


@pytest.mark.slow
def test_one_json_file_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, asked = spread([1.0]), Mock()
    row: dict[str, Any] = {"protocol": "hardsync", "scaling": "weak", "learners": 2, "mu": 64, "speed_up": one}
    row |= {"measured_over_predicted": one, "images_per_s": {"measured": one, "predicted": one}}
    asked.return_value = [row]
    monkeypatch.setattr(scale, "measure", asked)
    assert main(["bench", "scale", "--repetitions", "1", "--learners", "2", "--out", str(tmp_path)]) == 0
    written: dict[str, Any] = json.loads((tmp_path / "scale.json").read_text())
    asked.assert_called_once_with(1, (2,))
    assert (written["bench"], written["rows"]) == ("scale", [row])
    assert {"processor", "cores", "versions", "load_average"} <= set(written["machine"])
    assert written["machine"]["mpi"] == version() != "", "whose ranks these were"
    assert capsys.readouterr().out.splitlines()[0].startswith("protocol")


def test_a_log_that_is_kept_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every second window are in the file, and the seconds of each window are those between its ends."""
    now = iter(np.cumsum(range(100)).astype(float))
    monkeypatch.setattr(log.time, "perf_counter", lambda: next(now))
    file = log.LogInTurn(tmp_path / "a.h5", shard=0, flush_rows=5, flush_s=1e9)
    rest = tuple(0 for _ in schema.TABLES["updates"].names or ())[2:]
    for clock in range(1, WARM_UP + 5 * log.WINDOW + 1):
        file.append("updates", (0, clock, *rest))
        assert file.kept == (clock > WARM_UP and (clock - WARM_UP) // log.WINDOW % 2 == 1)
    file.close()
    off, on = log.split(file.windows)
    assert file.windows == [1, 2, 3, 4, 5] and off.tolist() == [2, 4] and on.tolist() == [2, 4]
    with h5py.File(tmp_path / "a.h5") as written:
        clocks = written["updates"]["clock"][:].tolist()
    first = [WARM_UP + log.WINDOW + place for place in range(1, log.WINDOW + 1)]
    assert clocks == [*first, *(clock + 2 * log.WINDOW for clock in first)]


def test_what_was_measured_is_kept_where_a_bench_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured() -> Iterator[dict[str, Any]]:
        yield {"case": "first"}
        assert capsys.readouterr().out == "table\nfirst\n"
        yield {"case": "second"}
        raise KeyboardInterrupt

    def lines_of(rows: list[dict[str, Any]]) -> list[str]:
        return ["table", *(row["case"] for row in rows)]

    with pytest.raises(KeyboardInterrupt):
        _tell("some", str(tmp_path), measured(), lines_of, mpi="", ranks=1)
    assert capsys.readouterr().out == "second\n"
    assert json.loads((tmp_path / "some.json").read_text())["rows"] == [{"case": "first"}, {"case": "second"}]
