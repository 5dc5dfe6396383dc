"""One bad input, and short ways to write the most frequent kinds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


def one_line(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        command: the words after `mpisgd`.
        files: what lies in the directory, name -> text; a name that ends in "/" is a directory.
        names: what the message must name.
    """

    command: str
    names: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return self.command.split()

    def prepare(self, directory: Path) -> None:
        for name, text in self.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                path.mkdir(exist_ok=True)
            else:
                path.write_text(text)

    @property
    def told(self) -> str:
        """What the table says of it."""
        shown = [f"`{name}`: {one_line(text)}" if text else f"`{name}`" for name, text in self.files.items()]
        return ", ".join([f"`mpisgd {self.command}`".replace(" `", "`"), *shown])


def job(text: str, *names: str) -> Case:
    return Case("train job.toml", ("job.toml", *names), {"job.toml": text})


STEP = "from torch import nn\ndef step(model, batch):\n    return nn.functional.cross_entropy(model(batch[0]), batch[1])"
METRIC = STEP.replace("return ", "return {'loss': ") + ", 'share': "
_DATA = """import torch
from torch.utils.data import DataLoader, IterableDataset
class Samples:
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": self}
class Pairs(Samples):
    def __getitem__(self, index): return torch.ones(64), 1
class Stream(IterableDataset):
    def __iter__(self): return iter(())
def data(): return """


def own_step(name: str, text: str, *names: str) -> Case:
    module = f"step_{name}"
    return Case(f"simulate --virtual.learners 2 --step {module}:step", names, {f"{module}.py": text})


def own_data(name: str, made: str, *names: str) -> Case:
    module = f"data_{name}"
    words = f"simulate --virtual.learners 2 --step {module}:data --data {module}:data"
    return Case(words, names, {f"{module}.py": f"{_DATA}{made}, None\n"})
