"""The user's own step on batches of any shape: a plain PyTorch loop is the oracle, and replay proves what it trained."""

from __future__ import annotations

import dataclasses
import math
from collections import UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from mpisgd import replay
from mpisgd.analysis import about, training
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.job import parts
from mpisgd.job.finish import farewell
from mpisgd.job.parts import UserObjects
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.report.compare import compare
from mpisgd.simulate import simulate
from tests.effort import spread
from tests.virtual.jobs import TENSORS, config, simulated

TOKENS, LENGTH, WIDTH = 11, 6, 8


class Sentences:
    """Token numbers that count up from a drawn one, with a mask of padding: samples are dicts, and tell a name besides."""

    def __init__(self, samples: int, seed: int) -> None:
        first = np.random.default_rng(seed).integers(TOKENS, size=(samples, 1))
        self.ids = torch.from_numpy((first + np.arange(LENGTH + 1)) % TOKENS)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        mask = torch.arange(LENGTH) < LENGTH - index % 3
        return {"tokens": {"ids": self.ids[index, :-1], "mask": mask}, "labels": self.ids[index, 1:], "name": f"sentence {index}"}


class Transformer(nn.Module):
    """One layer of attention, with a causal mask: its output is a mapping, as that of Hugging Face models is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor, mask: Tensor) -> Mapping[str, Tensor]:
        causal = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
        found = self.layer(self.embedding(ids), src_mask=causal, src_key_padding_mask=~mask)
        return UserDict(logits=self.head(found))


def step(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits = model(**batch["tokens"])["logits"]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    right = (logits.argmax(dim=-1) == batch["labels"]).float().mean()
    return {"loss": loss, "accuracy": right, "perplexity": math.exp(loss.item())}


def no_dropout() -> nn.Module:
    model = Transformer()
    model.layer.dropout.p = model.layer.dropout1.p = model.layer.dropout2.p = 0.0
    model.layer.self_attn.dropout = 0.0
    return model


def make_data() -> Any:
    return Sentences(60, 1), Sentences(21, 2)


BROUGHT = UserObjects(model=Transformer, data=make_data, step=step)
HARDSYNC: dict[str, Any] = {
    "protocol": "hardsync",
    "virtual": {"learners": 3},
    "optimizer": {"name": "sgd", "momentum": 0.9},
    "alpha0": 0.05,
    "epochs": 1,
    "evaluation": {"batch": 8},
}


def by_hand(made: Any, user_objects: UserObjects) -> dict[str, Tensor]:
    """A plain loop: what mpisgd deals to three learners is one batch of gradients, averaged, for torch's own SGD."""
    data = parts.load_data(made, user_objects)
    meta = parts.meta_of(data)
    model = parts.build_model(made, meta, user_objects).module
    optimizer = torch.optim.SGD(model.parameters(), lr=made.alpha0, momentum=0.9)
    dealt = parts.make_sampling(made, meta, 3)
    samples = data.train.dataset  # type: ignore[attr-defined]
    for seq in range(len(samples) // (3 * made.mu)):
        optimizer.zero_grad()
        for learner_id in range(3):
            batch = default_collate([samples[index] for index in dealt.indices(learner_id, seq).tolist()])
            (step(model, batch)["loss"] / 3).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("shards", [1, 3])
def test_hardsync_is_a_plain_loop_with_the_same_step(shards: int, tmp_path: Path) -> None:
    user_objects = UserObjects(model=no_dropout, data=make_data, step=step)
    made = config(tmp_path / "run", TENSORS, **HARDSYNC, shards=shards)
    simulate(made, user_objects)
    found = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)["theta"]
    expected = by_hand(made, user_objects)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    before = parts.build_model(made, parts.meta_of(parts.load_data(made, user_objects)), user_objects).module.state_dict()
    assert not torch.allclose(before["head.weight"], expected["head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "shards"), [({"name": "softsync", "n": 3}, 2), pytest.param({"name": "hardsync"}, 1, marks=pytest.mark.slow)]
)
def test_replay_proves_it(protocol: dict[str, Any], shards: int, tmp_path: Path) -> None:
    """Metrics, too: a metric that says otherwise is found."""
    simulated(tmp_path / "run", TENSORS, BROUGHT, **{**HARDSYNC, "protocol": protocol}, shards=shards, averaging=0.5)
    proof = replay.replay(tmp_path / "run", BROUGHT)
    assert (proof.reason, proof.other_losses) == ("", 0)
    assert all(each.elements == 0 for each in proof.differences)
    assert {"loss", "accuracy", "perplexity"} < set(next(proved for where, proved, *_ in proof.claims if where == "evaluations"))

    def lies(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {**step(model, batch), "accuracy": 0.5}

    other = replay.check(tmp_path / "run", UserObjects(model=Transformer, data=make_data, step=lies))
    assert "accuracy" in other


def test_metrics_are_means_over_all_samples_wherever_they_are_shown(tmp_path: Path) -> None:
    """The last batch of 21 samples in eights is smaller: a mean of means would be wrong."""
    outcome = simulate(config(tmp_path / "run", TENSORS, **{**HARDSYNC, "evaluation": {"batch": 8, "train": True}}), BROUGHT)
    run = Run(outcome.path)
    made = config(tmp_path / "run", TENSORS, **HARDSYNC)
    data = parts.load_data(made, BROUGHT)
    model = parts.build_model(made, parts.meta_of(data), BROUGHT).module.eval()
    model.load_state_dict(torch.load(run.path / "weights.pt", weights_only=True)["theta"])
    with torch.no_grad():
        each = [step(model, default_collate([sample])) for sample in (data.test.dataset[at] for at in range(21))]  # type: ignore[attr-defined]
    accuracy = float(np.mean([float(found["accuracy"]) for found in each]))
    loss = float(np.mean([float(found["loss"]) for found in each]))
    last = run.evaluations[-2]
    assert schema.extra("evaluations", run.evaluations.dtype) == ("accuracy", "perplexity")
    assert last["accuracy"] == pytest.approx(accuracy, rel=1e-5)
    assert last["loss"] == pytest.approx(loss, rel=1e-5)
    assert math.isnan(last["error"])
    assert training.final_text(run).startswith(f"loss {loss:.4g} (theta)")
    assert training.summary_table(run).cells("final accuracy")[0] == last["accuracy"]
    assert training.evaluation_table(run).cells("perplexity")[-2] == last["perplexity"]
    said = dict(about.header(run, about.status(run), "").rows)  # type: ignore[arg-type]
    assert str(said["step"]).startswith("tests.virtual.test_own_step:step (")
    assert f"test loss {last['loss']:.4g}, accuracy {last['accuracy']:.4g}" in farewell(outcome, run)
    plain = simulated(tmp_path / "plain", TENSORS, epochs=1)
    table = compare([run.path, plain.path], tmp_path / "compared", Console(quiet=True)).table
    assert table.cells("accuracy") == [last["accuracy"], None]
    assert table.cells("error theta")[0] is None
    assert table.cells("error theta")[1] == 100 * plain.evaluations["error"][-1]
    assert table.cells("loss") == [last["loss"], plain.evaluations["loss"][-1]]
    with h5py.File(run.path / "log.h5") as log:
        assert log["evaluations"]["accuracy"][-2] == last["accuracy"]
    assert b"nan %" not in b"".join(path.read_bytes() for path in (tmp_path / "compared").glob("*.md"))


def test_a_metric_called_error_is_the_share_of_what_is_wrong(tmp_path: Path) -> None:
    def with_error(model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        output = model(inputs)
        return {"loss": nn.functional.cross_entropy(output, targets), "error": (output.argmax(dim=1) != targets).float().mean()}

    stepped = simulated(tmp_path / "step", TENSORS, UserObjects(step=with_error), epochs=1)
    plain = simulated(tmp_path / "loss", TENSORS, epochs=1)
    assert stepped.evaluations.dtype == plain.evaluations.dtype == schema.EVALUATIONS
    np.testing.assert_allclose(stepped.evaluations["error"], plain.evaluations["error"], rtol=1e-6)
    assert stepped.pushes["loss"].tolist() == plain.pushes["loss"].tolist(), "a step of the same operations gives the same bits"


def test_a_language_model_has_a_perplexity_and_a_regression_a_loss(tmp_path: Path) -> None:
    ids = torch.arange(40 * 5).reshape(40, 5) % 7
    words = ((ids[:, :-1], ids[:, 1:]), (ids[:10, :-1], ids[:10, 1:]))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))

        def forward(self, tokens: Tensor) -> Tensor:
            output: Tensor = self.layers(tokens).transpose(1, 2)
            return output

    run = simulated(tmp_path / "words", TENSORS, UserObjects(model=Model, data=words), epochs=1)
    loss = run.evaluations["loss"][-1]
    assert training.final_text(run) == f"loss {loss:.4g}, perplexity {math.exp(loss):.4g} (theta) at epoch 1.20"
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    numbers = UserObjects(model=lambda: nn.Linear(3, 1), loss=nn.functional.mse_loss, data=((x, x[:, :1]), (x, x[:, :1])))
    run = simulated(tmp_path / "numbers", TENSORS, numbers, epochs=1)
    assert training.final_text(run) == f"loss {run.evaluations['loss'][-1]:.4g} (theta) at epoch 1.20"
    untested = UserObjects(model=lambda: nn.Linear(3, 1), loss=nn.functional.mse_loss, data=((x, x[:, :1]), None))
    assert training.final_text(simulated(tmp_path / "untested", TENSORS, untested, epochs=1)) == "no test data"


@dataclasses.dataclass
class Record:
    tokens: Any
    labels: Tensor


#: Batch -> as which it is given, and how a step has the dict back.
NESTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda batch: (batch["tokens"], [batch["labels"]]), lambda given: {"tokens": given[0], "labels": given[1][0]}),
    "dataclass": (lambda batch: Record(batch["tokens"], batch["labels"]), dataclasses.asdict),
    "mapping": (UserDict, lambda given: given),
}


def test_a_batch_may_be_any_nest(tmp_path: Path) -> None:
    """What a collate function makes; the bits are those of dicts."""

    def nested(given: Callable[[Any], Any], back: Callable[[Any], Any]) -> UserObjects:
        def make() -> Any:
            train, test = make_data()
            collated = {"collate_fn": lambda them: given(default_collate(them))}
            return DataLoader(train, **collated), DataLoader(test, batch_size=500, **collated)

        return UserObjects(model=Transformer, data=make, step=lambda model, batch: step(model, back(batch)))

    user_objects = {
        "dict": nested(lambda batch: batch, lambda given: given),
        **{kind: nested(*ways) for kind, ways in NESTS.items()},
    }
    runs = [simulated(tmp_path / kind, TENSORS, each, **HARDSYNC) for kind, each in user_objects.items()]
    assert len({run.pushes["loss"].tobytes() for run in runs}) == 1
    assert len({run.evaluations["accuracy"].tobytes() for run in runs}) == 1
    assert replay.check(tmp_path / "dataclass", user_objects["dataclass"]) == ""


@pytest.mark.parametrize(
    "changes",
    spread(
        [
            {"per_layer": True, "shards": 2, "protocol": {"name": "softsync", "n": 2}},
            {"aggregation": "node", "virtual": {"learners": 4, "ranks_per_node": 5}},
        ],
        2,
    ),
    ids=["layers", "teams"],
)
def test_layers_exchanged_one_by_one_and_teams_take_a_step(changes: dict[str, Any], tmp_path: Path) -> None:
    simulated(tmp_path / "run", TENSORS, BROUGHT, **{**HARDSYNC, **changes})
    assert replay.check(tmp_path / "run", BROUGHT) == ""


# ---------------------------------------------------------------------------------------------------- what is refused


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def backward(model: nn.Module, batch: Any) -> Tensor:
    loss = _loss(model, batch)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


def misspelt(model: nn.Module, batch: Any) -> Tensor:
    return _loss(model, batch["inputs"])


def metric_that_fails(model: nn.Module, batch: Any) -> Any:
    return {"loss": _loss(model, batch), **({} if model.training else {"share": [1, 2][batch[0].shape[0]]})}


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "number": (lambda model, batch: _loss(model, batch).item(), "step: returned float .*, expected a scalar tensor"),
    "nothing": (lambda model, batch: None, "step: returned NoneType, expected a scalar tensor"),
    "vector": (lambda model, batch: model(batch[0]), r"step: expected a scalar, got shape \(4, 3\)"),
    "no loss": (
        lambda model, batch: {"error": 1.0},
        "step: returned a mapping of 'error', expected a scalar tensor under 'loss'",
    ),
    "detached": (lambda model, batch: _loss(model, batch).detach(), "step: the loss does not depend on the model's weights"),
    "nan": (lambda model, batch: _loss(model, batch) * math.nan, "step: the loss = nan at the first mini-batch"),
    "backward": (backward, r"step: backward in the step left a gradient of .*: expected the loss alone"),
    "fails": (misspelt, r"the step fails at the first mini-batch, at .*test_own_step.py:\d+: TypeError"),
    "metric fails": (metric_that_fails, r"the step fails at the first batch of an evaluation, at .*py:\d+: IndexError"),
    "metric of a shape": (
        lambda model, batch: {"loss": _loss(model, batch), "each": torch.ones(2)},
        r"step: metric 'each' is a tensor of shape \(2,\), expected a number",
    ),
    "metric of text": (
        lambda model, batch: {"loss": _loss(model, batch), "each": "0.5"},
        "step: metric 'each' is str '0.5', expected a number",
    ),
    "name": (
        lambda model, batch: {"loss": _loss(model, batch), "samples": 1},
        "its metric 'samples' has the name of a column of the log",
    ),
    "no name": (lambda model, batch: {"loss": _loss(model, batch), 3: 1.0}, "step: metric 3 has no name for a column"),
    "name of a table": (lambda model, batch: {"loss": _loss(model, batch), "a | b": 1.0}, r"step: metric 'a \| b' has no name"),
    "not callable": (3, "step: found int 3, expected a callable of"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_step_is_said_before_the_start(name: str, tmp_path: Path) -> None:
    function, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        simulate(config(tmp_path / "run", TENSORS), UserObjects(step=function))
    assert not (tmp_path / "run").exists()


def test_metrics_are_numbers_of_any_library_and_the_same_ones_of_all_batches(tmp_path: Path) -> None:
    """The last batch of an evaluation is smaller: a step that measures something else there is refused."""
    kinds = {"float32": np.float32(0.5), "top-5 %": np.bool_(True), "n": np.int64(3), "tensor": torch.tensor([2.0])}
    run = simulated(
        tmp_path / "run", TENSORS, UserObjects(step=lambda model, batch: {"loss": _loss(model, batch), **kinds}), epochs=1
    )
    assert [run.evaluations[name][-1] for name in kinds] == [0.5, 1.0, 3.0, 2.0]
    assert training.summary_table(run).cells("final top-5 %") == [1.0]

    def forgets(model: nn.Module, batch: Any) -> Any:
        return {"loss": _loss(model, batch), **({"share": 1.0} if len(batch[0]) == 4 else {"other": 1.0})}

    made = config(tmp_path / "forgets", TENSORS, mu=4, evaluation={"batch": 4})
    x, y = torch.ones(40, 6), torch.zeros(40, dtype=torch.int64)
    with pytest.raises(ConfigError, match="step: metrics are other of a batch, but share of earlier batches: expected the same"):
        simulate(made, UserObjects(step=forgets, data=((x, y), (x[:5], y[:5])), model=lambda: nn.Linear(6, 3)))


def test_what_a_sample_raises_is_not_laid_to_the_step(tmp_path: Path) -> None:
    class Broken(Sentences):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 1:
                raise LookupError("no such sentence")
            return super().__getitem__(index)

    with pytest.raises(LookupError, match="no such sentence"):
        simulate(
            config(tmp_path / "run", TENSORS, **HARDSYNC),
            UserObjects(Transformer, data=(Sentences(60, 1), Broken(21, 2)), step=step),
        )


class Things:
    """Samples that nobody can put into a batch."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"x": object()}


class Ragged(Things):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(index + 1)}


@pytest.mark.parametrize(("samples", "why"), [(Things(), "found <class 'object'>"), (Ragged(), "equal size")])
def test_samples_that_make_no_batch(samples: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"data: train: sample.* cannot be put into a batch: .*{why}.*collate_fn"):
        simulate(config(tmp_path / "run", TENSORS), UserObjects(model=lambda: nn.Linear(2, 3), step=_loss, data=(samples, None)))


def test_a_step_is_not_given_beside_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step = .*: expected '' beside a loss"):
        simulate(config(tmp_path / "run", TENSORS, loss="mse_loss"), UserObjects(step=_loss))
    with pytest.raises(ConfigError, match="step"):
        simulate(config(tmp_path / "run", TENSORS), UserObjects(step=_loss, loss=nn.functional.cross_entropy))
    with pytest.raises(ConfigError, match=r"virtual\.batched = True: expected False beside step"):
        simulate(config(tmp_path / "run", TENSORS, virtual={"batched": True}), UserObjects(step=_loss))


def test_batches_of_a_collate_function_are_not_computed_together(tmp_path: Path) -> None:
    pairs: Any = [(torch.ones(6), 1)] * 40
    data = (DataLoader(pairs, collate_fn=lambda samples: default_collate(samples[:])), None)
    user_objects = UserObjects(model=lambda: nn.Linear(6, 3), data=data)
    with pytest.raises(ConfigError, match=r"virtual\.batched = True: expected False beside a collate_fn"):
        simulate(config(tmp_path / "run", TENSORS, virtual={"batched": True}), user_objects)
    assert simulated(tmp_path / "run", TENSORS, user_objects, epochs=1).done


def test_a_step_by_name_is_trusted_by_name_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\ndef step(model, batch):\n    return nn.functional.cross_entropy(model(batch[0]), batch[1])\n"
    (tmp_path / "stepping.py").write_text(text)
    simulated(tmp_path / "run", TENSORS, step="stepping:step", epochs=1)
    assert Run(tmp_path / "run").environment["brought"]["step"]["object"] == "stepping:step"
    with pytest.raises(ConfigError, match=r"step = 'stepping:step', from module 'stepping'"):
        replay.replay(tmp_path / "run")
    assert replay.replay(tmp_path / "run", named={"step": "stepping:step"}).reason == ""
    simulated(tmp_path / "unnamed", TENSORS, UserObjects(step=lambda model, batch: 2 * _loss(model, batch)), epochs=1)
    with pytest.raises(ConfigError, match=r"(?s)the step was .*lambda.*--step MODULE:NAME"):
        replay.replay(tmp_path / "unnamed", trust=True)
