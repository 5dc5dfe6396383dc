"""Runs that begin with given weights: what they begin with, what is refused, and that replay wants the same file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpisgd import replay
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.config import Config
from mpisgd.config import replace as changed
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.job.resume import Resumption
from mpisgd.records import initial
from mpisgd.records.checkpoint.checkpoint import Checkpoint
from mpisgd.records.log.reader import Directory, Run
from mpisgd.vectors.flat import FlatModel
from tests.virtual.jobs import TENSORS, config, simulated

State = dict[str, Tensor]
BATCH_NORM = {"name": "mlp", "hidden": [8], "batch_norm": True}


def built(made: Config, user_objects: UserObjects = NO_OBJECTS, *, resumed: bool = False) -> FlatModel:
    meta = parts.meta_of(parts.load_data(made, user_objects))
    return parts.build_model(made, meta, user_objects, resumed=resumed)


def theta(run: Path) -> State:
    found: State = torch.load(run / "weights.pt", weights_only=True)["theta"]
    return found


def same(one: State, other: State) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with batch norm, and its weights in other files."""
    path = simulated(tmp_path_factory.mktemp("first") / "run", TENSORS, model=BATCH_NORM).path
    torch.save(theta(path), path.parent / "state.pt")
    return path


@pytest.mark.parametrize("of", ["run", "run/weights.pt", "state.pt"])
def test_a_model_begins_with_the_last_weights_of_another_run(of: str, first: Path, tmp_path: Path) -> None:
    """Its parameters and its buffers, to the bit."""
    model = built(config(tmp_path / "unused", TENSORS, model=BATCH_NORM, init_from=str(first.parent / of)))
    assert same(dict(model.module.state_dict()), theta(first))
    for buffer in model.module.buffers():
        buffer.fill_(7)
    model.as_made(model.module.modules())
    assert same(dict(model.module.state_dict()), theta(first))


def test_a_run_begins_where_another_ended_and_is_proved(first: Path, tmp_path: Path) -> None:
    """Its first evaluation is the last one of that run."""
    run = simulated(tmp_path / "run", TENSORS, model=BATCH_NORM, init_from=str(first), epochs=1)
    assert run.evaluations["loss"][0] == Run(first).evaluations["loss"][-1] != run.evaluations["loss"][-1]
    file = first / "weights.pt"
    assert run.environment["brought"]["init_from"]["file"] == str(file)
    proof = replay.replay(run.path)
    assert proof.holds, proof.reason
    assert any(f"begins with the weights of {file}" in line for line in proof.lines())


def test_buffers_that_the_file_has_not_are_the_factorys(first: Path, tmp_path: Path) -> None:
    made = config(tmp_path / "unused", TENSORS, model=BATCH_NORM)
    of_factory = built(made).module.state_dict()
    parameters = {name for name, _ in built(made).module.named_parameters()}
    torch.save({name: each for name, each in theta(first).items() if name in parameters}, tmp_path / "some.pt")
    found = built(changed(made, init_from=str(tmp_path / "some.pt"))).module.state_dict()
    for name, each in found.items():
        assert torch.equal(each, theta(first)[name] if name in parameters else of_factory[name]), name


def test_weights_in_another_memory_format(tmp_path: Path) -> None:
    """A convolution's lie in the vector as (out, height, width, in); a file has them as the model has."""
    base: dict[str, Any] = {"data": {"name": "digits"}, "model": {"name": "small_cnn"}}
    made = config(tmp_path / "unused", TENSORS, **base, memory_format="channels_last")
    other = built(changed(made, seed=5, memory_format="contiguous")).module.state_dict()
    torch.save(dict(other), tmp_path / "w.pt")
    found = built(changed(made, init_from=str(tmp_path / "w.pt")))
    assert same(dict(found.module.state_dict()), dict(other))
    assert any(each.dim() == 4 for each in other.values())


def test_a_file_of_safetensors(first: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "w.safetensors"
    safetensors.save_file(theta(first), file)
    made = config(tmp_path / "unused", TENSORS, model=BATCH_NORM, init_from=str(file))
    assert same(dict(built(made).module.state_dict()), theta(first))
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"init_from = '.*' ?: .*w\.safetensors cannot be read as safetensors"):
        built(made)


def test_safetensors_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "w.safetensors").touch()
    with pytest.raises(ConfigError, match=r"pip install safetensors, or mpisgd\[safetensors\]"):
        built(config(tmp_path / "unused", TENSORS, init_from=str(tmp_path / "w.safetensors")))


def _without(name: str) -> Callable[[State], Any]:
    return lambda state: {key: each for key, each in state.items() if key != name}


#: What is done to a good file -> what is said.
WRONG: list[tuple[Callable[[State], Any], str]] = [
    (_without("1.bias"), r"is not of this model: the file lacks '1\.bias'$"),
    (lambda state: {}, r"the file lacks '1\.weight' \(and 3 more\)$"),
    (lambda state: state | {"fc.weight": torch.zeros(1)}, r"the file has 'fc\.weight', unknown to the model$"),
    (lambda state: state | {"1.bias": torch.zeros(9)}, r"'1\.bias' of the file is float \(9,\), expected float \(8,\)$"),
    (lambda state: state | {"1.bias": torch.zeros(8).long()}, r"'1\.bias' of the file is int64 \(8,\), expected float \(8,\)$"),
    (
        lambda state: {f"module.{name}": each for name, each in state.items()},
        r"the file lacks '1\.weight' \(and 3 more\); the file has 'module\.1\.weight', unknown to the model \(and 3 more\)$",
    ),
    (lambda state: {"epoch": 3, "model": state}, r"holds no state dict: expected tensors by their names, found epoch, model$"),
    (lambda state: [1, 2], r"holds a list, expected a state dict"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_what_is_not_of_this_model_is_refused(change: Callable[[State], Any], said: str, tmp_path: Path) -> None:
    made = config(tmp_path / "unused", TENSORS, init_from=str(tmp_path / "w.pt"))
    torch.save(change(dict(built(changed(made, init_from="")).module.state_dict())), tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=said):
        built(made)


def test_files_that_cannot_be_read_are_refused(first: Path, tmp_path: Path) -> None:
    (tmp_path / "nonsense.pt").write_bytes(b"PK nonsense")
    (tmp_path / "folder").mkdir()
    shutil.copytree(first, tmp_path / "early")
    for name in ("weights.pt", "DONE"):
        (tmp_path / "early" / name).unlink()
    shutil.copytree(first, tmp_path / "flipped")
    (tmp_path / "flipped" / "weights.pt").write_bytes(b"other")
    for name, said in {
        "nothing.pt": r"nothing\.pt is not there: expected a run's directory, a state dict \(\.pt\) or a file of \.safetensors",
        "nonsense.pt": r"nonsense\.pt cannot be read as a file of torch's",
        "folder": r"folder is no run directory of mpisgd",
        "early": r"early has no weights\.pt: a run writes weights at the end",
        "flipped": r"flipped/weights\.pt is damaged",
    }.items():
        with pytest.raises(ConfigError, match=rf"^init_from = '.*{name}': .*{said}"):
            built(config(tmp_path / "unused", TENSORS, model=BATCH_NORM, init_from=str(tmp_path / name)))


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    torch.save({"1.weight": _Evil()}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"cannot be read as a file of torch's: UnpicklingError"):
        built(config(tmp_path / "unused", TENSORS, init_from=str(tmp_path / "w.pt")))
    assert not _ran


_ran: list[int] = []


class _Evil:
    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _ran.append, (1,)


def test_out_that_would_be_emptied_is_refused(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(first, run)
    with pytest.raises(ConfigError, match=r"lies in out = '.*', and overwrite empties this directory: expected another out"):
        simulated(run, TENSORS, model=BATCH_NORM, init_from=str(run), overwrite=True)
    assert (run / "weights.pt").is_file()


class Tied(nn.Module):
    """Two layers that share their weights."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, classes)
        self.other.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.other(self.one(inputs)))  # type: ignore[no-any-return]


def test_of_weights_that_layers_share_one_name_is_enough(tmp_path: Path) -> None:
    made = config(tmp_path / "unused", TENSORS, init_from=str(tmp_path / "w.pt"))
    user_objects = UserObjects(model=Tied)
    state = {name: each + 1 for name, each in built(changed(made, init_from=""), user_objects).module.state_dict().items()}
    torch.save(_without("one.weight")(state), tmp_path / "w.pt")
    assert same(dict(built(made, user_objects).module.state_dict()), state)
    torch.save(state | {"other.weight": state["one.weight"] + 1}, tmp_path / "w.pt")
    with pytest.raises(
        ConfigError, match=r"'other\.weight' and 'one\.weight' of the file have different values, but are the same parameter"
    ):
        built(made, user_objects)


def test_replay_wants_the_same_file(first: Path, tmp_path: Path) -> None:
    """Gone, changed, and found elsewhere; the log of another start would not hold."""
    file = tmp_path / "w.pt"
    shutil.copy(first.parent / "state.pt", file)
    run = simulated(tmp_path / "run", TENSORS, model=BATCH_NORM, init_from=str(file), protocol={"name": "softsync", "n": 4})
    moved = file.rename(tmp_path / "moved.pt")
    with pytest.raises(DataError, match=r"w\.pt is not there: .*run began with the weights of this file \(sha256 [0-9a-f]{64}\)"):
        replay.replay(run.path)
    assert replay.replay(run.path, init_from=str(moved)).holds
    torch.save({name: each + 1e-3 * each.is_floating_point() for name, each in theta(first).items()}, file)
    with pytest.raises(DataError, match=r"w\.pt has changed since .* began with the weights: the sha256 was"):
        replay.replay(run.path)


class Frozen(nn.Module):
    """As a fine-tune has it: some weights are not trained."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, classes)
        self.body.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))  # type: ignore[no-any-return]


def test_a_resumed_run_wants_the_file_for_what_checkpoints_have_not(tmp_path: Path) -> None:
    """Frozen weights are in no checkpoint; a model that has nothing of the kind needs no file any more."""
    file, made = tmp_path / "w.pt", config(tmp_path / "run", TENSORS, init_from=str(tmp_path / "w.pt"))
    user_objects = UserObjects(model=Frozen)
    state = {name: each + 1 for name, each in built(changed(made, init_from=""), user_objects).module.state_dict().items()}
    torch.save(state, file)
    simulated(tmp_path / "run", TENSORS, user_objects, init_from=str(file))
    assert same(dict(built(made, user_objects, resumed=True).module.state_dict()), state)
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"w\.pt has changed since"):
        built(made, user_objects, resumed=True)
    file.unlink()
    with pytest.raises(DataError, match=r"w\.pt is not there"):
        built(made, user_objects, resumed=True)
    built(made, resumed=True)  # an mlp without batch norm


def test_a_resumed_run_says_what_the_first_attempt_began_with(tmp_path: Path) -> None:
    """Not what lies there now."""
    begun, config_then = {"file": "w.pt", "sha256": "1" * 64}, config(tmp_path / "run", TENSORS, init_from="w.pt")
    checkpoint = Checkpoint(tmp_path, clock=3, attempt=0, learners=2, model="", parts=())
    found = Resumption(1, checkpoint, [{"attempt": 0, "brought": {initial.NAME: begun}}], [])
    now = found.environment({"brought": {"model": {}, initial.NAME: {"file": "w.pt", "sha256": ""}}}, config_then)
    assert now["brought"] == {"model": {}, initial.NAME: begun}


def test_a_run_that_does_not_say_what_it_began_with(first: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"init_from is given, but the name or sha256 of the file is missing"):
        initial.same(Directory(first))


def test_a_job_of_sizes_reads_no_weights(tmp_path: Path) -> None:
    run = simulated(
        tmp_path / "run", TENSORS, virtual={"gradients": False, "train_samples": 400}, init_from=str(tmp_path / "gone.pt")
    )
    assert replay.replay(run.path).holds
