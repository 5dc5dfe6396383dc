"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images of 28x28 pixels in 10 classes, from the authors' IDX files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mpisgd.base.errors import DataError
from mpisgd.data.dataset import DataSet, Split, make_dataset
from mpisgd.data.files import data_roots, first_existing, missing

_SIDE = 28
_CLASSES = 10
_UNSIGNED_BYTE = 0x08
_GZIP_MAGIC = b"\x1f\x8b"

#: Checksums of the .gz files, as published: MNIST's by LeCun, Cortes, Burges; Fashion-MNIST's by Xiao, Rasul, Vollgraf.
_CHECKSUMS = {
    "mnist": {
        "train-images-idx3-ubyte": "sha256 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte": "sha256 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte": "sha256 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte": "sha256 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "md5 8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "md5 25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "md5 bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "md5 bb300cfdad3c16e7a12a480ee83cd310",
    },
}


def load(name: str, data_dir: str, subtract: bool, scale: float = 255) -> DataSet:
    """Load mnist or fashion_mnist; inputs uint8 (1, 28, 28), divided by `scale` per mini-batch."""
    train, test = (_split(name, part, data_dir, scale) for part in ("train", "t10k"))
    return make_dataset(name, train, test, DataError, subtract=subtract)


def _split(name: str, part: str, data_dir: str, scale: float) -> Split:
    images_path = _find(name, f"{part}-images-idx3-ubyte", data_dir)
    labels_path = _find(name, f"{part}-labels-idx1-ubyte", data_dir)
    images = read_idx(images_path, (_SIDE, _SIDE))
    labels = read_idx(labels_path, ())
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: {len(labels)} labels, expected {len(images)} as there are images in {images_path.name}")
    if len(labels) and labels.max() >= _CLASSES:
        raise DataError(f"{labels_path}: label {labels.max()} found, expected 0 to {_CLASSES - 1}")
    return Split(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).to(torch.int64), scale=scale)


def _find(name: str, file_name: str, data_dir: str) -> Path:
    folders = [root / name for root in data_roots(data_dir)]
    candidates = [folder / f"{file_name}{suffix}" for folder in folders for suffix in ("", ".gz")]
    path = first_existing(candidates)
    if path is None:
        checksum = f"{_CHECKSUMS[name][file_name]} (of {file_name}.gz)"
        raise missing(f"{name}: {file_name}, plain or .gz,", candidates, f"<data-dir>/{name}", checksum)
    return path


def read_idx(path: Path, item_shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return the array uint8 (n, *item_shape) of an IDX file, plain or gzip-compressed. Raises DataError: other content."""
    content = _read(path)
    header = 4 + 4 * (1 + len(item_shape))
    if len(content) < header:
        raise DataError(f"{path}: {len(content)} bytes found, expected an IDX header of {header} bytes")
    magic = content[:4]
    expected_magic = bytes([0, 0, _UNSIGNED_BYTE, 1 + len(item_shape)])
    if magic != expected_magic:
        raise DataError(f"{path}: starts with 0x{magic.hex()}, expected 0x{expected_magic.hex()} (IDX, unsigned bytes)")
    samples, *found_shape = struct.unpack(f">{1 + len(item_shape)}I", content[4:header])
    if tuple(found_shape) != item_shape:
        raise DataError(f"{path}: items of shape {tuple(found_shape)}, expected {item_shape}")
    expected = header + samples * math.prod(item_shape)
    if len(content) != expected:
        raise DataError(f"{path}: {len(content)} bytes found, expected {expected} for {samples} items of shape {item_shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(samples, *item_shape)


def _read(path: Path) -> bytearray:
    """Return the uncompressed content, writable for torch."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not content.startswith(_GZIP_MAGIC):
        return bytearray(content)
    try:
        return bytearray(gzip.decompress(content))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: {len(content)} bytes found, expected a whole gzip file: {error}") from error
