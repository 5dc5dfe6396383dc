"""A batch optimisation that was interrupted goes on as if it never had been: with its history, its steps and its losses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd.base.errors import CheckpointError, ConfigError
from mpisgd.config import config_file, replace
from mpisgd.job import resume
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.effort import spread
from tests.virtual.storm import aftermath
from tests.virtual.storm.draw import Draw, Fault

SIGNAL = (Fault("signal", at_s=0.6),)
END = (Fault("end", at_s=0.6),)
WHOLE = Draw(
    way="sandblaster-order",
    shards=1,
    learners=3,
    evaluator=True,
    tolerant=False,
    seed=1,
    every_updates=1,
    latency_ns=5_000,
    eager_nbytes=0,
    reorders=False,
    flush_rows=16,
    attempts=(),
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def job(path: Path, **changes: Any) -> tuple[Run, list[Any]]:
    """A job as drawn, which replay proves."""
    seen = aftermath.weather(dataclasses.replace(WHOLE, **changes), path)
    assert not seen.failures, seen.failures[0]
    return Run(path / "run-0"), seen.ends


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.set_num_threads(1)
    return job(tmp_path_factory.mktemp("whole"))[0]


def weights_of(run: Run) -> torch.Tensor:
    theta = torch.load(run.path / schema.WEIGHTS, weights_only=True)["theta"]
    return torch.cat([tensor.view(-1) for tensor in theta.values()])


STEPS = ["iteration", "clock", "loss", "gradient_max", "step", "history", "why"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "every"),
    spread([(END, 3), (SIGNAL, 0), (END, 1)], 3, unpack=True),
    ids=["killed, seldom saved", "signal", "killed"],
)
def test_the_bits_are_those_of_a_run_that_was_never_stopped(
    faults: tuple[Fault, ...], every: int, whole: Run, tmp_path: Path
) -> None:
    """A signal comes in the middle of an evaluation; a kill, when something is lost."""
    run, ends = job(tmp_path, attempts=(faults,), every_updates=every)
    assert [bool(end.interrupted) for end in ends] == [faults is SIGNAL, False]
    assert run.attempt == 1
    assert 0 < run.of_coordinator("iterations")["iteration"][-1] == whole.of_coordinator("iterations")["iteration"][-1]
    for name in STEPS:
        assert run.of_coordinator("iterations")[name].tolist() == whole.of_coordinator("iterations")[name].tolist(), name
    assert run.updates["mean_loss"].tolist() == whole.updates["mean_loss"].tolist()
    assert torch.equal(weights_of(run), weights_of(whole))
    assert run.evaluations["loss"].tolist() == whole.evaluations["loss"].tolist()
    goes_on = np.flatnonzero(run.of_coordinator("iterations")["history"])
    assert len(goes_on)  # else there would be none to be lost
    mine, theirs = (each.of_coordinator("commands") for each in (run, whole))
    assert np.array_equal(mine["value"], theirs["value"], equal_nan=True)
    assert np.array_equal(mine["op"], theirs["op"])


@pytest.mark.slow
def test_other_shards_and_learners_go_on_within_rounding(whole: Run, tmp_path: Path) -> None:
    run, _ = job(tmp_path, attempts=(SIGNAL,), again=(3, 5))
    mine, theirs = run.of_coordinator("iterations"), whole.of_coordinator("iterations")
    assert (run.shards, run.lambda_) == (3, 5)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert mine["history"].tolist() == theirs["history"].tolist()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of which there is one attempt."""
    path = tmp_path_factory.mktemp("interrupted")
    torch.set_num_threads(1)
    before, aftermath.MOST_ATTEMPTS = aftermath.MOST_ATTEMPTS, 1
    aftermath.weather(dataclasses.replace(WHOLE, attempts=(SIGNAL,)), path)
    aftermath.MOST_ATTEMPTS = before
    return path / "run-0"


def test_a_checkpoint_has_the_history(interrupted: Path) -> None:
    found = disk.newest(interrupted)
    state = found.coordinator["state"]
    assert len(state["old_dirs"]) == len(state["old_stps"]) == len(state["ro"]) > 0
    assert len(found.tensors(0)) == found.coordinator["slots"] > 2 * len(state["ro"])


def test_another_history_is_refused(interrupted: Path) -> None:
    config = config_file.of_run(interrupted)
    with pytest.raises(ConfigError, match=r"protocol = .*history=3.*: the run to be continued has .*history=2"):
        resume.check_changes(interrupted, replace(config, protocol=dataclasses.replace(config.protocol, history=3)))  # type: ignore[call-arg]


def test_one_of_another_model_or_without_a_history_is_refused(interrupted: Path) -> None:
    config = config_file.of_run(interrupted)
    found = resume.find(interrupted, config)
    with pytest.raises(CheckpointError, match="is of another model"):
        resume.lay_out(found, config, 3, [(0, 10)], "another", averaged=False)
    path = found.checkpoint.path / disk.MANIFEST
    kept = path.read_bytes()
    table = {name: value for name, value in json.loads(kept).items() if name not in ("coordinator", disk.CRC)}
    for each in disk.directories(interrupted)[1:]:
        (each / disk.MANIFEST).unlink(missing_ok=True)
    disk.write_json(path, table)
    with pytest.raises(CheckpointError, match=r"has weights alone, and no history.*--init-from"):
        resume.find(interrupted, config)
    path.write_bytes(kept)
