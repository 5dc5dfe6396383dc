"""An array under Flux, which has none: the script is queued once for each element."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli import submit
from mpisgd.site import launchers

#: It gives the numbers f31, f32, ..., and notes its words; it refuses the one that it is told to.
FLUX = """\
#!/bin/bash
cat >"$0.script"
echo "$@" >>"$0.called"
count=$(wc -l <"$0.called")
if [[ $count == "${REFUSED-}" ]]; then echo "flux-batch: ERROR: queue is stopped" >&2; exit 1; fi
echo "ƒ3$count"
"""


@pytest.fixture(autouse=True)
def flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("")
    program = tmp_path / "bin" / "flux"
    program.parent.mkdir()
    program.write_text(FLUX)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(launchers, "library_of", lambda python: "")
    return program


def called(flux: Path) -> list[str]:
    return Path(f"{flux}.called").read_text().splitlines()


PROTOCOLS = ["--array", "hardsync", "softsync --protocol.n 2", "allreduce"]
ARRAY = ["job.toml", "--system", "flux", "--shards", "2", "--learners", "4", *PROTOCOLS]


def test_each_element_is_a_job_that_knows_its_number_and_that_of_the_first(flux: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(ARRAY) == 0
    assert capsys.readouterr().out == "jobs f31 f32 f33: 6 ranks on 1 nodes; runs go to results/mpisgd-f31-*\n"
    assert called(flux) == [
        "batch --env=ARRAY_INDEX=1",
        "batch --env=ARRAY_INDEX=2 --env=ARRAY_JOB=f31",
        "batch --env=ARRAY_INDEX=3 --env=ARRAY_JOB=f31",
    ]
    assert submit.main([*ARRAY, "--dry-run"]) == 0
    assert capsys.readouterr().out == Path(f"{flux}.script").read_text()


def test_where_one_is_refused_those_that_are_queued_are_named(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "3")
    said = "element 3 of 3: flux refuses: flux-batch: ERROR: queue is stopped; queued before this, and still there: f31 f32"
    with pytest.raises(ConfigError) as refused:
        submit.main(ARRAY)
    assert str(refused.value) == said
    monkeypatch.setenv("REFUSED", "4")
    with pytest.raises(ConfigError, match=r"^element 1 of 3: flux refuses: flux-batch: ERROR: queue is stopped$"):
        submit.main(ARRAY)


def test_a_job_alone_is_one(flux: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["job.toml", "--system", "flux", "--learners", "4"]) == 0
    assert capsys.readouterr().out.startswith("job f31: ")
    assert called(flux) == ["batch"]


GPUS = ["--system", "flux", "--nodes", "2", "--gpus-per-node", "2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["job.toml", *GPUS, "--shards", "2", "--learners", "4", *PROTOCOLS],
            "array = 'allreduce': expected no allreduce with flux and GPUs",
        ),
        (["job.toml", "--system", "flux", "--learners", "4", "--chain"], "chain = True: expected none with Flux"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_is_queued(words: list[str], said: str, flux: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        submit.main(words)
    assert not Path(f"{flux}.called").exists()
