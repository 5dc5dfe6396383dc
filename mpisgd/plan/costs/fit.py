"""Costs of a run, as the configuration of an equally fast and stale virtual run.

- Compute: mini-batches drawn anew from the log, without injected delays.
- Wire and service: from the log's columns (`messages.py`), without waits (`waits.py`).
- The rest of a real cycle (loading, oversleeping, Python, shared cores): measured by a virtual run, added as an injected delay
  (`with_rest`), the only cost of a learner that no shard pays for.

A last virtual run is compared with the log (`differences`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.config import Config, StragglerOptions, config_file, replace, trust
from mpisgd.config.config_virtual import EmpiricalComputeOptions, FailureOptions, NetworkOptions
from mpisgd.plan.costs.messages import HANDLING_S, Cost, measured
from mpisgd.plan.costs.observe import Lag, Observed, distance, observe
from mpisgd.plan.costs.predict import PUSHES, predict
from mpisgd.plan.costs.waits import missing_s, without_waits
from mpisgd.records.log.reader import Run

#: The rest of a cycle is found once it changes by less than this share of the log's lag, or after this many steps.
_NEAR = 0.02
_STEPS = 4
#: Most deviation over mean of a lognormal rest: a few odd cycles are no heavy tail.
_MOST_VARIATION = 2.0
#: Code of a run that a fit or its simulation calls.
_CALLED = ("protocol.modulation", "schedule.factory")


@dataclass(frozen=True)
class Fit:
    """A run's costs. `real`: the log; `virtual`: a run of `config`; None = too short a log."""

    config: Config
    costs: tuple[Cost, ...]
    assumptions: tuple[str, ...]
    real: Observed | None
    virtual: Observed | None

    @property
    def differences(self) -> dict[str, float]:
        """Differences of the virtual run as shares of the log's; no staleness of 0, empty for short logs."""
        if self.real is None or self.virtual is None:
            return {}
        names = ("seconds_per_update", "gradients_per_s", *(("mean_staleness",) if self.real.mean_staleness > 0 else ()))
        return {name: getattr(self.virtual, name) / getattr(self.real, name) - 1 for name in names}

    @property
    def staleness_distance(self) -> float | None:
        """Kolmogorov-Smirnov distance of virtual from real staleness, 0 ... 1."""
        return distance(self.real.staleness, self.virtual.staleness) if self.real and self.virtual else None


def fit(run: Run, *, from_log: bool = False, trusting: bool = False) -> Config:
    """Return the configuration of `fitted`, to `simulate` in `<run>-virtual`."""
    return fitted(run, from_log=from_log, trusting=trusting).config


def check_pushes(run: Run) -> None:
    if not len(run.pushes):
        raise DataError(f"the log of {run.path} holds no pushes: there is nothing to plan from")


def fitted(run: Run, *, from_log: bool = False, trusting: bool = False) -> Fit:
    """Fit costs, and compare.

    Only if `trusting`, the run's own weights of stale gradients are called, and by simulations its schedule. Raises DataError: no
    pushes, unknown size of the model. Raises ConfigError: another version's configuration, a batch, allreduce, teams, groups,
    layerwise, untrusted code.
    """
    check_pushes(run)
    if not trusting:
        named = config_file.from_mapping(run.config)
        uncalled = {field: spec for field, spec in trust.names_of(named).items() if field not in _CALLED}
        trust.check(run.path, named, uncalled)
    if run.is_batch:
        raise ConfigError(
            f"{run.path} is a run of sandblaster, where portions of a batch are dealt: their size, mu, is chosen by hand; expected"
            " first a run of another protocol"
        )
    if about.doubled(run):
        raise ConfigError(
            f"{run.path} is a run of {about.protocol_name(run)}, where learners double as shards; expected first a run with"
            " separate shards: a plan begins with the shards' costs"
        )
    if run.teams:
        raise ConfigError(
            f"{run.path} is a run of teams (aggregation = 'node'): the log does not tell each rank's costs; expected first a run"
            " with aggregation = 'none'"
        )
    if about.groups_of(run):
        raise ConfigError(
            f"{run.path} is a run of groups (group_size > 1): the log times single stages, not whole mini-batches;"
            " expected first a run with group_size = 1"
        )
    if about.layerwise(run):
        raise ConfigError(f"{run.path} has per_layer = true, where slices travel behind computing; expected a run without it")
    real = observe(run)
    if run.environment.get("virtual") and not from_log:
        return _as_configured(run, real)
    config, costs, assumptions = _measured(run)
    if real is None:
        return Fit(config, costs, (*assumptions, "The log is too short to tell the other costs of a cycle."), None, None)
    config, virtual, found = without_waits(config, real, _pushes(run))
    costs = (*(cost for cost in costs if cost.name not in {each.name for each in found}), *found)
    config, virtual, rest = _with_the_rest(config, real, virtual, _pushes(run))
    source = "mean seconds of a cycle besides compute and delay, less the virtual run's"
    more = (Cost("rest of a cycle", rest.mean_s, "s", source), Cost("its deviation", rest.deviation_s, "s", "of the same"))
    return Fit(config, (*costs, *more), assumptions, real, virtual)


def _as_configured(run: Run, real: Observed | None) -> Fit:
    config = _without_tensors(config_file.from_mapping(run.config), run)
    assumptions = ("The run was virtual: all costs are the configuration's.",)
    return Fit(config, (), assumptions, real, None if real is None else predict(config, _pushes(run)))


def _without_tensors(config: Config, run: Run) -> Config:
    """Return the configuration for sizes alone. Raises DataError: unknown size of the model."""
    environment = run.environment
    nbytes, train_samples = environment.get("parameter_nbytes"), environment.get("train_samples")
    if not isinstance(nbytes, int) or nbytes < 4:
        raise DataError(f"{run.path}: [environment] parameter_nbytes = {nbytes!r}: expected the bytes of the model's parameters")
    virtual = dataclasses.replace(
        config.virtual,
        learners=run.lambda_,
        gradients=False,
        batched=False,
        parameters=nbytes // 4,
        train_samples=train_samples if isinstance(train_samples, int) else config.virtual.train_samples,
    )
    return replace(config, virtual=virtual, device="cpu", shard_device="cpu", out=f"{run.path}-virtual", overwrite=False)


def _pushes(run: Run) -> int:
    """Return the run's pushes, for the same start and course, at most a prediction's."""
    return min(PUSHES, int(np.count_nonzero(run.pushes["shard"] == 0)))


def _measured(run: Run) -> tuple[Config, tuple[Cost, ...], tuple[str, ...]]:
    config = _without_tensors(config_file.from_mapping(run.config), run)
    wire = measured(run)
    hosts = Counter(str(host) for host in run.environment.get("hosts", []))
    most = max(hosts.values(), default=1)
    spare = (
        sum(count == 1 < most for count in hosts.values()) if config.placement == "spread" and config.shards == len(hosts) else 0
    )
    everybody = len(np.unique(run.pushes["learner_id"][run.pushes["shard"] == 0])) == run.lambda_
    config = replace(
        config,
        virtual=dataclasses.replace(config.virtual, ranks_per_node=most, spare_nodes=spare, slow_nodes={}, pause_mean_s=0.0),
        compute=EmpiricalComputeOptions(run=str(run.path.resolve()), pooled=not everybody),
        network=wire.network,
        service=wire.service,
        failures=FailureOptions(),
    )
    return config, wire.costs, tuple(_assumptions(run, config, hosts, everybody))


def _assumptions(run: Run, config: Config, hosts: Counter[str], everybody: bool) -> list[str]:
    whose = "each learner's own mini-batches" if everybody else "all learners' mini-batches together, as some pushed none"
    said = [
        f"Compute seconds are drawn anew from {whose} of {run.name}: independent, and the same under every protocol.",
        "Messages and service: low quantiles and medians of the log's columns, without waits. The rest of a cycle, by"
        " mean and deviation, is a cost of the learner.",
        f"A slice's service costs up to {HANDLING_S * 1e6:.0f} us at any size; costs beyond grow with the bytes.",
    ]
    if config.straggler.active:
        said.append("Injected stragglers are injected again.")
    cores = run.environment.get("cores_per_node")
    if isinstance(cores, int) and max(hosts.values(), default=0) > cores:
        said.append(
            f"The log is of {max(hosts.values())} ranks on a node of {cores} cores: waits for a core are taken for costs of"
            " messages and cycles, the same under every protocol and size; a core for each rank would be faster, and staler."
        )
    if len(hosts) > 1:
        said.append("Messages between nodes share links, as connections of TCP do.")
    else:
        default = NetworkOptions()
        said.append(
            f"The log is of one node: between nodes, {default.node_bandwidth:.3g} bytes/s per node are assumed (--node-bandwidth)."
        )
    return said


def _with_the_rest(config: Config, real: Observed, virtual: Observed, pushes: int) -> tuple[Config, Observed, Lag]:
    """Return the configuration of cycles as long as the log's, its prediction, and the added delay.

    Go in steps, as slower learners queue less; add nothing to a longer virtual lag.
    """
    rest, with_it = Lag(0.0, 0.0), config
    for _ in range(_STEPS):
        lacks_s = missing_s(virtual, real, config.virtual.learners, rest.mean_s)
        wanted = dataclasses.replace(real.lag.beyond(virtual.lag), mean_s=max(0.0, lacks_s))
        if abs(wanted.mean_s - rest.mean_s) <= _NEAR * real.lag.mean_s:
            break
        rest, with_it = wanted, replace(config, straggler=with_rest(config.straggler, wanted))
        virtual = predict(with_it, pushes)
    return with_it, virtual, rest


def with_rest(straggler: StragglerOptions, rest: Lag) -> StragglerOptions:
    """Add the rest to injected delays, unmultiplied by slowdowns, which are of computing."""
    deviation_s = min(rest.deviation_s, _MOST_VARIATION * rest.mean_s)
    return dataclasses.replace(
        straggler,
        rest_mean_s=straggler.rest_mean_s + rest.mean_s,
        rest_deviation_s=math.hypot(straggler.rest_deviation_s, deviation_s),
    )
