"""Prediction by a short virtual run without gradients, observed like any log."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, ConstantOptions, EvaluationOptions, LogOptions, replace
from mpisgd.config.config_virtual import FailureOptions
from mpisgd.plan.costs.observe import Observed, observe
from mpisgd.records.log.reader import Run
from mpisgd.simulate import simulate

#: Pushes of a prediction: a second or two.
PUSHES = 20_000
#: Least updates of a prediction, and least rounds of a push per learner.
LEAST_UPDATES = 4
LEAST_ROUNDS = 3
#: Rows kept in memory before writing.
_ROWS = 500_000


def predict(config: Config, pushes: int = PUSHES) -> Observed:
    """Predict by about `pushes`, or more for a few updates. Raises ConfigError, DataError: no simulation."""
    lambda_ = config.virtual.learners
    updates = max(LEAST_UPDATES, max(pushes, LEAST_ROUNDS * lambda_) // pushes_per_update(config))
    samples = updates * config.protocol.make(lambda_).gradients_per_update * config.mini_batches_per_push * config.mu
    with tempfile.TemporaryDirectory(prefix="mpisgd-plan-") as folder:
        outcome = simulate(_cut(config, samples, Path(folder) / "run"))
        found = observe(Run(outcome.path))
    if found is None:
        raise ConfigError(f"{updates} updates of {config.virtual.learners} virtual learners are too few to be observed")
    return found


def pushes_per_update(config: Config) -> int:
    """Return pushes per update, with dropped ones; synchronous learners push at most once."""
    protocol = config.protocol.make(config.virtual.learners)
    return config.virtual.learners if protocol.consistent else protocol.gradients_per_update


def _cut(config: Config, samples: int, out: Path) -> Config:
    """Cut a configuration to `samples`, without options of no virtual second, which another protocol or number of shards may
    refuse. Clipping stays if shards agree on a norm: a round trip."""
    return replace(
        config,
        out=str(out),
        epochs=1.0,
        schedule=ConstantOptions(),
        modulate="gradient",
        compensation=0.0,
        clip_average=config.clip_average if config.agrees and config.protocol.alike else 0.0,
        virtual=dataclasses.replace(config.virtual, gradients=False, batched=False, train_samples=samples),
        evaluation=EvaluationOptions(every_epochs=0),
        log=LogOptions(flush_rows=_ROWS, flush_s=3600, progress="off"),  # rows in memory are amended fast
        failures=FailureOptions(),
    )
