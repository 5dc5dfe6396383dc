"""Evaluator's loop: pull snapshots, measure, record; nobody waits for it (law 7).

It runs on a rank of its own, or on learner 0 after the goodbye. A model in pieces (`models/in_pieces.py`) is evaluated stage by
stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.serialization import skip_data

from mpisgd.base import durable
from mpisgd.base.draws import kept
from mpisgd.base.errors import PeerError
from mpisgd.base.storage import writing
from mpisgd.comm.messages import FINAL
from mpisgd.config import EvaluationOptions, Part
from mpisgd.data import DataSet
from mpisgd.exchange.evaluator_channel import EvaluatorChannel, Snapshot
from mpisgd.exchange.exchange import Interrupted
from mpisgd.gradient.gradient import pair
from mpisgd.gradient.measure import Measure, Measured, Unmeasured, batches_of, drawn_for, is_summed, mean_of, sums_of
from mpisgd.gradient.objective import Loss
from mpisgd.models.in_pieces import InPieces
from mpisgd.records.best import Patience
from mpisgd.records.checkpoint.buffers import Given
from mpisgd.records.log.progress import Evaluations
from mpisgd.records.log.writer import EvaluatorLog
from mpisgd.vectors.cut import Stages
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.memory import host_vector, host_view

OnEvaluation = Callable[[list[dict[str, Any]], dict[str, dict[str, Tensor]], bool], None]
"""Callback of an evaluation: log rows, weights by name (`theta`, `thetabar`), whether these are the run's last."""


class EarlyStopping:
    """Callback that ends training once evaluations have been no better for too long (`Patience`).

    Args:
        before: rows of `evaluations` before an interruption.
    """

    def __init__(self, options: EvaluationOptions, before: np.ndarray, channel: EvaluatorChannel, progress: Evaluations) -> None:
        self._options = options
        self._channel = channel
        self._progress = progress
        self._patience = Patience(options).note_all(before)
        if self._patience.over_at >= 0:
            channel.end_training(self._patience.over_at)

    def __call__(self, rows: list[dict[str, Any]], states: object, last: bool) -> None:
        if not last and self._patience.note(rows):
            number, options = self._patience.over_at, self._options
            self._channel.end_training(number)
            self._progress.say(f"snapshot {number}: {options.best} no better for {options.patience} evaluations: training ends")


class Evaluator:
    """Evaluator of all snapshots of theta and thetabar.

    Args:
        model: its weights are overwritten.
        pulled: (parameters,) float32 host tensors; `channel` receives theta (and thetabar) there.
        given: learner 0's buffers at each snapshot; None = none are handed on.
        after_training: evaluate all after training.
    """

    def __init__(  # noqa: PLR0913 - each by name
        self,
        channel: EvaluatorChannel,
        model: FlatModel,
        pulled: list[Tensor],
        measure: Measure | Unmeasured,
        log: EvaluatorLog,
        *,
        evaluated: Sequence[Part],
        train_samples: int,
        progress: Evaluations,
        given: Given | None = None,
        after_training: bool = False,
    ) -> None:
        self._given = given
        self._after_training = after_training
        self._channel = channel
        self._model = model
        self._pulled = pulled
        self._measure = measure
        self._log = log
        self._evaluated = evaluated
        self._train_samples = train_samples
        self._progress = progress
        self._on_evaluation: Sequence[OnEvaluation] = ()

    def evaluate_all(self, weights_file: Path, first: int = 0, on_evaluation: Sequence[OnEvaluation] = ()) -> None:
        """Evaluate all snapshots from `first` on, then the last weights, and save these; an interrupted run stops before.

        `weights_file`: torch file of {"theta": state_dict[, "thetabar": state_dict]}, for `torch.load(..., weights_only=True)`.
        `on_evaluation` are called once an evaluation is in the log.
        """
        self._on_evaluation = on_evaluation
        number = first
        checked = True
        snapshot = self._pull(number)
        self._log.begin()  # not before: an evaluator given up meanwhile gets no answer, and leaves the log to its successor
        while snapshot is not None:
            self._measure.interrupt_by(self._before_batch if checked else self._progress.batch)
            try:
                with self._weights_kept(weights_file):
                    self._evaluate(snapshot)
                number += 1
            except Interrupted:  # by a signal: interrupted shards have no snapshot, and a run that is over goes on
                checked = False
            snapshot = self._pull(number)
        self._measure.interrupt_by(self._progress.batch)
        final = self._pull(FINAL)
        if final is not None:
            with self._weights_kept(weights_file):
                states = self._evaluate(Snapshot(number, final.clocks, final.samples, final.taken_s), last=True)
            self._save(states, weights_file)
        self._channel.goodbye()

    def _pull(self, number: int) -> Snapshot | None:
        return self._channel.pull(number)

    def _before_batch(self) -> None:
        self._progress.batch()
        self._channel.check()

    def _evaluate(self, snapshot: Snapshot, *, last: bool = False) -> dict[str, dict[str, Tensor]]:
        states, rows = {}, list[dict[str, Any]]()
        self._progress.begin(snapshot.number)
        for averaged, (name, vector) in enumerate(zip(("theta", "thetabar"), self._pulled, strict=False)):
            if self._given is not None:
                self._given.put(snapshot.number, last=last)
            self._model.weights.copy_(vector)
            self._measure.prepare()
            states[name] = self._state(last)  # as trained: some modules change their state in evaluations, too
            for part in self._evaluated:
                start_s = self._channel.now_s()
                found = self._measure.of(part)
                rows.append(self._row(snapshot, averaged, part, found, self._channel.now_s() - start_s))
        self._tell(rows, states, last)
        return states

    def _state(self, last: bool) -> dict[str, Tensor]:
        return self._model.state()

    def _row(self, snapshot: Snapshot, averaged: int, part: Part, found: Measured, spent_s: float) -> dict[str, Any]:
        return {
            "snapshot": snapshot.number,
            "clock_min": min(snapshot.clocks),
            "clock_max": max(snapshot.clocks),
            "samples": snapshot.samples,
            "epochs": snapshot.samples / self._train_samples,
            "taken_s": snapshot.taken_s,
            "averaged": averaged,
            "train": int(part),
            "loss": found.loss,
            "error": found.error,
            "evaluate_s": spent_s,
            **found.metrics,
        }

    def _tell(self, rows: list[dict[str, Any]], states: dict[str, dict[str, Tensor]], last: bool) -> None:
        self._progress.found(rows[0])
        for row in rows:  # of a whole snapshot: an interrupted evaluation has left none
            self._log.evaluation(**row)
        for each in self._on_evaluation:
            each(rows, states, last)

    @contextmanager
    def _weights_kept(self, path: Path) -> Iterator[None]:
        """Save the last parameters where the user's code fails in an evaluation after training."""
        try:
            yield
        except (Interrupted, PeerError):
            raise
        except Exception as error:
            if self._after_training and self._pull(FINAL) is not None:
                names = zip(("theta", "thetabar"), self._pulled, strict=False)
                views = {name: self._model.views(vector) for name, vector in names}
                self._save({name: {at: each.clone() for at, each in every.items()} for name, every in views.items()}, path)
                error.add_note(f"the evaluation failed, not the training: the last parameters are in {path}")
            raise

    def _save(self, states: dict[str, dict[str, Tensor]], path: Path) -> None:
        """Save whole or not at all, durably. Raises StorageError."""
        with writing(path):
            with durable.made_aside(path) as aside:
                torch.save(states, aside)
            durable.sync_directory(path.parent)


class StagedEvaluator(Evaluator):
    """Evaluator with a single stage in memory at a time, and the previous stage's outputs of all batches.

    Args:
        pieces: the model; `make` makes its pieces, for state other than parameters.
        loss, data, batch, seed: as for `Measure`, to the same bits.
        vectors: 1, or 2 where weights are averaged.
    """

    def __init__(
        self,
        *arguments: Any,
        stages: Stages,
        pieces: InPieces,
        loss: Loss,
        data: DataSet,
        batch: int,
        seed: int,
        vectors: int,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._stages = stages
        self._pieces = pieces
        self._loss = loss
        self._data = data
        self._batch = batch
        self._seed = seed
        self._vectors = vectors
        self._asked = 0
        self._over = False
        self._summed: bool | None = None
        self._had: list[FlatModel] = []
        self._pulled: list[Tensor] = []

    def evaluate_all(self, weights_file: Path, first: int = 0, on_evaluation: Sequence[OnEvaluation] = ()) -> None:
        """Evaluate all; callbacks get no weights, which are never all in memory."""
        self._weights_file = weights_file
        super().evaluate_all(weights_file, first, on_evaluation)

    def _pull(self, number: int) -> Snapshot | None:
        self._asked = number
        return None if self._over and number != FINAL else self._pull_stage(0)

    def _pull_stage(self, stage: int) -> Snapshot | None:
        children, (start, end) = self._stages.children[stage], self._stages.bounds[stage]
        self._pulled.clear()  # frees the stage before, with all references
        self._had.clear()
        module = nn.Sequential(OrderedDict((str(at), self._pieces.make(at)) for at in children))
        self._had.append(FlatModel(module))
        module.eval()
        self._pulled += [self._stage.weights, *(host_vector(end - start) for _ in range(self._vectors - 1))]
        into = [host_view(each) for each in self._pulled]
        return self._channel.pull(self._asked, self._stages.shards[stage], into, start)

    def _evaluate(self, snapshot: Snapshot, *, last: bool = False) -> dict[str, dict[str, Tensor]]:
        """Evaluate. Raises Interrupted where the run ends before a later stage has this snapshot."""
        self._progress.begin(snapshot.number)
        if not last:
            self._rows_of(snapshot, None, last)
            return {}
        with writing(self._weights_file):
            with durable.made_aside(self._weights_file) as aside:
                self._rows_of(snapshot, WeightsInParts(aside, self._pieces, self._vectors), last)
            durable.sync_directory(self._weights_file.parent)
        return {}

    def _rows_of(self, snapshot: Snapshot, file: WeightsInParts | None, last: bool) -> None:
        start_s, clocks = self._channel.now_s(), list(snapshot.clocks)
        passed: dict[tuple[int, Part], list[Any]] = {}
        sums: dict[tuple[int, Part], dict[str, float]] = {}
        for stage in range(len(self._stages.children)):
            part = self._pull_stage(stage) if stage else snapshot
            if part is None:
                self._over = True
                raise Interrupted
            clocks += part.clocks if stage else ()
            for vector in range(self._vectors):
                if vector:
                    self._stage.weights.copy_(self._pulled[vector])
                if file is not None:
                    file.fill(vector, self._stage.module.state_dict())
                for each in self._evaluated:
                    key = vector, each
                    passed[key], sums[key] = self._through(stage, each, passed.get(key))
        spent_s = (self._channel.now_s() - start_s) / len(sums)
        rows = []
        for (averaged, each), found in sums.items():
            rows.append(self._row(snapshot._replace(clocks=tuple(clocks)), averaged, each, mean_of(found), spent_s))
        self._tell(rows, {}, last)

    def _through(self, stage: int, part: Part, before: list[Any] | None) -> tuple[list[Any], dict[str, float]]:
        split, last = self._data.part(part), stage + 1 == len(self._stages.children)
        outputs, sums = list[Any](), dict[str, float]()
        with torch.no_grad(), kept():
            for number, indices in enumerate(batches_of(split, self._batch) if self._measured else ()):
                self._check()
                inputs = targets = None
                if stage == 0 or last:
                    inputs, targets = pair(drawn_for(split, indices, self._seed, part, int(indices[0])))
                given = self._stage.inputs(inputs) if before is None else before[number]
                output = self._stage.module(given)
                if before is not None:
                    before[number] = None
                if last:
                    found = sums_of(
                        self._loss, output, targets, len(indices), summed=self._is_summed(output, targets, len(indices))
                    )
                    sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
                else:
                    outputs.append(output)
        return outputs, sums

    def _is_summed(self, output: Any, targets: Any, samples: int) -> bool:
        if self._summed is None:
            self._summed = is_summed(lambda *given: self._loss(*given).item(), samples, output, targets)
        return self._summed

    @property
    def _stage(self) -> FlatModel:
        return self._had[0]

    @property
    def _measured(self) -> bool:
        return not isinstance(self._measure, Unmeasured)

    def _check(self) -> None:
        self._progress.batch()
        if self._asked != FINAL:
            self._channel.check()

    def _save(self, states: dict[str, dict[str, Tensor]], path: Path) -> None:
        """Do nothing: already written."""


class WeightsInParts:
    """Torch file of all weights, begun with zeros outside memory, and filled in parts.

    The archive's checksums are wrong; torch asks for none, and DONE has the file's.
    """

    def __init__(self, path: Path, pieces: nn.Module, vectors: int) -> None:
        self._path = path
        # numpy's zeros take no memory until touched; `skip_data` touches none
        states = [
            {name: torch.from_numpy(np.zeros(tuple(each.shape), _numpy(each))) for name, each in pieces.state_dict().items()}
            for _ in range(vectors)
        ]
        with skip_data():
            torch.save(dict(zip(("theta", "thetabar"), states, strict=False)), path)
        reader: Any = torch._C.PyTorchFileReader(str(path))
        places = iter(range(vectors * len(states[0])))
        self._offsets = [{name: reader.get_record_offset(f"data/{next(places)}") for name in state} for state in states]

    def fill(self, vector: int, state: Mapping[str, Tensor]) -> None:
        with self._path.open("r+b") as file:
            for name, each in state.items():
                file.seek(self._offsets[vector][name])
                file.write(each.detach().contiguous().numpy().data)
            file.flush()


def _numpy(tensor: Tensor) -> np.dtype:
    found: np.dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return found
