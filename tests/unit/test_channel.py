"""Push, pull and stop over a wire of lists: what arrives is what was sent, and what cannot be is refused (DESIGN 4, 5)."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpisgd
from mpisgd import messages
from mpisgd.channel import Answers, EvaluatorChannel, LearnerChannel, ShardChannel
from mpisgd.errors import PeerError
from mpisgd.flat import slice_bounds
from mpisgd.messages import FINAL, MAGIC, NOTHING_MORE, Goodbye, Header, Pull, Push, SnapshotPull, Tag
from tests.unit import fakes
from tests.unit.fakes import FakeWire, Network, Stuck

WIRE = Path(mpisgd.__file__).parent / "wire.py"
SIZE = 6
FIRST = Answers(clocks=(0,), stop=False, wait_ns=0, pull_ns=0)


class Job:
    """Shards, learners and an evaluator over one network; nothing runs by itself."""

    def __init__(self, shards: int = 1, learners: int = 2, *, evaluator: bool = False, consistent: bool = False) -> None:
        self.network = Network()
        self.roles = fakes.roles(shards, learners, evaluator)
        self.bounds = slice_bounds(SIZE, shards)
        wire = [FakeWire(self.network, rank) for rank in range(shards + learners + evaluator)]
        self.shards = [ShardChannel(wire[shard], self.roles, shard) for shard in range(shards)]  # type: ignore[arg-type]
        self.scratch = [np.zeros(end - start, np.float32) for start, end in self.bounds]
        self.weights = [np.zeros(SIZE, np.float32) for _ in range(learners)]
        self.gradients = [np.zeros(SIZE, np.float32) for _ in range(learners)]
        self.learners = [
            LearnerChannel(
                wire[rank],  # type: ignore[arg-type]
                self.roles,
                learner_id,
                weights=self.weights[learner_id],
                gradients=self.gradients[learner_id],
                bounds=self.bounds,
                consistent=consistent,
            )
            for learner_id, rank in enumerate(self.roles.learner_ranks)
        ]
        self.evaluator_wire = wire[self.roles.evaluator_rank]

    def receive(self, shard: int = 0, learner_id: int | None = None) -> messages.Message:
        return self.shards[shard].receive(self.scratch[shard], learner_id)

    def raw(self, source: int, tag: int, payload: bytes | np.ndarray, dest: int = 0) -> None:
        """Anything at all from `source` to `dest`."""
        self.network.deliver(source, dest, tag, payload if isinstance(payload, bytes) else payload.tobytes())

    def shards_answer(self, clocks: list[list[int]]) -> None:
        """While a learner waits, each shard takes one pull and gives the next of its clocks; -1 = stop."""

        def idle() -> bool:
            for shard, channel in enumerate(self.shards):
                if not self.network.inbox.get(shard):
                    continue
                message = self.receive(shard)
                assert isinstance(message, Pull)
                self.asked.append((shard, message.learner_id, message.min_clock))
                clock = clocks[shard].pop(0)
                if clock < 0:
                    channel.stop(message.learner_id, 99)
                else:
                    weights = np.full(len(self.scratch[shard]), 10 * shard + clock, np.float32)
                    channel.start_answers([message.learner_id], weights, clock, {})
                    channel.finish_answers()
                return True
            return False

        self.asked: list[tuple[int, int, int]] = []
        self.network.idle = idle


def header_of(fields: Callable[[], Header], *values: float) -> np.ndarray:
    return fields().fill(*values)


def a_push(learner_id: int = 0, nbytes: int = 4 * SIZE, **changes: int) -> np.ndarray:
    names = ("learner_id", "timestamp", "seq", "samples", "compute", "delay", "push", "wait", "pull", "nbytes")
    values = {**dict.fromkeys(names, 0), "learner_id": learner_id, "nbytes": nbytes, **changes}
    return header_of(messages.push_header, *values.values(), 0.5)


# ------------------------------------------------------------------------------------------------------------- push


def test_a_push_arrives_as_it_was_sent() -> None:
    job = Job(shards=2, learners=3)
    job.shards_answer([[7], [9]])
    answers = job.learners[2].pull(min_clock=5)
    assert (answers.clocks, answers.stop) == ((7, 9), False)
    assert answers.wait_ns > 0
    assert answers.pull_ns > 0
    assert job.asked == [(0, 2, 5), (1, 2, 5)]
    assert job.weights[2].tolist() == [7, 7, 7, 19, 19, 19]
    job.gradients[2][:] = range(SIZE)
    took_ns = job.learners[2].push(
        seq=11, samples=16, loss=0.125, compute_ns=3_000_000, delay_ns=4_000_000, last=Answers((7, 9), False, 5000, 6000), push_ns=7
    )
    assert took_ns > 0
    for shard, timestamp in enumerate((7, 9)):
        push = job.receive(shard)
        assert isinstance(push, Push)
        assert push[:4] == (2, timestamp, 11, 16)
        assert push[4:9] == pytest.approx((0.003, 0.004, 7e-9, 5e-6, 6e-6))
        assert (push.loss, push.arrival_s > 0) == (0.125, True)
        assert job.scratch[shard].tolist() == [3 * shard, 3 * shard + 1, 3 * shard + 2]
    assert job.learners[2].pushed == [1, 1]
    job.learners[2].goodbye(finished=True)
    assert [job.receive(shard) for shard in range(2)] == [Goodbye(2, 1, True)] * 2


def test_pushes_to_all_shards_go_out_before_a_pull() -> None:
    """Law 1: a learner that pulled in between could be blocked on a shard that is blocked on another."""
    job = Job(shards=3, learners=1)
    job.shards_answer([[0], [0], [0]])
    job.learners[0].push(seq=0, samples=1, loss=0.0, compute_ns=0, delay_ns=0, last=FIRST, push_ns=0)
    for shard in range(3):
        job.receive(shard)
    job.learners[0].pull(0)
    tags = [tag for source, _, tag in job.network.sent if source == 3]
    assert tags == [Tag.PUSH] * 3 + [Tag.GRADIENT] * 3 + [Tag.PULL] * 3


def test_pulls_go_first_so_a_push_must_be_taken_before_its_learner_pulls() -> None:
    """Else a pull overtakes its own push in MPI's eager buffers, is answered with old weights, and pushes starve."""
    job = Job(learners=2)
    job.learners[0].push(seq=0, samples=1, loss=0.0, compute_ns=0, delay_ns=0, last=FIRST, push_ns=0)
    job.raw(2, Tag.PULL, header_of(messages.pull_header, 1, 0))
    assert [type(job.receive()) for _ in range(2)] == [Pull, Push]
    job.learners[0].goodbye(finished=True)
    assert job.network.announced == [Tag.PUSH, Tag.GOODBYE]


def test_a_shard_may_choose_whose_push_is_next_but_takes_pulls_of_all() -> None:
    """What hardsync rests on: learner 1 must get its weights while the shard waits for learner 0 to compute."""
    job = Job(learners=3, evaluator=True)
    job.raw(2, Tag.PUSH, a_push(1))
    job.raw(2, Tag.GRADIENT, job.gradients[1])
    with pytest.raises(Stuck):
        job.receive(learner_id=0)
    job.raw(3, Tag.PULL, header_of(messages.pull_header, 2, 4))
    assert job.receive(learner_id=0) == Pull(2, 4)
    job.raw(4, Tag.SNAPSHOT_PULL, header_of(messages.snapshot_pull_header, 3))
    assert job.receive(learner_id=0) == SnapshotPull(3)
    job.raw(1, Tag.PUSH, a_push(0))
    job.raw(1, Tag.GRADIENT, job.gradients[0])
    assert job.receive(learner_id=0).learner_id == 0
    assert job.receive(learner_id=1).learner_id == 1


# ------------------------------------------------------------------------------------------------------------- pull


def test_a_shard_that_lags_is_asked_again_where_one_clock_is_promised() -> None:
    job = Job(shards=3, learners=1, consistent=True)
    job.shards_answer([[4, 6], [5, 6], [6]])
    answers = job.learners[0].pull(min_clock=4)
    assert answers.clocks == (6, 6, 6)
    assert job.asked == [(0, 0, 4), (1, 0, 4), (2, 0, 4), (0, 0, 6), (1, 0, 6)]
    assert job.weights[0].tolist() == [6, 6, 16, 16, 26, 26]


def test_a_shard_that_overtakes_while_another_is_asked_again_is_caught_up_with() -> None:
    job = Job(shards=2, learners=1, consistent=True)
    job.shards_answer([[4, 6], [5, 6]])
    assert job.learners[0].pull(min_clock=4).clocks == (6, 6)
    assert job.asked == [(0, 0, 4), (1, 0, 4), (0, 0, 5), (1, 0, 6)]


def test_shards_may_differ_where_no_clock_is_promised() -> None:
    job = Job(shards=2, learners=1)
    job.shards_answer([[4], [9]])
    assert job.learners[0].pull(min_clock=0).clocks == (4, 9)
    assert len(job.asked) == 2


@pytest.mark.parametrize(("clocks", "asked"), [([[-1], [5]], 2), ([[5], [-1]], 2), ([[4, -1], [5]], 3)])
def test_one_shards_stop_ends_the_pull(clocks: list[list[int]], asked: int) -> None:
    """Whichever says it, and when asked again; all posted receives are over then, so that nothing is left in MPI."""
    job = Job(shards=2, learners=1, consistent=True)
    job.shards_answer(clocks)
    assert job.learners[0].pull(min_clock=0).stop
    assert len(job.asked) == asked
    assert all(request.done for request in job.network.posted[2])


def test_one_answer_goes_to_many_and_is_sent_before_the_weights_change() -> None:
    job = Job(learners=2)
    for rank in (1, 2):
        for array, tag in ((messages.answer_header().wire, Tag.ANSWER), (job.weights[rank - 1], Tag.WEIGHTS)):
            FakeWire(job.network, rank).post_receive(array, 0, tag)
    weights = np.arange(SIZE, dtype=np.float32)
    job.shards[0].start_answers([0, 1], weights, 3, {})
    job.shards[0].finish_answers()
    weights[:] = -1
    assert [own.tolist() for own in job.weights] == [list(range(SIZE))] * 2


@pytest.mark.parametrize(
    ("shard", "clock", "stop", "nbytes", "weights"),
    [
        (1, 5, 0, 4 * SIZE, SIZE),  # another shard
        (0, 4, 0, 4 * SIZE, SIZE),  # older than was asked for
        (0, 5, 0, 4 * SIZE - 4, SIZE - 1),  # short
        (0, 5, 0, 0, 0),
        (0, 5, 1, 4 * SIZE, SIZE),  # stop, and yet weights
    ],
)
def test_an_answer_that_cannot_be(shard: int, clock: int, stop: int, nbytes: int, weights: int) -> None:
    job = Job(learners=1)

    def idle() -> bool:
        job.raw(0, Tag.ANSWER, header_of(messages.answer_header, shard, clock, stop, 0, nbytes), dest=1)
        job.raw(0, Tag.WEIGHTS, np.ones(weights, np.float32), dest=1)
        return True

    job.network.idle = idle
    with pytest.raises(PeerError, match=r"answer of rank 0: shard .* expected shard 0, \d+ bytes, clock >= 5"):
        job.learners[0].pull(min_clock=5)


# ------------------------------------------------------------------------------------------------------------ evaluator


@pytest.mark.parametrize("averaged", [False, True])
def test_a_snapshot_comes_slice_by_slice(averaged: bool) -> None:
    job = Job(shards=2, learners=1, evaluator=True)
    theta, thetabar = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    channel = EvaluatorChannel(
        job.evaluator_wire,  # type: ignore[arg-type]
        job.roles,
        weights=theta,
        averaged=thetabar if averaged else None,
        bounds=job.bounds,
    )
    there, asked = [True, True], []

    def idle() -> bool:
        for shard in range(2):
            if job.network.inbox.get(shard):
                asked.append((shard, job.receive(shard)))
                size = 3 if there[shard] else 0
                vectors = [np.full(size, 1 + shard + 10 * kind, np.float32) for kind in range(1 + averaged)]
                job.shards[shard].answer_snapshot(vectors, 40 + shard, 100 + shard, 2.5 + shard)
                return True
        return False

    job.network.idle = idle
    snapshot = channel.pull(FINAL)
    assert snapshot == (FINAL, (40, 41), 100, 2.5)
    assert theta.tolist() == [1, 1, 1, 2, 2, 2]
    assert thetabar.tolist() == ([11, 11, 11, 12, 12, 12] if averaged else [0] * 6)
    assert asked == [(0, SnapshotPull(FINAL)), (1, SnapshotPull(FINAL))]
    there[1] = False
    assert channel.pull(4) is None
    assert all(request.done for request in job.network.posted[3])
    channel.goodbye()
    assert [job.receive(shard) for shard in range(2)] == [SnapshotPull(NOTHING_MORE)] * 2


@pytest.mark.parametrize(("shard", "there", "nbytes"), [(1, 1, 24), (0, 1, 20), (0, 0, 24), (0, 1, 0)])
def test_a_snapshot_that_cannot_be(shard: int, there: int, nbytes: int) -> None:
    job = Job(learners=1, evaluator=True)
    theta = np.zeros(SIZE, np.float32)
    channel = EvaluatorChannel(job.evaluator_wire, job.roles, weights=theta, averaged=None, bounds=job.bounds)  # type: ignore[arg-type]

    def idle() -> bool:
        job.raw(0, Tag.SNAPSHOT_ANSWER, header_of(messages.snapshot_answer_header, shard, there, 1, 1, 1, nbytes), dest=2)
        return True

    job.network.idle = idle
    with pytest.raises(PeerError, match="snapshot 0 of rank 0: shard"):
        channel.pull(0)


# --------------------------------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("source", "tag", "payload", "message"),
    [
        (1, Tag.PUSH, b"\0" * 8, "8 bytes, expected 96"),
        (1, Tag.PUSH, a_push(0).tobytes() + b"\0" * 8, "104 bytes, expected 96"),
        (1, Tag.PULL, b"", "0 bytes, expected 24"),
        (1, Tag.PUSH, b"\0" * 96, f"rank 1 sent magic 0x0: expected {MAGIC:#x}; another program or version"),
        (1, Tag.PULL, b"\xff" * 24, "rank 1 sent magic -0x1"),
        (1, Tag.GRADIENT, b"\0" * 24, "rank 1 sent tag 2: expected one of PUSH, PULL, GOODBYE, SNAPSHOT_PULL"),
        (1, Tag.ANSWER, b"\0" * 24, "rank 1 sent tag 4: expected one of"),
        (1, 77, b"\0" * 24, "rank 1 sent tag 77: expected one of"),
        (1, Tag.PUSH, a_push(1).tobytes(), "rank 1 says it is learner 1: it is not"),
        (1, Tag.PUSH, a_push(-1).tobytes(), "rank 1 says it is learner -1"),
        (2, Tag.PULL, header_of(messages.pull_header, 0, 0).tobytes(), "rank 2 says it is learner 0"),
        (3, Tag.PUSH, a_push(0).tobytes(), "rank 3 says it is learner 0"),
        (0, Tag.GOODBYE, header_of(messages.goodbye_header, 0, 0, 1).tobytes(), "rank 0 says it is learner 0"),
        (1, Tag.SNAPSHOT_PULL, header_of(messages.snapshot_pull_header, 0).tobytes(), "rank 1 pulled a snapshot: only rank 3"),
        (1, Tag.PUSH, a_push(0, nbytes=20).tobytes(), "push of rank 1: a slice of 20 bytes, expected 24"),
        (1, Tag.PUSH, a_push(0, nbytes=-24).tobytes(), "a slice of -24 bytes, expected 24"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_applied(source: int, tag: int, payload: bytes, message: str) -> None:
    job = Job(learners=2, evaluator=True)
    job.scratch[0][:] = 5
    job.network.inbox[0] = [fakes.Envelope(source, tag, len(payload), payload)]
    with pytest.raises(PeerError, match=message):
        job.receive()
    assert (job.scratch[0] == 5).all()


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_slice_of_another_size_than_its_header_says_is_not_received(size: int) -> None:
    """A longer one would overwrite memory, a shorter one would pass (TRAPS 9)."""
    job = Job()
    job.scratch[0][:] = 5
    job.raw(1, Tag.PUSH, a_push(0))
    job.raw(1, Tag.GRADIENT, np.ones(size, np.float32))
    with pytest.raises(PeerError, match=f"{4 * size} bytes, expected 24"):
        job.receive()
    assert (job.scratch[0] == 5).all()


VALID = {
    Tag.PUSH: a_push(0),
    Tag.PULL: header_of(messages.pull_header, 0, 3),
    Tag.GOODBYE: header_of(messages.goodbye_header, 0, 3, 1),
    Tag.SNAPSHOT_PULL: header_of(messages.snapshot_pull_header, 3),
}


def refused(job: Job, source: int, tag: int, payload: bytes) -> bool:
    job.network.inbox[0] = [fakes.Envelope(source, tag, len(payload), payload)]
    try:
        job.receive()
    except PeerError:
        return True
    except Stuck:  # taken for a push: it waits for the gradient
        return False
    return False


def test_ten_thousand_malformed_headers_never_pass() -> None:
    """Random bytes of the right size, and valid headers with one bit of magic, name or size turned."""
    random, job = np.random.default_rng(0), Job(learners=2, evaluator=True)
    checked = {Tag.PUSH: [*range(16), *range(80, 88)], Tag.SNAPSHOT_PULL: range(8)}
    for count in range(10_000):
        tag = list(VALID)[count % 4]
        source = 3 if tag is Tag.SNAPSHOT_PULL else 1
        header = VALID[tag].copy()
        if count % 8 < 4:
            header[:] = np.frombuffer(random.bytes(len(header)), np.uint8)
        else:
            places = checked.get(tag, range(16))
            header[random.choice(list(places))] ^= 1 << random.integers(8)
        assert refused(job, source, tag, header.tobytes()), (tag, header.tobytes())


@settings(max_examples=300, deadline=None)
@given(source=st.integers(0, 4), tag=st.integers(0, 12), payload=st.binary(max_size=120))
def test_no_bytes_from_anybody_pass(source: int, tag: int, payload: bytes) -> None:
    assert refused(Job(learners=2, evaluator=True), source, tag, payload)


def test_valid_headers_do_pass() -> None:
    """So that the refusals above are for what they say."""
    job = Job(learners=2, evaluator=True)
    for tag, header in VALID.items():
        assert not refused(job, 3 if tag is Tag.SNAPSHOT_PULL else 1, tag, header.tobytes())


# -------------------------------------------------------------------------------------------------- the wire, and the fakes


class Comm:
    """Writes down which of MPI's sends were used."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: self.used.append(name) or 0


@pytest.mark.parametrize("polite", [False, True])
def test_an_announcement_is_synchronous_however_a_rank_waits(polite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen twice with eager ones: pulls overtook their own pushes and starved them, staleness 72 with 3 learners."""
    stub = types.ModuleType("mpisgd.mpi")
    stub.MPI = types.SimpleNamespace(Status=object, ANY_SOURCE=-1, ANY_TAG=-1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpisgd.mpi", stub)
    for name in ("MPISGD_WAIT", "MPISGD_SSEND", "MPISGD_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    comm, spec = Comm(), importlib.util.spec_from_file_location("wire_without_mpi", WIRE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wire = module.Wire(comm, polite=polite, tags=Tag)
    comm.used.clear()
    wire.announce(np.zeros(3), 0, Tag.PUSH)
    wire.start_send(np.zeros(3), 0, Tag.GRADIENT)
    wire.send(np.zeros(3), 0, Tag.PULL)
    assert comm.used == ["Issend", "Isend", "Send"]


def test_the_fake_wire_has_the_methods_of_the_real_one() -> None:
    """Read from its source: importing it would start MPI."""
    wire = next(node for node in ast.walk(ast.parse(WIRE.read_text())) if isinstance(node, ast.ClassDef) and node.name == "Wire")
    real = {node.name: [arg.arg for arg in node.args.args] for node in wire.body if isinstance(node, ast.FunctionDef)}
    ours: dict[str, Any] = {name: value for name, value in vars(FakeWire).items() if not name.startswith("_")}
    for name, function in ours.items():
        assert name in real
        assert [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_POSITIONAL] == real[name]
