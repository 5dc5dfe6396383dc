"""Virtual ranks of a node exchange in place (`exchange/travel/in_place.py`): whole vectors' bits, sooner, with headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.comm.virtual.scripted import EagerWire
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import config_file, replace
from mpisgd.job.resume import check_changes
from mpisgd.replay.rerun import job as rerun
from mpisgd.replay.rerun.world import TensorLogWorld
from mpisgd.simulate import job
from mpisgd.vectors.memory import Memory

from .jobs import SIZES, TENSORS, flat, simulated

ONE_NODE: dict[str, Any] = {"protocol": "hardsync", "virtual": {"ranks_per_node": 9}}


class Counted(VirtualWire):
    """Bytes of bodies that any rank sends."""

    nbytes = 0

    def start(self, dest: int, tag: int, fields: Any, *bodies: Any) -> Any:
        type(self).nbytes += sum(body.nbytes for body in bodies)
        return super().start(dest, tag, fields, *bodies)


@pytest.mark.parametrize(
    "special",
    [
        {"shards": 2, "optimizer": "adam", "averaging": 0.9},
        {"shards": 2, "clip_average": 0.1, "evaluator": False},
        {"nonfinite": "drop"},
        {"sampling": "dealt"},
        {"virtual": {"batched": True}},
        {"failures": {"at_s": {"1": 5.0}, "then": "leave"}},
    ],
    ids=str,
)
def test_it_has_the_bits_of_messages(tmp_path: Path, special: dict[str, Any]) -> None:
    changes = {**ONE_NODE, **special, "virtual": {**ONE_NODE["virtual"], **special.get("virtual", {})}}
    ours, theirs = (simulated(tmp_path / name, TENSORS, **changes, way=name) for name in ("auto", "whole"))
    assert ours.environment["way"] == "in-place"
    assert flat(ours).tobytes() == flat(theirs).tobytes()
    assert len(ours.updates) == len(theirs.updates)
    assert ours.updates["time_s"][-1] < theirs.updates["time_s"][-1]
    assert replay.check(ours.path) == ""


@pytest.mark.parametrize(("way", "protocol"), [("in-place", "hardsync"), ("gathered", "softsync"), ("whole", "hardsync")])
def test_learners_of_a_rerun_have_common_memory_where_they_compute_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, protocol: str
) -> None:
    """Else a slice that one has pulled would be overwritten by another's before it computes."""
    late: list[bool] = []
    common: list[bool] = []

    class Wire(EagerWire):
        def __init__(self, *arguments: Any, late: bool) -> None:
            seen.append(late)
            super().__init__(*arguments, late=late)

    def memory(self: TensorLogWorld, rank: int) -> Memory:
        found = own(self, rank)
        common.append(found is self.tensors.model.memory)
        return found

    seen, own = late, TensorLogWorld._memory
    run = simulated(tmp_path / "run", TENSORS, protocol=protocol, shards=2, way=way, virtual={"ranks_per_node": 9})
    monkeypatch.setattr(rerun, "EagerWire", Wire)
    monkeypatch.setattr(TensorLogWorld, "_memory", memory)
    assert replay.check(run.path) == ""
    assert any(late) and all(common) and common


def test_it_sends_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "VirtualWire", Counted)
    sent = []
    for way in ("in-place", "whole"):
        Counted.nbytes = 0
        run = simulated(tmp_path / way, SIZES, **ONE_NODE, way=way)
        sent.append(Counted.nbytes)
    vectors = len(run.pushes) + len(run.updates) * run.lambda_
    assert sent[0] == 0
    assert sent[1] == pytest.approx(4000 * vectors, rel=0.05)


def test_a_run_goes_on_by_another_way_of_the_same_bits_alone(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", SIZES, **ONE_NODE)
    config = config_file.of_run(run.path)
    for way in ("auto", "whole", "streamed"):
        check_changes(run.path, replace(config, way=way))
    with pytest.raises(ConfigError, match="per_layer = True: the run to be continued has False"):
        check_changes(run.path, replace(config, per_layer=True))
