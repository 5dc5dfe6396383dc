"""The 1,797 handwritten digits of 8x8 pixels in scikit-learn (UCI; Alpaydin, Kaynak): real data, nothing to stage.

The file is read without importing scikit-learn.
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mpisgd.base.errors import DataError
from mpisgd.data.dataset import DataSet, Split, make_dataset

_SIDE = 8
_SAMPLES = 1797
_TEST_EVERY = 5


def load(subtract: bool) -> DataSet:
    """Return 1,437 training and 360 test samples, inputs float32 (1, 8, 8) in [0, 1] before mean subtraction.

    In the order of classes, then of the file, every fifth sample from the first is a test sample.
    Raises DataError: scikit-learn, or its known file, is missing.
    """
    table = _read(_find())
    inputs = torch.from_numpy((table[:, :-1] / 16).astype(np.float32)).reshape(-1, 1, _SIDE, _SIDE)
    targets = torch.from_numpy(table[:, -1].astype(np.int64))
    is_test = np.zeros(_SAMPLES, dtype=np.bool_)
    is_test[np.argsort(table[:, -1], kind="stable")[::_TEST_EVERY]] = True
    of_test = torch.from_numpy(is_test)
    train, test = Split(inputs[~of_test], targets[~of_test]), Split(inputs[of_test], targets[of_test])
    return make_dataset("digits", train, test, DataError, subtract=subtract)


def _find() -> Path:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("digits: scikit-learn carries the data set, and is not installed: pip install scikit-learn")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def _read(path: Path) -> npt.NDArray[np.int64]:
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
    except FileNotFoundError as error:
        raise DataError(f"digits: {path} is missing, expected the file in the installed scikit-learn") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"digits: {path}: expected a gzip-compressed table: {error}") from error
    values = text.replace("\n", ",").rstrip(",").split(",")
    expected = _SAMPLES * (_SIDE * _SIDE + 1)
    if len(values) != expected:
        raise DataError(f"digits: {path}: {len(values)} values found, expected {expected}")
    try:
        return np.array(values, dtype=np.float64).astype(np.int64).reshape(_SAMPLES, -1)
    except ValueError as error:
        raise DataError(f"digits: {path}: expected a table of numbers: {error}") from error
