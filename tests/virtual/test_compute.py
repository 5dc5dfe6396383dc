"""Compute nanoseconds of virtual learners: functions of names, with the distributions that were asked for."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.base.errors import ConfigError, DataError, ProtocolError
from mpisgd.base.streams import Domain, stream
from mpisgd.config.config_virtual import (
    ComputeOptions,
    ConstantComputeOptions,
    EmpiricalComputeOptions,
    HeavyTailComputeOptions,
    LognormalComputeOptions,
    NormalComputeOptions,
    VirtualOptions,
)
from mpisgd.simulate.compute import BLOCKS, Compute, make
from tests.unit.fabricate import Log, row, rows, write_run

RANDOM: list[ComputeOptions] = [NormalComputeOptions(), LognormalComputeOptions(), HeavyTailComputeOptions()]
PAUSING: dict[str, Any] = {"pause_mean_s": 0.5, "pause_every_s": 1.0}


def compute(options: ComputeOptions, *, seed: int = 1, lambda_: int = 4, nodes: Sequence[int] = (), **virtual: Any) -> Compute:
    """Learner l on node l where `nodes` does not say otherwise."""
    return make(options, VirtualOptions(**virtual), seed=seed, lambda_=lambda_, nodes=nodes or range(lambda_))


def drawn(options: ComputeOptions, count: int, learner_id: int = 0, **fields: Any) -> np.ndarray:
    """Nanoseconds of the first mini-batches of one learner: int64 (count,)."""
    return np.array(list(islice(compute(options, **fields).nanoseconds(learner_id), count)))


# --------------------------------------------------------------------------------------------------- functions of names


@pytest.mark.parametrize("virtual", [{}, PAUSING], ids=["plain", "pauses"])
@pytest.mark.parametrize("options", RANDOM, ids=lambda options: type(options).__name__)
def test_a_draw_depends_on_its_names_alone(options: ComputeOptions, virtual: dict[str, Any]) -> None:
    """However many learners there are, and whoever draws when."""
    names = [(seed, learner_id) for seed in (1, 2) for learner_id in range(3)]
    found = {(seed, learner_id): drawn(options, 200, learner_id, seed=seed, **virtual).tolist() for seed, learner_id in names}
    for seed in (1, 2):
        many = compute(options, seed=seed, lambda_=50, **virtual)
        iterators = [many.nanoseconds(learner_id) for learner_id in range(3)]
        again: list[list[int]] = [[], [], []]
        for learner_id in random.Random(0).sample([0, 1, 2] * 200, 600):
            again[learner_id].append(next(iterators[learner_id]))
        assert again == [found[seed, learner_id] for learner_id in range(3)]
    assert len(set(itertools.chain(*found.values()))) == 200 * len(names)


def test_blocks_join_without_a_seam() -> None:
    """The same numbers as numpy draws under the names of the blocks, in order; no block comes twice."""
    options = NormalComputeOptions(mean_s=2.0, deviation_s=0.5)
    sizes = [*BLOCKS, BLOCKS[-1]]
    blocks = [stream(Domain.COMPUTE, 7, 3, block).normal(2.0, 0.5, size) for block, size in enumerate(sizes)]
    expected = np.rint(np.maximum(np.concatenate(blocks), 0.2) * 1e9)
    assert drawn(options, sum(sizes), 3, seed=7).tolist() == expected.tolist()
    assert len(set(expected[expected > 0.2e9])) == np.count_nonzero(expected > 0.2e9)


def test_a_stream_is_numpys_philox_of_its_name() -> None:
    """`streams` gives the key to Philox by a shorter way, which must not change a number of any seeded run."""
    philox = np.random.Philox(key=np.array([5, 6], np.uint64), counter=np.array([0, 0, 7, 8], np.uint64))
    assert stream(Domain.COMPUTE, 5, 7, 8).random(9).tolist() == np.random.Generator(philox).random(9).tolist()


def test_they_are_whole_numbers() -> None:
    for options in (ConstantComputeOptions(), *RANDOM):
        assert all(type(each) is int for each in islice(compute(options, **PAUSING).nanoseconds(0), 10))


# -------------------------------------------------------------------------------------------------------- distributions


def test_constant() -> None:
    assert list(islice(compute(ConstantComputeOptions(mean_s=0.1)).nanoseconds(0), 3)) == [100_000_000] * 3
    assert drawn(ConstantComputeOptions(mean_s=0.0), 3).tolist() == [0, 0, 0]
    assert drawn(ConstantComputeOptions(mean_s=2), 3).tolist() == [2_000_000_000] * 3


def test_normal() -> None:
    seconds = 1e-9 * drawn(NormalComputeOptions(mean_s=0.1, deviation_s=0.02), 20_000)
    assert seconds.mean() == pytest.approx(0.1, rel=0.005)
    assert seconds.std() == pytest.approx(0.02, rel=0.02)
    assert np.quantile(seconds, [0.1, 0.5, 0.9]) == pytest.approx([0.1 - 1.2816 * 0.02, 0.1, 0.1 + 1.2816 * 0.02], rel=0.01)


def test_normal_is_cut_at_a_tenth_of_the_mean() -> None:
    seconds = 1e-9 * drawn(NormalComputeOptions(mean_s=0.1, deviation_s=0.1), 20_000)
    assert seconds.min() == pytest.approx(0.01)
    assert np.mean(seconds < 0.010001) == pytest.approx(0.1841, rel=0.05)  # Phi(-0.9)


@pytest.mark.parametrize("sigma", [0.0, 0.2, 1.0])
def test_lognormal(sigma: float) -> None:
    seconds = 1e-9 * drawn(LognormalComputeOptions(mean_s=0.1, sigma=sigma), 20_000)
    assert seconds.mean() == pytest.approx(0.1, rel=0.03)
    assert np.log(seconds).std() == pytest.approx(sigma, rel=0.02, abs=1e-7)
    assert np.median(seconds) == pytest.approx(0.1 * math.exp(-sigma * sigma / 2), rel=0.03)


def test_nothing_to_compute_takes_no_time() -> None:
    assert not drawn(LognormalComputeOptions(mean_s=0.0), 100).any()
    assert not drawn(HeavyTailComputeOptions(mean_s=0.0, tail_probability=0.0), 100).any()


def test_heavy_tail() -> None:
    """Body and tail apart: the share of the tail, its Pareto quantiles, its cut."""
    options = HeavyTailComputeOptions(
        mean_s=1.0, sigma=0.0, tail_probability=0.3, tail_scale_s=0.5, tail_index=2.0, tail_most_s=5.0
    )
    extra = 1e-9 * drawn(options, 40_000) - 1.0
    late = extra[extra > 1e-9]
    assert np.all(np.abs(extra[extra < 0.49]) < 1e-9)
    assert len(late) / len(extra) == pytest.approx(0.3, rel=0.02)
    assert late.min() == pytest.approx(0.5, rel=0.001)
    assert np.quantile(late, [0.5, 0.75, 0.96]) == pytest.approx([0.5 * share**-0.5 for share in (0.5, 0.25, 0.04)], rel=0.03)
    assert np.mean(late > 4.999) == pytest.approx(0.01, rel=0.25)  # (0.5 / 5)^2
    assert late.max() == pytest.approx(5.0)


def test_a_tail_for_all_and_a_tail_for_none() -> None:
    assert drawn(HeavyTailComputeOptions(mean_s=0.0, tail_probability=1.0), 2000).min() >= 0.5e9
    body = drawn(LognormalComputeOptions(mean_s=1.6, sigma=0.06), 4)
    assert drawn(HeavyTailComputeOptions(tail_probability=0.0), 4).tolist() == body.tolist()


def test_longer_than_an_int64_of_nanoseconds_is_cut() -> None:
    nanoseconds = drawn(LognormalComputeOptions(mean_s=1e9, sigma=3.0), 2000)
    assert nanoseconds.min() > 0
    assert nanoseconds.max() == 2**61


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_stragglers_have_the_shape_of_chen16(seed: int) -> None:
    """[Chen16 Fig. 4]: mean times to collect k of 100 gradients are 1.4 to 1.8 s but for the last few; [Fig. 3]: up to 310 s."""
    learners = compute(HeavyTailComputeOptions(), seed=seed, lambda_=100)
    seconds = 1e-9 * np.array([list(islice(learners.nanoseconds(learner_id), 1000)) for learner_id in range(100)])
    collected = np.sort(seconds, axis=0)
    mean, median = collected.mean(axis=1), np.median(collected, axis=1)
    assert mean[2 - 1] > 1.4
    assert mean[95 - 1] < 1.8
    assert mean[100 - 1] > 2 * mean[90 - 1]
    assert mean[100 - 1] > 1.5 * median[100 - 1]
    assert median[98 - 1] < 1.9
    assert 150 < seconds.max() < 312


# ------------------------------------------------------------------------------------------------- slow nodes and pauses


@pytest.mark.parametrize("options", [ConstantComputeOptions(), *RANDOM], ids=lambda options: type(options).__name__)
def test_all_learners_of_a_slow_node_take_its_factor_as_long(options: ComputeOptions) -> None:
    plain = [drawn(options, 100, learner_id) for learner_id in range(4)]
    slow = [drawn(options, 100, learner_id, nodes=[1, 1, 2, 2], slow_nodes={2: 2.5}) for learner_id in range(4)]
    assert (slow[0] == plain[0]).all()
    assert (slow[1] == plain[1]).all()
    assert np.abs(slow[2] - 2.5 * plain[2]).max() <= 2  # each is rounded on its own
    assert np.abs(slow[3] - 2.5 * plain[3]).max() <= 2


@pytest.mark.parametrize("every_s", [0.02, 0.3, 5.0])
def test_pauses_lengthen_the_mini_batches_that_they_fall_into(every_s: float) -> None:
    """Against the drawn pauses, laid out on the line of compute time: several in one mini-batch, and many without any."""
    count, work_ns = 2000, 100_000_000
    sizes = [*BLOCKS, *[BLOCKS[-1]] * 9]
    blocks = [stream(Domain.PAUSE, 1, 2, block).exponential(size=(size, 2)) for block, size in enumerate(sizes)]
    after_ns, length_ns = np.rint(np.concatenate(blocks) * (every_s, 0.5) * 1e9).astype(np.int64).T
    seqs = np.cumsum(after_ns) // work_ns
    assert seqs[-1] >= count
    expected = [work_ns + int(length_ns[seqs == seq].sum()) for seq in range(count)]
    pauses: dict[str, Any] = {"pause_mean_s": 0.5, "pause_every_s": every_s}
    assert drawn(ConstantComputeOptions(mean_s=0.1), count, 2, **pauses).tolist() == expected


def test_pauses_are_as_often_and_as_long_as_was_asked_for() -> None:
    seconds = 1e-9 * drawn(ConstantComputeOptions(mean_s=0.1), 20_000, **PAUSING)
    assert np.mean(seconds > 0.1000001) == pytest.approx(1 - math.exp(-0.1), rel=0.05)
    assert seconds.mean() == pytest.approx(0.1 + 0.1 * 0.5, rel=0.05)


def test_pauses_change_nothing_else() -> None:
    plain, pausing = (drawn(LognormalComputeOptions(), 2000, **virtual) for virtual in ({}, PAUSING))
    assert (pausing >= plain).all()
    assert np.count_nonzero(pausing > plain) == pytest.approx(2000 * (1 - math.exp(-0.1)), rel=0.15)


# ------------------------------------------------------------------------------------------------------------ resampled


def write_log(path: Path, pushes: Sequence[tuple[int, int, float]], learners: int = 3, **protocol: Any) -> str:
    """(learner_id, seq, compute_s) on shard 0; shard 1 tells other seconds, and all were delayed by 9 s on purpose."""
    told = [
        row("pushes", shard=shard, learner_id=learner_id, seq=seq, compute_s=compute_s + shard, delay_s=9.0)
        for shard in range(2)
        for learner_id, seq, compute_s in pushes
    ]
    return str(write_run(path / "run", Log(pushes=rows("pushes", told)), {"name": "hardsync", **protocol}, learners, shards=2))


#: In another order than the learners'; first mini-batches take 5 s, but for learner 2, which has no others.
PUSHES = [(1, 1, 0.25), (0, 0, 5.0), (1, 0, 5.0), (0, 2, 0.125), (0, 1, 0.0625), (2, 0, 0.75)]


@pytest.mark.parametrize(("learner_id", "of"), [(0, {0.125, 0.0625}), (1, {0.25}), (2, {0.75}), (3, {0.125, 0.0625}), (5, {0.75})])
def test_seconds_of_a_run_are_drawn_again_learner_by_learner(learner_id: int, of: set[float], tmp_path: Path) -> None:
    options = EmpiricalComputeOptions(run=write_log(tmp_path, PUSHES))
    assert {each / 1e9 for each in drawn(options, 100, learner_id, lambda_=6).tolist()} == of


def test_a_push_of_several_mini_batches_tells_what_one_takes(tmp_path: Path) -> None:
    options = EmpiricalComputeOptions(run=write_log(tmp_path, PUSHES, name="downpour", n_push=2))
    assert {each / 1e9 for each in drawn(options, 100, 0, lambda_=6).tolist()} == {0.0625, 0.03125}


def test_seconds_of_a_run_are_drawn_again_pooled(tmp_path: Path) -> None:
    options = EmpiricalComputeOptions(run=write_log(tmp_path, PUSHES), pooled=True)
    found, counts = np.unique(drawn(options, 8000, 3), return_counts=True)
    assert found.tolist() == [62_500_000, 125_000_000, 250_000_000, 750_000_000]
    assert counts / 8000 == pytest.approx([0.25] * 4, rel=0.1)


def test_what_is_drawn_again_depends_on_its_names_alone(tmp_path: Path) -> None:
    pushes = [(learner_id, seq, 0.1 + 0.01 * seq) for learner_id in range(3) for seq in range(50)]
    options = EmpiricalComputeOptions(run=write_log(tmp_path, pushes))
    assert drawn(options, 500, 2, lambda_=3).tolist() == drawn(options, 500, 2, lambda_=40).tolist()
    assert drawn(options, 500, 2).tolist() != drawn(options, 500, 5, lambda_=6).tolist()  # the same values, drawn apart


def test_only_the_learners_that_are_drawn_from_must_have_pushed(tmp_path: Path) -> None:
    run = write_log(tmp_path, [(0, 0, 1.0), (2, 0, 2.0)])
    assert drawn(EmpiricalComputeOptions(run=run), 1, lambda_=1).tolist() == [1_000_000_000]
    assert set(drawn(EmpiricalComputeOptions(run=run, pooled=True), 50).tolist()) == {1_000_000_000, 2_000_000_000}
    with pytest.raises(DataError, match=r"the log of .*run holds no pushes of learner 1; compute\.pooled = true needs none"):
        compute(EmpiricalComputeOptions(run=run))


@pytest.mark.parametrize("pooled", [False, True])
def test_a_log_without_pushes(pooled: bool, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the log of .*run holds no pushes$"):
        compute(EmpiricalComputeOptions(run=write_log(tmp_path, []), pooled=pooled))


@pytest.mark.parametrize("compute_s", [math.nan, math.inf, -1.0])
def test_a_log_with_seconds_that_cannot_be(compute_s: float, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds negative or non-finite compute seconds"):
        compute(EmpiricalComputeOptions(run=write_log(tmp_path, [(0, 0, 1.0), (0, 1, compute_s)])))


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compute\.run = '': expected the directory of a run"):
        compute(EmpiricalComputeOptions())
    with pytest.raises(DataError, match="is no run directory of mpisgd"):
        compute(EmpiricalComputeOptions(run=str(tmp_path)))


# --------------------------------------------------------------------------------------------------------------- errors


def test_who_is_no_learner() -> None:
    for learner_id in (-1, 4):
        with pytest.raises(ProtocolError, match=f"no compute for learner_id = {learner_id}; there are 4 learners"):
            compute(ConstantComputeOptions()).nanoseconds(learner_id)
    with pytest.raises(ProtocolError, match=r"3 nodes of learners: expected lambda = 4"):
        compute(ConstantComputeOptions(), nodes=[0, 0, 1])
