"""The laws of DESIGN 4 over random protocols, sizes, costs, stragglers and failures: every log must prove them.

hypothesis draws the configurations, the same ones each time. They run on wires that watch law 1: no answer is sent to a learner
that has not posted its receive.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpisgd import replay
from mpisgd.comm.messages import Fields
from mpisgd.protocols import PROTOCOLS
from mpisgd.records.log.schema import Verdict
from mpisgd.simulate import job
from mpisgd.vectors import chunks
from tests.effort import examples, spread
from tests.virtual.jobs import SIZES, TENSORS, simulated, tables
from tests.virtual.laws import WEIGHTS, Laws
from tests.virtual.scene import WatchedWire

Check = Callable[[Path, dict[str, Any], float], None]


MOST_MESSAGES = 10_000
"""Of one rank; the jobs below need a few hundred."""


class JitteryWire(WatchedWire):
    """Sends each message some drawn time later than it is told to: so shards see learners in different orders."""

    mean_ns = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.random = random.Random(self.rank)

    def start(self, dest: int, tag: int, fields: Fields, *bodies: Any) -> Any:
        assert len(self.sent) < MOST_MESSAGES, "it goes on for ever"
        self.now += round(self.random.expovariate(1.0) * self.mean_ns)
        return super().start(dest, tag, fields, *bodies)


def obeys(out: Path, base: Mapping[str, Any], changes: Mapping[str, Any], jitter_s: float) -> Laws:
    """The laws of the run of a configuration, on wires that watch law 1; all were held."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "VirtualWire", JitteryWire)
        patched.setattr(JitteryWire, "mean_ns", 1e9 * jitter_s)
        patched.setattr(chunks, "CHUNK_NBYTES", 400)  # several to a slice, where those travel
        laws = Laws(simulated(out, base, **changes))
        laws.hold()
        assert replay.check(out) == "", "law 6"  # which simulates it again, on such wires
    return laws


# --------------------------------------------------------------------------------------------------- random configurations


@st.composite
def jobs(draw: st.DrawFn, protocol: str, most_learners: int = 8) -> dict[str, Any]:
    """Anything that a user may write, from instant to awful."""
    learners = draw(st.sampled_from([1, 2, 3, 5, most_learners]).filter(lambda many: many <= most_learners))
    shards, ranks_per_node = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    first = shards
    if protocol == "allreduce":  # there are no ranks that are shards only, and nobody may leave
        first, shards = 0, 1
    learner = st.integers(0, learners - 1).map(str)
    node = st.integers(first, first + learners - 1).map(lambda rank: str(rank // ranks_per_node))  # where shards are packed
    slow_nodes = draw(st.dictionaries(node, st.sampled_from([0.5, 3.0, 50.0]), max_size=2))
    compute = draw(computes)
    ahead, way = draw(st.sampled_from(exchanges(protocol)))
    in_turn = way == "streamed" or protocol == "allreduce"
    return {
        "protocol": draw(protocols(protocol, learners)),
        "ahead": ahead,
        "way": way if in_turn else draw(st.sampled_from(["whole", "gathered"])),
        "shards": shards,
        "placement": "packed" if slow_nodes else draw(st.sampled_from(["packed", "spread"])),
        "evaluator": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32)),
        "virtual": {
            "learners": learners,
            "ranks_per_node": ranks_per_node,
            "slow_nodes": slow_nodes,
            "pause_mean_s": draw(st.sampled_from([0.0, 0.0, 0.5])),
            "pause_every_s": 0.5,
        },
        "compute": compute,
        "network": draw(networks),
        "service": draw(services),
        "straggler": draw(stragglers(learner)),
        "failures": {} if protocol == "allreduce" else draw(st.one_of(st.just({}), failures(learner, compute["mean_s"] or 1e-6))),
        "epochs": draw(st.sampled_from([0.2, 0.5, 1.0, 1.5])),
        "mu": draw(st.sampled_from([4, 4, 20])),
    }


def exchanges(protocol: str) -> list[tuple[int, str]]:
    """How far gradients are sent ahead, and the way of all."""
    options = PROTOCOLS[protocol]
    return [(0, "whole"), *[(1, "whole"), (2, "whole")] * options.duplex, *[(0, "streamed")] * options.streams]


def protocols(name: str, learners: int) -> st.SearchStrategy[dict[str, Any]]:
    own: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "hardsync": {},
        "allreduce": {},
        "softsync": {"n": st.integers(1, learners), "modulation": modulations},
        "backup": {"N": st.integers(1, learners), "modulation": modulations},
        "timeout": {
            "N": st.integers(1, learners),
            "N_min": st.just(1),
            "timeout_s": st.sampled_from([0.0, 0.05, 0.3, 10.0]),
        },
        "versioned": {
            "grads_to_wait": st.integers(1, learners),
            "tolerance": st.sampled_from([0, 0, 1, 3]),
            "modulation": modulations,
        },
        "async": {"most_staleness": st.sampled_from([0, 1, learners, 10**6]), "modulation": modulations},
        "downpour": {
            "n_push": st.just(2),
            "n_fetch": st.sampled_from([2, 4, 6]),
            "warm_up": st.sampled_from([0, 3]),
            "local_alpha": st.sampled_from([0.0, 0.01]),
        },
        "ssp": {
            "slack": st.sampled_from([0, 1, 3]),
            "modulation": modulations,
            "get_model_frequency": st.sampled_from([1, 1, 3]),
        },
    }
    drawn = st.fixed_dictionaries({"name": st.just(name), **own[name]})
    if name != "backup":
        return drawn
    late = st.sampled_from([{"late": "drop"}, {"late": "apply"}, {"abort": True}])
    return st.builds(lambda options, how: {**options, **how}, drawn, late)


modulations = st.sampled_from(sorted(WEIGHTS))

computes = st.one_of(
    st.builds(lambda s: {"name": "constant", "mean_s": s}, st.sampled_from([0.0, 1e-6, 0.1])),
    st.builds(lambda share: {"name": "normal", "mean_s": 0.1, "deviation_s": 0.1 * share}, st.sampled_from([0.05, 0.3, 1.0])),
    st.builds(lambda sigma: {"name": "lognormal", "mean_s": 0.1, "sigma": sigma}, st.sampled_from([0.05, 0.5, 3.0])),
    st.builds(lambda p: {"name": "heavy_tail", "mean_s": 0.05, "tail_probability": p}, st.sampled_from([0.05, 0.5])),
)
networks = st.fixed_dictionaries(
    {
        "latency_s": st.sampled_from([0.0, 2e-6, 0.05]),
        "overhead_s": st.sampled_from([0.0, 1e-6, 0.01]),
        "bandwidth": st.sampled_from([1e4, 1e7, 1e12]),
        "node_bandwidth": st.sampled_from([2e4, 1e7, 1e12]),
        "local_bandwidth": st.sampled_from([1e4, 1e12]),
        "core_bandwidth": st.sampled_from([0.0, 0.0, 1e4]),
        "turn_nbytes": st.sampled_from([0, 0, 0, 1000]),
    }
)
services = st.fixed_dictionaries(
    {
        "gradient_s": st.sampled_from([0.0, 0.0, 0.02]),
        "update_s": st.sampled_from([0.0, 0.0, 0.1]),
        "update_s_per_byte": st.sampled_from([0.0, 1e-5]),
    }
)


def stragglers(learner: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "slowdown": st.dictionaries(learner, st.sampled_from([1.5, 8.0, 50.0]), max_size=2),
            "delay": st.sampled_from(["none", "none", "exponential"]),
            "delay_mean_s": st.just(0.05),
            "pause_learner": st.one_of(st.just(-1), learner.map(int)),
            "pause_every": st.just(7),
            "pause_s": st.sampled_from([0.01, 2.0]),
        }
    )


def failures(learner: st.SearchStrategy[str], compute_s: float) -> st.SearchStrategy[dict[str, Any]]:
    """Some leave early, after so many mini-batches or so, and in some jobs all do in the end."""
    return st.fixed_dictionaries(
        {
            "at_s": st.dictionaries(learner, st.sampled_from([0.0, 1.5, 3.1, 7.7]).map(lambda many: many * compute_s), min_size=1),
            "notice_s": st.sampled_from([0.0, 0.05, 3.0]),
            "mean_s": st.sampled_from([0.0, 0.0, 20 * compute_s]),
        }
    )


jitters = st.sampled_from([0.0, 1e-6, 0.02, 0.2])

COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


def drawn_jobs(max_examples: int, most_learners: int = 8, step: int = 1, first: int = 0) -> Callable[[Check], Any]:
    """So many drawn jobs of each protocol (or, in `make test`, of each `step`-th from `first`), each in a directory of its own."""
    names = sorted(PROTOCOLS)

    def over_protocols(check: Check) -> Any:
        @pytest.mark.parametrize("protocol", spread([*names[first:], *names[:first]], step))
        def test(protocol: str) -> None:
            @settings(COMMON, max_examples=examples(max_examples))
            @given(jobs(protocol, most_learners), jitters)
            def one(changes: dict[str, Any], jitter_s: float) -> None:
                with tempfile.TemporaryDirectory() as directory:
                    check(Path(directory), changes, jitter_s)

            one()

        return test

    return over_protocols


@pytest.mark.deeper
@drawn_jobs(max_examples=50, step=2, first=2)
def test_any_virtual_job_obeys(directory: Path, changes: dict[str, Any], jitter_s: float) -> None:
    obeys(directory / "run", SIZES, changes, jitter_s)


@drawn_jobs(max_examples=5, most_learners=4, step=4, first=3)
def test_so_does_one_with_gradients(directory: Path, changes: dict[str, Any], jitter_s: float) -> None:
    run = obeys(directory / "run", TENSORS, {**changes, "alpha0": 0.001}, jitter_s).run
    assert np.isfinite(run.pushes["loss"]).all()
    assert np.isfinite(run.updates["mean_loss"][run.updates["gradients"] > 0]).all()
    assert len(run.evaluations)


@pytest.mark.slow
@drawn_jobs(max_examples=5, most_learners=4, step=3)
def test_so_does_one_that_sends_weights_while_they_are_made(directory: Path, changes: dict[str, Any], jitter_s: float) -> None:
    """In chunks of sixteen weights; replay, which makes them at once, comes to the same bits."""
    with mock.patch.object(chunks, "CHUNK_NBYTES", 64):
        obeys(directory / "run", TENSORS, {**changes, "alpha0": 0.001}, jitter_s)


@pytest.mark.slow
@pytest.mark.rare
@drawn_jobs(max_examples=5)
def test_it_is_the_same_again(directory: Path, changes: dict[str, Any], jitter_s: float) -> None:
    runs = [simulated(directory / name, SIZES, **changes) for name in ("first", "again")]
    assert tables(runs[0]) == tables(runs[1])


# ------------------------------------------------------------------------------------------- law 2: shards decide alone

DIFFERING = {"virtual": {"learners": 5}, "shards": 3, "compute": {"name": "lognormal", "sigma": 0.5}}


@pytest.mark.parametrize("seed", spread(range(3), 3))
def test_shards_that_drop_different_learners_still_end_together(seed: int, tmp_path: Path) -> None:
    """No shard waits for another; the learners see to it that they compute on one clock."""
    laws = obeys(tmp_path / "run", SIZES, {**DIFFERING, "protocol": {"name": "backup", "N": 3}, "seed": seed}, jitter_s=0.05)
    dropped = [set(rows[rows["verdict"] == Verdict.DROP][["learner_id", "seq"]].tolist()) for rows in laws.pushes]
    assert dropped[0] != dropped[1] != dropped[2] != dropped[0]
    assert len(set(laws.clocks)) == 1
    orders = [rows[["learner_id", "seq"]].tolist() for rows in laws.pushes]
    assert orders[0] != orders[1]


def test_without_a_promise_a_learner_computes_on_slices_of_different_clocks(tmp_path: Path) -> None:
    changes = {**DIFFERING, "protocol": {"name": "softsync", "n": 5}}
    laws = obeys(tmp_path / "run", SIZES, changes, jitter_s=0.05)
    stamps = [laws.of_mini_batches(shard) for shard in range(3)]
    differing = sum(len({stamps[shard][mini_batch][0] for shard in range(3)}) > 1 for mini_batch in stamps[0])
    assert differing > 0.2 * len(stamps[0])
