"""Ports of public training scripts: one learner has the bits of their plain loop, two are within its spread over seeds."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd.records.log import schema
from mpisgd.simulate import simulate
from tests.jobs.ported import PORTED
from tests.torch_law.law import Idiom, loss_on_test_data, plain_loop
from tests.virtual.test_torch_law import same

SEEDS = 1, 2, 3


def needs(name: str) -> None:
    if "BERT" in name:
        pytest.importorskip("transformers")


def seeded(idiom: Idiom, seed: int, **fields: Any) -> Idiom:
    return Idiom(**{**vars(idiom), "config": {**idiom.config, "seed": seed, **fields}})


def trained(idiom: Idiom, out: Path) -> dict[str, Any]:
    simulate(idiom.made(out), idiom.user_objects)
    found: dict[str, Any] = torch.load(out / schema.WEIGHTS, weights_only=True)["theta"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTED)
def test_one_learner_has_the_bits_of_the_loop(name: str, tmp_path: Path) -> None:
    needs(name)
    idiom = seeded(PORTED[name], 1)
    loop = plain_loop(idiom, idiom.made(tmp_path / "unused"))
    ours = trained(idiom, tmp_path / "run")
    assert {key for key, value in loop.state.items() if not same(ours[key], value)} == set()
    assert sum(loop.losses[-20:]) < sum(loop.losses[:20])


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTED)
def test_two_learners_are_within_the_spread_over_seeds(name: str, tmp_path: Path) -> None:
    """Of the test loss in the end, twice as wide; of batches of half the size for each of two."""
    needs(name)
    idiom, found = PORTED[name], list[float]()
    measure: list[Any] = []

    def watch(steps: int, model: nn.Module, loss_of: Any, data: Any) -> None:
        measure[:] = [model, loss_of, data]

    for seed in SEEDS:
        each = seeded(idiom, seed)
        plain_loop(each, each.made(tmp_path / "unused"), watch=watch)
        found.append(loss_on_test_data(*measure))
    model, loss_of, data = measure
    half = {"virtual": {"learners": 2}, "mu": idiom.config["mu"] // 2, "shards": 2}
    model.load_state_dict(trained(seeded(idiom, 4, **half), tmp_path / "run"))
    ours = loss_on_test_data(model, loss_of, data)
    middle, room = sum(found) / len(found), max(found) - min(found)
    assert abs(ours - middle) <= max(2 * room, 0.05 * middle), (ours, found)


def test_what_the_example_has_and_we_have_not_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="optimizer = 'adadelta' is unknown: it is not here"):
        seeded(PORTED["the convolutional network of the MNIST example"], 1, optimizer="adadelta").made(tmp_path)


def test_pages_are_short() -> None:
    """Each as long as a script that somebody would bring."""
    for name in ("character_gpt", "mnist", "recommender", "tiny_bert", "vae", "word_model"):
        module = importlib.import_module(f"tests.jobs.ported.{name}")
        assert len(Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()) < 100
