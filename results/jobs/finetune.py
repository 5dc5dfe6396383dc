"""The ResNet-20 of CIFAR-10 gets used to another camera, of which there are 1,000 pictures: grey negatives, half as bright.

mpirun -n 5 python results/jobs/resnet20.py hardsync 6
mpirun -n 5 python results/jobs/finetune.py hardsync 8      # way and epochs; "anew" begins with other weights
"""

import sys

from resnet20 import SGD, Crops, make_model

import mpisgd
from mpisgd.data import cifar10

START = "results/resnet20-hardsync"
OUTER = {"alpha0": 0.7, "optimizer": {"name": "sgd", "momentum": 0.5, "nesterov": True}}
DILOCO = {"local_steps": 4, "inner_alpha0": 0.02, "inner_optimizer": SGD, **OUTER}
ANEW = {"init_from": "", "alpha0": 0.05}
WAYS = {"hardsync": {}, "softsync": {"protocol": {"name": "softsync", "n": 4}}, "diloco": DILOCO, "anew": ANEW}
CONFIG = {
    "mu": 8, "alpha0": 0.02, "optimizer": SGD, "schedule": {"name": "CosineAnnealingLR"}, "init_from": START,
    "groups": {"weight_decay": {"*norm*": 0.0, "*.bias": 0.0}}, "autocast": "bfloat16",
}  # fmt: skip


def camera(pictures):
    return (255 - pictures.float().mean(1, keepdim=True)).expand(-1, 3, -1, -1) / 2


def make_data(data_dir="", samples=1000, test_samples=10_000):
    data = cifar10.load(data_dir, subtract=True)
    seen = camera(data.train.inputs[-samples:])  # the first 25,000 are those that the other job trained with
    train, test = Crops(seen, data.train.targets[-samples:]), camera(data.test.inputs[:test_samples])
    train.mean, train.classes = seen.mean() / 255, 10
    return train, (test / 255 - train.mean, data.test.targets[:test_samples])


if __name__ == "__main__":
    way, epochs = sys.argv[1], float(sys.argv[2])
    config = {**CONFIG, **WAYS[way], "epochs": epochs, "out": f"results/finetune-{way}"}
    mpisgd.train(model=make_model, data=make_data, config=config)
