"""`mpisgd.launch` refuses, before a rank is started, what cannot be sent or cannot work; what it imports is the API's."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

import mpisgd
from mpisgd.base import errors
from mpisgd.base.errors import EXIT_FAILED, ConfigError
from mpisgd.launching import under_way


def of_a_module() -> None: ...


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(under_way, "mpirun", started)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)


def has_cloudpickle(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find("json" if there else "_") if name == "cloudpickle" else find(name)
    )


def of_the_script() -> Callable[[], None]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def job(): pass", namespace)  # as a cell of a notebook does
    found: Callable[[], None] = namespace["job"]
    return found


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of_the_script, "ranks cannot import job from this script or notebook: .* pip install cloudpickle"),
        (lambda: lambda: 1, "<lambda> or an argument cannot be sent to ranks: .*; pip install cloudpickle"),
        (lambda: 3, "expected a function, found int"),
    ],
)
def test_without_cloudpickle_functions_have_names(make: Callable[[], Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_cloudpickle(monkeypatch, False)
    with pytest.raises(ConfigError, match=said):
        mpisgd.launch(make())


def test_what_nothing_can_send_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of_a_module or an argument cannot be sent to ranks: .*lock"):
        mpisgd.launch(of_a_module, threading.Lock())


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "4"])
def test_a_number_of_ranks(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=f"ranks = {ranks!r}: expected a number of at least 1"):
        mpisgd.launch(of_a_module, ranks=ranks)


def test_a_process_that_knows_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Any = types.ModuleType("mpi4py.MPI")
    loaded.Is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", loaded)
    with pytest.raises(ConfigError, match="this process has initialised MPI"):
        mpisgd.launch(of_a_module)


def test_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE = 4: start a single process"):
        mpisgd.launch(of_a_module)


def test_ctrl_c_is_raised_when_the_ranks_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told once; where Ctrl-C comes again, the context ends them."""
    told: list[str] = []
    stub = "import signal; print('ready', flush=True); signal.pause()"
    monkeypatch.setattr(under_way, "mpirun", lambda ranks: [sys.executable, "-c", stub])
    wait = under_way.UnderWay.wait

    def interrupted(self: under_way.UnderWay) -> int:
        if not told:
            told.append("Ctrl-C")
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(under_way.UnderWay, "wait", interrupted)
    ended: list[int | None] = []
    leave = under_way.UnderWay.__exit__
    monkeypatch.setattr(
        under_way.UnderWay, "__exit__", lambda self, *error: (ended.append(self.process.poll()), leave(self, *error))[1]
    )
    with pytest.raises(KeyboardInterrupt):
        mpisgd.launch(of_a_module, ranks=2)
    assert ended == [-15], "SIGTERM, as no rank had begun"


def test_the_exceptions_of_the_api_are_exported_and_few() -> None:
    exported = {name for name in mpisgd.__all__ if inspect.isclass(getattr(mpisgd, name))} - {"Config"}
    assert all(getattr(mpisgd, name) is getattr(errors, name) for name in exported)
    ours = {
        name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, (errors.MpisgdError, SystemExit))
    }
    assert ours - exported == {"PeerError", "ProtocolError", "DeadlockError"}, "bugs, and what befalls a rank among others"
    found = errors.LaunchError("rank 1 of 3 failed", 1)
    assert (found.rank, found.exit_status) == (1, EXIT_FAILED)
