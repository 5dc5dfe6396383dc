"""`replay` of small virtual runs: how far, with what, what it says where it cannot. All kinds of runs: `test_run_again.py`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.__main__ import main
from mpisgd.base import durable
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.config.config_file import from_mapping
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.records.log import schema, sums
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.replay import UserObjects
from mpisgd.simulate import simulate
from tests.effort import spread
from tests.forge import forge, rewrite, unsealed

UNEVEN = {"name": "lognormal", "mean_s": 0.1, "sigma": 0.5}
COMMON: dict[str, Any] = {
    "epochs": 0.15,
    "mu": 4,
    "threads": 1,
    "model": {"name": "mlp", "hidden": [12]},
    "compute": UNEVEN,
    "log": {"progress": "off"},
    "evaluation": {"every_epochs": 0.0},
}


def simulated(path: Path, user_objects: UserObjects = NO_OBJECTS, *, learners: int = 4, **special: Any) -> Path:
    """The directory of a virtual run of some 54 gradients of uneven learners, and what it differs in from COMMON."""
    with durable.thrown_away():
        simulate(from_mapping({**COMMON, "virtual": {"learners": learners}, **special, "out": str(path)}), user_objects)
    return path


SOFTSYNC = {"name": "softsync", "n": 2}
RUNS: dict[str, dict[str, Any]] = {
    "softsync": {"protocol": {"name": "softsync", "n": 4}, "shards": 3, "averaging": 0.9},
    "backup": {"protocol": {"name": "backup", "b": 2}, "shards": 2, "optimizer": {"name": "rmsprop", "eps": 0.1}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of one of RUNS, which is simulated once; whoever damages it does so in a copy."""
    folder = tmp_path_factory.mktemp("runs")
    return cache(lambda name: simulated(folder / name, **RUNS[name]))


class Sometimes(nn.Module):
    """A loss that is NaN in some mini-batches, by their content; and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(inputs)
        return output * (float("nan") if int(inputs.abs().sum() * 1e4) % 4 == 0 else 1.0)


def test_gradients_that_were_dropped_and_objects_that_were_brought(tmp_path: Path) -> None:
    user_objects = UserObjects(model=Sometimes, loss=nn.functional.multi_margin_loss)
    path = simulated(tmp_path / "run", user_objects, protocol=SOFTSYNC, nonfinite="drop", shards=2, epochs=0.06)
    dropped = Run(path).pushes["verdict"] == Verdict.DROP
    assert 4 < np.count_nonzero(dropped) < len(dropped) - 4
    assert replay.check(path, user_objects) == ""
    assert replay.check(path, trust=True) == "", "by the names that the run has of them"
    with pytest.raises(DataError, match=r"the model has 195 parameters, the model of .* had 650: another model, or changed"):
        replay.check(path, UserObjects(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3))))
    other = UserObjects(model=Sometimes, loss=nn.functional.cross_entropy)
    proof = replay.replay(path, other)
    assert proof.reason.startswith("shard 0, pushes, row 0 (clock 0, learner ")
    assert proof.notes[-1].startswith("from the first gradient on: have model, loss or data changed since")


def test_messages_that_were_refused_may_explain_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = simulated(tmp_path / "run", protocol="hardsync", learners=2, epochs=0.03)
    events = np.repeat(Run(path).events, 2)
    events["kind"][:3] = Event.REFUSED
    monkeypatch.setattr(Run, "events", property(lambda run: events))
    proof = replay.replay(path, UserObjects(loss=nn.functional.multi_margin_loss))
    assert not proof.holds
    assert any(line.startswith("shards refused 3 impossible messages (events REFUSED)") for line in proof.lines())


def test_an_update_of_which_all_was_dropped(tmp_path: Path) -> None:
    user_objects = UserObjects(model=Sometimes)
    path = simulated(tmp_path / "run", user_objects, protocol="hardsync", nonfinite="drop", learners=2, epochs=0.2)
    assert (Run(path).updates["gradients"] == 0).any()
    assert replay.check(path, user_objects) == ""


def test_models_of_the_users_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_parts.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = simulated(tmp_path / "run", protocol=SOFTSYNC, model={"name": "my_parts:make"}, epochs=0.03)
    assert replay.check(path, trust=True) == ""
    assert replay.replay(path, named={"model": "my_parts:make"}).holds
    sys.modules.pop("my_parts")


def test_without_gradients_the_decisions_are_checked(tmp_path: Path) -> None:
    path = simulated(
        tmp_path / "run",
        protocol=SOFTSYNC,
        epochs=1.0,
        virtual={"learners": 20, "gradients": False, "parameters": 50, "train_samples": 400},
        shards=2,
    )
    proof = replay.replay(path)
    assert (proof.holds, proof.gradients, proof.clocks) == (True, 0, (10, 10))
    assert "no gradients" in proof.nothing_to_compare


@pytest.mark.slow
def test_a_batched_run_is_the_same_within_a_tolerance(tmp_path: Path) -> None:
    path = simulated(tmp_path / "run", protocol=SOFTSYNC, model="small_cnn", virtual={"learners": 4, "batched": True}, epochs=0.05)
    proof = replay.replay(path)
    assert proof.holds
    assert 0 < proof.differences[0].largest < 1e-3 * proof.differences[0].moved
    assert proof.lines()[-1].startswith("the same within the tolerance: theta")
    exact = replay.replay(path, tolerance=0.0)
    assert not exact.holds
    assert exact.lines()[-1] == "not the same"
    assert "run again" in exact.reason


# ------------------------------------------------------------------------------------------------------- how far, and what


def test_as_many_threads_as_in_the_run_and_then_torch_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = simulated(tmp_path / "run", protocol=SOFTSYNC, threads=3, epochs=0.03)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    used = set()
    assert replay.replay(path, on_row=lambda number, row, loss: used.add(torch.get_num_threads())).holds
    assert used == {3}
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", spread(RUNS, 2))
def test_until_a_clock(name: str, made: Callable[[str], Path]) -> None:
    """Also where a shard must go on for another to come to that clock."""
    path, shards = made(name), RUNS[name]["shards"]
    updates = Run(path).updates
    end = replay.replay(path, until=int(updates["clock"].max()))
    for until in (0, 7):
        proof = replay.replay(path, until=until)
        assert proof.holds and min(proof.clocks) == until <= max(proof.clocks) < 12
        assert [(point.shard, point.clock) for point in proof.waypoints] == [(shard, until) for shard in range(shards)]
        for point in proof.waypoints:
            if until:
                (recorded,) = updates[(updates["shard"] == point.shard) & (updates["clock"] == until)]["mean_loss"]
                assert point.mean_loss == point.recorded_mean_loss == recorded
        assert [point.crc32 for point in proof.waypoints] != [point.crc32 for point in end.waypoints]
    saved = torch.load(path / "weights.pt", weights_only=True)["theta"]
    theta = torch.cat([value.flatten() for value in saved.values()]).numpy()
    parts = np.array_split(theta, shards)
    assert [point.norm for point in end.waypoints] == pytest.approx([np.linalg.norm(part.astype(float)) for part in parts])


def cut(path: Path, shard: int, pushes: int, updates: int) -> None:
    """As a kill leaves a shard's file: so many rows were flushed."""
    with h5py.File(path / schema.shard_file(shard), "r+") as file:
        forge(file)
        file["committed"][:2] = pushes, updates
        summary = file["summary"][0]
        summary["final_clock"] = -1
        file["summary"][0] = summary
    (path / "DONE").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two shards, whose files are cut in copies."""
    return simulated(tmp_path_factory.mktemp("halves") / "run", protocol=SOFTSYNC, shards=2)


ENDS = [((30, 11), (15, 4)), ((30, 30), (12, 15)), ((0, 30), (0, 15)), ((1, 1), (0, 0))]


@pytest.mark.parametrize(("pushes", "updates"), spread(ENDS, 2, unpack=True))
def test_a_run_that_was_killed_as_far_as_its_log_goes(
    pushes: tuple[int, int], updates: tuple[int, int], halves: Path, tmp_path: Path
) -> None:
    """The shards' logs end at different places; also with the pushes flushed and the updates beside them not."""
    path = shutil.copytree(halves, tmp_path / "run")
    whole = Run(path).pushes
    for shard in range(2):
        cut(path, shard, pushes[shard], updates[shard])
    proof = replay.replay(path)
    assert (proof.reason, proof.differences) == ("", [])
    assert all(clock <= updates[shard] for shard, clock in enumerate(proof.clocks))
    assert min(proof.clocks) >= min(*updates, *(count // 2 - 4 for count in pushes))
    assert (proof.gradients > 0) == (min(pushes) > 0)
    assert "did not finish" in proof.lines()[-2]
    assert proof.lines()[-1] == "the log is true as far as it goes"
    assert len(whole) > sum(pushes)


def test_a_killed_run_too_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    path = simulated(tmp_path / "run", protocol=SOFTSYNC)
    cut(path, 0, 30, 12)

    def another(pushes: np.ndarray) -> None:
        pushes["loss"][20] += 1e-6

    rewrite(path / schema.shard_file(0), "pushes", another)
    assert "run again" in replay.check(path)


# ------------------------------------------------------------------------------------------------------------------ errors


def edit_config(old: str, new: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        text = (path / "config.toml").read_text()
        assert old in text
        (path / "config.toml").write_text(unsealed(text).replace(old, new))

    return edit


def other_version(path: Path) -> None:
    with h5py.File(path / schema.shard_file(0), "r+") as file:
        forge(file)
        file.attrs["schema_version"] = 99


def truncated(path: Path) -> None:
    file = path / schema.shard_file(0)
    file.write_bytes(file.read_bytes()[:5000])


def believed(path: Path) -> None:
    """DONE says of weights.pt what it is now."""
    done = {**(Run(path).done or {}), "weights": sums.of_file(path / "weights.pt")}
    (path / "DONE").write_text(sums.sealed_json(done))


def foreign_weights(path: Path) -> None:
    torch.save({"theta": {"a": torch.zeros(3)}}, path / "weights.pt")
    believed(path)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("short") / "run", protocol=SOFTSYNC, epochs=0.02)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is no run directory of mpisgd"),
        (lambda path: (path / schema.shard_file(0)).unlink(), "lacks shard-000.attempt-0.h5: was the run started without a log"),
        (truncated, "is truncated"),
        (other_version, "has schema version 99"),
        (lambda path: (path / "weights.pt").unlink(), "weights.pt is missing"),
        (lambda path: (path / "weights.pt").write_bytes(b"PK nonsense"), "weights.pt is damaged: 11 bytes with CRC-32"),
        (foreign_weights, "weights.pt cannot be read as the weights of this model"),
        (edit_config("train_samples = 1437", "train_samples = 1436"), r"1437 training samples, the data of .* had 1436"),
        (edit_config("threads = 1\n", "threads = 'x'\n"), "threads"),
        (edit_config("hidden = [\n", "hidden = [ 3,\n"), "the model has .* parameters"),
        (lambda path: (path / "DONE").write_text("{"), "DONE is damaged"),
    ],
)
def test_what_is_no_run_is_refused(damage: Callable[[Path], None], message: str, short: Path, tmp_path: Path) -> None:
    path = shutil.copytree(short, tmp_path / "run")
    damage(path)
    with pytest.raises((DataError, ConfigError), match=message):
        replay.check(path)


def test_a_run_without_a_log(tmp_path: Path) -> None:
    path = simulated(tmp_path / "run", protocol=SOFTSYNC, epochs=0.02, log={"enabled": False, "progress": "off"})
    with pytest.raises(DataError, match="was the run started without a log"):
        replay.check(path)


# ------------------------------------------------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("replay") / "run", protocol=SOFTSYNC, shards=2, epochs=0.05)


@pytest.fixture(scope="module")
def other_run(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One bit of one weight is another."""
    path = tmp_path_factory.mktemp("replay") / "other"
    shutil.copytree(run, path)
    states = torch.load(path / "weights.pt", weights_only=True)
    last = list(states["theta"])[-1]
    states["theta"][last].view(torch.int32)[3] ^= 1
    torch.save(states, path / "weights.pt")
    believed(path)
    return path


def test_the_account_of_a_replay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run)]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith(f"{run}: softsync (n = 2, modulation = inverse), 4 learners x 4 samples, 2 shards")
    assert lines[1].startswith("replayed: ")
    assert lines[-1] == "identical: theta, 910 parameters, bit for bit"
    assert told.err == ""


def test_a_difference_and_where_it_is(other_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(other_run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "not the same"
    assert lines[-2].startswith("theta: 1 parameters differ, by ")
    assert lines[-2].endswith(", place 903 of the flat vector, in the slice 455 to 909 of shard 1")
    assert "bias" in lines[-2]
    assert main(["replay", str(other_run), "--tolerance", "0.01"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the same within the tolerance")


def test_check_says_only_yes_or_no(run: Path, other_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--check"]) == 0
    assert main(["replay", str(other_run), "--check"]) == 1
    assert capsys.readouterr() == ("", "")
    assert main(["replay", str(tmp_path), "--check"]) == 2
    assert capsys.readouterr().err.startswith("mpisgd replay: DataError: ")


def test_rows_of_a_shard_and_a_learner(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pushes = Run(run).pushes
    wanted = pushes[(pushes["shard"] == 1) & (pushes["learner_id"] == 2)]
    assert main(["replay", str(run), "--shard", "1", "--learner", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[: len(wanted)]]
    assert head.split() == ["shard", "row", "clock", "timestamp", "staleness", "learner", "batch", "verdict", "loss", "recomputed"]
    expected = [
        (*(str(row[name]) for name in ("shard", "clock", "timestamp", "staleness", "learner_id", "seq")), f"{row['loss']:.9g}")
        for row in wanted
    ]
    assert [(row[0], *row[2:7], row[8]) for row in rows] == expected
    assert all(row[8] == row[9] for row in rows)


def test_until_on_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--until", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "crc32" in line] == ["shard 0 at clock 3", "shard 1 at clock 3"]
    assert main(["replay", str(run), "--until", "1000"]) == 2
    assert "until = 1000: expected 0 to 9, the last clock of the log" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--shard", "2"], ["--learner", "4"], ["--learner", "-1"]])
def test_shards_and_learners_that_are_not_there(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), *words]) == 2
    assert f"{words[0].removeprefix('--')} = {words[1]}: expected 0 to " in capsys.readouterr().err
