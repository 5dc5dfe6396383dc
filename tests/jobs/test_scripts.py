"""The batch scripts: their directives, and what they start and say, with the batch system and the launchers faked.

The environment of each fake job is what the batch system's own documentation says that it sets.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mpisgd.config import config_file
from mpisgd.protocols import SoftsyncOptions
from mpisgd.site.scripts import render
from tests.effort import spread
from tests.jobs import golden
from tests.jobs.documented import DIRECTIVES, ENVIRONMENTS, LAUNCHES, RUN, SCRIPTS, THREADS, TRAINS
from tests.jobs.golden import JOBS

#: Of each system one: all are what `submit` prints, to the letter, and have their last part in common.
SOME = spread(SCRIPTS, 4)
BLOCK_BEGINS, BLOCK_ENDS = "# ======== edit this block", "# ======== nothing below needs an edit"

# -------------------------------------------------------------------------------------------------------- directives

KEYWORDS = {".sbatch": "#SBATCH ", ".bsub": "#BSUB ", ".pbs": "#PBS ", ".flux": "#flux: "}


def directives(script: str) -> list[str]:
    """What the batch system reads: sbatch stops at the first line that is neither blank nor a comment."""
    keyword = KEYWORDS[Path(script).suffix]
    found = []
    for line in (JOBS / script).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith(keyword):
            found.append(line.removeprefix(keyword))
    return found


def test_every_script_has_its_directives_written_down_here():
    assert sorted(DIRECTIVES) == SCRIPTS == sorted(path.name for path in JOBS.iterdir() if path.suffix in KEYWORDS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_directives(script):
    assert directives(script) == DIRECTIVES[script]
    anywhere = re.findall(r"^#(?:SBATCH|BSUB|PBS|flux:) (.*)$", (JOBS / script).read_text(), re.MULTILINE)
    assert anywhere == DIRECTIVES[script], "a directive after the first command is ignored"


# ---------------------------------------------------------------------------------------------------------- the text


def test_they_are_what_submit_prints(monkeypatch):
    monkeypatch.setattr(render, "_environment", cache(render._environment))
    for script in SCRIPTS:
        assert (JOBS / script).read_text() == golden.rendered(script), f"{script}: renew it with: python -m tests.jobs.golden"
        assert os.access(JOBS / script, os.X_OK), script


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (the extra 'test' brings it)")
@pytest.mark.slow
def test_shellcheck_finds_nothing():
    result = subprocess.run([str(SHELLCHECK), *SCRIPTS], cwd=JOBS, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_block_to_edit_then_strict_mode(script):
    text = (JOBS / script).read_text()
    assert text.count(BLOCK_BEGINS) == text.count(BLOCK_ENDS) == 1
    above, below = text.split(BLOCK_ENDS)
    settings = r"^([A-Z_]+)=(?:\S*|\".*\")(?:\s+#.*)?$"
    head, block = above.split(BLOCK_BEGINS)
    assert all(line.startswith("#") for line in head.splitlines())
    for line in block.splitlines()[1:]:
        known = line.startswith("#") or re.match(settings, line) or re.fullmatch(r'PROTOCOLS=\(|  ".*"|\)', line)
        assert known, f"{line!r} is neither a directive nor a setting"
    assert below.splitlines()[1] == "set -euo pipefail"


def test_the_scripts_share_their_last_part_to_the_letter():
    parts = {(JOBS / script).read_text().partition("\nstatus=0\n")[2] for script in SCRIPTS if "chain" not in script}
    assert len(parts) == 1
    assert "$RUN/DONE" in parts.pop()


def test_the_example_configuration_loads():
    config = config_file.read(JOBS / "job.toml")
    assert config.protocol == SoftsyncOptions(n=1, modulation="inverse")
    assert (config.shards, config.evaluator, config.device) == (1, False, "cpu"), "the scripts give these"


def kind(script):
    """cpu, gpu, chain, array, jsrun"""
    return script.split("-")[1].split(".")[0]


def with_mpi(mpi):
    return [("\nMPI=openmpi", f"\nMPI={mpi}")] if mpi not in ("", "openmpi") else []


@pytest.mark.parametrize(("script", "mpi"), spread(LAUNCHES, 4, unpack=True))
def test_launches_exactly_this(submit, script, mpi):
    outcome = submit(script, edits=with_mpi(mpi))
    assert outcome.status == 0, outcome.stderr
    expected = f"{LAUNCHES[script, mpi]} {TRAINS[script]}".split()
    if "HOSTFILE" in expected:
        expected[expected.index("HOSTFILE")] = outcome.argv[outcome.argv.index("--hostfile") + 1]
    assert outcome.argv == expected
    assert outcome.note("omp_num_threads").strip() == THREADS.get(script, "1")
    assert (outcome.notes / "activated").exists()


@pytest.mark.parametrize(("script", "hosts"), [("lsf-cpu.bsub", 9), ("lsf-array.bsub", 9), ("lsf-gpu.bsub", 5)])
def test_lsf_hosts_become_a_hostfile_that_is_removed(submit, script, hosts):
    outcome = submit(script)
    assert outcome.note("hostfile") == f"hostA slots={hosts}\nhostB slots={hosts}\n"
    assert not Path(outcome.argv[outcome.argv.index("--hostfile") + 1]).exists()


# ------------------------------------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize("script", SOME)
def test_done_is_believed(submit, script):
    outcome = submit(script, done=True, status=0)
    assert outcome.status == 0
    assert f"mpisgd report {RUN[script]}\n" in outcome.stdout
    assert outcome.stderr == ""


@pytest.mark.parametrize("script", SOME)
def test_done_is_believed_more_than_the_launcher(submit, script):
    outcome = submit(script, done=True, status=137)
    assert outcome.status == 0
    assert "137" in outcome.stderr


@pytest.mark.parametrize(("launcher", "script"), spread(itertools.product([0, 1, 137], SCRIPTS), 7, unpack=True))
def test_without_done_the_job_fails(submit, script, launcher):
    outcome = submit(script, done=False, status=launcher)
    assert outcome.status == (1 if "chain" in script else launcher or 1)
    assert f"there is no {RUN[script]}/DONE" in outcome.stderr
    assert "mpisgd report" not in outcome.stdout


# ------------------------------------------------------------------------------------------------ what users may edit


@pytest.mark.parametrize("script", SOME)
def test_says_how_ranks_become_roles(submit, script):
    sums = {
        "gpu": "10 ranks = 2 shards + 8 learners + 0 evaluators",
        "jsrun": "14 ranks = 2 shards + 12 learners + 0 evaluators",
    }
    expected = sums.get(kind(script), "18 ranks = 1 shards + 16 learners + 1 evaluators")
    assert expected in submit(script).stdout


@pytest.mark.parametrize("script", SOME)
def test_too_few_ranks_are_refused_before_the_launch(submit, script):
    edits = {"gpu": ("\nSHARDS=2", "\nSHARDS=10"), "jsrun": ("\nGPUS_PER_NODE=6", "\nGPUS_PER_NODE=0")}
    outcome = submit(script, edits=[edits.get(kind(script), ("\nSHARDS=1", "\nSHARDS=17"))])
    assert outcome.status == 2
    assert "leave 0 learners: ask for more" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize(("script", "ranks"), [("slurm-gpu.sbatch", "SLURM_NTASKS"), ("lsf-gpu.bsub", "LSB_DJOB_NUMPROC")])
def test_more_learners_than_gpus_are_refused(submit, script, ranks):
    outcome = submit(script, environment={ranks: "11"})
    assert outcome.status == 2
    assert "9 learners on 8 GPUs" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize("script", spread([name for name in SCRIPTS if "jsrun" not in name], 4))
def test_an_unknown_mpi_is_refused(submit, script):
    outcome = submit(script, edits=with_mpi("mvapich"))
    assert outcome.status == 2
    assert "MPI = 'mvapich': expected openmpi or mpich" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize("script", spread([name for name in SCRIPTS if "jsrun" not in name and "flux" not in name], 4))
def test_fault_tolerance_is_asked_for_where_it_can_be_had(submit, script):
    tolerant = ("\nFAULT_TOLERANT=0", "\nFAULT_TOLERANT=1")
    refused = submit(script, edits=[tolerant, *with_mpi("mpich")])
    assert refused.status == 2
    assert "FAULT_TOLERANT=1: expected MPI=openmpi" in refused.stderr
    assert refused.argv == []
    outcome = submit(script, edits=[tolerant])
    expected = LAUNCHES[script, "openmpi"].split()
    assert outcome.argv[len(expected) : len(expected) + 3] == ["--with-ft", "ulfm", "mpisgd"]


@pytest.mark.parametrize("script", spread([name for name in SCRIPTS if "chain" not in name], 4))
def test_a_job_that_failed_says_how_it_can_go_on(submit, script):
    assert "--resume" not in submit(script, done=False, status=1).stderr
    outcome = submit(script, done=False, status=137, environment={"FAKE_SAVES": "1"})
    assert f"by train --resume {RUN[script]}; how far back that is says: mpisgd report {RUN[script]}" in outcome.stderr


@pytest.mark.parametrize("script", spread([name for name in SCRIPTS if "jsrun" not in name], 4))
def test_the_evaluator_is_asked_for_only_where_it_has_a_rank(submit, script):
    before, after = ("0", "1") if "gpu" in script else ("1", "0")
    edited = submit(script, edits=[(f"\nEVALUATOR={before}", f"\nEVALUATOR={after}")])
    assert ("--evaluator" in edited.argv) == (after == "1")


@pytest.mark.parametrize("script", SOME)
def test_modules_are_loaded_word_by_word(submit, script):
    before = 'MODULES="spectrum-mpi"' if "jsrun" in script else 'MODULES=""'
    outcome = submit(script, edits=[(before, 'MODULES="gcc/13 openmpi/5.0"')])
    assert outcome.status == 0, outcome.stderr
    assert outcome.note("module").splitlines() == ["load", "gcc/13", "openmpi/5.0"]


@pytest.mark.parametrize("script", SOME)
def test_a_missing_virtual_environment_stops_the_job(submit, script):
    outcome = submit(script, edits=[("\nVENV=.venv", "\nVENV=.nowhere")])
    assert outcome.status != 0
    assert ".nowhere/bin/activate" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize("script", spread([name for name in SCRIPTS if "flux" not in name], 4))
def test_outside_its_batch_system_it_stops_at_once(submit, script):
    outcome = submit(script, without=ENVIRONMENTS[script])
    assert outcome.status != 0
    assert "unbound variable" in outcome.stderr
    assert outcome.argv == []


#: Without these there is no job of the batch system; the others a site may leave unset.
REQUIRED = {
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_NTASKS",
    "SLURM_JOB_NUM_NODES",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "ARRAY_INDEX",
} | {name for script in SCRIPTS for name in ENVIRONMENTS[script] if name.startswith(("LSB_", "PBS_"))}


@pytest.mark.parametrize("script", SOME)
def test_what_a_site_need_not_set_does_not_stop_it(submit, script):
    """Under `set -u`; CUDA_VISIBLE_DEVICES is not set by every LSF."""
    outcome = submit(script, without=set(ENVIRONMENTS[script]) - REQUIRED)
    assert outcome.status == 0, outcome.stderr
    assert "unbound variable" not in outcome.stderr
    assert outcome.argv
