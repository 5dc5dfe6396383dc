"""Training samples of learner l's seq-th mini-batch: a pure function of (seed, l, seq) (law 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mpisgd.base.errors import ConfigError, ProtocolError, nearest
from mpisgd.base.streams import Domain, stream

Indices = npt.NDArray[np.int64]

_PERMUTATIONS_KEPT = 3


class Sampling(Protocol):
    """Map from (learner_id, seq) to a mini-batch's indices, int64 (mu,); of a stream int64 (mu, 3)."""

    ahead: bool
    """A mini-batch is known before its weights."""

    def indices(self, learner_id: int, seq: int) -> Indices: ...

    def deal(self, learner_id: int, portion: int) -> None:
        """Draw the learner's next mini-batches from `portion`."""


def _taken(position: int, count: int, size: int, permutation: Callable[[int], Indices]) -> Indices:
    """Return `count` indices from a position in an endless sequence of permutations, each of `size`."""
    taken = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, place = divmod(position + filled, size)
        piece = permutation(epoch)[place : place + count - filled]
        taken[filled : filled + len(piece)] = piece
        filled += len(piece)
    return taken


class _Dealing:
    ahead: bool = True

    def __init__(self, size: int, mu: int, lambda_: int, seed: int) -> None:
        if size < 1 or mu < 1 or lambda_ < 1:
            raise ConfigError(f"{size} training samples, mu = {mu}, lambda = {lambda_}: expected each to be at least 1")
        self.size = size
        self.mu = mu
        self.lambda_ = lambda_
        self.seed = seed

    def deal(self, learner_id: int, portion: int) -> None:
        raise ProtocolError(f"learner {learner_id} was dealt portion {portion}: learners draw by themselves")

    def _check(self, learner_id: int, seq: int) -> None:
        if not 0 <= learner_id < self.lambda_ or seq < 0:
            raise ProtocolError(f"no mini-batch for learner_id = {learner_id}, seq = {seq}; there are {self.lambda_} learners")


class EpochSampling(_Dealing):
    """Endless sequence of permutations of the training set, dealt to learners mini-batch by mini-batch.

    Learner l's seq-th mini-batch takes positions [(seq * lambda_ + l) * mu, + mu). Position q is place q % size of epoch q // size.
    So mini-batches are full, learners in step use every sample once per epoch, and one learner with mini-batches of lambda_ * mu
    sees the samples of lambda_ learners.
    """

    def __init__(self, size: int, mu: int, lambda_: int, seed: int) -> None:
        super().__init__(size, mu, lambda_, seed)
        self._permutations: dict[int, Indices] = {}

    def indices(self, learner_id: int, seq: int) -> Indices:
        self._check(learner_id, seq)
        return _taken((seq * self.lambda_ + learner_id) * self.mu, self.mu, self.size, self._permutation)

    def _permutation(self, epoch: int) -> Indices:
        permutation = self._permutations.pop(epoch, None)
        if permutation is None:
            permutation = stream(Domain.EPOCH, self.seed, seq=epoch).permutation(self.size)
            if len(self._permutations) >= _PERMUTATIONS_KEPT:
                del self._permutations[next(iter(self._permutations))]
        self._permutations[epoch] = permutation
        return permutation


class OwnSampling(_Dealing):
    """Own subsets [Dean12 4.1]: each learner draws its subset without replacement, in a new order each epoch.

    Learner l owns samples [l * size // lambda_, (l + 1) * size // lambda_). Its seq-th
    mini-batch takes places [seq * mu, +mu) of endless permutations: mini-batches are full.
    """

    def __init__(self, size: int, mu: int, lambda_: int, seed: int) -> None:
        super().__init__(size, mu, lambda_, seed)
        if size < lambda_:
            raise ConfigError(f"sampling = 'own': {size} training samples for {lambda_} learners, expected one for each at least")
        self._permutations: dict[int, tuple[int, Indices]] = {}

    def indices(self, learner_id: int, seq: int) -> Indices:
        self._check(learner_id, seq)
        first, after = (each * self.size // self.lambda_ for each in (learner_id, learner_id + 1))
        return _taken(seq * self.mu, self.mu, after - first, lambda epoch: self._permutation(learner_id, epoch, first, after))

    def _permutation(self, learner_id: int, epoch: int, first: int, after: int) -> Indices:
        """Return a permutation; keep one per learner: a virtual cluster has many."""
        kept = self._permutations.get(learner_id)
        if kept is None or kept[0] != epoch:
            permutation = first + stream(Domain.OWN, self.seed, learner_id, epoch).permutation(after - first)
            kept = self._permutations[learner_id] = (epoch, permutation)
        return kept[1]


class DealtSampling(_Dealing):
    """Dealt portions (`rules/portions.py`), each of `count` mini-batches of one push.

    Portion p takes positions [p * count * mu, (p + 1) * count * mu) of `EpochSampling`: all portions once use each sample once per
    epoch. A portion's samples are a function of (seed, portion) alone.
    """

    ahead = False

    def __init__(self, size: int, mu: int, lambda_: int, seed: int, *, count: int = 1) -> None:
        super().__init__(size, mu, lambda_, seed)
        self._epochs = EpochSampling(size, mu, 1, seed)
        self._count = count
        self._portions = [0] * lambda_

    def deal(self, learner_id: int, portion: int) -> None:
        self._portions[learner_id] = portion

    def indices(self, learner_id: int, seq: int) -> Indices:
        self._check(learner_id, seq)
        return self._epochs.indices(0, self._portions[learner_id] * self._count + seq % self._count)


class ReplacementSampling(_Dealing):
    """Uniform draws with replacement: getMinibatch of [Zhang16 2.1]."""

    def indices(self, learner_id: int, seq: int) -> Indices:
        self._check(learner_id, seq)
        return stream(Domain.REPLACEMENT, self.seed, learner_id, seq).integers(self.size, size=self.mu)


class StreamSampling(_Dealing):
    """Shards of a stream: a learner's seq-th mini-batch has samples [seq * mu, +mu) of its shard."""

    def indices(self, learner_id: int, seq: int) -> Indices:
        self._check(learner_id, seq)
        positions = np.arange(seq * self.mu, (seq + 1) * self.mu)
        return np.stack([np.full_like(positions, learner_id), np.full_like(positions, self.lambda_), positions], axis=1)


class PortionSampling(_Dealing):
    """Portions of one batch: mini-batch `seq` is portion `seq`, on any learner.

    The batch is a share of the training set, drawn once by the seed. Portion p is [p mu, (p + 1) mu) of it; the last may be
    shorter.
    """

    def __init__(self, size: int, mu: int, share: float, seed: int) -> None:
        super().__init__(size, mu, 1, seed)
        self.samples = max(1, round(share * size))
        if mu > self.samples:
            raise ConfigError(
                f"mu = {mu}: expected at most the {self.samples:,} samples of the batch ({size:,} x protocol.share = {share:g}):"
                " mu samples make a portion; take far fewer than the batch / learners"
            )
        self.portions = -(-self.samples // mu)
        self._batch: Indices = stream(Domain.EPOCH, seed, seq=0).permutation(size)[: self.samples]

    def indices(self, learner_id: int, seq: int) -> Indices:
        if not 0 <= seq < self.portions:
            raise ProtocolError(f"no portion {seq}: there are {self.portions}")
        return self._batch[seq * self.mu : (seq + 1) * self.mu]


def dealt_on(kind: str, next_seq: Sequence[int], lambda_: int) -> list[int]:
    """Return the next mini-batch of each of `lambda_` learners; `next_seq` was that of the learners before.

    Epochs deal from one sequence: mini-batches begun count as used. After learners in step, every sample is still used once per
    epoch; else a few are used twice or never.

    Own subsets, and shards of a stream, are cut anew: learners go on equally far in an epoch.

    With replacement, and where shard 0 deals, all go on after the last mini-batch of any.
    """
    if len(next_seq) == lambda_:
        return list(next_seq)
    if kind in ("replacement", "dealt"):
        return [max(next_seq)] * lambda_
    begun = sum(next_seq)
    return [-(-max(0, begun - learner_id) // lambda_) for learner_id in range(lambda_)]


def recalibration_batches(size: int, batch: int, batches: int, seed: int, *, in_order: bool = False) -> list[Indices]:
    """Return the training samples for batch-norm statistics: batch * batches distinct ones, or all, drawn by the seed.

    A stream (`in_order`) gives its first samples. Mini-batches, int64 (at most batch,), are as equal as possible.
    """
    count = min(size, batch * batches)
    chosen = np.arange(count) if in_order else stream(Domain.RECALIBRATION, seed).choice(size, count, replace=False)
    return np.array_split(chosen, -(-count // batch)) if count else []


_KINDS: Mapping[str, Callable[[int, int, int, int], Sampling]] = {
    "dealt": DealtSampling,
    "epoch": EpochSampling,
    "own": OwnSampling,
    "replacement": ReplacementSampling,
    "stream": StreamSampling,
}


def make(kind: str, size: int, mu: int, lambda_: int, seed: int) -> Sampling:
    if kind not in _KINDS:
        raise ConfigError(f"sampling = {kind!r} is unknown{nearest(kind, _KINDS)}")
    return _KINDS[kind](size, mu, lambda_, seed)
