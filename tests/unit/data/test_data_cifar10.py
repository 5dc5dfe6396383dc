"""CIFAR-10 in its binary layout and the cache of its archive; small files, made here."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from mpisgd.base.errors import DataError
from mpisgd.config import Cifar10Options
from mpisgd.data import cifar10, files, load

RECORDS = 20
SCALES: tuple[Literal[255], Literal[1]] = (255, 1)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPISGD_DATA", raising=False)
    monkeypatch.setenv("MPISGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", RECORDS)


FILES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]


def batch_file(number: int) -> bytes:
    generator = np.random.default_rng(number)
    records = generator.integers(0, 256, (RECORDS, 3073)).astype(np.uint8)
    records[:, 0] = np.arange(RECORDS) % 10
    return records.tobytes()


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(FILES):
        (folder / name).write_bytes(batch_file(number))
    return folder


def write_archive(path: Path, contents: dict[str, bytes] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if contents is None:
        contents = {name: batch_file(number) for number, name in reversed(list(enumerate(FILES)))}
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in {"readme.html": b"hello", **contents}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("below", ["cifar10", ""])
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_cifar10(tmp_path: Path, below: str, form: str) -> None:
    if form == "folder":
        write_folder(tmp_path / below / "cifar-10-batches-bin")
    else:
        write_archive(tmp_path / below / "cifar-10-binary.tar.gz")
    data = load(Cifar10Options(subtract_mean=False), data_dir=str(tmp_path), seed=1)
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (5 * RECORDS, RECORDS, (3, 32, 32), 10)
    for split, place, number, row in ((data.train, 2 * RECORDS + 7, 2, 7), (data.test, 4, 5, 4)):
        record = np.frombuffer(batch_file(number), dtype=np.uint8).reshape(RECORDS, 3073)[row]
        inputs, targets = split.batch(np.array([place]))
        np.testing.assert_allclose(inputs[0].numpy(), record[1:].reshape(3, 32, 32) / 255, atol=1e-7)
        assert targets.tolist() == [record[0]]
    centred = load(Cifar10Options(), data_dir=str(tmp_path), seed=1).train.batch(np.arange(5 * RECORDS))[0]
    assert centred.mean(dim=0).abs().max() < 1e-6


def test_the_archive_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_archive(tmp_path / "cifar-10-binary.tar.gz")
    reads: list[Path] = []
    extract = cifar10._extract

    def counting(path: Path) -> Mapping[str, bytes]:
        reads.append(path)
        return extract(path)

    monkeypatch.setattr(cifar10, "_extract", counting)
    for _ in range(3):
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    assert len(reads) == 1
    kept = list((tmp_path / "cache").glob("*.bin"))
    assert [path.stat().st_size for path in kept] == [6 * RECORDS * 3073 + 4]
    lock = kept[0].with_suffix(".lock")
    lock.unlink()
    load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    assert not lock.exists()  # a whole cache is read only, so it may lie in a directory that is
    kept[0].write_bytes(b"cut short")  # a cache file that is not whole is made anew
    load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    assert len(reads) == 2
    write_archive(
        archive, {name: batch_file(number + 10) for number, name in enumerate(FILES)}
    )  # and so is that of another archive
    load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    assert len(reads) == 3
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix not in (".bin", ".lock")]


@pytest.mark.parametrize("place", [0, 3 * RECORDS * 3073, -1])
def test_a_damaged_cache_is_made_anew(place: int, tmp_path: Path) -> None:
    write_archive(tmp_path / "cifar-10-binary.tar.gz")
    before = load(Cifar10Options(), data_dir=str(tmp_path), seed=1).train.batch(np.arange(9))[0]
    kept = next((tmp_path / "cache").glob("*.bin"))
    content = bytearray(kept.read_bytes())
    whole, content[place] = bytes(content), content[place] ^ 64
    kept.write_bytes(content)
    after = load(Cifar10Options(), data_dir=str(tmp_path), seed=1).train.batch(np.arange(9))[0]
    assert torch.equal(before, after)
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("umask", [0o027, 0o002])
def test_a_cache_has_the_users_mode(umask: int, tmp_path: Path) -> None:
    write_archive(tmp_path / "cifar-10-binary.tar.gz")
    before = os.umask(umask)
    try:
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()} == {0o666 & ~umask}


@pytest.mark.slow
def test_ranks_that_start_at_once_share_one_cache(tmp_path: Path) -> None:
    """Real processes, since ranks are: each must see the whole file, whichever of them makes it."""
    program = (
        "import pathlib, sys, numpy as np; from mpisgd.data.files import cached\n"
        "source, log = map(pathlib.Path, sys.argv[1:])\n"
        "def build():\n"
        "    log.open('a').write('built\\n')\n"
        "    return [np.full(3_000_000, 7, np.uint8), np.full(5, 8, np.uint8)]\n"
        "content = cached(source, 'x', 3_000_005, build).read_bytes()[:-4]\n"
        "sys.exit(content != b'\\x07' * 3_000_000 + b'\\x08' * 5)\n"
    )
    source, log = tmp_path / "source", tmp_path / "log"
    source.write_bytes(b"archive")
    command = [sys.executable, "-c", program, str(source), str(log)]
    ranks = [subprocess.Popen(command) for _ in range(2)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    assert log.read_text() == "built\n"


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISGD_CACHE", "/somewhere/fast")
    assert files.cache_dir() == Path("/somewhere/fast")
    monkeypatch.delenv("MPISGD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert files.cache_dir() == Path("/xdg/mpisgd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert files.cache_dir() == Path("/home/somebody/.cache/mpisgd")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path / "cifar-10-binary.tar.gz")
    monkeypatch.setenv("MPISGD_CACHE", str(tmp_path / "cifar-10-binary.tar.gz" / "below a file"))
    with pytest.raises(DataError, match=r"Not a directory; expected to keep 368760 .*: name a writable .* MPISGD_CACHE"):
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)


def test_a_cache_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_archive(tmp_path / "cifar-10-binary.tar.gz")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device; expected to keep"):
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_a_file(path: Path) -> None:
    write_archive(path, {name: batch_file(number) for number, name in enumerate(FILES[:-1])})


def with_a_short_file(path: Path) -> None:
    write_archive(path, {name: batch_file(number)[: None if number else -5] for number, name in enumerate(FILES)})


def with_a_foreign_label(path: Path) -> None:
    write_archive(path, dict.fromkeys(FILES, b"\x0b" * (RECORDS * 3073)))


def page(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html>" * 100)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, r"\d+ bytes found, expected a whole .tar.gz, md5 c32a1d4ab5d03f1284b67883e8d87530: "),
        (page, "1500 bytes found, expected a whole .tar.gz"),
        (without_a_file, r"test_batch.bin: 0 bytes found, expected 61460 \(20 records of 3073\)"),
        (with_a_short_file, "data_batch_1.bin: 61455 bytes found, expected 61460"),
        (with_a_foreign_label, "data_batch_1.bin: label 11 found, expected 0 to 9"),
    ],
)
def test_a_truncated_or_foreign_archive(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    path = write_archive(tmp_path / "cifar10" / "cifar-10-binary.tar.gz")
    spoil(path)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {message}"):
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_a_folder_that_is_not_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_3.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=f"{folder}: data_batch_3.bin: 5 bytes found, expected 61460"):
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=f"cifar10: data_batch_3.bin is missing\n  looked at: {folder}/data_batch_3.bin"):
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)


def test_missing_cifar10(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(Cifar10Options(), data_dir=str(tmp_path), seed=1)
    message = str(caught.value)
    for folder in (tmp_path / "cifar10", tmp_path):
        assert f"{folder}/cifar-10-batches-bin" in message
        assert f"{folder}/cifar-10-binary.tar.gz" in message
    assert "put the file into <data-dir>/cifar10" in message
    assert "md5 c32a1d4ab5d03f1284b67883e8d87530" in message


@pytest.mark.parametrize("subtract", [False, True])
def test_pixels_of_0_to_255_are_those_of_0_to_1_times_255(tmp_path: Path, subtract: bool) -> None:
    write_folder(tmp_path / "cifar10" / "cifar-10-batches-bin")
    small, large = (load(Cifar10Options(subtract_mean=subtract, scale=scale), data_dir=str(tmp_path), seed=1) for scale in SCALES)
    for one, other in ((small.train, large.train), (small.test, large.test)):
        torch.testing.assert_close(255 * one.batch(np.arange(20))[0], other.batch(np.arange(20))[0], rtol=1e-5, atol=1e-4)
