"""Difference of two weight vectors: its size and place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.errors import DataError
from mpisgd.records.log.schema import LogRows
from mpisgd.records.log.sums import check_file
from mpisgd.vectors.flat import FlatModel
from mpisgd.vectors.memory import host_view


@dataclass(frozen=True)
class Difference:
    """Difference of recomputed from recorded weights.

    Attributes:
        elements: number of elements with other bits (all NaN are alike).
        largest: largest absolute difference; infinite if a differing value is not finite.
        moved: largest finite way of a weight, from initial to recorded.
        place: place of `largest` in the flat vector, in `parameter`, within `bounds` of `shard`.
    """

    name: str
    elements: int
    largest: float = 0.0
    moved: float = 0.0
    parameter: str = ""
    place: int = -1
    shard: int = -1
    bounds: tuple[int, int] = (0, 0)

    def within(self, tolerance: float) -> bool:
        """Return whether the difference is within this share of `moved`; 0 = the same bits."""
        return self.elements == 0 or (tolerance > 0 and self.largest <= tolerance * self.moved)

    def __str__(self) -> str:
        share = f", {self.largest / self.moved:.1e} of the way that weights went" if self.moved > 0 else ""
        start, end = self.bounds
        return (
            f"{self.name}: {self.elements:,} parameters differ, by {self.largest:.3e} at most{share},"
            f" in {self.parameter}, place {self.place} of the flat vector, in the slice {start} to {end - 1} of shard {self.shard}"
        )


def difference(
    name: str, recomputed: Tensor, recorded: Tensor, initial: Tensor, model: FlatModel, bounds: list[tuple[int, int]]
) -> Difference:
    """Compare vectors, all (parameters,) float32."""
    ours, theirs = host_view(recomputed), host_view(recorded)
    other = (ours.view(np.int32) != theirs.view(np.int32)) & ~(np.isnan(ours) & np.isnan(theirs))
    if not other.any():
        return Difference(name, 0)
    apart = np.where(other, _apart(ours, theirs), -1.0)
    place = int(np.argmax(apart))
    shard = next(shard for shard, (_, end) in enumerate(bounds) if place < end)
    way = _apart(theirs, host_view(initial))
    return Difference(
        name=name,
        elements=int(np.count_nonzero(other)),
        largest=float(apart[place]),
        moved=float(way[np.isfinite(way)].max(initial=0.0)),
        parameter=_parameter_at(model, place),
        place=place,
        shard=shard,
        bounds=bounds[shard],
    )


def _apart(ours: LogRows, theirs: LogRows) -> np.ndarray:
    """Return absolute differences, float64; infinite for NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart: np.ndarray = np.abs(ours.astype(np.float64) - theirs)
    apart[np.isnan(apart)] = np.inf
    return apart


def _parameter_at(model: FlatModel, place: int) -> str:
    end = 0
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            end += parameter.numel()
            if place < end:
                return name
    raise IndexError(place)


def load_weights(path: Path, names: list[str], model: FlatModel, told: dict[str, int] | None = None) -> dict[str, Tensor]:
    """Return recorded weights, flat (parameters,) float32; overwrites the weights of `model`.

    `told`: length and CRC-32 in DONE. Raises DataError: no file, another file, or other parameters.
    """
    with reading(path):
        if told is not None:
            check_file(path, told)
        states = torch.load(path, weights_only=True, map_location="cpu")
        return {name: _flat(states[name], model) for name in names}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DataError if a file of weights is unreadable, or of another model."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: the run is DONE, and there is nothing to compare with") from error
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, UnpicklingError) as error:
        raise DataError(f"{path} cannot be read as the weights of this model: {type(error).__name__}: {error}") from error


def _flat(state: dict[str, Tensor], model: FlatModel) -> Tensor:
    for name, parameter in model.module.named_parameters():
        if state[name].shape != parameter.shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {tuple(parameter.shape)}")
        if parameter.requires_grad:
            parameter.data.copy_(state[name])
    return model.weights.clone()
