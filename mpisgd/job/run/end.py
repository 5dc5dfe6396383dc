"""The end of a run: rank 0 joins the logs, checks the books and says DONE, or how to go on; nobody leaves before that."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import numpy as np

from mpisgd.base.errors import EXIT_FAILED, CheckpointError, RunInterrupted
from mpisgd.comm.mpi.wire import Wire
from mpisgd.comm.signals import Signals, name_of
from mpisgd.job import interruption
from mpisgd.job.finish import Outcome, farewell, finish, outcome_of, refusals
from mpisgd.job.run.claim import Claim
from mpisgd.liveness.guard import AgreedError
from mpisgd.liveness.world import World
from mpisgd.records.log import schema


class End:
    """The common end of all ranks.

    Args:
        resuming: the command that goes on with this run.
        before_leaving: called when all ranks have come to their end, before any leaves.
    """

    def __init__(self, claim: Claim, ranks: World, signals: Signals, resuming: str, before_leaving: Callable[[], None]) -> None:
        self._claim = claim
        self._ranks = ranks
        self._signals = signals
        self._resuming = resuming
        self._before_leaving = before_leaving
        self._path = claim.setup.path

    def end(self, wire: Wire, said: np.ndarray) -> Outcome:
        """This rank's account is `said`. Raises AgreedError, RunInterrupted on all ranks alike."""
        config, roles = self._claim.setup.config, self._claim.setup.roles
        accounts = wire.gather(said)
        outcome = outcome_of(self._path, accounts[list(roles.shard_ranks)])
        if accounts[:, -1].any():
            raise self._interrupted(wire, outcome)
        told = np.zeros(1 + self._ranks.size, np.int64)
        if self._ranks.rank == 0:
            outcome = finish(outcome, logged=config.log.enabled)
            for spool in self._path.glob(f"{schema.SPOOL}*"):  # those of layouts before, too
                spool.unlink(missing_ok=True)
            self._claim.unlock()
            if config.log.progress != "off":
                print(farewell(outcome, logged=config.log.enabled), file=sys.stderr, flush=True)
            told[0] = outcome.diverged
            told[[1 + rank for rank in wire.given_up()]] = 1
        diverged, *given_up = wire.gather(told)[0].tolist()
        self._part(wire)
        self._ranks.end(rank for rank, given in enumerate(given_up) if given)
        why = refusals(accounts[list(roles.shard_ranks)], roles.describe)
        if why:
            raise AgreedError(f"PeerError: {why}", EXIT_FAILED)
        return dataclasses.replace(outcome, diverged=bool(diverged))

    def _part(self, wire: Wire) -> None:
        self._before_leaving()
        away = wire.away()
        wire.part()
        self._claim.leave(away)

    def _interrupted(self, wire: Wire, outcome: Outcome) -> RunInterrupted | AgreedError:
        """What all ranks raise: rank 0 says how the run can go on, or that it cannot; there is no DONE."""
        signal = int(wire.gather(np.array([self._signals.received]))[:, 0].max())
        text, status = f"{self._path} was interrupted by {name_of(signal)}", 0
        if self._ranks.rank == 0:
            try:
                text = interruption.farewell(self._path, signal, outcome.clocks, self._resuming)
                print(text, file=sys.stderr, flush=True)
                if self._signals.hurried:
                    interruption.tell_terminal(text)
            except CheckpointError as error:
                text, status = f"{type(error).__name__}: {error}", error.exit_status
            self._claim.unlock()
        status = int(wire.gather(np.array([status]))[0, 0])
        self._part(wire)
        return AgreedError(text, status) if status else RunInterrupted(text)

    def tell_the_terminal(self, signal: int) -> None:
        """Where the launcher is about to kill its ranks, this may be the last that is said; the lock is nobody's any more.

        Without a terminal it was no Ctrl-C: a batch system ends its jobs by the same signals, leaves them half a minute to save,
        and may begin the job anew meanwhile, for which the lock is there.
        """
        if self._signals.hurried and interruption.tell_terminal(interruption.last_words(self._path, signal, self._resuming)):
            self._claim.unlock()
