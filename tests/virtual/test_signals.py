"""A signal at a random moment of random virtual jobs: all shards come to one clock and save it, or the run ends by itself."""

from __future__ import annotations

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
from mpisgd.comm.virtual.wire import Signal
from mpisgd.config import Config
from mpisgd.exchange.roles import Roles
from mpisgd.job.finish import Outcome
from mpisgd.job.parts import NO_OBJECTS
from mpisgd.job.roles import RankRole, ShardRole, build
from mpisgd.records.checkpoint.checkpoints import Checkpoints
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from mpisgd.shard import Shard
from mpisgd.simulate import job
from mpisgd.vectors import body, chunks
from tests.effort import examples, spread
from tests.virtual import jobs as small
from tests.virtual.test_laws import JitteryWire
from tests.virtual.test_laws import jobs as any_job

SIGUSR1 = 10


class Noted(Checkpoints):
    """Checkpoints that are noted, not written."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    def due(self, clock: int) -> bool:
        return False

    lasts = due

    def busy(self) -> bool:
        return False

    def wait(self) -> None:
        """They are written."""

    def lost(self) -> list[int]:
        return []

    def take(self, **account: Any) -> None:
        self.taken.append(account)


class SignalledWire(JitteryWire):
    """Is sent a signal when its time has come."""

    when_ns: Mapping[int, int] = {}
    roles: Roles

    def begin(self, meet: Callable[[], None], already_s: float = 0.0) -> None:
        super().begin(meet, already_s)
        if self.rank in self.when_ns:
            takes = self.rank in self.roles.shard_ranks
            self.cluster.at(self.now + self.when_ns[self.rank], self, Signal(self, SIGUSR1, takes))


class Signalled(job.Job):
    """A job whose shards note their checkpoints."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, NO_OBJECTS)
        self.servers: list[Shard] = []

    def build(self, *arguments: Any) -> RankRole:
        built = build(*arguments)
        if isinstance(built, ShardRole):
            built.server.records.checkpoints = Noted()
            self.servers.append(built.server)
        return built


def signalled(
    out: Path, base: Mapping[str, Any], changes: Mapping[str, Any], jitter_s: float, when_s: Mapping[int, float]
) -> Signalled:
    """A job whose ranks are sent signals at these seconds. It comes to an end, on wires that watch law 1."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "VirtualWire", SignalledWire)
        patched.setattr(job, "check_books", _books_unless_interrupted)
        patched.setattr(job, "finish", _unless_interrupted)
        patched.setattr(JitteryWire, "mean_ns", 1e9 * jitter_s)
        patched.setattr(chunks, "CHUNK_NBYTES", 400)
        patched.setattr(SignalledWire, "when_ns", {rank: round(1e9 * each) for rank, each in when_s.items()})
        done = Signalled(small.config(out, base, **changes))
        patched.setattr(SignalledWire, "roles", done.roles, raising=False)
        patched.setattr(job, "build", done.build)
        done.run()
    return done


_check_books, _finish = job.check_books, job.finish


def _books_unless_interrupted(log: Run, shard: int, clock: int) -> None:
    if (log.events["kind"] == Event.STOPPED).any():
        _check_books(log, shard, clock)


def _unless_interrupted(outcome: Outcome, log: Run) -> Outcome:
    return _finish(outcome, log) if (log.events["kind"] == Event.STOPPED).any() else outcome


def hold(done: Signalled) -> bool:
    """What must be true of such a job; whether it was interrupted."""
    shards = done.servers
    assert len({shard.rules.clock for shard in shards}) == 1
    assert len({shard.rules.finished for shard in shards}) == 1
    assert all(shard.received == shards[0].received for shard in shards)
    run = Run(done.path)
    told = run.events["kind"] == Event.INTERRUPTED
    assert Event.DEPARTED not in run.events["kind"] or done.setup.protocol.exact, "nobody's goodbye lowers what an update needs"
    for number, shard in enumerate(shards):
        noted = shard.records.checkpoints
        assert isinstance(noted, Noted)
        assert np.count_nonzero(told & (run.events["shard"] == number)) == shard.rules.interrupted
        if shard.rules.finished:
            assert noted.taken == []
            continue
        (saved,) = noted.taken
        rows = run.pushes[run.pushes["shard"] == number]
        assert saved["clock"] == shard.rules.clock
        assert saved["rows"][1] == shard.rules.clock, "an update for each clock"
        assert saved["received"] == saved["rows"][0] <= len(rows) <= sum(shard.received)
        assert (rows["clock"][saved["rows"][0] :] == shard.rules.clock).all(), "what came after it is in a sum that is not finished"
    with mock.patch("mpisgd.replay.prove.simulate_again"):  # neither signals nor such wires are in its configuration
        assert replay.check(done.path) == "", "law 6"
    return not shards[0].rules.finished


PROTOCOLS = ("hardsync", "softsync", "backup", "allreduce", "versioned", "async", "downpour", "ssp")


@st.composite
def scenes(draw: st.DrawFn, name: str) -> tuple[dict[str, Any], float, dict[int, float]]:
    """A job, jitter, and the second at which each of some ranks is sent a signal."""
    drawn = draw(any_job(name))
    drawn["failures"] = {}
    learners = drawn["virtual"]["learners"]
    if name == "async":  # else shards drop (or reject) different gradients, and come to different clocks
        drawn["protocol"].pop("most_staleness", None)
    if name == "versioned":
        drawn["protocol"]["tolerance"] = 0
    shards = 0 if name == "allreduce" else drawn["shards"]
    ranks = shards + learners + drawn["evaluator"]
    when_s = draw(st.sampled_from([0.0, 1e-6, 0.05, 0.3, 1.0, 3.0]))
    apart_s = draw(st.sampled_from([0.0, 0.1]))
    who = draw(st.one_of(st.just(list(range(ranks))), st.lists(st.integers(0, ranks - 1), min_size=1, max_size=1)))
    return drawn, draw(st.sampled_from([0.0, 1e-6, 0.02])), {rank: when_s + apart_s * draw(st.floats(0, 1)) for rank in who}


@pytest.mark.parametrize("name", spread(PROTOCOLS, 3))
def test_a_signal_at_any_time_to_any_ranks(name: str) -> None:
    ends: list[bool] = []

    @settings(
        max_examples=examples(15), derandomize=True, deadline=None, phases=[Phase.generate, Phase.shrink], database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(scenes(name))
    def of(scene: tuple[dict[str, Any], float, dict[int, float]]) -> None:
        changes, jitter_s, when_s = scene
        with tempfile.TemporaryDirectory() as directory:
            ends.append(hold(signalled(Path(directory) / "run", small.SIZES, changes, jitter_s, when_s)))

    of()
    assert any(ends), "some were interrupted"


@pytest.mark.parametrize("rank", [0, 2], ids=["shard", "learner"])
@pytest.mark.parametrize("at_s", [0.03, 0.08, 0.15, 0.23, 0.34, 0.41])
def test_neither_a_shard_that_stops_learners_nor_a_signalled_learner_holds_up_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_s: float, rank: int
) -> None:
    """Learners send a few chunks of all slices at a time: they wait for the other shard, which waits for learners not yet heard. A
    shard that waits for the chunks of a begun push hears nothing else."""
    monkeypatch.setattr(body, "_WINDOW_NBYTES", 0)
    changes = {
        "protocol": "hardsync",
        "way": "streamed",
        "shards": 2,
        "virtual": {"learners": 3, "parameters": 10_000, "train_samples": 60},
        "network": {"bandwidth": 1e6, "node_bandwidth": 1e6},
        "compute": {"name": "lognormal", "mean_s": 0.02},
    }
    hold(signalled(tmp_path / "run", small.SIZES, changes, 0.0, {rank: at_s}))
