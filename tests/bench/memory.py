"""`python -m tests.bench memory`: memory of the ranks that train on an HDF5 file of 6 GB, and what a sample of such files costs.

The file is written below the directory for temporary files, and removed.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisgd.base.errors import ConfigError
from mpisgd.config import Hdf5Options
from mpisgd.data import load
from tests.bench import peaks

SHAPE = (3, 32, 32)
_NBYTES = math.prod(SHAPE)
_RANKS = 4
_READ = 2000
#: How files are stored: samples in a chunk (0 = not chunked), and gzip or not.
LAYOUTS = {"contiguous": (0, False), "16": (16, False), "1, gzip": (1, True), "16, gzip": (16, True), "256, gzip": (256, True)}


def write(path: Path, samples: int, chunk: int, compressed: bool) -> None:
    """Images of random bytes of which half are zeros; one chunk of them over and over."""
    import h5py

    rng = np.random.default_rng(0)
    some = rng.integers(0, 256, (chunk or 16, *SHAPE), dtype=np.uint8) * rng.integers(0, 2, (chunk or 16, *SHAPE), dtype=np.uint8)
    written = zlib.compress(some.tobytes(), 4) if compressed else some.tobytes()
    with h5py.File(path, "w") as file:
        how: dict[str, Any] = {"chunks": (chunk, *SHAPE)} if chunk else {}
        images = file.create_dataset("train/inputs", (samples, *SHAPE), np.uint8, compression="gzip" if compressed else None, **how)
        for first in range(0, samples - samples % len(some), len(some)):
            if chunk:
                images.id.write_direct_chunk((first, 0, 0, 0), written)
            else:
                images[first : first + len(some)] = some
        file["train/targets"] = rng.integers(0, 10, samples).astype(np.uint8)
        file["test/inputs"], file["test/targets"] = some, rng.integers(0, 10, len(some)).astype(np.uint8)


def train(directory: Path, path: Path, samples: int, **data: Any) -> tuple[list[dict[str, int]], float]:
    """One shard and three learners; each rank's peaks in KiB, and the seconds from mpirun to the first update.

    Raises ConfigError where the job fails.
    """
    config = {
        "data": {"name": "hdf5", "path": str(path), **data},
        "model": "softmax",
        "mu": 16,
        "epochs": 10_000 / samples,
        "protocol": "softsync",
        "threads": 1,
        "out": str(directory / "run"),
        "log": {"progress": "plain", "progress_s": 0.0},
    }
    command = peaks.command_of(directory, _RANKS, config)
    begun_s, first_s, said = time.perf_counter(), 0.0, []
    env = peaks.variables()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if "epoch " in line and not first_s:
                first_s = time.perf_counter() - begun_s
    found = peaks.told(said, _RANKS, process.returncode)
    if not first_s:
        raise ConfigError(f"no line of an update\n{''.join(said)}")
    return found, first_s


def measure(nbytes: int) -> Iterator[dict[str, Any]]:
    """The job on a file with so many bytes of images, and a sample's microseconds for each layout. Raises ConfigError."""
    samples = nbytes // _NBYTES // 16 * 16
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "data.h5"
        write(path, samples, 16, True)
        ranks, first_s = train(Path(directory), path, samples)
        mib = [{"torch": each["torch"] / 2**10, "more": (each["end"] - each["torch"]) / 2**10} for each in ranks]
        yield {"nbytes": samples * _NBYTES, "file_nbytes": path.stat().st_size, "mib": mib, "first_update_s": first_s}
        for name, (chunk, compressed) in LAYOUTS.items():
            write(path, 65_536, chunk, compressed)  # 192 MiB
            yield {"chunk": name, **{f"{way}_us": _cost(path, way) for way in ("random", "in_order")}}


def _cost(path: Path, way: str) -> float:
    """Processor's microseconds for a sample, of mini-batches of 16 that are drawn from all, or lie one after the other."""
    torch.set_num_threads(1)
    split = load(Hdf5Options(path=str(path), cache_nbytes=2**20), seed=1).train
    drawn = np.random.default_rng(1).permutation(len(split)) if way == "random" else np.arange(len(split))
    begun_s = time.process_time()
    for first in range(0, _READ, 16):
        split.batch(drawn[first : first + 16])
    return (time.process_time() - begun_s) / _READ * 1e6


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    job, *layouts = rows
    lines = [
        f"{job['nbytes'] / 1e9:.1f} GB of images in a file of {job['file_nbytes'] / 1e9:.1f} GB, {_RANKS} ranks:"
        f" first update after {job['first_update_s']:.1f} s"
    ]
    lines += [f"rank {rank}: {each['torch']:.0f} MiB with torch, {each['more']:.0f} more" for rank, each in enumerate(job["mib"])]
    lines.append(f"{'samples in a chunk':>18} {'at random':>10} {'in order':>9}   microseconds of a processor for a sample")
    return lines + [f"{row['chunk']:>18} {row['random_us']:10.0f} {row['in_order_us']:9.0f}" for row in layouts]
