"""Choice of H, own steps between two exchanges [DiLoCo].

Choose the fewest to hide enough of the exchanges in virtual runs: with more, learners drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.config import Config, compatibility, footprint, replace
from mpisgd.plan.costs.bounds import mini_batch_s
from mpisgd.plan.costs.predict import predict
from mpisgd.plan.shards import ENOUGH

#: Most own steps to try.
_MOST = 4096


@dataclass(frozen=True)
class Choice:
    """Throughput at H own steps.

    `samples_per_s`: applied. `of_free`: share of learners that never exchange; above 1 if fast learners push more than their share.
    `nbytes_per_sample`: both ways.
    """

    local_steps: int
    samples_per_s: float
    of_free: float
    nbytes_per_sample: float


def choices(config: Config, pushes: int) -> tuple[Choice, ...]:
    """Predict H = 1, 2, 4 ... until learners are nearly free; () if the configuration refuses own steps."""
    if compatibility.refused(replace(config, local_steps=1), virtual=True):
        return ()
    free = config.virtual.learners * config.mu / mini_batch_s(config)
    both_ways = sum(footprint.of_exchange(vars(config))) * config.virtual.parameters
    found: list[Choice] = []
    while not found or (found[-1].of_free < ENOUGH and found[-1].local_steps < _MOST):
        steps = 2 * found[-1].local_steps if found else 1
        samples = steps * config.accumulation * config.mu
        samples_per_s = samples * predict(replace(config, local_steps=steps), pushes // steps).gradients_per_s
        found.append(Choice(steps, samples_per_s, samples_per_s / free, both_ways / samples))
    return tuple(found)


def table(found: tuple[Choice, ...]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in found:
        enough = each is found[-1] and each.of_free >= ENOUGH
        rows.append(
            (
                each.local_steps,
                each.samples_per_s,
                100 * each.of_free,
                each.nbytes_per_sample / 1e6,
                "enough" if enough else None,
            )
        )
    columns = columns_of("own steps H | samples/s | of learners that never exchange [%] :.1f | bytes [MB/sample] | choice")
    note = (
        f"Enough: the fewest own steps with {100 * ENOUGH:.0f} % of the throughput of learners that never exchange. No log of other"
        " steps tells how much less a sample teaches with more own steps."
    )
    return Table("local-steps", "Throughput over own steps between two exchanges", columns, tuple(rows), note)


def advice(found: tuple[Choice, ...]) -> list[str]:
    if not found:
        return []
    first, last = found[0], found[-1]
    if first is last:
        return [f"Own steps: none are needed; learners compute {100 * first.of_free:.0f} % of their time."]
    return [
        f"Own steps: with H = {last.local_steps}, {100 * last.of_free:.0f} % of the samples per second of learners that never"
        f" exchange (H = 1: {100 * first.of_free:.0f} %)."
    ]
