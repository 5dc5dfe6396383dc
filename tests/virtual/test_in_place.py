"""Virtual ranks of a node exchange in place (`exchange/travel/in_place.py`): whole vectors' bits, sooner, with headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.comm.virtual.wire import VirtualWire
from mpisgd.config import config_file, replace
from mpisgd.job.resume import check_changes
from mpisgd.simulate import job

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
