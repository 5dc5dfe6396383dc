"""One learner on real ranks has the bits of the plain torch loop: beside a shard, and as a process by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpisgd.records.log import schema
from tests.effort import thinned
from tests.torch_law import ZOO
from tests.torch_law.law import plain_loop

from .conftest import launch

ROOT = str(Path(__file__).parents[2])
NAMES = [name for name, idiom in ZOO.items() if not idiom.refused]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "protocol"), [(2, "hardsync"), (1, "allreduce")])
def test_it_has_the_bits_of_the_loop(ranks: int, protocol: str, tmp_path: Path) -> None:
    names = list(thinned(NAMES, 4))
    done = launch(ranks, "-m", "tests.torch_law", str(tmp_path), protocol, *names, timeout_s=300, PYTHONPATH=ROOT)
    assert done.status == 0, done.text
    for number, name in enumerate(names):
        loop = plain_loop(ZOO[name], ZOO[name].made(tmp_path / "unused"))
        ours = torch.load(tmp_path / str(number) / schema.WEIGHTS, weights_only=True)["theta"]
        for key, value in loop.state.items():
            assert torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value, (name, key)
