"""Ranks that bind themselves by their roles: real ones, whose threads say where the system lets them run; replayed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mpisgd import replay
from mpisgd.comm.mpi.launch import environment, mpirun, version
from mpisgd.site.launchers import Binding, LauncherName, bound

CORES = sorted(os.sched_getaffinity(0))

pytestmark = [pytest.mark.skipif(len(CORES) < 2, reason="two cores, for two ranks"), pytest.mark.slow]

#: A learner notes where each of its threads may run, as it trains.
NOTES = """
import os
from pathlib import Path
import torch

def notes(output, target):
    found = {tuple(sorted(os.sched_getaffinity(int(each.name)))) for each in Path("/proc/self/task").iterdir()}
    Path("threads").write_text(f"{sorted(found)} {torch.get_num_threads()}")
    return torch.nn.functional.cross_entropy(output, target)
"""
JOB = ["--model", "softmax", "--epochs", "0.1", "--loss", "notes:notes", "--log.progress", "off", "--binding", "roles"]


def train(directory: Path, ranks: int, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "notes.py").write_text(NOTES)
    here = environment() | {"PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [*mpirun(ranks), *more, sys.executable, "-m", "mpisgd", "train", *JOB, "--out", "run"]
    return subprocess.run(command, cwd=directory, env=here, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("launcher", ["--bind-to none", "--bind-to core"])
def test_a_shard_and_a_learner_have_a_core_each(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the launcher has done: bound to nothing, or each to a core, which need not be that of its role."""
    done = train(tmp_path, 2, *launcher.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "binding" not in done.stdout + done.stderr
    told = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["environment"]
    shard, learner = ([int(core)] for core in told["cores"])
    assert {*shard, *learner} <= set(CORES)
    assert shard < learner
    assert (tmp_path / "threads").read_text() == f"[({learner[0]},)] 1"
    assert told["threads"] == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    proof = replay.replay(Path("run"), trust=True)
    assert proof.reason == ""
    assert proof.lines()[-1].startswith("identical")


def test_more_ranks_than_cores_share_them_and_rank_0_says_so(tmp_path: Path) -> None:
    done = train(tmp_path, len(CORES) + 1, "--bind-to", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CORES)} core(s) for {len(CORES) + 1} ranks: all ranks share all cores" in done.stderr
    told = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["environment"]
    assert len(set(told["cores"])) == 1


@pytest.mark.parametrize("binding", ["none", "cores"])
def test_what_a_script_asks_of_this_mpis_launcher_is_what_ranks_get(binding: Binding) -> None:
    """Each rank prints where it may run; PyTorch is not needed for that."""
    name: LauncherName = "mpirun" if "Open MPI" in version() else "mpiexec.hydra"
    launcher = Path(mpirun(1)[0]).with_name(name)
    words = [launcher, "-n", "2", *bound(name, binding).format(threads=1).split()]
    here = {key: value for key, value in environment().items() if key != "PRTE_MCA_rmaps_default_mapping_policy"}
    told = "import os; print(sorted(os.sched_getaffinity(0)))"
    done = subprocess.run([*words, sys.executable, "-c", told], env=here, capture_output=True, text=True, check=True, timeout=300)
    found = re.findall(r"\[.*?\]", done.stdout)  # two ranks may write on one line
    assert len(found) == 2
    if binding == "none":
        assert found == [str(CORES)] * 2
    else:
        assert len(set(found)) == 2
        assert all(int(each.strip("[]")) in CORES for each in found)
