"""`python -m tests.faults.dying train ...`: mpisgd itself, but the rank DIE_RANK ends by SIGKILL when it comes to the point DIE_AT.

The points are those of POINTS, in the order in which a rank comes to them; a learner that doubles as a shard, or is member of a
team, does not come to all. DIE_BY says what happens there instead: another signal, or a number of seconds, for which it sleeps,
and goes on; or a limit that it has from then on, as "RLIMIT_NOFILE 16" (of RLIMIT_AS: above what it has). DIE_MEET_S shortens the
last meeting, for which it is then late. In `mpi-init` the rank is killed from outside, while it waits in MPI_Init for rank
DIE_WAITS, which begins that only when there is the file DIE_MARK.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpisgd.liveness.guard import launched_rank

BEFORE_MPI = ("launch", "import", "mpi-init")
TORCH = "torch"
"""When MPI has begun, and torch is imported; DIE_SLOW_S seconds are what that takes on the other ranks."""
#: Point -> (module, function, which call of it, after it): where agreement is under way, and where it is over.
START = {
    "look-around": ("mpisgd.job.run.start", "look_around", 1, False),
    "data": ("mpisgd.job.run.start", "Start._load_data", 1, False),
    "meta": ("mpisgd.job.parts", "load_loss", 1, False),
    "model": ("mpisgd.job.parts", "build_model", 1, False),
    "check": ("mpisgd.job.run.start", "Start._check", 1, True),
    "claim": ("mpisgd.job.run.start", "Claim._claim", 1, False),
    "load": ("mpisgd.job.run.start", "Claim._load", 1, True),
}
LATER = {
    "ready": ("mpisgd.job.run.rank", "Rank.agree", 1, True),
    "clock": ("mpisgd.comm.mpi.clock", "Clock.begin", 1, False),
    "first pull": ("mpisgd.exchange.learner_channel", "LearnerChannel.pull", 1, False),
    "first gradient": ("mpisgd.gradient.gradient", "Gradient.forward", 1, False),
    "training": ("mpisgd.gradient.gradient", "Gradient.forward", 20, False),
    "serving": ("mpisgd.shard", "Shard.handle", 40, False),
    "last update": ("mpisgd.exchange.learner_channel", "LearnerChannel.goodbye", 1, False),
    "evaluation": ("mpisgd.evaluator", "Evaluator.evaluate_all", 1, False),
    "end": ("mpisgd.job.run.rank", "Rank._end", 1, False),
    "books": ("mpisgd.job.run.rank", "check_books", 1, False),
    "finish": ("mpisgd.job.run.rank", "finish", 1, False),
}
POINTS = (*BEFORE_MPI, TORCH, *START, *LATER)
#: A rank of a group, besides.
GROUPED = {
    "forward": ("mpisgd.pipeline.micro_batches", "StagePasses.pass_on", 21, False),
    "backward": ("mpisgd.pipeline.micro_batches", "StagePasses.pass_back", 21, False),
    "in a call": ("mpisgd.pipeline.stage_messages", "WireLinks.deal", 21, False),
    "pushing": ("mpisgd.exchange.learner_channel", "LearnerChannel._send", 6, True),
    "agreeing": ("mpisgd.comm.mpi.tolerant", "Told.tell", 9, False),
    "agreed": ("mpisgd.exchange.learner_channel", "LearnerChannel.push", 6, False),
    "pushed": ("mpisgd.exchange.learner_channel", "LearnerChannel.push", 6, True),
}
#: In a fault-tolerant run: the fifth time that all meet, when rank 0 has said DONE, and who is given up.
LAST = {"last meeting": ("mpisgd.comm.mpi.tolerant", "TolerantWire.settle", 5, False)}
#: While a checkpoint is written, by a shard's thread: the third time that this is called with something of that name.
_DURABLE, _DISK, _SHARD = "mpisgd.base.durable", "mpisgd.records.checkpoint.checkpoint", "mpisgd.records.checkpoint.checkpoints"
SAVING = {
    "room": (_SHARD, "Checkpoints._make_room", 1, False, ""),
    "begun": (_DISK, "write_tensors", 3, False, ".h5"),
    "half written": (_DURABLE, "write_all", 8, False, ".h5."),
    "written aside": (_DURABLE, "sync", 3, False, ".h5."),
    "synced": (_DURABLE, "sync", 3, True, ".h5."),
    "renamed": (_DISK, "write_tensors", 3, True, ".h5"),
    "account": (_DISK, "write_json", 3, True, "shard-"),
    "manifest aside": (_DURABLE, "sync", 3, True, ".manifest.json."),
    "manifest": (_DISK, "write_json", 3, True, "manifest.json"),
    "pruning": (_SHARD, "remove", 1, False, "clock-"),
}
SAID = "dies now"
ANY = "any"
"""As DIE_RANK: the first rank that comes to the point, which makes the file DIE_MARK."""


def die() -> None:
    if os.environ["DIE_RANK"] == ANY:
        try:
            Path(os.environ["DIE_MARK"]).touch(exist_ok=False)
        except FileExistsError:
            return
    by = os.environ.get("DIE_BY", "SIGKILL")
    os.write(2, f"rank {launched_rank()} {SAID}\n".encode())
    time.sleep(0.2)  # for the launcher to pass it on
    if by.isdigit():
        time.sleep(float(by))
    elif by.startswith("RLIMIT_"):
        name, _, most = by.partition(" ")
        here = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0]) if name == "RLIMIT_AS" else 0
        resource.setrlimit(getattr(resource, name), (here + int(most), here + int(most)))
    else:
        os.kill(os.getpid(), signal.Signals[by])


def _before_import(name: str, action: Callable[[], None]) -> None:
    """Do this when that module is about to be imported."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(
            self, fullname: str, path: Sequence[str] | None, target: object = None
        ) -> importlib.machinery.ModuleSpec | None:
            if fullname == name:
                sys.meta_path.remove(self)
                action()
            return None

    sys.meta_path.insert(0, Finder())


def _at_call(module: str, names: str, which: int, after: bool, of: str = "") -> None:
    owner: Any = importlib.import_module(module)
    *path, name = names.split(".")
    for each in path:
        owner = getattr(owner, each)
    inner, count = getattr(owner, name), itertools.count(1)

    @functools.wraps(inner)
    def outer(*arguments: Any, **words: Any) -> Any:
        if of not in repr(arguments[:1]) or next(count) != which:
            return inner(*arguments, **words)
        result = inner(*arguments, **words) if after else None
        die()
        return result if after else inner(*arguments, **words)

    setattr(owner, name, outer)


def _killed_in_init() -> None:
    """From outside, when it has had time enough to be there; who waits for it sees that it is dead."""
    script = f"sleep 1.5; echo '{SAID}' >&2; kill -9 {os.getpid()}; touch '{os.environ['DIE_MARK']}'"
    subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL)


def _wait_for_mark() -> None:
    while not Path(os.environ["DIE_MARK"]).exists():
        time.sleep(0.05)


def main() -> int:
    rank, at = str(launched_rank()), os.environ["DIE_AT"]
    if os.environ["DIE_RANK"] in (rank, ANY):
        if at == "launch":
            die()
        elif at == "import":
            _before_import("mpi4py.MPI", die)
        elif at == "mpi-init":
            _before_import("mpi4py.MPI", _killed_in_init)
        elif at == TORCH:
            _before_import("torch", die)
        elif at in SAVING:
            _at_call(*SAVING[at])
        else:
            _at_call(*(START | LATER | GROUPED | LAST)[at])
    elif at == "mpi-init" and rank == os.environ["DIE_WAITS"]:
        _before_import("mpi4py.MPI", _wait_for_mark)
    elif at == TORCH:
        _before_import("torch", lambda: time.sleep(float(os.environ.get("DIE_SLOW_S", "5"))))
    from mpisgd.__main__ import main as mpisgd

    if meet_s := os.environ.get("DIE_MEET_S"):
        importlib.import_module("mpisgd.comm.mpi.tolerant").MEET_S = float(meet_s)  # type: ignore[attr-defined]
    return mpisgd()


if __name__ == "__main__":
    sys.exit(main())
