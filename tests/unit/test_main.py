"""`mpisgd COMMAND`: what the shell sees, the exit status, and that 65 ranks do not say everything 65 times."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from mpisgd import __main__ as entry
from mpisgd.__main__ import COMMANDS, main, module_of
from mpisgd.base.errors import ConfigError, DataError, MpisgdError, PeerError
from mpisgd.base.version import __version__
from mpisgd.liveness import guard
from mpisgd.liveness.guard import AgreedError


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves run inside a batch job."""
    for name in (*guard.SIZE_VARIABLES, *guard.RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[0, 3])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(request.param))
    return int(request.param)


@pytest.mark.parametrize(
    ("words", "status", "out", "err"),
    [
        ([], 2, "usage: mpisgd COMMAND", ""),
        (["--help"], 0, "usage: mpisgd COMMAND", ""),
        (["-h"], 0, "usage: mpisgd COMMAND", ""),
        (["--version"], 0, __version__, ""),
        (["trian"], 2, "", "mpisgd: unknown command 'trian'; did you mean 'train'?"),
        (["xyzzy", "--mu", "4"], 2, "", "mpisgd: unknown command 'xyzzy'; expected one of: bench, compare"),
        (
            ["train", "--protocol", "x"],
            2,
            "",
            "mpisgd train: ConfigError: protocol = 'x' is unknown; expected one of: allreduce, async",
        ),
    ],
)
def test_what_is_said_is_said_once(
    words: list[str], status: int, out: str, err: str, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    told = capsys.readouterr()
    if rank:
        assert told == ("", "")
    else:
        assert told.out.startswith(out)
        assert bool(told.out) is bool(out)
        assert told.err.startswith(err)
        assert bool(told.err) is bool(err)


def test_the_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    told = capsys.readouterr().out
    assert all(f"  {command} " in told for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there(command: str) -> None:
    assert importlib.util.find_spec(module_of(command)) is not None


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("mu = 0"), 2, "mpisgd report: ConfigError: mu = 0\n"),
        (DataError("no file"), 2, "mpisgd report: DataError: no file\n"),
        (PeerError("rank 3"), 1, "mpisgd report: PeerError: rank 3\n"),
        (AgreedError("rank 1: DataError: no file", 2), 2, "mpisgd report: rank 1: DataError: no file\n"),
    ],
)
def test_errors_become_one_line_and_an_exit_status(
    error: MpisgdError, status: int, text: str, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        assert words == ["--a", "b"]
        raise error

    stub(monkeypatch, fail)
    assert main(["report", "--a", "b"]) == status
    assert capsys.readouterr().err == ("" if rank else text)


def test_a_commands_own_status_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, lambda words: 7)
    assert main(["report"]) == 7


def test_a_bug_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, lambda words: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["report"])


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        (["--version"], []),
        (["trian"], [(2, "")]),
        (["train", "--mus", "4"], [(2, "")]),
        (["train", "nowhere.toml"], [(2, "ConfigError: configuration file 'nowhere.toml' cannot be read: ")]),
    ],
)
def test_ranks_that_refuse_leave_together_and_know_why(
    words: list[str], ended: list[tuple[int, str]], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends a job at the first rank that fails: not before rank 0 has told what is wrong."""
    left: list[tuple[int, str]] = []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")

    def leave(status: int, reason: str) -> int:
        left.append((status, reason))
        return 77

    monkeypatch.setattr(entry, "leave_together", leave)
    assert main(words) == (77 if ended else 0)
    assert [(status, reason.split("[Errno")[0]) for status, reason in left] == ended


def stub(monkeypatch: pytest.MonkeyPatch, action: Callable[[list[str]], int]) -> None:
    module = types.ModuleType("mpisgd.cli.reading.report")
    module.main = action  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpisgd.cli.reading.report", module)


def test_python_dash_m_is_the_same_program() -> None:
    command = [sys.executable, "-m", "mpisgd", "trian"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mpisgd: unknown command 'trian'; did you mean 'train'?\n"


IN_A_DESTRUCTOR = """
import signal, sys, time, types

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have taken from what it runs behind it

class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def busy(words):
    Last()
    time.sleep(100)
    return 0

sys.modules["mpisgd.cli.demo"] = types.SimpleNamespace(main=busy)
from mpisgd.__main__ import main
sys.exit(main(["demo"]))
"""


def test_ctrl_c_is_heard_that_comes_in_a_destructor() -> None:
    ended = subprocess.run([sys.executable, "-c", IN_A_DESTRUCTOR], check=False, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr.strip()) == (130, "mpisgd demo: stopped by Ctrl-C")
