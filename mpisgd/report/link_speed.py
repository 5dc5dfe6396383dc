"""Speed of each node's link.

A pull tells the rate of received bytes; a push ends once the system has the last bytes, and seems faster. Both also wait while a
shard serves others, seldom together: the better rate counts. With shards on several nodes,
all transfers cross a slow link, most of all its own learners': at most one node is named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisgd.analysis import about, arrivals
from mpisgd.analysis.tables import Cell, Table, columns_of
from mpisgd.analysis.timeline import ranks_of
from mpisgd.config import footprint
from mpisgd.exchange.link_load import Carried, carried
from mpisgd.records.log.reader import Run

#: Smaller slices tell no rate: handling takes longer than their bytes.
TELLING_NBYTES = 64 * 1024
#: A slow link has at most this share of the median of the other links' rates.
_SLOW = 0.5


@dataclass(frozen=True)
class Link:
    """A node's link.

    `push_s`, `pull_s`: medians over learners. `rate`: bytes per second of a learner's pulls; `faster`: of pulls or pushes. None =
    unknown.
    """

    host: str
    ranks: int
    carried: Carried
    push_s: float | None
    pull_s: float | None
    rate: float | None
    faster: float | None


def links(run: Run) -> list[Link]:
    """Return each node's link; none for a single node, or if the log cannot tell links apart.

    Learners that double as shards wait for the slowest, groups use their stage's shards alone, and sizes of layers are not logged.
    """
    environment = run.environment
    hosts, nbytes = [str(host) for host in environment.get("hosts", [])], environment.get("parameter_nbytes")
    untold = about.doubled(run) or about.groups_of(run) or environment.get("layers") or run.is_batch
    if len(set(hosts)) < 2 or not nbytes or untold:
        return []
    ranks = ranks_of(run)
    of_learners = np.array([ranks.host(rank) for rank in ranks.learners])
    push, pull = (nbytes / 4 * each for each in footprint.of_exchange(run.config))
    sizes = run.slices_of(run.attempt) or [1] * run.shards
    shares = [size / sum(sizes) for size in sizes]
    bytes_of = carried(of_learners.tolist(), [ranks.host(rank) for rank in ranks.shards], shares, push, pull)
    rows = run.pushes[(run.pushes["shard"] == 0) & (run.pushes["seq"] > 1)]
    found = []
    for host in dict.fromkeys(hosts):
        own, at = bytes_of.get(host, Carried(0, 0, 0.0, 0.0, 0.0, 0.0)), rows[of_learners[rows["learner_id"]] == host]
        push_s, pull_s = (_median(at[name]) for name in ("push_s", "pull_s"))
        rates = [_rate(own.pushed_by_each, push_s, run.shards), _rate(own.pulled_by_each, pull_s, run.shards)]
        if environment.get("way") == "streamed":  # all learners' chunks wait for the slowest
            rates = [None, None]
        faster = max((each for each in rates if each is not None), default=None)
        found.append(Link(host, hosts.count(host), own, push_s, pull_s, rates[1], faster))
    return found


def slow(found: list[Link]) -> dict[str, float]:
    """Return hosts with slow links, and the median of other links' rates."""
    told = [link for link in found if link.rate is not None]
    each = np.array([link.faster for link in told])
    together = each * [link.carried.learners for link in told]
    named = {}
    shared = sum(link.carried.shards > 0 for link in found) > 1
    for at, link in enumerate(told):
        if shared and each[at] > each.min():
            continue
        if len(told) > 1 and all(of[at] <= _SLOW * np.median(np.delete(of, at)) for of in (each, together)):
            named[link.host] = float(np.median([other.rate for other in told if other is not link]))
    return named


def table(run: Run, found: list[Link]) -> Table:
    fastest = max((link.rate for link in found if link.rate is not None), default=None)
    rows: list[tuple[Cell, ...]] = []
    for link in found:
        mine = link.carried
        share = None if link.rate is None or fastest is None else 100 * link.rate / fastest
        rate = None if link.rate is None else link.rate / 1e6
        carries = (mine.sent / 1e6, mine.received / 1e6)
        rows.append((link.host, link.ranks, mine.learners, *carries, link.push_s, link.pull_s, rate, share))
    headings = "node | ranks | learners | sends [MB] | receives [MB] | push [s] | pull [s] | rate [MB/s] | of the fastest [%] :.0f"
    named = slow(found)
    said = [
        f"The link of {link.host} is slow: {_megabytes(link.rate)} MB/s for a learner, others' {_megabytes(named[link.host])}."
        " A shard that exchanges over this link serves nobody else meanwhile."
        for link in found
        if link.host in named and link.rate is not None
    ]
    waits = " Synchronous learners wait for each other at the shards, too." if arrivals.synchronous(run) else ""
    note = (
        "Sends, receives: in a round of one push and one pull by each learner. Push, pull: medians. Rate: of data from other nodes"
        f" to one learner.{waits}"
    )
    return Table("links", "Links of the nodes", columns_of(headings), tuple(rows), " ".join([*said, note]))


def _median(seconds: np.ndarray) -> float | None:
    """Return the median without 0, which stands for no push or pull."""
    seconds = seconds[seconds > 0]
    return float(np.median(seconds)) if len(seconds) else None


def _rate(nbytes: float, seconds: float | None, shards: int) -> float | None:
    return nbytes / seconds if seconds and nbytes / shards >= TELLING_NBYTES else None


def _megabytes(rate: float) -> str:
    return f"{rate / 1e6:,.3g}"
