"""What `bench train`, `bench log`, `bench checkpoint` and `bench faults` train: a model, a mini-batch size, synthetic data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpisgd.config import Cifar10FullOptions, Config, EvaluationOptions, LogOptions, MlpOptions, ModelOptions, SyntheticOptions

LEARNERS = 2
SAMPLES = 2048
WARM_UP = 10
SEED = 1
DATA = SyntheticOptions(shape=(3, 32, 32), classes=10, samples=SAMPLES, test_samples=10)


@dataclass(frozen=True)
class Case:
    """A model and a mini-batch size; `updates` make one repetition, after WARM_UP more that are not timed."""

    name: str
    model: ModelOptions
    mu: int
    updates: int


CASES = (
    Case("CIFAR-10 network, mu = 16", Cifar10FullOptions(), 16, 150),
    Case("CIFAR-10 network, mu = 64", Cifar10FullOptions(), 64, 60),
    Case("MLP of 11 M parameters, mu = 16", MlpOptions(hidden=(2500, 1300)), 16, 60),
)


def config_of(directory: Path, case: Case, **special: Any) -> Config:
    """A run of hardsync into `directory`; `special`: fields that are others than usual."""
    config = Config(
        model=case.model,
        data=DATA,
        evaluation=EvaluationOptions(every_epochs=0, batch=10),
        log=LogOptions(progress="off"),
        out=str(directory / "run"),
        overwrite=True,
        mu=case.mu,
        alpha0=0.001,
        epochs=(WARM_UP + case.updates) * LEARNERS * case.mu / SAMPLES,
        threads=1,
    )
    return replace(config, **special)
