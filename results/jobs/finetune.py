"""ResNet-20 of CIFAR-10 learns digits from 1,000 pictures: a new head, and a tenth of the rate for the body.

mpisgd export results/resnet20-hardsync resnet20.pt
python results/jobs/finetune.py prepare resnet20.pt
mpirun -n 5 python results/jobs/finetune.py hardsync 10      # way and epochs
"""

import sys

import torch
from resnet20 import OUTER, SGD, make_model
from torch.nn.functional import pad

import mpisgd
from mpisgd.data import mnist

START = "results/finetune-start.pt"
DILOCO = {"local_steps": 4, "inner_alpha0": 0.05, "inner_optimizer": SGD, **OUTER}
WAYS = {"hardsync": {}, "softsync": {"protocol": {"name": "softsync", "n": 4}}, "diloco": DILOCO}
CONFIG = {
    "mu": 8, "alpha0": 0.1, "optimizer": SGD, "schedule": {"name": "CosineAnnealingLR"}, "init_from": START,
    "groups": {"rate": {"body.*": 0.1}, "weight_decay": {"*norm*": 0.0, "*.bias": 0.0}}, "autocast": "bfloat16",
}  # fmt: skip


def prepare(pretrained, start=START):
    body = {name: each for name, each in torch.load(pretrained, weights_only=True).items() if not name.startswith("head.")}
    torch.save({**make_model().state_dict(), **body}, start)


def as_colours(split, samples):
    pictures = pad(split.inputs[:samples] / 255, (2, 2, 2, 2)) - 0.1
    return pictures.expand(-1, 3, -1, -1), split.targets[:samples]


def make_data(data_dir="", samples=1000, test_samples=10_000):
    data = mnist.load("mnist", data_dir, subtract=False)
    return as_colours(data.train, samples), as_colours(data.test, test_samples)


if __name__ == "__main__":
    way, epochs = sys.argv[1:]
    if way == "prepare":
        prepare(epochs)
    else:
        config = {**CONFIG, **WAYS[way], "epochs": float(epochs), "out": f"results/finetune-{way}"}
        mpisgd.train(model=make_model, data=make_data, config=config)
