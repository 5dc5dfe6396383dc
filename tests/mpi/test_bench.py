"""The benches on real ranks, as short as they can be: each gives its rows, and what cannot be is refused by all ranks alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpisgd.bench.parts.cases import CASES
from mpisgd.comm.mpi.launch import environment, mpirun
from tests.bench import peers
from tests.bench.__main__ import BENCHES

pytestmark = pytest.mark.slow


def bench(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    module = ["tests.bench"] if words[0] in BENCHES else ["mpisgd", "bench"]
    command = [*mpirun(ranks), sys.executable, "-m", *module, *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)


def rows_of(directory: Path, ranks: int, what: str, *words: str) -> list[dict[str, Any]]:
    done = bench(ranks, what, "--repetitions", "1", "--out", str(directory), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    written: dict[str, Any] = json.loads((directory / f"{what}.json").read_text())
    assert written["machine"]["ranks"] == ranks and written["machine"]["mpi"]
    rows: list[dict[str, Any]] = written["rows"]
    assert rows
    return rows


def test_wire(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 4, "wire", "--sizes", "40000", "400000", "--optimizers", "sgd", "adagrad")
    found = [(each["learners"], each["shards"], each["optimizer"], each["nbytes"]) for each in rows]
    layouts = [(1, 1, "sgd"), (2, 1, "sgd"), (1, 2, "sgd"), (2, 2, "sgd"), (1, 1, "adagrad")]
    assert found == [(*layout, nbytes) for layout in layouts for nbytes in (40000, 400000)]
    for each in rows:
        floor_s = each["raw_s"]["median"] + each["update_s"]["median"]
        assert each["over_stream"]["median"] == pytest.approx(each["cycle_s"]["median"] / floor_s)
        assert min(each["cycle_s"]["median"], each["raw_s"]["median"]) > 0


def test_train(tmp_path: Path) -> None:
    ways = ("hardsync", "allreduce")
    (row,) = rows_of(tmp_path, 3, "train", "--cases", "cnn-4", "--ways", *ways)
    assert list(row["images_per_s"]) == ["loops", "loops, contiguous", "DDP", "DDP, views", *ways]
    rates = {name: value["median"] for name, value in row["images_per_s"].items()}
    assert all(rate > 0 for rate in rates.values())
    assert row["ratios"]["hardsync / loops"]["median"] == pytest.approx(rates["hardsync"] / rates["loops"])
    assert row["best_synchronous"] == max(ways, key=lambda name: rates[name])


def test_log(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, 3, "log", "--cases", "cnn-4")
    assert row["windows"]["pairs"] == 24
    rates = {way: value["median"] for way, value in row["images_per_s"].items()}
    assert row["on_over_off"]["median"] == pytest.approx(rates["on"] / rates["off"], rel=0.5)
    assert min(rates.values()) > 0


@pytest.mark.rare
def test_oversubscribed(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, 4, "oversubscribed")
    assert row["ranks"] == 4
    rates = {name: value["median"] for name, value in row["images_per_s"].items()}
    assert row["over_serial"]["softsync"]["median"] == pytest.approx(rates["softsync"] / rates["one serial loop"])
    assert row["over_apart"]["hardsync"]["median"] == pytest.approx(rates["hardsync"] / rates["loops apart"])


def test_a_peer() -> None:
    case = replace(CASES["cnn-4"], updates=5)
    assert peers.run("torch RPC server", "cnn-4", case, sys.executable) > 0


def test_another_number_of_ranks_is_refused_once() -> None:
    done = bench(2, "train")
    assert done.returncode == 2
    said = r"bench train: found 2 rank\(s\), expected 3, or at least 4: mpirun (--oversubscribe )?-n 3 \.\.\."
    assert len(re.findall(said, done.stderr)) == 1, done.stderr
