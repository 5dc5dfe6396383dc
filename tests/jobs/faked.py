"""A batch system, its commands and launchers, faked: a script is run as that system would run it, and what it did is noted.

The environment of each fake job is what the batch system's own documentation says that it sets (documented.py).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import slurm
from tests.jobs.documented import ENVIRONMENTS
from tests.jobs.golden import JOBS

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
def submit(tmp_path: Path) -> Any:
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

    def run(
        script: str,
        *,
        edits: Sequence[tuple[str, str]] = (),
        done: bool = True,
        status: int = 0,
        environment: Mapping[str, str] | tuple[()] = (),
        without: Sequence[str] = (),
        signals: Sequence[int] = (),
    ) -> Outcome:
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
        stdout, stderr = process.communicate(timeout=300)
        argv = (fake / "argv").read_text().splitlines() if (fake / "argv").exists() else []
        return Outcome(process.returncode, stdout, stderr, argv, fake)

    run.checkout = checkout  # type: ignore[attr-defined] # where it is submitted from
    return run
