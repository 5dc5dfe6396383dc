"""A run of one learner has the bits of the plain torch loop, idiom by idiom, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mpisgd.base.errors import MpisgdError
from mpisgd.job.tensors import Tensors
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate
from mpisgd.update.slice_update import SliceUpdate
from tests.effort import spread
from tests.torch_law import ZOO
from tests.torch_law.law import Idiom, plain_loop


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    return bool(ours == theirs)


@pytest.mark.parametrize("name", spread([name for name, idiom in ZOO.items() if not idiom.refused], 10))
def test_it_has_the_bits_of_the_loop(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters, buffers, losses and what the optimiser keeps."""
    made, make = list[SliceUpdate](), Tensors.update
    monkeypatch.setattr(Tensors, "update", lambda *given, **named: made.append(make(*given, **named)) or made[-1])
    idiom: Idiom = ZOO[name]
    config = idiom.made(tmp_path / "run")
    loop = plain_loop(idiom, config)
    simulate(config, idiom.user_objects)
    state = {key.removeprefix("optimizer."): value for key, value in made[0].state().items()}
    missed = state.get("missed", 0.0)
    for key, value in loop.optimizer.items():
        assert torch.equal(value, (state[key] - missed if key == "step" else state[key]).expand(value.shape)), key
    ours = torch.load(tmp_path / "run" / schema.WEIGHTS, weights_only=True)["theta"]
    assert set(ours) == set(loop.state)
    differing = [key for key, value in loop.state.items() if not same(ours[key], value)]
    assert differing == []
    assert Run(tmp_path / "run").pushes["loss"].tolist() == pytest.approx(loop.losses, rel=1e-6, abs=1e-7)


NOT_COPIED = ("hooks", "prune", "torch.jit.script", "a hook of a gradient", "a hook after a gradient")
"""Models of which `copy.deepcopy`, by which the loop gives each learner buffers of its own, makes no true copy."""


@pytest.mark.parametrize("name", spread([name for name, idiom in ZOO.items() if not idiom.refused and name not in NOT_COPIED], 20))
def test_two_learners_have_the_bits_of_the_loop_over_their_mean_gradient(name: str, tmp_path: Path) -> None:
    idiom = Idiom(**{**vars(ZOO[name]), "config": {**ZOO[name].config, "virtual": {"learners": 2}}})
    config = idiom.made(tmp_path / "run")
    loop = plain_loop(idiom, config, learners=2)
    simulate(config, idiom.user_objects)
    ours = torch.load(tmp_path / "run" / schema.WEIGHTS, weights_only=True)["theta"]
    assert [key for key, value in loop.state.items() if not same(ours[key], value)] == []


@pytest.mark.parametrize("name", [name for name, idiom in ZOO.items() if idiom.refused])
def test_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    idiom = ZOO[name]
    with pytest.raises(MpisgdError, match=re.escape(idiom.refused)):
        simulate(idiom.made(tmp_path / "run"), idiom.user_objects)


def test_nested_targets_are_not_batched(tmp_path: Path) -> None:
    """torch.func.vmap is given tensors."""
    idiom = Idiom(**{**vars(ZOO["targets in a tuple"]), "config": {"virtual": {"learners": 2, "batched": True}}})
    with pytest.raises(MpisgdError, match=r"virtual\.batched = True: expected False beside .* no pairs of tensors"):
        simulate(idiom.made(tmp_path / "run"), idiom.user_objects)


@pytest.mark.parametrize(
    "way",
    [{"per_layer": True, "shards": 2}, {"protocol": "allreduce", "way": "buckets"}, {"group_size": 2, "shards": 2}],
    ids=str,
)
def test_a_gradient_that_a_hook_replaces_is_the_one_that_leaves(way: dict[str, Any], tmp_path: Path) -> None:
    """Whether gradients leave part by part, or stages pass them back."""
    idiom = Idiom(**{**vars(ZOO["a hook after a gradient"]), "config": way})
    config = idiom.made(tmp_path / "run")
    loop = plain_loop(idiom, config)
    simulate(config, idiom.user_objects)
    ours = torch.load(tmp_path / "run" / schema.WEIGHTS, weights_only=True)["theta"]
    assert [key for key, value in loop.state.items() if not same(ours[key], value)] == []
