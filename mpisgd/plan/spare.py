"""Choice of the number k of spare nodes: a shard alone, beside one on each node of learners [BytePS 3, Theorem 1]."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.config import Config, compatibility, replace
from mpisgd.plan.costs.predict import predict
from mpisgd.plan.costs.scale import nodes_of_learners, with_slow_links
from mpisgd.plan.shards import ENOUGH

#: Links of two nodes with a shard each carry no more than a spare node's.
_LEAST_NODES = 3


@dataclass(frozen=True)
class Spare:
    """Throughput with k nodes beside `nodes` of learners."""

    k: int
    nodes: int
    gradients_per_s: float


def choices(config: Config, pushes: int) -> list[Spare]:
    """Predict k = 0, 1, 2, 4 ... up to the nodes of learners; [] where no slices can be uneven."""
    nodes, found = len(set(nodes_of_learners(config))), list[Spare]()
    if nodes < _LEAST_NODES:
        return found
    for k in sorted({0, nodes, *(2**power for power in range(nodes.bit_length() - 1))}):
        spread = _spread(config, nodes, k)
        if compatibility.refused(spread, virtual=True) or spread.protocol.collective:
            return []
        found.append(Spare(k, nodes, predict(with_slow_links(spread, config), pushes).gradients_per_s))
    return found


def _spread(config: Config, nodes: int, k: int) -> Config:
    each = -(-config.virtual.learners // nodes)
    virtual = dataclasses.replace(config.virtual, ranks_per_node=each + 1, spare_nodes=k)
    return replace(config, virtual=virtual, shards=nodes + k, placement="spread", evaluator=False)


def enough(found: list[Spare]) -> Spare:
    most = max(each.gradients_per_s for each in found)
    return next(each for each in found if each.gradients_per_s >= ENOUGH * most)


def table(found: list[Spare]) -> Table:
    best, rows = enough(found), list[tuple[Cell, ...]]()
    for each in found:
        ratio = each.gradients_per_s / found[0].gradients_per_s
        per_node = ratio * each.nodes / (each.nodes + each.k)
        rows.append((each.k, each.nodes + each.k, each.gradients_per_s, ratio, per_node, "enough" if each is best else None))
    columns = columns_of("spare nodes k | shards | gradients/s | over k = 0 :.2f | the same per node :.2f | choice")
    note = (
        "Placement: a shard on each node, --placement spread. A spare node has no learners: its slice is larger, others smaller, so"
        f" that links carry alike. Enough: the fewest spare nodes with {100 * ENOUGH:.0f} % of the most gradients."
    )
    return Table("spare", "Throughput over spare nodes", columns, tuple(rows), note)


def advice(found: list[Spare]) -> list[str]:
    if not found:
        return []
    best = enough(found)
    if best.k == 0:
        return ["Spare nodes: none are needed; links do not limit the learners."]
    ratio = best.gradients_per_s / found[0].gradients_per_s
    return [
        f"Spare nodes: {best.k} beside the {best.nodes} of learners, each with a shard alone (--shards {best.nodes + best.k}"
        f" --placement spread): {ratio:.2f} times the gradients per second of a shard on each of the {best.nodes}."
    ]
