"""Other users of the machine against the sockets of a running job (as root): nothing comes of it (SECURITY.md, "Other users").

`python -m tests.faults.strangers --seed 1 --out results/faults` writes strangers.json there. The cells of the table take turns, on
one host and on two nodes of a cluster in a box: a process of the user NOBODY on each node does one of ATTACKS, from before the job
begins until it has ended. All jobs are fault-tolerant ones, which have reapers. Each must run to its DONE, with nobody killed or
given up, to the bits of the same job left alone; and where a rank dies in the start, that must be said all the same. Garbage of
the user's own processes does come to reapers, and must do nothing either.
"""

from __future__ import annotations

import collections
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.faults import job as one_host
from tests.faults import phases
from tests.faults.campaign import Found, configured, main
from tests.faults.dying import SAID
from tests.faults.job import HERE, ULFM
from tests.nodes import job as several
from tests.nodes.cluster import Cluster, missing

NOBODY = 65534
ATTACKS = ("garbage", "flood", "half", "squat", "directory", "own garbage", "squat, a death")
PLACES = ("one host", "two nodes")
CELLS = [(attack, place) for attack in ATTACKS for place in PLACES]
LIMIT_S = 120.0
SHARDS = 1
#: A stranger's program: an attack, the numbers of processes whose names it squats, the user that it becomes (0 = stays). Until its
#: standard input ends it goes on; then it says what became of each try.
STRANGER = r"""
import collections, glob, json, os, re, select, socket, sys, time
attack, host, first, user = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
found, held = collections.Counter(), []
def tried(what, action):
    try:
        action()
        found[what + ": done"] += 1
    except OSError as error:
        found[what + ": " + type(error).__name__] += 1
others = glob.glob("/tmp/mpisgd-*")
def doors():
    return [place + "/door" for place in glob.glob("/tmp/mpisgd-*") if place not in others]
def names():
    return {name for name in re.findall(r"@(mpisgd-\S+)", open("/proc/net/unix").read())}
def speak(raw, door):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
        speaker.setblocking(False)
        speaker.sendto(raw, door)
def hold(name):
    holder = socket.socket(socket.AF_UNIX)
    holder.bind("\0" + name)
    holder.listen()
    held.append(holder)
def reach(address, kind=socket.SOCK_STREAM):
    speaker = socket.socket(socket.AF_UNIX, kind)
    speaker.setblocking(False)
    speaker.connect(address)
    held.append(speaker)
GARBAGE = [b"", b"1", b"a b c", b"x" * 100000, b"\0" * 64, b"\xff\xfe", b"other 1 1", b"1 " * 200]
if attack.startswith("squat"):
    for pid in range(first, first + 400):
        for form in ("mpisgd-prterun-%s-%d@1", "mpisgd-gone-prterun-%s-%d@1-0-%d"):
            tried("squatted", lambda: hold(form % ((host, pid) if form.count("%") == 2 else (host, pid, pid + 1))))
    for pid in range(first, first + 50):
        tried("made a directory", lambda: os.mkdir("/tmp/mpisgd-%032x-0" % pid))
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    for door in doors():
        job = door.split("-")[1]
        if "garbage" in attack:
            for raw in GARBAGE:
                tried("said to a reaper", lambda: speak(raw, door))
            if user:
                for pid in os.listdir("/proc"):
                    if pid.isdigit():
                        tried("said to a reaper", lambda: speak(("%s %s 1" % (job, pid)).encode(), door))
            tried("said to a reaper", lambda: speak((job + " no 1").encode(), door))
            tried("said to a reaper", lambda: speak((job + " 1").encode(), door))
        elif attack == "flood" and found["floods"] < 3:
            found["floods"] += 1
            for _ in range(10_000):
                tried("said to a reaper", lambda: speak(b"x", door))
        elif attack == "half" and len(held) < 900:
            tried("came to a reaper", lambda: reach(door, socket.SOCK_DGRAM))
        elif attack == "directory":
            tried("looked in", lambda: os.listdir(os.path.dirname(door)))
            tried("removed", lambda: os.unlink(door))
            tried("renamed", lambda: os.rename(os.path.dirname(door), os.path.dirname(door) + "x"))
            tried("put in", lambda: open(door + "x", "w"))
    for name in names() if attack in ("flood", "half") else ():
        for _ in range(10_000 if attack == "flood" else 200):
            tried("came to a sign", lambda: reach("\0" + name))
            if attack == "flood" or len(held) > 900:
                held[-1:] = []
    if attack.startswith("squat"):
        for name in names() if len(held) < 950 else ():
            tried("squatted beside", lambda: hold(name + "-1"))
for place in glob.glob("/tmp/mpisgd-%s*" % ("0" * 20)):
    os.rmdir(place)
print(json.dumps(found), flush=True)
"""
HERMIT = [sys.executable, "-I", "-S", "-c", STRANGER]


class Stranger:
    """A process that attacks; `inside`: on which node."""

    def __init__(self, attack: str, inside: list[str], host: str) -> None:
        first = 1 if inside else int(Path("/proc/loadavg").read_text().split()[-1])  # nodes count their processes from 1
        user = 0 if attack == "own garbage" else NOBODY
        words = [*inside, *HERMIT, attack, host, str(first), str(user)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise OSError("a stranger did not begin")
        self.pid = self._process.pid

    def end(self) -> collections.Counter[str]:
        """Have it end; what became of its tries."""
        said, _ = self._process.communicate("\n", timeout=60)
        return collections.Counter(json.loads(said))


def execute(generator: random.Random, directory: Path, number: int) -> Found:
    attack, place = CELLS[number % len(CELLS)]
    found, out = Found([attack, place]), directory / "run"
    if os.geteuid():
        return Found(found.kinds, failures=["only root can be another user"])
    more: dict[str, Any] = {"faults": {"mode": "tolerant"}}
    words = [configured(directory, phases.settings("hardsync", SHARDS, out) | more)]
    env = {"PYTHONPATH": HERE}
    dies = "death" in attack
    if dies:
        env |= {"DIE_AT": "mpi-init", "DIE_RANK": "1", "DIE_WAITS": "2", "DIE_MARK": str(directory / "mark")}
    module = "tests.faults.dying" if dies else "mpisgd"
    if place == "one host":
        strangers = [Stranger(attack, [], socket.gethostname())]
        job = one_host.Job(SHARDS + 2, words, ULFM, module=module, **env)
        _look(job, out, strangers, found, dies)
    elif why := missing():
        return Found([*found.kinds, "left out"], failures=[why])
    else:
        with Cluster(2) as cluster:
            strangers = [Stranger(attack, cluster.inside(node), f"node{node}") for node in cluster.nodes]
            for stranger in strangers:
                cluster.adopt(stranger.pid)
            _look(several.Job(cluster, (2, 1), words, ULFM, module=module, **env), out, strangers, found, dies)
    return found


def _look(job: one_host.Job, out: Path, strangers: list[Stranger], found: Found, dies: bool) -> None:
    """What must hold: of a job that runs, and of one of which a rank dies in the start."""
    try:
        if dies:
            dead_s = job.wait_for(SAID)
        else:
            begun_s = job.wait_for("epoch ")
        status = job.end(LIMIT_S)
        ended_s = time.monotonic()
    finally:
        tries: collections.Counter[str] = collections.Counter()
        for stranger in strangers:
            tries.update(stranger.end())
    found.totals.update(tries)
    stayed = getattr(job, "stayed", "")
    word = dies and "kill -KILL" in stayed  # a shell that sleeps, to kill a launcher that waits for a node; it ends by itself
    found.expect(job.left_s is not None or word, f"somebody was left: {stayed}\n{job.text}")
    own = "own garbage" in found.kinds
    heard = [what for what in tries if what.endswith("done") and "reaper" in what]
    found.expect(own or not heard, f"a stranger was heard: {heard}")
    found.expect(own or not any(f"{what}: done" in tries for what in ("looked in", "removed", "renamed", "put in")), f"{tries}")
    found.expect(heard or not own, f"garbage did not come to a reaper, or there was none: {tries}")
    if dies:
        found.seconds["a death: until all are gone"].append(ended_s - dead_s)
        found.expect("lost on" in job.text and not (out / schema.DONE).exists(), f"the reason is not told\n{job.text}")
        return
    found.seconds["from the first line to the end"].append(ended_s - begun_s)
    if not found.expect(status == 0 and (out / schema.DONE).is_file(), f"status {status}\n{job.text}"):
        return
    run = Run(out)
    found.expect(not any(word in job.text for word in ("is lost", "not heard of", "Killed")), f"somebody was given up\n{job.text}")
    found.expect(all(books.balanced for books in run.books()), "the books")
    found.same_bits(out, phases.whole("hardsync", SHARDS))


if __name__ == "__main__":
    sys.exit(main("strangers", "Other users of the machine against a job's sockets.", len(CELLS), execute, sys.argv[1:]))
