"""`mpirun -n RANKS mpisgd train [job.toml] [options]`, or `... train [job.toml] --resume RUN [options]`."""

from __future__ import annotations

import sys
from pathlib import Path

from mpisgd.base.errors import EXIT_OK
from mpisgd.base.without_gc import importing
from mpisgd.cli.options import TRUST, parse, resumed
from mpisgd.comm.signals import ignore_from_now_on
from mpisgd.config import compatibility, config_file, trust
from mpisgd.liveness import leaving
from mpisgd.liveness.guard import launched_rank


def main(argv: list[str]) -> int:
    """Parse before importing torch and MPI: a misspelt option costs no start-up; then run."""
    run, words = resumed(argv)
    job = None if run is None or not words or words[0].startswith("-") else Path(words.pop(0))
    consented = {} if job is None else trust.names_of(trust.read(job, TRUST in words), training=True)
    config, print_config = parse(words, "mpisgd train", None if run is None else config_file.of_run(run))
    if run is not None:
        config = config_file.cut_anew(config, config_file.of_run(run))
    if run is not None and (run / "DONE").is_file() and not print_config:
        if launched_rank() == 0:
            print(f"mpisgd: {run} is done: there is nothing to continue; see: mpisgd report {run}", file=sys.stderr)
        return EXIT_OK
    if run is not None and TRUST not in words:
        trust.check_resumed(run, words, consented)
    compatibility.check(config)  # asks the user's own protocol
    if print_config:
        if run is not None:
            from mpisgd.job.resume import check_changes

            check_changes(run, config)
        if launched_rank() == 0:
            print(config_file.dumps(config), end="")
        return EXIT_OK
    with importing():
        import mpisgd.comm.mpi.library  # noqa: F401 - before torch, which takes seconds: from now on all ranks know whether the others live
        from mpisgd.api import train

    train(config=config, resume=run)
    ignore_from_now_on()
    leaving.leave()
    return EXIT_OK
