"""Predicted staleness and throughput of n-softsync over n, beside hardsync."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.config import Config, replace
from mpisgd.plan.costs.observe import Observed
from mpisgd.plan.costs.predict import predict
from mpisgd.protocols import HardsyncOptions, SoftsyncOptions

#: Most learners for which every n is simulated.
_EVERY = 8


@dataclass(frozen=True)
class Asynchrony:
    by_n: dict[int, Observed]
    hardsync: Observed


def asynchrony(config: Config, pushes: int) -> Asynchrony:
    """Predict each c = floor(λ/n) once."""
    lambda_ = config.virtual.learners
    by_c: dict[int, Observed] = {}
    by_n: dict[int, Observed] = {}
    for n in chosen(lambda_):
        c = lambda_ // n
        if c not in by_c:
            by_c[c] = predict(replace(config, protocol=SoftsyncOptions(n=n)), pushes)
        by_n[n] = dataclasses.replace(by_c[c], n=n)
    return Asynchrony(by_n, predict(replace(config, protocol=HardsyncOptions()), pushes))


def chosen(lambda_: int) -> list[int]:
    """Return all n among few learners, else powers of two, and n of c = 2, 1."""
    if lambda_ <= _EVERY:
        return list(range(1, lambda_ + 1))
    powers = [2**power for power in range(lambda_.bit_length()) if 2**power <= lambda_ // 2]
    return sorted({*powers, lambda_ // 2, lambda_})


def table(found: Asynchrony, lambda_: int) -> Table:
    base = found.hardsync
    labelled: list[tuple[Cell, Cell, Observed]] = [("hardsync", None, base)]
    labelled += [(f"{n}-softsync", lambda_ // n, one) for n, one in found.by_n.items()]
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            lambda_ if c is None else c,
            one.updates_per_s,
            one.gradients_per_s,
            one.gradients_per_s / base.gradients_per_s,
            one.mean_staleness,
            one.largest_staleness,
            None if one.beyond is None else 100 * one.beyond,
        )
        for name, c, one in labelled
    ]
    columns = columns_of("protocol | c | updates/s | gradients/s | times hardsync's :.3f | mean τ :.3f | max τ | τ > 2n [%] :.3f")
    note = "c gradients make one update. The same c is the same run, but for the weights and the bound 2n."
    return Table("softsync", "Predicted staleness and throughput of n-softsync [Zhang16 2.2]", columns, tuple(rows), note)
