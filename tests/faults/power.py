"""Loss of power at random moments of a run and after its end: DONE and checkpoints are true of what is then on the disk.

`python -m tests.faults.power --count 21 --seed 1 --out results/faults` writes power.json there; as root, on Linux. Each run has a
file system of its own, ext4 in a file, which is shut down without flushing (EXT4_IOC_SHUTDOWN): it forgets what was not synced, as
a machine does that loses power. Now and then the kernel had written all back a moment before, as it does by itself every half
minute. Then the ranks are killed, the file system is mounted again, and

    DONE is there                      report and replay take the whole run, and its weights; always so, when the run had ended
    a checkpoint is there              `train --resume` finishes the run, and replay proves it
    neither                            `train --overwrite` may have the directory
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mpisgd.base.errors import MpisgdError
from mpisgd.job.interruption import newest
from mpisgd.records import directory as run_directory
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report.single import report
from tests.faults import cuts
from tests.faults.campaign import Found, configured, main
from tests.faults.job import ULFM, Job

_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_NOLOGFLUSH = 2
_SIZE = 256 << 20
#: name -> (ranks, what differs from the others, options of mpirun)
JOBS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    **{name: (ranks, more, []) for name, (ranks, more) in cuts.JOBS.items()},
    "ssp, S = 2, fault-tolerant": (5, {"shards": 2, "protocol": {"name": "ssp", "slack": 1}, "faults": {"mode": "tolerant"}}, ULFM),
}
RUN_S = 8.0
"""Of a run, about; a third of them are cut up to LATE_S after their end."""
LATE_S = 3.0


class Disk:
    """An ext4 file system in a file below `directory`, mounted at `path`; it must be left by `close`.

    Raises OSError or CalledProcessError where that cannot be done here: not root, no loop devices, no mkfs.ext4.
    """

    def __init__(self, directory: Path) -> None:
        if os.geteuid() != 0:
            raise PermissionError("only root mounts file systems")
        self._images = (directory / f"disk-{number}.img" for number in itertools.count())
        self._image, self.path = next(self._images), directory / "disk"
        with self._image.open("wb") as file:
            file.truncate(_SIZE)
        self.path.mkdir()
        _call("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()

    def _mount(self) -> None:
        _call("mount", "-o", "loop", str(self._image), str(self.path))

    def write_back(self) -> None:
        """What the kernel does now and then by itself, or for another program."""
        descriptor = os.open(self.path, os.O_RDONLY)
        ctypes.CDLL(None).syncfs(descriptor)
        os.close(descriptor)

    def cut(self) -> None:
        """From now on nothing comes to the disk; what is read and written fails."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
        finally:
            os.close(descriptor)

    def back(self) -> None:
        """The power is back; nobody may have a file of it open. Raises CalledProcessError.

        What is mounted is a copy: a process in a mount namespace of its own may hold the one that was shut down, which a second
        mount of the same file would be.
        """
        self.close()
        before, self._image = self._image, next(self._images)
        _call("cp", "--sparse=always", str(before), str(self._image))
        before.unlink()
        self._mount()

    def close(self) -> None:
        for left in reversed(range(50)):
            try:
                _call("umount", str(self.path))
                return
            except subprocess.CalledProcessError:
                if not left:
                    raise
                time.sleep(0.1)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def why_not(directory: Path) -> str:
    """Why there can be no such file system here; "" = there can."""
    try:
        Disk(directory).close()
    except subprocess.CalledProcessError as error:
        return f"{error}: {error.stderr.strip()}"
    except OSError as error:
        return str(error)
    return ""


def settings(name: str, out: Path) -> dict[str, Any]:
    return {**cuts.COMMON, **JOBS[name][1], "out": str(out), "epochs": 4.0, "evaluation": {"train": False, "every_epochs": 0.5}}


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    name = list(JOBS)[number % len(JOBS)]
    after_s, written_s = generator.uniform(0, RUN_S), generator.uniform(0, 0.5)
    written, late_s = generator.random() < 0.4, generator.uniform(0, LATE_S) * (number % 3 == 2)
    found = Found([name])
    disk = Disk(directory)
    try:
        config = configured(directory, settings(name, disk.path / "run"))
        _one(found, disk, name, config, after_s, written_s * written, late_s)
    finally:
        disk.close()
    return found


def _one(found: Found, disk: Disk, name: str, config: str, after_s: float, written_s: float, late_s: float) -> None:
    ranks, _, options = JOBS[name]
    job, out = Job(ranks, [config], options), disk.path / "run"
    while not out.exists():
        time.sleep(0.01)
    ended = _ends_within(job, cuts.LIMIT_S if late_s else max(0.0, after_s - written_s))
    time.sleep(late_s)
    if written_s:
        disk.write_back()
        ended = _ends_within(job, written_s) or ended
    found.kinds += ["after the end" if ended else "under way", "written back before" if written_s else "nothing written back"]
    disk.cut()
    for pid in job.pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    status = job.end(20)
    disk.back()
    if ended:
        found.expect(status == 0, f"status {status}:\n{job.text}")
    if (
        found.expect((out / schema.DONE).is_file() or not ended, "it had ended with status 0, and DONE is not there")
        and (out / schema.DONE).is_file()
    ):
        found.totals["DONE"] += 1
    elif out.is_dir() and newest(out) is not None:
        found.totals["gone on with"] += 1
        again = Job(ranks, ["--resume", str(out)], options)
        if not found.expect(again.end(cuts.LIMIT_S) == 0, f"not gone on with:\n{again.text}"):
            return
    else:
        found.totals["begun anew"] += 1
        try:
            run_directory.claim(out, overwrite=True)
        except MpisgdError as error:
            found.expect(False, f"{sorted(each.name for each in out.iterdir())}: {error}")
        return
    look(out, found)


def _ends_within(job: Job, seconds: float) -> bool:
    """Whether all its ranks, which write, have ended; or else so many seconds are over."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if job.over:
            return True
        time.sleep(0.01)
    return False


def look(out: Path, found: Found) -> None:
    """Whether a run that says DONE is whole: nothing empty, each row of the log, the weights, the report.

    But the evaluator's log of an attempt before may be torn: what that had evaluated was evaluated again. And RUNNING, which says
    nothing to anybody any more, may be there again.
    """
    files = set(out.rglob("*")) - set(sorted(out.glob("evaluator.*"))[:-1]) - {out / schema.RUNNING}
    empty = [path.name for path in files if path.is_file() and path.stat().st_size == 0]
    found.expect(not empty, f"DONE, and {empty} are empty")
    try:
        run = Run(out)
        found.expect(run.done and len(run.pushes) and all(books.balanced for books in run.books()), "the books do not balance")
        torch.load(out / schema.WEIGHTS, weights_only=True)
        with contextlib.redirect_stdout(io.StringIO()):
            report(out, None)
        found.proved(out)
    except Exception as error:  # whatever is raised of what DONE vouches for
        found.expect(False, f"DONE, but {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main("power", "Loss of power at random moments.", 21, execute, sys.argv[1:]))
