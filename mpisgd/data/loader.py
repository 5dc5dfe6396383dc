"""Data as PyTorch has it: a batch is what `collate_fn` makes of samples, and a DataLoader's workers fetch it ahead of time.

Of a user's `torch.utils.data.DataLoader` its data set, collate function and workers are taken; which samples make a mini-batch,
`sampling` and `mu` say. A worker fetches whole mini-batches by `dataset.fetch`, as the learner itself would: what samples and
collate function draw depends on (seed, learner_id, seq), and neither on who fetches nor on how many there are (DESIGN 4, law 5).

Workers are spawned, never forked: a fork of a process that has begun MPI shares its connections and memory, and its other threads
are gone in the middle of whatever they did.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.dataloader import _InfiniteConstantSampler

from mpisgd.base.draws import Seeds
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.data.dataset import LazySplit, Split, fetch
from mpisgd.data.stream import is_stream
from mpisgd.vectors import nest

Collate = Callable[[list[Any]], Any]
Indices = npt.NDArray[np.int64]

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
_OF_WORKERS = {
    "MPI4PY_RC_INITIALIZE": "0",  # workers import the user's modules, and with them perhaps mpi4py, which must not begin MPI
    "PYTHONSAFEPATH": "1",  # until they have the rank's path, the present directory, a stranger's run perhaps, would come first
}


@dataclass(frozen=True)
class Workers:
    """How many processes fetch mini-batches ahead of a learner, and how; of a DataLoader.

    Attributes:
        prefetch: mini-batches that each of them is ahead; None = torch's default.
        method: by which they are started, "spawn" or "forkserver".
        begin: called in each of them with its number (`worker_init_fn`).
        timeout_s: after which a mini-batch that does not come is an error; 0 = never.
    """

    count: int
    prefetch: int | None = None
    method: str = "spawn"
    begin: Callable[[int], None] | None = None
    timeout_s: float = 0.0


class CollatedSplit(LazySplit):
    """Samples of a torch map-style Dataset, or of a stream, of any kind, fetched and collated per mini-batch.

    Args:
        where: what to call it in messages.

    Raises DataError where the first sample cannot be put into a batch.
    """

    def __init__(self, dataset: Any, where: str, collate: Collate = default_collate) -> None:
        super().__init__(dataset, where, None)
        self.collate = collate
        batch = self.batch(np.zeros(1, np.int64)) if len(self) else None
        try:
            shapes = [tuple(tensor.shape) for tensor in nest.tensors_of(batch).values()]
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        self._input_shape = shapes[0][1:] if shapes else ()

    def batch(self, indices: Indices) -> Any:
        """The samples in a batch; what samples and `collate` draw, `fetch` seeds. Raises DataError where they do not fit."""
        numbers = indices.tolist()
        several = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[number] for number in numbers] if several is None else several(numbers)
        if self.collate is not default_collate:
            return self.collate(samples)
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError) as error:
            which = f"sample {numbers[0]}" if len(numbers) == 1 else f"samples {', '.join(map(str, numbers[:6]))} ..."
            raise DataError(
                f"{self.where}: {which} cannot be put into a batch: {error}: expected nests of tensors, arrays and numbers, of one"
                " shape each; or a DataLoader with a collate_fn"
            ) from error

    @property
    def padded(self) -> bool:
        """Whether there is a collate function of the user's own, which may do so."""
        return self.collate is not default_collate

    @property
    def input_shape(self) -> tuple[int, ...]:
        """That of one sample in the first tensor of a batch."""
        return self._input_shape


def workers_of(loader: DataLoader[Any], where: str) -> Workers | None:
    """The workers of a user's DataLoader; None where it has none. Raises ConfigError for what cannot be taken from it."""
    order = (_InfiniteConstantSampler,) if is_stream(loader.dataset) else (SequentialSampler, RandomSampler)
    plain = type(loader.sampler) in order and type(loader.batch_sampler) is BatchSampler
    if not plain or getattr(loader.sampler, "replacement", False):
        found = type(loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler).__name__
        raise ConfigError(
            f"{where}: its DataLoader has a sampler of its own, or none ({found}); expected torch's default: which samples make a"
            " mini-batch is said by `sampling` and `mu`; to draw by weights, a Dataset whose __getitem__ draws its index"
            " (torch.multinomial): such draws are seeded"
        )
    if loader.num_workers == 0:
        return None
    context = loader.multiprocessing_context
    method = "spawn" if context is None else context.get_start_method()
    if method == "fork":
        raise ConfigError(
            f"{where}: its DataLoader forks workers, expected 'spawn' or 'forkserver': MPI does not live on in a fork"
        )
    count, prefetch = loader.num_workers, loader.prefetch_factor
    if is_stream(loader.dataset):  # each would have to read all of it; one is as far ahead as all would be
        count, prefetch = 1, (prefetch or 2) * count
    return Workers(count, prefetch, method, loader.worker_init_fn, loader.timeout)


def check_batch_size(train: Split, mu: int) -> None:
    """Raises ConfigError where mini-batches are of another size than the user's DataLoader says."""
    if isinstance(train, LazySplit) and train.batch_size not in (None, 1, mu):
        raise ConfigError(
            f"{train.where}: its DataLoader has batch_size = {train.batch_size}, but mu = {mu}: expected the same, or a DataLoader"
            " without one"
        )


def check_workers(train: Split) -> None:
    """Raises ConfigError where worker processes cannot be given the data."""
    if not isinstance(train, LazySplit) or train.workers is None:
        return
    workers: Workers = train.workers
    try:
        with _NoProcess():
            ForkingPickler(_Nowhere()).dump((_Fetching(train), workers.begin))
    except Exception as error:  # whatever the user's objects raise
        raise ConfigError(
            f"{train.where}: its DataLoader has num_workers = {workers.count}, but its data set cannot be given to workers:"
            f" {type(error).__name__}: {error}; expected classes and functions of a module, or num_workers = 0"
        ) from error


class ReadAhead:
    """Mini-batches of one learner, fetched by worker processes while it computes.

    Args:
        named: the indices and the seeds of mini-batch `seq`.
        pinned: in memory from which a GPU takes them by itself.
    """

    def __init__(self, split: Split, workers: Workers, named: Callable[[int], tuple[Indices, Seeds]], *, pinned: bool) -> None:
        self._split = split
        self._workers = workers
        self._named = named
        self._pinned = pinned
        self._iterator: Any = None
        self._next = -1

    def get(self, seq: int) -> Any:
        """Mini-batch `seq`: the one that follows the last; for any other the workers begin anew."""
        if self._next != seq:
            self.close()
            self._begin(seq)
        self._next = seq + 1
        return next(self._iterator)

    def close(self) -> None:
        """End the workers."""
        iterator, self._iterator, self._next = self._iterator, None, -1
        if iterator is not None:
            iterator._shutdown_workers()

    def _begin(self, seq: int) -> None:
        workers = self._workers
        loader = DataLoader(
            _Fetching(self._split),
            sampler=_Order(self._named, seq),  # endless: it has no length
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers.count,
            prefetch_factor=workers.prefetch,
            pin_memory=self._pinned,
            timeout=workers.timeout_s,
            worker_init_fn=_Begin(workers.begin),
            multiprocessing_context=multiprocessing.get_context(workers.method),
            generator=torch.Generator(),  # else torch draws from the global one to seed workers
        )
        with _in_environment(_OF_WORKERS):
            self._iterator = iter(loader)


class _Fetching(Dataset[Any]):
    """A split, indexed by a whole mini-batch: its indices, and its seeds."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitem__(self, key: tuple[Indices, Seeds]) -> Any:
        indices, seeds = key
        return fetch(self.split, indices, lambda: seeds)


class _Order:
    def __init__(self, named: Callable[[int], tuple[Indices, Seeds]], first: int) -> None:
        self._named = named
        self._first = first

    def __iter__(self) -> Iterator[tuple[Indices, Seeds]]:
        seq = self._first
        while True:
            yield self._named(seq)
            seq += 1


@dataclass(frozen=True)
class _Begin:
    """What a worker does first. It ends with the rank, however that ends; signals are the rank's to hear."""

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        os.environ.pop("PYTHONSAFEPATH", None)
        for each in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        rank = multiprocessing.parent_process()
        if rank is not None and not rank.is_alive():  # it ended while this process still imported, and the signal went to nobody
            os._exit(1)
        if self.then is not None:
            self.then(number)


class _NoProcess:
    """In the place of a process that is being started: pickling is as for one, and leaves no threads or descriptors behind."""

    DupFd = int  # what stands in a pickle for a descriptor, of which the process would have got its own

    def duplicate_for_child(self, descriptor: int) -> int:
        """The descriptor as it is."""
        return descriptor

    def __enter__(self) -> None:
        set_spawning_popen(self)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        set_spawning_popen(None)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Give the processes that are started here these variables as well."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
