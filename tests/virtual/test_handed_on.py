"""What a model keeps beside its parameters is learner 0's wherever it is evaluated and saved, and each learner has its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.base.errors import CheckpointError
from mpisgd.records.checkpoint import buffers
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from mpisgd.vectors.kept_state import Turns, digests, put, taken
from tests.effort import spread
from tests.torch_law import ZOO
from tests.torch_law.law import loss_on_test_data, plain_loop
from tests.virtual.test_torch_law import same

KEPT = ("BatchNorm1d", "a running mean", "a codebook", "a teacher that follows by .data")
WAYS: list[dict[str, Any]] = [
    {"evaluator": True},
    {},
    {"protocol": "allreduce"},
    {"protocol": "allreduce", "evaluator": True, "way": "buckets"},
    {"per_layer": True, "shards": 2, "evaluator": True},
    {"way": "streamed", "shards": 2, "evaluator": True},
    {"virtual": {"learners": 2}, "evaluator": True},
    {"virtual": {"learners": 2}, "protocol": "allreduce"},
    {"virtual": {"learners": 2, "ranks_per_node": 9}, "aggregation": "node", "shards": 2},
]


@pytest.mark.parametrize(("way", "name"), spread(itertools.product(WAYS, KEPT), 6, unpack=True))
def test_evaluations_are_those_of_the_loop(way: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Of the initial weights, of each half epoch, and of the last."""
    idiom = ZOO[name]
    made = idiom.made(tmp_path / "run")
    config = type(idiom)(**{**vars(idiom), "config": {**way, "mu": 4, "evaluation": {"every_epochs": 0.5}}}).made(made.out)
    learners = 2 if "virtual" in way else 1
    losses: list[float] = []

    def watch(steps: int, model: nn.Module, loss_of: Any, data: Any) -> None:
        if steps % (8 // learners) == 0:
            losses.append(loss_on_test_data(model, loss_of, data))

    loop = plain_loop(idiom, config, learners, watch)
    simulate(config, idiom.user_objects)
    found = Run(tmp_path / "run").evaluations["loss"]
    assert found == pytest.approx([*losses, losses[-1]][: len(found)], rel=1e-5)
    ours = torch.load(tmp_path / "run" / schema.WEIGHTS, weights_only=True)["theta"]
    assert [key for key, value in loop.state.items() if not same(ours[key], value)] == []
    proof = replay.replay(tmp_path / "run", idiom.user_objects)
    assert proof.holds and proof.evaluations == len(found)
    assert not list((tmp_path / "run").glob(f"{schema.SPOOL}*")), "nothing is left"


# ---------------------------------------------------------------------------------------------------------------- pieces


class Keeping(nn.Module):
    """Keeps a buffer, a frozen parameter and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.slow = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def see(self, value: float) -> None:
        self.seen = self.seen + value
        self.slow.data.add_(value)
        self.calls += 1

    @property
    def has(self) -> tuple[float, float, int]:
        return self.seen[0].item(), self.slow[0].item(), self.calls


def test_each_has_its_own_in_turn() -> None:
    """And who begins later begins with what the factory made."""
    module = Keeping()
    turns = Turns(module)
    for number in (0, 1, 0, 2, 0, 1):
        turns.take(number)
        module.see(1.0 + number)
    found = {}
    for number in (0, 1, 2, 3):
        turns.take(number)
        found[number] = module.has
    assert found == {0: (3.0, 3.0, 3), 1: (4.0, 4.0, 2), 2: (3.0, 3.0, 1), 3: (0.0, 0.0, 0)}


def test_frozen_parameters_are_kept_where_they_move() -> None:
    module, other = Keeping(), Keeping()
    made = digests(module)
    assert taken(module, made)["frozen"] == {}
    module.see(2.0)
    put(other, taken(module, made))
    assert other.has == module.has == (2.0, 2.0, 1)


def test_what_a_mini_batch_that_is_given_up_has_changed_is_as_it_was(tmp_path: Path) -> None:
    module = Keeping()
    keeper = buffers.Keeper(module, tmp_path, lambda: None, given_up=True)
    for number in range(3):
        keeper.begins(1, number)
        module.see(1.0)
        if number == 1:
            keeper.give_up()
    assert (module.seen[0].item(), module.calls) == (2.0, 2)


def test_an_attempt_goes_on_with_what_was_kept(tmp_path: Path) -> None:
    """At its checkpoint, or in the end; files of snapshots that it will take again go."""
    module = Keeping()
    keeper = buffers.Keeper(module, tmp_path, lambda: None, every=(10, 10))
    for clock in range(0, 33, 3):
        keeper.begins(snapshots=1 + clock // 10, clock=clock)
        module.see(1.0)
    names = {path.name.removeprefix(schema.SPOOL) for path in tmp_path.iterdir()}
    assert names == {"buffers.0", "buffers.1", "buffers.2", "buffers.3", "learner-0.20", "learner-0.30"}
    assert buffers.at_checkpoint(tmp_path, 30, exported := Keeping(), newest=True) and exported.calls == 10
    assert not buffers.at_checkpoint(tmp_path, 10, exported, newest=False)
    keeper.end(4, 33, interrupted=True)
    assert buffers.at_checkpoint(tmp_path, 33, exported, newest=True) and exported.calls == 11
    for clock, calls in ((20, 7), (33, 11)):
        buffers.begin(tmp_path, clock, 0, clock, again := Keeping())
        assert again.calls == calls if clock == 20 else again.calls == 0, "another attempt has taken what there was"
    buffers.begin_again(tmp_path, 20, 0, again)
    assert again.calls == 7
    buffers.forget(tmp_path, 3)
    assert sorted(path.suffix for path in tmp_path.glob(f"{schema.SPOOL}buffers.*")) == [".0", ".1", ".2"]


def test_states_for_checkpoints_that_last_outlive_those_for_states_on_nodes(tmp_path: Path) -> None:
    keeper = buffers.Keeper(Keeping(), tmp_path, lambda: None, every=(5, 20))
    kept = {}
    for clock in range(0, 71):
        keeper.begins(snapshots=0, clock=clock)
        kept[clock] = {int(path.suffix[1:]) for path in tmp_path.glob(f"{schema.SPOOL}learner-0.*")}
    assert kept[19] == {10, 15} and kept[27] == {20, 25} and kept[38] == {20, 30, 35} and kept[70] == {40, 60, 65, 70}


def test_a_snapshot_that_learner_0_never_came_to_has_what_it_had_last(tmp_path: Path) -> None:
    module = Keeping()
    keeper = buffers.Keeper(module, tmp_path, lambda: None)
    keeper.begins(1, 0)
    module.see(1.0)
    keeper.end(0, 0, interrupted=False)
    buffers.forget(tmp_path, 2)
    given = buffers.Given(again := Keeping(), tmp_path, lambda: None)
    given.put(1, last=False)
    assert again.calls == 1
    given.put(0, last=False)
    assert again.calls == 0


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    keeper = buffers.Keeper(Keeping(), tmp_path, lambda: None)
    keeper.begins(1, 0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"{file.name} cannot be read"):
        buffers.Given(Keeping(), tmp_path, lambda: None).put(0, last=False)
