"""`mpisgd.submit`: the handle of a job, with a SLURM and its like that are faked; how often they are asked is written down."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import mpisgd
from mpisgd.base.errors import ConfigError, LaunchError
from mpisgd.config import Config, config_file
from mpisgd.launching import submitted
from mpisgd.launching.submitted import SubmittedJob
from tests.unit.older_runs import unpack

#: One program for all: it notes its words, and says what the next entry of `says` has for its name; the last one again and again.
FAKE = """#!/bin/bash
here=${0%/*} name=${0##*/}
echo "$name $*" >>"$here/asked"
declare -A answers=([sbatch]=17 [bsub]="Job <17> is submitted." [qsub]=17.server [flux]=ƒ17)
if [[ $name =~ ^(sbatch|[bq]sub)$ || $1 == batch ]]; then
  cat >"$here/script"
  echo "${answers[$name]}"
  exit
fi
says=("$here"/says/*)
text=$(<"${says[0]}")
if ((${#says[@]} > 1)); then rm "${says[0]}"; fi
if [[ $text == !* ]]; then echo "${text:1}" >&2; exit 1; fi
if [[ $text == "DONE "* ]]; then read -r _ place text <<<"$text"; : >"$place/DONE"; fi
echo "$text"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel", "bsub", "bjobs", "bkill", "qsub", "qstat", "qdel", "flux"):
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONUTF8", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    (tmp_path / "job.toml").write_text("shards = 2\n")
    return tmp_path


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses, which nobody waits for; the clock goes on by them."""
    pauses: list[float] = []
    monkeypatch.setattr(submitted.time, "sleep", pauses.append)
    monkeypatch.setattr(submitted.time, "monotonic", lambda: sum(pauses))
    return pauses


def says(here: Path, *texts: str) -> None:
    shutil.rmtree(here / "bin" / "says", ignore_errors=True)
    (here / "bin" / "says").mkdir()
    for number, text in enumerate(texts):
        (here / "bin" / "says" / f"{number:02}").write_text(text)


def asked(here: Path) -> list[str]:
    return (here / "bin" / "asked").read_text().splitlines()


def finished(here: Path) -> Path:
    """A run that has ended well, where the job 17 would have it."""
    (here / "results").mkdir(exist_ok=True)
    return unpack("softsync", here / "results").rename(here / "results" / "mpisgd-17")


def test_a_job_is_followed_to_its_run(here: Path, slept: list[float]) -> None:
    run = finished(here)
    (run / "DONE").rename(here / "later")
    job = mpisgd.submit("job.toml", learners=4, time="2h", qos="high")
    script = (here / "bin" / "script").read_text()
    assert "#SBATCH --time=02:00:00\n" in script
    assert "#SBATCH --qos=high\n" in script
    assert "# Made by: mpisgd.submit('job.toml', learners=4, time='2h', qos='high')\n" in script
    assert job == SubmittedJob("slurm", "17", run, here / "mpisgd-17.out")
    says(here, "PENDING", "RUNNING")
    assert [job.state, job.state] == ["pending", "running"]
    says(
        here, "PENDING", "RUNNING", "!slurm_load_jobs error: Unable to contact slurm controller", "RUNNING", f"DONE {run} COMPLETED"
    )
    (here / "later").rename(run / "saved")  # the fake's DONE is empty
    with pytest.raises(TimeoutError, match=r"job 17 has not ended within 1 s"):
        job.wait(timeout_s=1)
    opened = job.result()
    assert opened.path == run
    assert asked(here)[-1] == "squeue --noheader --states=all --format=%T --jobs 17"
    assert len([line for line in asked(here) if line.startswith("squeue")]) == 2 + 5


def test_it_is_asked_less_and_less_often(here: Path, slept: list[float]) -> None:
    job = mpisgd.submit("job.toml", learners=4)
    says(here, *["RUNNING"] * 13, "FAILED")
    assert job.wait() == "failed"
    assert slept[:3] == [1.0, 1.5, 2.25]
    assert slept[-1] == 60.0
    assert slept == sorted(slept)


def test_a_job_without_done_has_failed_and_its_last_words_are_told(here: Path, slept: list[float]) -> None:
    job = mpisgd.submit("job.toml", learners=4)
    says(here, "COMPLETED")  # mpirun said 0 although a node was lost
    with pytest.raises(LaunchError, match=r"job 17: failed; .*/results/mpisgd-17 is not DONE, and there is no .*/mpisgd-17.out"):
        job.result()
    (here / "mpisgd-17.out").write_text("".join(f"line {number}\n" for number in range(50)) + "error: there is no DONE\n")
    with pytest.raises(LaunchError, match=r"is not DONE; its last words:\nline 11\n(.*\n)*error: there is no DONE$"):
        job.result()


def test_a_batch_system_that_cannot_be_asked_is_given_five_tries(here: Path, slept: list[float]) -> None:
    job = mpisgd.submit("job.toml", learners=4)
    says(here, "!Unable to contact slurm controller")
    with pytest.raises(ConfigError, match="squeue refuses: Unable to contact slurm controller"):
        job.wait()
    assert len(asked(here)) == 1 + 5


@pytest.mark.parametrize(
    ("system", "told", "number", "output", "cancels"),
    [
        (
            "slurm",
            [("CONFIGURING", "pending"), ("COMPLETING", "running"), ("CANCELLED", "cancelled"), ("NODE_FAIL", "failed")],
            "17",
            "mpisgd-17.out",
            "scancel 17",
        ),
        ("lsf", [("PEND", "pending"), ("SSUSP", "running"), ("EXIT", "failed")], "17", "mpisgd-17.out", "bkill 17"),
        (
            "pbs",
            [
                ("Job Id: 17.server\n    job_state = Q\n", "pending"),
                ("    job_state = R\n", "running"),
                ("    job_state = F\n", "failed"),
            ],
            "17",
            "mpisgd.o17",
            "qdel 17",
        ),
        (
            "flux",
            [("SCHED", "pending"), ("CLEANUP", "running"), ("CANCELED", "cancelled"), ("TIMEOUT", "failed")],
            "f17",
            "mpisgd-ƒ17.out",
            "flux cancel f17",
        ),
    ],
)
def test_each_system_is_asked_in_its_own_words(
    system: str, told: list[tuple[str, str]], number: str, output: str, cancels: str, here: Path
) -> None:
    job = mpisgd.submit("job.toml", learners=4, system=system)
    assert (job.number, job.output, job.run) == (number, here / output, here / "results" / f"mpisgd-{number}")
    says(here, *(text for text, _ in told))
    assert [job.state for _ in told] == [state for _, state in told]
    job.cancel()
    assert asked(here)[-1] == cancels


@pytest.mark.parametrize(
    ("system", "error"),
    [
        ("slurm", "slurm_load_jobs error: Invalid job id specified"),
        ("lsf", "Job <17> is not found"),
        ("pbs", "qstat: Unknown Job Id 17.server"),
        ("flux", "flux-jobs: ERROR: JobID f17 unknown"),
    ],
)
def test_a_job_that_is_forgotten_is_judged_by_its_run(system: str, error: str, here: Path) -> None:
    job = mpisgd.submit("job.toml", learners=4, system=system)
    says(here, f"!{error}")
    assert job.state == "failed"
    job.run.mkdir(parents=True)
    (job.run / "DONE").touch()
    assert job.state == "done"


@pytest.mark.parametrize("config", [{"shards": 2, "epochs": 3}, Config(shards=2, epochs=3)])
def test_a_configuration_becomes_a_file_that_the_job_reads(config: Any, here: Path) -> None:
    mpisgd.submit(config, learners=4, name="mine")
    (file,) = (here / "results").glob("mine-*.toml")
    assert config_file.read(file) == Config(shards=2, epochs=3)
    assert f"CONFIG=results/{file.name}\n" in (here / "bin" / "script").read_text()
    mpisgd.submit(config, learners=5, name="mine")
    assert len(list((here / "results").glob("mine-*.toml"))) == 1


def test_a_site_has_defaults_here_too(here: Path) -> None:
    path = here / "settings" / "mpisgd" / "sites" / "near.toml"
    path.parent.mkdir(parents=True)
    path.write_text('system = "pbs"\nqueue = "long"\n')
    assert mpisgd.submit("job.toml", site="near", learners=4).system == "pbs"
    assert "#PBS -q long\n" in (here / "bin" / "script").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learners": "4"}, "learners = '4': expected int"),
        ({"learners": 4, "walltime": "1h"}, "unknown option 'walltime'"),
        ({"learners": 4, "array": ["hardsync", "async"]}, "array = .*: expected none from Python"),
        ({"learners": 4, "system": "pbs", "chain": True}, "chain = True: expected false with pbs from Python"),
        ({"learners": 4, "time": "1:00\ntouch ran"}, "time = .*: expected hours:minutes"),
        ({"learners": 4, "site": "nowhere"}, "site = 'nowhere': there is no"),
        ({}, "learners = None: expected --learners"),
        ({"learners": 4, "config": "x"}, "got multiple values"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_queued(options: dict[str, Any], said: str, here: Path) -> None:
    with pytest.raises((ConfigError, TypeError), match=said):
        mpisgd.submit("job.toml", **options)
    assert not (here / "bin" / "asked").exists()


def test_configurations_that_do_not_go_together_are_refused(here: Path) -> None:
    (here / "job.toml").write_text('shards = 3\n[protocol]\nname = "allreduce"\n')
    with pytest.raises(ConfigError, match="allreduce"):
        mpisgd.submit("job.toml", learners=4)
    assert not (here / "bin" / "asked").exists()
