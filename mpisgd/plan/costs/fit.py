"""The costs of a run, as the configuration of a virtual one that runs as fast and as stale.

- Compute: every learner's own mini-batches, drawn anew from the log (`EmpiricalComputeOptions`). Stragglers that were injected
  are in none of them: the learner's loop injects them again, the same for the same seed, learner and mini-batch.
- Wire and service: from the log's columns (`wire.py`).
- Waits, which columns hold besides: where the virtual run would be slower than the log, they are taken out (`waits.py`).
- The rest: what a real cycle takes more than the virtual one: loading data, sleeping too long, Python between columns, and on
  shared cores the wait for one. One virtual run of the same protocol tells how much it is, and it is added to every
  mini-batch as an injected delay (`with_rest`), the one cost of a learner that no shard pays for.

Then one more virtual run is compared with the log: `differences` says how well the fit repeats what it was fitted to.

A virtual run's costs are in its configuration, exactly, and are taken from there unless `from_log`, which treats its log as
that of real ranks.
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
from mpisgd.plan.costs.observe import Lag, Observed, distance, observe
from mpisgd.plan.costs.predict import PUSHES, predict
from mpisgd.plan.costs.waits import missing_s, without_waits
from mpisgd.plan.costs.wire import HANDLING_S, Cost, measured
from mpisgd.records.log.reader import Run

#: The rest of a cycle is found when it changes by less than this share of what the log's cycle takes, or after so many steps.
_NEAR = 0.02
_STEPS = 4
#: Deviation over mean of a lognormal rest, at most: a few odd cycles are no heavy tail.
_MOST_VARIATION = 2.0
#: Code that a run names and a fit calls, or whoever simulates what is fitted.
_CALLED = ("protocol.modulation", "schedule.factory")


@dataclass(frozen=True)
class Fit:
    """A run's costs, and how well a virtual run with them agrees with it.

    `real` is what the log shows, `virtual` what `config` gives; None where the log is too short to be observed.
    """

    config: Config
    costs: tuple[Cost, ...]
    assumptions: tuple[str, ...]
    real: Observed | None
    virtual: Observed | None

    @property
    def differences(self) -> dict[str, float]:
        """Differences of the virtual run from the log, as shares of what the log shows: 0.1 is 10 % more. Without staleness where
        the log has none; empty where it is too short to be observed."""
        if self.real is None or self.virtual is None:
            return {}
        names = ("seconds_per_update", "gradients_per_s", *(("mean_staleness",) if self.real.mean_staleness > 0 else ()))
        return {name: getattr(self.virtual, name) / getattr(self.real, name) - 1 for name in names}

    @property
    def staleness_distance(self) -> float | None:
        """Kolmogorov-Smirnov distance of the staleness of virtual and real gradients, 0 ... 1."""
        return distance(self.real.staleness, self.virtual.staleness) if self.real and self.virtual else None


def fit(run: Run, *, from_log: bool = False, trusting: bool = False) -> Config:
    """The configuration with which `simulate` repeats the run in virtual time, in the directory `<run>-virtual`; see `fitted`."""
    return fitted(run, from_log=from_log, trusting=trusting).config


def check_pushes(run: Run) -> None:
    """Raises DataError where the log holds no pushes."""
    if not len(run.pushes):
        raise DataError(f"the log of {run.path} holds no pushes: there is nothing to plan from")


def fitted(run: Run, *, from_log: bool = False, trusting: bool = False) -> Fit:
    """Fit, and compare. Of the code that the run names, weights of stale gradients are called here, and its schedule where the fit
    is simulated: both only if `trusting`.

    Raises DataError where the log holds no pushes or does not say how large the model is; ConfigError where the run's
    configuration is none of this version's, it optimised a batch, it had no shards of their own, its learners were teams or groups,
    or it exchanged layers one by one.
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
            " shards of their own, whose costs a plan begins with"
        )
    if run.teams:
        raise ConfigError(
            f"{run.path} is a run of teams (aggregation = 'node'), whose ranks' own costs its log does not tell; expected first a"
            " run with aggregation = 'none'"
        )
    if about.groups_of(run):
        raise ConfigError(
            f"{run.path} is a run of groups (group_size > 1), whose log tells what single stages compute, not whole mini-batches;"
            " expected first a run with group_size = 1"
        )
    if about.layerwise(run):
        raise ConfigError(
            f"{run.path} has exchange = 'layerwise', where slices travel behind computing; expected a run with exchange = 'whole'"
        )
    real = observe(run)
    if run.environment.get("virtual") and not from_log:
        return _as_configured(run, real)
    config, costs, assumptions = _measured(run)
    if real is None:
        return Fit(config, costs, (*assumptions, "The log is too short to tell what else a cycle costs."), None, None)
    config, virtual, found = without_waits(config, real, _pushes(run))
    costs = (*(cost for cost in costs if cost.name not in {each.name for each in found}), *found)
    config, virtual, rest = _with_the_rest(config, real, virtual, _pushes(run))
    source = "mean of what a cycle takes besides compute and delay, less that of the virtual run"
    more = (Cost("rest of a cycle", rest.mean_s, "s", source), Cost("its deviation", rest.deviation_s, "s", "of the same"))
    return Fit(config, (*costs, *more), assumptions, real, virtual)


def _as_configured(run: Run, real: Observed | None) -> Fit:
    config = _without_tensors(config_file.from_mapping(run.config), run)
    assumptions = ("The run was virtual: its costs are those of its configuration.",)
    return Fit(config, (), assumptions, real, None if real is None else predict(config, _pushes(run)))


def _without_tensors(config: Config, run: Run) -> Config:
    """Sizes travel, not gradients, into a directory beside the run's. Raises DataError where the log does not say how large."""
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
    return replace(config, virtual=virtual, device="cpu", out=f"{run.path}-virtual", overwrite=False)


def _pushes(run: Run) -> int:
    """Number of pushes to simulate: the run's, so that both begin and go on alike; of a long run, as many as a prediction has."""
    return min(PUSHES, int(np.count_nonzero(run.pushes["shard"] == 0)))


def _measured(run: Run) -> tuple[Config, tuple[Cost, ...], tuple[str, ...]]:
    config = _without_tensors(config_file.from_mapping(run.config), run)
    wire = measured(run)
    hosts = Counter(str(host) for host in run.environment.get("hosts", []))
    everybody = len(np.unique(run.pushes["learner_id"][run.pushes["shard"] == 0])) == run.lambda_
    config = replace(
        config,
        virtual=dataclasses.replace(config.virtual, ranks_per_node=max(hosts.values(), default=1), slow_nodes={}, pause_mean_s=0.0),
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
        "Messages and service: low quantiles and medians of the log's columns, without what must be waits of these; what else"
        " cycles take, in the mean and with its deviation, the learners pay for.",
        f"A slice's service costs up to {HANDLING_S * 1e6:.0f} us whatever its size, and beyond that goes by its bytes.",
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
    """The configuration whose cycles take as long as the log's, what it gives, and what was added to them; `virtual`: without.

    In a few steps: where learners queue at a shard, slower ones queue less. What was added is an injected delay to the virtual
    run, and so no part of its lag. Where that is larger than the log's even without, nothing is added.
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
    """Add the rest of a cycle to the injected delays, which a slow learner's factor does not multiply: it is slow at
    computing, and what a cycle takes besides is the same for all."""
    deviation_s = min(rest.deviation_s, _MOST_VARIATION * rest.mean_s)
    return dataclasses.replace(
        straggler,
        rest_mean_s=straggler.rest_mean_s + rest.mean_s,
        rest_deviation_s=math.hypot(straggler.rest_deviation_s, deviation_s),
    )
