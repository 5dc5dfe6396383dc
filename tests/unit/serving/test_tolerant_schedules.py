"""A shard whose learners die, or hang, at random moments: the run ends and the books balance (DESIGN 4, laws 2, 4)."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpisgd.comm.messages import Lost, Message, Torn
from mpisgd.protocols import (
    AsyncOptions,
    BackupOptions,
    DownpourOptions,
    HardsyncOptions,
    ProtocolOptions,
    SoftsyncOptions,
    SspOptions,
    TimeoutOptions,
    VersionedOptions,
)
from mpisgd.records.log.rank_file import read_table
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.vectors.body import Pool
from tests.effort import spread
from tests.unit.fakes import Stuck
from tests.unit.shards import LEAVE, PATIENCE_S, Crew, tolerant_serve


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.h5"


class FaultyCrew(Crew):
    """Learners of whom some die, in the middle of a push, say, or hang, at random moments.

    `sent` counts what each has begun to send to the shard; `lost` are the dead.
    """

    def __init__(self, lambda_: int, next_clock: Any, seed: int) -> None:
        super().__init__(lambda_, next_clock, lambda learner_id, seq: 1.0, seed=seed)
        self._dice = random.Random(seed + 1)
        self._alive = set(range(lambda_))
        self._hanging: set[int] = set()
        self._hidden: list[Any] = []
        self._last_words: dict[int, Any] = {}
        self.lost: list[int] = []

    def receive(self, bodies: Pool, learner_id: int | None = None, until_s: float = math.inf) -> Message | None:
        self._befall()
        self._hide()
        try:
            message = super().receive(bodies, learner_id, until_s)
        except Stuck:
            assert until_s < math.inf, "the shard would wait for ever"
            self.seconds += 2 * PATIENCE_S
            if self._dice.random() < 0.3:
                self._wake()
            return None
        who = self._of(message)
        if who in self._last_words:
            del self._last_words[who]
            self._bury(who)
        return message

    def _befall(self) -> None:
        draw, who = self._dice.random(), self._dice.choice(sorted(self._alive))
        if draw < 0.02 and len(self._alive) > 1:
            self._die(who)
        elif draw < 0.06:
            self._hanging.add(who)
        elif draw < 0.09:
            self._wake()

    def _die(self, who: int) -> None:
        """What it was sending comes whole, or in part, or not at all; then it is dead."""
        self._alive.discard(who)
        self._hanging.discard(who)
        pending = [item for item in self.waiting + self._hidden if self._of(item) == who]
        self._hide({who})
        self._hidden = [item for item in self._hidden if self._of(item) != who]
        pushes = [item for item in pending if isinstance(item, tuple) and not hasattr(item, "_fields")]
        draw = self._dice.random()
        if pushes and draw < 0.7:
            words = Torn(pushes[0][0]) if draw < 0.4 else pushes[0]
            self._last_words[who] = words
            self.waiting.append(words)
        else:
            self._bury(who)

    def _bury(self, who: int) -> None:
        self.waiting = [item for item in self.waiting if self._of(item) != who]  # the pull after its last push
        self.waiting.append(Lost(who + 1, who))
        self.lost.append(who)

    def _wake(self) -> None:
        self.waiting += self._hidden
        self._hidden.clear()
        self._hanging.clear()

    def _hide(self, of: set[int] | None = None) -> None:
        hidden = self._hanging if of is None else of
        self._hidden += [item for item in self.waiting if self._of(item) in hidden]
        self.waiting = [item for item in self.waiting if self._of(item) not in hidden]

    @staticmethod
    def _of(item: Any) -> int:
        message = item[0] if isinstance(item, tuple) and not hasattr(item, "_fields") else item
        if isinstance(message, Torn):
            return message.push.learner_id
        return -1 if isinstance(message, Lost) else getattr(message, "learner_id", -1)

    def receive_pull(self) -> Message | None:
        """What has become of others is told first, as on the wire."""
        lost = [item for item in self.waiting if isinstance(item, Lost)]
        if lost and self._dice.random() < 0.5:
            self.waiting.remove(lost[0])
            return lost[0]
        return super().receive_pull()

    def start_answers(self, learner_ids: list[int], weights: np.ndarray, *more: Any) -> None:
        super().start_answers(learner_ids, weights, *more)
        self.waiting = [
            item for item in self.waiting if self._of(item) < 0 or self._of(item) in self._alive | set(self._last_words)
        ]


PROTOCOLS: dict[str, ProtocolOptions] = {
    "hardsync": HardsyncOptions(),
    "softsync": SoftsyncOptions(n=2),
    "async": AsyncOptions(most_staleness=3),
    "backup": BackupOptions(b=1),
    "backup-late": BackupOptions(b=1, late="apply"),
    "timeout": TimeoutOptions(N=3, N_min=1, timeout_s=1e9),
    "ssp": SspOptions(slack=1),
    "downpour": DownpourOptions(),
    "versioned": VersionedOptions(grads_to_wait=2),
}


@pytest.mark.parametrize(("name", "seed"), spread(itertools.product(PROTOCOLS, range(12)), 5, unpack=True))
def test_whatever_befalls_learners_the_run_ends_and_the_books_balance(
    name: str, seed: int, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third time weights are sent in chunks, and who pulls, or is lost, meanwhile is heard of then."""
    monkeypatch.setattr("mpisgd.vectors.chunks.CHUNK_NBYTES", 4)
    lambda_ = 5
    options = PROTOCOLS[name]
    crew = FaultyCrew(lambda_, options.make(lambda_).next_clock, seed)
    crew.waiting.append(LEAVE)
    done = tolerant_serve(log, crew, options, lambda_, budget=150, first=seed % 2 == 0, weights=3 if seed % 3 == 0 else 1)
    rows = read_table(log, "pushes")
    applied = rows[rows["verdict"] == Verdict.APPLY]
    for learner_id in range(lambda_):
        mine = applied["seq"][applied["learner_id"] == learner_id]
        assert len(set(mine.tolist())) == len(mine), "nothing is applied twice"
    assert done.balanced()
    assert done.shard.update.samples >= 150
    assert done.weights[0] != 0.0
    missed = {row[2] for row in done.told(Event.MISSED)}
    assert {*crew.lost, *missed} >= {row[2] for row in done.told(Event.LOST)} - set(crew._hanging)
    updates = read_table(log, "updates")
    for clock, gradients in updates[["clock", "gradients"]].tolist():
        assert np.count_nonzero(applied["clock"] == clock - 1) == gradients, "the divisor is counted"
