"""Training samples that are set aside: nothing trains on them, they are evaluated, and may tell which weights are best."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.config import Hdf5Options, Part
from mpisgd.data import DataSet, Split, as_dataset, load, set_aside
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.records import weights
from tests.virtual.jobs import TENSORS, config, simulated

SAMPLES, ASIDE = 40, 12


def numbered() -> torch.Tensor:
    """Inputs that tell their number."""
    return torch.arange(SAMPLES, dtype=torch.float32).reshape(SAMPLES, 1)


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples of a user's own, of which it is noted which were fetched."""

    classes = 4

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return torch.full((1,), float(index)), index % 4


def of_file(folder: Path) -> DataSet:
    with h5py.File(folder / "data.h5", "w") as file:
        file["train/inputs"], file["train/targets"] = numbered().numpy(), np.arange(SAMPLES) % 4
    return load(Hdf5Options(path=str(folder / "data.h5"), test_inputs=""), seed=1)


def made(kind: str, folder: Path) -> DataSet:
    targets = torch.arange(SAMPLES) % 4
    match kind:
        case "tensors":
            return as_dataset(((numbered(), targets), None), "data", {})
        case "a Dataset":
            return as_dataset((Numbered(), None), "data", {})
        case "a DataLoader":
            return as_dataset((DataLoader(TensorDataset(numbered(), targets), batch_size=4, num_workers=2), None), "data", {})
        case "collated":
            return as_dataset((Numbered(), None), "data", {}, nested=True)
        case _:
            return of_file(folder)


KINDS = ("tensors", "a Dataset", "a DataLoader", "collated", "HDF5")


def numbers(split: Split) -> list[int]:
    inputs, targets = split.batch(np.arange(len(split)))
    found = [int(each) for each in inputs.flatten()]
    assert targets.tolist() == [number % 4 for number in found]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_in_one_part(kind: str, tmp_path: Path) -> None:
    whole = made(kind, tmp_path)
    data = set_aside(whole, ASIDE, 1)
    assert data.validation is not None
    trained, aside = numbers(data.train), numbers(data.validation)
    assert (len(trained), len(aside)) == (SAMPLES - ASIDE, ASIDE) == (len(data.train), len(data.validation))
    assert sorted(trained + aside) == list(range(SAMPLES))
    assert numbers(whole.train) == list(range(SAMPLES)), "the whole is as it was"
    again, other = (set_aside(whole, ASIDE, seed).validation for seed in (1, 2))
    assert again is not None and numbers(again) == aside
    assert other is not None and numbers(other) != aside, "drawn by the seed"
    assert numbers(data.train.part(np.arange(3))) == trained[:3], "a part of a part"
    assert (data.classes, data.input_shape) == (whole.classes, whole.input_shape)
    assert data.train.loaded_in == whole.train.loaded_in
    assert getattr(data.train, "workers", None) is getattr(whole.train, "workers", None)


def test_samples_in_memory_are_not_copied() -> None:
    whole = made("tensors", Path())
    data = set_aside(whole, ASIDE, 1)
    assert data.validation is not None
    assert data.train.inputs is whole.train.inputs is data.validation.inputs


@pytest.mark.parametrize("kind", ["a DataLoader", "collated"])
def test_worker_processes_are_given_a_part(kind: str) -> None:
    train = set_aside(made(kind, Path()), ASIDE, 1).train
    assert numbers(pickle.loads(pickle.dumps(train))) == numbers(train)


def test_what_cannot_be_set_aside_is_refused() -> None:
    data = made("tensors", Path())
    with pytest.raises(ConfigError, match=r"data\.validation = 40: expected fewer than the 40 training samples"):
        set_aside(data, SAMPLES, 1)
    with pytest.raises(ConfigError, match=r"data\.validation = -1: expected"):
        config(Path("run"), TENSORS, data={"validation": -1})
    with pytest.raises(
        ConfigError, match=r"evaluation\.best = 'validation_loss': expected data\.validation > 0, or a name without"
    ):
        config(Path("run"), TENSORS, evaluation={"best": "validation_loss"})

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield torch.zeros(1), 0

    with pytest.raises(
        ConfigError, match=r"data\.validation: .* is a stream, and nobody can choose samples of a stream: expected 0"
    ):
        simulated(
            Path("run"), TENSORS, UserObjects(data=(Endless(), None)), data={"validation": 4}, sampling="stream", epoch_samples=40
        )


def test_nothing_trains_on_samples_set_aside(tmp_path: Path) -> None:
    samples = Numbered()
    user_objects = UserObjects(data=(samples, None), model=lambda: nn.Linear(1, 4))
    job = {"data": {"validation": ASIDE}, "evaluation": {"every_epochs": 0}, "alpha0": 1e-4, "epochs": 5}
    path = tmp_path / "run"
    made_config = config(path, TENSORS, **job)
    aside = set_aside(parts.load_data(config(path, TENSORS), user_objects), ASIDE, made_config.seed).validation
    assert aside is not None
    samples.fetched.clear()
    run = simulated(path, TENSORS, user_objects, **job)
    assert run.environment["train_samples"] == SAMPLES - ASIDE
    counts = np.bincount(samples.fetched, minlength=SAMPLES)
    held = numbers(aside)
    assert (counts[held] <= 3).all(), "by checks before the start, and in evaluations of the first and last weights"
    assert (np.delete(counts, held) >= 5).all()


def test_what_is_best_on_samples_set_aside_is_kept_and_proved(tmp_path: Path) -> None:
    job: dict[str, Any] = {
        "data": {"validation": 30},
        "evaluation": {"best": "validation_loss", "train": True, "every_epochs": 0.5},
        "averaging": 0.5,
        "alpha0": 0.4,
    }
    run = simulated(tmp_path / "run", TENSORS, **job)
    rows = run.evaluations
    assert [row["train"] for row in rows[:6]] == [Part.TEST, Part.TRAINING, Part.VALIDATION] * 2
    assert run.environment["train_samples"] == 90
    aside = rows[rows["train"] == Part.VALIDATION]
    best = aside[aside["loss"].argmin()]
    told = weights.read_best(run.path / "best.pt")["evaluation"]
    assert (told["snapshot"], told["averaged"], told["train"]) == (best["snapshot"], best["averaged"], Part.VALIDATION)
    assert told["value"] == best["loss"]
    again = config(tmp_path / "unused", TENSORS, **job, init_from=str(run.path / "best.pt"))
    data, loss = parts.load_data(again, NO_OBJECTS), parts.load_loss(again, NO_OBJECTS)
    model = parts.build_model(again, parts.meta_of(data), NO_OBJECTS)
    assert parts.make_measure(again, model, loss, data).of(Part.VALIDATION).loss == best["loss"]
    assert data.validation is not None
    inputs, targets = data.validation.batch(np.arange(30))
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(model.module(inputs), targets)) == pytest.approx(best["loss"], rel=1e-5)
    proof = replay.replay(run.path)
    assert proof.holds, proof.reason
