"""Opening somebody's run executes nothing of theirs: what its config.toml names is imported only where the user says so."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mpisgd
from mpisgd import replay
from mpisgd.api import train
from mpisgd.base.errors import ConfigError
from mpisgd.base.imports import file_of
from mpisgd.cli import simulate as simulate_command
from mpisgd.cli import train as train_command
from mpisgd.cli.reading import compare as compare_command
from mpisgd.cli.reading import plan as plan_command
from mpisgd.cli.reading import replay as replay_command
from mpisgd.cli.reading import report as report_command
from mpisgd.cli.reading import timeline as timeline_command
from mpisgd.config import Config, config_file, trust
from mpisgd.config.config_file import from_mapping
from mpisgd.job.parts import UserObjects
from mpisgd.plan.costs.fit import fit
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.forge import unsealed
from tests.virtual.jobs import TENSORS, simulated

#: Whatever is imported or called of it leaves a file behind, where it is run.
THEIRS = """
from pathlib import Path
Path("executed").write_text("by import")
def called(*args, **kwargs):
    Path("executed").write_text("by call")
    return 1.0
"""
SOFTSYNC = {"name": "softsync", "n": 2}
#: What a stranger's config.toml has in place of the run's own: model, data, loss, weights of stale gradients.
NAMED = {
    "model": ("model", {"name": "custom", "factory": "theirs:called", "kwargs": {"command": "true"}}),
    "data": ("data", {"name": "custom", "factory": "theirs:called", "kwargs": {}}),
    "loss": ("loss", "theirs:called"),
    "modulation": ("protocol", {**SOFTSYNC, "modulation": "theirs:called"}),
    "protocol": ("protocol", {"name": "custom", "factory": "theirs:called", "kwargs": {}}),
    "schedule": ("schedule", {"name": "custom", "factory": "theirs:called", "kwargs": {}}),
    "package": ("model", {"name": "custom", "factory": "theirs_too.below:called", "kwargs": {}}),
    "system": ("model", {"name": "custom", "factory": "os:system", "kwargs": {"command": "touch executed"}}),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trust") / "run"
    simulated(path, TENSORS, protocol=SOFTSYNC)
    return path


@pytest.fixture
def stranger(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A run whose config.toml names these, in a directory where their modules can be imported, which is the present one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "theirs_too").mkdir()
    (tmp_path / "theirs_too" / "__init__.py").write_text(THEIRS)
    (tmp_path / "theirs_too" / "below.py").write_text(THEIRS)

    def make(*names: str, done: bool = True) -> Path:
        path = tmp_path / "run"
        shutil.copytree(honest, path)
        table = config_file.tomllib.loads(unsealed((path / schema.CONFIG).read_text()))
        for field, value in (NAMED[name] for name in names):
            table[field] = value
            if field in ("model", "data"):
                user_objects = {"object": value["factory"], "qualified_name": "called", "file": "", "sha256": "0" * 64}  # type: ignore[call-overload, index]
                table["environment"].setdefault("brought", {})[field] = user_objects
        (path / schema.CONFIG).write_text(config_file.tomli_w.dumps(table))
        if not done:
            (path / schema.DONE).unlink()
        return Path("run")

    yield make
    for module in ("theirs", "theirs_too", "theirs_too.below"):
        sys.modules.pop(module, None)


def executed() -> bool:
    return Path("executed").exists()


ALL = ("model", "data", "loss", "modulation")


@pytest.mark.parametrize("name", NAMED)
def test_replay_imports_nothing_that_a_run_names(name: str, stranger: Callable[..., Path]) -> None:
    run = stranger(name)
    with pytest.raises(ConfigError, match=r"run names code to import and call here as yours \(nothing imported or called yet\)"):
        replay_command.main([str(run)])
    with pytest.raises(ConfigError, match="run names code"):
        replay.replay(run)
    with pytest.raises(ConfigError, match="run names code"):
        replay.check(run)
    assert not executed()


@pytest.mark.parametrize("name", NAMED)
def test_a_run_does_not_go_on_with_what_it_names(name: str, stranger: Callable[..., Path]) -> None:
    run = stranger(name, done=False)
    with pytest.raises(ConfigError, match="run names code"):
        train_command.main(["--resume", str(run)])
    with pytest.raises(ConfigError, match="run names code"):
        train(resume=run)
    assert not executed()


@pytest.mark.parametrize("name", NAMED)
def test_the_configuration_that_a_run_wrote_is_no_job_file(name: str, stranger: Callable[..., Path]) -> None:
    file = stranger(name) / schema.CONFIG
    for command in (train_command, simulate_command):
        with pytest.raises(ConfigError, match=r"config\.toml names code"):
            command.main([str(file), "--out", "mine"])
    with pytest.raises(ConfigError, match=r"config\.toml names code"):
        train(config=file)
    assert not executed()
    assert config_file.read(file) == trust.read(file, trusting=True)


def test_a_plan_calls_no_weights_of_a_strangers(stranger: Callable[..., Path]) -> None:
    run = stranger(*ALL)
    with pytest.raises(ConfigError, match=r"protocol\.modulation = 'theirs:called', from module 'theirs', .*theirs\.py") as refused:
        plan_command.main([str(run), "--pushes", "200"])
    assert "model" not in str(refused.value), "which no plan builds"
    with pytest.raises(ConfigError, match="names code"):
        fit(Run(run))
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match=r"schedule\.factory = 'theirs:called', from module 'theirs', "):
        fit(Run(stranger("schedule")))
    assert not executed()


@pytest.mark.usefixtures("nothing_drawn")
def test_a_plan_builds_no_model_and_reads_no_data(stranger: Callable[..., Path]) -> None:
    assert plan_command.main([str(stranger("model", "data", "loss")), "--pushes", "100", "--learners", "4"]) == 0
    assert not executed()


@pytest.mark.usefixtures("nothing_drawn")
def test_reports_import_nothing(stranger: Callable[..., Path]) -> None:
    run = str(stranger(*ALL, "package", "system"))
    assert (report_command.main([run]), timeline_command.main([run])) == (0, 0)
    assert compare_command.main([run, run, "--out", "both"]) == 0
    assert not executed()


def test_the_message_lists_names_files_and_arguments(stranger: Callable[..., Path], tmp_path: Path) -> None:
    run = stranger("package", "data", "loss")
    with pytest.raises(ConfigError) as refused:
        replay.replay(run)
    lines = str(refused.value).splitlines()
    assert f"  model.factory = 'theirs_too.below:called', from module 'theirs_too.below', {tmp_path}/theirs_too/below.py" in lines
    assert f"  data.factory = 'theirs:called', from module 'theirs', {tmp_path / 'theirs.py'}" in lines
    assert lines[-1] == "if you trust this code, say so by --trust (in Python: trust=True)", "objects are told otherwise"
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match=r"'os:system' called with \{'command': 'touch executed'\}, from module 'os' of Python"):
        replay.replay(stranger("system"))
    assert not executed()


def test_where_a_module_is_is_found_without_importing_the_package(stranger: Callable[..., Path], tmp_path: Path) -> None:
    stranger()
    assert file_of("theirs_too.below") == str(tmp_path / "theirs_too" / "below.py")
    assert file_of("theirs_too") == str(tmp_path / "theirs_too" / "__init__.py")
    assert [file_of(name) for name in ("nowhere", "nowhere.at.all", "theirs.below", "", ".", "a..b")] == [""] * 6
    assert not executed()
    assert str(tmp_path) not in sys.path


# ------------------------------------------------------------------------------------------------------------- consent

MINE = """
from torch import nn, randn, arange
def model():
    return nn.Linear(6, 3)
def data():
    return (randn(120, 6), arange(120) % 3), (randn(30, 6), arange(30) % 3)
def loss(output, target):
    return nn.functional.cross_entropy(output, target)
def weight(tau, clock):
    return 1 / (1 + tau)
def rate(epochs):
    return 1 / (1 + epochs)
"""
NAMES = {"model": "mine:model", "data": "mine:data", "loss": "mine:loss", "schedule": "mine:rate"}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with parts of my own, all by name, in the present directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    parts = {part: name if part == "loss" else {"name": name} for part, name in NAMES.items()}
    simulated(tmp_path / "run", TENSORS, protocol={**SOFTSYNC, "modulation": "mine:weight"}, epochs=0.4, **parts)
    return Path("run")


def test_ones_own_run_is_replayed_where_one_says_so(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_command.main([str(mine), "--trust"]) == 0
    assert replay.replay(mine, trust=True).holds
    words = [word for part, name in NAMES.items() for word in (f"--{part}", name)]
    with pytest.raises(ConfigError) as refused:
        replay_command.main([str(mine), *words])
    assert [line for line in str(refused.value).splitlines() if " = " in line] == [
        f"  protocol.modulation = 'mine:weight', from module 'mine', {Path('mine.py').absolute()}"
    ]


def test_what_is_brought_is_consented_to(mine: Path) -> None:
    import mine as own  # type: ignore[import-not-found]

    simulated(Path("plain"), TENSORS, protocol=SOFTSYNC, epochs=0.4, **{part: {"name": NAMES[part]} for part in ("model", "data")})
    assert replay.replay("plain", UserObjects(model=own.model, data=own.data)).holds
    assert replay.replay("plain", UserObjects(model=own.model), named={"data": "mine:data"}).holds
    with pytest.raises(
        ConfigError, match=r"(?s)data\.factory = 'mine:data'.*alone:\n.*mpisgd replay .*--model mine:model --data mine"
    ):
        replay.replay("plain", UserObjects(model=own.model))
    with pytest.raises(ConfigError, match=r"model\.factory = 'mine:model'"):
        replay.replay("plain", named={"data": "mine:data"})


def consents(words: list[str], job: str | None = None) -> bool:
    try:
        trust.check_resumed(Path("run"), words, {} if job is None else trust.names_of(trust.read(job)))
    except ConfigError:
        return False
    return True


def test_what_the_command_line_of_a_resumption_names(mine: Path) -> None:
    full = [*(word for part, name in NAMES.items() for word in (f"--{part}", name)), "--protocol.modulation", "mine:weight"]
    assert consents(full)
    assert consents([f"{option}={name}" for option, name in zip(full[::2], full[1::2], strict=True)])
    assert consents(["--model.factory", "mine:model", "--data.factory=mine:data", *full[4:]])
    for missing in range(0, len(full), 2):
        assert not consents([*full[:missing], *full[missing + 2 :]]), full[missing]
    assert not consents(["--data-dir", *full[1:]]), "an option that names no code"
    assert not consents(["--model", "mine:other", *full[2:]])
    job = {"protocol": {**SOFTSYNC, "modulation": "mine:weight"}, **NAMES}
    Path("job.toml").write_text(config_file.tomli_w.dumps(job))
    assert consents([], "job.toml")
    Path("job.toml").write_text(config_file.tomli_w.dumps(job | {"loss": "mine:other"}))
    assert not consents([], "job.toml")
    assert consents(["--loss", "mine:loss"], "job.toml")
    with pytest.raises(ConfigError, match=r"config\.toml names code"):
        trust.check_resumed(mine, [], trust.names_of(trust.read(mine / schema.CONFIG)))  # a run's file is no job file


def test_the_line_that_a_resumption_prints_is_valid(mine: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        trust.check_resumed(mine, [], {})
    line = str(refused.value).splitlines()[-1]
    assert line == trust.resume_line(mine, config_file.of_run(mine))
    words = line.split()
    assert words[:4] == ["mpisgd", "train", "--resume", "run"]
    assert consents(words[4:])
    from mpisgd.cli.options import parse

    assert parse(words[4:], "mpisgd train", config_file.of_run(mine))[0] == config_file.of_run(mine), "nothing else changes by it"


def test_what_cannot_be_a_name_is_not_printed_to_be_copied(mine: Path) -> None:
    config = from_mapping({"loss": "mine:loss; touch executed"})
    with pytest.raises(ConfigError) as refused:
        trust.check(mine, config, {}, "a line")
    assert "a line" not in str(refused.value)
    assert "'mine:loss; touch executed'" in str(refused.value)


def nodes_of(words: str) -> Iterator[tuple[Path, ast.AST]]:
    """All nodes of the files of the package in which one of these words stands, a regular expression."""
    for path in Path(mpisgd.__file__).parent.rglob("*.py"):
        if re.search(rf"\b(?:{words})\b", text := path.read_text()):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


def test_all_that_imports_by_name_is_known_here() -> None:
    """Whoever adds a field that is imported finds this test: the callers of `load_attribute` are those that need consent."""
    fields = set()
    for path, node in nodes_of("load_attribute|import_module|find_spec|exec_module"):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "load_attribute":
            assert isinstance(node.args[1], ast.Constant), path
            fields.add(node.args[1].value)
        imported = isinstance(node, ast.Attribute) and node.attr in ("import_module", "find_spec", "exec_module")
        assert not imported or path.name in (
            "imports.py",
            "__main__.py",
            "digits.py",
            "__init__.py",
            "called.py",
            "loggers.py",  # modules of a table
            "function.py",
        ), path
    assert fields == set(trust.OPTIONS)


def test_nothing_is_unpickled() -> None:
    """But what `launch` sends to ranks of its own, in a directory that only its user can read, and ranks in a job's memory."""
    seen = 0
    for path, node in nodes_of("load|loads|eval|exec"):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name == "torch.load":
            seen += 1
            assert any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords), path  # type: ignore[attr-defined]
        sent = name == "pickle.loads" and (path.parent.name == "launching" or path.name == "on_gpu.py")
        assert sent or name not in ("pickle.load", "pickle.loads", "np.load", "eval", "exec", "joblib.load"), path
    assert seen


@pytest.mark.slow
def test_the_same_from_a_shell(stranger: Callable[..., Path]) -> None:
    """The whole way, in a process of its own: status 2, and no marker."""
    run = stranger("model", done=False)
    for words in (["replay", str(run)], ["train", "--resume", str(run)]):
        command = [sys.executable, "-m", "mpisgd", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 2, done.stderr
        assert "names code" in done.stderr
        assert not executed()


def test_own_names_of_a_configuration() -> None:
    assert trust.names_of(Config()) == {}
    assert trust.names_of(from_mapping({"protocol": {**SOFTSYNC, "modulation": "exponential:0.5"}, "model": "softmax"})) == {}
