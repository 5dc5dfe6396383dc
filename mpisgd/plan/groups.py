"""Choice of K and M: seconds of a mini-batch where a learner is a group of K ranks, which passes it in M parts [Dean12 3].

Each is predicted by a virtual run with the costs of a log of whole models: a stage takes its share of the parameters of what a
mini-batch takes, and what crosses borders has the bytes of the model's own activations. So the model is made, from its
configuration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.base.errors import ConfigError
from mpisgd.config import Config, compatibility, replace
from mpisgd.plan.costs.predict import LEAST_ROUNDS, predict

#: Parts that are tried at most.
_MOST_PARTS = 32
#: A virtual mini-batch has messages for each part and border: so many pushes fewer are enough.
_LEAST_PUSHES = 200


@dataclass(frozen=True)
class Choice:
    """Seconds from one mini-batch of a learner to its next, exchange included, for so many ranks and parts."""

    group_size: int
    micro_batches: int
    seconds: float


def choices(config: Config, most: int, pushes: int) -> tuple[Choice, ...]:
    """K = 1, 2, 4 ... `most`, each with M = 1, 2, 4 ... that divide mu; no K to which `most` is 1.

    Raises ConfigError where the run's choices do not go with groups, or its model cannot be cut into so many stages or made.
    """
    if most <= 1:
        return ()
    sizes = sorted({*(2**power for power in range(most.bit_length()) if 2**power < most), most})
    whole = replace(config, virtual=dataclasses.replace(config.virtual, parameters=0))
    found = []
    for size in sizes:
        for parts in [parts for parts in _parts(config.mu) if size > 1 or parts == 1]:
            tried = replace(whole, group_size=size, micro_batches=parts, shards=max(config.shards, size))
            compatibility.check(tried, virtual=True)
            fewer = max(_LEAST_PUSHES, LEAST_ROUNDS * config.virtual.learners, pushes // (8 * size * parts))
            seen = predict(tried, fewer)
            found.append(Choice(size, parts, seen.seconds * config.virtual.learners / seen.pushes))
    return tuple(found)


def check(config: Config, most: int) -> None:
    """Raises ConfigError where groups of so many ranks cannot be planned: before anything is predicted."""
    if most < 1:
        raise ConfigError(f"--group-size {most}: expected at least 1")
    if most > 1:
        tried = replace(config, group_size=most, virtual=dataclasses.replace(config.virtual, parameters=0))
        compatibility.check(tried, virtual=True)


def _parts(mu: int) -> list[int]:
    return [2**power for power in range(_MOST_PARTS.bit_length()) if mu % 2**power == 0]


def table(found: tuple[Choice, ...]) -> Table:
    alone = found[0].seconds
    best = min(found, key=lambda each: each.seconds)
    rows: list[tuple[Cell, ...]] = [
        (
            each.group_size,
            each.micro_batches,
            each.seconds,
            alone / each.seconds,
            100 * alone / each.seconds / each.group_size,
            "fastest" if each is best else None,
        )
        for each in found
    ]
    columns = columns_of("ranks K | parts M | seconds of a mini-batch [s] | times as fast | of K ranks [%] :.1f | choice")
    note = (
        "A stage takes its share of the parameters of a mini-batch's seconds, and a part its share of the stage's: small parts,"
        " which use a core less well, take longer than that. Each rank is taken to have a core of its own."
    )
    return Table("groups", "Seconds of a mini-batch over ranks of a learner and parts", columns, tuple(rows), note)


def advice(found: tuple[Choice, ...]) -> list[str]:
    if not found:
        return []
    alone, best = found[0], min(found, key=lambda each: each.seconds)
    if best is alone:
        return ["Groups: no number of ranks tried is faster than one; they are for models that are too large for it."]
    return [
        f"Groups: {best.group_size} ranks and {best.micro_batches} micro-batches, {alone.seconds / best.seconds:.2f} times as fast"
        f" as one rank ({best.seconds:.4g} s a mini-batch, {alone.seconds:.4g} s alone)."
    ]
