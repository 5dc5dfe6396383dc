"""Which samples a learner draws: pure functions of (seed, learner_id, seq) (DESIGN 4, law 5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.draws import seeds_of
from mpisgd.base.errors import ConfigError, ProtocolError
from mpisgd.base.streams import Domain, stream
from mpisgd.data import sampling
from mpisgd.data.sampling import EpochSampling, OwnSampling, ReplacementSampling

sizes = st.integers(1, 60)
learners = st.integers(1, 7)
mus = st.integers(1, 9)
seeds = st.integers(0, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(size=sizes, mu=mus, lambda_=learners, seed=seeds, rounds=st.integers(1, 12))
def test_the_union_of_the_learners_is_what_one_learner_with_their_batch_sees(
    size: int, mu: int, lambda_: int, seed: int, rounds: int
) -> None:
    many = EpochSampling(size, mu, lambda_, seed)
    one = EpochSampling(size, mu * lambda_, 1, seed)
    for seq in range(rounds):
        union = np.concatenate([many.indices(learner_id, seq) for learner_id in range(lambda_)])
        assert union.dtype == np.int64
        assert union.tolist() == one.indices(0, seq).tolist()


@settings(max_examples=100, deadline=None)
@given(size=sizes, mu=mus, lambda_=learners, seed=seeds)
def test_in_step_every_sample_is_used_once_per_epoch(size: int, mu: int, lambda_: int, seed: int) -> None:
    dealt = EpochSampling(size, mu, lambda_, seed)
    rounds = -(-2 * size // (mu * lambda_))  # two whole epochs, and the rest of a mini-batch
    seen = np.concatenate([dealt.indices(learner_id, seq) for seq in range(rounds) for learner_id in range(lambda_)])
    for epoch in (0, 1):
        assert sorted(seen[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(["epoch", "own", "replacement"]),
    sizes=st.tuples(sizes, mus, learners, seeds),
    asked=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 200)), min_size=1, max_size=10),
)
def test_a_mini_batch_does_not_depend_on_what_was_asked_before(
    kind: str, sizes: tuple[int, int, int, int], asked: list[tuple[int, int]]
) -> None:
    size, mu, lambda_, seed = sizes
    size = max(size, lambda_)
    used = sampling.make(kind, size, mu, lambda_, seed)
    for learner_id, seq in [(learner_id % lambda_, seq) for learner_id, seq in asked]:
        fresh = sampling.make(kind, size, mu, lambda_, seed).indices(learner_id, seq)
        drawn = used.indices(learner_id, seq)
        assert drawn.tolist() == fresh.tolist()
        assert drawn.dtype == np.int64
        assert drawn.shape == (mu,)
        assert drawn.min() >= 0
        assert drawn.max() < size


def test_epochs_are_different_permutations_and_few_are_kept() -> None:
    dealt = EpochSampling(50, 50, 1, seed=3)
    epochs = [dealt.indices(0, seq).tolist() for seq in range(10)]
    assert len({tuple(epoch) for epoch in epochs}) == 10
    assert len(dealt._permutations) == 3


def test_a_mini_batch_may_span_epochs() -> None:
    dealt = EpochSampling(3, 8, 1, seed=0).indices(0, 0).tolist()
    assert sorted(dealt[:3]) == sorted(dealt[3:6]) == [0, 1, 2]


@settings(max_examples=100, deadline=None)
@given(size=sizes, mu=mus, lambda_=learners, seed=seeds)
def test_learners_own_neighbours_that_no_other_draws(size: int, mu: int, lambda_: int, seed: int) -> None:
    size = max(size, lambda_)
    dealt = OwnSampling(size, mu, lambda_, seed)
    owned = []
    for learner_id in range(lambda_):
        drawn = np.concatenate([dealt.indices(learner_id, seq) for seq in range(-(-2 * size // mu))]).tolist()
        own = sorted(set(drawn))
        assert own == list(range(own[0], own[-1] + 1))
        assert len(own) - size // lambda_ in (0, 1)
        for epoch in (0, 1):  # each of them once, before any again
            assert sorted(drawn[epoch * len(own) : (epoch + 1) * len(own)]) == own
        owned += own
    assert owned == list(range(size))


def test_each_epoch_and_each_learner_has_an_order_of_its_own() -> None:
    dealt = OwnSampling(150, 50, 3, seed=3)
    orders = {tuple(dealt.indices(learner_id, seq) - 50 * learner_id) for learner_id in range(3) for seq in range(4)}
    assert len(orders) == 12
    assert len(dealt._permutations) == 3


def test_replacement_draws_uniformly_and_anew() -> None:
    drawn = ReplacementSampling(10, 1000, 4, seed=1)
    counts = np.bincount(drawn.indices(2, 7), minlength=10)
    assert counts.min() > 60
    assert counts.max() < 140
    assert (np.bincount(ReplacementSampling(4, 100, 1, 0).indices(0, 0)) > 1).any()  # a sample may come twice


def _dropout_seed(*name: int) -> int:
    return seeds_of(Domain.DROPOUT, *name).torch


def test_names_that_sum_or_cross_alike_share_no_stream() -> None:
    """What seed + l, or seq mixed with learner_id, would confuse."""
    names = [(seed, learner_id, seq) for seed in range(4) for learner_id in range(4) for seq in range(4)]
    drawn = {tuple(ReplacementSampling(2**40, 4, 4, seed).indices(learner_id, seq)) for seed, learner_id, seq in names}
    assert len(drawn) == len(names)
    assert len({_dropout_seed(*name) for name in names}) == len(names)
    assert len({stream(Domain.DELAY, *name).random() for name in names}) == len(names)


def test_domains_are_independent_streams() -> None:
    drawn = {stream(domain, 5, 1, 2).random() for domain in Domain}
    assert len(drawn) == len(Domain)


def test_a_stream_does_not_run_into_the_next_learners() -> None:
    """The counter counts in its lower half: learner 1's stream starts nowhere near learner 0's first 100,000 draws."""
    first = stream(Domain.DELAY, 0, 0, 0).integers(2**63, size=100_000)
    assert not np.isin(stream(Domain.DELAY, 0, 1, 0).integers(2**63, size=4), first).any()
    assert not np.isin(stream(Domain.DELAY, 0, 0, 1).integers(2**63, size=4), first).any()


def test_dropout_seed_is_a_63_bit_function_of_its_names() -> None:
    seeds = [_dropout_seed(1, learner_id, seq) for learner_id in range(20) for seq in range(20)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert _dropout_seed(1, 2, 3) == _dropout_seed(1, 2, 3)


def test_the_draws_of_a_seed_stay_what_they_are() -> None:
    """Golden: a change here changes every seeded run."""
    assert EpochSampling(10, 5, 2, seed=1).indices(1, 3).tolist() == GOLDEN_EPOCH
    assert OwnSampling(10, 5, 2, seed=1).indices(1, 3).tolist() == GOLDEN_OWN
    assert ReplacementSampling(10, 5, 2, seed=1).indices(1, 3).tolist() == GOLDEN_REPLACEMENT
    assert _dropout_seed(1, 1, 3) == GOLDEN_DROPOUT


GOLDEN_EPOCH = [0, 6, 2, 3, 1]
GOLDEN_OWN = [8, 7, 5, 6, 9]
GOLDEN_REPLACEMENT = [9, 6, 6, 0, 1]
GOLDEN_DROPOUT = 5658936549566306905


@pytest.mark.parametrize(("learner_id", "seq"), [(2, 0), (-1, 0), (0, -1)])
@pytest.mark.parametrize("kind", ["epoch", "own", "replacement"])
def test_a_mini_batch_that_cannot_be(kind: str, learner_id: int, seq: int) -> None:
    with pytest.raises(ProtocolError, match=f"learner_id = {learner_id}, seq = {seq}; there are 2 learners"):
        sampling.make(kind, 10, 2, 2, 1).indices(learner_id, seq)


def test_what_the_user_wrote_is_refused() -> None:
    with pytest.raises(ConfigError, match="sampling = 'epochs' is unknown; did you mean 'epoch'"):
        sampling.make("epochs", 10, 2, 2, 1)
    with pytest.raises(ConfigError, match="0 training samples, mu = 2, lambda = 3"):
        EpochSampling(0, 2, 3, 1)
    with pytest.raises(ConfigError, match="sampling = 'own': 2 training samples for 3 learners, expected one for each at least"):
        sampling.make("own", 2, 2, 3, 1)
    with pytest.raises(ConfigError, match=r"seed = 18446744073709551616: expected 0 <= seed < 2\^64"):
        EpochSampling(4, 2, 3, 2**64).indices(0, 0)
    with pytest.raises(ProtocolError, match="learner_id = -1"):
        stream(Domain.DELAY, 0, -1, 0)
