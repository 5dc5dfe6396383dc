"""Schedules that have found something, and what. Each is a whole draw: how others are drawn may change."""

from __future__ import annotations

from tests.virtual.storm.draw import Draw, Fault

KEPT: dict[str, Draw] = {
    "a learner dies where all meet, after its last word: the hub could not answer it, and ended the job": Draw(
        way="downpour-warm",
        shards=3,
        learners=4,
        evaluator=False,
        tolerant=True,
        seed=605160178,
        every_updates=3,
        latency_ns=50000,
        eager_nbytes=4096,
        reorders=False,
        flush_rows=256,
        attempts=(
            (
                Fault(what="kill", rank=6, at_s=0.18020385053296098),
                Fault(what="stop", rank=4, at_s=0.10976805356070306, lasts_s=0.8363975394301045),
                Fault(what="kill", rank=5, at_call=40, both=False),
                Fault(what="cut", rank=6, at_s=0.1949810509612093, lasts_s=0.6984113474525256),
            ),
        ),
        again=(1, 2),
    ),
    "a shard that missed learners finishes first, and whom it stops is waited for by another shard for ever": Draw(
        way="backup-late",
        shards=3,
        learners=4,
        evaluator=False,
        tolerant=True,
        seed=772844444,
        every_updates=3,
        latency_ns=5000,
        eager_nbytes=0,
        reorders=False,
        flush_rows=4,
        attempts=(
            (
                Fault(what="slow", rank=5, at_s=0.20840545136613448, lasts_s=0.6974672660308415, both=False),
                Fault(what="stop", rank=3, at_call=115, lasts_s=0.6938766878342084),
                Fault(what="stop", rank=5, at_call=193, lasts_s=0.8877900084592959, both=False),
            ),
        ),
    ),
    "learners are missed after a time-out, in one clock: replay took them in another order, and refused a true log": Draw(
        way="timeout",
        shards=2,
        learners=4,
        evaluator=True,
        tolerant=True,
        seed=1801185820,
        every_updates=3,
        latency_ns=50000,
        eager_nbytes=0,
        reorders=False,
        flush_rows=4,
        attempts=((Fault(what="stop", rank=3, at_call=56, lasts_s=0.7283979982767251),),),
    ),
    "a learner is missed, back and passed while pushes are kept for the turn of another: replay took them in another order": Draw(
        way="hardsync",
        shards=3,
        learners=5,
        evaluator=True,
        tolerant=True,
        seed=1680894456,
        every_updates=0,
        latency_ns=50000,
        eager_nbytes=0,
        reorders=True,
        flush_rows=16,
        attempts=(
            (
                Fault(what="slow", rank=8, at_s=0.17141098187582338, lasts_s=0.45186870632761755, both=False),
                Fault(what="cut", rank=3, at_s=0.14848580923698168, lasts_s=0.559895400191243),
                Fault(what="stop", rank=5, at_call=17, lasts_s=0.5906349529459182),
            ),
        ),
    ),
    "a learner dies between its pushes to the shards, and who gave up for it asks the others for a clock that never comes": Draw(
        way="backup-abort",
        shards=4,
        learners=2,
        evaluator=False,
        tolerant=True,
        seed=2032491446,
        every_updates=2,
        latency_ns=5000,
        eager_nbytes=0,
        reorders=True,
        flush_rows=256,
        attempts=((Fault(what="kill", rank=4, at_call=65, both=False),),),
    ),
}
