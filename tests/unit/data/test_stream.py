"""Streams: each learner reads its own shard in order, with the seeds of its mini-batches, and begins again where it ends."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mpisgd.base.draws import Seeds, seeds_of
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.base.streams import Domain
from mpisgd.config import Config
from mpisgd.data import Reading, Split, as_dataset, check_workers, fetch, sampling
from mpisgd.data.loader import ReadAhead
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects

MU, SEED = 4, 7


class Numbers(IterableDataset[Any]):
    """0, 1, 2 ... dealt to the workers, from a buffer that is shuffled by `random`, with noise of torch's."""

    def __init__(self, samples: int = 20, length: int | None = None) -> None:
        self.samples, self.length, self.epoch = samples, samples if length is None else length, 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        buffer: list[int] = []
        for each in range(number, self.samples, count):
            buffer.append(each)
            if len(buffer) > 2:
                yield self._sample(buffer.pop(random.randrange(3)))
        yield from map(self._sample, buffer)

    def _sample(self, each: int) -> Any:
        return torch.tensor([each, self.epoch, torch.rand(()).item()]), each % 3


def noisy(samples: list[Any]) -> Any:
    """A collate function that draws."""
    return torch.stack([sample[0] for sample in samples]) + torch.rand(()), torch.tensor([sample[1] for sample in samples])


def split_of(train: Any, samples: int = 0, *, nested: bool = False) -> Split:
    return as_dataset((train, None), "mine", reading=Reading(SEED, MU, samples), nested=nested).train


def batch(split: Split, learner_id: int, seq: int, learners: int = 2) -> Any:
    dealing = sampling.make("stream", len(split), MU, learners, SEED)
    return fetch(split, dealing.indices(learner_id, seq), lambda: seeds_of(Domain.SAMPLES, SEED, learner_id, seq))


def test_each_learner_reads_its_shard_again_and_again() -> None:
    split = split_of(Numbers())
    assert (len(split), split.input_shape, split.in_order) == (20, (3,), True)
    read = [torch.cat([batch(split, learner_id, seq)[0] for seq in range(5)]) for learner_id in (0, 1)]
    for learner_id, samples in enumerate(read):
        numbers, epochs = samples[:, 0].int().tolist(), samples[:, 1].int().tolist()
        assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(learner_id, 20, 2))
        assert epochs == [0] * 10 + [1] * 10


@pytest.mark.parametrize("given", [Numbers(), DataLoader(Numbers(), collate_fn=noisy)], ids=["pairs", "collate_fn"])
def test_a_mini_batch_is_the_same_whatever_was_read_before(given: Any) -> None:
    """What the stream draws, and shuffled before, is of the names: read from the start on, or wanted again."""
    split = split_of(given)
    expected = {(learner_id, seq): batch(split, learner_id, seq) for seq in range(7) for learner_id in (0, 1)}
    later = split_of(given)
    for learner_id, seq in [(1, 5), (1, 6), (1, 5), (0, 2), (0, 1), (0, 1), (0, 6), (1, 0)]:
        torch.manual_seed(learner_id)
        found = batch(later, learner_id, seq)
        assert all(torch.equal(*each) for each in zip(found, expected[learner_id, seq], strict=True)), (learner_id, seq)


def test_a_mini_batch_that_is_rejected_is_not_read_again() -> None:
    """Though the one after it has been prepared."""
    split, opened = split_of(counted := Counted()), None
    for seq in (0, 1, 0, 1, 2, 1, 2, 3):
        batch(split, 0, seq)
        opened = counted.opened if opened is None else opened
    assert counted.opened == opened
    batch(split, 0, 1)
    assert counted.opened == opened + 1, "but two before the last are gone"


class Counted(IterableDataset[Any]):
    opened = 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[Any]:
        type(self).opened += 1
        return ((torch.tensor([float(each)]), 0) for each in range(100))


def named(seq: int) -> tuple[np.ndarray, Seeds]:
    return sampling.make("stream", 20, MU, 2, SEED).indices(1, seq), seeds_of(Domain.SAMPLES, SEED, 1, seq)


@pytest.mark.slow  # each worker imports torch
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.rare)])
def test_workers_read_what_the_learner_would(workers: int) -> None:
    """One process reads the stream, since each of several would have to read all of it."""
    given = DataLoader(Numbers(), num_workers=workers, multiprocessing_context="spawn", collate_fn=noisy)
    split, alone = split_of(given), split_of(DataLoader(Numbers(), collate_fn=noisy))
    check_workers(split)
    ahead = ReadAhead(split, split.workers, named, pinned=False)  # type: ignore[attr-defined]
    for seq in (0, 1, 2, 6, 7):
        found, expected = ahead.get(seq), batch(alone, 1, seq)
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True)), seq
        assert len(multiprocessing.active_children()) == 1
    ahead.close()


def test_workers_are_one_that_is_as_far_ahead() -> None:
    split: Any = split_of(DataLoader(Numbers(), num_workers=4, prefetch_factor=3, multiprocessing_context="spawn"))
    assert (split.workers.count, split.workers.prefetch) == (1, 12)
    check_workers(split)


def test_nobody_sees_the_workers_afterwards() -> None:
    split = split_of(Numbers())
    batch(split, 1, 0)
    assert get_worker_info() is None


def test_an_epoch_is_as_long_as_is_said() -> None:
    assert len(split_of(Numbers(), samples=50)) == 50
    config = Config(sampling="stream", epoch_samples=30, mu=MU)
    assert len(parts.load_data(config, UserObjects(data=(Numbers(length=0), None))).train) == 30


def test_evaluations_read_the_whole_in_order() -> None:
    data = as_dataset((Numbers(), Numbers(6)), "mine", reading=Reading(SEED, MU))
    for split, wanted in ((data.train, range(20)), (data.test, range(6))):
        for _ in range(2):
            read = torch.cat([split.batch(np.arange(start, start + 2))[0] for start in range(0, len(split), 2)])
            assert sorted(read[:, 0].int().tolist()) == list(wanted)
            assert set(read[:, 1].tolist()) == {0.0}
    chosen = sampling.recalibration_batches(20, 4, 2, SEED, in_order=True)
    assert np.concatenate(chosen).tolist() == list(range(8))


class Once(Numbers):
    """Can be gone through once only."""

    def __init__(self) -> None:
        super().__init__(6)
        self.numbers = iter([(torch.ones(1) * each, 0) for each in range(12)])

    def __iter__(self) -> Iterator[Any]:
        return self.numbers


class Same(Numbers):
    """Gives all workers the same."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(3) * each, 0) for each in range(9)])


class One(Numbers):
    """Has something for the first worker alone."""

    def __iter__(self) -> Iterator[Any]:
        return iter([] if get_worker_info().id else [(torch.ones(3) * each, 0) for each in range(9)])  # type: ignore[union-attr]


class Untold(IterableDataset[Any]):
    """Does not say how long it is."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(3), 0)])


REFUSED: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "another sampling": ({}, Numbers(), ConfigError, r"data: train: found a stream, Numbers, expected sampling = 'stream'"),
    "in a loader": ({}, DataLoader(Numbers()), ConfigError, r"data: train: found a stream, Numbers, expected sampling = 'stream'"),
    "no stream": (
        {"sampling": "stream"},
        (torch.ones(9, 3), torch.zeros(9)),
        ConfigError,
        "sampling = 'stream': data data is none, expected an IterableDataset",
    ),
    "no length": (
        {"sampling": "stream"},
        Untold(),
        ConfigError,
        "data: train: a stream of unknown length: expected a __len__ above 0, or epoch_samples",
    ),
    "nothing": ({"sampling": "stream"}, Numbers(0, 5), DataError, "train: the stream Numbers gives nothing to learner 0 of 1"),
    "batches": (
        {"sampling": "stream"},
        DataLoader(Numbers(), batch_size=None),
        ConfigError,
        "has a sampler of your own, or none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    changes, train, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        parts.load_data(Config(**changes), UserObjects(data=(train, None)))


def test_a_stream_of_the_test_data_says_its_length_and_keeps_to_it() -> None:
    x = (torch.ones(9, 3), torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"mine: test: a stream of unknown length: .* or a map-style Dataset"):
        as_dataset((x, Untold()), "mine")
    test = as_dataset((x, Numbers(6, 8)), "mine").test
    with pytest.raises(DataError, match="mine: test: the stream Numbers ends after 6 samples, expected the 8 of __len__"):
        test.batch(np.arange(8))


CHECKED: dict[str, tuple[Callable[[], Any], int, type[Exception], str]] = {
    "the same": (Same, 1, ConfigError, "learners 0 and 1 would read the same samples of the stream: expected an __iter__ that"),
    "nothing for one": (One, 1, DataError, "train: the stream One gives nothing to learner 1 of 3"),
    "nothing for the last": (lambda: Numbers(2, 9), 2, DataError, "train: the stream Numbers gives nothing to learner 2 of 3"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_shards_are_looked_at_before_the_start(name: str) -> None:
    make, number, error, message = CHECKED[name]
    config = Config(sampling="stream", mu=MU)
    data = parts.load_data(config, UserObjects(data=(make(), None)))
    with pytest.raises(error, match=message):
        parts.check_stream(config, data.train, sampling.make("stream", 9, MU, 3, 0), number)


def test_what_can_be_read_once_only_says_so_where_it_ends() -> None:
    split = split_of(Once())
    with pytest.raises(
        DataError, match="gives nothing on a second reading, after 11 samples: expected an __iter__ that begins anew"
    ):
        for seq in range(4):
            batch(split, 0, seq, learners=1)
