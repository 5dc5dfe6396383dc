"""Check that all ranks have the same data, model and loss: only gradients and weights are exchanged.

Compared are lengths, shapes and types, some samples, initial values, and the loss of a mini-batch. Floats are compared by norm and
sums: other CPUs may give other last bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpisgd.base.draws import seeds_of
from mpisgd.base.errors import EXIT_USAGE
from mpisgd.base.streams import Domain, stream
from mpisgd.data import DataSet, Split, fetch
from mpisgd.liveness.guard import AgreedError, ranges
from mpisgd.vectors import nest
from mpisgd.vectors.flat import FlatModel

if TYPE_CHECKING:
    from mpisgd.comm.mpi.library import MPI

SAMPLES = 6
"""Samples compared in each split: first, last, and seeded draws; of a stream the first."""

_TOLERANCE = 1e-3
"""Tolerance of sums, as a share of the norm; other draws differ by about the norm itself."""
_CHUNK = 1 << 17
_OF_A_LOSS = 1e-2
"""GPUs of different kinds may differ in the third digit."""

INITIAL = "initial "

_ADVICE = {
    "data": "expected the same on every rank: draw from torch, numpy or `random` only inside the factory or a sample"
    " (seeded there), and not from generators of your own without a seed",
    "model": "expected the same on every rank: draw from torch, numpy or `random` only inside the factory (seeded there)",
    "loss": "expected the same on every rank, of the same mini-batch and weights: does the loss, or the model, depend on the rank?",
}

Facts = Mapping[str, "str | float | Rough"]


class Rough(NamedTuple):
    """Fingerprint of a float tensor: norm; sums of all elements, every second, first halves."""

    norm: float
    total: float
    even: float
    first: float

    @classmethod
    def of(cls, values: Tensor) -> Rough:
        sums = torch.zeros(4, dtype=torch.float64, device=values.device)
        for part in torch.split(values.detach().reshape(-1), _CHUNK):  # small enough for a cache: ten times as fast
            exact = part.double()
            half = exact[: len(exact) // 2]
            sums += torch.stack([exact.dot(exact), exact.sum(), exact[::2].sum(), half.sum()])
        square, total, even, first = sums.tolist()
        return cls(math.sqrt(square), total, even, first)

    def like(self, other: Rough) -> bool:
        apart = _TOLERANCE * max(self.norm, other.norm)
        return all(abs(a - b) <= apart or a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(self, other, strict=True))

    def __str__(self) -> str:
        return f"values of norm {self.norm:.6g} and sum {self.total:.6g}"


def require_alike(comm: MPI.Intracomm, what: str, facts: Facts | None, root: int) -> None:
    """Require facts like rank `root`'s, or None; collective. Raises AgreedError with the ranks and the first difference."""
    expected = comm.bcast(facts, root=root)
    differing = [(rank, each) for rank, each in enumerate(comm.allgather(_difference(facts, expected))) if each]
    if not differing:
        return
    (first, difference), others = differing[0], [rank for rank, _ in differing[1:]]
    also = f"; rank {ranges(others)} also {'differs' if len(others) == 1 else 'differ'} from rank {root}" if others else ""
    name, own, of_root = difference
    raise AgreedError(
        f"ConfigError: {what}: rank {first} has another than rank {root}: {name}: {own} on rank {first}, {of_root} on rank {root}"
        f"{also}; {_ADVICE[what]}",
        EXIT_USAGE,
    )


def _difference(facts: Facts | None, expected: Facts) -> tuple[str, str, str] | None:
    if facts is None:
        return None
    for name in dict.fromkeys([*expected, *facts]):
        here, there = facts.get(name, "none"), expected.get(name, "none")
        if isinstance(here, Rough) and isinstance(there, Rough):
            same = here.like(there)
        elif isinstance(here, float) and isinstance(there, float):
            same = math.isclose(here, there, rel_tol=_OF_A_LOSS, abs_tol=_OF_A_LOSS)
        else:
            same = here == there
        if not same:
            return name, str(here), str(there)
    return None


def of_data(data: DataSet, seed: int) -> Facts:
    splits = {"training": data.train, "test": data.test, **({} if data.validation is None else {"validation": data.validation})}
    facts: dict[str, str | float | Rough] = {f"{name} samples": f"{len(split):,}" for name, split in splits.items()}
    facts["classes"] = str(data.classes)
    for number, (name, split) in enumerate(splits.items()):
        if len(split):
            facts |= _of_split(name, split, seed, number)
    return facts


def _of_split(name: str, split: Split, seed: int, number: int) -> Facts:
    size = len(split)
    drawn = stream(Domain.ALIKE, seed, number).integers(size, size=SAMPLES - 2)
    chosen = np.arange(min(size, SAMPLES)) if split.in_order else np.unique(np.array([0, size - 1, *drawn], np.int64))
    batch = fetch(split, chosen, lambda: seeds_of(Domain.ALIKE, seed, number))
    named = {"[0]": "inputs", "[1]": "targets"} if isinstance(batch, tuple | list) and len(batch) == 2 else {}
    facts: dict[str, str | float | Rough] = {}
    for name_in_batch, values in nest.tensors_of(batch).items():
        part = named.get(name_in_batch, f"batch{name_in_batch}")
        facts[f"{name} {part}"] = f"{values.dtype} {tuple(values.shape[1:])}"
        facts[f"{part} of {name} samples {', '.join(map(str, chosen))}"] = _like(values)
    return facts


def of_model(model: FlatModel) -> Facts:
    facts: dict[str, str | float | Rough] = {"trainable parameters": model.fingerprint}
    state: dict[str, Any] = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    for name, values in state.items():
        facts[f"shape of {name}"] = f"{values.dtype} {tuple(values.shape)}"
        if not values.is_meta:
            facts[f"{INITIAL}{name}"] = _like(values)
    return facts


def of_loss(loss: float) -> Facts:
    return {"loss of a first mini-batch": loss}


def _like(values: Tensor) -> str | Rough:
    """Return floats roughly, other types by bits, sparse tensors by size."""
    if values.layout is not torch.strided:
        return f"{values.layout} of {values._nnz():,} elements"
    if values.is_floating_point():
        return Rough.of(values)
    return f"crc32 {zlib.crc32(values.detach().cpu().contiguous().numpy().tobytes()):08x}"
