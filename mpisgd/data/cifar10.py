"""CIFAR-10 (Krizhevsky 2009), binary: 50,000 + 10,000 colour images of 32x32 pixels in 10 classes.

A record is 1 label byte and 3 x 1024 bytes (R, G, B planes). The archive is decompressed once into a cache of all pixels, then all
labels; a node's ranks map and share its pages.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch

from mpisgd.base.errors import DataError
from mpisgd.data.dataset import DataSet, Split, make_dataset
from mpisgd.data.files import cached, data_roots, first_existing, missing

Bytes = npt.NDArray[np.uint8]

FOLDER = "cifar-10-batches-bin"
ARCHIVE = "cifar-10-binary.tar.gz"
RECORDS_PER_FILE = 10_000

_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_CHECKSUM = "md5 c32a1d4ab5d03f1284b67883e8d87530"
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_CLASSES = 10


def load(data_dir: str, subtract: bool, scale: float = 255) -> DataSet:
    """Load inputs uint8 (3, 32, 32), divided by `scale` per mini-batch."""
    folders = [folder for root in data_roots(data_dir) for folder in (root / "cifar10", root)]
    candidates = [folder / name for name in (FOLDER, ARCHIVE) for folder in folders]
    path = first_existing(candidates)
    if path is None:
        checksum = f"{_CHECKSUM} (of {ARCHIVE})"
        raise missing(f"cifar10: {FOLDER}/ or {ARCHIVE}", candidates, "<data-dir>/cifar10", checksum)
    pixels, labels = _from_folder(path) if path.name == FOLDER else _from_archive(path)
    inputs = torch.from_numpy(pixels.reshape(-1, *_SHAPE))
    targets = torch.from_numpy(labels.astype(np.int64))
    cut = (len(_FILES) - 1) * RECORDS_PER_FILE
    train, test = (Split(inputs[part], targets[part], scale=scale) for part in (slice(cut), slice(cut, None)))
    return make_dataset("cifar10", train, test, DataError, subtract=subtract)


def _from_folder(folder: Path) -> tuple[Bytes, Bytes]:
    contents = {}
    for name in _FILES:
        try:
            contents[name] = (folder / name).read_bytes()
        except FileNotFoundError as error:
            raise missing(f"cifar10: {name}", [folder / name], str(folder), f"{_CHECKSUM} (of {ARCHIVE})") from error
        except OSError as error:
            raise DataError(f"{folder / name}: {error.strerror}") from error
    return _decode(contents, folder)


def _from_archive(path: Path) -> tuple[Bytes, Bytes]:
    records = len(_FILES) * RECORDS_PER_FILE
    nbytes = records * (1 + _PIXELS)
    file = cached(path, "cifar10", nbytes, lambda: _decode(_extract(path), path))
    content = np.memmap(file, dtype=np.uint8, mode="c", shape=(nbytes,))
    return content[: records * _PIXELS].reshape(records, _PIXELS), content[records * _PIXELS :]


def _extract(path: Path) -> Mapping[str, bytes]:
    contents = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                file = archive.extractfile(member) if name in _FILES else None
                if file is not None:
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        nbytes = path.stat().st_size
        raise DataError(f"{path}: {nbytes} bytes found, expected a whole .tar.gz, {_CHECKSUM}: {error}") from error
    return contents


def _decode(contents: Mapping[str, bytes], source: Path) -> tuple[Bytes, Bytes]:
    """Return pixels (60000, 3072) and labels (60000,), training records first."""
    expected = RECORDS_PER_FILE * (1 + _PIXELS)
    pixels = np.empty((len(_FILES) * RECORDS_PER_FILE, _PIXELS), dtype=np.uint8)
    labels = np.empty(len(pixels), dtype=np.uint8)
    for number, name in enumerate(_FILES):
        found = len(contents.get(name, b""))
        if found != expected:
            raise DataError(
                f"{source}: {name}: {found} bytes found, expected {expected} ({RECORDS_PER_FILE} records of {1 + _PIXELS})"
            )
        records = np.frombuffer(contents[name], dtype=np.uint8).reshape(RECORDS_PER_FILE, 1 + _PIXELS)
        rows = slice(number * RECORDS_PER_FILE, (number + 1) * RECORDS_PER_FILE)
        labels[rows], pixels[rows] = records[:, 0], records[:, 1:]
        if records[:, 0].max() >= _CLASSES:
            raise DataError(f"{source}: {name}: label {records[:, 0].max()} found, expected 0 to {_CLASSES - 1}")
    return pixels, labels
