"""Tests as `make` runs them: `python -m tests.run WHAT [words of pytest]`.

    unit        tests that need no MPI, on all cores
    coverage    the same, with the branches of the package that they run; setup.cfg has the least that is accepted
    mpi         tests of real ranks: two at a time, since much of it is waiting; but for `make test` then those that measure seconds
    both        unit, at the lowest priority, beside mpi, which begins with those: it takes the cores where the others wait
    aside       at the lowest priority a command, in place of the words

MPISGD_TESTS says which tests (`left_out`, tests/effort.py), WORKERS how many at a time. The exit status is pytest's, or 1 where one
of both fails; it is 5 where the words select none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: Batch scripts with real ranks; the rest of tests/jobs has fakes.
REAL_JOBS = ("tests/jobs/test_slurm.py", "tests/jobs/test_lsf.py", "tests/jobs/test_pbs.py")
RANKS = ("tests/mpi", "tests/nodes", *REAL_JOBS)
PYTEST = (sys.executable, "-m", "pytest")
LOG = Path("build/test-unit.log")
"""Output of the tests without ranks, while those with ranks run beside them."""
FAILED, SELECTED_NONE = 1, 5


def left_out(effort: str) -> str:
    """Return markers of tests that are left out.

    all: every test but those of `make faults`; rest: of these, what `make test` has not run just so, with a sixth of the examples;
    patterns: every test of real ranks, but of runs that share a launch one per pattern of messages.
    """
    return {"some": "long or slow or rare", "all": "long"}.get(effort, "long or rare")


def unit(effort: str, workers: str) -> list[str]:
    """Return pytest's words for the tests without ranks."""
    where = [f"--ignore={each}" for each in RANKS]
    return ["-n", workers, "--dist", "worksteal", *where, "-m", f"not ({left_out(effort)})"]


def together(effort: str, workers: str) -> list[str]:
    """Return pytest's words for the tests of real ranks that may run beside others; with 0 one process imports all of them once."""
    how = ["-n", workers, "--dist", "loadscope", "--no-loadscope-reorder"]
    return [*RANKS, "-m", f"not (alone or {left_out(effort)})", *how]


def alone(effort: str) -> list[str]:
    """Return pytest's words for the tests that measure seconds."""
    return [*RANKS, "-m", f"alone and not ({left_out(effort)})"]


def mpi(parts: Sequence[Sequence[str]], words: Sequence[str]) -> int:
    """Run one part after the other, to the first that fails."""
    status = SELECTED_NONE
    for part in parts:
        came = run([*PYTEST, *part, *words])
        if came not in (0, SELECTED_NONE):
            return came
        status = min(status, came)
    return status


def both(effort: str, parts: Sequence[Sequence[str]], words: Sequence[str]) -> int:
    """Run the parts, and beside them the tests without ranks; their output comes at the end."""
    LOG.parent.mkdir(exist_ok=True)
    command = [*PYTEST, *unit(effort, "auto" if effort == "all" else "0"), *words]
    with LOG.open("wb") as log:
        low = [sys.executable, "-m", "tests.run", "aside", *command]
        beside = subprocess.Popen(low, stdout=log, stderr=log, start_new_session=True)
    try:
        status = mpi(parts, words)
        status = beside.wait() or status
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(beside.pid, signal.SIGTERM)
        beside.wait()
    print(LOG.read_text(errors="replace"), end="", flush=True)
    return FAILED if status else 0


def aside(command: Sequence[str]) -> None:
    """Become a command that has the cores which nobody else wants."""
    with contextlib.suppress(OSError):  # a session of its own, since Linux shares cores among sessions first
        os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    os.nice(19)
    os.execvp(command[0], list(command))


def run(command: Sequence[str]) -> int:
    """Run a command to its end, and return its exit status."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except SystemExit:  # SIGTERM comes to this process alone; Ctrl-C reaches the command, too, which then ends by itself
        process.terminate()
        raise
    finally:
        process.wait()


def main(what: str, words: Sequence[str]) -> int:
    if what == "aside":
        aside(words)
    effort, workers = os.environ.get("MPISGD_TESTS", "some"), os.environ.get("WORKERS")
    several, seconds = together(effort, workers or "2"), [] if effort == "some" else [alone(effort)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        match what:
            case "unit":
                return run([*PYTEST, *unit(effort, workers or "auto"), *words])
            case "coverage":
                return run([*PYTEST, *unit(effort, "auto"), "--cov", "--cov-config=setup.cfg", *words])
            case "mpi":
                return mpi([several, *seconds], words)
            case "both":
                return both(effort, [*seconds, several], words)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    sys.exit(f"tests.run {what!r}: expected unit, coverage, mpi, both or aside")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
