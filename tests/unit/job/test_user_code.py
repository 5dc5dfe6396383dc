"""What the user brought is said under its own name, with its file and commit; and replay gets it again (DESIGN 6, law 6)."""

from __future__ import annotations

import functools
import hashlib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mpisgd import replay
from mpisgd.__main__ import main
from mpisgd.analysis.about import header, status
from mpisgd.api import train
from mpisgd.base import imports
from mpisgd.base.errors import ConfigError
from mpisgd.base.git import Commit, commit_of, commit_of_package
from mpisgd.config import Config, CustomModelOptions, replace
from mpisgd.job import user_code
from mpisgd.job.parts import UserObjects
from mpisgd.records.log.reader import Run
from mpisgd.replay.user_objects import line


def make_model() -> nn.Module:
    return nn.Linear(5, 3)


class Holder:
    @staticmethod
    def make() -> nn.Module:
        return make_model()

    @classmethod
    def of_class(cls) -> nn.Module:
        return make_model()

    def own(self) -> nn.Module:
        return make_model()


def local() -> Any:
    def inner() -> nn.Module:
        return make_model()

    return inner


HERE = __name__


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (make_model, f"{HERE}:make_model"),
        (Holder, f"{HERE}:Holder"),
        (Holder.make, f"{HERE}:Holder.make"),
        (Holder.of_class, f"{HERE}:Holder.of_class"),
        (nn.Linear, "torch.nn.modules.linear:Linear"),
        (Holder().own, ""),
        (lambda: make_model, ""),
        (local(), ""),
        (functools.partial(make_model), ""),
        (nn.CrossEntropyLoss(), ""),
        ((1, 2), ""),
    ],
)
def test_the_name_by_which_an_object_can_be_imported(value: Any, spec: str) -> None:
    assert user_code.spec_of(value) == spec
    if spec:
        assert imports.load_attribute(spec, "x") == value


def test_a_function_that_another_one_hides_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorator may keep the name of what it wraps: the module has another object under it."""

    @functools.wraps(make_model)
    def wrapped() -> nn.Module:
        return make_model()

    assert user_code.spec_of(wrapped) == ""


def test_the_configuration_names_what_was_brought() -> None:
    named = user_code.with_user_objects(Config(), UserObjects(make_model, nn.functional.mse_loss, Holder.make))
    assert named.model == CustomModelOptions(factory=f"{HERE}:make_model")
    assert named.data.factory == f"{HERE}:Holder.make"  # type: ignore[union-attr]
    assert named.loss == "mse_loss"
    unnamed = user_code.with_user_objects(Config(), UserObjects(lambda: None, nn.CrossEntropyLoss(), ((1, 2), None)))
    assert (unnamed.model, unnamed.data.factory, unnamed.loss) == (CustomModelOptions(), "", "custom")  # type: ignore[union-attr]
    assert user_code.with_user_objects(Config(), UserObjects()) == Config()


def test_file_and_checksum() -> None:
    sha256 = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    own = {"module": HERE, "file": str(Path(__file__).absolute()), "sha256": sha256}
    found = user_code.described(Config(), UserObjects(make_model, nn.functional.mse_loss, lambda: None))
    assert found["model"] == {"object": f"{HERE}:make_model", "qualified_name": "make_model", **own}
    assert found["data"] == {"object": "", "qualified_name": "test_file_and_checksum.<locals>.<lambda>", **own}
    assert "loss" not in found
    by_name = user_code.described(replace(Config(), model=CustomModelOptions(factory=f"{HERE}:make_model")), UserObjects())
    assert by_name == {"model": found["model"]}
    instance = user_code.described(Config(), UserObjects(loss=nn.CrossEntropyLoss()))["loss"]
    assert (instance["object"], instance["qualified_name"]) == ("", "an instance of CrossEntropyLoss")


# -------------------------------------------------------------------------------------------------------------------- git


def git(directory: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *own, *words], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_commit_and_whether_it_is_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) == Commit("", dirty=False)
    git(tmp_path, "init")
    (tmp_path / "mine.py").write_text("1\n")
    (tmp_path / "sub").mkdir()
    git(tmp_path, "add", "mine.py")
    git(tmp_path, "commit", "-m", "one")
    name = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "results").write_text("not tracked, and nobody's code\n")
    for directory in (tmp_path, tmp_path / "sub"):
        assert commit_of(directory, [tmp_path / "mine.py"]) == Commit(name, dirty=False)
    (tmp_path / "other.py").write_text("1\n")
    assert commit_of(tmp_path, [tmp_path / "mine.py", tmp_path / "other.py"]) == Commit(name, dirty=True)
    assert commit_of(tmp_path, [tmp_path / "mine.py", Path(__file__)]) == Commit(name, dirty=False)
    (tmp_path / "mine.py").write_text("2\n")
    assert commit_of(tmp_path) == Commit(name, dirty=True)


def test_a_package_that_is_installed_in_somebodys_repository_is_not_of_it(tmp_path: Path) -> None:
    git(tmp_path, "init")
    package = tmp_path / "venv" / "mpisgd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "mine.py").write_text("")
    git(tmp_path, "add", "mine.py")
    git(tmp_path, "commit", "-m", "one")
    assert commit_of_package(package) == Commit("", dirty=False)
    git(tmp_path, "add", "venv")
    git(tmp_path, "commit", "-m", "two")
    assert commit_of_package(package) == Commit(git(tmp_path, "rev-parse", "HEAD"), dirty=False)


# ----------------------------------------------------------------------------------------------------------------- replay

SCRIPT = """
import torch
from torch import nn
from mpisgd.config.config_file import from_mapping
from mpisgd.job.parts import UserObjects
from mpisgd.simulate import simulate

def make_model():
    return nn.Linear(5, 3)

class Noisy:
    classes = 3
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return torch.randn(5) + index % 3, index % 3

def make_data(seed):
    assert seed == 5
    return Noisy(), Noisy()

def my_loss(output, target):
    return nn.functional.cross_entropy(output, target) * 0.5

COMMON = {"mu": 4, "epochs": 1, "seed": 5, "virtual": {"learners": 2}, "threads": 1, "log": {"progress": "off"}}
if __name__ == "__main__":
    simulate(from_mapping({"out": "named", **COMMON}), UserObjects(make_model, my_loss, make_data))
    objects = UserObjects(lambda: nn.Linear(5, 3), nn.CrossEntropyLoss(), (Noisy(), None))
    simulate(from_mapping({"out": "unnamed", **COMMON}), objects)
"""
ROOT = Path(__file__).parents[3]


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, shell=True, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Start a script, in a directory of its own, as Python does."""
    directory = tmp_path_factory.mktemp("a place")
    (directory / "scripts").mkdir()
    (directory / "scripts" / "mine.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        runpy.run_path(str(directory / "scripts" / "mine.py"), run_name="__main__")
    return directory


@pytest.mark.slow
def test_replay_says_the_line_that_brings_a_scripts_objects_again(
    scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert main(["replay", str(scripted / "named")]) == 2
    refused = capsys.readouterr().err
    assert "model.factory = 'mine:make_model', from module 'mine', without a file here" in refused
    said = [each for each in refused.splitlines() if "mpisgd replay /" in each or "mpisgd replay '/" in each]
    assert len(said) == 1
    proven = shell(said[0], tmp_path)
    assert proven.returncode == 0, proven.stdout + proven.stderr
    assert "identical: theta, 18 parameters, bit for bit" in proven.stdout
    assert main(["replay", str(scripted / "named"), "--trust"]) == 2
    trusted = capsys.readouterr().err
    assert "there is no module 'mine' in" in trusted
    assert said[0] in trusted


@pytest.mark.slow
def test_what_has_no_name_is_said_to_have_none(scripted: Path, tmp_path: Path) -> None:
    path = scripted / "unnamed"
    with pytest.raises(
        ConfigError, match=r"the model was <lambda>; the data was an instance of tuple; the loss was an instance of C"
    ):
        replay.replay(path)
    table = dict(header(Run(path), status(Run(path)), "").rows)
    assert table["model"].startswith("<lambda> of mine, not importable by a name (")
    assert table["loss"].startswith("an instance of CrossEntropyLoss of torch.nn.modules.loss, not importable")
    assert Run(path).config["loss"] == "custom"
    command = (
        line(Run(path)).replace("--model MODULE:NAME", "--model named:model").replace("--data MODULE:NAME", "--data named:data")
    )
    command = command.replace("--loss MODULE:NAME", "--loss torch.nn.functional:cross_entropy")
    (scripted / "named.py").write_text(
        "import sys; sys.path.append('scripts'); from mine import *\nmodel, data = make_model, lambda: (Noisy(), None)\n"
    )
    proven = shell(command, tmp_path)
    assert "identical: theta, 18 parameters, bit for bit" in proven.stdout, proven.stderr


def test_the_report_repeats_what_was_brought(scripted: Path) -> None:
    run = Run(scripted / "named")
    table = dict(header(run, status(run), "").rows)
    file = scripted / "scripts" / "mine.py"
    from_there = f"({file}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]})"
    assert table["model"] == f"mine:make_model {from_there}, 18 parameters"
    assert table["data"] == f"mine:make_data {from_there}, 60 training samples"
    assert table["loss"] == f"mine:my_loss {from_there}"


def test_a_module_that_has_changed_since_is_named(scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace("* 0.5", "* 0.25"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    proof = replay.replay(scripted / "named", trust=True)
    monkeypatch.delitem(sys.modules, "mine")
    assert not proof.holds
    assert any(f"{tmp_path / 'mine.py'} is not the file of the run: the sha256 was" in note for note in proof.notes)


def test_a_script_that_trains_as_it_is_imported_is_told_to_guard_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unguarded.py").write_text("import mpisgd\ndef make_model(): ...\nmpisgd.train(model=make_model)\n")
    monkeypatch.chdir(tmp_path)
    message = "importing module unguarded failed with ConfigError: mpisgd.train.. is called as module unguarded is imported: put"
    with pytest.raises(ConfigError, match=message):
        imports.load_attribute("unguarded:make_model", "model.factory")
    with pytest.raises(ConfigError, match="cannot be read"):  # called by itself, it looks at its configuration
        train(config=tmp_path / "none.toml")
