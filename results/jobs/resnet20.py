"""ResNet-20 on CIFAR-10 with crops and flips; way and epochs: `mpirun -n 5 python results/jobs/resnet20.py softsync 4`."""

import sys
from collections import OrderedDict

import torch
from torch import nn

import mpisgd
from mpisgd.data import cifar10

SGD = {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4}
OUTER = {"alpha0": 0.7, "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}}
DILOCO = {"local_steps": 8, "inner_alpha0": 0.05, "inner_optimizer": SGD, **OUTER}
WAYS = {"hardsync": {}, "softsync": {"protocol": {"name": "softsync", "n": 4}}, "diloco": DILOCO}
CONFIG = {
    "mu": 32, "alpha0": 0.1, "optimizer": SGD, "schedule": {"name": "CosineAnnealingLR", "warmup_epochs": 0.1},
    "groups": {"weight_decay": {"*norm*": 0.0, "*.bias": 0.0}}, "autocast": "bfloat16",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, after // before, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        if y.shape != x.shape:  # option A of the paper: no weights, half of the pixels, new channels of zeros
            x = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, y.shape[1] - x.shape[1]))
        return torch.relu(x + y)


def make_model():
    widths = [16] * 4 + [32] * 3 + [64] * 3
    stem = OrderedDict(conv=nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm=nn.BatchNorm2d(16), relu=nn.ReLU())
    body = nn.Sequential(nn.Sequential(stem), *map(Block, widths[:-1], widths[1:]), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(64, 10)))


class Crops(torch.utils.data.TensorDataset):
    def __getitem__(self, index):  # replay draws the same: draws are named by (seed, learner, mini-batch)
        (image, label), (top, left) = super().__getitem__(index), torch.randint(9, (2,))
        crop = nn.functional.pad(image / 255 - self.mean, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        return crop.flip(2) if torch.rand(()) < 0.5 else crop, label


def make_data(data_dir="", samples=50_000, test_samples=10_000):
    data = cifar10.load(data_dir, subtract=True)
    train, test = Crops(data.train.inputs[:samples], data.train.targets[:samples]), data.test
    train.mean, train.classes = data.train.mean, 10
    return train, (test.inputs[:test_samples] / 255 - test.mean, test.targets[:test_samples])


if __name__ == "__main__":
    way, epochs = sys.argv[1], float(sys.argv[2])
    config = {**CONFIG, **WAYS[way], "epochs": epochs, "out": f"results/resnet20-{way}"}
    mpisgd.train(model=make_model, data=make_data, config=config)
