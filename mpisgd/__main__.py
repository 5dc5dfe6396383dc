"""`mpisgd COMMAND ...`, and `python -m mpisgd COMMAND ...`."""

from __future__ import annotations

import importlib
import sys

from mpisgd.errors import EXIT_OK, EXIT_USAGE, MpisgdError, nearest
from mpisgd.guard import launched_rank, launched_size

#: Command -> what it does; each is the module of the same name in `mpisgd.cli`, imported when it is called.
COMMANDS = {
    "train": "train a model; start it by mpirun",
    "report": "tables and figures of one run",
    "compare": "several runs side by side",
    "bench": "measure this machine: ratios to the raw floor",
    "doctor": "check MPI, cores, threads and the file system",
    "demo": "three small runs that show what staleness does",
}


def usage() -> str:
    lines = [f"  {name:<9} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: mpisgd COMMAND [options]", "", *lines, "", "mpisgd COMMAND --help explains each."])


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        status = run(*words)
    except SystemExit as leaving:  # tyro's --help and its refusals
        status = leaving.code if isinstance(leaving.code, int) else EXIT_USAGE
    if status != EXIT_OK and launched_size() > 1:
        leave_together()
    return status


def run(command: str = "", *rest: str) -> int:
    """Run one command on this rank; what is refused is told by the first rank alone."""
    first = launched_rank() == 0
    if command in ("", "-h", "--help"):
        if first:
            print(usage())
        return EXIT_OK if command else EXIT_USAGE
    if command == "--version":
        from mpisgd import __version__

        if first:
            print(__version__)
        return EXIT_OK
    if command not in COMMANDS:
        if first:
            print(f"mpisgd: unknown command {command!r}{nearest(command, COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        status: int = importlib.import_module(f"mpisgd.cli.{command}").main(list(rest))
    except MpisgdError as error:
        if first:
            kind = "" if type(error).__name__ == "AgreedError" else f"{type(error).__name__}: "
            print(f"mpisgd {command}: {kind}{error}", file=sys.stderr, flush=True)
        return error.exit_status
    return status


def leave_together() -> None:
    """Wait for the other ranks, so that the launcher does not end the first rank before it has told what is wrong."""
    sys.stderr.flush()
    from mpisgd.mpi import MPI

    MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    sys.exit(main())
