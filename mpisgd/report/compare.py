"""Runs side by side: a table and common figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from mpisgd.analysis import about, arrivals, books, staleness, throughput, training
from mpisgd.analysis.tables import Cell, Column, Table, columns_of
from mpisgd.analysis.training import Reached, Target
from mpisgd.base.errors import ConfigError
from mpisgd.config import Part
from mpisgd.records.log.reader import Run
from mpisgd.report import seeds
from mpisgd.report.writing import Drawing, tell, terminal, write

COLUMNS = (
    "run | protocol | λ | shards | μ | epochs :.2f | error theta [%] :.2f | error thetabar [%] :.2f{more} | mean τ :.3f | max τ"
    " | dropped [%] :.2f | images/s | training [s] | per update [s] | status"
)


@dataclass(frozen=True)
class Comparison:
    table: Table
    drawings: tuple[Drawing, ...]
    files: tuple[Path, ...]


def compare(
    run_paths: Sequence[str | Path],
    out: Path,
    console: Console | None = None,
    target: Target | None = None,
) -> Comparison:
    """Print a row per run, or per group of seeds; write tables and figures to `out`.

    `target` adds a table of costs. Raises ConfigError: no run given, or `out` unwritable; DataError: no run, or a log missing or
    damaged.
    """
    if not run_paths:
        raise ConfigError("compare: 0 runs given, expected the directory of at least one")
    console = console or terminal()
    runs = [Run(path) for path in run_paths]
    names = distinct_names([run.path.resolve() for run in runs])
    more = _more(runs)
    rows = tuple(_row(run, name, more) for run, name in zip(runs, names, strict=True))
    columns = columns_of(COLUMNS.format(more="".join(f" | {each}" for each in more)))
    note = "Errors: on test data, at the last evaluation."
    groups = seeds.grouped(runs)
    tables = [Table("runs", "Runs side by side", columns, rows, note)]
    if len(groups) < len(runs):
        tables.insert(0, _over_seeds(groups, names, tables[0]))
    tables[0].print_to(console)
    if target is not None:
        tables.append(_target_table(target, runs, names, groups))
        tables[-1].print_to(console)
    drawings = _drawings(runs, names, groups)
    files = write(out / "compare.md", "Comparison", [f"{len(runs)} runs"], tables, drawings)
    tell(console, out, drawings)
    return Comparison(tables[0], drawings, tuple(files))


def _over_seeds(groups: Sequence[Sequence[int]], names: Sequence[str], each: Table) -> Table:
    (first, *columns), rows = each.columns, []
    for places in groups:
        cells = seeds.row([each.rows[at][1:] for at in places], columns)
        rows.append((seeds.name([names[at] for at in places]), len(places), *cells))
    note = f"{each.note} Runs that differ in the seed alone are one row: mean (least..largest)."
    return Table("seeds", "Runs side by side, over seeds", (first, Column("seeds"), *columns), tuple(rows), note)


def _target_table(target: Target, runs: Sequence[Run], names: Sequence[str], groups: Sequence[Sequence[int]]) -> Table:
    columns = columns_of("run | weights | reached by | epochs :.2f | updates :.0f | training [s] | exchanged [GB]")
    rows: list[tuple[Cell, ...]] = []
    for places in groups:
        name = seeds.name([names[at] for at in places])
        for averaged in (False, True):
            curves = [(runs[at], training.on_test_data(runs[at], averaged)) for at in places]
            known = [(run, curve.reached(target)) for run, curve in curves if curve is not None]
            spent = [_spent(run, reached) for run, reached in known if reached is not None]
            if known:
                numbers = seeds.row(spent, columns[3:]) if spent else (None,) * 4
                said = f"{len(spent)} of {len(known)}" if spent else "never"
                rows.append((name, "thetabar" if averaged else "theta", said, *numbers))
    note = (
        "Between two evaluations linear. Exchanged: bytes that all learners had pushed and pulled by then."
        " Of several seeds: mean (least..largest) of the runs that reached the target."
    )
    return Table("target", f"Until {target}", columns, tuple(rows), note)


def _spent(run: Run, reached: Reached) -> tuple[Cell, ...]:
    nbytes = throughput.exchanged_until(run, reached.seconds)
    return reached.epochs, reached.updates, reached.seconds, None if nbytes is None else nbytes / 1e9


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the fewest last parts that tell each path from others; equal paths share a name."""
    names = []
    for path in paths:
        others = [other for other in paths if other != path]
        for length in range(1, len(path.parts) + 1):
            if all(other.parts[-length:] != path.parts[-length:] for other in others):
                break
        names.append("/".join(path.parts[-length:]))
    return names


def _more(runs: Sequence[Run]) -> list[str]:
    """Name further columns: loss if a run has no error, and own metrics."""
    curves = [training.on_test_data(run) for run in runs]
    loss = any(curve is not None and not curve.has_error for curve in curves)
    names = dict.fromkeys(name for curve in curves if curve is not None for name in curve.metrics)
    return [*(["loss"] * loss), *names]


def _row(run: Run, name: str, more: Sequence[str]) -> tuple[Cell, ...]:
    state = about.status(run)
    rate, tau, accounts = throughput.rates(run)[0], staleness.overall(run), run.books()
    pushed = sum(book.pushed for book in accounts)
    dropped = 100 * sum(book.dropped for book in accounts) / pushed if pushed else None
    finals = [training.on_test_data(run, averaged) for averaged in (False, True)]
    theta = finals[0]
    last = {} if theta is None else {"loss": float(theta.loss[-1]), **{key: float(at[-1]) for key, at in theta.metrics.items()}}
    unbalanced = state.ended and bool(books.imbalances(run))
    return (
        name,
        about.protocol_label(run),
        run.lambda_,
        run.shards,
        run.config.get("mu"),
        about.epochs_reached(run),
        *(None if curve is None or not curve.has_error else 100 * curve.final for curve in finals),
        *(last.get(each) for each in more),
        tau.mean,
        tau.maximum,
        dropped,
        rate.samples_per_s,
        rate.seconds,
        rate.seconds_per_update,
        ("finished" if state.done else "UNFINISHED")
        + (", DIVERGED" if state.diverged else "")
        + (", BOOKS DO NOT BALANCE" if unbalanced else ""),
    )


def _drawings(runs: Sequence[Run], names: Sequence[str], groups: Sequence[Sequence[int]]) -> tuple[Drawing, ...]:
    from mpisgd.report import figures

    title = _title(names)
    named = [([runs[at] for at in places], [names[at] for at in places]) for places in groups]
    some = [(_legend(alike, own), alike) for alike, own in named]
    means = [(name, seeds.curves([training.curves(run) for run in alike])) for name, alike in some]
    curves = [(name, [curve for curve in found if curve.part is Part.TEST]) for name, found in means]
    taus = [(name, staleness.summed([staleness.histogram(run) for run in alike])) for name, alike in some]
    collected = [(name, seeds.collected([arrivals.collected(run) for run in alike])) for name, alike in some]
    synchronous = _title([name for alike, own in named for name in own if arrivals.synchronous(alike[0])])
    return (
        *figures.errors("Test error", f"{title}\ntest error", curves, "no run was evaluated"),
        Drawing(
            "staleness_distribution",
            "Distribution of the staleness of applied gradients [Zhang16 Fig. 1]",
            figures.staleness_distribution(title, taus, None),
            "no gradient was applied",
        ),
        Drawing(
            "collect",
            "Mean and median time to collect k gradients [Chen16 Fig. 4]",
            figures.collect(synchronous, collected, int(np.max([run.lambda_ for run in runs])), None),
            "no run with a synchronous protocol",
        ),
    )


def _title(names: Sequence[str]) -> str:
    return "Comparison of " + (names[0] if len(names) == 1 else f"{len(names)} runs")


def _legend(alike: Sequence[Run], names: Sequence[str]) -> str:
    run, several = alike[0], f" · {len(alike)} seeds" if len(alike) > 1 else ""
    return f"{seeds.name(names)} ({about.protocol_label(run)} · λ={run.lambda_} · μ={run.config.get('mu', '?')}{several})"
