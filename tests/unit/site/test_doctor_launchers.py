"""What the doctor says of launchers, and of where ranks may run."""

from __future__ import annotations

import pytest

from mpisgd.site import doctor, launchers
from mpisgd.site.facts import HostFacts, RankFacts, Survey


def survey(*ranks: tuple[str, set[int], int], library: str = "", variables: dict[str, str] | None = None) -> Survey:
    facts = tuple(
        RankFacts(host, frozenset(cores), environment=variables or {}, versions={"MPI": library}, gpus=gpus)
        for host, cores, gpus in ranks
    )
    return Survey(facts, {host: HostFacts(machine_cores=8) for host, _, _ in ranks})


@pytest.mark.parametrize(
    ("library", "owner", "fits"),
    [
        ("Open MPI v5.0.11", "Open MPI", "mpirun, srun-pmix, flux; known not to: srun-pmi2, srun-cray, aprun, mpiexec.hydra"),
        ("MPICH Version: 5.0.2", "MPICH", "srun-pmix, srun-pmi2, flux, mpiexec.hydra; known not to: mpirun, jsrun, aprun"),
        (
            "MPI VERSION : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)",
            "Cray MPICH",
            "srun-cray, aprun, flux; known not to: mpirun",
        ),
        (
            "Intel(R) MPI Library 2021.11 for Linux* OS",
            "Intel MPI",
            "srun-pmix, srun-pmi2, flux, mpiexec.hydra; known not to: mpirun",
        ),
        ("MVAPICH2 Version : 2.3.7 (MPICH ABI)", "MVAPICH", "srun-pmi2, flux, mpiexec.hydra; known not to: mpirun"),
        ("IBM Spectrum MPI, v10.4", "Spectrum MPI", "jsrun; known not to: srun-pmix, srun-pmi2, srun-cray, aprun, flux"),
    ],
)
def test_it_says_what_fits_and_what_is_known_not_to(library: str, owner: str, fits: str) -> None:
    assert launchers.family(library) == owner
    found = doctor.check_launcher(survey(("a", {0}, 0), library=library))
    assert (found.level, found.mend) == ("ok", "")
    assert found.text.startswith(f"{owner} is started by {fits}")


def test_of_a_library_that_nobody_knows_it_says_nothing() -> None:
    assert doctor.check_launcher(survey(("a", {0}, 0), library="FooMPI 1")).text == "none known for this MPI"


def test_no_launcher_both_fits_and_does_not() -> None:
    for name, launcher in launchers.LAUNCHERS.items():
        assert not launcher.fits & launcher.fails.keys(), name
        assert launcher.fits


def test_a_mismatch_names_what_fits() -> None:
    variables = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"}
    found = doctor.check_ranks(survey(("a", {0}, 0), library="Open MPI v5.0.11", variables=variables))
    assert found.level == "fault"
    assert "SLURM_STEP_NUM_TASKS = 4" in found.text
    assert "Open MPI is started by mpirun, srun-pmix, flux" in found.mend


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([("a", {0, 1}, 0), ("a", {2, 3}, 0)], "a: rank 0 on core 0-1; rank 1 on core 2-3"),
        ([("a", {0, 1}, 0), ("a", {0, 1}, 0), ("b", {4}, 2)], "a: rank 0-1 on core 0-1 | b: rank 2 on core 4 with 2 GPU(s)"),
        ([("a", {0}, 0), ("b", {0}, 0), ("a", {0, 5}, 0)], "a: rank 0 on core 0; rank 2 on core 0, 5 | b: rank 1 on core 0"),
        (
            [(f"n{index}", {0}, 0) for index in range(6)],
            "n0: rank 0 on core 0 | n1: rank 1 on core 0 | n2: rank 2 on core 0 | n3: rank 3 on core 0 | and 2 more hosts",
        ),
    ],
)
def test_the_map_of_ranks_to_cores(ranks: list[tuple[str, set[int], int]], text: str) -> None:
    found = doctor.check_binding(survey(*ranks))
    assert (found.level, found.text) == ("ok", text)
