"""End of a run on rank 0: join the logs, check the books, say DONE (DESIGN 4, laws 4 and 8; DESIGN 6)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mpisgd.base.errors import DataError, ProtocolError
from mpisgd.config import Config, footprint, kind_of
from mpisgd.job import parts
from mpisgd.protocols import SandblasterOptions
from mpisgd.records import directory
from mpisgd.records.log import schema, sums
from mpisgd.records.log.progress import in_words, loss_of
from mpisgd.records.log.rank_file import read_sums
from mpisgd.records.log.reader import Books, Run
from mpisgd.records.log.schema import Verdict
from mpisgd.serving.divergence import has_diverged
from mpisgd.shard import Shard
from mpisgd.update import schedule
from mpisgd.vectors.flat import is_finite

_MOST_INITIAL = 0.05
"""Share of initial weights in thetabar from which a run says so."""

_READ_NBYTES_PER_S = 10e6
"""Least bytes of a log that a shard checks in a second; usually 100 MB."""


@dataclass(frozen=True)
class Outcome:
    """End of a run, the same on every rank; clocks and samples of each shard."""

    path: Path
    clocks: tuple[int, ...]
    samples: tuple[int, ...]
    diverged: bool
    """Something was not finite, or the logged training loss is far above its start for long (`divergence`)."""
    training_s: float
    """From the start barrier to the last update of shard 0."""


def headline(config: Config, lambda_: int, ranks: int, parameters: int, train_samples: int) -> str:
    learners = f"{lambda_:,} learners"
    if config.in_teams:
        learners = f"{ranks:,} learners in {lambda_:,} team{'s' * (lambda_ > 1)}"
    elif config.in_groups:
        learners += f" in groups of {config.group_size} ranks"
    options = ", ".join(f"{key} = {value}" for key, value in vars(config.protocol).items() if value is not None)
    copies = footprint.of_compensation(lambda_, parameters, config.shards)
    own_steps = f" x {config.local_steps} own steps" if config.local_steps else ""
    own_steps += f" x {config.accumulation}" if config.accumulation > 1 else ""
    return (
        f"{kind_of(config.protocol)}{f' ({options})' if options else ''}, {learners}{own_steps} x {config.mu} samples,"
        f" {config.shards} shard{'s' * (config.shards > 1)}, {parameters:,} parameters, {train_samples:,} training samples"
        f"{f', delay compensation: {copies}' if config.compensation > 0 else ''}"
        f"{_history(config, parameters)}"
        f"{_averaging(config, lambda_, ranks, train_samples)}"
    )


def _history(config: Config, parameters: int) -> str:
    options = config.protocol
    if not isinstance(options, SandblasterOptions):
        return ""
    return f", {footprint.of_history(options.history, parameters, config.shards)}"


def _averaging(config: Config, lambda_: int, ranks: int, train_samples: int) -> str:
    """Return a warning of a thetabar near the initial weights, after few updates."""
    if config.averaging == 0 or config.averaging_bias_correction:
        return ""
    of_each = parts.gradients_per_update(config.protocol.make(lambda_), lambda_, ranks)
    updates = parts.run_samples(config, train_samples) / schedule.samples_per_update(config, of_each)
    left = config.averaging**updates
    if left < _MOST_INITIAL:
        return ""
    return f", thetabar ends as {100 * left:.0f} % the initial weights (averaging_bias_correction leaves this part out)"


def blown_up(server: Shard) -> bool:
    """Return whether anything was not finite; a virtual cluster may have no weights."""
    weights = server.update.weights
    return server.finiteness.diverged or (isinstance(weights, Tensor) and not is_finite(weights))


def account(
    clock: int = 0,
    samples: int = 0,
    diverged: bool = False,
    training_s: float = 0.0,
    refused: int = 0,
    most: int = -1,
    interrupted: bool = False,
) -> np.ndarray:
    """Return a rank's account, int64 (7,); `most`: sender of most refused messages."""
    return np.array([clock, samples, diverged, training_s * 1e9, refused, most, interrupted], np.int64)


def accounts_of(wire: Any, said: np.ndarray, shard_ranks: Sequence[int]) -> tuple[bool, np.ndarray]:
    """Tell every rank whether any was interrupted, and shards' accounts."""

    def decide(every: np.ndarray) -> np.ndarray:
        return np.append(every[list(shard_ranks)], every[:, -1].any())

    told = wire.settle(said, decide, len(shard_ranks) * len(said) + 1)
    return bool(told[-1]), told[:-1].reshape(len(shard_ranks), len(said))


def end_of(wire: Any, diverged: bool, given_up: Iterable[int], size: int) -> tuple[bool, list[int]]:
    """Tell every rank whether the run diverged, and the ranks given up."""
    bits = np.zeros(-(-(1 + size) // 64) * 64, bool)
    bits[0], bits[[1 + rank for rank in given_up]] = diverged, True
    known = np.packbits(bits).view(np.int64)
    told = wire.settle(np.zeros(0, np.int64), lambda _: known, len(known))
    first, *given = np.unpackbits(told.view(np.uint8))[: 1 + size].tolist()
    return bool(first), [rank for rank, is_given in enumerate(given) if is_given]


def refusals(accounts: np.ndarray, who: Callable[[int], str]) -> str:
    refused = int(accounts[:, 4].sum())
    if not refused:
        return ""
    rank = int(accounts[accounts[:, 4].argmax(), 5])
    return (
        f"{refused:,} impossible message(s) were refused, most of rank {rank} ({who(rank)}): a bug, or a foreign"
        " program; the run left these out, is complete and saved (events of kind REFUSED in the log)"
    )


def outcome_of(path: Path, accounts: np.ndarray) -> Outcome:
    return Outcome(
        path=path,
        clocks=tuple(int(clock) for clock in accounts[:, 0]),
        samples=tuple(int(samples) for samples in accounts[:, 1]),
        diverged=bool(accounts[:, 2].any()),
        training_s=float(accounts[0, 3]) * 1e-9,
    )


def finish(outcome: Outcome, log: Run | None) -> Outcome:
    """Join the logs, and mark the run DONE; return the outcome, with divergence by the log.

    Raises ProtocolError if earlier layouts lack updates, DataError for a missing log file.
    """
    if log is not None:
        directory.join(log)
        check_layouts(log)
        outcome = dataclasses.replace(outcome, diverged=outcome.diverged or has_diverged(applied_losses(log)))
    contents: dict[str, Any] = {
        "clock": list(outcome.clocks),
        "samples": list(outcome.samples),
        "diverged": outcome.diverged,
        "seconds": outcome.training_s,
        "books_balanced": True,
    }
    for name, file in schema.SUMMED.items():
        if (outcome.path / file).is_file():
            contents[name] = sums.of_file(outcome.path / file)
    if log is not None:
        paths = {part.path for each in directory.joined(log) for part in each.parts}
        contents["files"] = {path.name: read_sums(path) for path in sorted(paths)}
    directory.mark_done(outcome.path, contents)
    return outcome


def finished(run: Path) -> Outcome | None:
    """Return the run's outcome, if DONE. Raises DataError if damaged."""
    done = Run(run).done
    if done is None:
        return None
    try:
        return Outcome(run, tuple(done["clock"]), tuple(done["samples"]), bool(done["diverged"]), float(done["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{run / schema.DONE} is damaged: {error}") from error


def applied_losses(log: Run) -> np.ndarray:
    """Return losses of gradients applied by shard 0, in all layouts: float32 (gradients,).

    Rows are read in pieces: there may be 10^8.
    """
    parts = [*(part for layout in log.earlier for part in layout.rows[0]), *log.parts_of(0)]
    found = [rows["loss"][rows["verdict"] == Verdict.APPLY].astype(np.float32) for part in parts for rows in part.chunks("pushes")]
    return np.concatenate([np.empty(0, np.float32), *found])


def check_books(log: Run, shard: int, clock: int) -> None:
    """Check law 4. Raises ProtocolError if account or log disagree with the clock."""
    summary, counts, books = log.ended(shard)
    updates = counts.updates.rows
    if not books.balanced or summary["received"] != books.pushed or updates != clock - log.begins.clock:
        raise ProtocolError(
            f"the books of shard {shard} do not balance: {_sum(books)};"
            f" received {summary['received']}, {updates} logged updates at clock {clock}"
        )


def all_checked(wire: Any, path: Path) -> None:
    busy_s = _reading_s(path) if wire.rank == 0 else 0.0  # a shard that reads a long log is not lost
    nothing = np.zeros(1, np.int64)
    wire.settle(nothing, lambda _: nothing, 1, busy_s)


def _reading_s(path: Path) -> float:
    return max((file.stat().st_size for file in path.glob("shard-*.h5")), default=0) / _READ_NBYTES_PER_S


def check_layouts(log: Run) -> None:
    for layout in log.earlier:
        for shard, attempts in enumerate(layout.rows):
            clock, found, follow = layout.first_clock, 0, True
            for rows in (rows for part in attempts for rows in part.chunks("updates")):
                follow &= bool(
                    (rows["clock"] == np.arange(clock + 1, clock + 1 + len(rows))).all() and (rows["shard"] == shard).all()
                )
                clock, found = clock + len(rows), found + len(rows)
            if not follow or clock != layout.last_clock:
                raise ProtocolError(
                    f"shard {shard} of {layout.shards}, before slices were cut anew at clock {layout.last_clock}, has {found}"
                    f" logged updates after clock {layout.first_clock}"
                )


def _sum(books: Books) -> str:
    return (
        f"pushed {books.pushed} = applied {books.applied} + dropped {books.dropped}"
        f" + rejected {books.rejected} + in flight {books.in_flight}"
    )


def farewell(outcome: Outcome, log: Run | None, *, batch: bool = False) -> str:
    ending = "diverged" if outcome.diverged else "finished"
    rate = outcome.samples[0] / max(outcome.training_s, 1e-9)
    counted = f"{outcome.clocks[0]:,} {'evaluations' if batch else 'updates'}"
    text = f"mpisgd: {ending}: {counted} in {outcome.training_s:.1f} s, {rate:.0f} samples/s"
    if log is None:
        return text
    if (log.events["kind"] == schema.Event.ENOUGH).any():
        text += ", stopped early"
    last = log.evaluations[(log.evaluations["train"] == 0) & (log.evaluations["averaged"] == 0)]
    if len(last) and not math.isnan(last["loss"][-1]):
        text += f", test {in_words(last[-1], loss_of(log.config), schema.extra('evaluations', last.dtype))}"
    return f"{text}; see: mpisgd report {outcome.path}"
