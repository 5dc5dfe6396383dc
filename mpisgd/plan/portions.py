"""Choice of the portion of a batch optimisation, mu: what a portion costs beside computing, against who is waited for in the end.

Of small portions each costs the way to the coordinator and a push; of large ones the slowest is waited for, or done twice [Dean12
4.2]. What both cost is in the log, of portions of one size; evaluations with others are dealt here, by the rules of a run
(`rules/dealing.py`), to learners that take as long for a sample as those of the log.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.base.errors import DataError
from mpisgd.base.streams import Domain, stream
from mpisgd.data.sampling import PortionSampling
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Outcome
from mpisgd.report.writing import say, tell, terminal, write
from mpisgd.rules.dealing import Dealing

#: Portions of each learner, at most, and of all evaluations of one size.
_MOST_EACH, _MOST = 256, 10_000
#: Evaluations of one size: at most, at least.
_EVALUATIONS = (20, 3)
#: Sizes whose seconds differ by less are as good: the largest is taken, whose messages are the fewest.
_AS_GOOD = 0.02


@dataclass(frozen=True)
class Costs:
    """Seconds, medians of a log. `sample_s[l]`: of a sample of each portion that learner l computed, float64, (portions,).

    `asking_s`: NEXT and DEAL, both ways. `pulling_s`: once an evaluation. `pushing_s`: of which each shard is busy for `shard_s`.
    `ending_s`: from the last push to the end of the evaluation; `between_s`: from there to the next one.
    """

    sample_s: tuple[np.ndarray, ...]
    asking_s: float
    pulling_s: float
    pushing_s: float
    shard_s: float
    ending_s: float
    between_s: float

    @property
    def free_s(self) -> float:
        """Seconds of a sample of all learners together, where nobody ever waits."""
        return float(1 / sum(1 / each.mean() for each in self.sample_s))


@dataclass(frozen=True)
class Choice:
    """Portions of `mu` samples: predicted mean seconds of an evaluation, with the run's own rules and without duplicates; the least
    that its computing alone would take is `of_free` of the first."""

    mu: int
    portions: int
    evaluation_s: float
    once_s: float
    of_free: float


@dataclass(frozen=True)
class PortionPlan:
    costs: Costs
    choices: tuple[Choice, ...]
    best: Choice
    logged_s: float
    """Mean seconds of an evaluation in the log, and predicted for its own mu."""
    repeated_s: float
    tables: tuple[Table, ...]
    advice: str


def plan_portions(run: Run, out: Path | None = None, console: Console | None = None) -> PortionPlan:
    """Choose mu for a run of sandblaster; written to `out`, by default `<run>/plan`.

    Raises DataError where its log holds no whole iteration; ConfigError where `out` cannot be written.
    """
    console = console or terminal()
    sampling = PortionSampling(
        run.environment["train_samples"], run.config["mu"], run.config["protocol"]["share"], run.config["seed"]
    )
    costs, own = measured(run), run.config["protocol"]
    iterations = run.of_coordinator("iterations")
    logged_s = float(iterations["evaluating_s"].sum() / iterations["evaluations"].sum())
    repeated_s = evaluation_s(costs, sampling.samples, sampling.mu, own)
    choices = tuple(_choice(costs, sampling.samples, mu, own) for mu in _sizes(sampling.samples, run.lambda_))
    least_s = min(each.evaluation_s for each in choices)
    best = next(each for each in choices if each.evaluation_s <= (1 + _AS_GOOD) * least_s)
    advice = (
        f"Portions: mu = {best.mu}, {best.portions} of them, {best.evaluation_s:.4g} s an evaluation; the run had"
        f" mu = {sampling.mu} and {logged_s:.4g} s."
    )
    tables = (_costs_table(costs, logged_s, repeated_s), _table(choices, best, run.lambda_))
    for table in tables:
        table.print_to(console)
        say(console, "")
    say(console, advice, "bold")
    folder = out or run.path / "plan"
    write(folder / "plan.md", f"Plan from {run.name}", [advice], tables, ())
    tell(console, folder, ())
    return PortionPlan(costs, choices, best, logged_s, repeated_s, tables, advice)


def measured(run: Run) -> Costs:
    """The costs of a log. Raises DataError where it holds no whole iteration, or no portion of one of the learners."""
    rows, iterations = run.of_coordinator("portions"), run.of_coordinator("iterations")
    if not len(iterations) or not len(rows):
        raise DataError(f"the log of {run.path} holds no whole iteration: there is nothing to plan from")
    rows = rows[np.isfinite(rows["done_s"]) & (rows["samples"] > 0) & (rows["outcome"] != Outcome.LOST)]
    rows = rows[np.lexsort((rows["dealt_s"], rows["learner_id"]))]
    busy_s = rows["compute_s"] + rows["delay_s"]
    sample_s = tuple((busy_s / rows["samples"])[rows["learner_id"] == each] for each in range(run.lambda_))
    if not all(map(len, sample_s)):
        raise DataError(f"the log of {run.path} holds no portion of learner {[len(each) for each in sample_s].index(0)}")
    first = np.ones(len(rows), bool)
    first[1:] = (rows["learner_id"][1:] != rows["learner_id"][:-1]) | (rows["clock"][1:] != rows["clock"][:-1])
    beside_s = rows["done_s"] - rows["dealt_s"] - busy_s
    asking_s = _median(beside_s[~first], 0.0)
    gap_s, pushed = rows["dealt_s"][1:] - rows["done_s"][:-1], rows["outcome"][:-1] == Outcome.COUNTED
    gap_s = gap_s[~first[1:] & pushed & (rows["seq"][1:] != rows["seq"][:-1])]
    nobody_s = float(np.quantile(gap_s, 0.05)) if len(gap_s) else 0.0
    pushing_s = max(0.0, nobody_s - asking_s)
    counted = rows[rows["outcome"] == Outcome.COUNTED]
    ends = run.updates[run.updates["shard"] == 0]
    last_s = np.array([counted["done_s"][counted["clock"] == clock].max(initial=0.0) for clock in range(len(ends))])
    evaluations = float(iterations["evaluations"].sum())
    return Costs(
        sample_s,
        asking_s,
        max(0.0, _median(beside_s[first], 0.0) - asking_s),
        pushing_s,
        pushing_s / run.shards,
        max(0.0, _median(ends["time_s"] - last_s, 0.0) - nobody_s),
        float(iterations["commanding_s"].sum()) / evaluations,
    )


def _median(values: np.ndarray, otherwise: float) -> float:
    return float(np.median(values)) if len(values) else otherwise


def _sizes(samples: int, lambda_: int) -> list[int]:
    """From one portion for each learner down, by half."""
    sizes = [max(1, math.ceil(samples / lambda_))]
    while sizes[-1] > 1 and samples / sizes[-1] < _MOST_EACH * lambda_ / 2:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes


def _choice(costs: Costs, samples: int, mu: int, options: dict[str, Any]) -> Choice:
    seconds = evaluation_s(costs, samples, mu, options)
    once_s = evaluation_s(costs, samples, mu, {**options, "duplicates": False})
    return Choice(mu, math.ceil(samples / mu), seconds, once_s, costs.free_s * samples / seconds)


def evaluation_s(costs: Costs, samples: int, mu: int, options: dict[str, Any]) -> float:
    """Mean seconds of an evaluation of so many samples in portions of `mu`; `options`: those of the protocol."""
    portions = math.ceil(samples / mu)
    most, least = _EVALUATIONS
    evaluations = max(least, min(most, _MOST // portions))
    dealer = _Dealer(costs, samples, mu, options)
    return sum(dealer.evaluate() for _ in range(evaluations)) / evaluations


class _Dealer:
    """Evaluations, one after the other: events are learners that ask."""

    def __init__(self, costs: Costs, samples: int, mu: int, options: dict[str, Any]) -> None:
        self._costs = costs
        self._sizes = [min(mu, samples - at) for at in range(0, samples, mu)]
        self._every = options["push_every"]
        self._duplicates = options["duplicates"]
        self._ordered = options["order"] == "portions"
        self._ahead = 2 * len(costs.sample_s) if self._ordered else math.inf
        self._draws = stream(Domain.COMPUTE, 1, 0, 0)
        self._busy: dict[int, float] = dict.fromkeys(range(len(costs.sample_s)), 0.0)
        """Until when each learner is, with what does not count any more."""
        self._now_s = 0.0

    def evaluate(self) -> float:
        costs, start_s = self._costs, self._now_s
        dealing = Dealing(len(self._sizes), duplicates=self._duplicates, ahead=self._ahead)
        shard_s = start_s
        events = [(max(until_s, start_s), learner_id) for learner_id, until_s in self._busy.items()]
        heapq.heapify(events)
        fresh, idle = set(self._busy), set[int]()
        has: dict[int, int] = {}
        held: dict[int, list[int]] = {}
        leaving: dict[int, list[int]] = {}
        pushed: dict[int, int] = {}
        while not dealing.complete:
            now_s, learner_id = heapq.heappop(events)
            if learner_id in has:
                portion = has.pop(learner_id)
                if dealing.done(portion, learner_id):
                    held.setdefault(learner_id, []).append(portion)
            pushed |= dict.fromkeys(leaving.pop(learner_id, ()), learner_id)
            while pushed and (portion := dealing.first if self._ordered else min(pushed)) in pushed:
                dealing.commit(portion, pushed.pop(portion))
            idle.add(learner_id)
            for asking in sorted(idle):
                mine = held.get(asking, [])
                if mine and (len(mine) >= self._every or dealing.exhausted):
                    leaving[asking] = held.pop(asking)
                    shard_s = max(shard_s, now_s) + costs.shard_s
                    until_s = max(now_s + costs.pushing_s, shard_s) + costs.asking_s
                elif (found := dealing.ask(asking)) is not None:
                    has[asking] = found
                    until_s = now_s + costs.asking_s + self._computing_s(asking, found)
                    until_s += costs.pulling_s * (asking in fresh)
                    fresh.discard(asking)
                else:
                    continue
                idle.discard(asking)
                heapq.heappush(events, (until_s, asking))
        self._busy |= {learner_id: until_s for until_s, learner_id in events}
        self._busy |= dict.fromkeys(idle, now_s)
        end_s = now_s + costs.ending_s
        self._now_s = end_s + costs.between_s
        return end_s - start_s

    def _computing_s(self, learner_id: int, portion: int) -> float:
        mine = self._costs.sample_s[learner_id]
        return float(mine[self._draws.integers(len(mine))] * self._sizes[portion])


def _costs_table(costs: Costs, logged_s: float, repeated_s: float) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            "a sample, mean over learners",
            float(np.mean([each.mean() for each in costs.sample_s])),
            "computing, and injected delays",
        ),
        ("a sample, slowest learner", float(max(each.mean() for each in costs.sample_s)), "the same"),
        ("asking for a portion", costs.asking_s, "median, without computing"),
        ("pulling", costs.pulling_s, "median, once an evaluation"),
        ("pushing", costs.pushing_s, "5 % quantile, from a result to the next portion, without asking"),
        ("ending an evaluation", costs.ending_s, "median, from the last push"),
        ("log: an evaluation", logged_s, "mean"),
        ("the same, predicted", repeated_s, f"{100 * (repeated_s / logged_s - 1):+.1f} %: how well the costs repeat the log"),
    ]
    return Table("costs", "Costs of the log", columns_of("what | seconds [s] | from"), tuple(rows))


def _table(choices: tuple[Choice, ...], best: Choice, lambda_: int) -> Table:
    rows = [
        (
            each.mu,
            each.portions,
            each.portions / lambda_,
            each.evaluation_s,
            100 * each.of_free,
            each.once_s,
            "best" if each is best else None,
        )
        for each in choices
    ]
    headings = "mu | portions | per learner :.1f | an evaluation [s] | computing [%] :.1f | without duplicates [s] | choice"
    note = (
        "Computing: of the seconds of an evaluation, what computing alone would take of all learners together. Assumed: a"
        " portion's seconds are its samples times those of a sample, drawn anew from each learner's; no learner leaves; a shard"
        f" takes one push after the other. Best: the largest within {100 * _AS_GOOD:.0f} % of the least."
    )
    return Table(
        "portions", "Seconds of an evaluation over the size of portions [Dean12 4.2]", columns_of(headings), tuple(rows), note
    )
