"""Stages that are even in seconds, by a clock that only what is computed moves on; and stages that begin with named children."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, config_file, replace
from mpisgd.config.run import StagesOptions
from mpisgd.job.parts import UserObjects
from mpisgd.job.tensors import with_measured_stages
from mpisgd.pipeline import balance
from mpisgd.pipeline.balance import measures_stages
from mpisgd.vectors.cut import cut_into_stages
from mpisgd.vectors.flat import Layer, cut_between
from tests.effort import examples


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


CLOCK = Clock()


class Slow(nn.Module):
    """As long as it is told to be, whatever its parameters; the first time ten times as long."""

    def __init__(self, takes_s: float, units: int = 4) -> None:
        super().__init__()
        self.layer, self.takes_s, self.calls = nn.Linear(64, 64), takes_s, 0
        self.more = nn.Parameter(torch.zeros(units))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        CLOCK.now_s += self.takes_s * (10 if self.calls == 1 else 1)
        output: Tensor = self.layer(inputs) + self.more.sum()
        return output


def config(size: int, **options: Any) -> Config:
    changes = {"group_size": size, "shards": size, "mu": 8, "micro_batches": 2, "stages": StagesOptions(balance="seconds")}
    return Config(**{**changes, **options})


def settled(model: Any, size: int) -> tuple[str, ...]:
    data = ((torch.randn(40, 64), torch.randint(0, 64, (40,))), (torch.randn(4, 64), torch.randint(0, 64, (4,))))
    return with_measured_stages(config(size), UserObjects(model=model, data=data)).stages.at


@pytest.fixture(autouse=True)
def by_a_clock_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "time", CLOCK)


def test_the_longest_stage_is_as_short_as_can_be() -> None:
    def model() -> nn.Module:
        return nn.Sequential(Slow(5.0), nn.ReLU(), Slow(1.0, 20000), Slow(1.0), nn.ReLU(), Slow(1.0, 30000), Slow(1.0))

    assert settled(model, 2) == ("2",)
    assert settled(model, 3) == ("2", "5")
    assert cut_into_stages(model(), 2, 2).children[0].stop == 5, "by parameters it would be elsewhere"


def test_children_without_parameters_count_for_the_stage_that_has_them() -> None:
    class Pause(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            CLOCK.now_s += 3.0
            return inputs

    assert settled(lambda: nn.Sequential(Slow(1.0), Slow(1.0), Pause(), Slow(1.0), Slow(1.0)), 2) == ("3",)
    assert settled(lambda: nn.Sequential(Slow(1.0), Slow(1.0), Slow(1.0), Slow(1.0)), 2) == ("2",)


def test_of_a_list_of_factories_there_is_one_piece_at_a_time() -> None:
    alive: list[int] = []
    most = 0

    class Counted(Slow):
        def __init__(self) -> None:
            super().__init__(1.0)
            if not self.layer.weight.is_meta:
                alive.append(1)

        def __del__(self) -> None:
            if not self.layer.weight.is_meta:
                alive.pop()

        def forward(self, inputs: Tensor) -> Tensor:
            nonlocal most
            most = max(most, len(alive))
            return super().forward(inputs)

    assert settled(lambda: [Counted, Counted, Counted, Counted], 2) == ("2",)
    assert most <= 2, "a piece, and the one that is made in its place"


def test_a_job_that_says_where_stages_begin_is_not_measured() -> None:
    at = StagesOptions(("3",), "seconds")
    assert not measures_stages(config(2, stages=at)) and measures_stages(config(2))
    assert not measures_stages(config(1, stages=StagesOptions())) and not measures_stages(config(2, stages=StagesOptions()))


def test_a_run_that_goes_on_with_as_many_stages_is_cut_as_before_and_else_anew() -> None:
    before = config(2, stages=StagesOptions(("3",), "seconds"))
    assert config_file.cut_anew(replace(before, epochs=3.0), before).stages == before.stages
    assert config_file.cut_anew(replace(before, group_size=3), before).stages == StagesOptions(balance="seconds")
    assert config_file.cut_anew(replace(before, group_size=1), before).stages == StagesOptions()
    said = replace(before, group_size=3, stages=StagesOptions(("1", "2")))
    assert config_file.cut_anew(said, before) == said


def test_what_does_not_fit_is_named_with_both_shapes() -> None:
    shapes = r"of shape \(4, 8\), first weights of shape \(6, 9\)"
    with pytest.raises(ConfigError, match=f"module '1', a Linear, fails at inputs {shapes}"):
        settled(lambda: nn.Sequential(nn.Linear(64, 8), nn.Linear(9, 6), nn.Linear(6, 3)), 2)
    with pytest.raises(ConfigError, match=r"the model is a Slow: expected .* or stages.at, the names of modules of any model"):
        settled(lambda: Slow(1.0), 2)


def test_children_begin_stages_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    assert cut_into_stages(model, 2, 2, ["1"]).children == (range(1), range(1, 5))
    stages = cut_into_stages(model, 3, 4, ["4", "2"])
    assert stages.children == (range(2), range(2, 4), range(4, 5)) and stages.bounds == [(0, 42), (42, 84), (84, 105)]


def tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "at", "refused"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), ["2"], "stages.at: the model has no child '2', expected some of 0, 1"),
        (tied(), ["2"], r"stages.at = \['2'\]: modules '0' and '2' have weights in common"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Linear(6, 6)),
            ["1"],
            "the stage that begins with module '0' has no trainable parameters",
        ),
        (tied(), ["2", "3"], r"stages.at = \['2', '3'\]: expected 1 names for group_size = 2"),
    ],
)
def test_children_that_cannot_begin_stages_are_refused(model: nn.Module, at: list[str], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        cut_into_stages(model, 2, 2, at)


def test_names_are_given_once_and_beside_groups_alone() -> None:
    with pytest.raises(ConfigError, match=r"stages.at = \['1', '1'\]: expected each name once"):
        StagesOptions(("1", "1"))


@settings(max_examples=examples(100, 4), deadline=None)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=8), st.integers(1, 3))
def test_the_largest_run_is_as_small_as_can_be(sizes: list[int], count: int) -> None:
    layers = [Layer("", size) for size in sizes]
    edges = itertools.combinations(range(1, len(sizes)), count - 1)
    ways = [[sum(sizes[a:b]) for a, b in itertools.pairwise([0, *each, len(sizes)])] for each in edges]
    most = balance._least_longest(layers, count)
    assert most == min(map(max, ways))
    found = [sum(each.size for each in run) for run in cut_between(layers, count, most)]
    assert max(found) == most
    assert sum(size**2 for size in found) == min(sum(size**2 for size in way) for way in ways if max(way) == most)


def test_data_without_such_a_batch_is_refused() -> None:
    data = (torch.randn(40, 64), torch.randint(0, 64, (40,)), torch.randn(40, 1))
    with pytest.raises(ConfigError):
        with_measured_stages(
            config(2), UserObjects(model=lambda: nn.Sequential(Slow(1.0), Slow(1.0), Slow(1.0)), data=(data, data))
        )
