"""Layers exchanged one by one, on the virtual cluster: laws, replay, staleness by layer, pipelined pushes [Chen16 2, A.3]."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd import replay
from mpisgd.analysis import staleness
from mpisgd.base.errors import ConfigError
from mpisgd.comm.messages import Tag
from mpisgd.config import replace
from mpisgd.job import parts
from mpisgd.job.parts import UserObjects
from mpisgd.protocols import PROTOCOLS
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Reason, Verdict
from mpisgd.report import single as report
from mpisgd.simulate import job
from mpisgd.simulate.batch import Batch
from tests.effort import examples, spread
from tests.virtual.jobs import HOW, SIZES, TENSORS, config, merged, simulated, tables
from tests.virtual.scene import WatchedWire
from tests.virtual.test_laws import COMMON, Laws, jitters, jobs, obeys

DEEP = {"model": {"name": "mlp", "hidden": [8, 8, 8]}}
"""Four layers."""
REFUSED = {"allreduce"}
"""It has buckets in the place of layers: `test_buckets.py`."""
ASYNCHRONOUS = [{"name": "async"}, {"name": "downpour", "warm_up": 3}, {"name": "softsync", "n": 2}, {"name": "ssp", "slack": 1}]
SYNCHRONOUS = [{"name": "hardsync"}, {"name": "backup", "b": 1}, {"name": "timeout", "N_min": 2, "timeout_s": 0.11}]


#: What is done to a gradient before it is pushed.
STAGES: dict[str, tuple[Any, ...]] = {
    "clip_norm": (0.0, 0.3),
    "nonfinite": ("stop", "drop"),
    "push_format": ("float32", "bfloat16", "topk"),
    "pull_format": ("float32", "bfloat16"),
}
VERSIONED = [{"name": "versioned"}, {"name": "versioned", "tolerance": 1}]


def names(protocol: dict[str, Any]) -> str:
    return str(protocol["name"])


# ---------------------------------------------------------------------------------------------------------------------- laws


@st.composite
def layerwise_jobs(draw: st.DrawFn, protocol: str, most_learners: int) -> dict[str, Any]:
    """Any job that may be exchanged layer by layer."""
    changes = draw(jobs(protocol, most_learners))
    own = {"abort": False, "n_push": 1, "n_fetch": 1, "get_model_frequency": 1}
    options = {name: own.get(name, value) for name, value in changes["protocol"].items()}
    stages = {name: draw(st.sampled_from(values)) for name, values in STAGES.items()}
    way = changes["way"].replace("streamed", "whole")
    return {**changes, **stages, "protocol": options, "ahead": 0, "way": way, "per_layer": True}


PROTOCOLS_BY_LAYER = sorted(set(PROTOCOLS) - REFUSED)


@pytest.mark.parametrize("protocol", spread([*PROTOCOLS_BY_LAYER[1:], PROTOCOLS_BY_LAYER[0]], 4))
def test_any_virtual_job_obeys(protocol: str) -> None:
    @settings(COMMON, max_examples=examples(20))
    @given(layerwise_jobs(protocol, 8), jitters)
    def one(changes: dict[str, Any], jitter_s: float) -> None:
        with tempfile.TemporaryDirectory() as directory:
            each_mini_batch_comes_to_all_or_none(obeys(Path(directory) / "run", SIZES, changes, jitter_s))

    one()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", spread(PROTOCOLS_BY_LAYER, 4))
def test_so_does_one_with_gradients(protocol: str) -> None:
    """And it is replayed to the same bits."""

    @settings(COMMON, max_examples=examples(5))
    @given(layerwise_jobs(protocol, 4), jitters)
    def one(changes: dict[str, Any], jitter_s: float) -> None:
        with tempfile.TemporaryDirectory() as directory:
            obeys(Path(directory) / "run", merged(TENSORS, DEEP), {**changes, "alpha0": 0.001}, jitter_s)

    one()


def each_mini_batch_comes_to_all_or_none(laws: Laws) -> None:
    """Who is told to stop, in a forward pass, has pushed no slice of it."""
    pushed = [np.bincount(rows["learner_id"], minlength=laws.lambda_).tolist() for rows in laws.pushes]
    assert all(each == pushed[0] for each in pushed)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("protocol", [*ASYNCHRONOUS, *SYNCHRONOUS], ids=names)
def test_it_is_the_same_again(protocol: dict[str, Any], tmp_path: Path) -> None:
    runs = [simulated(tmp_path / name, SIZES, protocol=protocol, shards=3, per_layer=True) for name in ("first", "again")]
    assert tables(runs[0]) == tables(runs[1])


# ------------------------------------------------------------------------------------------------------- when slices travel


def test_slices_are_pulled_in_the_order_of_the_layers_and_pushed_in_reverse(tmp_path: Path) -> None:
    """A lone learner, whose wire writes down what it sends: shards are ranks 0 to 2."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "VirtualWire", WatchedWire)
        wires: list[WatchedWire] = []
        patched.setattr(job.Cluster, "run", watched(job.Cluster.run, wires))
        changes: dict[str, Any] = {"virtual": {"learners": 1, "train_samples": 8}, "shards": 3, "per_layer": True}
        simulated(tmp_path / "async", SIZES, protocol="async", **changes)
        simulated(tmp_path / "hardsync", SIZES, protocol="hardsync", **changes)
        simulated(tmp_path / "backup", SIZES, protocol={"name": "backup", "b": 0}, **changes)
    asynchronous, synchronous, whole = (
        [(dest, tag) for dest, tag in wire.sent if tag in (Tag.PULL, Tag.PUSH)] for wire in wires if wire.rank == 3
    )
    pulls, pushes = [(shard, Tag.PULL) for shard in range(3)], [(shard, Tag.PUSH) for shard in (2, 1, 0)]
    assert asynchronous == [*pulls, *pushes, *pulls, *pushes, pulls[0]], "the first that it asks says stop"
    ahead = [(shard, tag) for shard in (2, 1, 0) for tag in (Tag.PUSH, Tag.PULL)]
    assert synchronous == [*pulls, *ahead, *ahead], "asked for at once: no answer comes before the update"
    assert whole == [*pulls, *pushes, *pulls, *pushes, *pulls], "whole, to be of one clock"


def watched(run: Any, wires: list[WatchedWire]) -> Any:
    def running(cluster: Any, ranks: Any, mains: Any) -> None:
        wires.extend(ranks)
        run(cluster, ranks, mains)

    return running


@pytest.mark.parametrize(("protocol", "pulled_s"), [("async", [0.0, 0.1, 0.2]), ("hardsync", [0.0, 0.0, 0.0])])
def test_a_third_of_a_mini_batch_is_forward_two_thirds_backward(protocol: str, pulled_s: list[float], tmp_path: Path) -> None:
    """Messages cost next to nothing here: so what a push tells is how long the weights of its slice were in use."""
    changes = {"virtual": {"learners": 1}, "compute": {"name": "constant", "mean_s": 0.9}, "shards": 3, "per_layer": True}
    run = simulated(tmp_path / "run", SIZES, protocol=protocol, **changes)
    left_s = [0.9, 0.7, 0.5]
    for shard in range(3):
        rows = run.pushes[run.pushes["shard"] == shard]
        assert rows["compute_s"] == pytest.approx(left_s[shard] - pulled_s[shard], abs=1e-4)
        assert rows["arrival_s"][0] == pytest.approx(left_s[shard], abs=1e-4)
        assert np.diff(rows["arrival_s"]) == pytest.approx(0.9, abs=1e-4)


def test_measured_layers_take_their_seconds_and_have_their_sizes(tmp_path: Path) -> None:
    """Forward 0.1, 0, 0.3 of 1 s, backward 0.2, 0.3, 0.1: the weights are in use from when they are reached until they are left."""
    virtual = {
        "learners": 1,
        "parameters": 0,
        "layers": {"low": 100, "mid": 700, "top": 200},
        "forward_s": {"low": 1.0, "mid": 0.0, "top": 3.0},
        "backward_s": {"low": 2.0, "mid": 3.0, "top": 1.0},
    }
    changes = {"compute": {"name": "constant", "mean_s": 1.0}, "shards": 3, "per_layer": True}
    run = simulated(tmp_path / "run", SIZES, protocol="async", virtual=virtual, **changes)
    assert run.environment["parameters"] == 1000
    assert run.environment["layers"] == [["low"], ["mid"], ["top"]]
    compute_s = [run.pushes["compute_s"][run.pushes["shard"] == shard] for shard in range(3)]
    for found, expected in zip(compute_s, (1.0, 0.7, 0.4), strict=True):
        assert found == pytest.approx(expected, abs=1e-3)
    assert replay.replay(run.path).holds, "the seconds are simulated again"


def test_layers_that_were_measured_must_be_those_of_the_model(tmp_path: Path) -> None:
    seconds = {"1": 1.0, "3": 1.0}
    virtual = {"forward_s": seconds, "backward_s": seconds}
    simulated(tmp_path / "run", TENSORS, protocol="async", per_layer=True, shards=2, virtual=virtual)
    other = {name: dict(zip(("1", "conv"), each.values(), strict=True)) for name, each in virtual.items()}
    with pytest.raises(ConfigError, match=r"virtual\.forward_s = 1, conv: expected the layers of the model, in order: 1, 3"):
        simulated(tmp_path / "other", TENSORS, protocol="async", per_layer=True, shards=2, virtual=other)


@pytest.mark.parametrize(
    ("virtual", "said"),
    [
        ({"layers": {"a": 5}}, "none beside virtual.gradients = true"),
        ({"layers": {"a": 5}, "gradients": False, "parameters": 7}, "0 beside virtual.layers"),
        ({"layers": {"a": 0}, "gradients": False}, r"virtual.layers\[a\] = 0: expected"),
        ({"forward_s": {"a": 1.0}}, "the layers of virtual.forward_s"),
        ({"layers": {"a": 5}, "gradients": False, "forward_s": {"b": 1.0}, "backward_s": {"b": 1.0}}, "and of virtual.layers"),
        ({"forward_s": {"a": 0.0}, "backward_s": {"a": 0.0}}, "seconds above 0"),
        ({"forward_s": {"a": -1.0}, "backward_s": {"a": 1.0}}, r"virtual.forward_s\[a\] = -1"),
    ],
)
def test_layers_that_cannot_be_are_refused(virtual: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(Path("run"), TENSORS, virtual=virtual)


def test_seconds_of_layers_go_with_layers_alone() -> None:
    seconds = {"1": 1.0, "3": 1.0}
    with pytest.raises(ConfigError, match=r"the seconds count as a whole"):
        simulated(Path("run"), TENSORS, protocol="async", virtual={"forward_s": seconds, "backward_s": seconds})


def test_a_model_of_several_layers_for_each_shard_spends_its_time_by_layers(tmp_path: Path) -> None:
    """Slices of 1, 2 and 1 layers of four: the second is in use for three quarters of the time."""
    changes = {"virtual": {"learners": 1}, "compute": {"name": "constant", "mean_s": 1.2}, "per_layer": True, "shards": 3}
    model = {"name": "mlp", "hidden": [6, 2, 13]}
    run = simulated(tmp_path / "run", TENSORS, protocol="async", model=model, epochs=0.5, **changes)
    assert run.environment["layers"] == [["1"], ["3", "5"], ["7"]]
    compute_s = [run.pushes["compute_s"][run.pushes["shard"] == shard].mean() for shard in range(3)]
    assert compute_s == pytest.approx([1.2, 0.9, 0.3], abs=1e-3)


@pytest.mark.parametrize("protocol", spread(["async", "hardsync"], 2))
def test_a_straggler_is_late_by_as_much_as_with_whole_vectors(protocol: str, tmp_path: Path) -> None:
    """Before its first slice leaves, and by its factor for what it computes after that."""
    straggler = {"slowdown": {"0": 3.0}, "delay": "exponential", "delay_mean_s": 0.05}
    runs = {how: simulated(tmp_path / how, SIZES, protocol=protocol, shards=3, straggler=straggler, **HOW[how]) for how in HOW}
    seconds = {}
    for how, run in runs.items():
        rows = run.pushes[run.pushes["shard"] == 0]
        rows = rows[rows["verdict"] == Verdict.APPLY]
        seconds[how] = {(row["learner_id"], row["seq"]): row["delay_s"] for row in rows}
    both = seconds["whole"].keys() & seconds["layerwise"].keys()
    assert len(both) > 80
    assert [seconds["layerwise"][key] for key in both] == pytest.approx([seconds["whole"][key] for key in both], abs=1e-4)
    top = runs["layerwise"].pushes[runs["layerwise"].pushes["shard"] == 2]
    assert (top["delay_s"] > 0).all()
    assert top["delay_s"].sum() < sum(seconds["layerwise"].values())


# --------------------------------------------------------------------------------------------- staleness [Chen16 Table 1]

FORTY: dict[str, Any] = {
    "protocol": "async",
    "per_layer": True,
    "shards": 18,
    "virtual": {"learners": 40, "train_samples": 8000},
    "compute": {"name": "normal", "mean_s": 0.1, "deviation_s": 0.01},
}


@pytest.mark.slow
def test_staleness_rises_from_the_top_layer_to_the_bottom_one(tmp_path: Path) -> None:
    """40 learners, 18 layers: every layer's mean is above that of the layer over it; the lowest comes near lambda - 1."""
    run = simulated(tmp_path / "run", SIZES, **FORTY)
    table = staleness.layer_table(run)
    assert table.cells("layer") == [f"layer {layer}" for layer in reversed(range(18))]
    mean, median, largest = (np.array(table.cells(name), float) for name in ("mean τ", "median τ", "max τ"))
    assert (np.diff(mean) > 1).all()
    assert (np.diff(median) > 0).all()
    assert (np.diff(largest) >= 0).all()
    assert mean[0] < 4
    assert 36 < mean[-1] < 39.5
    assert set(table.cells("gradients")) == {2000}


@pytest.mark.slow
def test_the_report_has_a_row_for_each_layer_the_top_one_first(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, per_layer=True, shards=3, **DEEP)
    table = report.report(run.path).table("staleness_layers")
    assert list(zip(table.cells("layer"), table.cells("shard"), strict=True)) == [("7", 2), ("5", 2), ("3", 1), ("1", 0)]
    assert (run.path / "report" / "staleness_layers.csv").read_text().startswith("layer,shard,gradients,min τ,mean τ")
    assert "| layer | shard |" in (run.path / "report" / "report.md").read_text()


def test_whole_vectors_are_equally_stale_everywhere_and_have_no_such_table(tmp_path: Path) -> None:
    virtual = {"learners": 10, "train_samples": 1000}
    run = simulated(tmp_path / "run", SIZES, **{**FORTY, "per_layer": False, "way": "whole", "shards": 3, "virtual": virtual})
    means = [run.pushes["staleness"][run.pushes["shard"] == shard].mean() for shard in range(3)]
    assert means == pytest.approx([means[0]] * 3, abs=0.2)
    assert "layers" not in run.environment
    assert not staleness.layer_table(run).rows


# -------------------------------------------------------------------------------------------------- the same weights [A.3]


def weights(run: Run) -> dict[str, torch.Tensor]:
    theta: dict[str, torch.Tensor] = torch.load(run.path / schema.WEIGHTS, weights_only=True)["theta"]
    return theta


@pytest.mark.slow
@pytest.mark.parametrize("shards", spread([2, 3], 2))
@pytest.mark.parametrize("optimizer", spread(["adam", "sgd"], 2))
def test_hardsync_arrives_at_the_weights_of_whole_vectors(
    shards: int, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit. Where slices end elsewhere, so do torch's vector registers: Adam's last bits then differ, SGD's do not."""
    changes = {**DEEP, "shards": shards, "protocol": "hardsync", "optimizer": optimizer, "alpha0": 0.01}
    even, layerwise = (simulated(tmp_path / how, TENSORS, **HOW[how], **changes) for how in HOW)
    bounds = parts.bounds
    monkeypatch.setattr(parts, "bounds", lambda config, model, *rules: bounds(replace(config, per_layer=True), model))
    whole = simulated(tmp_path / "whole at layers", TENSORS, **changes)
    assert whole.environment["way"] == "whole"
    assert whole.summaries["final_clock"].tolist() == layerwise.summaries["final_clock"].tolist()
    for name, tensor in weights(layerwise).items():
        assert torch.equal(tensor, weights(whole)[name])
        assert torch.equal(tensor, weights(even)[name]) or optimizer == "adam"
        torch.testing.assert_close(tensor, weights(even)[name])


@pytest.mark.parametrize("changes", spread([{n: v[1] for n, v in STAGES.items()}, *({n: v[1]} for n, v in STAGES.items())], 5))
def test_so_does_hardsync_whatever_is_done_to_the_gradient(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its norm is that of all layers, and each element is rounded by itself."""
    runs = [simulated(tmp_path / how, TENSORS, **DEEP, **changes, **HOW[how], shards=3, protocol="hardsync") for how in HOW]
    ours, theirs = map(weights, runs)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("base", "stage"),
    [(SIZES, {"clip_norm": 1.0}), (SIZES, {"nonfinite": "drop"}), ({**TENSORS, **DEEP, "epochs": 0.5}, {"nonfinite": "drop"})],
    ids=["clip", "drop", "drop tensors"],
)
def test_where_the_whole_gradient_is_looked_at_no_slice_leaves_before(
    base: dict[str, Any], stage: dict[str, Any], tmp_path: Path
) -> None:
    """Weights are still pulled when they are needed; all pushes are of the end of the backward pass."""
    changes = {"virtual": {"learners": 1}, "compute": {"name": "constant", "mean_s": 0.9}, "shards": 3, "per_layer": True}
    run = simulated(tmp_path / "run", base, protocol="async", **changes, **stage)
    first = run.pushes[run.pushes["seq"] == 0]
    assert first["arrival_s"] == pytest.approx(0.9, abs=1e-3)
    assert first["compute_s"][np.argsort(first["shard"])] == pytest.approx([0.9, 0.8, 0.7], abs=0.06)


class Sometimes(torch.nn.Module):
    """In some mini-batches, by their content, the output is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(inputs)
        return output * float("nan") if int(inputs.abs().sum() * 1e4) % 6 == 0 else output


@pytest.mark.parametrize("push_format", spread(reversed(STAGES["push_format"]), 3))
def test_what_is_not_finite_is_dropped_on_all_shards_alike(push_format: str, tmp_path: Path) -> None:
    user_objects, changes = UserObjects(model=Sometimes), {"nonfinite": "drop", "push_format": push_format}
    run = simulated(tmp_path / "run", TENSORS, user_objects, per_layer=True, shards=2, protocol="async", **changes)
    dropped = [run.pushes[(run.pushes["shard"] == shard) & (run.pushes["verdict"] == Verdict.DROP)] for shard in (0, 1)]
    names = [sorted(rows[rows["reason"] == Reason.NONFINITE][["learner_id", "seq"]].tolist()) for rows in dropped]
    assert names[0] == names[1] != []
    assert replay.check(run.path, user_objects) == ""


@pytest.mark.slow
def test_learners_are_batched_layer_by_layer(tmp_path: Path) -> None:
    """The schedule is that of learners one by one, and so are the losses, but for float tolerance; several are computed at once."""
    many: list[int] = []
    some = Batch._compute_some

    def counting(batch: Batch, learner_ids: list[int]) -> None:
        many.append(len(learner_ids))
        some(batch, learner_ids)

    changes: dict[str, Any] = {**DEEP, "per_layer": True, "shards": 3, "protocol": "async", "clip_norm": 0.3}
    changes |= {"push_format": "bfloat16", "epochs": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Batch, "_compute_some", counting)
        one, all_ = (simulated(tmp_path / str(b), TENSORS, **changes, virtual={"batched": b}) for b in (False, True))
    same = ["learner_id", "seq", "clock", "timestamp", "arrival_s"]
    assert one.pushes[same].tolist() == all_.pushes[same].tolist()
    assert one.pushes["loss"] == pytest.approx(all_.pushes["loss"], abs=1e-3)
    assert max(many[1:]) > 1
    assert replay.check(all_.path) == ""


def test_pipelined_pushes_hide_behind_the_backward_pass(tmp_path: Path) -> None:
    """Four slices of 0.05 s on the wire each, backward passes of 0.4 s: only the last is still under way at its end."""
    changes = {
        "virtual": {"learners": 1, "parameters": 100_000, "train_samples": 40},
        "compute": {"name": "constant", "mean_s": 0.6},
        "network": {"bandwidth": 2e6, "node_bandwidth": 1e9},
        "shards": 4,
        "protocol": "hardsync",
    }
    push_s = {}
    for how in HOW:
        run = simulated(tmp_path / how, SIZES, **HOW[how], **changes)
        push_s[how] = float(np.median(run.pushes["push_s"][run.pushes["seq"] > 0]))
    assert push_s["whole"] == pytest.approx(0.2, rel=0.01)
    assert push_s["layerwise"] == pytest.approx(0.05, rel=0.01)


def test_more_shards_than_layers_have_parts_of_large_ones(tmp_path: Path) -> None:
    """hardsync has the bits of whole vectors; async is replayed, and its report names the parts."""
    changes: dict[str, Any] = {"shards": 6, "epochs": 1, **DEEP}
    whole, layers = (simulated(tmp_path / how, TENSORS, **HOW[how], protocol="hardsync", **changes) for how in HOW)
    assert all(torch.equal(weights(layers)[name], tensor) for name, tensor in weights(whole).items())
    run = simulated(tmp_path / "async", TENSORS, per_layer=True, protocol="async", **changes)
    assert [name for names in run.environment["layers"] for name in names][1:3] == ["3 1/2", "3 2/2"]
    assert replay.check(run.path) == ""
    assert "3 2/2" in staleness.layer_table(run).markdown()


# ---------------------------------------------------------------------------------------------------------------- refusals


def test_a_virtual_job_refuses_what_a_real_one_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"aggregation = 'node': expected 'none' beside per_layer"):
        simulated(tmp_path / "run", SIZES, per_layer=True, aggregation="node")
    with pytest.raises(ConfigError, match="shards = 228: expected at most the number of parameters, "):
        simulated(tmp_path / "run", TENSORS, per_layer=True, shards=228, **DEEP)
    assert not (tmp_path / "run").exists()
