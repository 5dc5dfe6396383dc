"""MNIST and Fashion-MNIST in IDX files, small ones made here: read right, or refused with what was found and expected."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from mpisgd.base.errors import DataError
from mpisgd.config import FashionMnistOptions, MnistOptions
from mpisgd.data import load
from mpisgd.data.mnist import read_idx

PARTS = ("train", "t10k")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPISGD_DATA", raising=False)


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def pixels(part: str, samples: int) -> np.ndarray:
    return np.random.default_rng(PARTS.index(part)).integers(0, 256, (samples, 28, 28))


def write_mnist(folder: Path, suffix: str = "") -> None:
    folder.mkdir(parents=True)
    for part, samples in zip(PARTS, (30, 10), strict=True):
        for name, array in (("images-idx3", pixels(part, samples)), ("labels-idx1", np.arange(samples) % 10)):
            content = idx_bytes(array)
            (folder / f"{part}-{name}-ubyte{suffix}").write_bytes(gzip.compress(content, mtime=0) if suffix else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("options", "folder"), [(MnistOptions(), "mnist"), (FashionMnistOptions(), "fashion_mnist")])
def test_mnist(tmp_path: Path, suffix: str, options: MnistOptions | FashionMnistOptions, folder: str) -> None:
    write_mnist(tmp_path / folder, suffix)
    data = load(options, data_dir=str(tmp_path), seed=1)
    assert (data.name, len(data.train), len(data.test), data.input_shape, data.classes) == (folder, 30, 10, (1, 28, 28), 10)
    inputs, targets = data.test.batch(np.array([7, 3]))
    mean = pixels("train", 30).mean(axis=0)
    np.testing.assert_allclose(inputs[:, 0].numpy(), (pixels("t10k", 10)[[7, 3]] - mean) / 255, atol=1e-6)
    assert targets.tolist() == [7, 3]


def test_without_subtraction_pixels_are_divided_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    monkeypatch.setenv("MPISGD_DATA", str(tmp_path))
    inputs, _ = load(MnistOptions(subtract_mean=False), seed=1).train.batch(np.array([5]))
    np.testing.assert_allclose(inputs[0, 0].numpy(), pixels("train", 30)[5] / 255, atol=1e-7)


def test_a_missing_file_says_where_it_was_looked_for_and_goes(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(MnistOptions(), data_dir=str(tmp_path), seed=1)
    message = str(caught.value)
    for part in (
        "mnist: train-images-idx3-ubyte, plain or .gz, is missing",
        f"looked at: {tmp_path}/mnist/train-images-idx3-ubyte, {tmp_path}/mnist/train-images-idx3-ubyte.gz",
        "put the file into <data-dir>/mnist; <data-dir> is named by --data-dir or the environment variable MPISGD_DATA",
        "sha256 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609 (of train-images-idx3-ubyte.gz)",
    ):
        assert part in message
    write_mnist(tmp_path / "fashion_mnist")
    (tmp_path / "fashion_mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"fashion_mnist: t10k-labels-idx1-ubyte(?s:.*)md5 bb300cfdad3c16e7a12a480ee83cd310"):
        load(FashionMnistOptions(), data_dir=str(tmp_path), seed=1)


def test_no_data_directory_at_all() -> None:
    with pytest.raises(DataError, match="looked at: nowhere, as neither --data-dir nor MPISGD_DATA is set"):
        load(MnistOptions(), seed=1)


GOOD = idx_bytes(np.zeros((5, 28, 28)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes found, expected an IDX header of 16 bytes"),
        (GOOD[:15], "15 bytes found, expected an IDX header of 16 bytes"),
        (GOOD[:-1], "3935 bytes found, expected 3936 for 5 items of shape (28, 28)"),
        (GOOD + b"x", "3937 bytes found, expected 3936 for 5 items of shape (28, 28)"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "starts with 0x00000d03, expected 0x00000803 (IDX, unsigned bytes)"),
        (idx_bytes(np.zeros(20)), "starts with 0x00000801, expected 0x00000803"),
        (b"<!DOCTYPE html> not found", "starts with 0x3c21444f, expected 0x00000803"),
        (idx_bytes(np.zeros((5, 8, 8))), "items of shape (8, 8), expected (28, 28)"),
        (gzip.compress(GOOD, mtime=0)[:-9], "bytes found, expected a whole gzip file"),
        (gzip.compress(GOOD, mtime=0)[:12], "12 bytes found, expected a whole gzip file"),
        (gzip.compress(GOOD, mtime=0)[:-8] + b"12345678", "expected a whole gzip file: CRC check failed"),
        (gzip.compress(GOOD, mtime=0)[:10] + b"\xff" * 40, "50 bytes found, expected a whole gzip file"),
        (gzip.compress(GOOD, mtime=0) + b"garbage", "expected a whole gzip file: Not a gzipped file"),
    ],
)
def test_a_truncated_or_foreign_idx_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        read_idx(path, (28, 28))


def test_an_idx_file_is_known_by_its_content_not_its_name(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(GOOD)
    assert read_idx(path, (28, 28)).shape == (5, 28, 28)


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}: Is a directory"):
        read_idx(tmp_path, ())


def test_labels_that_do_not_go_with_the_images(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(29)))
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: 29 labels, expected 30"):
        load(MnistOptions(), data_dir=str(tmp_path), seed=1)
    labels.write_bytes(idx_bytes(np.arange(30)))
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: label 29 found, expected 0 to 9"):
        load(MnistOptions(), data_dir=str(tmp_path), seed=1)
