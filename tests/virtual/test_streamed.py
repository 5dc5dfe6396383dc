"""Gradients and weights in chunks, both ways at once: the bits of whole vectors, in less time where links are slow.

That laws hold whatever the schedule is tested in `test_laws.py`, signals in `test_signals.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpisgd import replay
from mpisgd.analysis import arrivals, timeline
from mpisgd.base.errors import ConfigError, DataError, DivergenceError, PeerError
from mpisgd.config import SgdOptions
from mpisgd.exchange import ways
from mpisgd.exchange.exchange import Report
from mpisgd.exchange.travel.streamed import StreamedChannel
from mpisgd.gradient import stages
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report.link_speed import links
from mpisgd.update.slice_update import SliceUpdate
from mpisgd.vectors import body as body_module
from mpisgd.vectors import chunks
from mpisgd.vectors.body import WINDOW, ChunkPool, Incoming, Stream
from mpisgd.vectors.push_format import FLOAT32
from mpisgd.vectors.skipped import NOTHING, Runs
from tests.effort import spread
from tests.unit.update.give import give
from tests.virtual.jobs import SIZES, TENSORS, simulated


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_NBYTES", 64)  # as many elements as a register of the CPU has, or more


def weights(run: Run) -> np.ndarray:
    state = torch.load(run.path / "weights.pt", weights_only=True)["theta"]
    return torch.cat([tensor.reshape(-1) for tensor in state.values()]).numpy()


@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"clip_average": 0.1},
            {"optimizer": {"name": "adam"}, "alpha0": 0.01, "averaging": 0.9, "shards": 3},
            {"push_format": "bfloat16", "shards": 2},
            {"push_format": "bfloat16", "pull_format": "bfloat16", "failures": {"at_s": {"2": 5.0}, "then": "leave"}, "shards": 2},
            {"pull_format": "bfloat16", "local_steps": 2},
            {"accumulation": 2, "straggler": {"slowdown": {"1": 20.0}}},
        ],
        3,
    ),
    ids=str,
)
def test_it_has_the_bits_of_whole_vectors(changes: dict[str, Any], small_chunks: None, tmp_path: Path) -> None:
    whole, streamed = (simulated(tmp_path / way, TENSORS, protocol="hardsync", way=way, **changes) for way in ("whole", "streamed"))
    if "failures" not in changes:  # which learner has pushed what by then is another thing
        np.testing.assert_array_equal(weights(streamed), weights(whole))
        for norm in ("gradient_sq", "sum_sq"):  # of `whole` each gradient is checked, and so measured
            measured = np.isfinite(streamed.updates[norm])
            assert measured.any()
            np.testing.assert_array_equal(streamed.updates[norm][measured], whole.updates[norm][measured])
    proof = replay.replay(streamed.path)
    assert proof.reason == ""
    assert not any(each.elements for each in proof.differences)


def seconds_of_a_round(path: Path, way: str, *, shards: int, ranks_per_node: int, mean_s: float = 1e-3, **changes: Any) -> float:
    """Two learners, 44 MB, 1 Gbit/s."""
    run = simulated(
        path,
        SIZES,
        protocol="hardsync",
        way=way,
        shards=shards,
        virtual={"learners": 2, "ranks_per_node": ranks_per_node, "parameters": 11_000_000},
        compute={"name": "constant", "mean_s": mean_s},
        **{"network": {"node_bandwidth": 125e6, "bandwidth": 125e6, "local_bandwidth": 1e10}} | changes,
    )
    return float(np.diff(run.updates["time_s"][run.updates["shard"] == 0])[10:].mean())


@pytest.mark.parametrize(("shards", "ranks_per_node", "vectors"), [(1, 1, 2), (2, 2, 1)], ids=["own node", "beside learners"])
def test_a_link_carries_both_ways_at_once(shards: int, ranks_per_node: int, vectors: int, tmp_path: Path) -> None:
    """Its limit are so many vectors each way: of two learners to one shard, or of one to the shard on the other node and back."""
    limit_s = vectors * 44e6 / 125e6
    whole, streamed = (
        seconds_of_a_round(tmp_path / way, way, shards=shards, ranks_per_node=ranks_per_node) for way in ("whole", "streamed")
    )
    assert whole > 1.9 * limit_s
    assert limit_s <= streamed < 1.25 * limit_s


def test_both_rounded_take_as_long_as_pushes_and_pulls_one_after_the_other(tmp_path: Path) -> None:
    """Weights are rounded when the whole update is made; of half the bytes each, that is no longer than whole ones at once."""
    formats = {"push_format": "bfloat16", "pull_format": "bfloat16"}
    took_s = seconds_of_a_round(tmp_path / "run", "streamed", shards=1, ranks_per_node=1, **formats)
    assert 2 * 44e6 / 125e6 <= took_s < 1.25 * 2 * 44e6 / 125e6


def test_chunks_leave_behind_the_backward_pass(tmp_path: Path) -> None:
    """Computing takes as long as the link; the forward pass is a third of it, and before its end nothing can leave."""
    link_s = 44e6 / 125e6
    network = {"node_bandwidth": 125e6, "bandwidth": 1e10, "local_bandwidth": 1e10}
    job: dict[str, Any] = {"shards": 2, "ranks_per_node": 2, "mean_s": link_s, "network": network}
    early = seconds_of_a_round(tmp_path / "early", "streamed", **job)
    with mock.patch.object(stages, "leaves_early", lambda _: False):
        late = seconds_of_a_round(tmp_path / "late", "streamed", **job)
    assert 1.95 * link_s < late
    assert 4 / 3 * link_s < early < 1.5 * link_s
    assert any("drawn as a part of the push" in note for note in timeline.look(Run(tmp_path / "early")).notes)
    pushes = Run(tmp_path / "early").pushes[-4:]  # after the trial
    np.testing.assert_allclose(pushes["backward_s"], 2 / 3 * link_s, rtol=0.01)
    np.testing.assert_allclose(pushes["compute_s"], link_s, rtol=0.01)
    first, second = (arrivals.times_to(Run(tmp_path / way), 2) for way in ("early", "late"))
    assert np.median(second) >= link_s  # no gradient is there before it is computed
    np.testing.assert_allclose(np.median(first), np.median(second), rtol=0.05)
    assert "Chunks left during the backward pass" in arrivals.arrival_table(Run(tmp_path / "early")).note
    assert "left during" not in arrivals.arrival_table(Run(tmp_path / "late")).note
    assert replay.replay(tmp_path / "early").reason == ""


class Given(Stream):
    """A gradient that is all there; notes how much of it was asked for."""

    def __init__(self, gradient: np.ndarray) -> None:
        self._pieces = deque(chunks.chunks_of(gradient)[::-1])
        self._posted = deque[Any]()
        self.asked = 0

    def post(self, room: Any) -> None:
        self._posted.append(room)
        self.asked += 1

    def wait(self) -> Runs:
        self._posted.popleft()[:] = self._pieces.popleft()
        return NOTHING

    @property
    def left(self) -> int:
        return len(self._pieces)


def gradients(count: int, size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal(size).astype(np.float32) for _ in range(count)]


def whole(pool: ChunkPool, body: Incoming) -> np.ndarray:
    """The elements of a body to its end."""
    found = []
    for piece in pool.pieces:
        found.append(body.chunk(piece).numpy().copy())
        body.release(piece.stop)
    return np.concatenate(found[::-1])


def test_a_shard_has_a_few_chunks_of_each_gradient(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_WINDOW_NBYTES", 64)
    pool = ChunkPool.of(95, 6, FLOAT32)
    streams = [Given(each) for each in gradients(3, 95)]
    bodies = [pool.begin(stream) for stream in streams]
    assert [stream.asked for stream in streams] == [WINDOW] * 3
    for number, piece in enumerate(pool.pieces):
        for body, expected in zip(bodies, gradients(3, 95), strict=True):
            np.testing.assert_array_equal(body.chunk(piece), expected[piece])
            body.release(piece.stop)
        assert [stream.asked for stream in streams] == [min(6, number + 1 + WINDOW)] * 3


@pytest.mark.parametrize("landed", [False, True])
def test_a_parked_gradient_waits_for_its_turn(landed: bool, small_chunks: None) -> None:
    """Where its sender can wait no longer it is received whole."""
    pool, (first, second) = ChunkPool.of(95, 6, FLOAT32), gradients(2, 95)
    stream = Given(second)
    early = pool.begin(stream)
    if landed:
        early.land()
        assert stream.asked == 6
        early.settle()
        assert stream.left == 0
    late = pool.begin(Given(first))
    assert whole(pool, late).tolist() == first.tolist()
    assert whole(pool, early).tolist() == second.tolist()


def test_what_nobody_wants_is_received_for_nothing(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_WINDOW_NBYTES", 64)
    pool, (unwanted, wanted) = ChunkPool.of(95, 6, FLOAT32), gradients(2, 95)
    stream = Given(unwanted)
    body = pool.begin(stream)
    assert stream.asked == WINDOW
    body.release()
    assert stream.asked == 6, "its sender waits for no one"
    assert stream.left == 6, "nor does its receiver"
    body.settle()
    assert stream.left == 0
    assert whole(pool, pool.begin(Given(wanted))).tolist() == wanted.tolist()


@pytest.mark.parametrize("asked", ["step", "chunks"])
def test_an_update_sums_chunks_as_they_come(asked: str, small_chunks: None) -> None:
    """But for the first, which makes the momentum of all."""
    options: dict[str, Any] = {"learning_rate": 0.1, "schedule": lambda _: 1.0, "train_samples": 100}
    whole, streamed = (SliceUpdate(torch.ones(95), SgdOptions(momentum=0.9), **options, streamed=count) for count in (0, 6))
    assert isinstance(streamed.bodies, ChunkPool)
    for update in range(3):
        streams = []
        given = list(zip((0.5, 1.0, 0.25), gradients(3, 95), strict=True))
        for weight, gradient in given:
            give(whole, gradient, weight, 4)
            streams.append(Given(gradient))
            streamed.accumulate(streamed.bodies.begin(streams[-1]), weight, 4)
        whole.step()
        if asked == "step":
            streamed.step()
        else:
            streamed.begin_step()
            for number, _ in enumerate(streamed.chunks()):
                assert update == 0 or all(stream.left == 6 - number - 1 for stream in streams), (
                    "a chunk leaves before the next is here"
                )
        assert torch.equal(whole.weights, streamed.weights)
        assert streamed.made == whole.made, "with its norms"
        if update == 0:
            assert streamed.made.gradient_sq == pytest.approx(sum((w * g) @ (w * g) for w, g in given) / 3, rel=1e-5)


SPARE: dict[str, Any] = {
    "protocol": "hardsync",
    "shards": 6,
    "placement": "spread",
    "virtual": {"learners": 4, "ranks_per_node": 2, "spare_nodes": 2},
    "evaluator": False,
}


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "LEAST_NBYTES", 40)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_uneven_slices_have_the_bits_of_even_ones_and_are_proved(optimizer: str, tmp_path: Path, small_slices: None) -> None:
    changes = SPARE | {"optimizer": optimizer, "clip_norm": 0.5, "averaging": 0.9}
    uneven, even = (simulated(tmp_path / way, TENSORS, **changes, way=way) for way in ("auto", "whole"))
    parameters = uneven.environment["parameters"]
    sizes = uneven.environment["slices"]
    assert sum(sizes) == parameters
    assert sizes[-2:] == pytest.approx([0.3 * parameters] * 2, abs=1)
    assert "slices" not in even.environment
    assert weights(uneven).tobytes() == weights(even).tobytes()
    proof = replay.replay(uneven.path)
    assert proof.reason == ""
    assert proof.simulated


@pytest.mark.parametrize(
    "sizes",
    ["[10, 10, 10, 10, 10, 9]", "[83]", "[0, 10, 10, 10, 10, 43]", "[83.0]", "83", '"even"', "[true, 10, 10, 10, 10, 42]"],
)
def test_slices_that_no_run_has_are_refused(sizes: str, tmp_path: Path, small_slices: None) -> None:
    path = told_other_slices(tmp_path, sizes)
    with pytest.raises(DataError, match="expected 6 sizes with the sum of all parameters"):
        replay.check(path)
    with pytest.raises(DataError, match="expected 6 sizes with the sum of all parameters"):
        links(Run(path))


def test_slices_that_the_run_had_not_are_found(tmp_path: Path, small_slices: None) -> None:
    assert replay.check(told_other_slices(tmp_path, "[10, 10, 10, 10, 10, 33]")) != ""


def told_other_slices(tmp_path: Path, sizes: str) -> Path:
    """A run whose config.toml was edited."""
    run = simulated(tmp_path / "run", TENSORS, **SPARE)
    assert run.environment["parameters"] == 83
    file = run.path / schema.CONFIG
    text = re.sub(r"slices = \[[^\]]*\]", f"slices = {sizes}", file.read_text())
    assert text != file.read_text()
    file.write_text(text.partition("\n")[2])  # without its checksum
    return run.path


@pytest.mark.parametrize(
    "changes", [{"placement": "packed"}, {"shards": 5}, {"virtual": SPARE["virtual"] | {"spare_nodes": 6}}], ids=str
)
def test_a_spare_node_without_a_shard_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"virtual\.spare_nodes = \d: expected "):
        simulated(tmp_path / "run", TENSORS, **SPARE | changes)


def test_large_slices_do_not_wait_for_small_ones(tmp_path: Path) -> None:
    """44 MB over links of 1 Gbit/s, in turns as over TCP: of even slices 0.47 s or more, of uneven ones 0.42 s."""
    network = {"node_bandwidth": 1.25e8, "bandwidth": 4e9, "latency_s": 1e-4, "overhead_s": 2e-5, "turn_nbytes": 2**17}
    nodes = SPARE["virtual"] | {"parameters": 11_000_000, "train_samples": 16 * 12}
    compute = {"name": "constant", "mean_s": 1e-4}
    seconds = []
    for way in ("auto", "streamed"):
        changes = SPARE | {"virtual": nodes, "network": network, "compute": compute}
        with mock.patch.object(ways, "sizes_of", ways.sizes_of if way == "auto" else lambda *_: ()):
            run = simulated(tmp_path / way, SIZES, **changes)
        assert ("slices" in run.environment) == (way == "auto")
        times = run.updates[run.updates["shard"] == 0]["time_s"]
        seconds.append((times[-3] - times[2]) / (len(times) - 5))
    uneven, even = seconds
    assert uneven < 0.45
    assert even > 0.46


def test_a_run_that_measured_no_norms_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as then:
        then.setattr(schema, "RULES", 6)
        run = simulated(tmp_path / "run", TENSORS, protocol="hardsync", way="streamed")
    assert np.isnan(run.updates["gradient_sq"]).all()
    proof = replay.replay(run.path)
    assert proof.reason == ""
    assert "from the first on" in proof.not_simulated


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        # The header alone says so.
        (4, 7, "7 gradients, expected 1; streamed, nobody can go on without this push"),
        (11, 8, "a slice of 8 bytes, expected "),
        (1, 99, "learner 2 waits for an update after a refused push: learner 2 pushed timestamp 99: expected 0 ... 2"),
    ],
)
def test_a_push_that_is_refused_ends_the_job_by_name(
    field: int, value: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left to wait, neither for its chunks nor for its gradient."""
    honest = StreamedChannel._told

    def told(self: StreamedChannel, shard: int, report: Report, *runs: Any) -> Any:
        fields = list(honest(self, shard, report, *runs))
        if report.seq == 2 and fields[0] == 2:
            fields[field] = value
        return tuple(fields)

    monkeypatch.setattr(StreamedChannel, "_told", told)
    with pytest.raises(PeerError, match=re.escape(why)):
        simulated(tmp_path / "run", TENSORS, protocol="hardsync", way="streamed")


@pytest.mark.parametrize("push_format", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda loss: loss * math.nan, "sum of the gradients of learners .* not finite; lower alpha0"),
        (lambda loss: loss + math.nan, "the gradient is"),
    ],
    ids=["gradient", "loss alone"],
)
def test_of_a_loss_that_is_not_finite_the_gradient_is_looked_at(
    spoil: Callable[[Tensor], Tensor], told: str, push_format: str, tmp_path: Path
) -> None:
    """Though it is summed chunk by chunk, and looked at in the sum."""
    calls = itertools.count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(output, target)
        return found if next(calls) < 12 else spoil(found)

    job = {"protocol": "hardsync", "way": "streamed", "push_format": push_format}
    with pytest.raises(DivergenceError, match=told):
        simulated(tmp_path / "run", TENSORS, UserObjects(loss=loss), **job)
