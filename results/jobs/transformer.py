"""A transformer on this project's pages, as bytes; way and epochs: `mpirun -n 5 python results/jobs/transformer.py diloco 20`."""

import sys
from itertools import compress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mpisgd

CONTEXT = 128
ADAMW = {"name": "adamw", "weight_decay": 0.1}
OUTER = {"alpha0": 0.7, "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}}
DILOCO = {"local_steps": 8, "inner_alpha0": 0.002, "inner_optimizer": ADAMW, **OUTER}
WAYS = {"hardsync": {}, "softsync": {"protocol": {"name": "softsync", "n": 4}}, "diloco": DILOCO}
CONFIG = {
    "mu": 4, "alpha0": 0.002, "optimizer": ADAMW, "schedule": {"name": "CosineAnnealingLR", "warmup_epochs": 1.0},
    "groups": {"weight_decay": {"*norm*": 0.0, "*bias": 0.0, "position": 0.0}}, "clip_norm": 1.0, "autocast": "bfloat16",
}  # fmt: skip


class Transformer(nn.Module):
    def __init__(self, width=96, depth=2):
        super().__init__()
        self.letters, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(depth)]
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text):
        x, mask = self.letters(text) + self.position, nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Shifted(TensorDataset):
    def __getitem__(self, index):  # replay draws the same: draws are named by (seed, learner, mini-batch)
        (window,), shift = super().__getitem__(index), torch.randint(CONTEXT, ())
        return (window[shift : shift + CONTEXT + 1],)


def make_data():
    pages = [page.read_bytes() for page in sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))]
    held_out = [at % 5 == 0 for at in range(len(pages))]
    train, test = (torch.tensor(list(b"".join(compress(pages, which)))) for which in ([not each for each in held_out], held_out))
    return Shifted(train.unfold(0, 2 * CONTEXT, CONTEXT)), TensorDataset(test.unfold(0, CONTEXT + 1, CONTEXT))


def step(model, batch):
    (text,) = batch
    loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
    return {"loss": loss, "perplexity": loss.exp()}  # of the test data as a whole: they are one batch


if __name__ == "__main__":
    way, epochs = sys.argv[1], float(sys.argv[2])
    config = {**CONFIG, **WAYS[way], "epochs": epochs, "evaluation": {"batch": 10_000}, "out": f"results/transformer-{way}"}
    mpisgd.train(model=Transformer, step=step, data=make_data, config=config)
