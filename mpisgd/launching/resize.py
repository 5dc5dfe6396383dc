"""A job that is under way on this machine is told to save and leave, so that it can go on with another number of ranks."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from mpisgd.base.errors import ConfigError
from mpisgd.liveness.usher import Process
from mpisgd.records import lock

LOOK_S = 0.2


def interrupt(run: Path, proc: Path = Path("/proc")) -> None:
    """Have the job that writes `run` save and leave, and wait until it has.

    Whoever has started it by `mpisgd run` is told, so that it is not begun again there; otherwise its first rank.

    Raises ConfigError where no job writes there, or not on this machine, or where a batch system would begin it anew.
    """
    pid, job = lock.holder(run)
    if not pid:
        raise ConfigError(
            f"--resize {run}: no job of this machine writes there, expected one that is under way; where it has ended, --resume"
            " goes on with as many ranks as are started"
        )
    if job:
        raise ConfigError(f"--resize {run}: it is of batch job {job}, whose script may begin it anew: end that, and submit another")
    starter = _starter(pid, proc)
    told, number = (starter, signal.SIGTERM) if starter else (pid, signal.SIGUSR1)
    print(f"mpisgd run: {run} is under way: process {told} is told to save and leave ({number.name})", flush=True)
    process = Process(told)
    try:
        process.send(number)
    except PermissionError as error:
        raise ConfigError(f"--resize {run}: process {told}, which writes there, is somebody else's") from error
    while process.lives or lock.holder(run)[0]:
        time.sleep(LOOK_S)


def _starter(pid: int, proc: Path) -> int:
    """The `mpisgd run` that this process comes from; 0 = there is none."""
    while pid > 1:
        try:
            words = (proc / str(pid) / "cmdline").read_text().split("\0")
            parent = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        if any(Path(word).name == "mpisgd" and then == "run" for word, then in zip(words, words[1:], strict=False)):
            return pid
        pid = parent
    return 0
