"""Training samples of learner l's seq-th mini-batch: a pure function of (seed, l, seq) (DESIGN 4, law 5)."""

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
    """Maps (learner_id, seq) to the indices, int64 (mu,), of one mini-batch; of a stream int64 (mu, 3)."""

    ahead: bool
    """Whether a mini-batch is known before the weights that it is computed at."""

    def indices(self, learner_id: int, seq: int) -> Indices: ...

    def deal(self, learner_id: int, portion: int) -> None:
        """Where portions are dealt: the mini-batches that a learner draws from now on are of this one."""


def _taken(position: int, count: int, size: int, permutation: Callable[[int], Indices]) -> Indices:
    """`count` indices from this position of an endless sequence of permutations, each of `size`."""
    taken = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, place = divmod(position + filled, size)
        piece = permutation(epoch)[place : place + count - filled]
        taken[filled : filled + len(piece)] = piece
        filled += len(piece)
    return taken


class _Dealing:
    """Sizes of what is dealt. Raises ConfigError where one is below 1."""

    ahead: bool = True

    def __init__(self, size: int, mu: int, lambda_: int, seed: int) -> None:
        if size < 1 or mu < 1 or lambda_ < 1:
            raise ConfigError(f"{size} training samples, mu = {mu}, lambda = {lambda_}: expected each to be at least 1")
        self.size = size
        self.mu = mu
        self.lambda_ = lambda_
        self.seed = seed

    def deal(self, learner_id: int, portion: int) -> None:
        """Raises ProtocolError: learners draw by themselves."""
        raise ProtocolError(f"learner {learner_id} was dealt portion {portion}: it draws by itself")

    def _check(self, learner_id: int, seq: int) -> None:
        if not 0 <= learner_id < self.lambda_ or seq < 0:
            raise ProtocolError(f"no mini-batch for learner_id = {learner_id}, seq = {seq}; there are {self.lambda_} learners")


class EpochSampling(_Dealing):
    """Endless sequence of permutations of the training set, dealt to the learners mini-batch by mini-batch.

    Learner l's seq-th mini-batch takes positions [(seq * lambda_ + l) * mu, + mu) of the sequence; position q lies in epoch
    q // size, at place q % size of that epoch's permutation. So mini-batches are always full, learners that keep step use
    every sample once per epoch, and one learner with mini-batches of lambda_ * mu sees what lambda_ learners see together.
    """

    def __init__(self, size: int, mu: int, lambda_: int, seed: int) -> None:
        super().__init__(size, mu, lambda_, seed)
        self._permutations: dict[int, Indices] = {}

    def indices(self, learner_id: int, seq: int) -> Indices:
        """Indices, int64 (mu,). Raises ProtocolError where no such mini-batch exists."""
        self._check(learner_id, seq)
        return _taken((seq * self.lambda_ + learner_id) * self.mu, self.mu, self.size, self._permutation)

    def _permutation(self, epoch: int) -> Indices:
        """The last few are kept, the longest unused goes."""
        permutation = self._permutations.pop(epoch, None)
        if permutation is None:
            permutation = stream(Domain.EPOCH, self.seed, seq=epoch).permutation(self.size)
            if len(self._permutations) >= _PERMUTATIONS_KEPT:
                del self._permutations[next(iter(self._permutations))]
        self._permutations[epoch] = permutation
        return permutation


class OwnSampling(_Dealing):
    """Each learner draws from a subset of its own [Dean12 4.1], without replacement: all of it, in a new order, again and again.

    Learner l owns the samples [l * size // lambda_, (l + 1) * size // lambda_): neighbours in a file, of which other learners read
    nothing. Its seq-th mini-batch takes places [seq * mu, +mu) of its own endless sequence of permutations, so mini-batches are
    always full, and an epoch of its own ends where it has drawn each of its samples once.

    Raises ConfigError where there are fewer samples than learners.
    """

    def __init__(self, size: int, mu: int, lambda_: int, seed: int) -> None:
        super().__init__(size, mu, lambda_, seed)
        if size < lambda_:
            raise ConfigError(f"sampling = 'own': {size} training samples for {lambda_} learners, expected one for each at least")
        self._permutations: dict[int, tuple[int, Indices]] = {}

    def indices(self, learner_id: int, seq: int) -> Indices:
        """Indices, int64 (mu,). Raises ProtocolError where no such mini-batch exists."""
        self._check(learner_id, seq)
        first, after = (each * self.size // self.lambda_ for each in (learner_id, learner_id + 1))
        return _taken(seq * self.mu, self.mu, after - first, lambda epoch: self._permutation(learner_id, epoch, first, after))

    def _permutation(self, learner_id: int, epoch: int, first: int, after: int) -> Indices:
        """That of its present epoch is kept for each learner; a virtual cluster has many."""
        kept = self._permutations.get(learner_id)
        if kept is None or kept[0] != epoch:
            permutation = first + stream(Domain.OWN, self.seed, learner_id, epoch).permutation(after - first)
            kept = self._permutations[learner_id] = (epoch, permutation)
        return kept[1]


class DealtSampling(_Dealing):
    """Each learner draws the portion that it was dealt (`rules/portions.py`): of `count` mini-batches, those of one push.

    Portion p takes positions [p * count * mu, (p + 1) * count * mu) of the sequence of permutations of `EpochSampling`: so portions
    are always full, and who has each portion once has each sample once per epoch. The samples of a portion are a function of
    (seed, portion), whoever computes it.
    """

    ahead = False

    def __init__(self, size: int, mu: int, lambda_: int, seed: int, *, count: int = 1) -> None:
        super().__init__(size, mu, lambda_, seed)
        self._epochs = EpochSampling(size, mu, 1, seed)
        self._count = count
        self._portions = [0] * lambda_

    def deal(self, learner_id: int, portion: int) -> None:
        """The mini-batches that a learner draws from now on are of this portion."""
        self._portions[learner_id] = portion

    def indices(self, learner_id: int, seq: int) -> Indices:
        """Indices, int64 (mu,). Raises ProtocolError where no such mini-batch exists."""
        self._check(learner_id, seq)
        return self._epochs.indices(0, self._portions[learner_id] * self._count + seq % self._count)


class ReplacementSampling(_Dealing):
    """Every mini-batch is drawn anew and uniformly, with replacement: getMinibatch of [Zhang16 2.1]."""

    def indices(self, learner_id: int, seq: int) -> Indices:
        """Indices, int64 (mu,). Raises ProtocolError where no such mini-batch exists."""
        self._check(learner_id, seq)
        return stream(Domain.REPLACEMENT, self.seed, learner_id, seq).integers(self.size, size=self.mu)


class StreamSampling(_Dealing):
    """Each learner reads its own shard of a stream in order: its seq-th mini-batch has the samples [seq * mu, +mu) of that."""

    def indices(self, learner_id: int, seq: int) -> Indices:
        """Indices of `stream.Stream`, int64 (mu, 3). Raises ProtocolError where no such mini-batch exists."""
        self._check(learner_id, seq)
        positions = np.arange(seq * self.mu, (seq + 1) * self.mu)
        return np.stack([np.full_like(positions, learner_id), np.full_like(positions, self.lambda_), positions], axis=1)


class PortionSampling(_Dealing):
    """Portions of one batch, whoever computes them: mini-batch `seq` is portion `seq`.

    The batch is this share of the training set, drawn once by the seed; of its order, portion p is [p mu, (p + 1) mu), and the last
    one may be shorter.

    Attributes:
        samples: of the batch.
        portions: how many there are.

    Raises ConfigError where a portion is larger than the batch.
    """

    def __init__(self, size: int, mu: int, share: float, seed: int) -> None:
        super().__init__(size, mu, 1, seed)
        self.samples = max(1, round(share * size))
        if mu > self.samples:
            raise ConfigError(
                f"mu = {mu}: expected at most the {self.samples:,} samples of the batch ({size:,} x protocol.share = {share:g}), of"
                " which mu make a portion; take far fewer than the batch / learners"
            )
        self.portions = -(-self.samples // mu)
        self._batch: Indices = stream(Domain.EPOCH, seed, seq=0).permutation(size)[: self.samples]

    def indices(self, learner_id: int, seq: int) -> Indices:
        """Indices, int64 (at most mu,). Raises ProtocolError where there is no such portion."""
        if not 0 <= seq < self.portions:
            raise ProtocolError(f"no portion {seq}: there are {self.portions}")
        return self._batch[seq * self.mu : (seq + 1) * self.mu]


def dealt_on(kind: str, next_seq: Sequence[int], lambda_: int) -> list[int]:
    """With which mini-batch each of `lambda_` learners goes on, where before learner l's next one was `next_seq[l]`.

    In epochs, mini-batches are dealt from one sequence: as many of it are taken as used as had been begun, and the rest is dealt to
    the learners there are now. Where the ones before kept step, every sample is still used exactly once per epoch; otherwise
    a few are used twice or not at all, as many as the learners were apart.

    So are learners' own subsets, cut anew for those there are now: all learners are as far in an epoch as those before were on the
    whole, but what these had drawn in it is not what those would have. The same holds for shards of a stream.

    With replacement, nobody may draw the same again: all go on after the last mini-batch of any. So they do where shard 0 deals:
    what is left is in its account, and the number of a mini-batch says nothing of its samples.
    """
    if len(next_seq) == lambda_:
        return list(next_seq)
    if kind in ("replacement", "dealt"):
        return [max(next_seq)] * lambda_
    begun = sum(next_seq)
    return [-(-max(0, begun - learner_id) // lambda_) for learner_id in range(lambda_)]


def recalibration_batches(size: int, batch: int, batches: int, seed: int, *, in_order: bool = False) -> list[Indices]:
    """On which training samples batch-norm statistics are measured: batch * batches distinct ones, or all, drawn by the seed alone.

    Of a stream (`in_order`) the first ones, since there is no other way to them.

    The first ones that are stored would not do: where data are sorted by class, they are of the first classes. The mini-batches,
    each int64 (at most batch,), are as equal as can be, since each counts as much as the others.
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
    """The sampling of `Config.sampling`. Raises ConfigError where there is no such kind."""
    if kind not in _KINDS:
        raise ConfigError(f"sampling = {kind!r} is unknown{nearest(kind, _KINDS)}")
    return _KINDS[kind](size, mu, lambda_, seed)
