"""`mpisgd demo`: the paper's claim in small, by protocols alone."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from mpisgd.base.errors import EXIT_FAILED, EXIT_OK
from mpisgd.cli.reading import compare
from mpisgd.comm.mpi import launch
from mpisgd.comm.mpi.launch import environment, mpirun

LEARNERS = 8
_COMMON = "--model small_cnn --data digits --mu 4 --alpha0 0.03 --epochs 8 --nonfinite continue --overwrite"

#: Directory -> the protocol's options, and the expectation.
RUNS = {
    "hardsync": ("--protocol hardsync", "staleness 0: learns"),
    "softsync-plain": (f"--protocol softsync --protocol.n {LEARNERS} --protocol.modulation none", "stale, alpha0: does not learn"),
    "softsync-modulated": (f"--protocol softsync --protocol.n {LEARNERS}", "as stale, alpha0/tau: learns"),
}


@dataclass(frozen=True)
class Options:
    """Train a small CNN on 1,437 handwritten digits with 8 learners and a shard, three times."""

    out: str = "results/demo"
    """Directory of the runs and their comparison."""


def main(argv: list[str]) -> int:
    """Run and compare; return nonzero if a job failed."""
    out = Path(tyro.cli(Options, args=argv, prog="mpisgd demo").out)
    start_s = time.monotonic()
    for name, (protocol, expectation) in RUNS.items():
        words = [*shlex.split(protocol), *shlex.split(_COMMON), "--out", str(out / name)]
        command = [*mpirun(LEARNERS + 1), sys.executable, "-P", "-m", "mpisgd", "train", *words]
        print(f"\n{name} ({expectation})\n$ {launch.words(LEARNERS + 1)} mpisgd train {shlex.join(words)}", flush=True)
        if subprocess.run(command, env=environment(), check=False).returncode != EXIT_OK:
            print(f"mpisgd demo: {name} failed", file=sys.stderr)
            return EXIT_FAILED
    print()
    status = compare.main([*(str(out / name) for name in RUNS), "--out", str(out / "compare")])
    took_s = time.monotonic() - start_s
    print(f"\nThe demo took {took_s:.0f} s. Figures: {out / 'compare'}. Next: mpisgd report {out / 'hardsync'}")
    return status
