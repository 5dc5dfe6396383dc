"""A user's stream (`torch.utils.data.IterableDataset`), read by each learner from the start of its own shard.

A stream splits as among a DataLoader's workers: `torch.utils.data.get_worker_info()` names worker `learner_id` of all learners.
Mini-batch `seq` has samples from seq * mu on. An ended stream begins again, after `set_epoch(times)` if it has one.

Draws depend on (seed, learner_id, seq): to begin at a later mini-batch, all before are read and thrown away.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from mpisgd.base.draws import seed_all, seeded, seeds_of
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.base.streams import Domain

_KEPT = 2
"""Mini-batches with kept samples: a rejected mini-batch is wanted again after the next is prepared."""


class Reading(NamedTuple):
    """A learner's reading of a stream, mu samples at a time; `samples` per epoch, 0 = the stream's length."""

    seed: int
    mu: int
    samples: int = 0


class Stream:
    """A stream, with the face of a map-style Dataset.

    An index (learner_id, learners, position) is a sample of a learner's shard. A number is a sample of the whole stream, for
    evaluations: 0, 1, 2 ... or 0 again.

    Args:
        reading: None without learners.

    Raises ConfigError: unknown number of samples.
    """

    def __init__(self, dataset: IterableDataset[Any], where: str, reading: Reading | None = None) -> None:
        self._dataset = dataset
        self._where = where
        self._reading = reading or Reading(0, 1)
        self._samples = self._reading.samples or _length(dataset)
        if not self._samples:
            other = "epoch_samples" if reading is not None else "a map-style Dataset"
            raise ConfigError(f"{where}: a stream of unknown length: expected a __len__ above 0, or {other}")
        self._again = reading is not None
        self._readers: dict[tuple[int, int], _Reader] = {}
        self._whole: _Reader | None = None

    def __len__(self) -> int:
        return self._samples

    @property
    def classes(self) -> Any:
        return getattr(self._dataset, "classes", None)

    def __getitem__(self, index: int | list[int]) -> Any:
        if isinstance(index, int):
            return self._of_whole(index)
        learner_id, learners, position = index
        reader = self._readers.get((learner_id, learners))
        if reader is None or not reader.reaches(position):
            reader = self._readers[learner_id, learners] = self._reader(learner_id, learners, _KEPT * self._reading.mu)
        self._skip(reader, position)
        sample = reader.at(position)
        if (position + 1) % self._reading.mu == 0:  # for `collate_fn`, even if a kept sample has drawn nothing
            seed_all(self._seeds(learner_id, position // self._reading.mu, part=1))
        return sample

    def _skip(self, reader: _Reader, position: int) -> None:
        mu = self._reading.mu
        for seq in range(reader.position // mu, position // mu):
            with seeded(self._seeds(reader.number, seq)):
                for place in range(mu):
                    reader.at(seq * mu + place)

    def _seeds(self, learner_id: int, seq: int, part: int = 0) -> Any:
        return seeds_of(Domain.SAMPLES, self._reading.seed, learner_id, seq, part)

    def _of_whole(self, index: int) -> Any:
        if index == 0 or self._whole is None:
            self._whole = self._reader(0, 1, 0)
        return self._whole.at(index)

    def _reader(self, number: int, count: int, kept: int) -> _Reader:
        return _Reader(self._dataset, self._where, number, count, kept, None if self._again else self._samples)

    def forget(self) -> None:
        self._readers.clear()
        self._whole = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": {}, "_whole": None}


class _Reader:
    """Reader `number` of `count`.

    Attributes:
        position: of the next sample.
    """

    def __init__(self, dataset: IterableDataset[Any], where: str, number: int, count: int, kept: int, length: int | None) -> None:
        self._dataset = copy.copy(dataset)  # a stream may set attributes of its own while read
        self._where = where
        self.number = number
        self._count = count
        self._length = length
        self._kept: deque[Any] = deque(maxlen=kept)
        self._iterator: Iterator[Any] | None = None
        self._times = 0
        self.position = 0

    def reaches(self, position: int) -> bool:
        """Tell whether a sample comes without a new beginning."""
        return position >= self.position - len(self._kept)

    def at(self, position: int) -> Any:
        if position < self.position:
            return self._kept[position - self.position]
        if position > self.position:
            raise DataError(f"{self._where}: a stream cannot skip to sample {position} after {self.position - 1}")
        sample = self._next()
        self._kept.append(sample)
        self.position += 1
        return sample

    def _next(self) -> Any:
        with _as_worker(self._dataset, self.number, self._count):
            for _ in range(2):
                if self._iterator is None:
                    self._begin()
                assert self._iterator is not None
                try:
                    return next(self._iterator)
                except StopIteration:
                    self._iterator = None
                    if self._length is not None:
                        break
        raise DataError(f"{self._where}: the stream {type(self._dataset).__name__} {self._ended()}")

    def _begin(self) -> None:
        if self._times and hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._times)
        self._times += 1
        self._iterator = iter(self._dataset)

    def _ended(self) -> str:
        if self._length is not None:
            return f"ends after {self.position:,} samples, expected the {self._length:,} of __len__"
        if self.position:
            return f"gives nothing on a second reading, after {self.position:,} samples: expected an __iter__ that begins anew"
        return (
            f"gives nothing to learner {self.number} of {self._count} (`get_worker_info().id` of `.num_workers`): expected samples"
        )


def is_stream(value: Any) -> bool:
    return isinstance(value, IterableDataset)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


@contextmanager
def _as_worker(dataset: Any, number: int, count: int) -> Iterator[None]:
    """Let `get_worker_info()` tell the stream this worker; torch has no call for that."""
    before = torch_worker._worker_info
    seed = torch.initial_seed()
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = before
