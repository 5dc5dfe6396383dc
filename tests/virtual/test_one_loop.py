"""One loop, two worlds (DESIGN 3): learner, shard, evaluator, channels and protocols do not know which one they are in."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mpisgd
from mpisgd.evaluator import Evaluator
from mpisgd.exchange.collectives.team_channel import TeamChannel
from mpisgd.exchange.learner_channel import LearnerChannel
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.gradient.gradient import Gradient
from mpisgd.job.roles import sgd
from mpisgd.protocols.hardsync import Hardsync
from mpisgd.protocols.softsync import Softsync
from mpisgd.shard import Shard
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors.body import Whole
from tests.unit.fakes import Status
from tests.virtual.jobs import TENSORS, simulated

PACKAGE = Path(mpisgd.__file__).parent
LOOPS = [
    *(
        PACKAGE / f"{name}.py"
        for name in (
            "learner",
            "shard",
            "serving/answering",
            "serving/fail_fast",
            "serving/fault_tolerant",
            "serving/finiteness",
            "serving/snapshot_server",
            "job/allreduce",
            "exchange/learner_channel",
            "exchange/exchange",
            "exchange/shard_channel",
            "exchange/collectives/team_channel",
            "exchange/collectives/bucket_channel",
            "exchange/evaluator_channel",
            "exchange/rounds",
            "pipeline/group_channel",
            "pipeline/stage",
            "evaluator",
            "comm/communicator",
            "comm/messages",
            "update/slice_update",
            "update/device_update",
            "sandblaster/slots",
            "sandblaster/channels",
            *(f"sandblaster/{each}" for each in ("coordinator", "evaluations", "shard", "learner")),
        )
    ),
    *sorted((PACKAGE / "rules").glob("*.py")),
    *sorted(path for path in (PACKAGE / "protocols").glob("*.py") if path.stem not in ("__init__", "own")),  # these ask for classes
]
#: What only one of the two worlds has.
WORLDS = (
    "mpisgd.comm.virtual",
    "mpisgd.simulate",
    "mpisgd.config.config_virtual",
    "mpisgd.comm.mpi.library",
    "mpisgd.comm.mpi.wire",
    "mpisgd.job.run",
    "mpi4py",
    "greenlet",
)
#: Of what both have alike.
NEITHER = ("mpisgd.comm.messages.", "mpisgd.models.", "mpisgd.gradient.", "mpisgd.pipeline.", "torch.")
#: By which one could ask.
TELLING = {"virtual", "is_virtual", "simulated", "real", "world", "VirtualWire", "Wire", "VirtualOptions", "greenlet", "MPI"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Wherever in the file, also under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def asks(source: str) -> list[str]:
    """What in a module's source could tell the two worlds apart."""
    tree = ast.parse(source)
    found = [name for name in imported(tree) if any(name == world or name.startswith(f"{world}.") for world in WORLDS)]
    neither = {name.rpartition(".")[2] for name in imported(tree) if name.startswith(NEITHER)} | {"NotImplementedError"}
    fine = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) == 2 and isinstance(node.args[1], ast.Name) and node.args[1].id in neither
    }
    for node in ast.walk(tree):
        if node in fine:  # isinstance(message, Push): what was sent, or is computed, may be asked about
            continue
        if isinstance(node, ast.Attribute) and node.attr in TELLING:
            found.append(f".{node.attr}")
        elif isinstance(node, ast.Name) and node.id in {*TELLING, "isinstance", "type", "hasattr", "getattr", "__import__"}:
            found.append(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WORLDS:
            found.append(repr(node.value))
    return found


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_no_branch_asks_which_world_it_is_in(path: Path) -> None:
    assert asks(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from mpisgd.comm.virtual.wire import VirtualWire",
        "import greenlet",
        "def f():\n    from mpisgd.comm.mpi.library import MPI",
        "from mpisgd import simulate",
        "def f(wire):\n    return isinstance(wire, object)",
        "def f(wire):\n    return wire.virtual",
        "def f(wire):\n    return type(wire).__name__",
        "def f(wire):\n    return hasattr(wire, 'work')",
        "def f(sys):\n    return 'mpi4py' in sys.modules",
    ],
)
def test_a_branch_that_asked_would_be_found(source: str) -> None:
    assert asks(source)


# ----------------------------------------------------------------------------------------------- the very same functions


BUILDING = [*sorted((PACKAGE / "job" / "roles").glob("*.py")), PACKAGE / "job" / "tensors.py", PACKAGE / "job" / "world.py"]


@pytest.mark.parametrize("path", BUILDING, ids=lambda path: path.stem)
def test_what_builds_the_roles_does_not_ask_either(path: Path) -> None:
    """Of a world it knows only what `World` says; nor does it ask a channel of what kind it is."""
    assert set(asks(path.read_text())) <= {"world", ".world"}


#: What makes a role, and the two worlds' own rooms.
ROLES_PARTS = {"learn", "follow", "Collective", "Leader", "Member", "Shard", "ShardChannel", "Rules", "FaultTolerant", "Evaluator"}
WORLDS_OWN = [path for room in ("job/run", "simulate") for path in sorted((PACKAGE / room).glob("*.py"))]


def test_each_role_is_built_in_one_place() -> None:
    """Real and virtual ranks call `build`; neither makes a shard, a learner or a member of a team by itself."""

    def named(*paths: Path) -> set[str]:
        return {name.rpartition(".")[2] for path in paths for name in imported(ast.parse(path.read_text()))}

    assert not named(*WORLDS_OWN) & ROLES_PARTS
    assert named(*BUILDING) & ROLES_PARTS == ROLES_PARTS
    builders = [path.relative_to(PACKAGE).as_posix() for path in WORLDS_OWN if "build(" in path.read_text()]
    assert builders == ["job/run/rank.py", "simulate/job.py"]


def counted(monkeypatch: pytest.MonkeyPatch, of: dict[Any, str]) -> Counter[str]:
    """How often each function is entered, by its name: of modules and classes, the names in one string."""
    entered: Counter[str] = Counter()

    def counting(where: Any, name: str) -> None:
        whole = getattr(where, name)

        def entering(*args: Any, **keywords: Any) -> Any:
            entered[name] += 1
            return whole(*args, **keywords)

        monkeypatch.setattr(where, name, entering)

    for where, names in of.items():
        for name in names.split():
            counting(where, name)
    return entered


def test_a_virtual_run_enters_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops, the channels, the protocol and the arithmetic of a real run; each learner and shard enters its loop once."""
    entered = counted(
        monkeypatch,
        {
            sgd: "learn",
            Shard: "serve",
            LearnerChannel: "push pull goodbye",
            ShardChannel: "receive start_answers finish_answers stop answer_snapshot",
            Evaluator: "evaluate_all",
            Softsync: "on_push update_due on_update",
            SliceUpdate: "accumulate step",
            Whole: "arrive is_finite",
            Gradient: "compute",
        },
    )
    log = simulated(tmp_path / "run", TENSORS, protocol="softsync", shards=2, evaluator=True)
    assert (entered["learn"], entered["serve"], entered["evaluate_all"], entered["goodbye"]) == (4, 2, 1, 4)
    assert entered["push"] == entered["compute"] == len(log.pushes) / 2
    assert entered["on_push"] == entered["accumulate"] == log.updates["gradients"].sum()
    assert entered["step"] == entered["on_update"] == len(log.updates)
    assert entered["receive"] > len(log.pushes)
    assert all(entered[name] for name in ("pull", "start_answers", "finish_answers", "stop", "answer_snapshot", "update_due"))


def test_so_does_one_whose_learners_double_as_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop, the bookkeeping of a shard, the rules of hardsync; no push or pull."""
    entered = counted(
        monkeypatch,
        {
            sgd: "learn",
            Shard: "begin serve_on",
            TeamChannel: "exchange pull goodbyes snapshot_pull answer_snapshot",
            LearnerChannel: "push",
            Hardsync: "on_push on_update",
            SliceUpdate: "accumulate step",
        },
    )
    log = simulated(tmp_path / "run", TENSORS, protocol="allreduce", evaluator=True)
    assert [entered[name] for name in ("learn", "begin", "serve_on", "goodbyes", "push")] == [4, 4, 4, 4, 0]
    assert entered["exchange"] == entered["pull"] == entered["snapshot_pull"] == len(log.pushes) / 4
    assert entered["on_push"] == entered["accumulate"] == len(log.pushes)
    assert entered["step"] == entered["on_update"] == len(log.updates)
    assert entered["answer_snapshot"] > 4


@pytest.mark.parametrize("somebody", [True, False])
def test_a_batch_systems_signals_are_no_ctrl_c(somebody: bool, tmp_path: Path) -> None:
    """SLURM, too, sends SIGCONT and SIGTERM: where nobody sits at a terminal, the lock stays until the checkpoint is written."""
    stub: Any = types.ModuleType("mpisgd.comm.mpi.library")
    stub.MPI, stub.takes_gpu_memory = types.SimpleNamespace(Status=Status), lambda: False
    with mock.patch.dict(sys.modules, {"mpisgd.comm.mpi.library": stub}):  # without starting MPI
        run = importlib.import_module("mpisgd.job.run.rank")
    rank = mock.Mock(path=tmp_path, signals=types.SimpleNamespace(hurried=True))
    with mock.patch.object(run.interruption, "tell_terminal", return_value=somebody):
        run.Rank._tell_the_terminal(rank, 15)
    assert rank.claim.unlock.called is somebody
