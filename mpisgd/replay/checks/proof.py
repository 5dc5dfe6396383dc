"""Result of a replay, also in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from mpisgd.replay.checks.difference import Difference
from mpisgd.replay.checks.finding import Finding
from mpisgd.replay.checks.trust_table import Table, table

Which = Literal["all", "last", "none"]

_LAST_BITS = 1e-3
"""Smaller differences of losses may come from other kernels."""


class Waypoint(NamedTuple):
    """A shard at the requested clock."""

    shard: int
    clock: int
    crc32: int
    """CRC-32 of theta's slice; `norm`: its L2 norm."""
    norm: float
    mean_loss: float
    """Recomputed, of the update to this clock; NaN at clock 0."""
    recorded_mean_loss: float

    def __str__(self) -> str:
        return (
            f"shard {self.shard} at clock {self.clock}: crc32 {self.crc32:08x}, norm {self.norm:.9g},"
            f" mean loss {self.mean_loss:.9g}, recorded {self.recorded_mean_loss:.9g}"
        )


@dataclass
class Proof:
    """Result of a replay.

    Attributes:
        tolerance: allowed share of the way of weights, and of a loss; 0 = bit for bit.
        finding: first impossible place in the log.
        clocks: reached by each shard, with `gradients` recomputed in `seconds`.
        other_losses: gradients with another loss than recorded, by `largest_loss` at most.
        differences: of theta and any thetabar; if empty, `nothing_to_compare` tells why.
        seams: how attempts continue each other, and other remarks.
        evaluations: rows evaluated again, of snapshots `which`.
        simulated: a virtual run was simulated again; else `not_simulated` tells why.
        computed: gradients were computed, in the run and again.
        commands: commands of a `batch` optimisation were logged.
    """

    path: Path
    run: str
    threads: int
    tolerance: float = 0.0
    why_tolerant: str = ""
    on_gpu: bool = False
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
    which: Which = "all"
    simulated: bool = False
    not_simulated: str = ""
    computed: bool = True
    finished: bool = True
    batch: bool = False
    commands: bool = False
    metrics: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def find(self, finding: Finding) -> None:
        """Keep only the first finding: others follow from it."""
        if self.finding is None:
            self.finding = finding

    @property
    def claims(self) -> Table:
        how = {"computed": self.computed, "simulated": self.simulated, "finished": self.finished}
        of = {"batch": self.batch, "commands": self.commands}
        return table(**how, **of, evaluations=self.which, metrics=self.metrics, columns=self.columns)

    @property
    def holds(self) -> bool:
        """The log proves the run's results."""
        return self.finding is None and all(each.within(self.tolerance) for each in self.differences)

    @property
    def reason(self) -> str:
        """Reason of failure; "" = none."""
        if self.finding is not None:
            return str(self.finding)
        return "; ".join(str(each) for each in self.differences if not each.within(self.tolerance))

    def lines(self) -> list[str]:
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
            result.append("a difference this small may come from another kind of CPU: see --tolerance")
        return [*result, *self.notes, "not the same"]
