"""The batch scripts when time is nearly over, in arrays and in chains, with the batch system and the launchers faked (faked.py)."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from tests.effort import spread
from tests.jobs import slurm
from tests.jobs.documented import RUN, SCRIPTS
from tests.jobs.golden import JOBS

# --------------------------------------------------------------------------------------------------------- the warning


@pytest.mark.parametrize("script", spread(SCRIPTS, 4))
def test_a_warning_is_passed_on_to_the_ranks_which_save(submit, script):
    outcome = submit(script, done=False, signals=[signal.SIGUSR1])
    assert outcome.note("signals") == "USR1\n"
    assert "warned: the time is nearly over" in outcome.stderr
    if "chain" not in script:
        assert outcome.status == 85
    assert f"interrupted, with a checkpoint in {RUN[script]}: it can go on by train --resume {RUN[script]}" in outcome.stderr
    assert "did not end well" not in outcome.stderr


@pytest.mark.parametrize("script", spread(SCRIPTS, 4))
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

ARRAYS = ["slurm-array.sbatch", "lsf-array.bsub", "pbs-array.pbs", "flux-array.flux"]


def element(script, number):
    names = {"slurm": "SLURM_ARRAY_TASK_ID", "lsf": "LSB_JOBINDEX", "pbs": "PBS_ARRAY_INDEX", "flux": "ARRAY_INDEX"}
    return {names[script.split("-")[0]]: number}


@pytest.mark.parametrize("script", ARRAYS)
def test_each_element_of_the_array_has_a_protocol_and_a_directory_of_its_own(submit, script):
    run = []
    place = RUN[script].removesuffix("2-softsync")
    for number in "1234":
        words = submit(script, environment=element(script, number)).argv
        run.append((words[words.index("--out") + 1].removeprefix(place), words[words.index("--protocol") + 1 :]))
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
    assert "17" in outcome.argv[:3] or "--ntasks=17" in outcome.argv


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


@pytest.mark.parametrize(("status", "script"), spread(itertools.product([0, 1, 137], CHAINS), 2, unpack=True))
def test_a_chain_outlives_whatever_ended_a_link_that_had_saved(submit, script, status):
    """A lost node, say, for which mpirun may say 0."""
    assert queued_again(script, submit(script, done=False, status=status, environment={"FAKE_SAVES": "1"}))


@pytest.mark.parametrize(("status", "script"), spread(itertools.product([2, 85], CHAINS), 2, unpack=True))
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
