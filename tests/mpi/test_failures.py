"""Bad input and failures in mid-run: a clear one-screen error, a nonzero status soon, no rank left behind.

Commands that every rank ends in order are executed together, in one launch; a few of each kind, and those that end the job, in one
of their own.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Verdict

from .conftest import Launched, execute, launch

# A user's module with everything that can go wrong.
USER = '''
import torch
from torch import nn
from mpisgd.liveness import guard
from mpisgd.comm.mpi.library import MPI

if "MPICH" in MPI.Get_library_version():  # its launcher, where others need the core, reads the last lines late
    guard.FORWARD_S = 3.0

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def wrong_shape():
    return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))

def no_module():
    return 42

class Failing(nn.Module):
    """Fails in the 20th forward pass of learner 1."""
    def __init__(self):
        super().__init__()
        self.inner, self.calls = model(), 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 20 and MPI.COMM_WORLD.rank == 2:
            raise RuntimeError("the user's own mistake")
        return self.inner(x)

def partly_nan():
    """In the 20th backward pass of learner 0 (rank 2) the last bias alone, and so one shard's slice, gets NaN."""
    module, calls = model(), [0]
    def spoil(gradient):
        calls[0] += 1
        return gradient * float("nan") if calls[0] == 20 and MPI.COMM_WORLD.rank == 2 else gradient
    module[1].bias.register_hook(spoil)
    return module

def infinite_loss(output, target):
    return nn.functional.cross_entropy(output, target) * float("inf")

calls = 0
def nan_at_20(output, target):
    global calls
    calls += torch.is_grad_enabled()
    loss = nn.functional.cross_entropy(output, target)
    return loss * float("nan") if calls == 20 and MPI.COMM_WORLD.rank == 1 else loss

def no_rate(epochs):
    raise ValueError("no rate")

def vector_loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")
'''


def words_of(*words: str) -> tuple[str, ...]:
    return ("train", "--epochs", "2", "--log.progress", "off", *words)


def train(ranks: int, directory: Path, *words: str, **env: str) -> Launched:
    """In a launch of its own."""
    (directory / "user.py").write_text(USER)
    return launch(ranks, "-m", "mpisgd", *words_of(*words), cwd=directory, timeout_s=180, **env)


def idx(path: Path, shape: tuple[int, ...], cut: int = 0, magic: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = (magic or 0x0800 + len(shape)).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in shape)
    body = header + bytes(int(np.prod(shape)))
    path.write_bytes(gzip.compress(body[: len(body) - cut]))


BAD_INPUT = {
    "too few ranks": (2, ["--shards", "2"], ["too few ranks", "found 2", "needed at least 3"]),
    "too few ranks for an evaluator": (2, ["--evaluator"], ["too few ranks", "1 evaluator"]),
    "shards beside allreduce": (3, ["--protocol", "allreduce", "--shards", "2"], ["shards = 2", "as many shards as learners, 3"]),
    "an evaluator and nobody": (
        1,
        ["--protocol", "allreduce", "--evaluator"],
        ["found 1, needed at least 2 = 1 learner + 1 evaluator"],
    ),
    "lambda < n": (3, ["--protocol", "softsync", "--protocol.n", "3"], ["protocol.n = 3", "lambda = 2"]),
    "N > learners": (3, ["--protocol", "backup", "--protocol.N", "3"], ["protocol.N = 3", "lambda = 2"]),
    "N + b": (3, ["--protocol", "backup", "--protocol.N", "1", "--protocol.b", "2"], ["1 + 2 = 3", "lambda = 2"]),
    "b >= learners": (3, ["--protocol", "backup", "--protocol.b", "2"], ["protocol.b = 2", "2 - 2"]),
    "unknown option": (2, ["--epoch", "3"], ["--epoch", "--epochs"]),
    "option of another protocol": (
        2,
        ["--protocol", "hardsync", "--protocol.n", "3"],
        ["--protocol.n", "belongs to --protocol softsync"],
    ),
    "no such straggler": (2, ["--straggler.slowdown", "7", "2.0"], ["straggler.slowdown[7]", "expected 0 ... 0"]),
    "unknown protocol": (2, ["--protocol", "sofsync"], ["'sofsync'", "did you mean 'softsync'"]),
    "wrong type": (2, ["--mu", "many"], ["--mu", "many"]),
    "out of bounds": (2, ["--mu", "0"], ["mu = 0", ">= 1"]),
    "missing file": (2, ["--data", "mnist", "--data-dir", "nowhere"], ["train-images-idx3-ubyte", "MPISGD_DATA", "sha256"]),
    "missing model module": (2, ["--model", "nothere:factory"], ["nothere", "model"]),
    "missing model attribute": (2, ["--model", "user:modell"], ["modell", "did you mean 'model'"]),
    "no module": (2, ["--model", "user:no_module"], ["int", "torch.nn.Module"]),
    "wrong shape": (2, ["--model", "user:wrong_shape"], ["first mini-batch", "RuntimeError"]),
    "infinite loss": (2, ["--loss", "user:infinite_loss"], ["loss = inf at the first mini-batch"]),
    "loss is no scalar": (2, ["--loss", "user:vector_loss"], ["expected a scalar"]),
    "unknown loss": (2, ["--loss", "cross_entropi"], ["loss = 'cross_entropi'"]),
    "negative seed": (2, ["--seed", "-1"], ["seed = -1"]),
    "fewer samples than learners": (
        4,
        ["--sampling", "own", "--data", "synthetic", "--data.samples", "2"],
        ["sampling = 'own'", "2 training samples for 3 learners"],
    ),
    "groups of nothing": (
        4,
        ["--shards", "2", "--groups.rate", "head.*", "2"],
        ["groups.rate['head.*']", "matches none of 1.weight"],
    ),
    "a schedule that fails": (3, ["--schedule", "user:no_rate"], ["schedule.factory = 'user:no_rate'", "ValueError: no rate"]),
}
LAUNCHED = ("unknown option", "missing file", "infinite loss")
"""Also launched by themselves: refused before torch is imported, by those with the data, by learners."""

DAMAGED = {
    "truncated": ("--data", "mnist", "--data-dir", "."),
    "foreign": ("--data", "mnist", "--data-dir", "."),
    "foreign HDF5": ("--data", "hdf5", "--data.path", "data.h5"),
}


def damage(directory: Path, kind: str) -> None:
    if kind == "foreign HDF5":
        with h5py.File(directory / "data.h5", "w") as file:
            file["something"] = np.zeros(3)
        return
    for part, n in (("train", 20), ("t10k", 10)):
        damaged = part == "train"
        idx(
            directory / "mnist" / f"{part}-images-idx3-ubyte.gz",
            (n, 28, 28),
            cut=100 if damaged and kind == "truncated" else 0,
            magic=0x12345678 if damaged and kind == "foreign" else None,
        )
        idx(directory / "mnist" / f"{part}-labels-idx1-ubyte.gz", (n,))


TOML = {
    "epoch = 3": "did you mean 'epochs'",
    '[protocol]\nname = "softsync"\nm = 3': "protocol.m",
    'mu = "16"': "mu = '16'",
    "mu = ": "is not TOML",
}

#: One after the other in one directory.
TWICE: dict[str, tuple[str, ...]] = {
    "first": (),
    "again": (),
    "asked": ("--overwrite",),
    "precious": ("--overwrite", "--out", "precious"),
    "blocked": ("--out", "user.py/run"),
}

NAN = ("--loss", "user:nan_at_20", "--nonfinite")
PARTLY = ("--model", "user:partly_nan", "--nonfinite", "drop")
AT_EASE = ("--straggler.delay", "constant", "--straggler.delay-mean-s", "0.003")
OTHER_SLOW = (*AT_EASE, "--straggler.slowdown", "1", "8.0")
OTHERS_SLOW = (*AT_EASE, "--straggler.slowdown", "1", "4.0", "2", "4.0")
"""So that on a busy machine the others have not done everything before learner 0 has come to its 20th mini-batch."""
RUN_ON = {
    "dropped-hardsync": (3, (*NAN, "drop", "--protocol", "hardsync")),
    "dropped-backup": (3, (*NAN, "drop", "--protocol", "backup", *OTHER_SLOW)),
    "dropped-softsync": (3, (*NAN, "drop", "--protocol", "softsync", "--protocol.n", "2", *OTHER_SLOW)),
    "partly-hardsync": (5, (*PARTLY, "--shards", "2", "--protocol", "hardsync")),
    "partly-backup": (5, (*PARTLY, "--shards", "2", "--protocol", "backup", *OTHERS_SLOW)),
    "partly-softsync": (5, (*PARTLY, "--shards", "2", "--protocol", "softsync", *OTHERS_SLOW)),
    "partly-allreduce": (4, (*PARTLY, "--protocol", "allreduce")),
    "continued": (3, (*NAN, "continue")),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Launched]]:
    """Name -> its directory, and how it ended."""
    top = tmp_path_factory.mktemp("together")
    commands: list[tuple[int, Path, tuple[str, ...]]] = []
    names: list[str] = []

    def add(name: str, ranks: int, words: tuple[str, ...], directory: str = "") -> Path:
        place = top / (directory or str(len(names)))
        place.mkdir(exist_ok=True)
        (place / "user.py").write_text(USER)
        names.append(name)
        commands.append((ranks, place, words))
        return place

    for name, (ranks, words, _) in BAD_INPUT.items():
        add(name, ranks, words_of(*words))
    for name, damaged in DAMAGED.items():
        damage(add(name, 2, words_of(*damaged)), name)
    for text in TOML:
        (add(text, 2, ("train", "job.toml")) / "job.toml").write_text(text)
    for name, twice in TWICE.items():
        place = add(name, 2, (*words_of(*twice), "--epochs", "0.2"), directory="twice")
    (place / "precious").mkdir()
    (place / "precious" / "thesis.tex").write_text("")
    for name, (ranks, run_on) in RUN_ON.items():
        add(name, ranks, words_of(*run_on))
    ends = execute(top, commands, ranks=5)
    return {name: (place, end) for name, (_, place, _), end in zip(names, commands, ends, strict=True)}


def run_of(ended: dict[str, tuple[Path, Launched]], name: str) -> Run:
    directory, done = ended[name]
    assert done.status == 0, done.text
    return Run(directory / "results" / "run")


def check_refused(directory: Path, done: Launched, expected: list[str]) -> None:
    assert done.status != 0
    for text in expected:
        assert text in done.text, done.text
    assert "Traceback" not in done.text
    assert len(done.err.splitlines()) < 40, "one screen"
    assert not (directory / "results").exists(), "refused before anything was made"


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_by_name_before_the_start(ended: dict[str, tuple[Path, Launched]], name: str) -> None:
    check_refused(*ended[name], BAD_INPUT[name][2])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_its_exit_status_is_the_launchers(tmp_path: Path, name: str) -> None:
    ranks, words, expected = BAD_INPUT[name]
    check_refused(tmp_path, train(ranks, tmp_path, *words), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_data_files(ended: dict[str, tuple[Path, Launched]], kind: str) -> None:
    _, done = ended[kind]
    assert done.status == 2, done.text
    assert "DataError" in done.text
    for text in ["data.h5", "train/inputs"] if kind == "foreign HDF5" else ["train-images-idx3-ubyte"]:
        assert text in done.text
    assert "Traceback" not in done.text


@pytest.mark.slow
@pytest.mark.parametrize("text", TOML)
def test_toml_files_with_unknown_keys_and_wrong_types(ended: dict[str, tuple[Path, Launched]], text: str) -> None:
    _, done = ended[text]
    assert done.status == 2
    assert "job.toml" in done.text
    assert TOML[text] in done.text


@pytest.mark.slow
def test_run_directories_are_never_overwritten_unless_asked(ended: dict[str, tuple[Path, Launched]]) -> None:
    directory = ended["first"][0]
    said = {name: ended[name][1] for name in TWICE}
    assert {name: done.status for name, done in said.items()} == {"first": 0, "again": 2, "asked": 0, "precious": 2, "blocked": 2}
    assert "results/run' exists" in said["again"].text
    assert "--overwrite" in said["again"].text
    assert "is no run directory" in said["precious"].text
    assert (directory / "precious" / "thesis.tex").exists()
    assert "cannot be made" in said["blocked"].text


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN_ON if name.startswith("dropped")])
def test_nan_in_mid_run_is_dropped_and_logged(ended: dict[str, tuple[Path, Launched]], name: str) -> None:
    run = run_of(ended, name)
    dropped = run.pushes[(run.pushes["verdict"] == Verdict.DROP) & np.isnan(run.pushes["loss"])]
    assert [(int(row["learner_id"]), int(row["seq"])) for row in dropped] == [(0, 19)]
    assert run.books()[0].balanced
    assert run.evaluations["error"][-1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN_ON if name.startswith("partly")])
def test_all_shards_drop_what_is_bad_in_one_slice(ended: dict[str, tuple[Path, Launched]], name: str) -> None:
    run = run_of(ended, name)
    shards, learner_id = (4, 2) if name == "partly-allreduce" else (2, 0)
    dropped = run.pushes[np.isnan(run.pushes["loss"])]
    expected = [(shard, learner_id, 19) for shard in range(shards)]
    assert sorted(zip(dropped["shard"], dropped["learner_id"], dropped["seq"], strict=True)) == expected
    assert (dropped["verdict"] == Verdict.DROP).all()
    assert len(set(run.summaries["samples"])) == 1


@pytest.mark.slow
def test_an_experiment_may_run_on_and_is_reported_as_diverged(ended: dict[str, tuple[Path, Launched]]) -> None:
    run = run_of(ended, "continued")
    assert run.done is not None
    assert run.done["diverged"]


@pytest.mark.slow
def test_nan_in_mid_run_stops(tmp_path: Path) -> None:
    done = train(3, tmp_path, "--loss", "user:nan_at_20")
    assert done.status != 0
    assert "DivergenceError" in done.text
    assert "learner 0, mini-batch 19" in done.text
    assert "rank 0 (shard 0) on" in done.text
    assert not (tmp_path / "results" / "run" / "DONE").exists()
    pushes = Run(tmp_path / "results" / "run").pushes
    assert {(0, 18), (1, 18)} <= {(int(row["learner_id"]), int(row["seq"])) for row in pushes}, "logged up to the failure"


@pytest.mark.slow
def test_a_diverged_run_that_drops_everything_ends(tmp_path: Path) -> None:
    done = train(2, tmp_path, "--alpha0", "1e30", "--nonfinite", "drop")
    assert done.status != 0
    assert "all dropped" in done.text


def test_an_exception_in_one_learners_model_ends_the_job(tmp_path: Path) -> None:
    done = train(3, tmp_path, "--model", "user:Failing")
    assert done.status != 0
    assert "the user's own mistake" in done.text
    assert "rank 2 (learner 1) on" in done.text
    assert "user.py" in done.text, "the traceback shows where"


@pytest.mark.slow
def test_an_exception_in_one_rank_of_an_allreduce_ends_the_job(tmp_path: Path) -> None:
    """The others are in a collective that will never end."""
    done = train(4, tmp_path, "--protocol", "allreduce", "--model", "user:Failing")
    assert done.status != 0 and "the user's own mistake" in done.text
    assert "rank 2 (learner and shard 2) on" in done.text
    assert not (tmp_path / "results" / "run" / "DONE").exists()


@pytest.mark.slow
def test_a_launcher_that_does_not_know_this_mpi(tmp_path: Path) -> None:
    done = train(1, tmp_path, SLURM_STEP_NUM_TASKS="4")
    assert done.status == 2
    assert "SLURM_STEP_NUM_TASKS = 4" in done.text


NEVER_COMES = """
import os, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
if rank == 1:
    time.sleep(600)
import mpisgd.comm.mpi.library
"""


@pytest.mark.slow
def test_a_rank_that_never_starts_mpi_does_not_hang_the_others() -> None:
    """As where its node cannot be reached: in MPI_Init all wait for all."""
    done = launch(2, "-c", NEVER_COMES, timeout_s=60, MPISGD_START_S="5")
    assert done.status != 0 and "Timeout (0:00:05)!" in done.err
    assert "mpisgd/comm/mpi/library.py" in done.err


def test_a_start_in_no_number_of_seconds_is_refused() -> None:
    done = launch(1, "-c", "import mpisgd.comm.mpi.library", MPISGD_START_S="soon")
    assert done.status != 0 and "MPISGD_START_S = 'soon': expected seconds, or 0 for never" in done.err
