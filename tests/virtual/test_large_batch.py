"""LARS, LAMB and the clipping of averaged gradients: a virtual hardsync job is a plain loop; stale ones are proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd.base.errors import ConfigError
from tests.effort import spread
from tests.papers_loops import Lamb, Lars, no_bias
from tests.virtual.jobs import HOW, simulated
from tests.virtual.test_optimisers import ALPHA0, JOB, LEARNERS, MU, check_equal, serial, weights

#: Three layers, so that three slices can be cut between them.
DEEP: dict[str, Any] = {"model": {"name": "mlp", "hidden": [24, 12]}}
EXCLUDED: dict[str, Any] = {"weight_decay": {"*.bias": 0.0}}
OPTIMIZERS: dict[str, tuple[type[Lars] | type[Lamb], dict[str, Any]]] = {
    "lars": (Lars, {"trust": Lars.trust, "weight_decay": 0.1}),
    "lamb": (Lamb, {"beta2": Lamb.beta2, "eps": Lamb.eps, "weight_decay": 0.1}),
}


@pytest.mark.parametrize(
    ("name", "shards", "how", "groups"),
    spread(
        [
            ("lars", 3, "layerwise", EXCLUDED),
            ("lamb", 3, "layerwise", {}),
            ("lamb", 1, "whole", EXCLUDED),
            ("lars", 1, "whole", {}),
        ],
        2,
        True,
    ),
)
def test_with_slices_of_whole_layers_it_is_the_papers_loop(
    name: str, shards: int, how: str, groups: dict[str, Any], tmp_path: Path
) -> None:
    kind, options = OPTIMIZERS[name]
    changes: dict[str, Any] = {"optimizer": {"name": name, **options}, "shards": shards, "groups": groups, **HOW[how]}
    simulated(tmp_path / "run", JOB, **changes, **DEEP)

    def loop(model: nn.Module) -> tuple[Any, None]:
        return kind(dict(model.named_parameters()), ALPHA0, 0.1, no_bias() if groups else lambda name: False), None

    check_equal(weights(tmp_path / "run"), serial(loop, hidden=(24, 12)))


def test_of_a_learners_own_steps_parameters_are_those_of_the_inner_optimiser(tmp_path: Path) -> None:
    """Only it looks at them; the shards' sees what is pushed."""
    inner: dict[str, Any] = {"local_steps": 2, "inner_optimizer": {"name": "lamb", **OPTIMIZERS["lamb"][1]}, "inner_alpha0": ALPHA0}
    changes = {
        **inner,
        "virtual": {"learners": 1},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "alpha0": 1.0,
        "mu": LEARNERS * MU,
    }
    simulated(tmp_path / "run", JOB, **changes)

    def loop(model: nn.Module) -> tuple[Any, None]:
        return Lamb(dict(model.named_parameters()), ALPHA0, 0.1, lambda name: False), None

    check_equal(weights(tmp_path / "run"), serial(loop))


class Clipped:
    """A loop of torch that clips before each step: the parameters' gradients as a whole, or each list of them by itself."""

    def __init__(self, of: list[list[nn.Parameter]], norm: float) -> None:
        self.of, self.norm = of, norm
        self.optimizer = torch.optim.SGD([each for part in of for each in part], ALPHA0, momentum=0.9)
        self.zero_grad = self.optimizer.zero_grad
        self.clipped = 0

    def step(self) -> None:
        for part in self.of:
            self.clipped += bool(torch.nn.utils.clip_grad_norm_(part, self.norm) > self.norm)
        self.optimizer.step()


@pytest.mark.parametrize(("shards", "of"), spread([(2, "slice"), (1, "slice"), (1, "model")], 2, unpack=True))
def test_averaged_gradients_are_clipped_as_a_loop_does(shards: int, of: str, tmp_path: Path) -> None:
    """Slices are those between the two layers."""
    changes: dict[str, Any] = {"clip_average": 0.2, "clip_average_of": of, "shards": shards, "per_layer": True}
    simulated(tmp_path / "run", JOB, **changes)
    loops: list[Clipped] = []

    def loop(model: nn.Module) -> tuple[Any, None]:
        parts = [list(layer.parameters()) for layer in model if list(layer.parameters())]  # type: ignore[attr-defined]
        loops.append(Clipped(parts if shards > 1 else [parts[0] + parts[1]], 0.2))
        return loops[0], None

    check_equal(weights(tmp_path / "run"), serial(loop))
    assert loops[0].clipped > 5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": "lamb", "local_steps": 2}, r"optimizer = LambOptions\(.*\): expected another beside local_steps > 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_written(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        simulated(tmp_path / "run", JOB, **changes)
    assert not (tmp_path / "run").exists()
