"""Real data: the digits always; MNIST and CIFAR-10 where their files are staged (MPISGD_DATA, or data/ beside here)."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd import models
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.config import Cifar10FullOptions, Cifar10Options, DigitsOptions, MnistOptions, SoftmaxOptions, SyntheticOptions
from mpisgd.data import DataSet, digits, load
from mpisgd.data.sampling import EpochSampling
from tests.staged import staged

needs_digits = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn carries the digits")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, removed at once: CIFAR-10 takes 184 MB."""
    monkeypatch.setenv("MPISGD_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def counts(split_targets: torch.Tensor) -> list[int]:
    return torch.bincount(split_targets).tolist()


def losses(data: DataSet, model: nn.Module, learning_rate: float, mini_batches: int) -> list[float]:
    """Loss of each mini-batch of 64 under SGD with momentum 0.9, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sampling = EpochSampling(len(data.train), 64, 1, seed=1)
    optimiser = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    values = []
    for seq in range(mini_batches):
        inputs, targets = data.train.batch(sampling.indices(0, seq))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        values.append(loss.item())
    torch.set_num_threads(threads)
    return values


# --------------------------------------------------------------------------------------------------------------- digits


@needs_digits
def test_digits_are_all_there_and_split_by_class() -> None:
    data = load(DigitsOptions(subtract_mean=False), seed=1)
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (1437, 360, (1, 8, 8), 10)
    train, test = counts(data.train.targets), counts(data.test.targets)
    assert [a + b for a, b in zip(train, test, strict=True)] == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert all(abs(b - (a + b) / 5) <= 1 for a, b in zip(train, test, strict=True))
    inputs = torch.cat([data.train.inputs, data.test.inputs])
    assert (inputs.min().item(), inputs.max().item()) == (0.0, 1.0)
    assert len({image.numpy().tobytes() for image in inputs}) == 1797
    again = load(DigitsOptions(subtract_mean=False), seed=2)
    assert torch.equal(again.train.inputs, data.train.inputs)
    assert torch.equal(again.test.targets, data.test.targets)


@pytest.mark.slow
@needs_digits
def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    data = load(DigitsOptions(subtract_mean=False), seed=1)
    ours = {
        (image.numpy().tobytes(), int(label))
        for split in (data.train, data.test)
        for image, label in zip(split.inputs, split.targets, strict=True)
    }
    images, labels = load_digits(return_X_y=True)
    assert ours == {((image / 16).astype(np.float32).tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}


@needs_digits
def test_digits_are_centred_and_learnable() -> None:
    data = load(DigitsOptions(), seed=1)
    assert data.train.batch(np.arange(1437))[0].mean(dim=0).abs().max() < 1e-6
    model = models.make(SoftmaxOptions(), input_shape=data.input_shape, classes=data.classes, seed=1)
    losses(data, model, 0.1, 200)
    inputs, targets = data.test.batch(np.arange(360))
    assert (model(inputs).argmax(dim=1) != targets).float().mean() < 0.08


@pytest.mark.slow
@needs_digits
def test_digits_do_not_import_scikit_learn() -> None:
    program = (
        "import sys; from mpisgd.config import DigitsOptions; from mpisgd.data import load\n"
        "assert 'h5py' not in sys.modules; load(DigitsOptions(), seed=1); assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_digits_without_scikit_learn_or_with_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digits.csv.gz"
    with monkeypatch.context() as patched:
        patched.setattr(digits, "_find", lambda: path)
        with pytest.raises(DataError, match=r"digits: .*digits.csv.gz is missing"):
            load(DigitsOptions(), seed=1)
        path.write_bytes(b"1,2,3")
        with pytest.raises(DataError, match="expected a gzip-compressed table: Not a gzipped file"):
            load(DigitsOptions(), seed=1)
        path.write_bytes(gzip.compress(b"1,2\n3,4\n"))
        with pytest.raises(DataError, match="4 values found, expected 116805"):
            load(DigitsOptions(), seed=1)
        path.write_bytes(gzip.compress(b"a," * 116804 + b"a\n"))
        with pytest.raises(DataError, match="expected a table of numbers"):
            load(DigitsOptions(), seed=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="digits: scikit-learn carries the data set, and is not installed: pip install"):
        load(DigitsOptions(), seed=1)


# ------------------------------------------------------------------------------------------------------------ synthetic


def test_synthetic_is_a_learnable_function_of_the_seed() -> None:
    options = SyntheticOptions(shape=(2, 4, 4), classes=3, samples=600, test_samples=100)
    data, same, other = (load(options, seed=seed) for seed in (1, 1, 2))
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (600, 100, (2, 4, 4), 3)
    assert torch.equal(data.train.inputs, same.train.inputs)
    difference = data.train.inputs - other.train.inputs
    assert not torch.allclose(difference[0], difference[3], atol=1e-3)  # of one class: not the means alone differ, the noise too
    assert not torch.equal(data.train.inputs[:100], data.test.inputs)
    assert counts(data.train.targets) == [200, 200, 200]
    model = models.make(SoftmaxOptions(), input_shape=data.input_shape, classes=data.classes, seed=1)
    losses(data, model, 0.05, 60)
    inputs, targets = data.test.batch(np.arange(100))
    assert (model(inputs).argmax(dim=1) != targets).float().mean() < 0.1


def test_synthetic_without_test_samples() -> None:
    data = load(SyntheticOptions(shape=(3,), samples=10, test_samples=0), seed=1)
    assert len(data.test) == 0
    with pytest.raises(ConfigError, match="seed = "):
        load(SyntheticOptions(shape=(3,), samples=10), seed=2**64)


# --------------------------------------------------------------------------------------------------- MNIST and CIFAR-10


def test_mnist_as_published() -> None:
    data = load(MnistOptions(), data_dir=staged("mnist/train-images-idx3-ubyte.gz"), seed=1)
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (60_000, 10_000, (1, 28, 28), 10)
    assert counts(data.train.targets) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train.targets[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.test.targets[:5].tolist() == [7, 2, 1, 0, 4]
    inputs, _ = data.train.batch(np.arange(1000))
    assert inputs.shape == (1000, 1, 28, 28)
    assert abs(float(inputs.mean())) < 0.01
    assert inputs.abs().max() <= 1


@pytest.mark.slow
def test_cifar10_as_published_and_cifar10_full_starts_to_learn_it(cache: Path) -> None:
    data_dir = staged("cifar10/cifar-10-binary.tar.gz")
    data = load(Cifar10Options(), data_dir=data_dir, seed=1)
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (50_000, 10_000, (3, 32, 32), 10)
    assert counts(data.train.targets) == [5000] * 10
    assert counts(data.test.targets) == [1000] * 10
    assert data.train.targets[:5].tolist() == [6, 9, 9, 4, 1]
    assert [path.stat().st_size for path in cache.glob("*.bin")] == [60_000 * 3073 + 4], "and a checksum"
    again = load(Cifar10Options(), data_dir=data_dir, seed=1)
    picked = np.array([0, 49_999, 7])
    assert torch.equal(again.train.batch(picked)[0], data.train.batch(picked)[0])
    model = models.make(Cifar10FullOptions(), input_shape=data.input_shape, classes=data.classes, seed=1)
    values = losses(data, model, 0.05, 60)
    assert np.mean(values[:5]) > 2.25
    assert np.mean(values[-10:]) < 2.15
