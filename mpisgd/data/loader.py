"""Data as PyTorch has it: `collate_fn` makes batches, and a DataLoader's workers fetch ahead.

A user's `torch.utils.data.DataLoader` gives data set, collate function and workers; `sampling` and `mu` choose samples. A worker
fetches whole mini-batches by `dataset.fetch`: draws depend on (seed, learner_id, seq), not on workers (law 5).

Workers are spawned, never forked: a fork shares the connections and memory of a process that has begun MPI.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    "MPI4PY_RC_INITIALIZE": "0",  # user modules may import mpi4py, which must not begin MPI in a worker
    "PYTHONSAFEPATH": "1",  # no present directory in sys.path until the rank's path arrives
}


@dataclass(frozen=True)
class Workers:
    """A DataLoader's processes, which fetch ahead of a learner.

    Attributes:
        prefetch: mini-batches ahead per process; None = torch's default.
        method: "spawn" or "forkserver".
        begin: called in each process with its number (`worker_init_fn`).
        timeout_s: longest wait for a mini-batch; 0 = forever.
    """

    count: int
    prefetch: int | None = None
    method: str = "spawn"
    begin: Callable[[int], None] | None = None
    timeout_s: float = 0.0


class CollatedSplit(LazySplit):
    """Any samples of a torch map-style Dataset, or of a stream, collated per mini-batch."""

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
        """Return collated samples; `fetch` seeds their draws. Raises DataError: samples do not fit."""
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
        """The collate function is the user's."""
        return self.collate is not default_collate

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a sample in the batch's first tensor."""
        return self._input_shape


def workers_of(loader: DataLoader[Any], where: str) -> Workers | None:
    """Return a DataLoader's workers. Raises ConfigError: an own sampler, or forked workers."""
    order = (_InfiniteConstantSampler,) if is_stream(loader.dataset) else (SequentialSampler, RandomSampler)
    plain = type(loader.sampler) in order and type(loader.batch_sampler) is BatchSampler
    if not plain or getattr(loader.sampler, "replacement", False):
        found = type(loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler).__name__
        raise ConfigError(
            f"{where}: the DataLoader has a sampler of your own, or none ({found}); expected torch's default: `sampling` and `mu`"
            " choose the samples of a mini-batch; to draw by weights, let a Dataset's __getitem__ draw the index"
            " (torch.multinomial): these draws are seeded"
        )
    if loader.num_workers == 0:
        return None
    context = loader.multiprocessing_context
    method = "spawn" if context is None else context.get_start_method()
    if method == "fork":
        raise ConfigError(
            f"{where}: the DataLoader forks workers, expected 'spawn' or 'forkserver': MPI does not live on in a fork"
        )
    count, prefetch = loader.num_workers, loader.prefetch_factor
    if is_stream(loader.dataset):  # each worker would read the whole stream; one is as far ahead as all
        count, prefetch = 1, (prefetch or 2) * count
    return Workers(count, prefetch, method, loader.worker_init_fn, loader.timeout)


def check_batch_size(train: Split, mu: int) -> None:
    if isinstance(train, LazySplit) and train.batch_size not in (None, 1, mu):
        raise ConfigError(
            f"{train.where}: the DataLoader has batch_size = {train.batch_size}, but mu = {mu}: expected the same, or a DataLoader"
            " without batch_size"
        )


def check_workers(train: Split) -> None:
    """Raise ConfigError for data that cannot be pickled."""
    if not isinstance(train, LazySplit) or train.workers is None:
        return
    workers: Workers = train.workers
    try:
        with _NoProcess():
            ForkingPickler(_Nowhere()).dump((_Fetching(train), workers.begin))
    except Exception as error:  # any error of user objects
        raise ConfigError(
            f"{train.where}: the DataLoader has num_workers = {workers.count}, but the data set cannot be given to workers:"
            f" {type(error).__name__}: {error}; expected classes and functions of a module, or num_workers = 0"
        ) from error


class ReadAhead:
    """A learner's mini-batches, fetched ahead by workers; `named`: indices and seeds of mini-batch `seq`."""

    def __init__(self, split: Split, workers: Workers, named: Callable[[int], tuple[Indices, Seeds]], *, pinned: bool) -> None:
        self._split = split
        self._workers = workers
        self._named = named
        self._pinned = pinned
        self._iterator: Any = None
        self._next = -1

    def get(self, seq: int) -> Any:
        """Return mini-batch `seq`; out of order, workers begin anew."""
        if self._next != seq:
            self.close()
            self._begin(seq)
        self._next = seq + 1
        return next(self._iterator)

    def close(self) -> None:
        iterator, self._iterator, self._next = self._iterator, None, -1
        if iterator is not None:
            with suppress(RuntimeError):  # a worker that aborts as it ends: its mini-batches are not wanted
                iterator._shutdown_workers()

    def _begin(self, seq: int) -> None:
        workers = self._workers
        loader = DataLoader(
            _Fetching(self._split),
            sampler=_Order(self._named, seq),  # endless
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers.count,
            prefetch_factor=workers.prefetch,
            pin_memory=self._pinned,
            timeout=workers.timeout_s,
            worker_init_fn=_Begin(workers.begin),
            multiprocessing_context=multiprocessing.get_context(workers.method),
            generator=torch.Generator(),  # else torch draws workers' seeds from the global generator
        )
        with _in_environment(_OF_WORKERS):
            self._iterator = iter(loader)


class _Fetching(Dataset[Any]):
    """A split, indexed by a mini-batch's indices and seeds."""

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
    """A worker's first act: tie its life to the rank's, and ignore signals."""

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        os.environ.pop("PYTHONSAFEPATH", None)
        for each in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        rank = multiprocessing.parent_process()
        if rank is not None and not rank.is_alive():  # the rank ended during imports, before prctl
            os._exit(1)
        if self.then is not None:
            self.then(number)


class _NoProcess:
    """Stand-in for a starting process, to pickle without threads or descriptors left behind."""

    DupFd = int  # stands for a descriptor in a pickle

    def duplicate_for_child(self, descriptor: int) -> int:
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
    """Add variables to the environment of processes started inside."""
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
