"""A virtual run, computed in the order of its log: the same gradients, sums and steps to the bit, resumable after every epoch.

How stale a gradient is depends on seconds alone. So the virtual cluster runs first, without gradients; its log says which weights
each gradient came from, and of which gradients each update is made. That order is then computed, one gradient after the other, or
on a GPU in windows (`windows.py`). All of it is kept after every epoch: weights that gradients still to come are computed from, the
optimiser, the epochs evaluated.

One shard; learners without own steps; models without buffers; no compensation of delays.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.recfunctions import repack_fields
from torch import Tensor
from virtual_runs import Job
from windows import Windows, refusal

from mpisgd.config import Config, Part
from mpisgd.config.config_file import from_mapping
from mpisgd.data import DataSet
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.job.tensors import Tensors
from mpisgd.records.log.reader import Run
from mpisgd.rules.verdict import Kind
from mpisgd.simulate import simulate
from mpisgd.update.schedule import of_run

TRAINING = 10_000
"""So many of the training samples, the first ones, are evaluated beside the test data."""
ROW = ("epochs", "test_error", "test_loss", "training_error", "training_loss")
"""What is known of each epoch; training: at the same weights, of the first `TRAINING` samples."""
AVERAGED = ("averaged_error", "averaged_loss")
"""More, where weights are averaged: of their average, on the test data."""
COLUMNS = ("clock", "timestamp", "learner_id", "seq", "samples", "gradients", "weight")


@dataclass
class State:
    """What a course goes on from.

    Attributes:
        row: the number of gradients taken.
        clock: the number of updates made.
        kept: weights by clock, of which gradients are still to be computed.
        update: state of the optimiser, and the weights.
        rows: of the epochs evaluated, as `ROW`.
        seconds: of this process and those before.
    """

    row: int = 0
    clock: int = 0
    samples: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)
    update: dict[str, Tensor] = field(default_factory=dict)
    rows: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0


class Course:
    """A job of one shard, computed in the order of its virtual run.

    Args:
        folder: where the state is kept; it must be of this job.
        at_once: compute it in windows, where the job allows it: to float tolerance, and not to the bit, it is the same.

    Raises ConfigError, DataError where the job or its data cannot be had.
    """

    def __init__(self, job: Job, folder: Path, device: str = "cpu", *, at_once: bool = False) -> None:
        self.config = config = from_mapping({**job, "out": str(folder / "run")})
        self.folder = folder
        torch.set_num_threads(config.threads)
        torch.backends.cudnn.allow_tf32 = False  # a GPU evaluates in float32, too
        data = parts.load_data(config, NO_OBJECTS)
        self.train_samples = len(data.train)
        self.tensors = Tensors.load(config, NO_OBJECTS, data, config.virtual.learners, device=device)
        self.tensors.shard_device = device
        self.tensors.check()
        self.order = order_of(config, folder / "order.npy", self.train_samples, self.tensors.model.size)
        learners = range(config.virtual.learners)
        self.gradients = [self.tensors.gradient(learner_id) for learner_id in learners]
        self.model, protocol = self.tensors.model, config.protocol.make(config.virtual.learners)
        per_update = parts.gradients_per_update(protocol, config.virtual.learners, config.virtual.learners)
        self.update = self.tensors.update((0, self.model.size), per_update)
        self.measures = [parts.make_measure(config, self.model, self.tensors.loss, each) for each in (data, _on_training(data))]
        self.uses = np.bincount(self.order["timestamp"])
        self.columns = {name: self.order[name].tolist() for name in COLUMNS}
        self.last = np.flatnonzero(np.diff(self.order["clock"], append=-1))
        """Of each update the row of its last gradient."""
        self.samples = np.cumsum(self.order["samples"])[self.last]
        self.state = State(kept={0: self.update.weights.clone()})
        why = refusal(config, self.tensors) if at_once else ""
        self.windows = self._windows(per_update) if at_once and not why else None
        if why:
            print(f"computed one gradient after the other: {why}", file=sys.stderr, flush=True)
        self._resume()

    @property
    def staleness(self) -> np.ndarray:
        """Of each gradient applied."""
        return np.asarray(self.order["clock"] - self.order["timestamp"])

    def run(self) -> Iterator[list[float]]:
        """Go on to the end; yield the row of each epoch once all is kept."""
        state, began = self.state, time.monotonic() - self.state.seconds
        if not state.rows:
            yield self._evaluate(0.0)
        while state.row < len(self.order):
            stop = self._due(len(state.rows) * self.config.evaluation.every_epochs)
            if self.windows is None:
                self._advance(stop)
            else:
                state.clock, state.kept = self.windows.advance(state.row, stop, state.clock, state.kept)
                averages = {"averages": torch.tensor(float(state.clock))} if self.config.averaging_bias_correction else {}
                self.update.restore({**self.windows.state, **averages}, int(self.samples[state.clock - 1]))
            found = self._evaluate(self.update.epochs)
            state.row, state.samples, state.seconds = stop, self.update.samples, time.monotonic() - began
            self._keep()
            yield found

    def _due(self, epochs: float) -> int:
        """The row after the update at which an evaluation is due."""
        update = int(np.searchsorted(self.samples / self.train_samples, epochs - 1e-9))
        return int(self.last[min(update, len(self.last) - 1)]) + 1

    def _advance(self, stop: int) -> None:
        """Take the gradients up to this row, each computed by itself."""
        for row in range(self.state.row, stop):
            clock, timestamp, learner_id, seq, samples, gradients, weight = (column[row] for column in self.columns.values())
            self.model.weights.copy_(self.state.kept[timestamp])
            self.gradients[learner_id].compute(seq)
            self.update.scratch[:] = self.gradients[learner_id].memory.gradients
            self.uses[timestamp] -= 1
            if not self.uses[timestamp]:
                del self.state.kept[timestamp]
            self.update.accumulate(weight, samples, timestamp, gradients)
            if row == self.last[clock]:
                self._step(clock + 1)

    def _windows(self, per_update: float) -> Windows:
        factor, alpha0 = of_run(self.config, per_update, self.train_samples), self.update.learning_rate
        rates = [alpha0 * factor(samples / self.train_samples) for samples in [0, *self.samples.tolist()]]
        return Windows(self.config, self.tensors, self.columns, rates, self.update.weights)

    def _step(self, clock: int) -> None:
        self.update.step()
        self.state.clock = clock
        if clock < len(self.uses) and self.uses[clock]:
            self.state.kept[clock] = self.update.weights.clone()

    def _evaluate(self, epochs: float) -> list[float]:
        averaged = [] if self.update.averaged is None else [(self.update.averaged, self.measures[0])]
        row = [epochs]
        for weights, measure in [*((self.update.weights, measure) for measure in self.measures), *averaged]:
            self.model.weights.copy_(weights)
            measure.prepare()
            found = measure.of(Part.TEST)
            row += [found.error, found.loss]
        self.state.rows.append(row)
        return row

    def _resume(self) -> None:
        path = self.folder / "state.pt"
        if path.is_file():
            self.state = State(**torch.load(path, map_location=self.model.weights.device))
            self.update.restore(self.state.update, self.state.samples)
            if self.windows is not None:
                self.windows.restore(self.state.update)
            self.uses -= np.bincount(self.order["timestamp"][: self.state.row], minlength=len(self.uses))
            self.state.kept = {clock: weights for clock, weights in self.state.kept.items() if self.uses[clock : clock + 1].any()}

    def _keep(self) -> None:
        self.state.update = self.update.state()
        aside = self.folder / f".state.{os.getpid()}"
        torch.save({item.name: getattr(self.state, item.name) for item in dataclasses.fields(State)}, aside)
        aside.replace(self.folder / "state.pt")


def _on_training(data: DataSet) -> DataSet:
    return dataclasses.replace(data, test=data.train.part(np.arange(min(TRAINING, len(data.train)))))


def order_of(config: Config, path: Path, train_samples: int, parameters: int) -> np.ndarray:
    """The gradients that the virtual run applies, in order; kept in a file."""
    if not path.is_file():
        virtual = dataclasses.replace(config.virtual, gradients=False, train_samples=train_samples, parameters=parameters)
        with tempfile.TemporaryDirectory(prefix="mpisgd-results-") as folder:
            log: dict[str, Any] = {"progress": "off", "flush_rows": 8192, "flush_s": 1e9}
            quiet = dataclasses.replace(config.log, **log)
            run = Run(simulate(dataclasses.replace(config, virtual=virtual, out=f"{folder}/run", log=quiet)).path)
            applied = run.pushes[run.pushes["verdict"] == Kind.APPLY]
            order = np.array(applied[list(COLUMNS)])
        aside = path.with_name(f".{path.name}.{os.getpid()}.npy")
        np.save(aside, repack_fields(order))
        aside.replace(path)
    return np.asarray(np.load(path))
