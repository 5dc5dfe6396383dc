"""`mpisgd export`: weights of runs and of checkpoints, as files that `--init-from` and torch read, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mpisgd.__main__ import main
from mpisgd.config import config_file, replace
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.records import weights
from mpisgd.records.checkpoint import checkpoint as disk
from mpisgd.vectors.flat import FlatModel
from tests.unit.older_runs import unpack
from tests.virtual.jobs import TENSORS, config, simulated


def built(run: Path, begun: Path) -> FlatModel:
    """The model of a run, begun with these weights."""
    made = replace(config_file.of_run(run), init_from=str(begun))
    return parts.build_model(made, parts.meta_of(parts.load_data(made, NO_OBJECTS)), NO_OBJECTS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "run"
    simulated(path, TENSORS, model={"name": "mlp", "hidden": [8], "batch_norm": True}, averaging=0.9)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(("words", "name"), [((), "theta"), (("--averaged",), "thetabar")])
def test_the_last_weights_there_and_back(
    suffix: str, words: tuple[str, ...], name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    out = tmp_path / f"w{suffix}"
    assert main(["export", str(trained), str(out), *words]) == 0
    saved = torch.load(trained / "weights.pt", weights_only=True)[name]
    assert capsys.readouterr().out == f"{out}: {len(saved)} tensors, {sum(each.numel() for each in saved.values())} numbers\n"
    for found in (weights.read(out), built(trained, out).module.state_dict()):
        assert set(found) == set(saved)
        assert all(torch.equal(found[key], saved[key]) for key in saved)


def test_those_of_a_checkpoint_of_a_run_that_did_not_end(tmp_path: Path) -> None:
    """Of an earlier commit, of two shards: the bits of its slices, by the names of the model."""
    run, out = unpack("hardsync", tmp_path), tmp_path / "w.pt"
    assert main(["export", str(run), str(out), "--clock", "13"]) == 0
    found = disk.read(disk.directory_of(run, 13))
    slices = np.concatenate([found.tensors(shard)["weights"] for shard in (0, 1)])
    assert np.array_equal(built(run, out).weights.numpy(), slices)
    assert list(torch.load(out, weights_only=True)) == list(built(run, out).module.state_dict())


#: Words after the run and the file, the file -> what is said.
WRONG = {
    "no such clock": (("--clock", "7"), "w.pt", "has no checkpoint of clock 7: found clocks 13"),
    "not averaged": (("--clock", "13", "--averaged"), "w.pt", "has no averaged: the run had averaging = 0"),
    "not ended": ((), "w.pt", "has no weights.pt: a run writes weights at the end"),
    "suffix": (("--clock", "13"), "w.npz", "w.npz: expected a name ending in .pt or .safetensors"),
    "there": (("--clock", "13"), "hardsync/there.pt", "there.pt exists: choose another name, or remove the file"),
    "folder": (("--clock", "13"), "nowhere/w.pt", "w.pt cannot be made: there is no"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, out, said = WRONG[name]
    run = unpack("hardsync", tmp_path)
    (run / "there.pt").write_text("mine")
    assert main(["export", str(run), str(tmp_path / out), *words]) == 2
    assert said in capsys.readouterr().err
    assert (run / "there.pt").read_text() == "mine"
    assert not list(tmp_path.rglob("w.*"))


def test_no_run_and_no_checkpoints(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "w.pt")]) == 2
    assert "is no run directory of mpisgd" in capsys.readouterr().err
    assert main(["export", str(trained), str(tmp_path / "w.pt"), "--clock", "3"]) == 2
    assert "has no checkpoint of clock 3: there are none" in capsys.readouterr().err


def test_another_model_and_foreign_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the checkpoint's fingerprint says, and what SECURITY.md says."""
    run, out = unpack("hardsync", tmp_path), str(tmp_path / "w.pt")
    made = config_file.of_run(run)
    other = config(run, TENSORS)
    (run / "config.toml").write_text(config_file.dumps(replace(made, model=other.model), {"learners": 3, "threads": 1}))
    assert main(["export", str(run), out, "--clock", "13"]) == 2
    assert "is of another model: parameters of the checkpoint" in capsys.readouterr().err
    text = config_file.dumps(replace(made, loss="nowhere.there:loss"), {"learners": 3, "threads": 1})
    (run / "config.toml").write_text(text)
    assert main(["export", str(run), out, "--clock", "13"]) == 2
    assert "names code to import" in capsys.readouterr().err
    assert main(["export", str(run), out, "--clock", "13", "--loss", "cross_entropy"]) == 0
