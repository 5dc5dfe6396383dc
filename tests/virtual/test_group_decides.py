"""What the ranks of a group agree on besides clocks: the norm of a gradient, whether it is dropped, and whether it is given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpisgd import data, models, replay
from mpisgd.base.errors import DeadlockError, PeerError
from mpisgd.config import Config, DigitsOptions, MlpOptions
from mpisgd.data.sampling import EpochSampling
from mpisgd.exchange.learner_channel import LearnerChannel
from mpisgd.pipeline.group_channel import GroupChannel
from mpisgd.protocols import PROTOCOLS
from mpisgd.records.log.schema import Event, Verdict
from tests.effort import spread
from tests.virtual.jobs import TENSORS, bits, simulated
from tests.virtual.test_laws import obeys
from tests.virtual.test_optimisers import JOB, LEARNERS, MU, SEED, Weights, weights

UPDATES = 8
SOME = {**JOB, "epochs": UPDATES * LEARNERS * MU / 1437}
DEEP = {"name": "mlp", "hidden": [24, 16, 12]}
GROUPS = {"group_size": 3, "shards": 5, "micro_batches": 2, "mu": 12, "model": {"hidden": [5, 4, 6]}}
LATE = {"delay": "exponential", "delay_mean_s": 0.5}
ABORT = {"protocol": {"name": "backup", "b": 1, "abort": True}, "straggler": LATE}
WAYS: dict[str, dict[str, Any]] = {
    "given up": {**ABORT, "pipeline": "1f1b", "micro_batches": 4, "clip_norm": 0.4},
    "clipped": {"clip_norm": 0.5, "pipeline": "1f1b"},
    "clipped and rounded": {"clip_norm": 0.5, "push_format": "bfloat16", "protocol": {"name": "softsync", "n": 2}},
    "clipped own steps": {"clip_norm": 0.3, "protocol": {"name": "downpour", "n_push": 2, "n_fetch": 4}, "push_format": "bfloat16"},
    "largest": {"push_format": "topk", "topk_share": 0.2},
    "given up, rounded": {**ABORT, "push_format": "bfloat16"},
    "rounded pulls": {"pull_format": "bfloat16", "protocol": {"name": "softsync", "n": 2}},
    "given up while they compute": {"protocol": {"name": "backup", "b": 2, "abort": True}, "nonfinite": "drop"},
}


@pytest.mark.parametrize("name", spread(WAYS, 8))
def test_the_laws_hold_and_replay_proves_it(name: str, tmp_path: Path) -> None:
    laws = obeys(tmp_path / "run", TENSORS, {**GROUPS, **WAYS[name]}, 0.02)
    given_up = np.count_nonzero(laws.run.events["kind"] == Event.GAVE_UP)
    assert bool(given_up) == name.startswith("given up")


@pytest.mark.slow
@pytest.mark.parametrize("jitter_s", spread([0.0, 0.01, 0.2], 3))
def test_a_stage_that_is_told_to_give_up_before_it_fails_keeps_nobody_waiting(jitter_s: float, tmp_path: Path) -> None:
    """Found by `python -m tests.faults.groups`, seed 201, job 1164: it was interrupted before it had passed anything on."""
    changes = {
        "protocol": {"name": "backup", "abort": True, "b": 4},
        "seed": 741004420,
        "evaluator": True,
        "group_size": 4,
        "shards": 4,
        "micro_batches": 5,
        "mu": 60,
        "alpha0": 0.001,
        "epochs": 10.0,
        "clip_norm": 0.5,
        "push_format": "topk",
        "pull_format": "bfloat16",
        "model": {"name": "mlp", "hidden": [5, 4, 6]},
        "virtual": {"learners": 5, "ranks_per_node": 2, "gradients": False, "train_samples": 120},
        "compute": {"name": "lognormal"},
        "straggler": {"delay": "none", "delay_mean_s": 0.05},
        "network": {"latency_s": 2e-06, "bandwidth": 10000000.0},
        "failures": {"at_s": {"4": 0.6088484948780268, "3": 0.6007728055355106}, "notice_s": 0.0},
    }
    obeys(tmp_path / "run", TENSORS, changes, jitter_s)


def clipped_loop(norm: float) -> tuple[Weights, list[float]]:
    """The last weights of torch's own loop with `clip_grad_norm_`, and the norms that it found."""
    digits = data.load(DigitsOptions(), seed=SEED)
    model = models.make(MlpOptions(hidden=(24, 16, 12)), input_shape=digits.input_shape, classes=digits.classes, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), JOB["alpha0"], momentum=0.9)
    sampling, found = EpochSampling(len(digits.train), MU, LEARNERS, SEED), []
    for seq in range(UPDATES):
        sums = [torch.zeros_like(each) for each in model.parameters()]
        for learner_id in range(LEARNERS):
            optimizer.zero_grad()
            inputs, targets = digits.train.batch(sampling.indices(learner_id, seq))
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), norm)))
            torch._foreach_add_(sums, [each.grad / LEARNERS for each in model.parameters()])
        for total, each in zip(sums, model.parameters(), strict=True):
            each.grad = total
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}, found


@pytest.mark.parametrize("size", spread([3, 1], 2))
def test_clipping_is_by_the_norm_of_all_stages(size: int, tmp_path: Path) -> None:
    """As torch's own loop does: were each stage to clip its part by itself, steps would be longer."""
    wanted, norms = clipped_loop(0.1)
    assert min(norms) > 0.1
    simulated(tmp_path / "run", SOME, model=DEEP, clip_norm=0.1, group_size=size, shards=3)
    for name, found in weights(tmp_path / "run").items():
        assert torch.allclose(found, wanted[name], rtol=0, atol=2e-6), name


def test_what_is_not_finite_is_dropped_by_all_shards(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, **{**GROUPS, "model": {"hidden": [5, 4]}}, nonfinite="drop", alpha0=30.0, epochs=1)
    assert replay.check(tmp_path / "run") == ""
    for learner_id in range(run.lambda_):
        own = run.pushes[run.pushes["learner_id"] == learner_id]
        verdicts = [own["verdict"][own["shard"] == shard].tolist() for shard in range(run.shards)]
        assert all(each == verdicts[0] for each in verdicts[1:])
    assert Verdict.DROP not in run.pushes["verdict"] or not np.isfinite(run.pushes["loss"]).all()


def test_a_notice_that_one_rank_keeps_to_itself_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a rank to give up without its group, the others would push what its shards never see."""

    def alone(channel: Any, report: Any, meanwhile: Any = None) -> None:
        given_up, channel._given_up = channel._given_up, False
        if given_up:
            channel.gave_up(report.seq)
            return
        LearnerChannel.push(channel, report, meanwhile)

    monkeypatch.setattr(GroupChannel, "push", alone)
    with pytest.raises((DeadlockError, PeerError)):
        obeys(tmp_path / "run", TENSORS, {**GROUPS, **ABORT}, 0.02)


@pytest.mark.parametrize(
    "protocol", spread([{"name": "downpour", "n_push": 2, "n_fetch": 4}, {"name": "backup", "b": 1}], 2), ids=str
)
def test_a_group_with_a_stage_that_is_no_more_leaves_as_one(protocol: Any, tmp_path: Path) -> None:
    changes = {"protocol": protocol, "failures": {"at_s": {"1": 0.25}, "then": "leave", "notice_s": 0.3}, "clip_norm": 0.5}
    run = obeys(tmp_path / "run", TENSORS, {**GROUPS, **changes}, 0.02).run
    departed = run.events[run.events["kind"] == Event.DEPARTED]
    assert sorted(departed["shard"].tolist()) == list(range(run.shards))
    assert set(departed["learner_id"].tolist()) == {1}
    counts = [np.count_nonzero((run.pushes["learner_id"] == 1) & (run.pushes["shard"] == shard)) for shard in range(run.shards)]
    assert len(set(counts)) == 1, "each gradient came to the shards of all stages, or to none"


def test_remainders_are_as_before_where_a_rounded_gradient_is_given_up(tmp_path: Path) -> None:
    """Of learners of one rank, too: what was rounded, and not pushed, has left nothing behind."""
    run = simulated(tmp_path / "run", TENSORS, **ABORT, push_format="bfloat16")
    assert np.count_nonzero(run.events["kind"] == Event.GAVE_UP)
    assert replay.check(tmp_path / "run") == ""


@pytest.mark.parametrize("name", spread([name for name, kind in PROTOCOLS.items() if not (kind.collective or kind.batch)], 8))
def test_a_group_of_one_rank_is_a_learner_as_any(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the passes, the channel and the agreement of groups: to the bits, the clocks and the seconds of every gradient."""
    changes = {"protocol": name, "shards": 2, "clip_norm": 0.5, "straggler": LATE, "epochs": 1, "nonfinite": "drop"}
    alone = simulated(tmp_path / "alone", TENSORS, **changes)
    monkeypatch.setattr(Config, "in_groups", True)
    group = simulated(tmp_path / "group", TENSORS, **changes)
    assert group.environment["groups"] == [[rank] for rank in range(2, 6)]
    columns = ["clock", "timestamp", "learner_id", "seq", "verdict", "weight", "loss", "arrival_s", "answer_s", "delay_s"]
    for column in columns:
        assert group.pushes[column].tobytes() == alone.pushes[column].tobytes(), column
    assert bits(group) == bits(alone)
