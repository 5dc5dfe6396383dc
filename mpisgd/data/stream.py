"""A user's stream (`torch.utils.data.IterableDataset`), read by learners, each from the beginning of its own shard.

A stream splits itself as it does among the workers of a DataLoader: what `torch.utils.data.get_worker_info()` tells it is that it
is read by worker `learner_id` of as many as there are learners. Mini-batch `seq` has samples seq * mu ... of what it then gives.
Where it ends it begins again, after its `set_epoch(times)`, if it has that: mini-batches are always full.

A stream can be read in order only. What it draws from torch, numpy and `random` while a mini-batch is fetched depends on (seed,
learner_id, seq); so to begin at a later mini-batch all those before are read, with their own seeds, and thrown away.
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
"""Mini-batches of which the samples are kept: one that is rejected is wanted again when the next has been prepared."""


class Reading(NamedTuple):
    """How learners read a stream: with the run's seed, mu samples at a time; `samples` are an epoch, 0 = as many as it says."""

    seed: int
    mu: int
    samples: int = 0


class Stream:
    """A stream, with the face of a map-style Dataset.

    An index (learner_id, learners, position) is a sample of a learner's shard. A plain number is a sample of the whole stream, as
    evaluations read it: 0, 1, 2 ... or 0 again; it ends there where it says so.

    Args:
        where: what to call it in messages.
        reading: None where no learner reads it.

    Raises ConfigError where nobody says how many samples it has.
    """

    def __init__(self, dataset: IterableDataset[Any], where: str, reading: Reading | None = None) -> None:
        self._dataset = dataset
        self._where = where
        self._reading = reading or Reading(0, 1)
        self._samples = self._reading.samples or _length(dataset)
        if not self._samples:
            other = "epoch_samples" if reading is not None else "a map-style Dataset"
            raise ConfigError(f"{where}: a stream whose length nobody says: expected a __len__ above 0, or {other}")
        self._again = reading is not None
        self._readers: dict[tuple[int, int], _Reader] = {}
        self._whole: _Reader | None = None

    def __len__(self) -> int:
        return self._samples

    @property
    def classes(self) -> Any:
        """As a Dataset may say it."""
        return getattr(self._dataset, "classes", None)

    def __getitem__(self, index: int | list[int]) -> Any:
        """A sample. Raises DataError where there is none."""
        if isinstance(index, int):
            return self._of_whole(index)
        learner_id, learners, position = index
        reader = self._readers.get((learner_id, learners))
        if reader is None or not reader.reaches(position):
            reader = self._readers[learner_id, learners] = self._reader(learner_id, learners, _KEPT * self._reading.mu)
        self._skip(reader, position)
        sample = reader.at(position)
        if (position + 1) % self._reading.mu == 0:  # what `collate_fn` draws: also where a kept sample has drawn nothing now
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
        """Leave the stream: whoever reads it next begins anew."""
        self._readers.clear()
        self._whole = None

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process, which begins anew."""
        return {**vars(self), "_readers": {}, "_whole": None}


class _Reader:
    """One who reads a stream from its beginning: number `number` of `count`.

    Attributes:
        position: of the next sample.
    """

    def __init__(self, dataset: IterableDataset[Any], where: str, number: int, count: int, kept: int, length: int | None) -> None:
        self._dataset = copy.copy(dataset)  # what it sets in itself as it is read is this reader's
        self._where = where
        self.number = number
        self._count = count
        self._length = length
        self._kept: deque[Any] = deque(maxlen=kept)
        self._iterator: Iterator[Any] | None = None
        self._times = 0
        self.position = 0

    def reaches(self, position: int) -> bool:
        """Whether it need not begin anew to give this sample."""
        return position >= self.position - len(self._kept)

    def at(self, position: int) -> Any:
        """The sample at this position, which is the next one or is kept."""
        if position < self.position:
            return self._kept[position - self.position]
        if position > self.position:
            raise DataError(f"{self._where}: a stream, of which sample {position} is wanted after {self.position - 1}")
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
            return f"ends after {self.position:,} samples, expected the {self._length:,} of its __len__"
        if self.position:
            return f"gives nothing when it is read again, after {self.position:,} samples: expected an __iter__ that begins anew"
        return (
            f"gives nothing to learner {self.number} of {self._count} (`get_worker_info().id` of `.num_workers`): expected samples"
        )


def is_stream(value: Any) -> bool:
    """Whether these data are a stream."""
    return isinstance(value, IterableDataset)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


@contextmanager
def _as_worker(dataset: Any, number: int, count: int) -> Iterator[None]:
    """`get_worker_info()` says this to the stream; torch has no call for it."""
    before = torch_worker._worker_info
    seed = torch.initial_seed()
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = before
