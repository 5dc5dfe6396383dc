"""`mpisgd.launch`: a function on ranks of this machine, from a process that is no rank."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from mpisgd.base.errors import EXIT_OK, ConfigError, LaunchError
from mpisgd.base.imports import refuse_in_import
from mpisgd.launching import called
from mpisgd.launching.under_way import UnderWay

_LAST_LINES = 40
_DRAIN_S = 5.0
"""Seconds to wait for the ranks' last output."""


def launch(function: Callable[..., Any], *args: Any, ranks: int = 4, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` on so many ranks of this machine, and print their output here.

    The function may call `mpisgd.train`. Function and arguments are sent by pickle: the function must be importable from a module,
    unless `cloudpickle` is installed.

    Returns:
        The result of rank 0.

    Raises:
        LaunchError: a rank has failed, and all were ended; with its traceback.
        ConfigError: something cannot be sent; this process has initialised MPI, or is a rank; no launcher.
        KeyboardInterrupt: Ctrl-C, after the ranks have saved (in `train`) and left.
    """
    refuse_in_import("mpisgd.launch()")
    _refuse_after_mpi()
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks = {ranks!r}: expected a number of at least 1")
    sent = _packed(function, args, kwargs)
    with tempfile.TemporaryDirectory(prefix="mpisgd-launch-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        (place / called.CALL).write_bytes(sent)
        status, said = _run(place, ranks)
        failures = sorted(place.glob(called.FAILED.format("*")), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            rank = int(failures[0].name.rpartition("-")[2])
            raise LaunchError(f"rank {rank} of {ranks} failed:\n{failures[0].read_text().rstrip()}", rank)
        if status != EXIT_OK or not (place / called.RESULT).exists():
            raise LaunchError(f"the ranks have ended with status {status}; their last words:\n{said}")
        return pickle.loads((place / called.RESULT).read_bytes())


def _run(place: Path, ranks: int) -> tuple[int, str]:
    words = [sys.executable, "-P", "-m", called.__name__, str(place), str(ranks)]

    def has_begun() -> bool:
        return len(list(place.glob(called.BEGUN.format("*")))) == ranks

    lines: deque[str] = deque(maxlen=_LAST_LINES)
    with UnderWay(ranks, words, has_begun=has_begun, env=_environment(), stdout=subprocess.PIPE) as under_way:
        assert under_way.process.stdout is not None
        printer = threading.Thread(target=_print, args=(under_way.process.stdout, lines), name="ranks' words", daemon=True)
        printer.start()
        try:
            status = under_way.wait()
        except KeyboardInterrupt:
            under_way.stop()
            under_way.wait()
            raise
        finally:
            printer.join(_DRAIN_S)
    return status, "".join(lines).rstrip()


def _print(stream: IO[str], lines: deque[str]) -> None:
    for line in stream:
        lines.append(line)
        print(line, end="", flush=True)


def _environment() -> Mapping[str, str]:
    paths = [path or str(Path.cwd()) for path in sys.path]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _packed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    if not callable(function):
        raise ConfigError(f"launch: expected a function, found {type(function).__name__}")
    name = getattr(function, "__qualname__", repr(function))
    by_value = importlib.util.find_spec("cloudpickle") is not None
    if not by_value and getattr(function, "__module__", None) == "__main__":
        raise ConfigError(
            f"launch: ranks cannot import {name} from this script or notebook: put the function into a module, or"
            " pip install cloudpickle"
        )
    try:
        return bytes(called.packer().dumps((function, args, kwargs)))
    except Exception as error:  # whatever an object's own __reduce__ raises
        hint = "" if by_value else "; pip install cloudpickle to send more"
        raise ConfigError(f"launch: {name} or an argument cannot be sent to ranks: {error}{hint}") from error


def _refuse_after_mpi() -> None:
    """Raise ConfigError if MPI is initialised: new ranks would be told to be part of this process."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized():
        raise ConfigError(
            "launch: this process has initialised MPI, by mpisgd.train() or by importing mpi4py.MPI, and cannot start ranks any"
            " more: call launch() in a new process (restart the notebook's kernel)"
        )
