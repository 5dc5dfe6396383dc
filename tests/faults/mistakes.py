"""Mistakes of new users, and whether what is said helps: `python -m tests.faults.mistakes` writes `results/faults/mistakes.md`.

Habits of other frameworks, wrong files, data, models and launches. An answer helps if it names the mend: each entry says with which
words. None of them needs ranks: models and data are tried by `simulate`, which builds them as a rank does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .bad_case import Case
from .bad_input import message, said_here

TABLE = Path(__file__).parents[2] / "results" / "faults" / "mistakes.md"
LEAST = 55


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        meant: what the user wants.
        command: the words after `mpisgd`.
        mend: what an answer that helps names.
        why_not: why what is said does not help; empty: it does.
    """

    meant: str
    command: str
    mend: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""

    @property
    def case(self) -> Case:
        return Case(self.command, self.mend, self.files)


USER = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(64, 8), torch.arange(64) % 3

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(8, width)
    def forward(self, x):
        return self.inner(x)

def linear(): return nn.Linear(8, 3)
def narrow(): return nn.Linear(8, 2)
def wide_input(): return nn.Linear(9, 3)
def double(): return nn.Linear(8, 3).double()
def frozen():
    module = nn.Linear(8, 3)
    module.requires_grad_(False)
    return module
def forgets():
    nn.Linear(8, 3)
def pair(): return (nn.Linear(8, 3), "adam")
class Tuple(Net):
    def __init__(self): super().__init__(3)
    def forward(self, x): return self.inner(x), x
instance = linear()

def data(): return (x, y), (x, y)
def one_part(): return x, y
def loaders():
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    return loader, loader
def uneven(): return (x, y[:63]), (x, y)
def strings(): return (x, ["cat"] * 64), (x, ["cat"] * 64)
def nan(): return (x * float("nan"), y), (x, y)
def floats(): return (x, y.float()), (x, y.float())
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(zip(x, y))
def stream(): return Stream(), Stream()
def images(): return (torch.rand(64, 8, 8, 3), y), (torch.rand(64, 8, 8, 3), y)
def cnn(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
def lazy(): return nn.LazyLinear(3)
def nothing(): return (x[:0], y[:0]), (x, y)
def path(): return "train.csv"
def half(): return (x.half(), y), (x.half(), y)

def vector_loss(output, target): return nn.functional.cross_entropy(output, target, reduction="none")
def float_loss(output, target): return float(nn.functional.cross_entropy(output, target))
def one_argument(output): return output.sum()
"""
_SIMULATE = "simulate --virtual.learners 2 --epochs 1"


def tried(meant: str, words: str, *mend: str, why_not: str = "") -> Mistake:
    """With the user's module, and data and a model that are right where the words say no others."""
    data = "" if "--data" in words else " --data user:data"
    model = "" if "--model" in words else " --model user:linear"
    return Mistake(meant, f"{_SIMULATE} {words}{data}{model}", mend, {"user.py": USER}, why_not)


def file(meant: str, text: str, *mend: str, name: str = "job.toml") -> Mistake:
    return Mistake(meant, f"train {name} --print-config", mend, {name: text})


RANKS = "mpisgd run -n RANKS"
MISTAKES = (
    # Habits of other frameworks.
    Mistake("a learning rate", "train --lr 0.1", ("--alpha0",)),
    Mistake("a learning rate", "train --learning_rate=0.1", ("--alpha0",)),
    Mistake("a batch size", "train --batch-size 64", ("--mu", "each learner")),
    Mistake("four workers", "train --workers 4", (RANKS, "learners")),
    Mistake("loaders' processes", "train --num-workers 2", ("load their data themselves",)),
    Mistake("four ranks", "train --world-size 4", (RANKS,)),
    Mistake("four ranks", "train -n 4", (RANKS,)),
    Mistake("processes on each node", "train --nproc_per_node 4", (RANKS,)),
    Mistake("momentum", "train --momentum 0.9", ("--optimizer.momentum",)),
    Mistake("weight decay", "train --weight-decay 1e-4", ("--optimizer.weight-decay",)),
    Mistake("three epochs", "train --num-epochs 3", ("--epochs",)),
    Mistake("a number of steps", "train --max-steps 1000", ("--epochs", "fraction")),
    Mistake("another directory", "train --output-dir runs/a", ("--out",)),
    Mistake("GPUs", "train --gpus 2", ("--device", "cuda")),
    Mistake("a backend", "train --backend nccl", ("MPI", RANKS)),
    Mistake("to go on", "train --resume-from-checkpoint run", ("train --resume RUN",)),
    Mistake("checkpoints", "train --save-every 100", ("--checkpoint.every-updates",)),
    Mistake("clipping", "train --max-grad-norm 1", ("--clip-norm",)),
    Mistake("a configuration file", "train --config job.toml", ("mpisgd train job.toml",)),
    Mistake("curves on a server", "train --wandb", ("--loggers",)),
    Mistake("validation now and then", "train --val-every 10", ("--evaluation.every-epochs",)),
    Mistake("dropout", "train --dropout 0.5", ("--model.kwargs",)),
    Mistake("another schedule", "train --lr-scheduler cosine", ("--schedule",)),
    Mistake("a certain GPU", "train --device cuda:0", ("'cpu', 'cuda'",)),
    Mistake("half precision", "train --fp16", ("float32", "--push-format")),
    Mistake("virtual learners", "simulate --learners 100", ("--virtual.learners",)),
    # Names of other things.
    Mistake("AdamW", "train --optimizer AdamW", ("did you mean 'adamw'",)),
    Mistake("Lion", "train --optimizer lion", ("not here", "adagrad, adam, adamw, lamb, lars, rmsprop, sgd")),
    Mistake("SGD", "train --optimizer SGD", ("'sgd'",)),
    Mistake("bulk synchronous", "train --protocol bsp", ("use hardsync",)),
    Mistake("DDP", "train --protocol ddp", ("use allreduce",)),
    Mistake("a model of torchvision", "train --model resnet50", ("torchvision.models:resnet18",)),
    Mistake("CIFAR-100", "train --data cifar100", ("package.module:factory", "hdf5")),
    Mistake("a cosine schedule", "train --schedule cosine", ("use CosineAnnealingLR",)),
    tried("the class of a loss", "--loss CrossEntropyLoss", "did you mean 'cross_entropy'"),
    tried("the class of a loss", "--loss MSELoss", "did you mean 'mse_loss'"),
    # Files and first words.
    file("a file in YAML", "mu: 16\n", "is not TOML", name="job.yaml"),
    file("a learning rate in the file", "lr = 0.1\n", "alpha0"),
    file("a table of the optimiser", '[optimizer]\nname = "adam"\nlr = 0.001\n', "alpha0"),
    file("a table for training", "[training]\nepochs = 3\n", "top of the file"),
    file("a protocol without its name", "[protocol]\nn = 4\n", "'name'", "softsync"),
    file("numbers as text", 'mu = "16"\n', "mu = '16'", "int"),
    Mistake("its own script", "train train.py --print-config", ("is not TOML", "python train.py"), {"train.py": "import mpisgd\n"}),
    Mistake("to train a file", "job.toml", ("mpisgd train job.toml",), {"job.toml": ""}),
    Mistake("to train", "fit job.toml", ("mpisgd run -n RANKS job.toml",)),
    Mistake("to train on some ranks", "run job.toml", ("-n", "mpisgd run -n 6 job.toml"), {"job.toml": ""}),
    Mistake("to go on", "resume results/run", ("mpisgd run -n RANKS --resume RUN",)),
    Mistake(
        "to go on from a checkpoint's directory",
        "train --resume run/checkpoint",
        ("did you mean --resume run?",),
        {"run/config.toml": "", "run/checkpoint/": ""},
    ),
    Mistake("figures", "plot results/run", ("mpisgd report RUN",)),
    Mistake("a report of a file of the log", "report run/log.h5", ("run directory",), {"run/log.h5": "x"}),
    # Batch jobs.
    Mistake("eight tasks", "submit job.toml --ntasks 8", ("--learners",), {"job.toml": ""}),
    Mistake("GPUs", "submit job.toml --gpus 4", ("--gpus-per-node",), {"job.toml": ""}),
    Mistake("an hour", "submit job.toml --learners 4 --time 60sec --dry-run", ("hours:minutes",), {"job.toml": ""}),
    # Data and models.
    tried("arrays in a file", "--data arrays.npz", "package.module:factory", "hdf5"),
    tried("a script as the data", "--data user.py", "package.module:factory"),
    tried("data of one part", "--data user:one_part", "(train, test)"),
    tried("loaders", "--data user:loaders", "DataLoader", "batch_size", "mu"),
    tried("uneven data", "--data user:uneven", "64", "63"),
    tried("names as targets", "--data user:strings", "tensor"),
    tried("data that are not finite", "--data user:nan", "check data and model"),
    tried("a model that wants arguments", "--model user:Net", "width", "kwargs"),
    tried("a model, not its factory", "--model user:instance", "factory"),
    tried("a factory that returns nothing", "--model user:forgets", "torch.nn.Module"),
    tried("a model for other inputs", "--model user:wide_input", "(16, 8)"),
    tried("a model for fewer classes", "--model user:narrow", "3 classes"),
    tried("a model in double precision", "--model user:double", "float32"),
    tried("a model that returns a tuple", "--model user:Tuple", "tuple"),
    tried("a loss that returns a float", "--loss user:float_loss", "tensor"),
    tried("a lazy module", "--model user:lazy", "lazy", "a batch of inputs"),
    tried("an iterable data set", "--data user:stream", "__len__ and __getitem__"),
    tried("classes as floats", "--data user:floats", "targets torch.float32", "Long"),
    tried("channels last", "--data user:images --model user:cnn", "(16, 8, 8, 3)", "3 channels"),
    tried("a loss of one argument", "--loss user:one_argument", "(output, target)"),
    tried("MNIST without its files", "--data mnist --model softmax --data-dir .", "put the file into"),
)


def said(mistake: Mistake, directory: Path) -> tuple[int, str]:
    """Status and last line; what the user's own code raises, which no check has caught, is status 1."""
    sys.modules.pop("user", None)
    try:
        status, text = said_here(mistake.case, directory)
    except (AttributeError, TypeError) as error:
        return 1, f"{type(error).__name__}: {error}"
    return status, message(text, directory)


def helps(mistake: Mistake, status: int, text: str) -> bool:
    return status == 2 and all(word in text for word in mistake.mend)


HEAD = """# Mistakes of new users, and whether what is said helps

`python -m tests.faults.mistakes` makes this table; a test compares. An answer helps where it names the mend, in the words of the
third column; the last line of what is said is shown.

"""


def rows() -> list[tuple[Mistake, int, str]]:
    """All of them, with the status and the last line of what is said."""
    found = []
    for mistake in MISTAKES:
        with tempfile.TemporaryDirectory() as name:
            found.append((mistake, *said(mistake, Path(name))))
    return found


def table(found: list[tuple[Mistake, int, str]]) -> str:
    lines = ["| what the user wants | command | the mend | what is said | helps |", "|---|---|---|---|---|"]
    count = 0
    for mistake, status, text in found:
        good = helps(mistake, status, text)
        count += good
        cells = (
            mistake.meant,
            f"`mpisgd {mistake.command}`",
            ", ".join(mistake.mend),
            text,
            "yes" if good else f"no: {mistake.why_not}",
        )
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return HEAD + f"**{count} of {len(MISTAKES)} help.**\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ["COLUMNS"] = "200"
    TABLE.write_text(table(rows()))
