"""`python -m tests.bench nodes`: seconds of a round over the links of several nodes, beside DDP's and the links' limit, in turn.

As root. The nodes are namespaces of this machine with shaped links (`tests/nodes/cluster.py`). Their ranks share its cores, and
wait politely: what is compared is the use of the links, not of the cores. Or, with `--hosts`, they are hosts that mpirun reaches,
whose links have the rate that `--gbit` says, and which see the current directory. There is a learner on each node, and a round is a
mini-batch of each; a shard that is apart has one more node. The limit is what the busiest link carries in a round, in its busier
direction, at the link's rate (`exchange/link_load.py`). Predictions (`predicted.py`) know what raw MPI moves here at 10 and at 1
Gbit/s, or, between hosts, as the links are, in turn with the jobs, and what mini-batches and updates take of a first job, an
allreduce of whole vectors.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError
from mpisgd.bench.parts.cases import CASES, WARM_UP, Case, config_of
from mpisgd.bench.parts.measured import in_turn, over, show, spread
from mpisgd.bench.parts.runs import rate_of
from mpisgd.config import Config, CustomModelOptions, config_file
from mpisgd.exchange import link_load
from mpisgd.exchange.roles import of_job
from mpisgd.protocols import AllreduceOptions, AsyncOptions, HardsyncOptions, SoftsyncOptions
from mpisgd.records.log.reader import Run
from mpisgd.vectors.flat import slice_bounds
from tests import travel
from tests.bench import predicted
from tests.bench.exchanged import SAID
from tests.bench.peers import KNOWN, told_in
from tests.bench.peers.torch_networks import PACED
from tests.bench.sites import Boxes, Hosts, Site
from tests.nodes.cluster import Cluster, missing

UPDATES = 20
"""At most, of a learner, beside those that warm up: rounds of half a second differ little."""
_FASTEST = 10.0
"""Gbit/s at which raw MPI is measured: the cores, which shape the links as well, move less."""
_SLOW = 1.0
"""Gbit/s that the cores can well move: what raw MPI leaves of it is lost on the link."""
DDP, DDP_HALF = "DDP", "DDP, fp16 hook"
_MOVED, _COPIED, _BROUGHT = "moved", "copied", "brought"
_RAW = {_MOVED: (1, _FASTEST), _COPIED: (2, _FASTEST), _BROUGHT: (1, _SLOW)}
"""Ranks on each node, and Gbit/s of its link, of raw MPI."""


@dataclass(frozen=True)
class Way:
    """A way of mpisgd's: its differences from hardsync with a shard on each node."""

    special: dict[str, Any] = field(default_factory=dict)
    each: int = 1
    """Shards beside each learner; none of an allreduce."""
    spare: int = 0
    """Nodes with a shard alone."""
    asks: bool = False
    """Of each chunk MPI asks whether its receive is posted, as without mpisgd's limits (`comm/mpi/library.py`)."""
    beside: str = DDP
    """The DDP that it is compared with."""

    @property
    def costs(self) -> str:
        """The way whose log says what computing and updating take: with this one's formats, of whole vectors."""
        return "allreduce, bfloat16 both ways" if "push_format" in self.special else "allreduce"


_ASKS = {"btl_tcp_eager_limit": "65536", "btl_tcp_rndv_eager_limit": "65536", "btl_tcp_max_send_size": "131072"}
"""Open MPI's own limits."""
_WHOLE, _STREAMED = {"way": "whole"}, {"way": "streamed"}
_PACED = CustomModelOptions(factory="tests.bench.peers.torch_networks:paced")
NETWORKS = {**{key: CASES[key] for key in KNOWN}, PACED: Case("10 M parameters whose layers wait", _PACED, 16, UPDATES)}
"""Those that DDP has, too."""
_ROUNDED = {"push_format": "bfloat16", "pull_format": "bfloat16"}
WAYS = {
    "hardsync": Way(),
    "hardsync, whole": Way(_WHOLE),
    "hardsync, whole, asks": Way(_WHOLE, asks=True),
    "hardsync, streamed": Way(_STREAMED),
    "hardsync, streamed, asks": Way(_STREAMED, asks=True),
    "hardsync, 1 shard apart": Way(each=0, spare=1),
    "hardsync, 1 shard apart, whole": Way(_WHOLE, each=0, spare=1),
    "hardsync, 1 shard apart, streamed": Way(_STREAMED, each=0, spare=1),
    "hardsync, 1 shard apart, streamed, asks": Way(_STREAMED, each=0, spare=1, asks=True),
    "hardsync, 2 spare nodes": Way(spare=2),
    "hardsync, 2 spare nodes, even": Way(_STREAMED, spare=2),
    "hardsync, 4 spare nodes": Way(spare=4),
    "allreduce": Way({"protocol": AllreduceOptions()}, each=0),
    "allreduce, whole": Way({"protocol": AllreduceOptions(), **_WHOLE}, each=0),
    "allreduce, in buckets": Way({"protocol": AllreduceOptions(), "way": "buckets"}, each=0),
    "hardsync, per layer": Way({"per_layer": True}),
    "hardsync, per layer, 2 shards a node": Way({"per_layer": True}, each=2),
    "hardsync, per layer, 4 shards a node, gathered": Way({"per_layer": True, "way": "gathered"}, each=4),
    "async": Way({"protocol": AsyncOptions()}),
    "async, per layer": Way({"protocol": AsyncOptions(), "per_layer": True}),
    "async, per layer, 2 shards a node": Way({"protocol": AsyncOptions(), "per_layer": True}, each=2),
    "softsync, ahead = 1": Way({"protocol": SoftsyncOptions, "ahead": 1}),
    "softsync, ahead = 2": Way({"protocol": SoftsyncOptions, "ahead": 2}),
    "softsync, n = lambda": Way({"protocol": SoftsyncOptions}),
    "hardsync, bfloat16": Way({"push_format": "bfloat16"}, beside=DDP_HALF),
    "hardsync, bfloat16 both ways": Way(_ROUNDED, beside=DDP_HALF),
    "allreduce, bfloat16 both ways": Way({"protocol": AllreduceOptions(), **_ROUNDED}, each=0, beside=DDP_HALF),
    "allreduce, in buckets, bfloat16 both ways": Way(
        {"protocol": AllreduceOptions(), "way": "buckets", **_ROUNDED}, each=0, beside=DDP_HALF
    ),
}


def measure(
    repetitions: int,
    cases: Sequence[str],
    nodes: Sequence[int],
    gbit: Sequence[float],
    ways: Sequence[str],
    hosts: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """A row for each case, number of nodes and rate. Raises ConfigError: no namespaces; too few hosts, or several rates of their
    links; a case DDP has not; a run that fails."""
    for key in cases:
        require(key in NETWORKS, "cases", key, f"some of {', '.join(NETWORKS)} for nodes")
    spare = max(WAYS[way].spare for way in ways)
    most = max(nodes) + spare
    require(not hosts or len(hosts) >= most, "hosts", hosts, f"{most} of them")
    require(not hosts or len(gbit) == 1, "gbit", gbit, "the rate of the hosts' links")
    for count in nodes:
        with _site(count + spare, hosts) as site:
            for key in cases:
                with tempfile.TemporaryDirectory(dir=site.directory) as directory:
                    costs = _costs(site, count, key, Path(directory), ways)
                    for rate in gbit:
                        yield _row(site, count, key, rate, costs, repetitions, ways)


def _case(key: str) -> Case:
    return replace(NETWORKS[key], updates=min(UPDATES, NETWORKS[key].updates))


def _costs(site: Site, places: int, key: str, directory: Path, ways: Sequence[str]) -> dict[str, Run]:
    """The logs that predictions of these ways are made from, by their ways."""
    site.shape(_FASTEST)
    logs = {}
    for number, name in enumerate(dict.fromkeys(WAYS[way].costs for way in ways)):
        own = directory / str(number)
        own.mkdir()
        logs[name], _ = trained(site, places, own, _case(key), replace(WAYS[name], special=WAYS[name].special | _WHOLE))
    return logs


@contextlib.contextmanager
def _site(count: int, hosts: Sequence[str]) -> Iterator[Site]:
    if hosts:
        yield Hosts(hosts)
        return
    if why := missing():
        raise ConfigError(why)
    with Cluster(count) as cluster:
        yield Boxes(cluster)


def _raw(site: Site, places: int, ranks: int, gbit: float) -> float:
    """Bytes per second that raw MPI moves into and out of a node, with a rank on each, or copies on it, with two."""
    site.shape(gbit)
    said = site.run([ranks] * places, [], module="tests.bench.exchanged")
    if SAID not in said:
        raise ConfigError(f"raw MPI: {said}")
    return float(said.partition(SAID)[2].split()[0])


def _row(
    site: Site, places: int, key: str, gbit: float, costs: Mapping[str, Run], repetitions: int, ways: Sequence[str]
) -> dict[str, Any]:
    case = _case(key)
    seconds: dict[str, list[float]] = {name: [] for name in (DDP, DDP_HALF, *ways)}
    raw: dict[str, list[float]] = {name: [] for name in _RAW if site.shapes or name != _BROUGHT}
    carried: dict[str, float] = {}
    jobs: dict[str, Config] = {}
    site.shape(gbit)
    for name in in_turn([*raw, *seconds], repetitions):
        if name in raw:
            raw[name].append(_raw(site, places, *_RAW[name]))
            site.shape(gbit)
        elif name in WAYS:
            with tempfile.TemporaryDirectory(dir=site.directory) as directory:
                log, carried[name] = trained(site, places, Path(directory), case, WAYS[name])
                seconds[name].append(places * case.mu / rate_of(log, case, places))
                jobs[name] = predicted.virtual(log, costs[WAYS[name].costs])
        else:
            seconds[name].append(_ddp(site, places, key, case, "fp16" if name == DDP_HALF else ""))
    limits = {name: nbytes / (gbit * link_load.GIGABIT) for name, nbytes in carried.items()}
    medians = {name: statistics.median(values) for name, values in raw.items()}
    share = predicted.share_of(_SLOW, medians[_BROUGHT]) if _BROUGHT in medians else 1.0
    rates = predicted.Rates(gbit, share, medians[_MOVED], medians[_COPIED])
    return {
        "case": case.name,
        "nodes": places,
        "gbit_per_s": gbit,
        **{f"{name}_bytes_per_s": spread(values) for name, values in raw.items()},
        "repetitions": repetitions,
        "round_s": {name: spread(values) for name, values in seconds.items()},
        "megabytes": {name: nbytes / 1e6 for name, nbytes in carried.items()},
        "predicted_s": {name: predicted.round_s(job, rates) for name, job in jobs.items()},
        "over_limit": {name: spread([each / limits[name] for each in seconds[name]]) for name in limits},
        "speed_over_ddp": {name: over(seconds[WAYS[name].beside], seconds[name]) for name in ways},
    }


def trained(site: Site, places: int, directory: Path, case: Case, way: Way) -> tuple[Run, float]:
    """The log of a job, and bytes that the busiest link carries in a round of it."""
    ranks = [1 + way.each] * places + [1] * way.spare
    config = _config(directory, case, way, places, places * way.each + way.spare)
    job = directory / "job.toml"
    job.write_text(config_file.dumps(config))
    options = [word for name, value in _ASKS.items() if way.asks for word in ("--mca", name, value)]
    site.run(ranks, [str(job)], options, **travel.launched(way.special)[1])
    log = Run(config.out)
    told = log.environment
    bounds = slice_bounds(int(told["parameters"]), len(told["shard_ranks"]), log.slices_of(log.attempt))
    return log, link_load.load_of(config, of_job(config, told["hosts"]), told["hosts"], bounds)[1]


def _config(directory: Path, case: Case, way: Way, learners: int, shards: int) -> Config:
    special = dict(way.special)
    if special.get("protocol") is SoftsyncOptions:
        special["protocol"] = SoftsyncOptions(n=learners)
    config = config_of(directory, case, **({"protocol": HardsyncOptions(), "shards": max(1, shards)} | special))
    return replace(config, epochs=(WARM_UP + case.updates) * learners * case.mu / case.data.samples)


def _ddp(site: Site, places: int, key: str, case: Case, hook: str) -> float:
    """Seconds of a round, by the slowest."""
    said = site.ddp(places, key, (case.mu, case.updates), hook)
    found = told_in(said)
    if len(found) != places:
        raise ConfigError(f"DDP: {said}")
    return float(max(each["seconds"] for each in found)) / case.updates


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows for printing."""
    return [line for row in rows for line in _lines_of(row)]


def _lines_of(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{row['case']}, {row['nodes']} nodes, {row['gbit_per_s']:g} Gbit/s: seconds of a round"
    for name, value in row["round_s"].items():
        line = f"  {name:<42} {show(value, 3)}"
        if name in WAYS:
            beside = row["speed_over_ddp"][name]
            line += f"; speed over {WAYS[name].beside} {show(beside)}; over the limit of its link {show(row['over_limit'][name])}"
            line += f"; predicted {row['predicted_s'][name]:.3f}"
        yield line
