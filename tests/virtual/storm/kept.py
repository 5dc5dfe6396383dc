"""Schedules that have found something, and what. Each is a whole draw: how others are drawn may change."""

from __future__ import annotations

from tests.virtual.storm.draw import EVER_S, Damage, Draw, Fault

# fmt: off
KEPT: dict[str, Draw] = {
    "a learner of two ranks is lost at the end of one shard, told to stop by others: run again, one rank waited for ever": Draw(
        way="hardsync-local", shards=4, learners=4, evaluator=False, tolerant=True, seed=1542449294, every_updates=2,
        latency_ns=500000, eager_nbytes=4096, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="unsaved", rank=2, at_s=0.1740520956250232, lasts_s=0.8614811559772497, both=False),
                Fault(what="hang", rank=2, at_s=0.1668040556640916, lasts_s=0.7634064733052824),
            ),
            (
                Fault(what="slow", rank=11, at_s=0.15604798664649622, lasts_s=0.12317768948946403, both=False),
                Fault(what="kill", rank=10, at_s=0.04906806029277272),
                Fault(what="slow", rank=8, at_s=0.22560797197830865, lasts_s=0.37499207627161435, both=False),
                Fault(what="hang", rank=2, at_s=0.04450933366644589, lasts_s=0.7376135454484429),
                Fault(what="signal", at_s=0.13728804801282057),
            ),
        ),
        again=(2, 5), freed="deaths", group_size=2, micro_batches=4, alternating=True,
        damages=(
            Damage(what="swapped", of="snapshots", after=1, seed=112504809),
            Damage(what="missing", of="checkpoint", after=1, seed=99135132),
            Damage(what="torn", of="checkpoint", after=1, seed=1393167601),
        ),
    ),
    "a push came in part, and the power went before its loss was in the log: no shard of the rerun knew of losses": Draw(
        way="ssp-own", shards=1, learners=5, evaluator=True, tolerant=True, seed=114664805, every_updates=1,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=(
            (
                Fault(what="kill", rank=2, at_call=111, both=False),
                Fault(what="cut", rank=4, at_s=0.021842590964771025, lasts_s=0.7744561973431853, other=5),
                Fault(what="power", rank=3, at_s=0.16471747755068059, both=False),
                Fault(what="kill", rank=4, at_s=0.0785685348039268),
                Fault(what="jump", rank=3, by_s=123.42298497234155),
                Fault(what="jump", rank=2, by_s=-296284.2997459776),
                Fault(what="jump", rank=6, at_s=0.18448293209086655, by_s=2156.0865088996534),
                Fault(what="end", at_s=0.20317985884970396),
            ),
        ),
        again=(3, 5), freed="deaths", damages=(Damage(what="missing", of="checkpoint", after=0, seed=9169122),),
    ),
    "a missed learner's push is torn, all others die, it is back: the shard awaited a push of that clock again": Draw(
        way="hardsync", shards=4, learners=3, evaluator=False, tolerant=True, seed=1569318859, every_updates=0,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="slow", rank=7, at_s=0.11872275738439758, lasts_s=0.6069051740614383, both=False),
                Fault(what="slow", rank=2, at_s=0.03363176866779328, lasts_s=0.34336582270567945, both=False),
                Fault(what="kill", rank=6, at_s=0.061499341520414995, both=False),
                Fault(what="kill", rank=11, at_s=0.17317037353996953, both=False),
                Fault(what="stop", rank=10, at_s=0.1365572603064667, lasts_s=0.6040520851319517, both=False),
            ),
        ),
        again=(0, 0), group_size=3, micro_batches=2, alternating=True,
    ),
    "told to stop by other shards, a learner leaves where all wait: run again, a loss came before the waits": Draw(
        way="hardsync-rounded", shards=4, learners=5, evaluator=False, tolerant=True, seed=42403524, every_updates=3,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=16,
        attempts=(
            (
                Fault(what="cut", rank=8, at_s=0.07270536190440399, lasts_s=EVER_S, other=1),
                Fault(what="kill", rank=8, at_call=23, both=False),
                Fault(what="slow", rank=3, at_s=0.23243565775893393, lasts_s=0.5850009356453081),
            ),
            (
                Fault(what="stop", rank=7, at_s=0.14526667047594247, lasts_s=0.13370260885368268),
                Fault(what="stop", rank=4, at_call=34, lasts_s=EVER_S),
            ),
        ),
        again=(4, 5), freed="end",
    ),
    "learner 2 dies, a shard's disk hangs, the other misses all, and ends: the shard that woke had no learner, and failed": Draw(
        way="downpour", shards=2, learners=3, evaluator=False, tolerant=True, seed=1606115325, every_updates=5,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="kill", rank=4, at_call=57, both=False),
                Fault(what="hang", rank=1, at_s=0.061264050741846564, lasts_s=6.62671271143421),
            ),
        ),
        again=(0, 0), freed="end",
    ),
    "cut off from one shard each, two learners are alive for the others; questions of that shard counted as life: all waited": Draw(
        way="versioned-stale", shards=4, learners=2, evaluator=False, tolerant=True, seed=150073167, every_updates=2,
        latency_ns=500000, eager_nbytes=4096, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="jump", rank=1, at_s=0.00640490961622846, by_s=-3226.14820589983),
                Fault(what="power", at_s=0.11430972341474986),
            ),
            (
                Fault(what="cut", rank=4, at_s=0.27108181179934343, lasts_s=EVER_S, other=3, both=False),
                Fault(what="cut", rank=5, at_s=0.02080918092772487, lasts_s=EVER_S, other=1, both=False),
                Fault(what="slow", rank=3, at_s=0.22162143802019918, lasts_s=0.1378552187507193),
                Fault(what="jump", rank=3, at_s=0.04332369133414504, by_s=4857.5112428031125),
                Fault(what="jump", at_s=0.0837503467037123, by_s=14818.505063184974),
                Fault(what="hang", rank=3, at_s=0.09449619891120249, lasts_s=0.6627934910255735),
            ),
        ),
        again=(4, 2), freed="end",
        damages=(
            Damage(what="swapped", of="checkpoint", after=0, seed=1561250394),
            Damage(what="flipped", of="checkpoint", after=0, seed=241854846),
        ),
    ),
    "a shard had no gradient before a checkpoint, thus no momentum, its neighbour had: the two could not be cut anew": Draw(
        way="ssp-own", shards=2, learners=4, evaluator=False, tolerant=True, seed=1142450025, every_updates=2,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=(
            (
                Fault(what="cut", rank=5, at_s=0.2217112788505493, lasts_s=EVER_S, other=1),
                Fault(what="stop", rank=4, at_call=52, lasts_s=EVER_S, both=False),
                Fault(what="kill", rank=4, at_call=11, both=False),
                Fault(what="stop", rank=2, at_s=0.038477864342936846, lasts_s=EVER_S),
                Fault(what="stop", rank=3, at_s=0.1319642017072079, lasts_s=EVER_S),
                Fault(what="stop", rank=4, at_s=0.356905560618126, lasts_s=EVER_S),
                Fault(what="stop", rank=5, at_s=0.13991293356054474, lasts_s=EVER_S),
            ),
            (
                Fault(what="cut", rank=4, at_s=0.28194137018055404, lasts_s=0.6953123789519304, other=5, both=False),
                Fault(what="stop", rank=3, at_call=88, lasts_s=0.17727900267089855),
            ),
        ),
        again=(3, 3), freed="deaths",
    ),
    "interrupted, without learners, a shard is stopped for ever: nobody asked for its signs of life, shard 0 waited": Draw(
        way="ssp", shards=4, learners=3, evaluator=False, tolerant=True, seed=122668986, every_updates=1,
        latency_ns=50000, eager_nbytes=0, reorders=True, flush_rows=16,
        attempts=(
            (
                Fault(what="stop", rank=2, at_call=47, lasts_s=EVER_S),
                Fault(what="kill", rank=8, at_call=109, both=False),
                Fault(what="signal", rank=3, at_s=0.021504182273833484),
                Fault(what="stop", rank=4, at_s=0.038012651138530376, lasts_s=EVER_S),
                Fault(what="stop", rank=5, at_s=0.03493420744543099, lasts_s=EVER_S),
                Fault(what="stop", rank=6, at_s=0.31890031268287394, lasts_s=EVER_S),
                Fault(what="stop", rank=7, at_s=0.0006004461358195962, lasts_s=EVER_S),
                Fault(what="stop", rank=8, at_s=0.29119650850998124, lasts_s=EVER_S),
                Fault(what="stop", rank=9, at_s=0.3486323793138426, lasts_s=EVER_S),
                Fault(what="signal", rank=0, at_s=0.14740669463277956),
            ),
        ),
        group_size=2, damages=(Damage(what="swapped", of="checkpoint", seed=112524751),),
    ),
    "logs of two shards are swapped before a run goes on: it came to its end with the rows of the other shard": Draw(
        way="downpour", shards=4, learners=2, evaluator=True, tolerant=True, seed=1308670628, every_updates=5,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="kill", rank=6, at_call=88, both=False),
                Fault(what="cut", rank=7, at_s=0.13768610189944808, lasts_s=0.582456386338985),
                Fault(what="cut", rank=8, at_s=0.21051982183178528, lasts_s=0.166840741992519, other=3, both=False),
                Fault(what="end", at_s=0.273215215963037),
            ),
        ),
        group_size=2, micro_batches=2, alternating=True,
        damages=(Damage(what="swapped", of="log", seed=876312508),), freed="both",
    ),
    "manifests of two checkpoints are swapped: a part of each was said to be torn, and no manifest was named": Draw(
        way="ssp", shards=1, learners=4, evaluator=True, tolerant=True, seed=368508039, every_updates=2,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=256,
        attempts=(
            (
                Fault(what="stop", rank=5, at_call=114, lasts_s=0.5069834039783498),
                Fault(what="stop", rank=5, at_call=6, lasts_s=0.8473643412208006),
                Fault(what="end", at_s=0.13838541371294943),
            ),
        ),
        damages=(Damage(what="swapped", of="checkpoint", seed=1242477244),), freed="deaths",
    ),
    "whole checkpoints of two clocks are swapped: the older went by the name of the newer, which replay would look for": Draw(
        way="hardsync", shards=2, learners=3, evaluator=True, tolerant=True, seed=5, every_updates=1,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=4, attempts=((Fault("end", at_s=0.15),),),
        damages=(Damage("swapped", "clocks", seed=1),),
    ),
    "the newest checkpoint is only begun, and the one before, the only one, is damaged: the refusal did not name it": Draw(
        way="hardsync", shards=2, learners=3, evaluator=True, tolerant=True, seed=5, every_updates=2,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=4, attempts=((Fault("end", at_s=0.1),),),
        damages=(Damage("flipped", "checkpoint", seed=1),),
    ),
    "the last of all is missed when the others were told the end by another shard, and pushes too late: replay refused that": Draw(
        way="softsync", shards=4, learners=3, evaluator=False, tolerant=True, seed=213800534, every_updates=2,
        latency_ns=50000, eager_nbytes=0, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="stop", rank=12, at_call=65, lasts_s=0.3463850921660412),
                Fault(what="stop", rank=7, at_s=0.02087457447824027, lasts_s=0.8159018460877706, both=False),
            ),
        ),
        group_size=3, micro_batches=4, alternating=True, samples=96,
    ),
    "a group's first rank is killed when the others have pushed, rounded: replay compared a row that its shard never had": Draw(
        way="hardsync-rounded", shards=2, learners=5, evaluator=False, tolerant=True, seed=1790939889, every_updates=5,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="kill", rank=4, at_call=45),
                Fault(what="slow", rank=8, at_s=0.29333792766940026, lasts_s=0.33584789375197804),
                Fault(what="unsaved", rank=1, at_s=0.23361022219317507, lasts_s=0.3539704355654775),
            ),
        ),
        again=(2, 5), group_size=2,
    ),
    "a stage's memory began elsewhere than its part of the whole vector: a product with one row has other last bits there": Draw(
        way="async", shards=4, learners=5, evaluator=False, tolerant=False, seed=943973640, every_updates=2,
        latency_ns=500000, eager_nbytes=4096, reorders=True, flush_rows=16,
        attempts=(
            (
                Fault(what="unsaved", rank=0, at_s=0.2260020897360908, lasts_s=1.7201190175306174, both=False),
                Fault(what="slow", rank=7, at_s=0.2176944439961069, lasts_s=0.2867905449656446, both=False),
                Fault(what="stop", rank=15, at_call=107, lasts_s=0.9401877873822962, both=False),
            ),
        ),
        group_size=3, micro_batches=4, alternating=True,
    ),
    "own steps of stages: replay made one step of all, whose vector ends elsewhere, and the last bits depend on that": Draw(
        way="hardsync-local", shards=4, learners=3, evaluator=False, tolerant=True, seed=575244208, every_updates=3,
        latency_ns=5000, eager_nbytes=0, reorders=True, flush_rows=256, attempts=((),),
        group_size=2, micro_batches=2,
    ),
    "a learner dies where all meet, after its last word: the hub could not answer it, and ended the job": Draw(
        way="downpour-warm", shards=3, learners=4, evaluator=False, tolerant=True, seed=605160178, every_updates=3,
        latency_ns=50000, eager_nbytes=4096, reorders=False, flush_rows=256,
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
        way="backup-late", shards=3, learners=4, evaluator=False, tolerant=True, seed=772844444, every_updates=3,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="slow", rank=5, at_s=0.20840545136613448, lasts_s=0.6974672660308415, both=False),
                Fault(what="stop", rank=3, at_call=115, lasts_s=0.6938766878342084),
                Fault(what="stop", rank=5, at_call=193, lasts_s=0.8877900084592959, both=False),
            ),
        ),
    ),
    "learners are missed after a time-out, in one clock: replay took them in another order, and refused a true log": Draw(
        way="timeout", shards=2, learners=4, evaluator=True, tolerant=True, seed=1801185820, every_updates=3,
        latency_ns=50000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=((Fault(what="stop", rank=3, at_call=56, lasts_s=0.7283979982767251),),),
    ),
    "a learner is missed, back and passed while pushes are kept for the turn of another: replay took them in another order": Draw(
        way="hardsync", shards=3, learners=5, evaluator=True, tolerant=True, seed=1680894456, every_updates=0,
        latency_ns=50000, eager_nbytes=0, reorders=True, flush_rows=16,
        attempts=(
            (
                Fault(what="slow", rank=8, at_s=0.17141098187582338, lasts_s=0.45186870632761755, both=False),
                Fault(what="cut", rank=3, at_s=0.14848580923698168, lasts_s=0.559895400191243),
                Fault(what="stop", rank=5, at_call=17, lasts_s=0.5906349529459182),
            ),
        ),
    ),
    "a learner dies between its pushes to the shards, and who gave up for it asks the others for a clock that never comes": Draw(
        way="backup-abort", shards=4, learners=2, evaluator=False, tolerant=True, seed=2032491446, every_updates=2,
        latency_ns=5000, eager_nbytes=0, reorders=True, flush_rows=256,
        attempts=((Fault(what="kill", rank=4, at_call=65, both=False),),),
    ),
    "who evaluates hangs, is given up, and wakes when another has evaluated all: it took the place of that one's log": Draw(
        way="ssp-own", shards=2, learners=5, evaluator=False, tolerant=True, seed=1915442474, every_updates=3,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="unsaved", rank=1, at_s=0.015241010486387485, lasts_s=0.561062689136747),
                Fault(what="stop", rank=5, at_call=53, lasts_s=0.49567395838861894, both=False),
            ),
        ),
    ),
    "a missed learner pushes when all others have left, for another shard has finished: replay refused a true log": Draw(
        way="downpour-warm", shards=3, learners=4, evaluator=False, tolerant=True, seed=1162221901, every_updates=5,
        latency_ns=500000, eager_nbytes=4096, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="slow", rank=2, at_s=0.23167970735936788, lasts_s=0.523175286925825, both=False),
                Fault(what="kill", rank=3, at_call=30, both=False),
                Fault(what="cut", rank=4, at_s=0.038586792304290726, lasts_s=0.09846305070341067, other=6),
                Fault(what="kill", rank=5, at_s=0.17010563174774493, both=False),
            ),
        ),
    ),
    "a shard ends without a learner that hangs; the others waited for that, and it for the one that had ended": Draw(
        way="softsync", shards=4, learners=4, evaluator=False, tolerant=True, seed=1233647008, every_updates=2,
        latency_ns=5000, eager_nbytes=4096, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="cut", rank=4, at_s=0.053800776871180685, lasts_s=0.3176639100551777, other=2),
                Fault(what="stop", rank=7, at_call=67, lasts_s=0.6405506476452488),
                Fault(what="unsaved", rank=0, at_s=0.0519272373923889, lasts_s=0.3454853027789179),
            ),
        ),
    ),
    "one shard is stopped while the others go on without a learner, which then asks it for their clock: it took no notice": Draw(
        way="hardsync", shards=4, learners=5, evaluator=True, tolerant=True, seed=1918519204, every_updates=2,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=256,
        attempts=(
            (
                Fault(what="slow", rank=6, at_s=0.010824147351258695, lasts_s=0.16732735349816477),
                Fault(what="slow", rank=5, at_s=0.028166000230337416, lasts_s=0.03826754908060928),
                Fault(what="slow", rank=6, at_s=0.026427685715477166, lasts_s=0.8669039184251653),
                Fault(what="full", rank=0, at_s=0.26754880014118143, both=False),
                Fault(what="stop", rank=0, at_call=59, lasts_s=0.6581831294196142, both=False),
            ),
        ),
    ),
    "a learner that is to evaluate is given up by another shard, where it says goodbye: nobody evaluated, for ever": Draw(
        way="versioned-stale", shards=2, learners=3, evaluator=True, tolerant=True, seed=1949346304, every_updates=2,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=16,
        again=(1, 2),
        attempts=(
            (
                Fault(what="kill", rank=2, at_s=0.2148820795142994),
                Fault(what="unsaved", rank=1, at_s=0.19474552265303685, lasts_s=0.520986942983831),
                Fault(what="cut", rank=5, at_s=0.1524274718966926, lasts_s=0.5512720865777783, other=1, both=False),
            ),
        ),
    ),
    "a learner dies, and one that was stopped comes back when a shard has ended without it: the others waited for it": Draw(
        way="backup", shards=4, learners=5, evaluator=True, tolerant=True, seed=926582745, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="stop", rank=9, at_s=0.22094908476170846, lasts_s=0.5081748096705376, both=False),
                Fault(what="kill", rank=7, at_call=95),
                Fault(what="kill", rank=7, at_call=106, both=False),
            ),
        ),
    ),
    "a gradient of a learner that was missed comes in part: replay refused a true log": Draw(
        way="backup-abort", shards=4, learners=4, evaluator=True, tolerant=True, seed=1733845244, every_updates=2,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=256,
        attempts=(
            (
                Fault(what="slow", rank=5, at_s=0.29367543592887846, lasts_s=0.5696747183951317, both=False),
                Fault(what="cut", rank=4, at_s=0.005956225873197429, lasts_s=0.8186411623698059, other=5),
                Fault(what="slow", rank=3, at_s=0.044263134396715864, lasts_s=0.8222506937239842),
            ),
        ),
    ),
    "an evaluator that was given up asks for a snapshot: that was refused as of a bug, or a foreign program": Draw(
        way="async", shards=2, learners=5, evaluator=True, tolerant=True, seed=743534783, every_updates=0,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=16,
        attempts=(
            (
                Fault(what="cut", rank=6, at_s=0.06530556055399625, lasts_s=0.7746867641585063),
                Fault(what="cut", rank=7, at_s=0.13240003434460246, lasts_s=0.8778467668309538),
                Fault(what="stop", rank=7, at_s=0.2233230907644285, lasts_s=0.4623567352115634, both=False),
            ),
        ),
    ),
    "all have left but one that was missed, whose push then comes late: replay refused a true log": Draw(
        way="versioned-stale", shards=4, learners=2, evaluator=False, tolerant=True, seed=2000545112, every_updates=3,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=(
            (
                Fault(what="kill", rank=4, at_s=0.0758918053497883),
                Fault(what="signal", rank=5, at_s=0.18627942583505644, both=False),
                Fault(what="full", rank=1, at_s=0.008911484387300227),
            ),
            (
                Fault(what="cut", rank=4, at_s=0.2695692487277079, lasts_s=0.5645538851673486, other=1, both=False),
                Fault(what="cut", rank=4, at_s=0.003964272597864638, lasts_s=0.44756095903503956, other=5),
            ),
        ),
    ),
    "a gradient comes in part, and its job ends before a shard can say that the learner is lost: replay refused a true log": Draw(
        way="ssp-own", shards=3, learners=2, evaluator=False, tolerant=True, seed=302340723, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="stop", rank=4, at_s=0.14819774901609375, lasts_s=0.20047174718907348, both=False),
                Fault(what="kill", rank=4, at_call=44, both=False),
                Fault(what="kill", rank=3, at_call=65),
                Fault(what="kill", rank=3, at_call=83),
                Fault(what="stop", rank=3, at_call=7, lasts_s=0.2216084142549512, both=False),
            ),
        ),
    ),
    "an evaluator hangs with its first snapshot, another evaluates everything, it wakes: it replaced that one's log": Draw(
        way="async-accumulated", shards=3, learners=3, evaluator=False, tolerant=True, seed=1239539642, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=(
            (
                Fault(what="slow", rank=0, at_s=0.16628749310929405, lasts_s=0.7611404955023364),
                Fault(what="stop", rank=3, at_call=120, lasts_s=0.33303419083708596),
                Fault(what="unsaved", rank=0, at_s=0.09599862355347326, lasts_s=0.26680022357895555),
            ),
        ),
        again=(1, 3),
    ),
    "one shard has missed nobody, and all wait there for the clock of the others: they waited for ever": Draw(
        way="versioned", shards=4, learners=3, evaluator=False, tolerant=True, seed=2080669977, every_updates=3,
        latency_ns=5000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=(
            (
                Fault(what="stop", rank=5, at_call=94, lasts_s=0.22820177944464654),
                Fault(what="stop", rank=5, at_call=79, lasts_s=0.22307185305769658, both=False),
                Fault(what="cut", rank=4, at_s=0.0777839061549761, lasts_s=0.39247634977748536),
                Fault(what="cut", rank=6, at_s=0.04947838355122308, lasts_s=0.03805992459394948, other=1),
                Fault(what="stop", rank=5, at_call=20, lasts_s=0.0967705816678613),
            ),
        ),
    ),
    "a rejected gradient comes again, in part: its learner was told of the rejection once more": Draw(
        way="versioned", shards=3, learners=2, evaluator=True, tolerant=True, seed=1717434112, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="kill", rank=0, at_s=0.22551334329979855, both=False),
                Fault(what="slow", rank=4, at_s=0.28787022711293286, lasts_s=12.0),
            ),
            (
                Fault(what="cut", rank=4, at_s=0.05171676848335636, lasts_s=0.061226453963377996, other=2, both=False),
                Fault(what="cut", rank=5, at_s=0.019384538943709118, lasts_s=0.11117291835026515, other=3, both=False),
                Fault(what="slow", rank=0, at_s=0.1901691516432379, lasts_s=0.5784937429303998),
                Fault(what="stop", rank=4, at_call=91, lasts_s=0.6611900231236569, both=False),
            ),
        ),
    ),
    "an evaluator that was given up comes back: the answer to it went to the one that was appointed": Draw(
        way="async", shards=4, learners=4, evaluator=True, tolerant=True, seed=1667075557, every_updates=3,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="slow", rank=1, at_s=0.10044046928023663, lasts_s=0.8598591042730463),
                Fault(what="stop", rank=5, at_call=63, lasts_s=0.7169614268458744, both=False),
                Fault(what="stop", rank=8, at_s=0.010057491741992997, lasts_s=0.599879855255808, both=False),
                Fault(what="kill", rank=7, at_s=0.14602085419028588, both=False),
                Fault(what="unsaved", rank=1, at_s=0.12408308146215649, lasts_s=0.39810515514103345),
            ),
        ),
    ),
    "the only learner left was missed by one shard, and waits there for a later clock: nobody answered it": Draw(
        way="timeout", shards=4, learners=2, evaluator=False, tolerant=True, seed=1442216875, every_updates=3,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=256,
        attempts=(
            (
                Fault(what="slow", rank=0, at_s=0.029209460563550137, lasts_s=0.14092584831628133),
                Fault(what="slow", rank=1, at_s=0.23818722540860807, lasts_s=0.34161785093303787, both=False),
                Fault(what="stop", rank=4, at_call=46, lasts_s=0.8373859056826134, both=False),
                Fault(what="kill", rank=5, at_s=0.22074733123428633, both=False),
            ),
        ),
        again=(3, 3),
    ),
    "resumed, a shard lacks what came again only because another had rejected it: books missed it": Draw(
        way="versioned", shards=4, learners=3, evaluator=True, tolerant=True, seed=1676239429, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=(
            (Fault(what="signal", rank=1, at_s=0.21418486840241419, both=False),),
            (
                Fault(what="unsaved", rank=3, at_s=0.2255661268996293, lasts_s=0.6340840052160814),
                Fault(what="kill", rank=4, at_call=10),
            ),
        ),
    ),
    "resumed, one shard had applied a gradient that others had not; who was aborted by these was waited for by that one": Draw(
        way="backup-abort", shards=3, learners=3, evaluator=False, tolerant=False, seed=1154327218, every_updates=2,
        latency_ns=50000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=(
            (
                Fault(what="cut", rank=1, at_s=0.29099540598219265, lasts_s=0.10551297919900429, other=3),
                Fault(what="full", rank=1, at_s=0.09525929976394083),
                Fault(what="kill", rank=2, at_s=0.10233975414928832),
            ),
        ),
    ),
    "the evaluator hangs, and shard 0 has a learner follow it; what it had asked came late and took the place back": Draw(
        way="hardsync", shards=3, learners=2, evaluator=True, tolerant=True, seed=580762183, every_updates=3,
        latency_ns=50000, eager_nbytes=0, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="stop", rank=6, at_call=71, lasts_s=0.5922495491562305, both=False),
                Fault(what="kill", rank=4, at_call=117, both=False),
                Fault(what="stop", rank=9, at_call=26, lasts_s=0.5488429854782098),
                Fault(what="stop", rank=6, at_s=0.2835813824003063, lasts_s=0.40117276133986896),
            ),
        ),
        again=(3, 3), group_size=3, micro_batches=4,
    ),
    "shard 0 behind a slow link gave up all who could evaluate, one after the other, and ended the job": Draw(
        way="async-rounded", shards=1, learners=3, evaluator=False, tolerant=True, seed=219635494, every_updates=2,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=(
            (
                Fault(what="stop", rank=2, at_s=0.2668543089851262, lasts_s=0.16659473729606872, both=False),
                Fault(what="stop", rank=0, at_call=112, lasts_s=0.7346902224887105),
                Fault(what="slow", rank=0, at_s=0.1204956924716113, lasts_s=12.0),
                Fault(what="stop", rank=1, at_call=15, lasts_s=0.8837327262296371, both=False),
                Fault(what="kill", rank=2, at_s=0.1121762087947883),
            ),
        ),
    ),
    "a learner that is missed pushes in part, and is back by its pull: replay had it back with that push, and refused it": Draw(
        way="hardsync", shards=4, learners=4, evaluator=False, tolerant=True, seed=591446589, every_updates=0,
        latency_ns=500000, eager_nbytes=4096, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="slow", rank=1, at_s=0.2803172932558315, lasts_s=0.6411575384924378),
                Fault(what="kill", rank=5, at_call=88, both=False),
                Fault(what="stop", rank=7, at_s=0.18699111248915276, lasts_s=0.7227103300382464, both=False),
            ),
        ),
    ),
    "the evaluator hangs until rank 0, which waits no longer for it, has said DONE and is gone: it failed": Draw(
        way="hardsync-rounded", shards=3, learners=3, evaluator=True, tolerant=True, seed=794163413, every_updates=2,
        latency_ns=50000, eager_nbytes=4096, reorders=False, flush_rows=256,
        attempts=((Fault(what="stop", rank=6, at_call=54, lasts_s=12.0),),),
        samples=96,
    ),
    "a snapshot of two clocks is evaluated, and its slices are cut anew: replay expected the clock that they have since": Draw(
        way="versioned", shards=3, learners=5, evaluator=False, tolerant=True, seed=277612144, every_updates=2,
        latency_ns=5000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="slow", rank=17, at_s=0.12722165139297162, lasts_s=0.2699416045315534, both=False),
                Fault(what="end", rank=15, at_s=0.2267030638594178),
            ),
        ),
        again=(3, 3), group_size=3, micro_batches=2, samples=96,
    ),
    "a missed learner, stopped by another shard, says goodbye: its protocol lost it twice": Draw(
        way="backup-late", shards=2, learners=5, evaluator=False, tolerant=True, seed=362485887, every_updates=3,
        latency_ns=50000, eager_nbytes=0, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="stop", rank=2, at_s=0.18801936185081397, lasts_s=1000000.0),
                Fault(what="stop", rank=4, at_call=58, lasts_s=0.4605135570177535, both=False),
                Fault(what="slow", rank=1, at_s=0.14156204713653006, lasts_s=0.13843630440293556, both=False),
                Fault(what="cut", rank=6, at_s=0.1897977873365991, lasts_s=0.10737287611871886, other=4, both=False),
            ),
        ),
        freed="deaths",
    ),
    "a learner, heard for this update, is missed, and back as the last hope: the shard awaited its push again": Draw(
        way="hardsync", shards=2, learners=2, evaluator=False, tolerant=True, seed=989466340, every_updates=3,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="stop", rank=3, at_call=97, lasts_s=1000000.0),
                Fault(what="cut", rank=2, at_s=0.1955852160443378, lasts_s=0.5676558195329117, other=3),
                Fault(what="unsaved", rank=1, at_s=0.08213340334563729, lasts_s=0.1456662533099154),
                Fault(what="jump", rank=3, at_s=0.11697822863602093, by_s=-525.9678673516438),
                Fault(what="jump", rank=2, at_s=0.22124463754155202, by_s=-1600.547949317727),
            ),
            (
                Fault(what="slow", rank=3, at_s=0.19150242473038395, lasts_s=0.31558485754164767),
                Fault(what="cut", rank=3, at_s=0.1774769125191357, lasts_s=1000000.0, other=1),
                Fault(what="kill", rank=3, at_call=31),
                Fault(what="jump", rank=0, by_s=-22.960303375505113),
            ),
        ),
    ),
    "after a signal the last learner present is lost, and another only missed: the evaluator waited for ever": Draw(
        way="backup-abort", shards=3, learners=4, evaluator=True, tolerant=True, seed=863810454, every_updates=3,
        latency_ns=5000, eager_nbytes=0, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="slow", rank=10, at_s=0.13686036881181524, lasts_s=0.04176302434697939, both=False),
                Fault(what="kill", rank=9, at_s=0.09324359034666709),
                Fault(what="kill", rank=4, at_call=20),
                Fault(what="stop", rank=3, at_s=0.014484333670997121, lasts_s=1000000.0),
                Fault(what="stop", rank=5, at_s=0.315221666822731, lasts_s=1000000.0),
                Fault(what="stop", rank=6, at_s=0.26538269936688896, lasts_s=1000000.0),
                Fault(what="stop", rank=7, at_s=0.2995679343480264, lasts_s=1000000.0),
                Fault(what="stop", rank=8, at_s=0.020128618909314125, lasts_s=1000000.0),
                Fault(what="stop", rank=9, at_s=0.054810368324937866, lasts_s=1000000.0),
                Fault(what="stop", rank=10, at_s=0.30512856593904886, lasts_s=1000000.0),
                Fault(what="signal", rank=0, at_s=0.11937122216498698),
            ),
            (
                Fault(what="kill", rank=5, at_call=56),
                Fault(what="signal", rank=0, at_s=0.26697422551690225),
            ),
        ),
        group_size=2, micro_batches=2, freed="end",
    ),
    "by layers: a learner is killed before its first push, given weights by some shards: run again, it did not ask": Draw(
        way="async, layered", shards=3, learners=3, evaluator=False, tolerant=True, seed=1071695506, every_updates=3,
        latency_ns=5000, eager_nbytes=4096, reorders=False, flush_rows=16,
        attempts=((Fault(what="kill", rank=5, at_call=24),),),
    ),
    "by layers: a learner is killed between the pulls of two shards: run again, it did not ask": Draw(
        way="ssp, layered", shards=3, learners=2, evaluator=False, tolerant=True, seed=572013541, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=((Fault(what="kill", rank=4, at_s=0.11253550100008045),),),
    ),
    "by layers: pulls of one clock came in another order than the pushes: run again, shards waited in a circle": Draw(
        way="async, layered", shards=4, learners=5, evaluator=False, tolerant=True, seed=98800926, every_updates=3,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=4,
        attempts=((Fault(what="full", rank=1, at_s=0.06210671707919924),),),
    ),
    "a signal is heard behind the update of a norm agreed on: run again, before the update": Draw(
        way="hardsync, agreed", shards=4, learners=3, evaluator=True, tolerant=False, seed=1056325697, every_updates=2,
        latency_ns=500000, eager_nbytes=0, reorders=True, flush_rows=16,
        attempts=((Fault(what="signal", rank=5, at_s=0.14452170199263395),),),
    ),
    "shard 0 is killed with a push under way that another shard has: run again, its portion was dealt anew": Draw(
        way="async-rounded, dealt", shards=2, learners=2, evaluator=False, tolerant=False, seed=1207868628, every_updates=2,
        latency_ns=50000, eager_nbytes=4096, reorders=False, flush_rows=256,
        attempts=(
            (
                Fault(what="power", rank=1, at_s=0.2799855932566123, both=False),
                Fault(what="slow", rank=2, at_s=0.09293213714783466, lasts_s=0.2106661615215785),
            ),
        ),
    ),
    "a portion is pushed again after the last update: hardsync refused its clock": Draw(
        way="hardsync-rounded, dealt", shards=3, learners=5, evaluator=False, tolerant=True, seed=399882725, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=256,
        attempts=(
            (
                Fault(what="kill", rank=3, at_call=37),
                Fault(what="hang", rank=1, at_s=0.25286622844317, lasts_s=4.371699062549878),
            ),
        ),
        freed="both",
    ),
    "all portions are applied, and learners are given up before a shard hears the last goodbye: the job failed": Draw(
        way="backup-abort, dealt", shards=3, learners=3, evaluator=False, tolerant=True, seed=1188807044, every_updates=3,
        latency_ns=5000, eager_nbytes=4096, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="stop", rank=5, at_s=0.22771040588976568, lasts_s=1000000.0),
                Fault(what="hang", rank=1, at_s=0.11425240980368194, lasts_s=3.7870498571961697),
            ),
        ),
    ),
    "two missed learners that wait for one update are back: run again, one was not admitted": Draw(
        way="async-bounded, layered", shards=4, learners=5, evaluator=False, tolerant=True, seed=1966746372, every_updates=0,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=((Fault(what="kill", rank=7, at_s=0.28113898285959804, both=False),),),
    ),
    "a missed learner is back after the end, and told to stop: run again, it left by itself": Draw(
        way="async-rounded, layered", shards=4, learners=5, evaluator=False, tolerant=True, seed=1650981133, every_updates=2,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=16,
        attempts=((Fault(what="stop", rank=4, at_call=29, lasts_s=0.49365235223512344, both=False),),),
    ),
    "a killed shard's log lacks the answer before a goodbye: run again, the goodbye never came": Draw(
        way="versioned", shards=4, learners=5, evaluator=False, tolerant=True, seed=512220640, every_updates=3,
        latency_ns=50000, eager_nbytes=4096, reorders=False, flush_rows=4,
        attempts=((Fault(what="power", at_s=0.17077460417134782),),),
    ),
    "a missed learner is back after a signal by a push that no row tells: run again, it pulled too late": Draw(
        way="hardsync-local", shards=4, learners=4, evaluator=True, tolerant=True, seed=1430487273, every_updates=5,
        latency_ns=500000, eager_nbytes=0, reorders=False, flush_rows=4,
        attempts=(
            (
                Fault(what="signal", rank=6, at_s=0.19394698605401275),
                Fault(what="hang", rank=3, at_s=0.1027518538744059, lasts_s=0.3110514252045754),
            ),
        ),
        group_size=2, micro_batches=4,
    ),
    "a missed learner pulls while others wait for a lagging shard: run again, it was given weights and not stopped": Draw(
        way="versioned", shards=3, learners=4, evaluator=False, tolerant=True, seed=931658486, every_updates=5,
        latency_ns=5000, eager_nbytes=4096, reorders=False, flush_rows=16,
        attempts=(
            (
                Fault(what="stop", rank=4, at_call=77, lasts_s=0.5281029733890167),
                Fault(what="kill", rank=6, at_s=0.05838723353514613, both=False),
            ),
        ),
    ),
    "a learner hangs within a push between two without a pull: run again, it waited for weights in between": Draw(
        way="downpour", shards=2, learners=3, evaluator=False, tolerant=True, seed=1825279107, every_updates=0,
        latency_ns=500000, eager_nbytes=4096, reorders=True, flush_rows=256,
        attempts=(
            (
                Fault(what="stop", rank=2, at_s=0.006779551428234221, lasts_s=EVER_S, both=False),
                Fault(what="stop", rank=7, at_call=19, lasts_s=EVER_S, both=False),
                Fault(what="stop", rank=3, at_s=0.228, lasts_s=EVER_S),
                Fault(what="stop", rank=4, at_s=0.073, lasts_s=EVER_S),
                Fault(what="stop", rank=5, at_s=0.289, lasts_s=EVER_S),
                Fault(what="stop", rank=6, at_s=0.318, lasts_s=EVER_S),
            ),
            (Fault(what="slow", rank=1, at_s=0.04499210462424206, lasts_s=0.09096045340237931),),
        ),
        freed="both", group_size=2,
    ),
}
# fmt: on
