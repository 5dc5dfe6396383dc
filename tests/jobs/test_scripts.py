"""The batch scripts: their directives, and what they start and say, with the batch system and the launchers faked.

The environment of each fake job is what the batch system's own documentation says that it sets.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpisgd.config import config_file
from mpisgd.protocols import SoftsyncOptions
from tests.jobs import golden, slurm
from tests.jobs.documented import DIRECTIVES, ENVIRONMENTS, LAUNCHES, RUN, SCRIPTS, THREADS, TRAINS
from tests.jobs.golden import JOBS

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


@pytest.mark.parametrize("script", SCRIPTS)
def test_is_what_submit_prints(script):
    assert (JOBS / script).read_text() == golden.rendered(script), "renew it with: python -m tests.jobs.golden"
    assert os.access(JOBS / script, os.X_OK)


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


# ------------------------------------------------------------------------------------------------------ fake systems

# One fake stands for mpirun, mpiexec, srun and jsrun: it notes how it was called, and does as the test says.
LAUNCHER = """\
#!/bin/bash
printf '%s\\n' "${0##*/}" "$@" >"$FAKE/argv"
echo $$ >"$FAKE/pid"
echo "$OMP_NUM_THREADS" >"$FAKE/omp_num_threads"
while (($#)); do
  case $1 in
    --out | --resume) run=$2 ;;
    --hostfile) cp "$2" "$FAKE/hostfile" ;;
  esac
  shift
done
mkdir -p "$run"
if [[ -n ${FAKE_WAIT-} ]]; then  # a long run, which saves when it is warned
  save() { mkdir -p "$run/checkpoint"; touch "$run/checkpoint/manifest"; echo USR1 >>"$FAKE/signals"; }
  trap 'save; [[ -n ${FAKE_STAYS-} ]] || exit 85' USR1
  trap 'echo TERM >>"$FAKE/signals"; exit 143' TERM
  touch "$FAKE/waiting"
  for ((i = 0; i < 400; i++)); do read -rt 0.05 <>"$FAKE/never" || true; done
  exit 99
fi
if [[ -n ${FAKE_SAVES-} ]]; then mkdir -p "$run/checkpoint"; touch "$run/checkpoint/manifest"; fi
if ((FAKE_DONE)); then touch "$run/DONE"; fi
exit "$FAKE_STATUS"
"""
# The script's patience, which begins when the launcher, however it comes to a core, has saved.
SLEEP = """\
#!/bin/bash
for ((i = 0; i < 400; i++)); do
  if [[ -s "$FAKE/signals" ]]; then break; fi
  if [[ $1 == 0 && -e "$FAKE/waiting" ]]; then break; fi  # a limit that is reached when the ranks run
  read -rt 0.05 <>"$FAKE/never" || true
done
exec /bin/sleep "$@"
"""
MODULE = """\
#!/bin/bash
printf '%s\\n' "$@" >"$FAKE/module"
"""
# The job's state, and what is asked of the controller.
SQUEUE = """\
#!/bin/bash
echo "${FAKE_STATE-RUNNING}"
"""
SCONTROL = """\
#!/bin/bash
printf '%s\\n' "$@" >"$FAKE/scontrol"
"""
QSUB = """\
#!/bin/bash
printf '%s\\n' "$@" >"$FAKE/qsub"
echo 4712.server
"""
# The nested instance of a Flux job: two brokers, and one that runs tasks.
FLUX = """\
#!/bin/bash
case "$1 $2" in
  "run "*) exec "${0%/*}/flux-run" "$@" ;;
  "getattr size") echo 2 ;;
  "getattr jobid") echo f3XyZ ;;
  "job id" | "job last") echo f3XyZ ;;
  "job timeleft") echo "${FAKE_LEFT-3600}" ;;
  "job kill") [[ "$3 $4" == "--signal=USR1 f3XyZ" ]] && kill -USR1 "$(<"$FAKE/pid")" ;;
  *) exit 99 ;;
esac
"""
# As conda's and Lmod's do, it reads what need not be set.
ACTIVATE = 'echo "$_NEVER_SET" >/dev/null; touch "$FAKE/activated"\n'


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
    for name in ("mpirun", "mpiexec", "srun", "jsrun", "flux-run"):
        (programs / name).write_text(LAUNCHER.replace("${0##*/}", "flux") if name == "flux-run" else LAUNCHER)
    fakes = {"module": MODULE, "sleep": SLEEP, "squeue": SQUEUE, "scontrol": SCONTROL, "qsub": QSUB, "flux": FLUX}
    for name, text in fakes.items():
        (programs / name).write_text(text)
    for program in programs.iterdir():
        program.chmod(0o755)

    os.mkfifo(fake / "never")

    def run(script, *, edits=(), done=True, status=0, environment=(), without=(), signals=()):
        text = (JOBS / script).read_text()
        for before, after in edits:
            assert text.count(before) == 1, f"{before!r} stands {text.count(before)} times in {script}"
            text = text.replace(before, after)
        (tmp_path / "spooled").write_text(text)
        for note in ("argv", "waiting", "signals", "scontrol", "qsub"):
            (fake / note).unlink(missing_ok=True)
        base = {"PATH": f"{programs}:/usr/bin:/bin", "TMPDIR": str(tmp_path), "FAKE": str(fake)}
        base |= {"FAKE_DONE": str(int(done)), "FAKE_STATUS": str(status)} | ({"FAKE_WAIT": "1"} if signals else {})
        job = {name: value for name, value in ENVIRONMENTS[script].items() if name not in without} | dict(environment)
        if "PBS_NODEFILE" in job:
            words = job["PBS_NODEFILE"].split()
            nodes = [host for host, count in zip(words[::2], words[1::2], strict=True) for _ in range(int(count))]
            (tmp_path / "nodes").write_text("".join(f"{host}\n" for host in nodes))
            job |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(checkout)}
        process = subprocess.Popen(
            ["bash", tmp_path / "spooled"],
            cwd=tmp_path if "pbs" in script else checkout,  # PBS starts jobs elsewhere
            env=base | job,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in signals:
            slurm.wait_for((fake / "waiting").exists, 20, "launcher")
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
        argv = (fake / "argv").read_text().splitlines() if (fake / "argv").exists() else []
        return Outcome(process.returncode, stdout, stderr, argv, fake)

    run.checkout = checkout
    return run


def kind(script):
    """cpu, gpu, chain, array, jsrun"""
    return script.split("-")[1].split(".")[0]


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
    assert outcome.note("omp_num_threads").strip() == THREADS.get(script, "1")
    assert (outcome.notes / "activated").exists()


@pytest.mark.parametrize(("script", "hosts"), [("lsf-cpu.bsub", 9), ("lsf-array.bsub", 9), ("lsf-gpu.bsub", 5)])
def test_lsf_hosts_become_a_hostfile_that_is_removed(submit, script, hosts):
    outcome = submit(script)
    assert outcome.note("hostfile") == f"hostA slots={hosts}\nhostB slots={hosts}\n"
    assert not Path(outcome.argv[outcome.argv.index("--hostfile") + 1]).exists()


# ------------------------------------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize("script", SCRIPTS)
def test_done_is_believed(submit, script):
    outcome = submit(script, done=True, status=0)
    assert outcome.status == 0
    assert f"mpisgd report {RUN[script]}\n" in outcome.stdout
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
    assert outcome.status == (1 if "chain" in script else expected)
    assert f"there is no {RUN[script]}/DONE" in outcome.stderr
    assert "mpisgd report" not in outcome.stdout


# ------------------------------------------------------------------------------------------------ what users may edit


@pytest.mark.parametrize("script", SCRIPTS)
def test_says_how_ranks_become_roles(submit, script):
    sums = {
        "gpu": "10 ranks = 2 shards + 8 learners + 0 evaluators",
        "jsrun": "14 ranks = 2 shards + 12 learners + 0 evaluators",
    }
    expected = sums.get(kind(script), "18 ranks = 1 shards + 16 learners + 1 evaluators")
    assert expected in submit(script).stdout


@pytest.mark.parametrize("script", SCRIPTS)
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


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "jsrun" not in name])
def test_an_unknown_mpi_is_refused(submit, script):
    outcome = submit(script, edits=with_mpi("mvapich"))
    assert outcome.status == 2
    assert "MPI = 'mvapich': expected openmpi or mpich" in outcome.stderr
    assert outcome.argv == []


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "jsrun" not in name and "flux" not in name])
def test_fault_tolerance_is_asked_for_where_it_can_be_had(submit, script):
    tolerant = ("\nFAULT_TOLERANT=0", "\nFAULT_TOLERANT=1")
    refused = submit(script, edits=[tolerant, *with_mpi("mpich")])
    assert refused.status == 2
    assert "FAULT_TOLERANT=1: expected MPI=openmpi" in refused.stderr
    assert refused.argv == []
    outcome = submit(script, edits=[tolerant])
    expected = LAUNCHES[script, "openmpi"].split()
    assert outcome.argv[len(expected) : len(expected) + 3] == ["--with-ft", "ulfm", "mpisgd"]


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "chain" not in name])
def test_a_job_that_failed_says_how_it_can_go_on(submit, script):
    assert "--resume" not in submit(script, done=False, status=1).stderr
    outcome = submit(script, done=False, status=137, environment={"FAKE_SAVES": "1"})
    assert f"by train --resume {RUN[script]}; how far back that is says: mpisgd report {RUN[script]}" in outcome.stderr


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "jsrun" not in name])
def test_the_evaluator_is_asked_for_only_where_it_has_a_rank(submit, script):
    before, after = ("0", "1") if "gpu" in script else ("1", "0")
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


@pytest.mark.parametrize("script", [name for name in SCRIPTS if "flux" not in name])
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
} | {name for script in SCRIPTS for name in ENVIRONMENTS[script] if name.startswith(("LSB_", "PBS_"))}


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_site_need_not_set_does_not_stop_it(submit, script):
    """Under `set -u`; CUDA_VISIBLE_DEVICES is not set by every LSF."""
    outcome = submit(script, without=set(ENVIRONMENTS[script]) - REQUIRED)
    assert outcome.status == 0, outcome.stderr
    assert "unbound variable" not in outcome.stderr
    assert outcome.argv


# --------------------------------------------------------------------------------------------------------- the warning


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_warning_is_passed_on_to_the_ranks_which_save(submit, script):
    outcome = submit(script, done=False, signals=[signal.SIGUSR1])
    assert outcome.note("signals") == "USR1\n"
    assert "warned: the time is nearly over" in outcome.stderr
    if "chain" not in script:
        assert outcome.status == 85
    assert f"interrupted, with a checkpoint in {RUN[script]}: it can go on by train --resume {RUN[script]}" in outcome.stderr
    assert "did not end well" not in outcome.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_launcher_that_stays_when_its_ranks_have_saved_is_killed(submit, script):
    outcome = submit(script, done=False, signals=[signal.SIGUSR1], environment={"FAKE_STAYS": "1", "LEAVE_S": "0.2"})
    assert outcome.note("signals") == "USR1\n"
    assert "the launcher has not ended 0.2 s after the warning: it is killed" in outcome.stderr
    if "chain" in script:
        assert queued_again(script, outcome)
    else:
        assert outcome.status == 128 + signal.SIGKILL
        assert f"it can go on from a checkpoint, by train --resume {RUN[script]}" in outcome.stderr


# ----------------------------------------------------------------------------------------------------------- the array

ARRAYS = ["slurm-array.sbatch", "lsf-array.bsub", "pbs-array.pbs"]


def element(script, number):
    names = {"slurm": "SLURM_ARRAY_TASK_ID", "lsf": "LSB_JOBINDEX", "pbs": "PBS_ARRAY_INDEX"}
    return {names[script.split("-")[0]]: number}


@pytest.mark.parametrize("script", ARRAYS)
def test_each_element_of_the_array_has_a_protocol_and_a_directory_of_its_own(submit, script):
    run = []
    for number in "1234":
        words = submit(script, environment=element(script, number)).argv
        run.append((words[words.index("--out") + 1].removeprefix("results/mpisgd-4711-"), words[words.index("--protocol") + 1 :]))
    assert run == [
        ("1-hardsync", ["hardsync"]),
        ("2-softsync", ["softsync", "--protocol.n", "4"]),
        ("3-backup", ["backup", "--protocol.b", "2"]),
        ("4-allreduce", ["allreduce"]),
    ]


@pytest.mark.parametrize("script", ARRAYS)
def test_allreduce_has_as_many_learners_as_the_others_and_no_shards(submit, script):
    outcome = submit(script, environment=element(script, "4"))
    assert "17 ranks = 0 shards + 16 learners + 1 evaluators" in outcome.stdout
    assert "--shards" not in outcome.argv
    assert outcome.argv[outcome.argv.index("-n") + 1] == "17"


@pytest.mark.parametrize("script", ARRAYS)
def test_an_element_without_a_protocol_is_refused(submit, script):
    outcome = submit(script, environment=element(script, "5"))
    assert outcome.status == 2
    assert "element 5 of the array, but PROTOCOLS has 4" in outcome.stderr
    assert outcome.argv == []


# ----------------------------------------------------------------------------------------------------------- the chain

CHAINS = ["slurm-chain.sbatch", "lsf-chain.bsub", "pbs-chain.pbs"]
AGAIN = "link 1 of the chain has ended: the"


def queued_again(script, outcome):
    """Whether the job is started again: SLURM and PBS, because they were told to; LSF, by the exit status."""
    if "pbs" in script:
        more = (outcome.notes / "qsub").exists()
        words = "-N mpisgd -W depend=afterany:4711.server -v FIRST_JOB=4711 results/mpisgd-4711.pbs"
        assert not more or outcome.note("qsub").split() == words.split()
        return more and outcome.status == 0
    told = (outcome.notes / "scontrol").exists()
    if "slurm" in script:
        assert not told or outcome.note("scontrol").split() == ["requeue", "4711"]
        return told and outcome.status == 0
    return outcome.status == 85


@pytest.mark.parametrize("script", CHAINS)
def test_a_chain_goes_on_from_what_was_saved_until_done(submit, script):
    first = submit(script, done=False, signals=[signal.SIGUSR1])
    assert queued_again(script, first)
    assert AGAIN in first.stdout
    second = submit(script, done=False, signals=[signal.SIGUSR1])
    assert second.argv[-5:] == ["mpisgd", "train", "jobs/job.toml", "--resume", "results/mpisgd-4711"]
    assert queued_again(script, second)
    third = submit(script, done=True)
    assert third.argv[-4:] == second.argv[-4:]
    assert third.status == 0
    assert not queued_again(script, third)
    assert len((submit.checkout / "results" / "mpisgd-4711.links").read_text().splitlines()) == 3


@pytest.mark.parametrize("script", CHAINS)
@pytest.mark.parametrize("status", [0, 1, 137])
def test_a_chain_outlives_whatever_ended_a_link_that_had_saved(submit, script, status):
    """A lost node, say, for which mpirun may say 0."""
    assert queued_again(script, submit(script, done=False, status=status, environment={"FAKE_SAVES": "1"}))


@pytest.mark.parametrize("script", CHAINS)
@pytest.mark.parametrize("status", [2, 85])
def test_a_chain_ends_where_nothing_new_was_saved(submit, script, status):
    outcome = submit(script, done=False, status=status)
    assert not queued_again(script, outcome)
    assert outcome.status == 1
    assert "link 1 has saved nothing" in outcome.stderr
    old = submit.checkout / "results" / "mpisgd-4711" / "checkpoint" / "manifest"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (1, 1))
    again = submit(script, done=False, status=status)
    assert "--resume" in again.argv
    assert not queued_again(script, again)


@pytest.mark.parametrize("script", CHAINS)
def test_a_link_that_died_before_its_first_checkpoint_begins_anew(submit, script):
    submit(script, done=False, status=1)
    assert submit(script, done=True).argv[-1] == "--overwrite"


@pytest.mark.parametrize("script", CHAINS)
def test_a_chain_has_an_end(submit, script):
    edits = [("\nLINKS=20", "\nLINKS=1")]
    outcome = submit(script, done=False, edits=edits, environment={"FAKE_SAVES": "1"})
    assert not queued_again(script, outcome)
    assert "LINKS = 1 links were not enough" in outcome.stderr


@pytest.mark.parametrize("script", CHAINS)
def test_a_chain_that_is_done_starts_nothing(submit, script):
    (submit.checkout / "results" / "mpisgd-4711").mkdir()
    (submit.checkout / "results" / "mpisgd-4711" / "DONE").touch()
    outcome = submit(script)
    assert (outcome.status, outcome.argv) == (0, [])


@pytest.mark.parametrize("script", CHAINS)
def test_a_cancelled_chain_stays_cancelled(submit, script):
    outcome = submit(script, done=False, signals=[signal.SIGTERM], environment={"FAKE_SAVES": "1"})
    assert outcome.note("signals") == "TERM\n"
    assert not queued_again(script, outcome)
    assert "cancelled: the chain ends here" in outcome.stderr


def test_a_chain_that_slurm_is_ending_is_not_queued_again(submit):
    outcome = submit("slurm-chain.sbatch", done=False, environment={"FAKE_SAVES": "1", "FAKE_STATE": "COMPLETING"})
    assert not queued_again("slurm-chain.sbatch", outcome)
    assert outcome.status == 1


def test_a_later_link_in_pbs_is_another_job_of_the_same_run(submit):
    """What is submitted then is a copy of the script, since PBS's own goes with the first job."""
    submit("pbs-chain.pbs", done=False, environment={"FAKE_SAVES": "1"})
    kept = submit.checkout / "results" / "mpisgd-4711.pbs"
    assert kept.read_text() == (JOBS / "pbs-chain.pbs").read_text()
    second = submit("pbs-chain.pbs", done=True, environment={"PBS_JOBID": "4712.server", "FIRST_JOB": "4711"})
    assert second.argv[-2:] == ["--resume", "results/mpisgd-4711"]
    assert not (submit.checkout / "results" / "mpisgd-4712.pbs").exists()


# ---------------------------------------------------------------------------------------- where nobody warns the script


@pytest.mark.parametrize(
    ("script", "edits", "environment"),
    [("pbs-cpu.pbs", [("\nLIMIT_S=3600", "\nLIMIT_S=120")], {}), ("flux-cpu.flux", [], {"FAKE_LEFT": "120"})],
)
def test_a_script_that_nobody_warns_warns_itself(submit, script, edits, environment):
    outcome = submit(script, edits=edits, environment=environment | {"FAKE_WAIT": "1"}, done=False)
    assert outcome.note("signals") == "USR1\n"
    assert outcome.status == 85


def test_what_waits_for_the_warning_goes_with_the_script(submit):
    outcome = submit("pbs-cpu.pbs")
    assert outcome.status == 0
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if f"FAKE={outcome.notes}".encode() in _read(path)]
    slurm.wait_for(lambda: not any(_read(path) for path in left), 20, "end of the timer")


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        ([("\nSHARDS=2", "\nSHARDS=1")], "9 learners on 8 GPUs"),
        ([("\nRANKS=10", "\nRANKS=11")], "RANKS = 11, but 2 nodes of 5 tasks"),
    ],
)
def test_what_flux_did_not_deal_out_is_refused(submit, edits, text):
    outcome = submit("flux-gpu.flux", edits=edits)
    assert outcome.status == 2
    assert text in outcome.stderr
    assert outcome.argv == []


def test_more_learners_than_gpus_of_pbs_are_refused(submit):
    outcome = submit("pbs-gpu.pbs", environment={"PBS_NODEFILE": "hostA 6 hostB 5"})
    assert outcome.status == 2
    assert "9 learners on 8 GPUs" in outcome.stderr
