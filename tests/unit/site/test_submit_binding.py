"""How ranks are bound to cores: what each launcher is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli import submit
from mpisgd.site import launchers
from tests.effort import spread


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("")
    monkeypatch.setattr(launchers, "library_of", lambda python: "")


def script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert submit.main(["job.toml", "--learners", "8", "--threads", "4", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


#: System and launcher -> what is asked for by none, by cores, and where nobody asks.
ASKED = {
    "slurm": ("--bind-to none", '--map-by slot:PE="$OMP_NUM_THREADS" --bind-to core', "--bind-to none"),
    "lsf": ("--bind-to none", '--map-by slot:PE="$OMP_NUM_THREADS" --bind-to core', "--bind-to none"),
    "pbs": ("--bind-to none", '--map-by slot:PE="$OMP_NUM_THREADS" --bind-to core', "--bind-to none"),
    "slurm --launcher srun-pmix": ("--cpu-bind=none", "--cpu-bind=cores", ""),
    "slurm --launcher srun-pmi2": ("--cpu-bind=none", "--cpu-bind=cores", ""),
    "slurm --launcher srun-cray": ("--cpu-bind=none", "--cpu-bind=cores", ""),
    "pbs --launcher aprun": ("-cc none", "-cc depth", "-cc depth"),
    "pbs --launcher mpiexec.hydra": ("-bind-to none", '-bind-to core:"$OMP_NUM_THREADS"', ""),
    "flux": ("-o cpu-affinity=off", "-o cpu-affinity=per-task", ""),
    "jsrun --nodes 2 --gpus-per-node 4 --shards 2": (
        "--bind none",
        '--bind packed:"$OMP_NUM_THREADS"',
        '--bind packed:"$OMP_NUM_THREADS"',
    ),
}
BINDS = re.compile(r"--map-by \S+ --bind-to core|-?-bind-to \S+|--cpu-bind=\w+|-cc \w+|--bind \S+|-o cpu-affinity=[\w-]+")


@pytest.mark.parametrize("system", spread(ASKED, 3))
def test_what_the_launcher_is_asked_for(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    none, each, unasked = ASKED[system]
    for binding, expected in (("none", none), ("cores", each), ("roles", none), ("", unasked)):
        words = ["--system", *system.split(), *(["--binding", binding] if binding else [])]
        text = script(capsys, *words)
        launch = re.findall(r"launch=\((.*?)\)\n", text, re.DOTALL)[0]
        assert BINDS.findall(launch) == ([expected] if expected else []), (binding, launch)
        assert ("train+=(--binding roles)" in text) == (binding == "roles")


@pytest.mark.parametrize("system", spread(["slurm", "pbs", "lsf", "flux"], 3))
def test_whole_nodes_are_shared_out_by_role(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "train+=(--binding roles)" in script(capsys, "--system", system, "--exclusive")
    assert "--binding roles" not in script(capsys, "--system", system, "--exclusive", "--binding", "cores").partition("set -euo")[2]


def test_every_launcher_can_be_asked_for_both() -> None:
    assert [name for name, each in launchers.LAUNCHERS.items() if each.binds.keys() != {"none", "cores"}] == []


def test_by_run_a_rank_of_aprun_has_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aprun").write_text("#!/bin/sh\n")
    (tmp_path / "aprun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launchers.by_run("aprun", 3)[-2:] == ["-cc", "depth"]


def test_a_template_of_ones_own_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own").write_text("@{directives}\n@{launch} @{train}\n")
    text = script(capsys, "--template", "own", "--binding", "roles")
    assert "mpirun -n 9 -x OMP_NUM_THREADS --bind-to none mpisgd train" in text
    assert text.splitlines()[-1].endswith(" --binding roles")


def test_another_word_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "mpisgd" / "sites"
    settings.mkdir(parents=True)
    (settings / "here.toml").write_text('binding = "socket"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"binding = 'socket': expected one of: none, cores, roles"):
        submit.main(["job.toml", "--site", "here", "--learners", "2", "--dry-run"])
