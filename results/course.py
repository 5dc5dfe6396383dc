"""A virtual run, computed in the order of its log: the same gradients, sums and steps, resumable after every epoch.

How stale a gradient is depends on seconds alone. So the virtual cluster runs first, without gradients; its log says which weights
each gradient came from, and of which gradients each update is made. That order is then computed: one gradient after the other, to
the bit; or to float tolerance, those of an update at the same weights in one pass, or on a GPU in windows (`windows.py`). All of it
is kept after every epoch: weights that gradients still to come are computed from, the optimiser, the epochs evaluated.

One shard; learners without own steps; models without buffers; no compensation of delays.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.recfunctions import repack_fields
from passes import Decay, Drawing, hooks_of, layers_of
from torch import Tensor
from virtual_runs import Job
from windows import Windows, refusal

from mpisgd.config import Config, Part
from mpisgd.config.config_file import from_mapping
from mpisgd.data import DataSet
from mpisgd.data.sampling import Indices, Sampling
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
Passing = Literal["one by one", "same weights", "windows"]
COLUMNS = ("clock", "timestamp", "learner_id", "seq", "samples", "gradients", "weight")
ALIKE = ("timestamp", "samples", "gradients", "weight")
"""Gradients of an update with the same of these are computed in one pass."""


@dataclass
class Joined:
    """A sampling: as one mini-batch those of several `rows`."""

    sampling: Sampling
    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[int] = ()
    ahead = False

    def indices(self, learner_id: int, seq: int) -> Indices:
        named = ((self.columns["learner_id"][row], self.columns["seq"][row]) for row in self.rows)
        return np.concatenate([self.sampling.indices(*each) for each in named])

    def deal(self, learner_id: int, portion: int) -> None:
        raise AssertionError("portions are not dealt")


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
        passes: which gradients are computed in one pass, where the job allows it; but "one by one" to float tolerance.

    Raises ConfigError, DataError where the job or its data cannot be had.
    """

    def __init__(self, job: Job, folder: Path, device: str = "cpu", passes: Passing = "one by one") -> None:
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
        why = "" if passes == "one by one" else _refusal(passes, config, self.tensors)
        self.windows = self._windows(per_update) if passes == "windows" and not why else None
        self._joined = Joined(self.tensors.sampling, self.columns) if passes == "same weights" and not why else None
        self._together = dataclasses.replace(self.tensors, sampling=self._joined or self.tensors.sampling).gradient(0)
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
        """Take the gradients up to this row, the last of an update."""
        start = self.state.row
        while start < stop:
            clock = self.columns["clock"][start]
            for rows in self._passes(range(start, self.last[clock] + 1)):
                _, timestamp, _, _, samples, gradients, weight = (column[rows[0]] for column in self.columns.values())
                self.model.weights.copy_(self.state.kept[timestamp])
                body = self.update.bodies.take()
                body.vector[:] = self._sum_of(rows)
                self.uses[timestamp] -= len(rows)
                if not self.uses[timestamp]:
                    del self.state.kept[timestamp]
                self.update.accumulate(body, weight, samples * len(rows), timestamp, gradients * len(rows))
            self._step(clock + 1)
            start = self.last[clock] + 1

    def _passes(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """The rows of an update whose gradients are computed in one pass."""
        if self._joined is None:
            yield from ([row] for row in rows)
            return
        same = dict[tuple[Any, ...], list[int]]()
        for row in rows:
            same.setdefault(tuple(self.columns[name][row] for name in ALIKE), []).append(row)
        yield from same.values()

    def _sum_of(self, rows: Sequence[int]) -> Tensor:
        """The sum of the gradients of these rows, at the model's weights."""
        if self._joined is None or len(rows) == 1:
            gradient = self.gradients[self.columns["learner_id"][rows[0]]]
            gradient.compute(self.columns["seq"][rows[0]])
            return torch.as_tensor(gradient.memory.gradients)
        self._joined.rows = rows
        self._together.compute(rows[0])
        return torch.as_tensor(self._together.memory.gradients) * len(rows)

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


def _refusal(passes: Passing, config: Config, tensors: Tensors) -> str:
    """Why gradients are computed one by one; "" = they need not be."""
    if passes == "windows" and not all(type(hook) is Decay for hooks in hooks_of(tensors.model.module).values() for hook in hooks):
        return "gradients have hooks"
    if passes == "same weights" and any(isinstance(layer, Drawing) for _, layer in layers_of(tensors.model.module)):
        return "the network draws numbers, by learner and mini-batch"
    return refusal(config, tensors)


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
