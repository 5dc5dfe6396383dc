"""Models of Hugging Face's transformers train as they come: weights that layers share, outputs that are objects, dict batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpisgd import replay
from mpisgd.job.parts import UserObjects
from tests.virtual.jobs import TENSORS, simulated

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
TOKENS, LENGTH = 13, 6


class Texts:
    """Token numbers that count up, in the container in which a tokenizer gives them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        ids = (index + torch.arange(LENGTH)) % TOKENS
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def gpt2() -> Any:
    sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=TOKENS, **sizes))


def bert() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, **sizes))


def step(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


@pytest.mark.parametrize("model", [gpt2, bert])
def test_a_model_learns_and_its_log_is_a_proof(model: Any, tmp_path: Path) -> None:
    user_objects = UserObjects(model=model, data=(Texts(), Texts()), step=step)
    changes: dict[str, Any] = {"protocol": {"name": "softsync", "n": 2}, "shards": 2, "alpha0": 0.1, "epochs": 4}
    run = simulated(tmp_path / "run", TENSORS, user_objects, **changes)
    losses = run.evaluations["loss"]
    assert losses[-1] < losses[0]
    assert replay.check(tmp_path / "run", user_objects) == ""
    model().load_state_dict(torch.load(tmp_path / "run" / "weights.pt", weights_only=True)["theta"])
