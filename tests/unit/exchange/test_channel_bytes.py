"""Bytes over the real wire: valid messages pass whole, all others are refused, and nothing of them is applied.

The messages lie before it in memory (DESIGN 4, 5).
"""

from __future__ import annotations

import inspect
import math
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.base.errors import PeerError
from mpisgd.comm.communicator import Communicator
from mpisgd.comm.messages import (
    MAGIC,
    NOBODY,
    Ending,
    Goodbye,
    Interrupt,
    Pull,
    Push,
    Refused,
    SnapshotPull,
    Tag,
)
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.vectors.body import Pool
from tests.unit.channels import SIZE, SLICE, ZERO, Door, a_push, header, real, told
from tests.unit.fakes import Comm, Envelope, Stuck


@pytest.mark.parametrize("polite", [False, True])
def test_valid_messages_pass_whole(polite: bool) -> None:
    """So that the refusals below are for what they say; and pulls go first."""
    door = Door(polite)
    door.comes(1, Tag.PUSH, header(Tag.PUSH, 0, 3, 11, 16, 1, 1, 2, 3, 4, 5, 6, SLICE, 7, 0, 0.25, 8.0, 0.125))
    door.comes(1, Tag.GRADIENT, np.arange(SIZE, dtype=np.float32))
    door.comes(1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 3, 1))
    door.comes(3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 3, 0))
    door.comes(2, Tag.PULL, header(Tag.PULL, 1, 7))
    assert told(door.receive()) == (Pull, 1, 7)
    assert told(door.receive()) == (Push, 0, 3, 11, 16, 1, 1, 2, 3, 4, 5, 6, SLICE, 7, 0, 0.25, 8.0, 0.125)
    assert door.scratch.tolist() == list(range(SIZE))
    assert [door.receive(), door.receive()] == [Goodbye(0, 3, Ending.FINISHED), SnapshotPull(3)]
    with pytest.raises(Stuck):
        door.receive()


@pytest.mark.parametrize("polite", [False, True])
@pytest.mark.parametrize("learner_id", [None, 1])
@pytest.mark.parametrize("until_s", [math.inf, 1e9])
def test_a_shard_hears_of_a_signal_once_however_busy_it_is(polite: bool, learner_id: int | None, until_s: float) -> None:
    door = Door(polite)
    door.comes(2, Tag.GOODBYE, header(Tag.GOODBYE, 1, 0, Ending.INTERRUPTED))
    door.wire.signal = 10
    received = [door.shard.receive(Pool(door.scratch), learner_id, until_s) for _ in range(2)]
    assert received == [Interrupt(10), Goodbye(1, 0, Ending.INTERRUPTED)]
    with pytest.raises(Stuck):
        door.receive()


@pytest.mark.parametrize("polite", [False, True])
def test_a_signal_ends_a_shards_waiting(polite: bool) -> None:
    door = Door(polite)
    probe = door.comm.Improbe
    asked = 0

    def improbe(source: int, tag: int, status: Any) -> Envelope | None:
        nonlocal asked
        asked += 1
        if asked == 50:
            door.wire.signal = 12
        return probe(source, tag, status) if door.comm.inbox else None

    door.comm.Improbe = improbe  # type: ignore[method-assign]
    assert door.receive() == Interrupt(12)


def test_a_signal_that_another_rank_tells_of_is_taken_from_anybody() -> None:
    door = Door()
    for source in (2, 3):
        door.comes(source, Tag.INTERRUPT, header(Tag.INTERRUPT, 15))
    assert [door.receive(learner_id=0), door.receive()] == [Interrupt(15), Interrupt(15)]


def test_a_shard_that_waits_for_one_learner_sees_pulls_of_all() -> None:
    door = Door()
    door.comes(2, Tag.PUSH, a_push(1))
    door.comes(3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 3, 0))
    door.comes(2, Tag.PULL, header(Tag.PULL, 1, 4))
    door.comes(1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 0, 1))
    assert [told(door.receive(0)) for _ in range(3)] == [(Goodbye, 0, 0, True), (Pull, 1, 4), (SnapshotPull, 3, 0)]
    assert [envelope.tag for envelope in door.comm.inbox] == [Tag.PUSH]


@pytest.mark.parametrize(
    ("source", "tag", "payload", "message"),
    [
        (1, Tag.PUSH, b"\0" * 8, "PUSH from rank 1: 8 bytes, expected 144"),
        (1, Tag.PUSH, a_push(0) + b"\0" * 8, "PUSH from rank 1: 152 bytes, expected 144"),
        (1, Tag.PULL, b"", "PULL from rank 1: 0 bytes, expected 24"),
        (1, Tag.PUSH, b"\0" * 144, f"rank 1 sent magic 0x0: expected {MAGIC:#x}; another program or version"),
        (1, Tag.PULL, b"\xff" * 24, "rank 1 sent magic -0x1"),
        (
            1,
            Tag.GRADIENT,
            b"\0" * 24,
            "rank 1 sent GRADIENT, 24 bytes: expected one of PUSH, PULL, ANSWER, PART, COMPUTED, GOODBYE, NOTICE, GAVE_UP",
        ),
        (1, Tag.WEIGHTS, b"\0" * 24, "rank 1 sent WEIGHTS, 24 bytes: expected one of"),
        (1, 77, b"\0" * 24, "rank 1 sent tag 77, 24 bytes: expected one of"),
        (1, Tag.LOST, b"\0" * 24, "rank 1 sent LOST, 24 bytes: expected one of"),
        (1, Tag.STUCK, b"\0" * 24, "rank 1 sent STUCK, 24 bytes: expected one of"),
        (1, Tag.GAVE_UP, header(Tag.GAVE_UP, NOBODY, 0), "rank 1 poses as learner -2"),
        (3, Tag.PUSH, a_push(-1), "rank 3 poses as learner -1"),
        (1, Tag.INTERRUPT, header(Tag.INTERRUPT, 9), "rank 1 tells of signal 9: expected one of SIGTERM, SIGUSR1, SIGUSR2"),
        (
            1,
            Tag.ANSWER,
            header(Tag.ANSWER, *ZERO),
            "rank 1 sent ANSWER to a shard: expected PUSH, PULL, GOODBYE, GAVE_UP, INTERRUPT or SNAPSHOT_PULL",
        ),
        (1, Tag.SNAPSHOT_ANSWER, header(Tag.SNAPSHOT_ANSWER, *(0,) * 6), "rank 1 sent SNAPSHOT_ANSWER to a shard"),
        (1, Tag.PUSH, a_push(1), "rank 1 poses as learner 1"),
        (1, Tag.PUSH, a_push(-1), "rank 1 poses as learner -1"),
        (2, Tag.PULL, header(Tag.PULL, 0, 0), "rank 2 poses as learner 0"),
        (3, Tag.PUSH, a_push(0), "rank 3 poses as learner 0"),
        (0, Tag.GOODBYE, header(Tag.GOODBYE, 0, 0, 1), "rank 0 poses as learner 0"),
        (1, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 0, 0), "rank 1 pulled a snapshot: only rank 3"),
        (3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, -3, 0), "rank 3 pulled snapshot -3: expected -2 or more"),
        (3, Tag.SNAPSHOT_PULL, header(Tag.SNAPSHOT_PULL, 0, -1), "rank 3 has seen enough at snapshot -2: expected 0 or more"),
        (1, Tag.PUSH, a_push(0, nbytes=20), "push of rank 1: a slice of 20 bytes, expected 24"),
        (1, Tag.PUSH, a_push(0, gradients=2), "push of rank 1: 2 gradients, expected 1"),
        (1, Tag.PUSH, a_push(0, nbytes=-24), "a slice of -24 bytes, expected 24"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_applied(source: int, tag: int, payload: bytes, message: str) -> None:
    door = Door()
    door.comes(source, tag, payload)
    found = door.receive()
    assert isinstance(found, Refused)
    assert found.rank == source
    assert re.search(message, found.why)
    assert (door.scratch == 5).all()
    assert not door.comm.inbox, "it is gone, and does not hold up its sender"


def test_a_header_without_its_slice_holds_up_nobody() -> None:
    """What one rank sends comes in order: so another message in the slice's place says that none comes."""
    door = Door()
    door.comes(1, Tag.PUSH, a_push(0))
    door.comes(1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 1, 1))
    found = door.receive()
    assert isinstance(found, Refused)
    assert found.push
    assert "sent a header without GRADIENT: GOODBYE came" in found.why
    assert door.receive() == Goodbye(0, 1, True)


def test_a_slice_whose_header_was_refused_is_dropped_by_itself() -> None:
    door = Door()
    door.comes(1, Tag.PUSH, a_push(0, nbytes=20))
    door.comes(1, Tag.GRADIENT, np.full(SIZE, np.nan, np.float32))
    door.comes(1, Tag.PUSH, a_push(0))
    door.comes(1, Tag.GRADIENT, np.ones(SIZE, np.float32))
    first, second = door.receive(), door.receive()
    assert [isinstance(each, Refused) and each.push for each in (first, second)] == [True, False]
    assert told(door.receive())[0] is Push
    assert door.scratch.tolist() == [1.0] * SIZE


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_slice_of_another_size_than_its_header_says_is_not_received(size: int) -> None:
    """A longer one would overwrite memory, a shorter one would pass (TRAPS 9)."""
    door = Door()
    door.comes(1, Tag.PUSH, a_push(0))
    door.comes(1, Tag.GRADIENT, np.ones(size, np.float32))
    found = door.receive()
    assert isinstance(found, Refused)
    assert f"GRADIENT from rank 1: {4 * size} bytes, expected 24" in found.why
    assert (door.scratch == 5).all()


def test_a_message_that_was_posted_must_have_the_magic_number() -> None:
    """Its size is MPI's business: it fails a receive that is too small."""
    door = Door()
    door.comes(1, Tag.ANSWER, struct.pack("<9q", 0x1234, *ZERO))
    with pytest.raises(PeerError, match=f"rank 1 sent magic 0x1234: expected {MAGIC:#x}"):
        door.wire.header(door.wire.post(1, Tag.ANSWER))


@pytest.mark.parametrize("ending", [-1, 4, 2**40])
def test_no_learner_leaves_for_an_unknown_reason(ending: int) -> None:
    assert refused(Door(), 1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 3, ending))


VALID = {
    Tag.PUSH: a_push(0),
    Tag.PULL: header(Tag.PULL, 0, 3),
    Tag.GOODBYE: header(Tag.GOODBYE, 0, 3, 1),
    Tag.SNAPSHOT_PULL: header(Tag.SNAPSHOT_PULL, 3, 0),
}


def refused(door: Door, source: int, tag: int, payload: bytes) -> bool:
    door.comm.inbox.clear()
    door.comes(source, tag, payload)
    try:
        return isinstance(door.receive(), Refused)
    except Stuck:  # taken for a push: it waits for the gradient
        return False


def test_ten_thousand_malformed_headers_never_pass() -> None:
    """Random bytes of the right size, and valid headers with one bit of magic, name or size turned."""
    random, door = np.random.default_rng(0), Door()
    checked = {Tag.PUSH: [*range(16), *range(40, 48), *range(96, 104), *range(113, 120)], Tag.SNAPSHOT_PULL: range(8)}
    for count in range(10_000):
        tag = list(VALID)[count % 4]
        source = 3 if tag is Tag.SNAPSHOT_PULL else 1
        payload = bytearray(VALID[tag])
        if count % 8 < 4:
            payload[:] = random.bytes(len(payload))
        else:
            places = checked.get(tag, range(16))
            payload[random.choice(list(places))] ^= 1 << int(random.integers(8))
        assert refused(door, source, tag, bytes(payload)), (tag, payload)
    for tag, valid in VALID.items():
        assert not refused(door, 3 if tag is Tag.SNAPSHOT_PULL else 1, tag, valid)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(source=st.integers(0, 4), tag=st.integers(0, 12), payload=st.binary(max_size=120))
def test_no_bytes_from_anybody_pass(source: int, tag: int, payload: bytes) -> None:
    assert refused(Door(), source, tag, payload)


@pytest.mark.parametrize("polite", [False, True])
def test_an_announced_header_is_synchronous_however_a_rank_waits(polite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen twice with eager ones: pulls overtook their own pushes and starved them, staleness 72 with 3 learners."""
    for name in ("MPISGD_WAIT", "MPISGD_SSEND", "MPISGD_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    slice_ = np.ones(SIZE, np.float32)
    for synchronous, plain in ((False, "Isend"), (True, "Issend")):
        monkeypatch.setenv("MPISGD_SSEND", str(int(synchronous)))
        wire = real.Wire(comm := Comm(), polite=polite)
        push = (0,) * 11 + (SLICE, -1, 0, 0.0, 1.0, 0.5)
        wire.finish(wire.start(1, Tag.PUSH, push, slice_))
        wire.finish(wire.start(1, Tag.PULL, (0, 0)))
        wire.finish(wire.start(1, Tag.GOODBYE, (0, 0, 1)))
        assert comm.sent == [
            ("Issend", 1, Tag.PUSH, header(Tag.PUSH, *push)),
            (plain, 1, Tag.GRADIENT, slice_.tobytes()),
            (plain, 1, Tag.PULL, header(Tag.PULL, 0, 0)),
            ("Issend", 1, Tag.GOODBYE, header(Tag.GOODBYE, 0, 0, 1)),
        ]


def test_an_answer_goes_out_as_it_is_received() -> None:
    """What one real wire sends, another unpacks: header, weights, and the empty slice of a stop."""
    door, weights = Door(), np.arange(SIZE, dtype=np.float32)
    door.shard.start_answers([1], weights, 3, {1: 2})
    door.shard.finish_answers()
    door.shard.stop(0, 9, Ending.FINISHED, 1)
    assert [(dest, tag) for _, dest, tag, _ in door.comm.sent] == [
        (2, Tag.ANSWER), (2, Tag.WEIGHTS), (1, Tag.ANSWER), (1, Tag.WEIGHTS)
    ]  # fmt: skip
    learner = real.Wire(comm := Comm(), polite=False)
    comm.inbox = [Envelope(0, tag, payload) for _, _, tag, payload in door.comm.sent]
    pulled = np.zeros(SIZE, np.float32)
    for expected in ((0, 3, 0, 2, 0, -1, 0, SLICE), (0, 9, 1, 0, 0, -1, 0, 0)):
        posted = learner.post(0, Tag.ANSWER, pulled)
        assert learner.header(posted) == expected
        learner.finish(posted)
        assert pulled.tolist() == weights.tolist()


@pytest.mark.parametrize("polite", [False, True])
def test_a_question_is_sent_once_its_answer_has_a_place(polite: bool) -> None:
    wire, pulled = real.Wire(comm := Comm(), polite=polite), np.zeros(SIZE, np.float32)
    with pytest.raises(Stuck):
        wire.ask(1, Tag.PULL, (0, 7), Tag.ANSWER, (pulled,))
    assert comm.sent == [], "the receive goes first"
    weights = np.arange(SIZE, dtype=np.float32)
    comm.inbox = [
        Envelope(1, Tag.ANSWER, header(Tag.ANSWER, 0, 7, 0, 0, 0, -1, 1, SLICE)),
        Envelope(1, Tag.WEIGHTS, weights.tobytes()),
    ]
    asked = wire.ask(1, Tag.PULL, (0, 7), Tag.ANSWER, (pulled,))
    assert [sent[1:] for sent in comm.sent] == [(1, Tag.PULL, header(Tag.PULL, 0, 7))]
    assert wire.header(asked) == (0, 7, 0, 0, 0, -1, 1, SLICE)
    wire.finish(asked)
    assert pulled.tolist() == weights.tolist()


@pytest.mark.parametrize("polite", [False, True])
@pytest.mark.parametrize(
    ("more", "slice_nbytes", "told", "message"),
    [
        (b"\0", SLICE, SLICE, "ANSWER from rank 1: the header is longer than expected"),
        (b"", SLICE + 4, SLICE, "ANSWER from rank 1: the body is longer than expected"),
        (b"", SLICE - 4, SLICE, f"WEIGHTS from rank 1: {SLICE - 4} bytes, expected {SLICE}"),
        (b"", 0, SLICE, f"WEIGHTS from rank 1: 0 bytes, expected {SLICE}"),
        (b"", SLICE, 0, f"WEIGHTS from rank 1: {SLICE} bytes, expected 0"),
    ],
)
def test_an_answer_of_another_size_is_refused(polite: bool, more: bytes, slice_nbytes: int, told: int, message: str) -> None:
    """MPI would fill what there is of a shorter one, and raise an error of its own for a longer one."""
    wire, pulled = real.Wire(comm := Comm(), polite=polite), np.zeros(SIZE, np.float32)
    comm.inbox = [
        Envelope(1, Tag.ANSWER, header(Tag.ANSWER, 0, 7, 0, 0, 0, -1, 1, told) + more),
        Envelope(1, Tag.WEIGHTS, bytes(slice_nbytes)),
    ]
    asked = wire.ask(1, Tag.PULL, (0, 7), Tag.ANSWER, (pulled,))
    with pytest.raises(PeerError, match=message):
        wire.header(asked)
        wire.finish(asked)


def test_both_worlds_have_the_methods_of_the_communicator() -> None:
    named = [name for name, value in vars(Communicator).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert {"start", "post", "ask", "header", "finish", "take", "take_body", "meet"} < set(named)
    for name in named:
        expected = list(inspect.signature(getattr(Communicator, name)).parameters)
        assert list(inspect.signature(getattr(VirtualWire, name)).parameters) == expected
        assert list(inspect.signature(getattr(real.Wire, name)).parameters) == expected
