"""A rank of `mpisgd.launch`: `python -m mpisgd.launching.called PLACE RANKS` calls the function in PLACE."""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from mpisgd.base.errors import EXIT_FAILED, ConfigError
from mpisgd.liveness.guard import abort, tell_failures

CALL, RESULT, BEGUN, FAILED = "call", "result", "begun-{}", "failed-{}"


def packer() -> Any:
    if importlib.util.find_spec("cloudpickle") is None:
        return pickle
    import cloudpickle

    return cloudpickle


def main(place: Path, ranks: int) -> None:
    """Call the function; rank 0 writes the result. A failing rank writes why, and ends all."""
    from mpisgd.comm.mpi.library import MPI

    rank = MPI.COMM_WORLD.Get_rank()

    def fails(why: str) -> None:
        _write(place / FAILED.format(rank), why.encode())

    tell_failures(fails)  # `mpisgd.train` ends the job by itself
    try:
        if MPI.COMM_WORLD.Get_size() != ranks:
            found = MPI.COMM_WORLD.Get_size()
            raise ConfigError(f"this MPI sees {found} of {ranks} ranks: mpirun and the MPI of mpi4py do not match")
        (place / BEGUN.format(rank)).touch()
        function, args, kwargs = pickle.loads((place / CALL).read_bytes())
        result = function(*args, **kwargs)
        if rank == 0:
            _write(place / RESULT, packer().dumps(result))
    except BaseException:  # SystemExit, too: the caller waits for a result
        fails(traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        abort(MPI.COMM_WORLD, EXIT_FAILED)


def _write(path: Path, content: bytes) -> None:
    """Write whole, or not at all: a rank may be ended at any moment."""
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(content)
    aside.replace(path)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):  # whole lines: a launcher may mix parts with other ranks' lines
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=False)
    main(Path(sys.argv[1]), int(sys.argv[2]))
