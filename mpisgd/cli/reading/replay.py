"""`mpisgd replay RUN`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from mpisgd.base.errors import EXIT_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from mpisgd.replay.checks import trust_table
    from mpisgd.replay.checks.record import Row

_PROGRESS_S = 5.0


@dataclass(frozen=True)
class Options:
    """Check a run's log, make the run again in the recorded order, and compare all rows, evaluations and last weights.

    On the CPU, with the same libraries, all bits are the same. Otherwise the log's first other row is named, or the largest
    difference and its place. A virtual run is also simulated again, and all seconds compared. A table tells the proved, the checked
    and the trusted. Exit status 0: the same; 1: not; 2: no readable run or log.
    """

    run: tyro.conf.Positional[Path]
    """The run's directory, e.g. results/run; an unfinished run, as far as its log goes."""
    until: int | None = None
    """Stop once all shards are at this clock, and describe their weights there."""
    shard: int | None = None
    """Print this shard's gradients: clock, timestamp, staleness, recorded loss, recomputed loss."""
    learner: int | None = None
    """Print this learner's gradients."""
    check: bool = False
    """Print nothing; the exit status tells."""
    evaluations: Literal["all", "last", "none"] = "all"
    """Evaluate these snapshots again."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: compute on a GPU as the run did; bit for bit, if --deterministic."""
    tolerance: float | None = None
    """Allowed difference of recomputed weights, as a share of the weights' way; default: 0, or 0.05 if the run computed on a
    GPU."""
    data_dir: str | None = None
    """Directory of data files, if not the run's."""
    init_from: str = ""
    """Initial weights of the run, if moved since."""
    model: str = ""
    """package.module:factory of the user's own model, as in `train`."""
    data: str = ""
    """package.module:factory of the user's own data."""
    loss: str = ""
    """package.module:callable, the user's own loss, or a function of torch.nn.functional."""
    step: str = ""
    """package.module:function, the user's own step."""
    protocol: str = ""
    """package.module:Class, the user's own protocol."""
    schedule: str = ""
    """package.module:function, the user's own schedule of the learning rate."""
    trust: bool = False
    """Import and call all code that the run names, not only the options' code."""


def main(argv: list[str]) -> int:
    options = tyro.cli(Options, args=argv, prog="mpisgd replay")
    from mpisgd.job.user_code import NAMED
    from mpisgd.records.log.reader import Run
    from mpisgd.replay import replay

    run = Run(options.run)
    _require("shard", options.shard, run.shards)
    _require("learner", options.learner, run.lambda_)
    printer = _Printer(options)
    proof = replay(
        options.run,
        until=options.until,
        tolerance=options.tolerance,
        data_dir=options.data_dir,
        init_from=options.init_from,
        named={part: getattr(options, part) for part in NAMED},
        trust=options.trust,
        evaluations=options.evaluations,
        device=options.device,
        on_row=printer.print_row,
        on_push=printer.tell,
    )
    if not options.check:
        *lines, result = proof.lines()
        print(*lines, sep="\n")
        if proof.holds and options.until is None:
            _print_table(proof.claims)
        print(result)
    return EXIT_OK if proof.holds else EXIT_FAILED


def _print_table(rows: trust_table.Table) -> None:
    """Print the claims, as wide as the terminal, or 132 characters."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for heading in ("", "proved", "checked", "on trust"):
        table.add_column(heading, overflow="fold")
    for where, *columns in rows:
        table.add_row(where, *(", ".join(names) for names in columns))
    Console(width=None if sys.stdout.isatty() else 132, highlight=False, markup=False).print(table)


def _require(name: str, number: int | None, count: int) -> None:
    if number is not None and not 0 <= number < count:
        raise ConfigError(f"{name} = {number}: expected 0 to {count - 1}")


class _Printer:
    """Requested gradients on standard output, progress on standard error."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rows = not options.check and (options.shard is not None or options.learner is not None)
        self._told = 0
        self._next_s = time.monotonic() + _PROGRESS_S
        if self._rows:
            print(f"{'shard':>5} {'row':>7} {'clock':>7} {'timestamp':>9} {'staleness':>9} {'learner':>7} {'batch':>7}", end="")
            print(f" {'verdict':>7} {'loss':>13} {'recomputed':>13}")

    def print_row(self, number: int, row: Row, loss: float) -> None:
        options = self._options
        if self._rows and options.shard in (None, row.shard) and options.learner in (None, row.learner_id):
            self._print_row(number, row, loss)

    def tell(self, shard: int, row: int) -> None:
        self._told += 1
        if not self._options.check and time.monotonic() > self._next_s:
            print(f"shard {shard} is at row {row:,} of pushes; {self._told:,} rows so far", file=sys.stderr, flush=True)
            self._next_s = time.monotonic() + _PROGRESS_S

    def _print_row(self, number: int, row: Row, loss: float) -> None:
        from mpisgd.replay.checks.finding import same
        from mpisgd.rules.verdict import Kind

        mark = "" if same(loss, row.loss) else "  other"
        print(
            f"{row.shard:>5} {number:>7} {row.clock:>7} {row.timestamp:>9} {row.staleness:>9} {row.learner_id:>7} {row.seq:>7}",
            end="",
        )
        print(f" {Kind(row.verdict).name:>7} {row.loss:>13.9g} {loss:>13.9g}{mark}")
