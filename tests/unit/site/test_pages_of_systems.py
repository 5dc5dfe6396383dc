"""What the pages of the batch systems say that needs the system: each command is executed, with fakes of the system's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mpisgd.site.scripts import systems
from tests.mpi import pages

HOWTO = pages.ROOT / "docs" / "howto"
#: Page -> what is submitted by, the answer to it, a line of its script, and the commands of the system that the page has besides.
SYSTEMS = {
    "slurm": ("sbatch", "4711", "#SBATCH --nodes=4", ["squeue", "scancel"]),
    "lsf": ("bsub", "Job <4711> is submitted.", "#BSUB -W 02:30", ["bjobs", "bkill"]),
    "pbs": ("qsub", "4711.server", "#PBS -l walltime=12:00:00", ["qstat", "qdel"]),
    "flux": ("flux", "ƒ17", "#flux: --time-limit=90m", ["flux jobs", "flux cancel"]),
}
#: It notes its words, and of what is submitted the script.
FAKE = """#!/bin/bash
echo "${0##*/} $*" >>"$FAKE/asked"
if [[ ${0##*/} == $SUBMITS && ($SUBMITS != flux || $1 == batch) ]]; then cat >"$FAKE/script"; echo "$ANSWER"; fi
"""


@pytest.mark.parametrize("system", ["slurm", *(pytest.param(each, marks=pytest.mark.slow) for each in SYSTEMS if each != "slurm")])
def test_commands_that_need_the_system(system: str, tmp_path: Path) -> None:
    page = HOWTO / f"{system}.md"
    submits, answer, directive, besides = SYSTEMS[system]
    pages.lay_out(tmp_path, pages.ROOT / "docs" / "tutorial.md", page)
    lines = [line for block in pages.blocks(page, "bash") for line in block.splitlines()]
    for name in {submits, *(each.split()[0] for each in besides)}:
        (tmp_path / "bin" / name).write_text(FAKE)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(pages.ROOT), "PYTHONUTF8": "1"}
    env |= {"FAKE": str(tmp_path), "SUBMITS": submits, "ANSWER": answer, "XDG_CONFIG_HOME": str(tmp_path / "settings")}
    for line in lines:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{line}: {done.stderr}"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].startswith(submits)
    assert directive in (tmp_path / "script").read_text().splitlines()
    assert all(any(each.startswith(command) for each in asked[1:]) for command in besides)
    number = answer.strip("ƒ").removeprefix("Job <").partition(">")[0].partition(".")[0]
    assert all(number in each for each in asked[1:]), "the page follows the job that was submitted"


def test_the_pages_are_all() -> None:
    """Those that `submit` writes scripts for; jsrun's are on LSF's page."""
    assert {*SYSTEMS, "jsrun"} == {*systems.SYSTEMS}
