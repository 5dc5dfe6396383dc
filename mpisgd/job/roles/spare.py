"""A spare rank: it waits until a learner dies, and is that learner from then on; or until the run is over."""

from __future__ import annotations

import dataclasses

import numpy as np

from mpisgd.base.speech import warn
from mpisgd.exchange.tolerant_channel import SpareChannel
from mpisgd.job.finish import account
from mpisgd.job.roles.base import Built
from mpisgd.job.roles.sgd import BuiltLearner
from mpisgd.job.world import Setup, World


class BuiltSpare(Built):
    """It begins as the learner would have begun: with no state of its own (what was rounded off, an inner optimiser, buffers)."""

    def __init__(self, setup: Setup, world: World, rank: int) -> None:
        super().__init__(setup, world, rank)
        self._channel = SpareChannel(self.wire, setup.roles)
        self._learner: BuiltLearner | None = None

    def train(self) -> None:
        self.expendable = True
        learner_id = self._channel.wait()
        if learner_id < 0:
            return
        roles = self.setup.roles.succeeded(learner_id, self.rank)
        self.world.take_place(self.rank, roles)
        self._learner = learner = BuiltLearner(dataclasses.replace(self.setup, roles=roles), self.world, self.rank)
        learner.first_seq = self._channel.succeed(learner_id, learner.first_seq)
        where = f"rank {self.rank} on {self.setup.hosts[self.rank]}"
        warn(f"mpisgd: {where}, a spare, goes on as learner {learner_id} from mini-batch {learner.first_seq:,}")
        learner.train()

    def end(self) -> np.ndarray:
        return account() if self._learner is None else self._learner.end()

    def leave(self) -> None:
        if self._learner is not None:
            self._learner.leave()

    def newest_clock(self) -> int | None:
        return None if self._learner is None else self._learner.newest_clock()
