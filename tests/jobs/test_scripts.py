"""The batch scripts: their directives, and what they start and say, with the batch system and the launchers faked.

The environment of each fake job is what the batch system's own documentation says that it sets.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpisgd import config_file
from mpisgd.config import SoftsyncOptions

JOBS = Path(__file__).parents[2] / "jobs"
SCRIPTS = sorted(path.name for path in JOBS.iterdir() if path.suffix in {".sbatch", ".bsub"})
BLOCK_BEGINS, BLOCK_ENDS = "# ======== edit this block", "# ======== nothing below needs an edit"

# -------------------------------------------------------------------------------------------------------- directives

DIRECTIVES = {
    "slurm-cpu.sbatch": [
        "--job-name=mpisgd",
        "--nodes=2",
        "--ntasks=18",
        "--cpus-per-task=1",
        "--time=01:00:00",
        "--output=%x-%j.out",
        "--no-requeue",
    ],
    "slurm-gpu.sbatch": [
        "--job-name=mpisgd",
        "--nodes=2",
        "--ntasks=10",
        "--ntasks-per-node=5",
        "--gpus-per-node=4",
        "--cpus-per-task=4",
        "--time=01:00:00",
        "--output=%x-%j.out",
        "--no-requeue",
    ],
    "lsf-cpu.bsub": ["-J mpisgd", "-n 18", '-R "span[ptile=9]"', "-W 01:00", "-o mpisgd-%J.out", "-rn"],
    "lsf-gpu.bsub": [
        "-J mpisgd",
        "-n 10",
        '-R "span[ptile=5]"',
        '-gpu "num=4:mode=shared:j_exclusive=yes"',
        "-W 01:00",
        "-o mpisgd-%J.out",
        "-rn",
    ],
    "lsf-jsrun.bsub": ["-P ...", "-J mpisgd", "-nnodes 2", "-W 01:00", "-alloc_flags smt1", "-o mpisgd-%J.out"],
}


def directives(script: str) -> list[str]:
    """What the batch system reads: sbatch stops at the first line that is neither blank nor a comment."""
    keyword = "#SBATCH " if script.endswith(".sbatch") else "#BSUB "
    found = []
    for line in (JOBS / script).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith(keyword):
            found.append(line.removeprefix(keyword))
    return found


def test_every_script_has_its_directives_written_down_here():
    assert sorted(DIRECTIVES) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_directives(script):
    assert directives(script) == DIRECTIVES[script]
    anywhere = re.findall(r"^#(?:SBATCH|BSUB) (.*)$", (JOBS / script).read_text(), re.MULTILINE)
    assert anywhere == DIRECTIVES[script], "a directive after the first command is ignored"


# ---------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_can_parse_it(script):
    subprocess.run(["bash", "-n", JOBS / script], check=True, timeout=20)


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (the extra 'test' brings it)")
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
    result = subprocess.run([str(SHELLCHECK), JOBS / script], capture_output=True, text=True, timeout=60, check=False)
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
        assert line.startswith("#") or re.match(settings, line), f"{line!r} is neither a directive nor a setting"
    assert below.splitlines()[1] == "set -euo pipefail"


def test_the_scripts_share_their_last_part_to_the_letter():
    parts = {(JOBS / script).read_text().partition("\nstatus=0\n")[2] for script in SCRIPTS}
    assert len(parts) == 1
    assert "$RUN/DONE" in parts.pop()


def test_the_example_configuration_loads():
    config = config_file.read(JOBS / "job.toml")
    assert config.protocol == SoftsyncOptions(n=1, modulation="inverse")
    assert (config.shards, config.evaluator, config.device) == (1, False, "cpu"), "the scripts give these"


# ------------------------------------------------------------------------------------------------------ fake systems

# One fake stands for mpirun, mpiexec, srun and jsrun: it notes how it was called, and does as the test says.
LAUNCHER = """\
#!/bin/bash
printf '%s\\n' "${0##*/}" "$@" >"$FAKE/argv"
echo "$OMP_NUM_THREADS" >"$FAKE/omp_num_threads"
while (($#)); do
  case $1 in
    --out) run=$2 ;;
    --hostfile) cp "$2" "$FAKE/hostfile" ;;
  esac
  shift
done
mkdir -p "$run"
if ((FAKE_DONE)); then touch "$run/DONE"; fi
exit "$FAKE_STATUS"
"""
MODULE = """\
#!/bin/bash
printf '%s\\n' "$@" >"$FAKE/module"
"""
# As conda's and Lmod's do, it reads what need not be set.
ACTIVATE = 'echo "$_NEVER_SET" >/dev/null; touch "$FAKE/activated"\n'

ENVIRONMENTS = {
    "slurm-cpu.sbatch": {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "mpisgd",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "18",
        "SLURM_CPUS_PER_TASK": "1",
    },
    "slurm-gpu.sbatch": {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "mpisgd",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "10",
        "SLURM_NTASKS_PER_NODE": "5",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_GPUS_ON_NODE": "4",
    },
    "lsf-cpu.bsub": {
        "LSB_JOBID": "4711",
        "LSB_JOBNAME": "mpisgd",
        "LSB_DJOB_NUMPROC": "18",
        "LSB_MCPU_HOSTS": "hostA 9 hostB 9 ",
    },
    "lsf-gpu.bsub": {
        "LSB_JOBID": "4711",
        "LSB_JOBNAME": "mpisgd",
        "LSB_DJOB_NUMPROC": "10",
        "LSB_MCPU_HOSTS": "hostA 5 hostB 5 ",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    },
    "lsf-jsrun.bsub": {
        "LSB_JOBID": "4711",
        "LSB_JOBNAME": "mpisgd",
        "LSB_DJOB_NUMPROC": "85",
        "LSB_MCPU_HOSTS": "batch5 1 a01n01 42 a01n02 42 ",
    },
}

BLAUNCH = "--hostfile HOSTFILE --prtemca plm_ssh_agent blaunch --bind-to none -x OMP_NUM_THREADS"
#: (script, MPI) -> what the script must start ranks with.
LAUNCHES = {
    ("slurm-cpu.sbatch", "openmpi"): "mpirun -n 18 --bind-to none -x OMP_NUM_THREADS",
    ("slurm-cpu.sbatch", "mpich"): "srun --mpi=pmi2 --kill-on-bad-exit=1 --ntasks=18 --cpus-per-task=1",
    ("slurm-gpu.sbatch", "openmpi"): "mpirun -n 10 --bind-to none -x OMP_NUM_THREADS",
    ("slurm-gpu.sbatch", "mpich"): "srun --mpi=pmi2 --kill-on-bad-exit=1 --ntasks=10 --cpus-per-task=4",
    ("lsf-cpu.bsub", "openmpi"): "mpirun -n 18 " + BLAUNCH,
    ("lsf-cpu.bsub", "mpich"): "mpiexec -rmk lsf -launcher lsf -n 18",
    ("lsf-gpu.bsub", "openmpi"): "mpirun -n 10 " + BLAUNCH,
    ("lsf-gpu.bsub", "mpich"): "mpiexec -rmk lsf -launcher lsf -n 10",
    ("lsf-jsrun.bsub", ""): (
        "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 7 --cpu_per_rs 42 --gpu_per_rs 6 --launch_distribution packed"
        " --bind packed:6 --smpiargs=-gpu --exit_on_error 1 --env OMP_NUM_THREADS=6"
    ),
}
#: script -> what every rank must run.
TRAINS = {
    "slurm-cpu.sbatch": "mpisgd train jobs/job.toml --shards 1 --out results/mpisgd-4711 --evaluator",
    "slurm-gpu.sbatch": "mpisgd train jobs/job.toml --shards 2 --out results/mpisgd-4711 --device cuda --placement spread",
    "lsf-cpu.bsub": "mpisgd train jobs/job.toml --shards 1 --out results/mpisgd-4711 --evaluator",
    "lsf-gpu.bsub": "mpisgd train jobs/job.toml --shards 2 --out results/mpisgd-4711 --device cuda --placement spread",
    "lsf-jsrun.bsub": "mpisgd train jobs/job.toml --shards 2 --out results/mpisgd-4711 --device cuda --placement spread",
}
THREADS = {"slurm-cpu.sbatch": "1", "slurm-gpu.sbatch": "4", "lsf-cpu.bsub": "1", "lsf-gpu.bsub": "1", "lsf-jsrun.bsub": "6"}


@dataclass
class Outcome:
    """What one fake job did. `argv` is empty where nothing was launched."""

    status: int
    stdout: str
    stderr: str
    argv: list[str]
    notes: Path

    def note(self, name: str) -> str:
        return (self.notes / name).read_text()


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Run a script, with its block edited, as the batch system would: from the submission directory."""
    checkout, fake, programs = tmp_path / "checkout", tmp_path / "fake", tmp_path / "programs"
    for directory in (checkout / "jobs", checkout / "results", checkout / ".venv" / "bin", fake, programs):
        directory.mkdir(parents=True)
    (checkout / ".venv" / "bin" / "activate").write_text(ACTIVATE)
    for name in ("mpirun", "mpiexec", "srun", "jsrun"):
        (programs / name).write_text(LAUNCHER)
    (programs / "module").write_text(MODULE)
    for program in programs.iterdir():
        program.chmod(0o755)

    def run(script, *, edits=(), done=True, status=0, environment=(), without=()):
        text = (JOBS / script).read_text()
        for before, after in edits:
            assert text.count(before) == 1, f"{before!r} stands {text.count(before)} times in {script}"
            text = text.replace(before, after)
        (tmp_path / "spooled").write_text(text)
        base = {"PATH": f"{programs}:/usr/bin:/bin", "TMPDIR": str(tmp_path), "FAKE": str(fake)}
        base |= {"FAKE_DONE": str(int(done)), "FAKE_STATUS": str(status)}
        job = {name: value for name, value in ENVIRONMENTS[script].items() if name not in without}
        result = subprocess.run(
            ["bash", tmp_path / "spooled"],
            cwd=checkout,
            env=base | job | dict(environment),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        argv = (fake / "argv").read_text().splitlines() if (fake / "argv").exists() else []
        return Outcome(result.returncode, result.stdout, result.stderr, argv, fake)

    return run


def with_mpi(mpi):
    return [("\nMPI=openmpi", f"\nMPI={mpi}")] if mpi not in ("", "openmpi") else []


@pytest.mark.parametrize(("script", "mpi"), LAUNCHES)
def test_launches_exactly_this(submit, script, mpi):
    outcome = submit(script, edits=with_mpi(mpi))
    assert outcome.status == 0, outcome.stderr
    expected = f"{LAUNCHES[script, mpi]} {TRAINS[script]}".split()
    if "HOSTFILE" in expected:
        expected[expected.index("HOSTFILE")] = outcome.argv[outcome.argv.index("--hostfile") + 1]
    assert outcome.argv == expected
    assert outcome.note("omp_num_threads").strip() == THREADS[script]
    assert (outcome.notes / "activated").exists()


@pytest.mark.parametrize(("script", "hosts"), [("lsf-cpu.bsub", 9), ("lsf-gpu.bsub", 5)])
def test_lsf_hosts_become_a_hostfile_that_is_removed(submit, script, hosts):
    outcome = submit(script)
    assert outcome.note("hostfile") == f"hostA slots={hosts}\nhostB slots={hosts}\n"
    assert not Path(outcome.argv[outcome.argv.index("--hostfile") + 1]).exists()


# ------------------------------------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize("script", SCRIPTS)
def test_done_is_believed(submit, script):
    outcome = submit(script, done=True, status=0)
    assert outcome.status == 0
    assert "mpisgd report results/mpisgd-4711" in outcome.stdout
    assert outcome.stderr == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_done_is_believed_more_than_the_launcher(submit, script):
    outcome = submit(script, done=True, status=137)
    assert outcome.status == 0
    assert "137" in outcome.stderr


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("launcher", "expected"), [(0, 1), (1, 1), (137, 137)])
def test_without_done_the_job_fails(submit, script, launcher, expected):
    outcome = submit(script, done=False, status=launcher)
    assert outcome.status == expected
    assert "there is no results/mpisgd-4711/DONE" in outcome.stderr
    assert "mpisgd report" not in outcome.stdout


# ------------------------------------------------------------------------------------------------ what users may edit


@pytest.mark.parametrize("script", SCRIPTS)
def test_says_how_ranks_become_roles(submit, script):
    sums = {
        "slurm-cpu.sbatch": "18 ranks = 1 shards + 16 learners + 1 evaluators",
        "slurm-gpu.sbatch": "10 ranks = 2 shards + 8 learners + 0 evaluators",
        "lsf-cpu.bsub": "18 ranks = 1 shards + 16 learners + 1 evaluators",
        "lsf-gpu.bsub": "10 ranks = 2 shards + 8 learners + 0 evaluators",
        "lsf-jsrun.bsub": "14 ranks = 2 shards + 12 learners + 0 evaluators",
    }
    assert sums[script] in submit(script).stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_too_few_ranks_are_refused_before_the_launch(submit, script):
    edits = {
        "cpu": ("\nSHARDS=1", "\nSHARDS=17"),
        "gpu": ("\nSHARDS=2", "\nSHARDS=10"),
        "jsrun": ("\nGPUS_PER_NODE=6", "\nGPUS_PER_NODE=0"),
    }
    kind = script.split("-")[1].split(".")[0]
    outcome = submit(script, edits=[edits[kind]])
    assert outcome.status == 2
    assert "leave 0 learners: ask for more" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize(("script", "ranks"), [("slurm-gpu.sbatch", "SLURM_NTASKS"), ("lsf-gpu.bsub", "LSB_DJOB_NUMPROC")])
def test_more_learners_than_gpus_are_refused(submit, script, ranks):
    outcome = submit(script, environment={ranks: "11"})
    assert outcome.status == 2
    assert "9 learners on 8 GPUs" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "jsrun" not in name])
def test_an_unknown_mpi_is_refused(submit, script):
    outcome = submit(script, edits=with_mpi("mvapich"))
    assert outcome.status == 2
    assert "MPI = 'mvapich': expected openmpi or mpich" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "jsrun" not in name])
def test_the_evaluator_is_asked_for_only_where_it_has_a_rank(submit, script):
    before, after = ("1", "0") if "cpu" in script else ("0", "1")
    edited = submit(script, edits=[(f"\nEVALUATOR={before}", f"\nEVALUATOR={after}")])
    assert ("--evaluator" in edited.argv) == (after == "1")


@pytest.mark.parametrize("script", SCRIPTS)
def test_modules_are_loaded_word_by_word(submit, script):
    before = 'MODULES="spectrum-mpi"' if "jsrun" in script else 'MODULES=""'
    outcome = submit(script, edits=[(before, 'MODULES="gcc/13 openmpi/5.0"')])
    assert outcome.status == 0, outcome.stderr
    assert outcome.note("module").splitlines() == ["load", "gcc/13", "openmpi/5.0"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_virtual_environment_stops_the_job(submit, script):
    outcome = submit(script, edits=[("\nVENV=.venv", "\nVENV=.nowhere")])
    assert outcome.status != 0
    assert ".nowhere/bin/activate" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_outside_its_batch_system_it_stops_at_once(submit, script):
    outcome = submit(script, without=ENVIRONMENTS[script])
    assert outcome.status != 0
    assert "unbound variable" in outcome.stderr
    assert outcome.argv == []
