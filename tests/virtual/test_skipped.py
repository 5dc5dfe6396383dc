"""Parameters without a gradient are passed over, as torch does: by all ways of exchange, and in checkpoints and replay, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.simulate import simulate
from tests.effort import spread
from tests.torch_law.law import RUN, Idiom, plain_loop, vectors
from tests.torch_law.optimizers import Heads
from tests.travel import configured

NEVER = ("never.weight", "never.bias")

OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}, lambda them: torch.optim.SGD(them, 0.1, 0.9, weight_decay=0.1)),
    "adam": ({"name": "adam", "weight_decay": 0.1}, lambda them: torch.optim.Adam(them, 0.1, weight_decay=0.1)),
    "adamw": ({"name": "adamw"}, lambda them: torch.optim.AdamW(them, 0.1)),
    "rmsprop": ({"name": "rmsprop", "momentum": 0.5}, lambda them: torch.optim.RMSprop(them, 0.1, momentum=0.5)),
}


def heads() -> Heads:
    return Heads(rarely=0.3)


def user_objects() -> UserObjects:
    return UserObjects(model=heads, data=vectors, loss=None, step=None)


def made(out: Path, **fields: Any) -> Config:
    return configured({**RUN, "mu": 4, **fields, "out": str(out)})


def trained(config: Config) -> dict[str, Tensor]:
    simulate(config, user_objects())
    found: dict[str, Tensor] = torch.load(Path(config.out) / schema.WEIGHTS, weights_only=True)["theta"]
    return found


WAYS: list[dict[str, Any]] = [
    {"shards": 2},
    {"shards": 3, "per_layer": True},
    {"shards": 2, "way": "streamed"},
    {"shards": 4, "clip_average": 100.0},
    {"shards": 2, "groups": {"rate": {"seldom.*": 1.0}}},
    {"protocol": "allreduce"},
    {"protocol": "allreduce", "way": "buckets"},
    {"protocol": "allreduce", "virtual": {"learners": 2, "ranks_per_node": 9}},
    {"aggregation": "node", "shards": 2, "virtual": {"learners": 2, "ranks_per_node": 9}},
    {"averaging": 0.5},
]


@pytest.mark.parametrize("optimizer", spread(list(OPTIMIZERS), 2))
@pytest.mark.parametrize("way", spread(WAYS, 3), ids=str)
def test_two_learners_are_the_loop_over_their_mean_gradient(way: dict[str, Any], optimizer: str, tmp_path: Path) -> None:
    fields, torchs = OPTIMIZERS[optimizer]
    config = made(tmp_path / "run", **{"virtual": {"learners": 2}, "optimizer": fields, **way})
    loop = plain_loop(Idiom(heads, optimizer=torchs), config, learners=2)
    ours = trained(config)
    assert [name for name, value in loop.state.items() if not torch.equal(ours[name], value)] == []


@pytest.mark.parametrize(
    "way",
    spread(
        [
            {"protocol": "softsync", "shards": 2},
            {"protocol": "softsync", "ahead": 1},
            {"protocol": "softsync", "ahead": 2},
            {"protocol": "softsync", "per_layer": True, "shards": 3},
            {"protocol": "downpour", "push_format": "bfloat16"},
            {"protocol": "softsync", "push_format": "topk", "topk_share": 0.2},
            {"protocol": "hardsync", "accumulation": 2},
            {"protocol": "hardsync", "autocast": "bfloat16"},
            {"protocol": "hardsync", "local_steps": 3, "inner_optimizer": {"name": "adamw"}, "optimizer": {"name": "sgd"}},
        ],
        3,
    ),
    ids=str,
)
def test_a_head_that_no_batch_uses_stays_and_replay_agrees(way: dict[str, Any], tmp_path: Path) -> None:
    fields = {"virtual": {"learners": 3}, "optimizer": {"name": "adamw", "weight_decay": 0.1}, "alpha0": 0.01}
    ours = trained(made(tmp_path / "run", **{**fields, **way}))
    first = trained(made(tmp_path / "first", alpha0=1e-30, optimizer={"name": "sgd"}))
    for name, value in ours.items():
        assert torch.equal(value, first[name]) == (name in NEVER), name
    assert replay.replay(tmp_path / "run", user_objects()).holds


@pytest.mark.parametrize(
    "way",
    [
        {"group_size": 2, "shards": 2},
        {"virtual": {"learners": 2, "batched": True}},
    ],
    ids=str,
)
def test_it_is_refused_where_shards_cannot_be_told(way: dict[str, Any], tmp_path: Path) -> None:
    """By name, and only where zeros would move weights."""

    def piped() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), HalfUsed())

    config = made(tmp_path / "run", **{"virtual": {"learners": 2}, **way})
    with pytest.raises(ConfigError, match=r"gave no gradient to .*unused.weight"):
        simulate(config, UserObjects(model=piped, data=vectors, loss=None, step=None))
    config = made(tmp_path / "plain", **{"virtual": {"learners": 2}, "optimizer": {"name": "sgd"}, **way})
    simulate(config, UserObjects(model=piped, data=vectors, loss=None, step=None))


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found
