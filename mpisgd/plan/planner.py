"""A plan from logs, printed and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mpisgd.analysis import about, arrivals
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.analysis.training import make_target
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, replace
from mpisgd.config.config_virtual import NetworkOptions
from mpisgd.plan import backup, collect, local_steps, shards, softsync, spare
from mpisgd.plan.backup import Choices
from mpisgd.plan.collect import Collecting
from mpisgd.plan.costs.fit import Fit, check_pushes, fitted
from mpisgd.plan.costs.predict import PUSHES, predict
from mpisgd.plan.shards import Point
from mpisgd.plan.softsync import Asynchrony
from mpisgd.plan.target import convergence
from mpisgd.records.log.reader import Run
from mpisgd.report.writing import Drawing, say, tell, terminal, write

_CLOSE = 0.05
"""Share by which a fitted virtual run may differ from its log unreported."""
_SAID = {
    "seconds_per_update": "seconds per update",
    "gradients_per_s": "gradients per second",
    "mean_staleness": "mean staleness",
}


@dataclass(frozen=True)
class Wishes:
    """Wishes for a plan; None = as in the logs.

    `learners`: most learners (default: four times the run's). `network`: another cluster's `NetworkOptions`. `pushes`: per virtual
    run; more are slower and more precise.
    """

    target_error: float | None = None
    target_loss: float | None = None
    noise_samples: float | None = None
    learners: int | None = None
    ranks_per_node: int | None = None
    network: dict[str, Any] = dataclasses.field(default_factory=dict)
    pushes: int = PUSHES
    from_log: bool = False
    trust: bool = False

    def __post_init__(self) -> None:
        if self.pushes < 100:
            raise ConfigError(f"--pushes {self.pushes}: expected at least 100")
        if self.noise_samples is not None and not self.noise_samples >= 0:
            raise ConfigError(f"--noise-samples {self.noise_samples}: expected a number of samples >= 0")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"--ranks-per-node {self.ranks_per_node}: expected at least 1")


@dataclass(frozen=True)
class Plan:
    fit: Fit
    collecting: Collecting
    backup: Choices
    softsync: Asynchrony
    shards: tuple[Point, ...]
    advice: tuple[str, ...]
    assumptions: tuple[str, ...]
    tables: tuple[Table, ...]
    drawings: tuple[Drawing, ...]
    files: tuple[Path, ...]

    def table(self, key: str) -> Table:
        return next(table for table in self.tables if table.key == key)


def plan(
    run_paths: Sequence[str | Path], out: Path | None = None, wishes: Wishes = Wishes(), console: Console | None = None
) -> Plan:
    """Plan from the first run's costs and all runs' convergence; write to `out`, by default `<run>/plan`.

    Raises ConfigError: no run given, different models or data, an unreached target, unwritable `out`. Raises DataError: a run or
    log missing, damaged, or without pushes.
    """
    if not run_paths:
        raise ConfigError("plan: 0 runs given, expected the directory of at least one")
    console = console or terminal()
    runs = [Run(path) for path in run_paths]
    _check_alike(runs)
    target = make_target(wishes.target_error, wishes.target_loss)
    for run in runs:
        check_pushes(run)
    converging = convergence(runs, target, wishes.noise_samples)
    first = runs[0]
    with console.status("fitting the costs of the log"):
        fit = fitted(first, from_log=wishes.from_log, trusting=wishes.trust)
    config = _elsewhere(fit.config, wishes)
    with console.status("predicting seconds per update"):
        collecting = collect.collecting(config, wishes.pushes)
    choices = backup.choices(collecting, converging)
    with console.status("predicting staleness"):
        asynchrony = softsync.asynchrony(config, wishes.pushes)
    with console.status("predicting throughput over shards"):
        points = shards.points(config, wishes.learners or 4 * first.lambda_, wishes.pushes)
    with console.status("predicting throughput over own steps"):
        exchanges = local_steps.choices(config, wishes.pushes)
    with console.status("predicting throughput over spare nodes"):
        further = spare.choices(config, wishes.pushes)
    assumptions = (*fit.assumptions, *_assumptions(config, choices, wishes))
    misfit = _misfit(fit)
    advice = (
        *((misfit,) if misfit else ()),
        *_advice(first, choices, asynchrony, points),
        *local_steps.advice(exchanges),
        *spare.advice(further),
        *_of_slow_links(first, config, wishes.pushes),
    )
    tables = (
        _costs_table(fit),
        collect.table(first, collecting),
        backup.table(choices),
        softsync.table(asynchrony, first.lambda_),
        shards.table(points, config.mini_batches_per_push * config.mu),
        *([local_steps.table(exchanges)] if exchanges else []),
        *([spare.table(further)] if further else []),
        Table("assumptions", "Assumptions", columns_of("what is assumed"), tuple((one,) for one in assumptions)),
    )
    drawings = _draw(first, collecting, choices, asynchrony, points)
    for table in tables:
        table.print_to(console)
        say(console, "")
    for line in advice:
        say(console, line, "bold")
    folder = out or first.path / "plan"
    files = write(folder / "plan.md", f"Plan from {', '.join(run.name for run in runs)}", advice, tables, drawings)
    tell(console, folder, drawings)
    return Plan(fit, collecting, choices, asynchrony, tuple(points), advice, assumptions, tables, drawings, tuple(files))


def _check_alike(runs: Sequence[Run]) -> None:
    first = runs[0]
    for other in runs[1:]:
        for field in ("model", "data", "mu", "optimizer"):
            _same(first, other, field, first.config.get(field), other.config.get(field))
        _same(first, other, "local_steps", first.config.get("local_steps", 0), other.config.get("local_steps", 0))
        for field in ("parameter_nbytes", "train_samples"):
            _same(first, other, field, first.environment.get(field), other.environment.get(field))


def _same(first: Run, other: Run, field: str, one: object, two: object) -> None:
    if one != two:
        raise ConfigError(f"{field} = {one!r} in {first.path}, but {two!r} in {other.path}: expected runs of the same")


def _elsewhere(config: Config, wishes: Wishes) -> Config:
    """Move the costs to another network. Raises ConfigError: an unknown field."""
    known = {field.name for field in dataclasses.fields(NetworkOptions)}
    for name in wishes.network:
        if name not in known:
            raise ConfigError(f"network.{name}: expected one of {', '.join(sorted(known))}")
    elsewhere = bool(wishes.network) or wishes.ranks_per_node is not None
    slow_links = {} if elsewhere else config.network.slow_links
    network = dataclasses.replace(config.network, **{"slow_links": slow_links, **wishes.network})
    virtual = config.virtual
    if wishes.ranks_per_node is not None:
        virtual = dataclasses.replace(virtual, ranks_per_node=wishes.ranks_per_node, spare_nodes=0)
    return replace(config, network=network, virtual=virtual)


def _assumptions(config: Config, choices: Choices, wishes: Wishes) -> list[str]:
    said = [f"Updates to the target: {choices.convergence.source}."]
    said += [f"Another network: {name} = {value:g}." for name, value in wishes.network.items()]
    if config.network.slow_links:
        said.append("A learner modelled on one behind a slow link is behind a slow link, too; a node's first learner decides.")
    ranks = config.virtual.ranks_per_node
    said += [
        f"{ranks} rank{'s' * (ranks > 1)} on each node; learner l of more learners is like learner l modulo"
        f" {config.virtual.learners} of the run; no learner fails, nothing is evaluated.",
        f"Each prediction is a virtual run of about {wishes.pushes:,} pushes: rarer events, and events not in the log, are missed.",
    ]
    return said


def _advice(run: Run, choices: Choices, found: Asynchrony, points: list[Point]) -> tuple[str, ...]:
    best, absolute = choices.best, choices.convergence.absolute
    none = choices.of(0)
    lines = []
    if run.lambda_ == 1:
        lines.append("There is one learner: hardsync, backup and softsync are the same.")
    how_long = f"{best.time:.4g} s" if absolute else f"{best.time:.3f} of the time of b = 0"
    gain = f" (b = 0: {none.time:.4g} s)" if absolute and none is not None and none is not best else ""
    lines.append(f"Backup learners: N = {best.wanted}, b = {best.b}, estimated time to the target {how_long}{gain}.")
    most = max(one.gradients_per_s for one in found.by_n.values())
    n, one = next((n, one) for n, one in found.by_n.items() if one.gradients_per_s > 0.98 * most)
    lines.append(
        f"n-softsync: {one.gradients_per_s / found.hardsync.gradients_per_s:.2f} times the gradients per second of hardsync from"
        f" n = {n} on, with mean staleness {one.mean_staleness:.2f}."
    )
    for learners, point in shards.enough(points).items():
        where = f", {point.placement}" if point.shards > 1 else ""
        lines.append(
            f"{learners:,} learners: {point.shards} shard{'s' * (point.shards > 1)}{where}, {point.expected:.4g} gradients/s"
            f" (limit: {point.bottleneck})."
        )
    return tuple(lines)


def _of_slow_links(run: Run, config: Config, pushes: int) -> list[str]:
    """Predict the gain without slow links."""
    slow_links = config.network.slow_links
    if not slow_links:
        return []
    without = replace(config, network=dataclasses.replace(config.network, slow_links={}))
    more = predict(without, pushes).gradients_per_s / predict(config, pushes).gradients_per_s
    hosts = list(dict.fromkeys(run.environment["hosts"]))
    named = ", ".join(f"{hosts[node]} ({factor:.3g} times the seconds)" for node, factor in slow_links.items())
    return [f"Slow link of {named}: at the rate of the other links, {more:.2f} times the gradients per second."]


def _costs_table(fit: Fit) -> Table:
    rows: list[tuple[Cell, ...]] = [(cost.name, cost.value, cost.unit, cost.source) for cost in fit.costs]
    if fit.real is not None and fit.virtual is not None:
        for name, one in (("log", fit.real), ("virtual run with these costs", fit.virtual)):
            rows.append((f"{name}: seconds per update", one.seconds_per_update, "s", ""))
            rows.append((f"{name}: gradients per second", one.gradients_per_s, "1/s", "applied"))
            rows.append((f"{name}: mean staleness", one.mean_staleness, "updates", ""))
        for name, share in fit.differences.items():
            rows.append((f"virtual run beside the log: {_SAID[name]}", 100 * share, "%", "how well the fit repeats the log"))
        rows.append(("distance of the two staleness distributions", fit.staleness_distance, "", "Kolmogorov-Smirnov, 0 to 1"))
    columns = columns_of("what | value | unit | from")
    note = _misfit(fit) or ("" if fit.differences else "The log is too short to be compared with a virtual run.")
    return Table("costs", "Costs of the log, and a virtual run with them beside it", columns, tuple(rows), note)


def _misfit(fit: Fit) -> str:
    """Describe how the fit differs from its log; "" = hardly."""
    far = [f"{_SAID[name]} {100 * share:+.0f} %" for name, share in fit.differences.items() if abs(share) > _CLOSE]
    return f"The fit does not repeat the log ({', '.join(far)}): predictions may be as far off." if far else ""


def _draw(run: Run, found: Collecting, choices: Choices, asynchrony: Asynchrony, points: list[Point]) -> tuple[Drawing, ...]:
    from mpisgd.plan import figures

    title = f"Plan from {about.label(run)}"
    logged = arrivals.collected(run) if arrivals.synchronous(run) else None
    return (
        Drawing(
            "updates",
            "Seconds per update, N of λ gradients [Chen16 Fig. 4]",
            figures.seconds_per_update(title, found, logged),
            "",
        ),
        Drawing("backup", "Estimated time to the target over b [Chen16 Fig. 6]", figures.time_to_target(title, choices), ""),
        Drawing("softsync", "Throughput and staleness over n", figures.throughput_over_n(title, asynchrony), ""),
        Drawing("shards", "Throughput over shards", figures.throughput_over_shards(title, points), ""),
    )
