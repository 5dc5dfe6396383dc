"""`mpisgd.launch`: a function on some ranks of this machine, from a notebook or a script that is no rank itself."""

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
"""Seconds to wait for what the ranks have printed, when they have ended."""


def launch(function: Callable[..., Any], *args: Any, ranks: int = 4, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` on so many ranks of this machine; what they print is printed here.

    The function may call `mpisgd.train`. It and its arguments are sent by pickle, so it must be importable by its name, from a
    module; where `cloudpickle` is installed, anything goes that this can send: functions of a notebook, lambdas, closures.

    Returns:
        What it returned on rank 0; what the others return is dropped.

    Raises:
        LaunchError: a rank has failed, and all were ended; with that rank's traceback. This process lives on, and may call again.
        ConfigError: what cannot be sent; a process that has initialised MPI, or is a rank; no launcher.
        KeyboardInterrupt: Ctrl-C, when the ranks have saved (in `train`) and left.
    """
    refuse_in_import("mpisgd.launch()")
    _refuse_after_mpi()
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks = {ranks!r}: expected a number of at least 1")
    sent = _packed(function, args, kwargs)
    with tempfile.TemporaryDirectory(prefix="mpisgd-launch-") as directory:
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
    """Start the ranks, and wait for their end: the launcher's status, and the last lines."""
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
    """Pass on what ranks print, by `sys.stdout`, which a notebook shows."""
    for line in stream:
        lines.append(line)
        print(line, end="", flush=True)


def _environment() -> Mapping[str, str]:
    """Ranks find the modules that this process finds."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _packed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The call, as bytes. Raises ConfigError where it cannot be sent."""
    if not callable(function):
        raise ConfigError(f"launch: expected a function, found {type(function).__name__}")
    name = getattr(function, "__qualname__", repr(function))
    by_value = importlib.util.find_spec("cloudpickle") is not None
    if not by_value and getattr(function, "__module__", None) == "__main__":
        raise ConfigError(
            f"launch: {name} is of this script or notebook, where ranks cannot import it: put it into a module of its own, or"
            " pip install cloudpickle"
        )
    try:
        return bytes(called.packer().dumps((function, args, kwargs)))
    except Exception as error:  # whatever an object's own __reduce__ raises
        hint = "" if by_value else "; pip install cloudpickle, which sends more"
        raise ConfigError(f"launch: {name} or one of its arguments cannot be sent to ranks: {error}{hint}") from error


def _refuse_after_mpi() -> None:
    """Raises ConfigError: ranks of a process that MPI knows already would be told to be part of it."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized():
        raise ConfigError(
            "launch: this process has initialised MPI, by mpisgd.train() or by importing mpi4py.MPI, and cannot start ranks any"
            " more: call launch() in a process that has not (restart the notebook's kernel)"
        )
