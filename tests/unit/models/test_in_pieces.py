"""A list of factories: each rank calls those of its stage alone, and the evaluator has one stage at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisgd.base.errors import ConfigError
from mpisgd.comm.messages import FINAL
from mpisgd.config import Config, EvaluationOptions, Part
from mpisgd.evaluator import Evaluator, StagedEvaluator
from mpisgd.exchange.evaluator_channel import Snapshot
from mpisgd.exchange.roles import Role, of_job
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.job.tensors import Tensors, check_pieces, pieces_needed_by, stage_of
from mpisgd.models.in_pieces import InPieces
from mpisgd.vectors.cut import cut_into_stages
from mpisgd.vectors.flat import FlatModel

INPUTS, TARGETS = torch.randn(40, 6), torch.randint(0, 3, (40,))
CALLED: list[tuple[str, bool]] = []
"""Which factories were called, and whether for values."""


def piece(name: str, *layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        CALLED.append((name, torch.empty(0).device.type != "meta"))
        return nn.Sequential(*(layer() for layer in layers))

    return make


def tanh(inputs: int, outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


def four() -> list[Any]:
    return [piece(name, tanh(6, 6)) for name in "abc"] + [piece("d", lambda: nn.Linear(6, 3))]


def config_of(**options: Any) -> Config:
    return Config(**{"group_size": 3, "shards": 4, "evaluator": True, "micro_batches": 2, "mu": 4, **options})


def load(model: Any, rank: int | None, **options: Any) -> Tensors:
    """As a real rank has it; None: as a replay does."""
    config, user_objects = config_of(**options), UserObjects(model=model, data=((INPUTS, TARGETS), (INPUTS, TARGETS)))
    data = parts.load_data(config, user_objects)
    meta = parts.meta_of(data)
    needed = None if rank is None else pieces_needed_by(config, of_job(config, "n" * 11), rank)
    flat = parts.build_model(config, meta, user_objects, needed=needed)
    check_pieces(config, flat.module)
    return Tensors(config, meta, parts.load_loss(config, user_objects), flat, parts.make_sampling(config, meta, 2), data)


@pytest.mark.parametrize("rank", range(11))
def test_a_rank_makes_the_pieces_of_its_stage_alone(rank: int) -> None:
    """Four shards, two groups of three, an evaluator. The bits are those that the pieces have in the whole model."""
    whole = load(four, None)
    stages, roles = whole.stages, of_job(config_of(), "n" * 11)
    assert stages is not None and [list(children) for children in stages.children] == [[0], [1], [2, 3]]
    CALLED.clear()
    tensors = load(four, rank)
    stage = stage_of(roles, stages, rank)
    own = ["abcd"[at] for at in stages.children[stage]] if stage >= 0 else []
    assert [name for name, values in CALLED if values] == own
    assert (roles.of(rank) is Role.EVALUATOR) == (own == [])
    assert tensors.model.fingerprint == whole.model.fingerprint and tensors.stages == stages
    for name, parameter in tensors.model.module.named_parameters():
        mine = stage >= 0 and int(name.partition(".")[0]) in stages.children[stage]
        assert parameter.is_meta != mine
        assert not mine or torch.equal(parameter, dict(whole.model.module.named_parameters())[name])
    start, end = stages.bounds[stage] if stage >= 0 else (0, 0)
    assert torch.equal(tensors.model.weights[start:end], whole.model.weights[start:end])
    assert not tensors.model.weights[:start].any() and not tensors.model.weights[end:].any()
    if roles.of(rank) is Role.LEARNER:
        assert math.isnan(tensors.check())
        assert tensors.passes(0, stage)._model.size == end - start


class Reads(nn.Linear):
    """Looks at values, which its piece has not on meta."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.layer(inputs))
        return output


def frozen() -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "options", "refused"),
    [
        (
            lambda: [tanh(6, 5), tanh(4, 6), tanh(6, 3)],
            {},
            r"of stage 0, of shape \(2, 5\), does not fit stage 1 with first weights",
        ),
        (
            lambda: [tanh(6, 6), tanh(6, 6), tanh(6, 3), lambda: 3],
            {},
            "factory 3 of the list returned int, expected a torch.nn.Module",
        ),
        (lambda: [tanh(6, 6), tanh(6, 6)], {}, "group_size = 3: expected at most .* possible stages of the model, 2 "),
        (four, {"init_from": "w.pt"}, "init_from = 'w.pt': expected none beside a list of factories"),
        (four, {"evaluation": EvaluationOptions(best="error")}, "evaluation.best = 'error': expected '' beside a list"),
        (lambda: [*four()[:3], Sees, tanh(6, 3)], {}, "evaluation.buffers = 'learner': expected 'initial' beside a list"),
        (
            lambda: [*four()[:3], frozen, tanh(6, 3)],
            {},
            "model: parameter 3.weight is frozen, expected trainable parameters beside a list",
        ),
    ],
)
def test_what_cannot_be_is_refused(model: Any, options: dict[str, Any], refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.initial, "load", lambda *_: None)
    with pytest.raises(ConfigError, match=refused):
        tensors = load(model, 4, **options)
        tensors.check()
        tensors.check_pieces_fit()


def test_what_cannot_be_tried_without_values_is_not() -> None:
    load(lambda: [tanh(6, 6), lambda: Reads(6, 6), tanh(6, 3)], 4).check_pieces_fit()


# ---------------------------------------------------------------------------------------------------------- evaluation


class Channel:
    """Snapshots of a run of three, of which shard 3 does not have the last."""

    def __init__(self, vectors: list[np.ndarray], bounds: list[tuple[int, int]], lost: int = -9) -> None:
        self.vectors, self.bounds, self.lost = vectors, bounds, lost
        self.most = 0

    def now_s(self) -> float:
        return 0.0

    def check(self) -> None:
        return

    def goodbye(self) -> None:
        return

    def pull(self, number: int, shards: Any = (), into: Any = (), start: int = 0) -> Snapshot | None:
        if number >= 3:
            return None
        for shard in shards or range(len(self.bounds)):
            if (shard, number) == (3, self.lost):
                return None
            begin, end = self.bounds[shard]
            for at, vector in enumerate(into or self.whole):
                vector[begin - start : end - start] = self.vectors[at][begin:end] * (2 + number)
        clocks = tuple(10 * (shard + 1) + number for shard in (shards or range(len(self.bounds))))
        self.most = max(self.most, sum(vector.size for vector in into))
        return Snapshot(number, clocks, 100, 0.5)


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def begin(self, *_: Any) -> None:
        return

    found = batch = begin

    def evaluation(self, **row: float) -> None:
        self.rows.append(row)


def evaluated(path: Path, staged: bool, vectors: int, lost: int = -9) -> tuple[list[dict[str, float]], Channel]:
    tensors = load(four, 10 if staged else None)
    stages, model, config = tensors.stages, tensors.model, config_of()
    assert stages is not None and tensors.data is not None
    drawn = torch.Generator().manual_seed(7)
    given = [torch.randn(model.size, generator=drawn).numpy() for _ in range(2)]
    channel, log = Channel(given[:vectors], stages.slices, lost), Rows()
    pulled = [torch.zeros(model.size) for _ in range(vectors)]
    channel.whole = [each.numpy() for each in pulled]  # type: ignore[attr-defined]
    named: dict[str, Any] = {"evaluated": (Part.TEST, Part.TRAINING), "train_samples": 40, "progress": Rows()}
    measure = parts.make_measure(config, model, tensors.loss, tensors.data)
    if staged:
        pieces = tensors.in_pieces
        assert pieces is not None
        own = {"stages": stages, "pieces": pieces, "loss": tensors.loss, "data": tensors.data}
        own |= {"batch": config.evaluation.batch, "seed": config.seed, "vectors": vectors}
        evaluator: Any = StagedEvaluator(channel, model, pulled, measure, log, **own, **named)
    else:
        evaluator = Evaluator(channel, model, pulled, measure, log, **named)  # type: ignore[arg-type]
    evaluator.evaluate_all(path)
    return [{name: value for name, value in row.items() if name != "evaluate_s"} for row in log.rows], channel


@pytest.mark.parametrize("vectors", [1, 2])
def test_stage_by_stage_it_is_the_same(tmp_path: Path, vectors: int) -> None:
    """Rows of the log, to the bit, and the file of weights; of the model there is never more than a stage."""
    whole, _ = evaluated(tmp_path / "whole.pt", False, vectors)
    staged, channel = evaluated(tmp_path / "staged.pt", True, vectors)
    assert staged == whole and len(whole) == 4 * 2 * vectors
    assert channel.most == vectors * max(end - start for start, end in cut_into_stages(load(four, None).model.module, 3, 4).bounds)
    ours, theirs = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("staged", "whole"))
    assert list(ours) == list(theirs) == ["theta", "thetabar"][:vectors]
    for vector, state in theirs.items():
        assert list(ours[vector]) == list(state)
        assert all(torch.equal(ours[vector][name], each) for name, each in state.items())


def test_a_snapshot_that_a_later_stage_has_not_is_not_evaluated(tmp_path: Path) -> None:
    rows, _ = evaluated(tmp_path / "weights.pt", True, 1, lost=2)
    assert [row["snapshot"] for row in rows] == [0, 0, 1, 1, 2, 2], "and of the last weights"
    assert (tmp_path / "weights.pt").is_file()
    assert FINAL < 0


def test_a_model_of_factories_may_be_whole() -> None:
    model = load(four, None).model
    assert isinstance(model.module, InPieces) and model.module.whole
    assert FlatModel(model.module).size == model.size
