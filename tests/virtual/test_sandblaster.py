"""Sandblaster L-BFGS on virtual ranks: the same as torch in one process, whoever is slow or dies; and books that balance."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpisgd.analysis import about
from mpisgd.base.errors import ConfigError, DivergenceError, PeerError
from mpisgd.cli.reading import plan
from mpisgd.config import Config, config_file
from mpisgd.data.sampling import PortionSampling
from mpisgd.job import parts
from mpisgd.job.parts import NO_OBJECTS, UserObjects
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Outcome, Verdict, Why
from mpisgd.report import single
from mpisgd.sandblaster.slots import Slots
from mpisgd.simulate.job import simulate
from tests.effort import examples, spread

ITERATIONS = 8


def job(out: Path, *, learners: int = 3, **changes: Any) -> Config:
    protocol = {"name": "sandblaster", "iterations": ITERATIONS, "history": 3, **changes.pop("protocol", {})}
    virtual = {"learners": learners, "gradients": True, **changes.pop("virtual", {})}
    log = {"progress": "off", "flush_s": 1000.0}
    evaluation = {"every_epochs": 0.0}
    table = {"protocol": protocol, "virtual": virtual, "log": log, "evaluation": evaluation, "out": str(out), "overwrite": True}
    data = changes.pop("data", {"name": "synthetic", "samples": 211, "test_samples": 20, "shape": [6], "classes": 4})
    return config_file.from_mapping({"model": "softmax", "data": data, "mu": 20, "threads": 1, **table, **changes})


def by_torch(config: Config, user_objects: UserObjects = NO_OBJECTS) -> tuple[list[float], Tensor]:
    """Losses of all evaluations but those at points that it stands at already, and the last weights, in one process."""
    data = parts.load_data(config, user_objects)
    meta = parts.meta_of(data)
    model, loss_of = parts.build_model(config, meta, user_objects), parts.load_loss(config, user_objects)
    sampling = parts.make_sampling(config, meta, 1)
    assert isinstance(sampling, PortionSampling)
    options: Any = config.protocol
    weights = torch.nn.Parameter(model.weights.clone())
    losses: dict[bytes, float] = {}

    def closure() -> float:
        model.weights.copy_(weights.detach())
        total, gradient = 0.0, torch.zeros_like(model.weights)
        for portion in range(sampling.portions):
            indices = sampling.indices(0, portion)
            inputs, targets = data.train.batch(indices)
            model.zero_gradients()
            loss = loss_of(model.module(model.inputs(inputs)), targets)  # type: ignore[operator]
            loss.backward()
            total += loss.item() * len(indices)
            gradient += model.gradients * len(indices)
        gradient /= sampling.samples
        value, vector = total / sampling.samples, weights.detach()
        if options.weight_decay:
            value += options.weight_decay / 2 * float(vector.dot(vector))
            gradient.add_(vector, alpha=options.weight_decay)
        weights.grad = gradient
        losses.setdefault(vector.numpy().tobytes(), value)
        return value

    lbfgs = torch.optim.LBFGS(
        [weights], history_size=options.history, max_iter=1, max_eval=26, line_search_fn="strong_wolfe", tolerance_grad=0
    )
    for _ in range(options.iterations):
        lbfgs.step(closure)  # type: ignore[no-untyped-call]
    return list(losses.values()), weights.detach()


def weights_of(run: Path, config: Config, user_objects: UserObjects = NO_OBJECTS) -> Tensor:
    model = parts.build_model(config, parts.meta_of(parts.load_data(config, user_objects)), user_objects)
    model.module.load_state_dict(torch.load(run / "weights.pt", weights_only=True)["theta"])
    return model.weights


def own_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 9), torch.nn.Tanh(), torch.nn.Linear(9, 10))


MODELS: dict[str, tuple[dict[str, Any], UserObjects]] = {
    "softmax": ({"data": "digits", "mu": 150}, NO_OBJECTS),
    "weight decay, a share": (
        {"data": "digits", "mu": 100, "protocol": {"weight_decay": 0.01, "share": 0.3}},
        NO_OBJECTS,
    ),
    "an own model": ({"data": "digits", "mu": 211}, UserObjects(model=own_model)),
}


@pytest.mark.parametrize("name", spread(MODELS, 3))
def test_with_one_shard_the_bits_are_those_of_torch_in_one_process(name: str, tmp_path: Path) -> None:
    changes, user_objects = MODELS[name]
    options = {"order": "portions", "tolerance_grad": 0.0, **changes.get("protocol", {})}
    config = job(tmp_path / "run", **{**changes, "protocol": options})
    simulate(config, user_objects)
    losses, weights = by_torch(config, user_objects)
    run = Run(tmp_path / "run")
    decay = options.get("weight_decay", 0.0)
    if not decay:
        assert run.updates["mean_loss"].tolist() == losses
    assert set(run.of_coordinator("iterations")["loss"].tolist()) <= set(losses)
    assert len(run.updates) == len(losses)
    assert torch.equal(weights_of(tmp_path / "run", config, user_objects), weights)
    assert losses[-1] < losses[0] / 2


def dropping() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(20, 4))


@pytest.mark.slow
def test_in_the_order_of_portions_nobody_sees_who_was_fast(tmp_path: Path) -> None:
    """Nor what was drawn for a portion: dropout's masks are its own."""
    user_objects = UserObjects(model=dropping)
    runs = []
    for name, learners, slow in (("one", 1, {}), ("many", 7, {1: 5.0, 4: 2.5})):
        config = job(
            tmp_path / name,
            learners=learners,
            mu=9,
            protocol={"order": "portions"},
            compute={"name": "lognormal", "sigma": 0.5},
            virtual={"slow_nodes": {node + 2: factor for node, factor in slow.items()}},
        )
        simulate(config, user_objects)
        runs.append(Run(tmp_path / name))
    assert runs[0].updates["mean_loss"].tolist() == runs[1].updates["mean_loss"].tolist()
    assert torch.equal(weights_of(tmp_path / "one", config, user_objects), weights_of(tmp_path / "many", config, user_objects))
    assert len({*runs[1].of_coordinator("portions")["learner_id"].tolist()}) == 7


def test_the_report_says_what_became_of_portions(tmp_path: Path) -> None:
    simulate(job(tmp_path / "run", learners=4, straggler={"slowdown": {2: 6.0}}))
    run = Run(tmp_path / "run")
    tables = {table.key: table for table in single._tables(run, about.status(run))}
    portions, iterations = tables["portions"], tables["iterations"]
    assert portions.cells("counted")[-1] == 11 * iterations.cells("evaluations")[-1]
    for row in portions.rows:
        assert row[1] == sum(row[2:6])  # type: ignore[arg-type]
        assert sum(row[6:]) == pytest.approx(100)  # type: ignore[arg-type]
    assert portions.cells("duplicates")[-1] > 0  # type: ignore[operator]
    assert iterations.cells("iteration") == list(range(1, ITERATIONS + 1))
    assert any(drawing.key == "losses" and drawing.figure is not None for drawing in single.draw(run))


def check(run: Run, portions: int) -> None:
    """Each portion counted exactly once in each evaluation, books that balance, and rows that say the same."""
    dealt, iterations = run.of_coordinator("portions"), run.of_coordinator("iterations")
    counted = dealt[dealt["outcome"] == Outcome.COUNTED]
    for clock in range(len(run.updates[run.updates["shard"] == 0])):
        assert sorted(counted["portion"][counted["clock"] == clock].tolist()) == list(range(portions))
    assert all(books.balanced for books in run.books())
    for shard in range(run.shards):
        pushes = run.pushes[(run.pushes["shard"] == shard) & (run.pushes["verdict"] == Verdict.APPLY)]
        assert pushes["gradients"].sum() == len(counted)
        assert pushes["samples"].sum() == counted["samples"].sum()
        assert set(zip(pushes["learner_id"], pushes["seq"], strict=True)) == set(
            zip(counted["learner_id"], counted["seq"], strict=True)
        )
    assert iterations["why"][:-1].tolist() == [Why.GOES_ON] * (len(iterations) - 1)
    assert iterations["why"][-1] != Why.GOES_ON
    assert iterations["clock"][-1] == run.updates["clock"].max()


@pytest.mark.slow
@settings(max_examples=examples(150, of=75), deadline=None)
@given(data=st.data())
def test_random_jobs(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shards, learners, portions, slow ones, ones that leave; virtual sends are synchronous, and nobody waits in a circle."""
    draw = data.draw
    learners, mu = draw(st.integers(1, 12)), draw(st.sampled_from([7, 20, 60, 211]))
    order = draw(st.sampled_from(["arrival", "portions"]))
    protocol = {
        "iterations": draw(st.integers(1, 4)),
        "order": order,
        "push_every": 1 if order == "portions" else draw(st.integers(1, 4)),
        "duplicates": draw(st.booleans()),
        "line_search": draw(st.sampled_from(["strong_wolfe", "none"])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
    }
    leaving = draw(st.dictionaries(st.integers(0, learners - 1), st.floats(0.05, 2.0), max_size=learners - 1))
    config = job(
        tmp_path_factory.mktemp("random") / "run",
        learners=learners,
        mu=mu,
        shards=draw(st.integers(1, 4)),
        evaluator=draw(st.booleans()),
        protocol=protocol,
        compute=draw(st.sampled_from([{"name": "constant"}, {"name": "lognormal", "sigma": 1.0}])),
        failures={"at_s": leaving, "then": "leave", "notice_s": draw(st.sampled_from([0.0, 0.3]))},
        straggler={"slowdown": {learner_id: 5.0 for learner_id in range(learners) if draw(st.booleans())}},
    )
    simulate(config)
    check(Run(config.out), -(-211 // mu))


def test_who_leaves_costs_only_its_portions(tmp_path: Path) -> None:
    config = job(tmp_path / "run", learners=4, failures={"at_s": {1: 0.95, 3: 1.6}, "then": "leave"}, protocol={"push_every": 3})
    simulate(config)
    run = Run(tmp_path / "run")
    check(run, 11)
    dealt = run.of_coordinator("portions")
    lost = dealt[dealt["outcome"] == Outcome.LOST]
    assert set(lost["learner_id"].tolist()) == {1, 3}
    assert len(lost) <= 2 * 4
    assert run.of_coordinator("iterations")["iteration"][-1] == ITERATIONS


def test_without_learners_the_job_ends_by_name(tmp_path: Path) -> None:
    config = job(tmp_path / "run", learners=2, failures={"at_s": {0: 0.5, 1: 0.7}, "then": "leave"})
    with pytest.raises(PeerError, match="no learner is left to evaluate the loss"):
        simulate(config)


def evaluation_s(out: Path, mu: int, *, duplicates: bool) -> float:
    """Mean seconds of an evaluation of 8 learners of which one is five times slower, by the ideal share."""
    protocol = {"duplicates": duplicates, "iterations": 6}
    compute = {"name": "constant", "mean_s": mu / 1024}
    data = {"name": "synthetic", "samples": 1024, "test_samples": 8, "shape": [6], "classes": 4}
    simulate(job(out, learners=8, mu=mu, data=data, protocol=protocol, compute=compute, straggler={"slowdown": {3: 5.0}}))
    iterations = Run(out).of_coordinator("iterations")
    return float(iterations["evaluating_s"].sum() / iterations["evaluations"].sum() * (7 + 1 / 5))


@pytest.mark.slow
def test_a_slow_learner_holds_up_nobody_where_portions_are_small_and_dealt_twice(tmp_path: Path) -> None:
    """The ideal share is 1: [Dean12 4.2]."""
    assert evaluation_s(tmp_path / "twice", 1024 // 32, duplicates=True) <= 1.35
    assert evaluation_s(tmp_path / "once", 1024 // 8, duplicates=False) >= 2.5


def test_memory_is_that_of_the_history_and_a_few_vectors_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Slots] = []
    before = Slots.__init__
    monkeypatch.setattr(Slots, "__init__", lambda self, *args: (before(self, *args), made.append(self))[0])
    simulate(job(tmp_path / "run", learners=1, data="digits", mu=300, protocol={"history": 4, "iterations": 8}))
    assert 1 + made[0].bodies.made <= 2 * 4 + 9


def test_snapshots_are_of_iterations_and_the_last_weights_are_evaluated(tmp_path: Path) -> None:
    config = job(tmp_path / "run", data="digits", mu=300, shards=2, evaluation={"every_epochs": 1.0})
    simulate(config)
    run = Run(tmp_path / "run")
    clocks = run.evaluations["clock_min"].tolist()
    assert clocks == run.evaluations["clock_max"].tolist()
    assert set(clocks) <= {0, *run.of_coordinator("iterations")["clock"].tolist()}
    assert run.evaluations["error"][-1] < 0.2


def test_it_stops_where_it_has_converged(tmp_path: Path) -> None:
    config = job(tmp_path / "run", mu=211, protocol={"iterations": 500, "tolerance_grad": 1e-3, "weight_decay": 1.0})
    simulate(config)
    iterations = Run(tmp_path / "run").of_coordinator("iterations")
    assert iterations["why"][-1] == Why.GRADIENT
    assert iterations["gradient_max"][-1] <= 1e-3
    assert len(iterations) < 100


def infinite(output: Tensor, target: Tensor) -> Tensor:
    loss = torch.nn.functional.cross_entropy(output, target)
    return loss * torch.inf if loss.item() < 1.0 else loss


def test_a_loss_that_is_not_finite_is_named_with_the_way_on(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"evaluation \d+ \(iteration \d+, step length .*\): loss inf.*--init-from"):
        simulate(job(tmp_path / "run"), UserObjects(loss=infinite))


def noisy(output: Tensor, target: Tensor) -> Tensor:
    """Each evaluation is greater than the one before: no line search can succeed."""
    noisy.calls += 1  # type: ignore[attr-defined]
    return torch.nn.functional.cross_entropy(output, target) + 10.0 * noisy.calls  # type: ignore[attr-defined]


def test_a_line_search_that_fails_ends_the_run_and_says_the_way_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noisy.calls = 0  # type: ignore[attr-defined]
    simulate(job(tmp_path / "run", learners=1, mu=211), UserObjects(loss=noisy))
    assert Run(tmp_path / "run").of_coordinator("iterations")["why"].tolist() == [Why.LINE_SEARCH]
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"the line search of iteration 1 found no loss below [\d.]+ in \d+ evaluations.*--init-from", said)


@pytest.mark.slow
def test_it_begins_with_the_weights_of_another_run(tmp_path: Path) -> None:
    table = {"protocol": "downpour", "model": "softmax", "data": "digits", "epochs": 1.0, "out": str(tmp_path / "sgd")}
    simulate(config_file.from_mapping({**table, "log": {"progress": "off"}, "virtual": {"learners": 3, "gradients": True}}))
    config = job(tmp_path / "run", data="digits", mu=150, init_from=str(tmp_path / "sgd"), protocol={"order": "portions"})
    simulate(config)
    losses, _ = by_torch(config)
    assert Run(tmp_path / "run").updates["mean_loss"][:3].tolist() == losses[:3]
    assert losses[0] < 1.5


def test_the_size_of_portions_is_not_planned(tmp_path: Path) -> None:
    simulate(job(tmp_path / "run", protocol={"iterations": 1}))
    with pytest.raises(ConfigError, match=r"is a run of sandblaster, .* mu, is chosen by hand; expected first a run of another"):
        plan.main([str(tmp_path / "run")])
