"""One short file per protocol; each reads beside the algorithm of its paper (DESIGN 3)."""

from __future__ import annotations

from mpisgd.config import BackupOptions, HardsyncOptions, ProtocolOptions, SoftsyncOptions
from mpisgd.errors import ConfigError
from mpisgd.protocols.backup import Backup
from mpisgd.protocols.base import Protocol
from mpisgd.protocols.hardsync import Hardsync
from mpisgd.protocols.softsync import Softsync
from mpisgd.protocols.verdict import Verdict

__all__ = ["Protocol", "Verdict", "make"]


def make(options: ProtocolOptions, lambda_: int) -> Protocol:
    """The protocol of one shard (or, for `next_clock`, of one learner) among `lambda_` learners.

    Raises ConfigError, with the equation and its numbers, where the options do not fit the number of learners.
    """
    match options:
        case HardsyncOptions():
            return Hardsync(lambda_)
        case SoftsyncOptions(n=n, modulation=modulation):
            if n > lambda_:
                raise ConfigError(
                    f"protocol.n = {n}: expected 1 <= n <= lambda = {lambda_} learners, so that c = floor(lambda/n) >= 1"
                )
            return Softsync(lambda_, n, modulated=modulation == "inverse")
        case BackupOptions():
            return Backup(lambda_, wanted(options, lambda_))


def wanted(options: BackupOptions, lambda_: int) -> int:
    """N of [Chen16]: as given, or lambda - b.

    Raises ConfigError where N + b != lambda or N is not in 1 ... lambda.
    """
    if options.N is not None:
        if options.N > lambda_:
            raise ConfigError(f"protocol.N = {options.N}: expected at most lambda = {lambda_} learners")
        if options.b is not None and options.N + options.b != lambda_:
            raise ConfigError(
                f"protocol.N + protocol.b = {options.N} + {options.b} = {options.N + options.b}:"
                f" expected lambda = {lambda_} learners"
            )
        return options.N
    backups = 1 if options.b is None else options.b
    if backups >= lambda_:
        raise ConfigError(f"protocol.b = {backups}: expected N = lambda - b = {lambda_} - {backups} >= 1")
    return lambda_ - backups
