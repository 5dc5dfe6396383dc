"""Weights pulled as bfloat16: the host keeps is what the definition says, bit for bit; bytes, replay, and what is refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.exchange import deltas
from mpisgd.exchange.shard_channel import ShardChannel
from mpisgd.protocols import PROTOCOLS
from mpisgd.serving.answering import Answering
from tests.effort import spread
from tests.unit.gradient.test_rounding import to_bfloat16, widened
from tests.virtual.jobs import SIZES, TENSORS, simulated
from tests.virtual.test_laws import drawn_jobs, obeys
from tests.virtual.test_one_learner import ALONE, ALPHA, ByHand, weights
from tests.virtual.test_told import reported

HALF = {"pull_format": "bfloat16"}
JOB: dict[str, Any] = {**HALF, "alpha0": 0.02, "model": {"name": "mlp", "hidden": [8, 7]}}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"protocol": {"name": name}} for name in PROTOCOLS if name != "allreduce"},
    "backup": {"protocol": {"name": "backup", "b": 1}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "layers": {"protocol": "async", "per_layer": True},
    "abort": {"protocol": {"name": "backup", "b": 2, "abort": True}},
    "versioned-stale": {"protocol": {"name": "versioned", "tolerance": 1}},
    "local": {"protocol": "async", "epochs": 2, "local_steps": 2, "inner_alpha0": 0.01, "alpha0": 0.7},
    "own steps": {"protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4}, "epochs": 2},
    "streamed": {"protocol": "hardsync", "way": "streamed"},
    "layers of one clock": {"protocol": "hardsync", "per_layer": True},
    "teams": {"protocol": "hardsync", "aggregation": "node", "team_size": 2, "virtual": {"learners": 4, "ranks_per_node": 7}},
}


class Watch:
    """What shards had and sent, and what learners held then, in the order of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: dict[int, dict[int, np.ndarray]] = {}
        """Of each shard, by clock."""
        self.given: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        """Of each learner and shard, the clocks and bytes that it was given."""
        self.held: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        begin, follow, start, take = Answering.begin, Answering.follow, ShardChannel.start_answers, deltas.Held.take

        def on_begin(answering: Answering) -> None:
            self.weights[answering._channel._shard] = {0: answering._update.weights.numpy().copy()}
            begin(answering)

        def on_follow(answering: Answering) -> None:
            of = self.weights[answering._channel._shard]
            of[len(of)] = answering._update.weights.numpy().copy()
            follow(answering)

        def on_start(channel: ShardChannel, learner_ids: list[int], body: Any, clock: int, verdicts: dict[int, int]) -> None:
            for learner_id in learner_ids:
                self.given[learner_id, channel._shard].append((clock, body.nbytes))
            start(channel, learner_ids, body, clock, verdicts)

        def on_take(held: deltas.Held, shard: int, nbytes: int) -> None:
            take(held, shard, nbytes)
            self.held[self.learners.index(held), shard].append(held._weights[shard].numpy().copy())

        def made(held: deltas.Held, *arguments: Any, **named: Any) -> None:
            self.learners.append(held)
            init(held, *arguments, **named)

        self.learners: list[deltas.Held] = []
        init = deltas.Held.__init__
        for owner, name, replacement in (
            (Answering, "begin", on_begin), (Answering, "follow", on_follow), (ShardChannel, "start_answers", on_start),
            (deltas.Held, "take", on_take), (deltas.Held, "__init__", made),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, replacement)


def way(held: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The next h, by integers alone."""
    there_from_here: np.ndarray = held + widened(to_bfloat16(there - held))
    return there_from_here


@pytest.mark.parametrize("name", spread(VARIANTS, 8))
def test_learners_hold_what_the_definition_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, on every pull; and replay, which knows clocks alone, has the same losses and weights."""
    watch = Watch(monkeypatch)
    run = simulated(tmp_path / "run", TENSORS, **{**JOB, "epochs": 1, **VARIANTS[name], "shards": 2})
    consistent = run.config["protocol"]["name"] in ("hardsync", "backup", "timeout") or name == "versioned"
    assert len(watch.weights) == 2
    assert len(watch.held) == 2 * run.lambda_
    for (learner_id, shard), held in watch.held.items():
        given, of_clock = watch.given[learner_id, shard], watch.weights[shard]
        common = [of_clock[0]]
        for clock in range(1, len(of_clock)):
            common.append(way(common[-1], of_clock[clock]))
        expected = np.empty(0, np.float32)
        for number, ((clock, nbytes), found) in enumerate(zip(given, held, strict=True)):
            if consistent:
                expected = common[clock]
                small = number > 0 and clock == given[number - 1][0] + 1
            else:
                expected = way(expected, of_clock[clock]) if number else of_clock[clock]
                small = number > 0
            assert found.tobytes() == expected.tobytes(), (learner_id, shard, number)
            assert nbytes == (2 if small else 4) * len(found)
        assert len(held) > 2
    monkeypatch.undo()
    assert replay.check(run.path, trust=True) == ""


@pytest.mark.parametrize("name", spread(ALONE, 8))
def test_with_one_learner_it_is_serial_sgd_at_what_it_holds(name: str, tmp_path: Path) -> None:
    by_hand = ByHand(tmp_path / "by_hand")
    theta = by_hand.weights()
    held = theta.clone()
    for seq in range(by_hand.mini_batches):
        theta = theta - ALPHA * by_hand.gradient(held, seq)
        held = held + (theta - held).bfloat16().float()
    found = weights(tmp_path / "run", ALONE[name], **HALF)
    torch.testing.assert_close(found, theta, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found, weights(tmp_path / "exact", ALONE[name]))


@pytest.mark.slow
@drawn_jobs(max_examples=6, most_learners=4, step=5)
def test_any_such_job_obeys(directory: Path, changes: dict[str, Any], jitter_s: float) -> None:
    job = {**changes, **HALF, "alpha0": 0.001, "ahead": 0, "way": changes["way"].replace("streamed", "whole")}
    job.pop("compensation", None)
    obeys(directory / "run", TENSORS, job, jitter_s)


@pytest.mark.parametrize("protocol", ["hardsync", {"name": "softsync", "n": 1}], ids=["hardsync", "softsync"])
def test_every_pull_but_the_first_is_half_as_long(protocol: Any, tmp_path: Path) -> None:
    """One learner, 4,000 bytes at 1,000 bytes/s: a pull takes 4 seconds, or 2; with both formats, a round trip half the bytes."""
    network = {"latency_s": 0.0, "overhead_s": 0.0, "bandwidth": 1e3, "node_bandwidth": 1e3, "local_bandwidth": 1e3}
    changes: dict[str, Any] = {"virtual": {"learners": 1}, "protocol": protocol, "network": network}
    for push, push_s in (("float32", 4.0), ("bfloat16", 2.0)):
        run = simulated(tmp_path / push, SIZES, **changes, **HALF, push_format=push)
        assert run.pushes["pull_s"].tolist() == [pytest.approx(4.0)] + [pytest.approx(2.0)] * (len(run.pushes) - 1)
        assert run.pushes["push_s"][1:] == pytest.approx(push_s)


def test_small_updates_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate at which bfloat16 of the weights hardly ever changes, learners are as near to the weights as their last way was."""
    watch = Watch(monkeypatch)
    run = simulated(tmp_path / "run", TENSORS, **{**JOB, "alpha0": 1e-5}, protocol="hardsync")
    last = int(run.summaries["final_clock"][0]) - 1
    first, before, there = (watch.weights[0][clock] for clock in (0, last - 1, last))
    held = watch.held[0, 0][-1]
    assert watch.given[0, 0][-1][0] == last
    moved, apart = np.abs(there - first), np.abs(there - held)
    assert np.median(moved[moved > 0]) < np.median(np.abs(first)) / 256
    assert (apart <= np.abs(there - before) / 128 + np.spacing(np.abs(there))).all()
    assert apart.max() < moved.max() / 50


@pytest.mark.slow
def test_training_ends_as_well_as_in_float32(tmp_path: Path) -> None:
    protocol = {"name": "softsync", "n": 4}
    digits = {"data": "digits", "model": {"name": "mlp", "hidden": [32]}, "mu": 8, "epochs": 6, "alpha0": 0.02}
    errors = {}
    for name, formats in {"float32": {}, "pull": HALF, "both": {**HALF, "push_format": "bfloat16"}}.items():
        run = simulated(tmp_path / name, TENSORS, **digits, **formats, protocol=protocol, shards=2)
        errors[name] = float(run.evaluations["error"][-1])
    assert errors["float32"] < 0.1
    assert max(errors["pull"], errors["both"]) < errors["float32"] + 0.012, errors


def test_the_report_says_so(tmp_path: Path) -> None:
    simulated(tmp_path / "run", SIZES, **HALF, epochs=0.2)
    assert reported(tmp_path / "run")["weights pulled"] == "as bfloat16; the part rounded off came with the next pull"
    simulated(tmp_path / "exact", SIZES, epochs=0.2)
    assert "weights pulled" not in reported(tmp_path / "exact")


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({"protocol": "async", "compensation": 0.1}, "compensation > 0: a gradient is squared at its learner's own weights"),
    ],
    ids=["compensation"],
)
def test_what_it_does_not_go_with(changes: dict[str, Any], beside: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"pull_format = 'bfloat16': expected 'float32' beside {beside}"):
        simulated(tmp_path / "run", SIZES, **HALF, **changes)
    assert not (tmp_path / "run").exists()


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pull_format"):
        simulated(tmp_path / "run", SIZES, pull_format="float16")
