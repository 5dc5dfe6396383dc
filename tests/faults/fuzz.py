"""Malformed messages, fired at shards on real ranks: all are refused, the shards live, and the run ends with its work saved.

`python -m tests.faults.fuzz --count 20000 --seed 1 --out results/faults` writes fuzz.json there: of each form, fail-fast and (with
Open MPI) fault-tolerant, with 1 to 3 shards, a part of the messages. One of two learners fires them before each of its own pushes,
and behaves otherwise. In the end the run must be DONE, its books balanced, its model trained; and its exit status and last lines
must say that something was wrong, and who it was.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.errors import EXIT_FAILED
from mpisgd.launch import environment, mpirun
from mpisgd.messages import FINAL, LAYOUTS, NOTHING_MORE, Ending, Tag
from mpisgd.records import schema
from mpisgd.records.reader import Run
from tests.faults.where import machine

LEARNERS = 2
LIMIT_S = 500
EPOCHS = 8.0
PUSHES_AT_LEAST = 20
SLOWER = 50.0
"""The other learner, so that it does not do all the work while this one fires."""
Shots = list[tuple[int, bytes]]


class Gun:
    """Makes malformed messages for a shard whose slices have so many bytes, from learner 1 of 2."""

    def __init__(self, generator: random.Random, nbytes: int, tolerant: bool) -> None:
        self.random = generator
        self.nbytes = nbytes
        self.kinds: dict[str, Callable[[], Shots]] = {
            "size of the header": lambda: [(self._tag(), self.random.randbytes(self.random.choice([0, 1, 8, 95, 105, 5000])))],
            "magic": lambda: [(tag := self._tag(), self.random.randbytes(LAYOUTS[tag].nbytes))],
            "learner_id": lambda: self._push(learner_id=self.random.choice([-1, 0, 2, 2**31, -(2**63)])),
            "timestamp": lambda: self._push(timestamp=self.random.choice([-1, 2**40, 2**63 - 1])),
            "seq": lambda: self._push(seq=self.random.choice([-1, -(2**63), 2**62])),
            "samples": lambda: self._push(samples=self.random.choice([0, -5, 2**31, 2**50])),
            "gradients": lambda: self._push(gradients=self.random.choice([0, 2, -1, 2**31])),
            "nbytes": lambda: self._push(nbytes=self.random.choice([0, self.nbytes - 4, -self.nbytes, 2**40])),
            "slice without header": lambda: [(Tag.GRADIENT, self._slice())],
            # and something else at once: with the next slice without header, as pulls go first, it would make a whole push
            "header without slice": lambda: [*self._push()[:1], (77, b"")],
            "longer slice": lambda: [self._push()[0], (Tag.GRADIENT, self._slice() + bytes(self.random.choice([1, 4, 10**6])))],
            "shorter slice": lambda: [self._push()[0], (Tag.GRADIENT, self._slice()[: self.random.choice([0, 4, 1000])])],
            "unknown tag": lambda: [(self.random.randrange(40, 30000), self.random.randbytes(self.random.randrange(200)))],
            "not for shards": lambda: [(tag := self.random.choice([Tag.ANSWER, Tag.NOTICE]), self._header(tag))],
            "goodbye of another": lambda: [(Tag.GOODBYE, LAYOUTS[Tag.GOODBYE].pack((0, 3, 1)))],
            "ending of a goodbye": lambda: [(Tag.GOODBYE, LAYOUTS[Tag.GOODBYE].pack((1, 3, self.random.choice([-1, 3, 2**40]))))],
            "snapshot": lambda: [(Tag.SNAPSHOT_PULL, LAYOUTS[Tag.SNAPSHOT_PULL].pack((self.random.choice([0, FINAL, -9]),)))],
            "nothing more to evaluate": lambda: [(Tag.SNAPSHOT_PULL, LAYOUTS[Tag.SNAPSHOT_PULL].pack((NOTHING_MORE,)))],
            "signal": lambda: [(Tag.INTERRUPT, LAYOUTS[Tag.INTERRUPT].pack((self.random.choice([0, -1, 9, 2**40]),)))],
            "end of the run": lambda: [(self.random.choice([Tag.HERE, Tag.MET]), self._words())],
            "news of the dead": lambda: [(self.random.choice([Tag.LOST, Tag.STUCK, Tag.DUTY, Tag.ROUND]), self._words())],
            "long": lambda: [(self.random.randrange(40, 30000), bytes(3 * 2**20 + 1))],
            "NaN": lambda: self._push(seq=0, body=np.full(self.nbytes // 4, np.nan, np.float32).tobytes()),
        }
        if tolerant:  # elsewhere books that do not balance are our own bug, and end the job
            wrong = (-1, 10**9, 2**62)
            self.kinds["pushes of a goodbye"] = lambda: [
                (Tag.GOODBYE, LAYOUTS[Tag.GOODBYE].pack((1, self.random.choice(wrong), Ending.FINISHED)))
            ]

    def shoot(self) -> tuple[str, Shots]:
        kind = self.random.choice(list(self.kinds))
        return kind, self.kinds[kind]()

    def _tag(self) -> int:
        return self.random.choice([Tag.PUSH, Tag.PULL, Tag.GOODBYE, Tag.GAVE_UP, Tag.SNAPSHOT_PULL])

    def _words(self) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 8, 24, 72, 5000]))

    def _header(self, tag: int) -> bytes:
        return LAYOUTS[tag].pack(tuple(0 for _ in LAYOUTS[tag].fields))

    def _slice(self) -> bytes:
        return bytes(self.nbytes)

    def _push(self, body: bytes | None = None, **fields: float) -> Shots:
        told = {**dict.fromkeys(LAYOUTS[Tag.PUSH].fields, 0), "learner_id": 1, "samples": 16, "gradients": 1, "nbytes": self.nbytes}
        header = LAYOUTS[Tag.PUSH].pack(tuple((told | {"loss": 1.0} | fields).values()))
        return [(Tag.PUSH, header), (Tag.GRADIENT, self._slice() if body is None else body)]


def fire(channel: Any, count: int, seed: int, tolerant: bool, said: Path) -> None:
    """Let a learner's channel send malformed messages before each push, so many in all; what it sent is written to a file."""
    comm, honest, generator = channel._wire._comm, channel.push, random.Random(seed)
    guns = [Gun(generator, nbytes, tolerant) for nbytes in channel._nbytes]
    fired: collections.Counter[str] = collections.Counter()

    def push(**words: Any) -> int:
        for _ in range(min(-(-count // PUSHES_AT_LEAST), count - fired.total())):
            shard = generator.randrange(len(guns))
            kind, shots = guns[shard].shoot()
            fired[kind] += 1
            targets = {shard: shots}
            if kind == "NaN":  # whole, of a right size, and so in the books of all shards: the policy `nonfinite` drops it
                channel._pushes += 1
                targets = {each: gun.kinds[kind]() for each, gun in enumerate(guns)}
            for request in [comm.Isend(payload, rank, tag) for rank in targets for tag, payload in targets[rank]]:
                while not request.Test():
                    time.sleep(0.0002)
        said.write_text(json.dumps(fired))
        return int(honest(**words))

    channel.push = push


def rank(out: Path, count: int, seed: int, shards: int, tolerant: bool) -> None:
    import mpisgd
    from mpisgd import run
    from mpisgd.mpi import MPI

    learn = run.learn

    def fuzzing(channel: Any, *arguments: Any) -> None:
        fire(channel, count, seed, tolerant, out.with_suffix(".fired"))
        learn(channel, *arguments)

    if MPI.COMM_WORLD.rank == shards + 1:
        run.learn = fuzzing
    config = {
        "protocol": {"name": "softsync", "n": 2},
        "shards": shards,
        "epochs": EPOCHS,
        "threads": 1,
        "nonfinite": "drop",
        "straggler": {"slowdown": {"0": SLOWER}},
        "out": str(out),
        "log": {"progress": "plain"},
        "faults": {"mode": "tolerant" if tolerant else "fail-fast"},
    }
    mpisgd.train(config=config)


def campaign(count: int, seed: int, directory: Path, shards: int = 1, tolerant: bool = False) -> dict[str, Any]:
    out, fuzzer = directory / "run", shards + 1
    launcher, *rest = mpirun(shards + LEARNERS)
    words = ["--rank", str(out), "--count", str(count), "--seed", str(seed), "--shards", str(shards)]
    form = ["--with-ft", "ulfm"] if tolerant else []
    command = [launcher, *form, *rest, sys.executable, "-m", "tests.faults.fuzz", *words, *["--tolerant"] * tolerant]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=LIMIT_S, check=False)
    text = done.stdout + done.stderr
    drawn = {"count": count, "seed": seed, "shards": shards, "tolerant": tolerant}
    failures = []
    if not (out / schema.DONE).is_file():
        return drawn | {"failures": [f"the run is not DONE, status {done.returncode}: {text[-3000:]}"]}
    run, fired = Run(out), json.loads(out.with_suffix(".fired").read_text())
    refused = run.events[run.events["kind"] == schema.Event.REFUSED]
    reasons = (schema.Reason.NONFINITE, schema.Reason.REPEATED)  # once its mini-batch has been applied, the same again is repeated
    dropped = int(np.count_nonzero((run.pushes["learner_id"] == 1) & np.isin(run.pushes["reason"], reasons)))
    nans = shards * fired.get("NaN", 0)
    malformed = sum(fired.values()) - fired.get("NaN", 0)
    loss = run.evaluations["loss"]
    told = text.count("a message was refused")
    for wanted, what in (
        (sum(fired.values()) == count, f"{sum(fired.values())} messages were fired"),
        (len(refused) >= malformed, f"{malformed} were malformed, {len(refused)} refused"),
        (bool((refused["value"] == fuzzer).all()), "others than the fuzzer's were refused"),
        (dropped == nans, f"{nans} gradients of NaN, {dropped} dropped"),
        (all(books.balanced for books in run.books()), "the books do not balance"),
        (bool(np.isfinite(loss).all()) and loss[-1] < loss[0] / 2, f"it learned nothing: losses {loss.tolist()}"),
        (done.returncode == EXIT_FAILED, f"exit status {done.returncode}"),
        (f"most of them of rank {fuzzer} (learner 1)" in text, f"who it was is not said: {text[-1000:]}"),
        (told == 5 * shards, f"{told} lines of refusals"),
        ("Traceback" not in text, f"a traceback: {text[-2000:]}"),
    ):
        if not wanted:
            failures.append(what)
    return drawn | {"fired": fired, "refused": len(refused), "dropped": dropped, "failures": failures}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description="Malformed messages, fired at a shard.")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a directory for fuzz.json")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--tolerant", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank is not None:
        from mpisgd.errors import MpisgdError

        try:
            rank(options.rank, options.count, options.seed, options.shards, options.tolerant)
        except MpisgdError as error:
            print(f"mpisgd: {error}", file=sys.stderr, flush=True)
            return EXIT_FAILED
        return 0
    begun_s = time.monotonic()
    library = subprocess.run([*mpirun(1), "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]
    forms = [(shards, tolerant) for tolerant in (False, True)[: 1 + ("Open MPI" in library)] for shards in (1, 2, 3)]
    runs = []
    for shards, tolerant in forms:
        with tempfile.TemporaryDirectory() as directory:
            runs.append(campaign(-(-options.count // len(forms)), options.seed, Path(directory), shards, tolerant))
    found: dict[str, Any] = {"count": sum(run["count"] for run in runs), "runs": runs}
    found["failures"] = [failure for run in runs for failure in run["failures"]]
    found |= {"seconds": round(time.monotonic() - begun_s, 1), **machine(library)}
    text = json.dumps(found, indent=1) + "\n"
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "fuzz.json").write_text(text)
    print(text, end="")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
