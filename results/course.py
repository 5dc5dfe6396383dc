"""A virtual run, computed in the order of its log: the same gradients, sums and steps to the bit, resumable after every epoch.

How stale a gradient is depends on seconds alone. So the virtual cluster runs first, without gradients; its log says which weights
each gradient came from, and of which gradients each update is made. That order is then computed, one gradient after the other, or
on a GPU all at once whose weights are there. All of it is kept after every epoch: weights that gradients still to come are computed
from, the optimiser, the epochs evaluated.

One shard; learners without own steps; models without buffers; no compensation of delays.
"""

from __future__ import annotations

import dataclasses
import os
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

from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, Part
from mpisgd.config.config_file import from_mapping
from mpisgd.data import DataSet
from mpisgd.job import parts
from mpisgd.job.parts import NOTHING_BROUGHT
from mpisgd.job.tensors import Tensors
from mpisgd.records.log.reader import Run
from mpisgd.rules.verdict import Kind
from mpisgd.simulate import simulate
from mpisgd.simulate.batch import Batch
from mpisgd.update.slice_update import SliceUpdate

TRAINING = 10_000
"""So many of the training samples, the first ones, are evaluated beside the test data."""
ROW = ("epochs", "test_error", "test_loss", "training_error", "training_loss")
"""What is known of each epoch; training: at the same weights, of the first `TRAINING` samples."""
AVERAGED = ("averaged_error", "averaged_loss")
"""More, where weights are averaged: of their average, on the test data."""
_COLUMNS = ("clock", "timestamp", "learner_id", "seq", "samples", "gradients", "weight")


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
        at_once: compute the gradients of many learners at once, if the model allows it: to float tolerance, and not to the bit,
            those of one by one.

    Raises ConfigError, DataError where the job or its data cannot be had.
    """

    def __init__(self, job: Job, folder: Path, device: str = "cpu", *, at_once: bool = False) -> None:
        self.config = config = from_mapping({**job, "out": str(folder / "run")})
        self.folder = folder
        torch.set_num_threads(config.threads)
        data = parts.load_data(config, NOTHING_BROUGHT)
        self.train_samples = len(data.train)
        self.order = _order(config, folder / "order.npy", self.train_samples)
        self.tensors = Tensors.load(config, NOTHING_BROUGHT, data, config.virtual.learners, device=device)
        self.tensors.shard_device = device
        self.tensors.check()
        learners = range(config.virtual.learners)
        self.gradients = [self.tensors.gradient(learner_id) for learner_id in learners]
        self.batch = _batch(config, self.tensors) if at_once else None
        self.rooms = [torch.empty_like(self.tensors.model.weights) for _ in learners] if self.batch else []
        self.model, protocol = self.tensors.model, config.protocol.make(config.virtual.learners)
        per_update = parts.gradients_per_update(protocol, config.virtual.learners, config.virtual.learners)
        self.update = self.tensors.update((0, self.model.size), per_update, kind=SliceUpdate)
        self.measures = [parts.make_measure(config, self.model, self.tensors.loss, each) for each in (data, _on_training(data))]
        self.uses = np.bincount(self.order["timestamp"])
        self.state = State(kept={0: self.update.weights.clone()})
        self._resume()
        by_learner = np.argsort(self.order["learner_id"], kind="stable")[::-1]
        left = by_learner[by_learner >= self.state.row]
        self.coming = [left[self.order["learner_id"][left] == each].tolist() for each in learners] if self.batch else []
        """Of each learner the rows that are not yet taken, the next one last."""
        self.begun: set[int] = set()
        """Learners whose next gradient is computed, or about to be."""

    @property
    def staleness(self) -> np.ndarray:
        """Of each gradient applied."""
        return np.asarray(self.order["clock"] - self.order["timestamp"])

    def run(self) -> Iterator[list[float]]:
        """Go on to the end; yield the row of each epoch once all is kept."""
        state, order, began = self.state, self.order, time.monotonic() - self.state.seconds
        if not state.rows:
            yield self._evaluate(0.0)
        columns = [order[name].tolist() for name in _COLUMNS]
        for row in range(state.row, len(order)):
            clock, timestamp, learner_id, seq, samples, gradients, weight = (column[row] for column in columns)
            if self.batch is None:
                self._compute(learner_id, timestamp, seq)
            else:
                self._compute_at_once(self.batch, learner_id)
            self.uses[timestamp] -= 1
            if not self.uses[timestamp]:
                del state.kept[timestamp]
            self.update.accumulate(weight, samples, timestamp, gradients)
            if row + 1 == len(order) or columns[0][row + 1] > clock:
                self._step(clock + 1)
                due = len(state.rows) * self.config.evaluation.every_epochs
                if self.update.epochs >= due - 1e-9 or row + 1 == len(order):
                    found = self._evaluate(self.update.epochs)
                    state.row, state.samples, state.seconds = row + 1, self.update.samples, time.monotonic() - began
                    self._keep()
                    yield found

    def _compute(self, learner_id: int, timestamp: int, seq: int) -> None:
        self.model.weights.copy_(self.state.kept[timestamp])
        self.gradients[learner_id].compute(seq)
        self.update.scratch[:] = self.gradients[learner_id].memory.gradients

    def _compute_at_once(self, batch: Batch, learner_id: int) -> None:
        """With this learner's next gradient all that come from weights that are there."""
        if learner_id not in self.begun:
            for each, rows in enumerate(self.coming):
                weights = self.state.kept.get(int(self.order["timestamp"][rows[-1]])) if rows else None
                if weights is not None and each not in self.begun:
                    batch.add(each, int(self.order["seq"][rows[-1]]), weights, self.rooms[each])
                    self.begun.add(each)
        batch.result(learner_id)
        self.begun.discard(learner_id)
        self.coming[learner_id].pop()
        self.update.scratch[:] = self.rooms[learner_id]

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
            self.uses -= np.bincount(self.order["timestamp"][: self.state.row], minlength=len(self.uses))

    def _keep(self) -> None:
        self.state.update = self.update.state()
        aside = self.folder / f".state.{os.getpid()}"
        torch.save({item.name: getattr(self.state, item.name) for item in dataclasses.fields(State)}, aside)
        aside.replace(self.folder / "state.pt")


def _batch(config: Config, tensors: Tensors) -> Batch | None:
    assert tensors.data is not None
    batch = Batch(config, tensors.model, tensors.loss, tensors.data, tensors.sampling)
    try:
        batch.check()
    except ConfigError:
        return None
    return batch


def _on_training(data: DataSet) -> DataSet:
    return dataclasses.replace(data, test=data.train.part(np.arange(min(TRAINING, len(data.train)))))


def _order(config: Config, path: Path, train_samples: int) -> np.ndarray:
    """The gradients that the virtual run applies, in order; kept in a file."""
    if not path.is_file():
        virtual = dataclasses.replace(config.virtual, gradients=False, train_samples=train_samples)
        with tempfile.TemporaryDirectory(prefix="mpisgd-results-") as folder:
            log: dict[str, Any] = {"progress": "off", "flush_rows": 8192, "flush_s": 1e9}
            quiet = dataclasses.replace(config.log, **log)
            run = Run(simulate(dataclasses.replace(config, virtual=virtual, out=f"{folder}/run", log=quiet)).path)
            applied = run.pushes[run.pushes["verdict"] == Kind.APPLY]
            order = np.array(applied[list(_COLUMNS)])
        aside = path.with_name(f".{path.name}.{os.getpid()}.npy")
        np.save(aside, repack_fields(order))
        aside.replace(path)
    return np.asarray(np.load(path))
