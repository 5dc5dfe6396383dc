"""`mpisgd run`: what it refuses, what it believes, when it begins again; a stub is the launcher (ranks: tests/mpi/test_run.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from mpisgd.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError
from mpisgd.cli.run import main
from mpisgd.launching import under_way
from mpisgd.liveness.guard import SIZE_VARIABLES
from mpisgd.site import launchers

#: Does at its k-th start what the k-th entry says: begins a run, ends it, tells its parent to stop, waits for a signal, leaves.
STUB = """
import json, os, signal, sys
from pathlib import Path

heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1"))
words = sys.argv[sys.argv.index("train") + 1:]
starts = json.loads(Path("starts").read_text()) if Path("starts").exists() else []
Path("starts").write_text(json.dumps([*starts, words]))
does = json.loads(Path("plan").read_text())[len(starts)]
run = Path("run")
if does.get("begins"):
    run.mkdir(exist_ok=True)
    (run / "config.toml.new").write_text(does.get("config", str(len(starts))))
    os.replace(run / "config.toml.new", run / "config.toml")
if does.get("ends"):
    (run / "DONE").touch()
if "tells" in does:
    os.kill(os.getppid(), does["tells"])
    while not heard:
        signal.pause()
    Path("heard").write_text(heard[0])
sys.exit(does["status"])
"""


@pytest.fixture(autouse=True)
def _stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(under_way, "mpirun", lambda ranks: [sys.executable, "-IS", str(tmp_path / "stub.py"), "-n", str(ranks)])


def run(plan: list[dict[str, Any]], *words: str) -> tuple[int, list[list[str]]]:
    """The status, and the words of each start of `train`."""
    Path("plan").write_text(json.dumps(plan))
    status = main(["-n", "3", "--out", "run", *words])
    return status, json.loads(Path("starts").read_text())


def started(*words: str) -> list[str]:
    return ["--out", "run", *words]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "-n is missing: expected a number of at least 1"),
        ("-n", "-n: expected RANKS after -n"),
        ("-n 0", "-n 0: expected a number of at least 1"),
        ("-n four", "-n four: expected a number of at least 1"),
        ("-n 3 --max-restarts -1", "--max-restarts -1: expected a number of at least 0"),
        ("-n 3 --launcher-args=--host='a", "--launcher-args .*No closing quotation"),
        ("-n 3 --lr 1", "unknown option --lr: .*--alpha0"),
        ("-n 3 --workers 4", "unknown option --workers: .*mpisgd run -n RANKS"),
        ("-n 3 nowhere.toml", "nowhere.toml"),
        ("-n 3 --resume nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_starts_no_rank(words: str, said: str) -> None:
    with pytest.raises(Exception, match=said) as refused:
        main(words.split())
    assert refused.value.exit_status == EXIT_USAGE
    assert not Path("starts").exists()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_ranks_do_not_start_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigError, match=f"{name} = 4: start a single process"):
        main(["-n", "3"])


def test_a_batch_script_may_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert run([{"begins": True, "ends": True, "status": 0}])[0] == 0


def test_another_launcher_starts_them_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\necho "$@" >"$0.words"\nexec {sys.executable} {tmp_path / "stub.py"} "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(launchers, "library_of", lambda python: "MPICH Version: 5.0.2")
    done = {"begins": True, "ends": True, "status": 0}
    assert run([done], "--launcher", "srun-pmi2", "--launcher-args", "-w n1")[0] == 0
    words = Path(f"{srun}.words").read_text()
    assert words.startswith("-w n1 --mpi=pmi2 --kill-on-bad-exit=1 --ntasks=3 --cpus-per-task=2 ")
    assert words.endswith(" -m mpisgd train --out run\n")


@pytest.mark.parametrize(
    ("name", "library", "said"),
    [
        ("srun", "", "--launcher srun: expected one of mpirun, srun-pmix, srun-pmi2, srun-cray, aprun, mpiexec.hydra$"),
        ("flux", "", "--launcher flux: expected one of .*: flux passes no signals on"),
        ("jsrun", "", "--launcher jsrun: expected one of .*: resource sets"),
        (
            "srun-pmi2",
            "Open MPI v5.0.11",
            "launcher = 'srun-pmi2': expected one of mpirun, srun-pmix, flux for Open MPI: .* PMIx alone",
        ),
        (
            "srun-pmix",
            "CRAY MPICH version 8.1.28 (ANL base 3.4a2)",
            "launcher = 'srun-pmix': expected one of srun-cray, aprun, flux for",
        ),
        ("mpirun", "Intel(R) MPI Library 2021.11", "launcher = 'mpirun': .* for Intel MPI: .* mpiexec.hydra"),
        ("mpiexec.hydra", "IBM Spectrum MPI v10.4", "launcher = 'mpiexec.hydra': expected one of jsrun for Spectrum MPI"),
        ("aprun", "", "--launcher aprun: aprun is not on the PATH"),
    ],
)
def test_a_launcher_that_does_not_fit_starts_no_rank(name: str, library: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(launchers, "library_of", lambda python: library)
    with pytest.raises(ConfigError, match=said):
        main(["-n", "3", "--launcher", name])


def test_whose_library_it_is_is_read_from_this_python() -> None:
    told = launchers.library_of(sys.executable)
    if not told:
        pytest.skip("mpi4py finds no MPI here")
    assert launchers.family(told) in ("Open MPI", "MPICH")
    assert launchers.library_of("/nowhere/python") == ""


def test_done_is_believed_and_not_the_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([{"begins": True, "status": 0}]) == (EXIT_FAILED, [started()])
    assert "the launcher says 0, but run is not DONE" in capfd.readouterr().err
    Path("starts").unlink()
    assert run([{"begins": True, "ends": True, "status": 137}])[0] == 0
    Path("starts").unlink()
    assert run([{"status": 1}])[0] == 1, "the older run's DONE is none of this job's"


def test_it_begins_again_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    """There is no checkpoint here: from the beginning; what had not begun is started by the same words."""
    ends = {"begins": True, "ends": True, "status": 0}
    status, starts = run([{"status": 1}, {"begins": True, "status": 137}, ends], "--max-restarts", "2")
    assert (status, starts) == (0, [started(), started(), started("--overwrite")])
    assert "status 137: the run has no checkpoint, and begins anew, restart 2 of 2" in capfd.readouterr().err
    Path("starts").unlink()
    status, starts = run([{"status": 3}, {"status": 4}], "--max-restarts", "1")
    assert (status, len(starts)) == (4, 2), "no more often than that"


def test_where_states_are_kept_on_nodes_these_are_asked_once(capfd: pytest.CaptureFixture[str]) -> None:
    """It begins anew where none holds them, which `--resume` refuses."""
    kept = {"begins": True, "status": 137, "config": "[checkpoint]\npartner_updates = 5\n"}
    plan = [kept, {"status": EXIT_USAGE}, {"begins": True, "ends": True, "status": 0}]
    status, starts = run(plan, "--max-restarts", "2")
    assert (status, starts) == (0, [started(), ["--resume", "run"], started("--overwrite")])
    told = capfd.readouterr().err
    assert "status 137: the run goes on from the newest state on the nodes, restart 1 of 2" in told
    assert "the run has no checkpoint, and begins anew, restart 2 of 2" in told


@pytest.mark.parametrize(("status", "starts"), [(EXIT_USAGE, 1), (EXIT_INTERRUPTED, 2), (137, 2)])
def test_what_was_refused_is_not_begun_again(status: int, starts: int) -> None:
    """What somebody else has interrupted is."""
    ends = {"begins": True, "ends": True, "status": 0}
    assert len(run([{"status": status}, ends], "--max-restarts", "1")[1]) == starts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_whoever_is_told_to_stop_saves_and_stays_away(number: int) -> None:
    before = signal.getsignal(number)
    plan = [{"begins": True, "tells": number, "status": EXIT_INTERRUPTED}]
    assert run(plan, "--max-restarts", "1") == (EXIT_INTERRUPTED, [started()])
    assert signal.getsignal(number) == before


def test_before_the_ranks_hear_signals_they_are_ended() -> None:
    """SIGUSR1 would only kill them."""
    assert run([{"tells": signal.SIGINT, "status": 0}], "--max-restarts", "1") == (128 + signal.SIGINT, [started()])
    assert not Path("heard").exists()


def test_more_words_for_the_launcher(tmp_path: Path) -> None:
    """They stand before its own: here it is Python that takes them."""
    stub = tmp_path / "stub.py"
    stub.write_text(stub.read_text().replace("starts =", "Path('mode').write_text(str(sys.flags.dev_mode)); starts =", 1))
    run([{"begins": True, "ends": True, "status": 0}], "--launcher-args", "-X dev")
    assert Path("mode").read_text() == "True"
