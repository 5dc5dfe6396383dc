"""A tiny BERT of Hugging Face's transformers that fills in masked words; its pooler is not used, and gets no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.jobs.ported.rows import Rows
from tests.torch_law.law import Idiom

TOKENS, LENGTH, MASK = 24, 10, 0


def bert() -> nn.Module:
    import transformers  # which not everybody has

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, **sizes)
    made: nn.Module = transformers.BertForPreTraining(config)
    return made


def sentences() -> Any:
    """Words that count up, some of which are masked."""
    draws = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(200):
        begin = int(torch.randint(1, TOKENS - LENGTH, (), generator=draws))
        words = begin + torch.arange(LENGTH)
        masked = torch.rand(LENGTH, generator=draws) < 0.2
        labels = torch.where(masked, words, -100)
        rows.append({"input_ids": torch.where(masked, MASK, words), "labels": labels, "attention_mask": torch.ones_like(words)})
    return Rows(rows[:160]), Rows(rows[160:])


def step(model: Any, batch: Any) -> torch.Tensor:
    """Of masked words alone: nobody asks whether sentences follow each other."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    found: torch.Tensor = nn.functional.cross_entropy(output.prediction_logits.flatten(0, 1), batch["labels"].flatten())
    return found


IDIOM = Idiom(
    bert,
    sentences,
    step=step,
    optimizer=lambda them: torch.optim.AdamW(them, lr=0.002),
    config={"optimizer": "adamw", "alpha0": 0.002, "mu": 10, "epochs": 4},
)
