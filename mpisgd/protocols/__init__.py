"""One short file per protocol; each reads beside the algorithm of its paper (DESIGN 3)."""

from __future__ import annotations

from mpisgd.config import (
    AllreduceOptions,
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
from mpisgd.errors import ConfigError
from mpisgd.protocols.admission import Admission
from mpisgd.protocols.async_opt import AsyncOpt
from mpisgd.protocols.backup import Backup
from mpisgd.protocols.base import Protocol
from mpisgd.protocols.downpour import Downpour
from mpisgd.protocols.hardsync import Hardsync
from mpisgd.protocols.modulation import Modulation
from mpisgd.protocols.softsync import Softsync
from mpisgd.protocols.ssp import Ssp
from mpisgd.protocols.timeout import Timeout
from mpisgd.protocols.verdict import Verdict
from mpisgd.protocols.versioned import Versioned

__all__ = ["Protocol", "Verdict", "make"]


def make(options: ProtocolOptions, lambda_: int) -> Protocol:
    """The protocol of one shard (or, for `next_clock`, of one learner) among `lambda_` learners.

    Raises ConfigError, with the equation and its numbers, where the options do not fit the number of learners.
    """
    match options:
        case (
            HardsyncOptions() | AllreduceOptions()
        ):  # the same decisions, on the same gradients; `allreduce.py` is the other way there
            return Hardsync(lambda_)
        case SoftsyncOptions(n=n):
            if n > lambda_:
                raise ConfigError(
                    f"protocol.n = {n}: expected 1 <= n <= lambda = {lambda_} learners, so that c = floor(lambda/n) >= 1"
                )
            return Softsync(lambda_, n, Modulation(options.modulation))
        case BackupOptions(late=late, abort=abort):
            return Backup(lambda_, wanted(options, lambda_), Modulation(options.modulation) if late == "apply" else None, abort)
        case TimeoutOptions(N=gradients, N_min=least):
            _check_at_most(lambda_, N=gradients, N_min=least)
            return Timeout(lambda_, gradients or lambda_, least)
        case VersionedOptions(grads_to_wait=gradients, tolerance=tolerance):
            _check_at_most(lambda_, grads_to_wait=gradients)
            return Versioned(lambda_, gradients or lambda_, tolerance, Modulation(options.modulation))
        case AsyncOptions(most_staleness=most, warm_up=warm_up, ramp=ramp):
            return AsyncOpt(lambda_, Modulation(options.modulation), most, Admission(lambda_, warm_up, ramp))
        case DownpourOptions(n_push=n_push, n_fetch=n_fetch, warm_up=warm_up):
            return Downpour(lambda_, Modulation(options.modulation), Admission(lambda_, warm_up, 0), (n_fetch or n_push) // n_push)
        case SspOptions(slack=slack, get_model_frequency=mini_batches):
            return Ssp(lambda_, Modulation(options.modulation), slack, mini_batches)


def wanted(options: BackupOptions, lambda_: int) -> int:
    """N of [Chen16]: as given, or lambda - b.

    Raises ConfigError where N + b != lambda or N is not in 1 ... lambda.
    """
    if options.N is not None:
        _check_at_most(lambda_, N=options.N)
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


def _check_at_most(lambda_: int, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number > lambda_:
            raise ConfigError(f"protocol.{name} = {number}: expected at most lambda = {lambda_} learners")
