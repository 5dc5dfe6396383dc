"""What a site does to a job: limits, memory, directories, another shape when it goes on, files that lie.

`python -m tests.faults.site --seed 1 --out results/faults` writes site.json there. The cells take turns; what is trained is drawn:

    files, memory       all ranks and the launcher, or one rank from a point on, may have few open files, or little memory
    out of memory       the kernel takes a shard as it makes room: a control group has no more (as root), or it is killed there
    removed             somebody removes the run's directory
    two jobs            begin in one directory at the same moment: anew, with --overwrite, with --resume
    resumed             with another number of learners or shards, or under another MPI (MPICH, in .venv-mpich)
    truncated, lying    HDF5 files of a run that are shorter, or claim 2^40 rows: report, replay, open_run and --resume say which

No job hangs, none is DONE that is not true, each says why it ends; what can go on goes on, and is replayed. Readers need no memory
for what a file claims.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import h5py

from mpisgd.comm.mpi.launch import environment
from mpisgd.job.interruption import newest
from mpisgd.records.log import schema
from tests.faults.campaign import Found, configured, lasting, main
from tests.faults.dying import ANY, SAID
from tests.faults.job import HERE, ULFM, Job
from tests.faults.phases import LIMIT_S, SYNCHRONOUS, ended, proved, settings, whole

WAYS = ("hardsync", "softsync", "async")
SHARDS, RANKS = 2, 4
POINTS = ("launch", "data", "training", "finish")
CELLS = [
    *(("files", f"all, {most}") for most in (24, 64)),
    *(("files", point) for point in POINTS),
    *(("memory", f"all, {most}") for most in (400, 1500)),
    *(("memory", point) for point in POINTS),
    *(("out of memory", how) for how in ("cgroup", "cgroup, fault-tolerant", "killed", "killed, fault-tolerant")),
    *(("removed", point) for point in ("training", "evaluation", "finish")),
    *(("two jobs", how) for how in ("anew", "overwrite", "resume")),
    *(("resumed", how) for how in ("1 learner", "3 learners", "1 shard", "3 shards", "MPICH")),
    *(("truncated", what) for what in ("log.h5", "shard", "checkpoint")),
    *(("lying", what) for what in ("log.h5", "shard", "checkpoint")),
]
FEW = {"files": (5, 12, 20), "memory": (1 << 20, 16 << 20, 64 << 20)}
AT_LAUNCH = {"files": (8, 16, 32), "memory": (64 << 20, 400 << 20, 1200 << 20)}
"""Open files, or bytes above what the rank has."""
WHY = {
    "files": ("open files", "Errno 24", "Too many", "file descriptor", "LIMITS", "limit"),
    "memory": ("memory", "Memory", "alloc", "mmap", "Errno 12", "signal", "map segment", "resource"),
    "out of memory": ("signal 9", "lost", "Killed"),
    "removed": ("cannot be written", "No such file", "lacks"),
}
GROUP = Path(f"/sys/fs/cgroup/memory/mpisgd-{os.getpid()}")
STARVED = 128 << 10
CLAIMED = 1 << 40
MOST_MB = 900
"""Of a process that reads such a file, torch and all."""
#: Status and last line of each reader.
READERS = """
import contextlib, io, json, resource, sys
from mpisgd import open_run
from mpisgd.__main__ import main
from mpisgd.base.errors import MpisgdError
said = {}
for command in ("report", "replay"):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = main([command, sys.argv[1]])
    said[command] = status, text.getvalue()[-2000:]
try:
    run = open_run(sys.argv[1])
    rows = [len(getattr(run, name)) for name in ("pushes", "updates", "evaluations", "events")]
    said["open_run"] = 0, str(rows)
except MpisgdError as error:
    said["open_run"] = 2, f"{type(error).__name__}: {error}"
print(json.dumps([said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024]))
"""


@cache
def interrupted() -> Path:
    """A synchronous run that a signal has interrupted."""
    path = lasting() / "run"
    told = {"DIE_AT": "training", "DIE_RANK": str(SHARDS), "DIE_BY": "SIGTERM"}
    words = [configured(path.parent, settings("hardsync", SHARDS, path))]
    job = Job(RANKS, words, module="tests.faults.dying", PYTHONPATH=HERE, **told)
    assert job.end(LIMIT_S) == 85 and newest(path) is not None, job.text
    return path


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    what, how = CELLS[number % len(CELLS)]
    found = Found([what, f"{what}: {how}"])
    if what == "two jobs":
        _two(how, directory, found)
    elif what == "resumed":
        _resumed(how, directory, found)
    elif what in ("truncated", "lying"):
        _false(what, how, generator, directory, found)
    else:
        _hurt(what, how, generator, directory, found)
    return found


def _hurt(what: str, how: str, generator: random.Random, directory: Path, found: Found) -> None:
    """A job whose ranks may have little, or lose a shard, or their directory."""
    way, out = generator.choice(WAYS), directory / "run"
    tolerant = "tolerant" in how or (what == "removed" and generator.random() < 0.5)
    options = ULFM if tolerant else []
    more = {"faults": {"mode": "tolerant" if tolerant else "fail-fast", "patience_s": 5.0}}
    words = [configured(directory, settings(way, SHARDS, out) | more)]
    learner = SHARDS + generator.randrange(RANKS - SHARDS)
    victim = 0 if how == "finish" else generator.choice((0, SHARDS - 1, learner))
    if how in ("training", "data"):
        victim = learner
    found.kinds += [way, "fault-tolerant" if tolerant else "fail-fast"]
    if how.startswith("all"):
        most = int(how.split()[1])
        limit = f"ulimit -n {most}" if what == "files" else f"ulimit -v {most * 1024}"
        job = Job(RANKS, words, options, inside=["sh", "-c", f'{limit}; exec "$@"', "sh"])
    else:
        told = {"DIE_AT": "room" if what == "out of memory" else how, "DIE_RANK": str(victim), "DIE_BY": "2"}
        if how == "evaluation":
            told |= {"DIE_RANK": ANY, "DIE_MARK": str(directory / "mark")}
        if what == "out of memory":
            victim = generator.randrange(SHARDS)
            told |= {"DIE_RANK": str(victim), "DIE_BY": "2" if "cgroup" in how else "SIGKILL"}
        elif what in FEW:
            most = generator.choice(AT_LAUNCH[what] if how == "launch" else FEW[what])
            told["DIE_BY"] = f"{'RLIMIT_NOFILE' if what == 'files' else 'RLIMIT_AS'} {most}"
            found.kinds.append(told["DIE_BY"])
        job = Job(RANKS, words, options, module="tests.faults.dying", PYTHONPATH=HERE, **told)
        try:
            job.wait_for(SAID, LIMIT_S)
        except TimeoutError as error:
            found.failures.append(f"it did not come to the point: {error}")
    begun_s = time.monotonic()
    if "cgroup" in how and not found.failures:
        _starve(job.pids[victim], found)
    if what == "removed":
        while out.exists():  # ranks make files in it meanwhile
            shutil.rmtree(out, ignore_errors=True)
    done = ended(job, out, job.end(LIMIT_S), found, WHY[what])
    found.seconds[f"{what}: to the end"].append(time.monotonic() - begun_s)
    if "cgroup" in how and GROUP.is_dir():
        GROUP.rmdir()
    if what == "removed":
        found.expect(not out.exists(), "the directory is made again")
        return
    same = whole(way, SHARDS) if way in SYNCHRONOUS else None
    proved(out, done, RANKS, found, same, options)


def _starve(pid: int, found: Found) -> None:
    """Put a process into a control group that has next to no memory: the kernel kills it when it wants some (cgroup 1, as root)."""
    try:
        GROUP.mkdir()
        (GROUP / "memory.limit_in_bytes").write_text(str(STARVED))
        (GROUP / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        found.kinds.append(f"no control group: {type(error).__name__}")
        os.kill(pid, signal.SIGKILL)


def _two(how: str, directory: Path, found: Found) -> None:
    """Two jobs at the same moment: one has the directory, and the other is refused, or comes when that one has ended."""
    out = directory / "run"
    words = [configured(directory, settings("hardsync", SHARDS, out))]
    if how != "anew":
        shutil.copytree(interrupted(), out)
        words = ["--resume", str(out)] if how == "resume" else [*words, "--overwrite"]
    jobs = [Job(RANKS, words) for _ in range(2)]
    statuses = [job.end(LIMIT_S) for job in jobs]
    told = "\n---\n".join(job.text for job in jobs)
    found.expect(sorted(statuses, key=str) in ([0, 2], [0, 0]), f"{statuses}\n{told}")
    found.expect(how == "anew" or statuses != [0, 0] or how == "overwrite" or "nothing to continue" in told, told)
    for status, job in zip(statuses, jobs, strict=True):
        named = "being written by another job" in job.text or "exists" in job.text
        found.expect(status == 0 or named, f"the reason is not told\n{job.text}")
        found.totals["refused"] += status == 2
    if found.expect((out / schema.DONE).is_file(), "no DONE"):
        proved(out, True, RANKS, found, whole("hardsync", SHARDS), [])


def _resumed(how: str, directory: Path, found: Found) -> None:
    """It goes on in another shape; under another MPI, to the same bits."""
    out = directory / "run"
    shutil.copytree(interrupted(), out)
    number = int(how[0]) if how[0].isdigit() else 0
    if how == "MPICH":
        python = Path(".venv-mpich/bin/python").absolute()
        if not python.exists():
            found.kinds.append("left out")
            return
        env = {name: value for name, value in environment().items() if not name.startswith(("OMPI_", "PMIX_"))}
        command = [str(python.parent / "mpiexec"), "-n", str(RANKS), str(python), "-m", "mpisgd", "train", "--resume", str(out)]
        ran = subprocess.run(command, env=env | {"PYTHONPATH": HERE}, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        text = ran.stdout + ran.stderr
        found.expect(ran.returncode == 0, f"status {ran.returncode}")
    else:
        shards, learners = (number, 2) if "shard" in how else (SHARDS, number)
        job = Job(shards + learners, ["--resume", str(out), "--shards", str(shards)])
        found.expect(job.end(LIMIT_S) == 0, "status")
        text = job.text
        found.expect("no longer to the bits" in text, f"it does not say that the bits are others\n{text}")
    if found.expect(not found.failures and (out / schema.DONE).is_file(), f"not gone on with\n{text}"):
        proved(out, True, RANKS, found, whole("hardsync", SHARDS) if how == "MPICH" else None, [])


def _false(what: str, where: str, generator: random.Random, directory: Path, found: Found) -> None:
    """A file of HDF5 that is shorter than it was, or says that it has 2^40 rows; all who read it."""
    out = directory / "run"
    shutil.copytree(interrupted() if where == "checkpoint" else whole("hardsync", SHARDS), out)
    for lock in out.glob("LOCK*"):
        lock.unlink()
    pattern = {"log.h5": "log.h5", "shard": "shard-*.h5", "checkpoint": "checkpoint/*/shard-*.h5"}[where]
    path = generator.choice(sorted(out.glob(pattern)))
    if what == "truncated":
        with path.open("r+b") as file:
            file.truncate(generator.randrange(path.stat().st_size))
    else:
        with h5py.File(path, "r+", libver="latest") as file:
            name = generator.choice([each for each in file if isinstance(file[each], h5py.Dataset) and file[each].ndim])
            found.kinds.append(name)
            dtype, shape = file[name].dtype, file[name].shape
            del file[name]
            file.create_dataset(name, (CLAIMED, *shape[1:]), dtype, chunks=(1024, *shape[1:]))
            if "committed" in file and name != "committed":
                file["committed"][...] = CLAIMED
    done = subprocess.run([sys.executable, "-c", READERS, str(out)], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if not found.expect(done.returncode == 0, f"a reader fails\n{done.stdout[-500:]}{done.stderr[-3000:]}"):
        return
    said, mb = json.loads(done.stdout.splitlines()[-1])
    found.expect(mb < MOST_MB, f"{mb} MB")
    for reader, (status, text) in said.items():
        found.totals[f"{reader}: {'refused' if status else 'harmless'}"] += 1
        found.expect("Traceback" not in text, f"{reader}: {text}")
        named = ".h5" in text or "DONE" in text or "is not done" in text or "interrupted" in text or "not complete" in text
        found.expect(not status or named, f"{reader} does not name the file: {text}")
    if where == "checkpoint":
        job = Job(RANKS, ["--resume", str(out)])
        status = job.end(LIMIT_S)
        found.expect(status in (0, 2), f"--resume: status {status}\n{job.text}")
        if status == 0:
            found.totals["passed over, and gone on with"] += "passed over" in job.text
            proved(out, True, RANKS, found, whole("hardsync", SHARDS), [])
        else:
            found.expect("checkpoint" in job.text and ".h5" in job.text, f"--resume does not name the file\n{job.text}")
            found.totals["no checkpoint is left"] += 1


if __name__ == "__main__":
    sys.exit(main("site", "What a site does to a job: limits, directories, files.", len(CELLS), execute, sys.argv[1:]))
