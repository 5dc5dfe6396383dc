"""Comparison of the results of a run made again: weights, best weights, divergence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpisgd.base.errors import DataError
from mpisgd.job.finish import applied_losses
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.weights import EVALUATION, THETA, THETABAR, WEIGHTS, read_best
from mpisgd.replay.checks.difference import difference, load_weights, reading
from mpisgd.replay.checks.finding import Finding, refuse, same
from mpisgd.replay.checks.proof import Proof
from mpisgd.replay.checks.record import Record
from mpisgd.serving.divergence import has_diverged
from mpisgd.vectors.flat import FlatModel

State = dict[str, Tensor]


def compare_weights(
    record: Record, path: Path, model: FlatModel, initial: Tensor, bounds: list[tuple[int, int]], proof: Proof
) -> None:
    """Note the differences of weights; find other buffers, unless these were not made again."""
    names = [THETA, THETABAR][: 1 + (record.config.averaging > 0)]
    told = (record.done or {}).get("weights")
    theirs = load_weights(record.path / schema.WEIGHTS, names, model, told)
    ours = load_weights(path / schema.WEIGHTS, names, model)
    proof.differences += [difference(name, ours[name], theirs[name], initial, model, bounds) for name in names]
    trained = set(model.views(model.weights))
    states = [_load(each / schema.WEIGHTS) for each in (record.path, path)]
    for name in names if proof.which != "none" else ():
        said, made = ({key: each for key, each in state[name].items() if key not in trained} for state in states)
        for key in sorted({*said, *made}):
            if not _near(said.get(key), made.get(key), proof.tolerance):
                proof.find(Finding(f"{name}: the buffer {key} is not of these weights", -1, schema.WEIGHTS))


def _load(path: Path) -> dict[str, State]:
    with reading(path):
        states: dict[str, State] = torch.load(path, weights_only=True, map_location="cpu")
    return states


def _near(said: Tensor | None, made: Tensor | None, tolerance: float) -> bool:
    if said is None or made is None or said.shape != made.shape:
        return False
    return torch.allclose(_comparable(said.to(made.dtype)), _comparable(made), rtol=tolerance, atol=tolerance, equal_nan=True)


def _comparable(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.float() if dense.is_floating_point() and dense.element_size() == 1 else dense


def compare_best(record: Record, path: Path, proof: Proof) -> None:
    """Compare the file of best weights. Raises DataError.

    A continued run may keep the best of evaluations after the checkpoint, unknown to the log.
    """
    if record.done is None or "best" not in record.done:
        return
    said, made = read_best(record.path / schema.BEST), read_best(path / schema.BEST)
    told: dict[str, Any] = {name: value for name, value in made[EVALUATION].items() if not name.endswith("_s")}
    if not all(name in said[EVALUATION] and _same(said[EVALUATION][name], value) for name, value in told.items()):
        if record.earlier:
            proof.seams.append(f"{schema.BEST} is on trust: the evaluation came after the checkpoint that the run went on from")
        else:
            proof.find(Finding("the weights are not of the best evaluation of the log", -1, schema.BEST))
        return
    for name in sorted({*said[WEIGHTS], *made[WEIGHTS]}):
        if not _near(said[WEIGHTS].get(name), made[WEIGHTS].get(name), proof.tolerance):
            proof.find(Finding(f"{name} is not of snapshot {told['snapshot']}", -1, schema.BEST))
            return


def _same(said: Any, made: Any) -> bool:
    return said == made or (isinstance(said, float) and isinstance(made, float) and same(said, made))


def compare_diverged(record: Record, path: Path, diverged: bool) -> None:
    """Compare DONE's divergence: of any shard, or of losses. Raises Untrue."""
    if record.done is not None and not record.older:
        made = diverged or has_diverged(applied_losses(Run(path)))
        if bool(record.done.get("diverged")) != made:
            refuse(f"diverged = {record.done.get('diverged')!r}, run again {made}", -1, schema.DONE)


def check_sizes(record: Record, samples: int, parameters: int) -> None:
    """Raise DataError for other data, or another model, than the run's."""
    if samples != (recorded := record.environment("train_samples")):
        raise DataError(f"the data have {samples} training samples, the data of {record.path} had {recorded}")
    if parameters != (recorded := record.environment("parameters")):
        why = f"the model has {parameters} parameters, the model of {record.path} had {recorded}"
        raise DataError(f"{why}: another model, or changed since")
