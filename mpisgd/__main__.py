"""`mpisgd COMMAND ...`, and `python -m mpisgd COMMAND ...`."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import threading
from typing import NoReturn

from mpisgd.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, EXIT_USAGE, MpisgdError, RunInterrupted, nearest
from mpisgd.base.terminal import visible
from mpisgd.base.version import __version__
from mpisgd.comm.mpi import ulfm
from mpisgd.config import hints
from mpisgd.liveness.guard import launched_rank, launched_size
from mpisgd.liveness.leaving import leave_together

#: Command -> its help; the module of the same name in `mpisgd.cli` is imported on a call.
COMMANDS = {
    "run": "start ranks that train a model; begin again where ranks fail",
    "train": "train a model: one rank; start all ranks by mpirun, or run",
    "simulate": "train on a virtual cluster, in virtual time",
    "report": "print tables and draw figures of one run",
    "compare": "put several runs side by side",
    "timeline": "write a Chrome trace: who computed, waited, sent and received when",
    "replay": "make a run again from its log, and compare bit for bit",
    "plan": "predict from runs: which protocol, N, b or n, and how many shards",
    "export": "write the weights of a run or of a checkpoint to a file",
    "submit": "print or submit a batch script for SLURM, LSF, PBS or Flux",
    "bench": "measure this machine: ratios to the raw floor",
    "doctor": "check MPI, cores, threads and the file system",
    "demo": "train three small runs that show what staleness does",
}


_READING = ("report", "compare", "timeline", "replay", "plan", "export")


def module_of(command: str) -> str:
    return f"mpisgd.cli.{'reading.' if command in _READING else ''}{command}"


def usage() -> str:
    lines = [f"  {name:<9} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: mpisgd COMMAND [options]", "", *lines, "", "mpisgd COMMAND --help explains each."])


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    reason = ""
    sys.unraisablehook = hear_again
    print_whatever_the_locale()
    try:
        status = run(*words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        status = print_no_more()
    except RunInterrupted:
        status = EXIT_INTERRUPTED
    except SystemExit as leaving:  # tyro's --help and its refusals
        status = leaving.code if isinstance(leaving.code, int) else EXIT_USAGE
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            print_no_more()
    except MpisgdError as error:
        kind = "" if type(error).__name__ == "AgreedError" else f"{type(error).__name__}: "
        reason, status = f"{kind}{error}", error.exit_status
        if launched_rank() == 0:
            told = visible(reason, kept="\n\t")
            print(f"mpisgd {words[0]}: {told}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        stop_at_once(words)
    if status != EXIT_OK and launched_size() > 1 and words[:1] != ["run"]:  # `run` is no rank, even in a batch job of many
        status = leave_together(status, reason)
    ulfm.leave(status)
    return status


def print_whatever_the_locale() -> None:
    """Print a letter outside the locale as a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_no_more() -> int:
    """Discard standard output's buffer; return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK


def hear_again(told: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that came in a destructor, where Python lets no exception out."""
    if issubclass(told.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(told)


def stop_at_once(words: list[str]) -> NoReturn:
    """Exit as shells do on Ctrl-C, where nothing can be saved; all ranks are sent the signal, none waits."""
    if launched_rank() == 0:
        print(f"\nmpisgd {words[0]}: stopped by Ctrl-C", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STOPPED)


def run(command: str = "", *rest: str) -> int:
    """Run a command on this rank; the first rank alone reports an unknown command. Raises MpisgdError."""
    first = launched_rank() == 0
    if command in ("", "-h", "--help"):
        if first:
            print(usage())
        return EXIT_OK if command else EXIT_USAGE
    if command == "--version":
        if first:
            print(__version__)
        return EXIT_OK
    if command not in COMMANDS:
        if first:
            print(f"mpisgd: unknown command {command!r}{hints.command(command) or nearest(command, COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    status: int = importlib.import_module(module_of(command)).main(list(rest))
    return status


if __name__ == "__main__":
    sys.exit(main())
