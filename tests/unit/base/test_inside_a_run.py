"""Commands that are called inside a stranger's run run nothing of what lies there: modules, git's hooks and filters, latex."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpisgd.base.git import Commit, commit_of
from tests.traps import MARKER, git, set_traps
from tests.virtual.jobs import TENSORS, simulated


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "run"
    simulated(path, TENSORS, protocol={"name": "softsync", "n": 2})
    return path


@pytest.fixture
def inside(theirs: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls a program in a copy of the run, with traps."""
    run = tmp_path / "run"
    shutil.copytree(theirs, run)
    set_traps(run, tmp_path / MARKER)

    def call(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("mpisgd")), *words]
        return subprocess.run(command, cwd=run, capture_output=True, text=True, timeout=timeout, check=False)

    return call


COMMANDS = {
    "report": ("report", ".", "--out", "../out"),
    "compare": ("compare", ".", ".", "--out", "../out"),
    "timeline": ("timeline", ".", "--out", "../out.json"),
    "plan": ("plan", ".", "--out", "../out", "--pushes", "500"),
    "replay": ("replay", "."),
    "export": ("export", ".", "../weights.pt"),
    "doctor": ("doctor",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_that_lies_in_a_run_is_executed(
    name: str, inside: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = inside(*COMMANDS[name])
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / MARKER).exists()


def test_the_traps_are_traps(tmp_path: Path) -> None:
    """Python and git as they are run what lies where they are called."""
    (tmp_path / "config.toml").write_text("epochs = 1\n")
    set_traps(tmp_path, tmp_path / MARKER)
    subprocess.run([sys.executable, "-c", "import json"], cwd=tmp_path, check=False)
    assert (tmp_path / MARKER).exists()
    for trap in ("core.fsmonitor", "filter.theirs.clean"):
        (tmp_path / MARKER).unlink(missing_ok=True)
        again = tmp_path / trap
        again.mkdir()
        (again / "config.toml").write_text("epochs = 1\n")
        (again / ".gitattributes").write_text("*.toml filter=theirs\n")
        git(again, "init")
        git(again, "add", ".")
        git(again, "commit", "-m", "one")
        git(again, "config", trap, f"touch {tmp_path / MARKER}; cat")
        os.utime(again / "config.toml", (1, 1))
        assert commit_of(again).name
        assert not (tmp_path / MARKER).exists()
        subprocess.run(["git", "status"], cwd=again, capture_output=True, check=False)
        assert (tmp_path / MARKER).exists(), trap


@pytest.mark.parametrize("name", ["evil", "Evil=x", "two words", "a.b"])
def test_a_repositorys_own_filters_are_off(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1\n")
    (tmp_path / ".gitattributes").write_text(f"*.py filter={name}\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "config", f"filter.{name}.clean", f"touch {tmp_path / MARKER}; cat")
    os.utime(tmp_path / "mine.py", (1, 1))
    assert commit_of(tmp_path).dirty == ("=" in name), "such a name cannot be given to git"
    assert not (tmp_path / MARKER).exists()


def test_no_object_is_fetched(tmp_path: Path) -> None:
    """A partial clone lacks objects; its remote names the command that brings them."""
    (tmp_path / "mine.py").write_text("1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "config", "remote.origin.url", f"ext::sh -c touch% {tmp_path / MARKER}")
    git(tmp_path, "config", "remote.origin.promisor", "true")
    git(tmp_path, "config", "protocol.ext.allow", "always")
    git(tmp_path, "config", "extensions.partialClone", "origin")
    tree = subprocess.run(
        ["git", "rev-parse", "HEAD^{tree}"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.strip()
    (tmp_path / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    subprocess.run(["git", "status"], cwd=tmp_path, capture_output=True, check=False)
    assert (tmp_path / MARKER).exists(), "git itself fetches"
    (tmp_path / MARKER).unlink()
    assert commit_of(tmp_path) != Commit("", dirty=False)
    assert not (tmp_path / MARKER).exists()
