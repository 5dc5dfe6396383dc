"""One schedule, drawn by a generator: a job, and the faults that befall its attempts."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpisgd.config import Config
from mpisgd.config.config_file import from_mapping

#: Every protocol, and the options that change who waits for whom.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "hardsync": {"name": "hardsync"},
    "softsync": {"name": "softsync", "n": 2},
    "async": {"name": "async"},
    "async-bounded": {"name": "async", "most_staleness": 2, "warm_up": 2, "ramp": 4},
    "backup": {"name": "backup", "b": 1},
    "backup-late": {"name": "backup", "b": 1, "late": "apply"},
    "backup-abort": {"name": "backup", "b": 1, "abort": True},
    "timeout": {"name": "timeout", "timeout_s": 0.03},
    "ssp": {"name": "ssp", "slack": 1},
    "ssp-own": {"name": "ssp", "slack": 2, "get_model_frequency": 2},
    "downpour": {"name": "downpour", "n_push": 2, "n_fetch": 4},
    "downpour-warm": {"name": "downpour", "warm_up": 3},
    "versioned": {"name": "versioned"},
    "versioned-stale": {"name": "versioned", "grads_to_wait": 2, "tolerance": 1},
    "hardsync-local": {"name": "hardsync"},
    "async-accumulated": {"name": "async"},
    "hardsync-rounded": {"name": "hardsync"},
    "async-rounded": {"name": "async"},
}
#: Batch optimisation, whose schedules are drawn apart (`draw_batch`).
BATCH_WAYS: Mapping[str, Mapping[str, Any]] = {
    "sandblaster": {"name": "sandblaster", "iterations": 5, "history": 3, "push_every": 2},
    "sandblaster-order": {
        "name": "sandblaster",
        "iterations": 5,
        "history": 2,
        "order": "portions",
        "weight_decay": 0.01,
        "log_commands": True,
    },
    "sandblaster-once": {"name": "sandblaster", "iterations": 4, "duplicates": False},
    "sandblaster-sums": {"name": "sandblaster", "iterations": 4, "push_every": 4, "share": 0.5, "line_search": "none"},
}
#: What differs besides: learners with a state of their own, pushes of several mini-batches.
MORE: Mapping[str, Mapping[str, Any]] = {
    "hardsync-local": {"local_steps": 2, "inner_alpha0": 0.01, "alpha0": 0.7},
    "async-accumulated": {"accumulation": 2, "push_format": "bfloat16"},
    "hardsync-rounded": {"push_format": "bfloat16", "pull_format": "bfloat16"},
    "hardsync, agreed": {"clip_average": 0.3},
    "async-rounded": {"push_format": "topk", "topk_share": 0.2, "pull_format": "bfloat16"},
}
#: Ways of `draw_dealt`: shard 0 deals the data.
DEALT: Mapping[str, Mapping[str, Any]] = {
    f"{way}, dealt": options for way, options in WAYS.items() if way not in ("ssp-own", "downpour", "hardsync-local")
}
#: Ways of `draw_layered`: layers are exchanged one by one, by learners that are one rank each.
LAYERED: Mapping[str, Mapping[str, Any]] = {
    f"{way}, layered": options
    for way, options in WAYS.items()
    if way not in ("backup-abort", "ssp-own", "downpour", "hardsync-local")
}
#: The way of `draw_agreed`: shards agree on a norm. No learner of such a job may die alone.
AGREED = "hardsync, agreed"
#: Ways that go with no groups of ranks.
ALONE = ("async-accumulated",)
PATIENCE_S = 0.3
"""Of a shard with its learners; the heartbeat has `heartbeat.LEAST_S`."""
COMPUTE_S = 0.01
LONG_S = 12.0
"""Longer than any patience."""
EVER_S = 1e6
"""Nobody goes on after this."""
LIMIT_S = 300.0
"""Virtual seconds in which a job has ended, whatever befell it: MEET_S and BODY_S, and what comes before."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a rank: at a second, or at one of its calls of MPI.

    Attributes:
        what: kill, stop, cut, slow, signal, full (the log cannot be written), unsaved (checkpoints cannot), hang (what is written
            of either waits), jump (of the clock that tells dates), end (all are killed), power (so are they, and the disk forgets
            what was not synced).
        lasts_s: how long; a kill lasts.
        other: of a cut, the far end; `both`: no message goes in either direction.
        by_s: of a jump, forwards or back.
    """

    what: str
    rank: int = 0
    at_s: float = 0.0
    at_call: int = 0
    lasts_s: float = 0.0
    other: int = 0
    both: bool = True
    by_s: float = 0.0

    def __str__(self) -> str:
        when = f"call {self.at_call}" if self.at_call else f"{self.at_s:.3f} s"
        far = f"{'<->' if self.both else '->'}{self.other}" if self.what == "cut" else ""
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.what} {self.rank}{far} at {when}{lasts}{f' by {self.by_s:.0f} s' if self.by_s else ''}"


@dataclass(frozen=True)
class Damage:
    """Something that happens to a file while nobody runs (`damage.py`).

    Attributes:
        what: flipped (a byte), torn (its end is missing), missing, swapped (with another one).
        of: checkpoint, log, snapshots; clocks: whole checkpoints are swapped.
        after: the attempt that has ended before it.
        seed: of which file, and where in it.
    """

    what: str
    of: str
    after: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.of} {self.what} after attempt {self.after}"


@dataclass(frozen=True)
class Draw:
    """One job: how it trains, who is there, what the network is like, and the faults of each of its attempts but the last."""

    way: str
    shards: int
    learners: int
    evaluator: bool
    tolerant: bool
    seed: int
    every_updates: int
    latency_ns: int
    eager_nbytes: int
    reorders: bool
    flush_rows: int
    attempts: tuple[tuple[Fault, ...], ...]
    again: tuple[int, int] = (0, 0)
    """Shards and learners of the attempts after the first, where they are others."""
    group_size: int = 1
    micro_batches: int = 1
    alternating: bool = False
    """Of the passes of a group."""
    samples: int = 96
    iterations: int = 0
    """Of a batch optimisation; 0 = as its way has them."""
    logged: bool = True
    damages: tuple[Damage, ...] = ()
    freed: str = ""
    """When links that are cut carry again, what they held in any order: deaths, end, both; "" = never before their time."""

    @property
    def is_batch(self) -> bool:
        return self.way in BATCH_WAYS

    @property
    def ranks(self) -> int:
        return self.shards + self.is_batch + self.learners * self.group_size + self.evaluator

    def __str__(self) -> str:
        faults = "; then ".join(", ".join(map(str, attempt)) or "nothing" for attempt in self.attempts)
        kind = "tolerant" if self.tolerant else "fail-fast"
        groups = f" of {self.group_size} ranks, {self.micro_batches} micro-batches" * (self.group_size > 1)
        also = f"{groups}{', evaluator' * self.evaluator}"
        more = "".join(f"; {each}" for each in self.damages) + f"; links are freed: {self.freed}" * bool(self.freed)
        return f"{self.way}, S = {self.shards}, {self.learners} learners{also}, {kind}: {faults}{more}"


def draw(dice: random.Random, number: int) -> Draw:
    """Ways take turns; all else is drawn."""
    way = list(WAYS)[number % len(WAYS)]
    shards, evaluator, tolerant = 1 + number // len(WAYS) % 4, dice.random() < 0.4, dice.random() < 0.75
    learners = dice.randint(2, 5)
    groups = random.Random(f"groups of {number}")
    size = groups.randint(1, min(3, shards)) if way not in ALONE else 1
    drawn = functools.partial(_faults, dice, shards, learners * size, evaluator, tolerant)
    others = range(shards, shards + learners * size + evaluator)
    drawn_so = Draw(
        way=way,
        shards=shards,
        learners=learners,
        evaluator=evaluator,
        tolerant=tolerant,
        seed=dice.randrange(2**31),
        every_updates=dice.choice((0, 2, 3, 5)),
        latency_ns=dice.choice((5_000, 50_000, 500_000)),
        eager_nbytes=dice.choice((0, 0, 4096)),
        reorders=dice.random() < 0.5,
        flush_rows=dice.choice((4, 16, 256)),
        attempts=_lasting(tuple(drawn(later) for later in range(dice.choice((1, 1, 1, 2)))), others, tolerant, number),
        again=(max(size, dice.randint(1, 4)), dice.randint(2, 5)) if dice.random() < 0.2 else (0, 0),
        group_size=size,
        micro_batches=groups.choice((1, 2, 4)) if size > 1 else 1,
        alternating=size > 1 and groups.random() < 0.5,
    )
    return _beset(drawn_so, number)


def draw_any(dice: random.Random, number: int) -> Draw:
    """Of eight draws, make five by `draw`, and one by each of `draw_dealt`, `draw_layered`, `draw_agreed`."""
    of_itself = {5: draw_dealt, 6: draw_layered, 7: draw_agreed}.get(number % 8)
    return of_itself(dice, number // 8) if of_itself else draw(dice, number)


def draw_dealt(dice: random.Random, number: int) -> Draw:
    """As `draw`, of jobs whose data shard 0 deals."""
    ways = list(DEALT)
    way, shards = ways[number % len(ways)], 1 + number // len(ways) % 3
    return replace(draw(dice, number), way=way, shards=shards, group_size=1, micro_batches=1, alternating=False)


def draw_agreed(dice: random.Random, number: int) -> Draw:
    """Two to four shards that agree; mostly, a signal comes at any time, and the run goes on, perhaps with others."""
    shards, evaluator, learners = 2 + number % 3, dice.random() < 0.4, dice.randint(1, 5)
    signals = (Fault("signal", dice.randrange(shards + learners), at_s=dice.uniform(0, 1.2) * _LAST_S),)
    others = _faults(dice, shards, learners, evaluator, False, number % 2)
    return Draw(
        way=AGREED,
        shards=shards,
        learners=learners,
        evaluator=evaluator,
        tolerant=False,
        seed=dice.randrange(2**31),
        every_updates=dice.choice((0, 2, 3)),
        latency_ns=dice.choice((5_000, 50_000, 500_000)),
        eager_nbytes=dice.choice((0, 0, 4096)),
        reorders=dice.random() < 0.5,
        flush_rows=dice.choice((4, 16, 256)),
        attempts=(signals, others)[: dice.choice((1, 1, 2))] if number % 4 else (others,),
        again=(dice.randint(1, 4), dice.randint(1, 5)) if dice.random() < 0.3 else (0, 0),
    )


def draw_layered(dice: random.Random, number: int) -> Draw:
    """As `draw`, of jobs whose layers are exchanged one by one."""
    ways = list(LAYERED)
    drawn = draw(dice, number)
    ranks = drawn.shards, drawn.learners, drawn.evaluator
    attempts = tuple(_faults(dice, *ranks, drawn.tolerant, later) for later in range(len(drawn.attempts)))
    drawn = replace(drawn, way=ways[number % len(ways)], attempts=attempts, group_size=1, micro_batches=1, alternating=False)
    return _beset(drawn, number)


def draw_batch(dice: random.Random, number: int, *, small: bool = False) -> Draw:
    """The same of batch optimisation, with more learners. `small`: of few portions and iterations, and most without a log
    on the disk, for there are to be many."""
    way = list(BATCH_WAYS)[number % len(BATCH_WAYS)]
    shards, evaluator, tolerant = 1 + number // len(BATCH_WAYS) % 4, dice.random() < 0.3, dice.random() < 0.75
    learners = dice.randint(1, 12)
    drawn = functools.partial(_faults, dice, 1 + shards, learners, evaluator, tolerant)  # the coordinator comes after the shards
    others = range(1 + shards, 1 + shards + learners + evaluator)
    drawn_so = Draw(
        way=way,
        shards=shards,
        learners=learners,
        evaluator=evaluator,
        tolerant=tolerant,
        seed=dice.randrange(2**31),
        every_updates=dice.choice((0, 1, 2, 4)),
        latency_ns=dice.choice((5_000, 50_000, 500_000)),
        eager_nbytes=dice.choice((0, 0, 4096)),
        reorders=dice.random() < 0.5,
        flush_rows=dice.choice((4, 16, 256)),
        attempts=_lasting(tuple(drawn(later) for later in range(dice.choice((1, 1, 1, 2)))), others, tolerant, number),
        again=(dice.randint(1, 4), dice.randint(1, 12)) if dice.random() < 0.3 else (0, 0),
        **(_small(dice, number) if small else {}),
    )
    return _beset(drawn_so, number)


def _small(dice: random.Random, number: int) -> dict[str, Any]:
    return {"samples": dice.randint(8, 40), "iterations": dice.randint(1, 3), "logged": number % 8 < 1}


_LAST_S = 0.25
"""About as long as a job takes that nothing befalls."""
Attempts = tuple[tuple[Fault, ...], ...]


def _faults(dice: random.Random, shards: int, learners: int, evaluator: bool, tolerant: bool, later: int) -> tuple[Fault, ...]:
    """Mostly of learners, from which a tolerant job is to recover; now and then of whoever it cannot do without."""
    size = shards + learners + evaluator
    worst = later == 0 and dice.random() < (0.15 if tolerant else 0.6)
    faults = []
    for _ in range(dice.choice((0, 1, 2, 2, 3, 3, 4, 5))):
        whats = ("kill", "kill", "stop", "stop", "cut", "slow", "unsaved") if tolerant else ("stop", "cut", "slow", "unsaved")
        what = dice.choice((*whats, "kill", "full", "signal", "end", "power") if worst else whats)
        rank = dice.randrange(size) if worst or what in ("slow", "unsaved") else dice.randrange(shards, size)
        if what in ("unsaved", "full"):
            rank = dice.randrange(shards)
        called = dice.random() < 0.5 and what in ("kill", "stop")
        others = [each for each in range(size) if each != rank]
        short = dice.uniform(0, 0.9) * PATIENCE_S
        lasts_s = dice.choice((short, *[dice.uniform(1, 3) * PATIENCE_S] * 2, *((LONG_S,) * worst)))
        if not tolerant and not worst:
            lasts_s = dice.uniform(0, 3)  # the heartbeat is patient
        faults.append(
            Fault(
                what,
                rank,
                at_s=0.0 if called else dice.uniform(0, 1.2) * _LAST_S,
                at_call=dice.randint(1, 120) if called else 0,
                lasts_s=lasts_s if what in ("stop", "cut", "unsaved", "slow") else 0.0,
                other=dice.choice(others) if what == "cut" else 0,
                both=dice.random() < 0.5,
            )
        )
    return tuple(faults)


def _lasting(attempts: Attempts, ranks: range, tolerant: bool, number: int) -> Attempts:
    """In a third of the tolerant jobs who is stopped, or cut off, mostly stays so; in some of these, so are most of `ranks`."""
    dice = random.Random(f"for ever {number}")
    if not tolerant or dice.random() > 1 / 3:
        return attempts

    def stays(fault: Fault) -> Fault:
        """What parts two ranks of one learner's group, which both live, passes."""
        held = fault.what == "stop" or (fault.what == "cut" and min(fault.rank, fault.other) < ranks.start)
        return replace(fault, lasts_s=EVER_S) if held and dice.random() < 0.8 else fault

    first, *later = (tuple(map(stays, faults)) for faults in attempts)
    stopped = [rank for rank in ranks if dice.random() < 0.8] if dice.random() < 0.3 else []
    stops = (Fault("stop", rank, at_s=dice.uniform(0, 1.5) * _LAST_S, lasts_s=EVER_S) for rank in stopped)
    return ((*first, *stops), *later)


_ENDS = ("end", "power", "signal")
_DAMAGES = ("flipped", "flipped", "torn", "missing", "swapped", "swapped")
_OF = ("checkpoint",) * 5 + ("log",) * 3 + ("snapshots", "clocks")


def _beset(drawn: Draw, number: int) -> Draw:
    """Files are damaged between attempts, clocks jump, disks hang, links are freed: each is drawn by itself, whatever else is."""
    files, clocks, disks, links = (
        random.Random(f"{what} of {number}: {drawn.seed}") for what in ("files", "dates", "disks", "links")
    )
    attempts, ranks = [list(faults) for faults in drawn.attempts], drawn.ranks
    for _ in range(clocks.choice((0, 0, 0, 1, 2, 3))):
        jump = Fault("jump", clocks.randrange(ranks), by_s=clocks.choice((-1, 1)) * 10 ** clocks.uniform(0, 8))
        clocks.choice(attempts).append(replace(jump, at_s=clocks.choice((0.0, clocks.uniform(0, 1.2) * _LAST_S))))
    writers = [*range(drawn.shards + drawn.is_batch), *[ranks - 1] * drawn.evaluator]
    for _ in range(disks.choice((0, 0, 0, 1, 2))):
        lasts_s = disks.choice((disks.uniform(1, 3) * PATIENCE_S, disks.uniform(1, LONG_S)))
        hang = Fault("hang", disks.choice(writers), at_s=disks.uniform(0, 1.2) * _LAST_S, lasts_s=lasts_s)
        disks.choice(attempts).append(hang)
    every_updates, damages = drawn.every_updates, list[Damage]()
    if drawn.logged and files.random() < 1 / 3:
        every_updates = every_updates or files.randint(1, 3)
        for after in sorted(files.sample(range(len(attempts)), files.randint(1, len(attempts)))):
            attempts[after].append(Fault(files.choice(_ENDS), at_s=files.uniform(0.2, 1.2) * _LAST_S))
            for _ in range(files.choice((1, 1, 2, 3))):
                of = files.choice(_OF)
                what = "swapped" if of == "clocks" else files.choice(_DAMAGES)
                damages.append(Damage(what, of, after, files.randrange(2**31)))
    return replace(
        drawn,
        every_updates=every_updates,
        attempts=tuple(map(tuple, attempts)),
        damages=tuple(damages),
        freed=links.choice(("", "", "deaths", "end", "both")),
    )


DATA = {"name": "synthetic", "shape": [5], "classes": 3, "samples": 96, "test_samples": 8}
MODEL = {"name": "mlp", "hidden": [12]}
MODEL_OF_GROUPS = {"name": "mlp", "hidden": [7, 5]}


_OF_SGD = {"epochs": 1, "alpha0": 0.05, "optimizer": {"name": "sgd", "momentum": 0.9}}


def config_of(drawn: Draw, path: Path, shards: int) -> Config:
    iterations = {"iterations": drawn.iterations} if drawn.iterations else {}
    return from_mapping(
        {
            "out": str(path),
            "protocol": {**{**WAYS, **BATCH_WAYS, **DEALT, **LAYERED, AGREED: WAYS["hardsync"]}[drawn.way], **iterations},
            "data": {**DATA, "samples": drawn.samples},
            "model": MODEL if drawn.group_size == 1 else MODEL_OF_GROUPS,
            "shards": shards,
            "evaluator": drawn.evaluator,
            "group_size": drawn.group_size,
            "micro_batches": drawn.micro_batches,
            "pipeline": "1f1b" if drawn.alternating else "gpipe",
            "mu": 4,
            "threads": 1,
            "seed": 1,
            **({} if drawn.is_batch else _OF_SGD),
            "evaluation": {"every_epochs": 0.4, "train": False},
            "checkpoint": {"every_updates": drawn.every_updates},
            "log": {"progress": "off", "enabled": drawn.logged, "flush_rows": drawn.flush_rows, "flush_s": 1e9},
            "faults": {"patience_s": PATIENCE_S},
            **MORE.get(drawn.way.removesuffix(", dealt").removesuffix(", layered"), {}),
            **({"sampling": "dealt"} if drawn.way in DEALT else {}),
            **({"per_layer": True} if drawn.way in LAYERED else {}),
        }
    )
