"""Real ranks begin with given weights: replay proves it; wrong ones are refused by all ranks, before they begin."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpisgd import replay
from mpisgd.__main__ import main
from mpisgd.base.draws import as_in_the_run
from mpisgd.base.errors import EXIT_INTERRUPTED
from mpisgd.comm.mpi.launch import environment, mpirun
from mpisgd.config import Part, config_file, replace
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.records.log.reader import Run

from .conftest import execute, launch

COMMON = (
    *("--protocol", "hardsync", "--data", "synthetic", "--data.samples", "120", "--data.classes", "3"),
    *("--mu", "4", "--epochs", "1", "--alpha0", "0.002", "--threads", "1", "--log.progress", "off"),
    *("--evaluation.buffers", "recalibrate"),
)
SMALL = ("--model.hidden", "8", "--model.batch-norm")
KEPT = ("--checkpoint.every-updates", "5", "--evaluation.every-epochs", "0.5")


@pytest.mark.slow
def test_hardsync_from_the_weights_of_a_run(tmp_path: Path) -> None:
    """Two shards and three learners; the first snapshot has the error of the last one of the run before."""
    two = ("train", *COMMON, *SMALL, "--shards", "2", *KEPT, "--init-from", "begun.pt", "--out", "run")
    assert main(["simulate", *COMMON, *SMALL, "--out", str(tmp_path / "first")]) == 0
    assert main(["export", str(tmp_path / "first"), str(tmp_path / "begun.pt")]) == 0
    trained, refused = execute(
        tmp_path, [(5, tmp_path, two), (5, tmp_path, (*two, "--model.hidden", "9", "--out", "other"))], ranks=5
    )
    assert trained.status == 0, trained.text
    run, before = Run(tmp_path / "run"), Run(tmp_path / "first")
    assert run.evaluations["loss"][0] == before.evaluations["loss"][-1] > run.evaluations["loss"][-1]
    proof = replay.replay(run.path)
    assert proof.holds, proof.reason
    assert any("begins with the weights of" in line for line in proof.lines())

    assert main(["export", str(run.path), str(tmp_path / "fifth.pt"), "--clock", "5"]) == 0
    made = replace(config_file.of_run(run.path), init_from=str(tmp_path / "fifth.pt"))
    with as_in_the_run(1):
        data, loss = parts.load_data(made, NO_OBJECTS), parts.load_loss(made, NO_OBJECTS)
        model = parts.build_model(made, parts.meta_of(data), NO_OBJECTS)
        found = parts.make_measure(made, model, loss, data).of(Part.TEST)
    snapshots = run.evaluations[run.evaluations["clock_max"] == 5]
    assert [found.loss] == snapshots["loss"].tolist(), "batch-norm statistics are those of the evaluation"

    assert refused.status == 2
    assert "init_from = 'begun.pt' is not of this model: '1.weight' of the file is float (8, " in refused.text
    assert "Traceback" not in refused.text
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_what_no_checkpoint_has_is_wanted_again_when_it_goes_on(tmp_path: Path) -> None:
    """A run with batch norm that a signal has interrupted is not gone on with without the file; with it, and replay proves both."""
    begun, out = tmp_path / "begun.pt", tmp_path / "run"
    assert main(["simulate", *COMMON, *SMALL, "--out", str(tmp_path / "first")]) == 0
    assert main(["export", str(tmp_path / "first"), str(begun)]) == 0
    words = ["train", *COMMON, *SMALL, *KEPT, "--shards", "2", "--init-from", str(begun), "--out", str(out), "--epochs", "400"]
    slow = ["--straggler.delay", "constant", "--straggler.delay-mean-s", "0.1"]
    process = subprocess.Popen([*mpirun(3), sys.executable, "-m", "mpisgd", *words, *slow], env=environment())
    try:
        deadline_s = time.monotonic() + 100
        while not list(out.glob("checkpoint/*/manifest.json")) and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == EXIT_INTERRUPTED
    finally:
        process.kill()
    begun.rename(tmp_path / "aside.pt")
    again = ("-m", "mpisgd", "train", "--resume", str(out))
    refused = launch(3, *again)
    assert refused.status == 2
    assert "begun.pt is not there" in refused.text
    (tmp_path / "aside.pt").rename(begun)
    made = Run(out)
    epochs = made.updates["samples"][made.updates["shard"] == 0].sum() / made.environment["train_samples"] + 0.5
    assert launch(3, *again, "--epochs", f"{epochs:.3f}").status == 0
    assert replay.replay(out).holds
