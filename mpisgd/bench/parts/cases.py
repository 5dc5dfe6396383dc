"""Cases of the benches, and ways of training them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mpisgd.config import (
    AlexNetOptions,
    Cifar10FullOptions,
    Config,
    EvaluationOptions,
    LogOptions,
    MlpOptions,
    ModelOptions,
    SyntheticOptions,
)
from mpisgd.protocols import (
    AllreduceOptions,
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    SandblasterOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)

Device = Literal["cpu", "cuda"]
LEARNERS = 2
WARM_UP = 10
"""Untimed first mini-batches of each learner."""
SEED = 1


SMALL = SyntheticOptions(shape=(3, 32, 32), classes=10, samples=2048, test_samples=10)
LARGE = SyntheticOptions(shape=(3, 224, 224), classes=1000, samples=64, test_samples=10)


@dataclass(frozen=True)
class Case:
    """A model and mini-batch size; a repetition has `updates` mini-batches per learner."""

    name: str
    model: ModelOptions
    mu: int
    updates: int
    data: SyntheticOptions = SMALL


CASES = {
    "cnn-4": Case("CIFAR-10 network, mu = 4", Cifar10FullOptions(), 4, 300),
    "cnn-16": Case("CIFAR-10 network, mu = 16", Cifar10FullOptions(), 16, 150),
    "cnn-64": Case("CIFAR-10 network, mu = 64", Cifar10FullOptions(), 64, 60),
    "mlp-16": Case("MLP of 11 M parameters, mu = 16", MlpOptions(hidden=(2500, 1300)), 16, 60),
    "mlp-1024": Case("MLP of 124 M parameters, mu = 1024", MlpOptions(hidden=(8192, 8192, 3840)), 1024, 20),
    "alexnet-16": Case("AlexNet, mu = 16", AlexNetOptions(), 16, 6, LARGE),
}
USUAL = ("cnn-16", "cnn-64", "mlp-16")


@dataclass(frozen=True)
class Way:
    """Differences from hardsync."""

    special: dict[str, Any]
    synchronous: bool = False
    """No gradient is stale, dropped or rounded."""

    @property
    def shards(self) -> int:
        return 0 if isinstance(self.special.get("protocol"), AllreduceOptions) else 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks in use: shard, coordinator, learners."""
        if isinstance(self.special.get("protocol"), SandblasterOptions):
            return (0, 1 + LEARNERS, *range(1, 1 + LEARNERS))
        return tuple(range(1 - self.shards, 1 + LEARNERS))


WAYS = {
    "hardsync": Way({"protocol": HardsyncOptions()}, synchronous=True),
    "hardsync-in-place": Way({"protocol": HardsyncOptions(), "way": "in-place"}, synchronous=True),
    "hardsync-whole": Way({"protocol": HardsyncOptions(), "way": "whole"}, synchronous=True),
    "hardsync-node": Way({"protocol": HardsyncOptions(), "aggregation": "node"}, synchronous=True),
    "allreduce": Way({"protocol": AllreduceOptions()}, synchronous=True),
    "allreduce-whole": Way({"protocol": AllreduceOptions(), "way": "whole"}, synchronous=True),
    "hardsync-bfloat16": Way({"protocol": HardsyncOptions(), "push_format": "bfloat16"}),
    "hardsync-bfloat16-both": Way({"protocol": HardsyncOptions(), "push_format": "bfloat16", "pull_format": "bfloat16"}),
    "softsync": Way({"protocol": SoftsyncOptions(n=LEARNERS)}),
    "softsync-ahead": Way({"protocol": SoftsyncOptions(n=LEARNERS), "ahead": 2}),
    "async": Way({"protocol": AsyncOptions()}),
    "ssp": Way({"protocol": SspOptions()}),
    "downpour": Way({"protocol": DownpourOptions()}),
    "versioned": Way({"protocol": VersionedOptions()}),
    "backup": Way({"protocol": BackupOptions(b=1)}),
    "timeout": Way({"protocol": TimeoutOptions()}),
    "sandblaster": Way({"protocol": SandblasterOptions(iterations=3), "alpha0": Config.alpha0, "epochs": Config.epochs}),
}
"""softsync: n = lambda. sandblaster: images of summed gradients, line search and commands included."""
ALL = "all"
"""Ways of three ranks."""


def config_of(directory: Path, case: Case, **special: Any) -> Config:
    config = Config(
        model=case.model,
        data=case.data,
        evaluation=EvaluationOptions(every_epochs=0, batch=10),
        log=LogOptions(progress="off"),
        out=str(directory / "run"),
        overwrite=True,
        mu=case.mu,
        alpha0=0.001,
        epochs=(WARM_UP + case.updates) * LEARNERS * case.mu / case.data.samples,
        threads=1,
    )
    return replace(config, **special)
