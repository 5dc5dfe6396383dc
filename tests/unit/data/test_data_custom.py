"""The user's own data and objects: what is taken, and how the rest is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from mpisgd.base.errors import ConfigError, DataError
from mpisgd.base.imports import load_attribute
from mpisgd.config import CustomDataOptions
from mpisgd.data import DataSet, Split, as_dataset, load
from mpisgd.data.dataset import make_dataset

INPUTS = np.arange(24, dtype=np.float64).reshape(6, 2, 2)
TARGETS = np.array([0, 1, 2, 0, 1, 2], dtype=np.int32)
PICK = np.array([4, 0], dtype=np.int64)


class Stream(IterableDataset[int]):
    """A stream that tells its length."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Squares:
    """A map-style Dataset that is no torch class and tells neither classes nor targets."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.fetched = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.fetched += 1
        return torch.full((3,), float(index * index)), index % 4


def test_a_batch_is_a_pair_of_new_tensors() -> None:
    data = as_dataset(((INPUTS, TARGETS), (INPUTS[:2], TARGETS[:2])), "mine")
    assert (data.name, len(data.train), len(data.test), data.input_shape, data.classes) == ("mine", 6, 2, (2, 2), 3)
    inputs, targets = data.train.batch(PICK)
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert inputs.tolist() == INPUTS[PICK].tolist()
    assert targets.tolist() == [1, 0]
    inputs.zero_()
    assert data.train.batch(PICK)[0].tolist() == INPUTS[PICK].tolist()


class Mirrored(TensorDataset):
    """A torch class of tensors, whose samples are not the tensors."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        picture, label = super().__getitem__(index)
        return picture.flip(0), label


def test_samples_of_a_tensor_dataset_that_changes_them_are_its_own() -> None:
    data = as_dataset((Mirrored(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)), None), "mine")
    assert data.train.batch(PICK)[0].tolist() == INPUTS[PICK, ::-1].tolist()


@pytest.mark.parametrize("test", [None, (INPUTS[:0], TARGETS[:0]), (np.zeros(0), np.zeros(0))])
def test_the_test_split_may_be_missing(test: Any) -> None:
    data = as_dataset(((INPUTS, TARGETS), test))
    assert len(data.test) == 0
    assert data.test.input_shape == (2, 2)
    assert data.test.batch(np.arange(0))[0].shape == (0, 2, 2)
    assert data.classes == 3


def test_bytes_are_scaled_and_centred_per_mini_batch() -> None:
    pixels = np.array([[0, 10], [100, 250], [200, 40]], dtype=np.uint8)
    split = Split(torch.from_numpy(pixels), torch.zeros(3, dtype=torch.int64), scale=255.0)
    data = make_dataset("", split, split, DataError, subtract=True)
    expected = pixels / 255 - pixels.mean(axis=0) / 255
    for part in (data.train, data.test):
        assert part.inputs.dtype == torch.uint8
        np.testing.assert_allclose(part.batch(np.arange(3))[0].numpy(), expected, atol=1e-7)
    np.testing.assert_allclose(split.batch(np.arange(3))[0].numpy(), pixels / 255, atol=1e-7)


def test_the_mean_of_many_samples_is_that_of_all() -> None:
    inputs = np.random.default_rng(0).normal(7, 1, (1001, 3)).astype(np.float32)
    split = Split(torch.from_numpy(inputs), torch.zeros(1001, dtype=torch.int64))
    centred = make_dataset("", split, None, DataError, subtract=True).train.batch(np.arange(1001))[0]
    assert centred.mean(dim=0).abs().max() < 1e-6


def test_token_numbers_stay_integers_and_float_targets_are_outputs() -> None:
    data = as_dataset(((TARGETS[:, None], INPUTS[:, 0]), None))
    inputs, targets = data.train.batch(PICK)
    assert inputs.dtype == torch.int64
    assert targets.dtype == torch.float32
    assert targets.shape == (2, 2)
    assert data.classes == 2


def test_tensors_of_other_kinds_and_byte_orders() -> None:
    half = torch.tensor([[1.5], [2.5]], dtype=torch.float16, requires_grad=True)
    assert as_dataset(((half, torch.tensor([True, False])), None)).train.batch(np.arange(2))[0].tolist() == [[1.5], [2.5]]
    swapped = INPUTS.astype(">f4"), TARGETS.astype(">i2")
    assert as_dataset((swapped, None)).train.batch(PICK)[1].tolist() == [1, 0]


def test_a_map_style_dataset_is_fetched_sample_by_sample() -> None:
    squares = Squares(1000)
    data = as_dataset((squares, Squares(3)), "squares")
    inputs, targets = data.train.batch(PICK)
    assert inputs.tolist() == [[16.0] * 3, [0.0] * 3]
    assert targets.tolist() == [0, 0]
    assert data.input_shape == (3,)
    assert data.classes is None  # only reading all samples could tell
    assert len(data.test) == 3
    assert squares.fetched == 1 + 2


def test_a_map_style_dataset_may_tell_its_classes_and_targets() -> None:
    named, told = Squares(50), Squares(50)
    named.classes = ["a", "b", "c", "d", "e"]  # type: ignore[attr-defined]
    told.targets = [0, 8] * 25  # type: ignore[attr-defined]
    assert as_dataset((named, None)).classes == 5
    assert as_dataset((told, None)).classes == 9
    assert named.fetched + told.fetched < 10


class Outputs(Squares):
    """Its targets are numbers, not classes."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        return super().__getitem__(index)[0], torch.tensor([1.0, 2.0])


def test_of_float_targets_one_tells_how_many_outputs_there_are() -> None:
    outputs = Outputs(50)
    assert as_dataset((outputs, None)).classes == 2
    assert outputs.fetched == 1


def test_targets_that_are_no_numbers_tell_no_classes() -> None:
    """As torchvision's VOCSegmentation, whose `targets` are names of files."""
    named = Squares(5)
    named.targets = ["a.png", "b.png"]  # type: ignore[attr-defined]
    assert as_dataset((named, None)).classes is None


def test_samples_of_different_shapes_are_named() -> None:
    ragged = as_dataset((Subset([(torch.zeros(2 + index // 3), 0) for index in range(6)], range(6)), None), "mine")  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"mine: train: samples 1 and 4 have inputs of shapes \(2,\) and \(3,\), expected one shape"
    ):
        ragged.train.batch(np.array([1, 4]))


def test_torchs_own_datasets() -> None:
    whole = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    data = as_dataset((whole, Subset(whole, [1, 2])))
    assert type(data.train) is Split  # taken whole, since it lies in memory
    assert data.train.inputs.shape == (6, 2, 2)
    assert data.test.batch(np.array([1]))[1].tolist() == [2]
    inputs, targets = data.test.batch(np.arange(2))
    assert targets.tolist() == [1, 2]
    assert inputs.tolist() == INPUTS[1:3].tolist()
    assert data.classes == 3


def test_what_the_python_api_takes() -> None:
    data = as_dataset(((INPUTS, TARGETS), None), "mine")
    assert as_dataset(data) is data
    assert as_dataset(lambda: data) is data
    assert as_dataset(lambda: ((INPUTS, TARGETS), None), "made").name == "made"
    assert isinstance(as_dataset((data.train, data.test)), DataSet)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "mine: found int, expected .train, test."),
        ((INPUTS, TARGETS), "mine: train: found ndarray, expected a pair"),
        ((1, 2, 3), r"mine: found a tuple of 3 \(int, int, int\)"),
        (Squares(3), "mine: found Squares, expected"),
        ((Squares, None), "mine: train: found type"),
        ((("a", TARGETS), None), "mine: train: inputs are a str, expected a tensor or a numpy array"),
        (((INPUTS, TARGETS[:5]), None), "mine: train: 6 inputs but 5 targets"),
        (((INPUTS, TARGETS - 1), None), "mine: train: a target is -1, expected classes from 0"),
        (((INPUTS, np.array(["a"] * 6)), None), "mine: train: targets are of type <U1, expected numbers"),
        (((INPUTS, np.float64(3.0)), None), "mine: train: targets are a float64, expected a tensor or a numpy array"),
        (((INPUTS, np.ones(())), None), r"mine: train: targets are torch.float32 \(\), expected real numbers"),
        (((torch.zeros(3, dtype=torch.complex64), TARGETS[:3]), None), "inputs are torch.complex64"),
        (((INPUTS[:0], TARGETS[:0]), None), "mine: 0 training samples, expected at least 1"),
        (((INPUTS, TARGETS), (INPUTS[:, 0], TARGETS)), r"mine: test inputs have shape \(2,\), expected \(2, 2\)"),
        (([[1, 2]], None), "mine: train: found a list of 1"),
        ((Subset(["ab"], [0]), None), "mine: train: sample 0 is str, expected a pair"),  # type: ignore[arg-type]
        ((Subset([(object(), 1)], [0]), None), "the input of sample 0 is object, expected a tensor"),  # type: ignore[arg-type]
        ((Stream(), None), "mine: train: found a stream, Stream, expected sampling = 'stream'"),
    ],
)
def test_what_is_no_data(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_dataset(value, "mine")


USER_MODULE = """
import numpy as np

def make(samples=4, *, seed, data_dir):
    assert (seed, data_dir) == (9, "somewhere")
    return (np.zeros((samples, 2)), np.arange(samples)), None

def nothing():
    return None

class Holder:
    make = make

constant = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text(USER_MODULE)
    (package / "lacking.py").write_text("import no_such_module_at_all\n")
    (package / "failing.py").write_text("1 / 0\n")
    (package / "leaving.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        monkeypatch.delitem(sys.modules, name)
    return package


def test_a_users_factory(user_module: Path) -> None:
    options = CustomDataOptions(factory="my_package.data:make", kwargs={"samples": 6})
    data = load(options, data_dir="somewhere", seed=9)
    assert (len(data.train), data.classes) == (6, 6)
    assert load_attribute("my_package.data:Holder.make", "data.factory") is load_attribute("my_package.data:make", "x")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "data.factory = '': expected package.module:attribute"),
        ("my_package.data", "expected package.module:attribute"),
        ("my_package/data.py:make", "expected package.module:attribute"),
        ("my_package.data:make:make", "expected package.module:attribute"),
        ("no_such_package.data:make", "there is no module 'no_such_package' in .*, on PYTHONPATH or among"),
        ("my_package.dta:make", "there is no module 'my_package.dta'"),
        ("my_package.data:mke", "module my_package.data has no attribute 'mke'; did you mean 'make'"),
        ("my_package.data:Holder.mak", "my_package.data:Holder has no attribute 'mak'; did you mean 'make'"),
        (
            "my_package.lacking:make",
            "importing module my_package.lacking failed with ModuleNotFoundError: No module named 'no_such",
        ),
        ("my_package.failing:make", "importing module my_package.failing failed with ZeroDivisionError: division by zero"),
        ("my_package.leaving:make", "importing module my_package.leaving failed with SystemExit: 3"),
        ("my_package.data:constant", "data.factory = 'my_package.data:constant': expected a callable, found int"),
        ("my_package.data:nothing", "data.factory = 'my_package.data:nothing': found NoneType, expected .train, test."),
    ],
)
def test_a_factory_that_cannot_be(user_module: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(CustomDataOptions(factory=spec), seed=1)
    assert str(caught.value).startswith(f"data.factory = {spec!r}: ")


def test_the_cause_of_a_failed_import_is_kept(user_module: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_attribute("my_package.failing:make", "loss")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
