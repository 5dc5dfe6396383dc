"""Files of weights. Nothing in them is executed (SECURITY.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from mpisgd.base import durable
from mpisgd.base.errors import CheckpointError, ConfigError
from mpisgd.base.storage import writing
from mpisgd.records.log import schema, sums
from mpisgd.records.log.reader import Directory

State = dict[str, Tensor]

TORCH, SAFETENSORS = ".pt", ".safetensors"
THETA, THETABAR = "theta", "thetabar"
WEIGHTS, EVALUATION = "weights", "evaluation"
"""Entries of a file of best weights (`best.py`)."""


def of_run(run: Directory, *, averaged: bool = False) -> State:
    """Return a run's last weights, or their average.

    Raises CheckpointError if there are none, DataError if the file is not as DONE says.
    """
    path = _whole(run, "weights", "a run writes weights at the end")
    states = _torch(path)
    name = THETABAR if averaged else THETA
    if name not in states:
        raise CheckpointError(f"{path} has no averaged weights: the run had averaging = 0")
    return _state(states[name], path)


def read_best(path: Path) -> Mapping[str, Any]:
    """Read a file of best weights. Raises CheckpointError."""
    found = _torch(path)
    if set(found) != {WEIGHTS, EVALUATION}:
        raise CheckpointError(f"{path} is no file of best weights: expected {WEIGHTS} and {EVALUATION}, found {', '.join(found)}")
    return found


def best_of_run(run: Directory) -> State:
    """Return a run's best weights (`evaluation.best`) so far. Raises as `of_run`."""
    path = _whole(run, "best", "a run keeps the best weights with --evaluation.best error")
    return _state(read_best(path)[WEIGHTS], path)


def _whole(run: Directory, entry: str, why: str) -> Path:
    path, told = run.path / schema.SUMMED[entry], (run.done or {}).get(entry)
    if not path.is_file():
        raise CheckpointError(f"{run.path} has no {path.name}: {why}")
    if told is not None:
        sums.check_file(path, told)
    return path


def file_of(path: Path) -> Path:
    return path / schema.WEIGHTS if path.is_dir() else path


def read(path: Path) -> State:
    """Return weights: a run's last, a state dict of torch, or a safetensors file.

    Raises CheckpointError; DataError as `of_run`.
    """
    if path.is_dir():
        return of_run(Directory(path))
    if not path.is_file():
        raise CheckpointError(f"{path} is not there: expected a run's directory, a state dict (.pt) or a file of .safetensors")
    if path.suffix == SAFETENSORS:
        return _safetensors(path)
    found = _torch(path)
    if set(found) == {WEIGHTS, EVALUATION}:
        return _state(found[WEIGHTS], path)
    return _state(found[THETA] if set(found) in ({THETA}, {THETA, THETABAR}) else found, path)


def check_new(path: Path) -> None:
    """Raise ConfigError if `write` could not make this file, or would replace another."""
    if path.suffix not in (TORCH, SAFETENSORS):
        raise ConfigError(f"{path}: expected a name ending in {TORCH} or {SAFETENSORS}")
    if path.suffix == SAFETENSORS:
        _library()
    if path.exists() or not path.parent.is_dir():
        why = "exists: choose another name, or remove the file" if path.exists() else f"cannot be made: there is no {path.parent}"
        raise ConfigError(f"{path} {why}")


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict, or best weights, whole or not at all. Raises StorageError."""
    with writing(path):
        with durable.made_aside(path) as aside:
            if path.suffix == SAFETENSORS:
                _library().torch.save_file(state, aside, metadata={"format": "pt"})
            else:
                torch.save(state, aside)
        durable.sync_directory(path.parent)


def _safetensors(path: Path) -> State:
    library = _library()
    try:
        return dict(library.torch.load_file(path))
    except (OSError, ValueError, KeyError, library.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError("files of .safetensors: pip install safetensors, or mpisgd[safetensors]") from error
    return safetensors


def _torch(path: Path) -> Mapping[Any, Any]:
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of torch's: {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected a state dict: tensors by their names")
    return found


def _state(found: Any, path: Path) -> State:
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
        names = ", ".join(map(str, list(found)[:5])) if isinstance(found, Mapping) else type(found).__name__
        raise CheckpointError(f"{path} holds no state dict: expected tensors by their names, found {names or 'nothing'}")
    return {str(name): each for name, each in found.items()}
