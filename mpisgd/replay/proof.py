"""Result of a replay, also in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mpisgd.replay.checks.finding import Finding
from mpisgd.replay.claims import Table, table
from mpisgd.replay.difference import Difference

_LAST_BITS = 1e-3
"""Losses that differ by less may be of the same run, computed by other kernels."""


class Waypoint(NamedTuple):
    """A shard when it had come to the clock that was asked for."""

    shard: int
    clock: int
    crc32: int
    """CRC-32 of the bytes of the slice of theta."""
    norm: float
    """L2 norm of that slice."""
    mean_loss: float
    """Mean loss of the update that made this clock, recomputed; NaN at clock 0."""
    recorded_mean_loss: float

    def __str__(self) -> str:
        return (
            f"shard {self.shard} at clock {self.clock}: crc32 {self.crc32:08x}, norm {self.norm:.9g},"
            f" mean loss {self.mean_loss:.9g}, recorded {self.recorded_mean_loss:.9g}"
        )


@dataclass
class Proof:
    """Result of a replay, compared with what the run left.

    Attributes:
        run: the protocol and sizes, in words.
        tolerance: share of the way of weights, and of a loss, by which recomputed ones may differ; 0 = bit for bit.
        why_tolerant: why it is not 0 by itself.
        finding: the first place where the log cannot be true; what is found before anything is computed ends the replay.
        clocks: how far each shard came; `gradients` were recomputed for it, in `seconds`.
        other_losses: gradients whose recomputed loss is another than the recorded one, by `largest_loss` at most.
        differences: of theta and, where the run kept it, thetabar; empty where there was nothing to compare with, for
            `nothing_to_compare`.
        waypoints: the weights at the clock that was asked for.
        notes: what may explain a difference.
        seams: how attempts of the run go on from each other, and what else is to be said.
        evaluations: rows that were evaluated again; `which`: of which snapshots.
        simulated: a virtual run was simulated again; else, of a virtual one, `not_simulated` says why not.
        computed: gradients were computed, in the run and again.
        finished: the run has ended and left its weights.
        batch: it is a batch optimisation.
        commands: whose commands were logged.
        metrics: names of those that evaluations of an own step have.
        columns: of `pushes`.
    """

    path: Path
    run: str
    threads: int
    tolerance: float = 0.0
    why_tolerant: str = ""
    finding: Finding | None = None
    clocks: tuple[int, ...] = ()
    gradients: int = 0
    seconds: float = 0.0
    parameters: int = 0
    other_losses: int = 0
    largest_loss: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    nothing_to_compare: str = ""
    waypoints: list[Waypoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seams: list[str] = field(default_factory=list)
    evaluations: int = 0
    which: str = "all"
    simulated: bool = False
    not_simulated: str = ""
    computed: bool = True
    finished: bool = True
    batch: bool = False
    commands: bool = False
    metrics: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def find(self, finding: Finding) -> None:
        """Only the first place is evidence: what comes after it follows from it."""
        if self.finding is None:
            self.finding = finding

    @property
    def claims(self) -> Table:
        """What is proved, what only checked, and what is taken on trust."""
        how = {"computed": self.computed, "simulated": self.simulated, "finished": self.finished}
        of = {"batch": self.batch, "commands": self.commands}
        return table(**how, **of, evaluations=self.which, metrics=self.metrics, columns=self.columns)

    @property
    def holds(self) -> bool:
        """Whether the log proves what the run left."""
        return self.finding is None and all(each.within(self.tolerance) for each in self.differences)

    @property
    def reason(self) -> str:
        """Reason why it does not hold, in one line; "" where it does."""
        if self.finding is not None:
            return str(self.finding)
        return "; ".join(str(each) for each in self.differences if not each.within(self.tolerance))

    def lines(self) -> list[str]:
        """The account, a line each, the result last."""
        lines = [f"{self.path}: {self.run}"]
        if self.clocks:
            clocks = " and ".join(f"{clock:,}" for clock in self.clocks)
            evaluated = f", {self.evaluations:,} evaluations" if self.evaluations else ""
            lines.append(
                f"replayed: {self.gradients:,} gradients, {clocks} updates{evaluated}, {self.seconds:.1f} s with {self.threads}"
                " thread(s)"
            )
        if self.simulated:
            lines.append("simulated again: the whole virtual job")
        if self.not_simulated:
            lines.append(f"the virtual job was not simulated again: {self.not_simulated}")
        lines += self.seams
        lines += [str(waypoint) for waypoint in self.waypoints]
        if self.why_tolerant:
            lines.append(f"within a tolerance of {self.tolerance:g} only: {self.why_tolerant}")
        if self.nothing_to_compare:
            lines.append(self.nothing_to_compare)
        return [*lines, *self._result()]

    def _result(self) -> list[str]:
        names = " and ".join(each.name for each in self.differences)
        if self.holds and not self.differences:
            return ["the log is true as far as it goes"]
        if self.holds and not any(each.elements for each in self.differences):
            return [f"identical: {names}, {self.parameters:,} parameters, bit for bit"]
        result = []
        if self.finding is not None:
            result.append(f"{'first disagreement' if self.clocks else 'the log cannot be true'}: {self.finding}")
        if self.other_losses:
            result.append(
                f"{self.other_losses:,} gradients have another loss than the log says, by {self.largest_loss:.3e} at most"
            )
        result += [str(each) for each in self.differences if each.elements]
        if self.holds:
            return [*result, f"the same within the tolerance: {names}, {self.parameters:,} parameters"]
        if 0 < self.largest_loss < _LAST_BITS:
            result.append("so small a difference may come from another kind of CPU: see --tolerance")
        return [*result, *self.notes, "not the same"]
