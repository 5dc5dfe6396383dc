"""Checkpoints for another number of learners or shards: slices are cut anew, mini-batches dealt on (DESIGN 6).

Tensors with a value per element are cut along the new bounds, bit for bit. Scalars (Adam's count of steps) come from the old shard
with most of the new slice; they differ only after empty updates. New shards begin with the fewest samples and snapshots of any old
shard: a mini-batch applied by some shards only loses its other parts. For dealt portions, the verdict of shard 0 counts.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpisgd.base import durable
from mpisgd.base.errors import CheckpointError
from mpisgd.records.checkpoint.checkpoint import Account, Checkpoint, Part
from mpisgd.records.checkpoint.snapshots import check_spool
from mpisgd.records.log import schema

Bounds = Sequence[tuple[int, int]]
Tensors = Mapping[str, np.ndarray]

_LATER = ("optimizer.missed", "optimizer.momentum_buffer")
"""Zeros before the first skip, or SGD's first gradient (`optimizer.py`)."""


@dataclass(frozen=True)
class Recut(Checkpoint):
    """A checkpoint for other slices or learners; `before`: as on disk."""

    before: Checkpoint

    def tensors(self, shard: int) -> dict[str, np.ndarray]:
        start, end = self.parts[shard].account.bounds
        old = [part.account.bounds for part in self.before.parts]
        needed = [number for number, (first, last) in enumerate(old) if first < end and start < last]
        return cut([self.before.tensors(number) for number in needed], [old[number] for number in needed], (start, end))

    @property
    def attempts(self) -> list[int]:
        return self.before.attempts

    @property
    def rows_before(self) -> list[list[int]]:
        """Per old shard and attempt: both numbers, then the run's rows of each table."""
        return [[part.account.shard, *rows] for part in self.before.parts for rows in part.account.rows]


def recut(checkpoint: Checkpoint, bounds: Bounds, next_seq: Sequence[int]) -> Recut:
    old = [part.account for part in checkpoint.parts]
    size = old[-1].bounds[1]
    if bounds[-1][1] != size:
        raise CheckpointError(f"{checkpoint.path} has {size} parameters, the model here has {bounds[-1][1]}")
    accounts = [
        Account(
            shard=shard,
            bounds=(start, end),
            clock=checkpoint.clock,
            samples=old[0].samples if old[0].portions else min(account.samples for account in old),
            now_s=checkpoint.now_s,
            received=0,  # the log of these shards begins here
            applied_seq=[seq - 1 for seq in next_seq],
            next_seq=list(next_seq),
            rows=[],
            snapshots=old[0].snapshots[: min(len(account.snapshots) for account in old)],
            diverged=any(account.diverged for account in old),
            portions=old[0].portions,
        )
        for shard, (start, end) in enumerate(bounds)
    ]
    whole = {item.name: getattr(checkpoint, item.name) for item in dataclasses.fields(Checkpoint)}
    parts = tuple(Part(account, 0, 0) for account in accounts)
    return Recut(**{**whole, "learners": len(next_seq), "parts": parts}, before=checkpoint)


def cut(tensors: Sequence[Tensors], bounds: Bounds, wanted: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the tensors of a slice covered by neighbouring slices. Raises CheckpointError if these have different tensors."""
    start, end = wanted
    for name in _LATER:
        if any(name in each for each in tensors):
            tensors = [{name: np.zeros_like(each["weights"]), **each} for each in tensors]
    if any(set(each) != set(tensors[0]) for each in tensors):
        named = "; ".join(", ".join(sorted(each)) for each in tensors)
        raise CheckpointError(f"shards of a checkpoint have different tensors, and cannot be cut anew: {named}")
    shares = [max(0, min(end, last) - max(start, first)) for first, last in bounds]
    most = shares.index(max(shares))
    found = {}
    for name, tensor in tensors[most].items():
        if tensor.ndim == 0:
            found[name] = tensor.copy()
            continue
        pieces = [each[name][max(start - first, 0) : max(end - first, 0)] for each, (first, _) in zip(tensors, bounds, strict=True)]
        found[name] = np.concatenate(pieces)
    return found


def recut_snapshots(run: Path, cut_anew: Recut, attempt: int, vectors: int) -> Recut:
    """Write unevaluated snapshots in the new slices; return the checkpoint with their checksums.

    The old files stay until the run is done: until the new shards have a checkpoint, another attempt needs them. Raises DataError
    for a missing or damaged file.
    """
    before = cut_anew.before.parts
    old = []
    for part in before:
        path = run / schema.spool_file(part.account.shard, part.account.rows[0][0])
        start, end = part.account.bounds
        shape = (len(part.account.snapshots), vectors, end - start)
        check_spool(path, part.account.snapshots, 4 * vectors * (end - start))
        old.append(np.memmap(path, np.float32, "r", shape=shape))
    parts = []
    for part in cut_anew.parts:
        start, end = part.account.bounds
        taken = []
        with durable.written_aside(run / schema.spool_file(part.account.shard, attempt)) as file:
            for number, (clock, samples, taken_s, *_) in enumerate(part.account.snapshots):
                crc32 = 0
                for vector in range(vectors):
                    for slices, each in zip(old, before, strict=True):
                        first = each.account.bounds[0]
                        piece = slices[number, vector, max(start - first, 0) : max(end - first, 0)].tobytes()
                        crc32 = zlib.crc32(piece, crc32)
                        durable.write_all(file, piece)
                taken.append((clock, samples, taken_s, crc32))
        parts.append(dataclasses.replace(part, account=dataclasses.replace(part.account, snapshots=taken)))
    return dataclasses.replace(cut_anew, parts=tuple(parts))
