"""The gradient noise scale: what a shard measures on the way, and what is estimated from it, against known and direct numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from mpisgd.analysis import noise_scale as noise
from mpisgd.analysis.noise_scale import NoiseScale, noise_scale
from mpisgd.config import SgdOptions
from mpisgd.data import digits
from mpisgd.records.log.reader import Run
from mpisgd.update import norms
from mpisgd.update.average import Average
from mpisgd.update.slice_update import SliceUpdate, Step, Weighting
from mpisgd.vectors.flat import FlatModel, slice_bounds
from tests.effort import thinned
from tests.unit import fabricate
from tests.unit.fabricate import Log, row, rows
from tests.unit.update.give import come, give

SIZE = 60


class Given(NamedTuple):
    """One gradient that goes into a sum: (parameters,) float32, mean over so many samples; or of a team, the sum of so many."""

    vector: np.ndarray
    weight: float = 1.0
    samples: int = 4
    gradients: int = 1


@pytest.fixture
def every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "PASS_GRADIENTS", 0)


def slice_update(weights: torch.Tensor, **fields: Any) -> SliceUpdate:
    return SliceUpdate(
        weights, SgdOptions(momentum=0.5), **{"learning_rate": 1e-3, "schedule": lambda _: 1.0, "train_samples": 10, **fields}
    )


def add(update: SliceUpdate, given: Given, check: bool = True) -> None:
    came = come(update, given.vector)
    if check:
        came.is_finite()
    give(update, came, given.weight, given.samples, gradients=given.gradients)


def run_of(path: Path, updates: Sequence[Sequence[Given]], shards: int = 1, modulate: Any = "gradient") -> Run:
    """A run in which each shard summed its slices of these gradients, as its log would tell it."""
    pushed, made = [], []
    for shard, (start, end) in enumerate(slice_bounds(len(updates[0][0].vector), shards)):
        update = slice_update(torch.zeros(end - start), weighting=Weighting(modulate))
        for clock, gradients in enumerate(updates):
            for learner_id, given in enumerate(gradients):
                add(update, given._replace(vector=given.vector[start:end]))
                fields = {"weight": given.weight, "samples": given.samples, "gradients": given.gradients}
                pushed.append(row("pushes", shard=shard, clock=clock, timestamp=clock, learner_id=learner_id, **fields))
            made.append(updated(update.step(), shard, clock + 1, update.samples))
    log = Log(pushes=rows("pushes", pushed), updates=rows("updates", made))
    run = Run(fabricate.write_run(path, log, {"name": "hardsync"}, learners=max(map(len, updates)), shards=shards))
    run.config["modulate"] = modulate
    return run


def updated(step: Step, shard: int, clock: int, samples: int) -> np.ndarray:
    return row("updates", shard=shard, clock=clock, samples=samples, **step._asdict())


# ------------------------------------------------------------------------------------------------- against known numbers


def synthetic(updates: int, kind: str, seed: int = 1) -> tuple[list[list[Given]], float, float]:
    """Updates of eight gradients, and their true tr(Sigma) and |G|^2: noise is uneven over the parameters."""
    truth, random = np.random.default_rng(0), np.random.default_rng(seed)
    mean, spread = truth.normal(size=SIZE), truth.exponential(2.5, size=SIZE)

    def one() -> Given:
        if kind == "teams":
            ranks = int(random.integers(1, 5))
            vector = ranks * mean + spread * random.normal(size=SIZE) * math.sqrt(ranks / 4)
            return Given(vector.astype(np.float32), 1.0, 4 * ranks, ranks)
        samples = int(random.choice([2, 4, 16])) if kind == "weights and samples" else 4
        weight = 1.0 if kind == "ones" else 1.0 / random.integers(1, 6)
        vector = mean + spread * random.normal(size=SIZE) / math.sqrt(samples)
        return Given(vector.astype(np.float32), weight, samples)

    return [[one() for _ in range(8)] for _ in range(updates)], float((spread**2).sum()), float((mean**2).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("weights and samples", "teams", "weights of the rate"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ones", "weights")),
    ],
)
def test_the_truth_is_found(kind: str, every_update: None, tmp_path: Path) -> None:
    """B_simple is about 20 samples; 600 updates tell it to some percent."""
    updates, variance, gradient_sq = synthetic(600, kind)
    modulate = "rate" if kind == "weights of the rate" else "gradient"
    found = noise_scale(run_of(tmp_path / "run", updates, modulate=modulate))
    assert found.updates == 600
    assert found.variance == pytest.approx(variance, rel=0.03)
    assert found.gradient_sq == pytest.approx(gradient_sq, rel=0.08)
    assert found.samples == pytest.approx(variance / gradient_sq, rel=0.08)
    assert abs(found.samples - variance / gradient_sq) < 4 * found.error


@pytest.mark.deeper
def test_the_error_is_the_spread_of_repetitions(every_update: None, tmp_path: Path) -> None:
    found = [noise_scale(run_of(tmp_path / str(seed), synthetic(100, "weights", seed)[0])) for seed in thinned(range(30), 3)]
    assert 0.7 < np.mean([each.error for each in found]) / np.std([each.samples for each in found]) < 1.4


def test_shards_add_up(every_update: None, tmp_path: Path) -> None:
    updates, _, _ = synthetic(50, "weights and samples")
    one, three = (noise_scale(run_of(tmp_path / str(shards), updates, shards)) for shards in (1, 3))
    assert three.variance == pytest.approx(one.variance, rel=1e-5)
    assert three.gradient_sq == pytest.approx(one.gradient_sq, rel=1e-4)
    assert three.error == pytest.approx(one.error, rel=1e-3)
    assert three.updates == one.updates == 50


def test_parts_of_a_run_are_told_apart(every_update: None, tmp_path: Path) -> None:
    """Noise of variance 1 per parameter, then of 9."""
    random = np.random.default_rng(3)
    updates = [
        [Given((1 + spread * random.normal(size=SIZE)).astype(np.float32), samples=1) for _ in range(4)]
        for spread in (1, 3)
        for _ in range(200)
    ]
    run = run_of(tmp_path / "run", updates)
    first, last = noise_scale(run, 0.0, 0.5), noise_scale(run, 0.5, 1.0)
    assert (first.updates, last.updates) == (200, 200)
    assert first.samples == pytest.approx(1.0, rel=0.1)
    assert last.samples == pytest.approx(9.0, rel=0.1)
    assert noise_scale(run).samples == pytest.approx(5.0, rel=0.1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than so small a network."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small network, trained for a while, and the data."""
    split = digits.load(True).train
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(split.inputs), split.targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return model, split.inputs, split.targets


def direct(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 from the gradients of all samples."""

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (sample[None],)), target[None])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    single = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    gradients = torch.cat([part.flatten(1) for part in single.values()], dim=1).double()
    mean = gradients.mean(0)
    return float((gradients - mean).square().sum(1).mean()), float(mean.square().sum())


@pytest.mark.slow
def test_mini_batches_tell_what_the_gradients_of_all_samples_tell(one_thread: None, every_update: None, tmp_path: Path) -> None:
    model, inputs, targets = trained()
    variance, gradient_sq = direct(model, inputs, targets)
    flat = FlatModel(model)
    random = np.random.default_rng(2)

    def mini_batch() -> Given:
        drawn = random.integers(len(inputs), size=8)
        flat.zero_gradients()
        nn.functional.cross_entropy(flat.module(inputs[drawn]), targets[drawn]).backward()  # type: ignore[no-untyped-call]
        return Given(flat.gradients.numpy().copy(), samples=8)

    updates = [[mini_batch() for _ in range(8)] for _ in range(250)]
    for shards in (1, 3):
        found = noise_scale(run_of(tmp_path / str(shards), updates, shards))
        assert found.variance == pytest.approx(variance, rel=0.05)
        assert found.samples == pytest.approx(variance / gradient_sq, rel=0.15)
        assert abs(found.samples - variance / gradient_sq) < 4 * found.error


def by_hand(path: Path, **fields: Any) -> Run:
    """mu = 4, c = 2: batches of 4 and 8; by A.1 tr(Sigma) = (5 - 12/4) / (1/4 - 1/8) = 16 and |G|^2 = 3 - 16/8 = 1."""
    protocol = {"name": "softsync", "n": 1}
    updates = [
        row("updates", **{"clock": clock, "gradients": 2, "samples": 8 * clock, "gradient_sq": 5.0, "sum_sq": 12.0, **fields})
        for clock in range(1, 9)
    ]
    pushed = [row("pushes", clock=clock, timestamp=0, learner_id=each) for clock in range(8) for each in range(2)]
    return Run(fabricate.write_run(path, Log(pushes=rows("pushes", pushed), updates=rows("updates", updates)), protocol, 2))


def test_a_run_with_a_pencil(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "run")
    found = noise_scale(run)
    assert (found.variance, found.gradient_sq, found.samples, found.updates) == (16.0, 1.0, 16.0, 8)
    assert found.error == 0.0
    table = noise.table(run)
    assert table.rows == (
        *((part, 2, 16.0, 0.0, 16.0, 1.0, 3.0) for part in ("first quarter", "second", "third", "last")),
        ("whole run", 8, 16.0, 0.0, 16.0, 1.0, 3.0),
    )
    assert "An update has 8 samples" in table.note
    assert "Approximate: gradients of one update come from different weights" in table.note


def test_gradients_of_uneven_weight_and_noise(every_update: None, tmp_path: Path) -> None:
    """A large gradient with a small weight, and nothing: they have nothing in common. sum w^2 / mu = 1/4 of 1.25."""
    one, other = Given(np.array([5.0, 0.0], np.float32), weight=0.5), Given(np.zeros(2, np.float32))
    found = noise_scale(run_of(tmp_path / "run", [[one, other]] * 4))
    assert (found.gradient_sq, found.variance) == (0.0, 0.25 * 25 / (1.25 / 4))


def test_where_noise_hides_the_gradient_there_is_no_ratio(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "run", sum_sq=8.0)
    found = noise_scale(run)
    assert (found.variance, found.gradient_sq) == (24.0, -1.0)
    assert math.isnan(found.samples)
    assert math.isnan(found.error)
    table = noise.table(run)
    assert table.rows[-1] == ("whole run", 8, None, None, 24.0, -1.0, None)
    assert table.note.endswith("–: |G|² is lost in noise, or nothing was measured.")


@pytest.mark.parametrize("fields", [{"gradient_sq": math.nan}, {"sum_sq": math.nan}, {"gradients": 3}, {"gradients": 1}])
def test_updates_that_do_not_tell_are_left_out(fields: dict[str, float], tmp_path: Path) -> None:
    """Not measured; or the gradients in the log are not those of the update."""
    run = by_hand(tmp_path / "run", **fields)
    found = noise_scale(run)
    assert found.updates == 0
    assert all(map(math.isnan, (found.variance, found.gradient_sq, found.samples, found.error)))
    table = noise.table(run)
    assert (table.rows, table.note) == ((), "No estimate without updates of two gradients and more.")


def test_updates_of_one_gradient_give_no_estimate(every_update: None, tmp_path: Path) -> None:
    updates, _, _ = synthetic(20, "ones")
    run = run_of(tmp_path / "run", [gradients[:1] for gradients in updates])
    assert noise_scale(run).updates == 0
    assert np.isfinite(run.updates["gradient_sq"]).all()


def test_what_a_batch_costs() -> None:
    """S/S_min is 2 at the noise scale."""
    found = NoiseScale(variance=300.0, gradient_sq=3.0, error=1.0, updates=9)
    assert found.updates_ratio(100) == 2.0
    assert found.updates_ratio(50) == 3.0
    assert math.isnan(NoiseScale(1.0, -1.0, math.nan, 9).updates_ratio(4))
    noiseless = NoiseScale(-1e-9, 1.0, 0.0, 9)
    assert noiseless.updates_ratio(4) == 1.0


# --------------------------------------------------------------------------------------------------- what a shard measures


def numbers(step: Step) -> tuple[float, float]:
    return step.gradient_sq, step.sum_sq


def nan_pair(step: Step) -> bool:
    return all(map(math.isnan, numbers(step)))


@pytest.mark.parametrize("check", [True, False])
def test_weights_are_those_of_the_sum(check: bool, every_update: None) -> None:
    update = slice_update(torch.zeros(2))
    for _ in range(3):  # buffers change places
        add(update, Given(np.array([3.0, 4.0]), weight=0.5), check)
        add(update, Given(np.array([0.0, 2.0]), weight=0.25), check)
        assert numbers(update.step()) == ((25 / 4 + 4 / 16) / 2, 1.5**2 + 2.5**2)
    add(update, Given(np.array([3.0, 4.0]), weight=0.5), check)
    one = update.step()
    assert one.gradient_sq == 25 / 4
    assert math.isnan(one.sum_sq)


def test_what_was_dropped_is_not_measured(every_update: None) -> None:
    update = slice_update(torch.zeros(2))
    for bad in ([math.nan, 1.0], [100.0, 100.0]):  # not finite; too old
        come(update, bad).is_finite()
        add(update, Given(np.array([1.0, 0.0])))
        come(update, bad).is_finite()
        add(update, Given(np.array([1.0, 1.0])))
        assert numbers(update.step()) == (1.5, 5.0)
    come(update, math.nan).is_finite()
    assert nan_pair(update.step())
    add(update, Given(np.array([1.0, 1.0])))
    assert update.step().gradient_sq == 2.0


@pytest.mark.parametrize("check_early", [True, False])
def test_a_gradient_that_was_kept_for_later_has_its_own_norm(check_early: bool, every_update: None) -> None:
    update = slice_update(torch.zeros(1))
    kept = []
    for value in (3.0, 2.0):
        came = come(update, value)
        if check_early:
            came.is_finite()
        kept.append(came)
    add(update, Given(np.array([1.0])), check=not check_early)
    for came in reversed(kept):
        give(update, came, 1.0, 4)
    assert numbers(update.step()) == ((1 + 4 + 9) / 3, 36.0)


def test_a_gradient_that_nobody_checked_is_not_taken_for_the_one_before(every_update: None) -> None:
    update = slice_update(torch.zeros(1))
    add(update, Given(np.array([1.0])), check=True)
    add(update, Given(np.array([3.0])), check=False)
    assert numbers(update.step()) == (5.0, 16.0)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e20])
def test_what_no_float32_can_hold_is_not_measured(value: float, check: bool, every_update: None) -> None:
    update = slice_update(torch.zeros(2))
    add(update, Given(np.array([1.0, value])), check)
    add(update, Given(np.array([1.0, 1.0])), check)
    assert nan_pair(update.step())
    add(update, Given(np.array([1e19, 0.0])), check)
    add(update, Given(np.array([1e19, 0.0])), check)
    step = update.step()
    assert step.gradient_sq == pytest.approx(1e38)
    assert math.isnan(step.sum_sq)  # 4e38


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per pass over a slice that is made for the noise scale alone."""
    made: list[int] = []

    def counted(vector: np.ndarray) -> float:
        made.append(len(vector))
        return float(np.dot(vector, vector))

    for module in ("norms", "slice_update"):
        monkeypatch.setattr(f"mpisgd.update.{module}.squared_norm_of_chunks", counted)
    return made


@pytest.mark.parametrize(
    ("gradients", "check", "measured"),
    [
        (1, True, 0),
        (2, True, 100),
        (5, True, 200),
        (12, True, 600),
        (30, True, 600),
        (1, False, 0),
        (2, False, 34),
        (30, False, 47),
    ],
)
def test_a_pass_is_spent_for_twelve_gradients(gradients: int, check: bool, measured: int, passes: list[int]) -> None:
    """Of 600 updates so many are measured; where single gradients are checked, each of their norms is known."""
    update = slice_update(torch.zeros(3))
    steps = []
    for _ in range(600):
        for _ in range(gradients):
            add(update, Given(np.ones(3)), check)
        steps.append(update.step())
    assert sum(math.isfinite(step.sum_sq) for step in steps) == measured
    known = sum(math.isfinite(step.gradient_sq) for step in steps)
    assert known == (600 if check else measured or 50)
    assert len(passes) <= 600 * gradients / norms.PASS_GRADIENTS + gradients + 1


def test_no_weight_depends_on_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whether all updates are measured, few, or what is checked tells the norms."""
    random = np.random.default_rng(4)
    script = [
        [(random.normal(size=501).astype(np.float32), 1.0 / random.integers(1, 4)) for _ in range(count)]
        for count in (1, 3, 2, 1, 1, 5, 2, 4)
    ]
    ends = set()
    for affordable, check, cached_nbytes in itertools.product((0, 12, 10**9), (True, False), (0, 10**9)):
        monkeypatch.setattr(norms, "PASS_GRADIENTS", affordable)
        monkeypatch.setattr("mpisgd.update.slice_update.CACHED_NBYTES", cached_nbytes)
        update = slice_update(torch.zeros(501), average=Average(torch.zeros(501), 0.5))
        for gradients in script:
            for vector, weight in gradients:
                add(update, Given(vector, weight), check)
            update.step()
        assert update.averaged is not None
        ends.add(update.weights.numpy().tobytes() + update.averaged.numpy().tobytes())
    assert len(ends) == 1
