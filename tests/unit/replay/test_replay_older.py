"""Runs of earlier builds, which followed other rules that no configuration names (`schema.RULES`): replayed but for those.

They are made from runs of today: without the entry `rules`, and the goodbyes that earlier logs had not.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import h5py
import pytest
import tomli_w

from mpisgd import replay
from mpisgd.base.errors import DataError
from mpisgd.records.log import schema
from mpisgd.records.log.schema import Event
from tests.forge import forge
from tests.unit.replay.test_replay import SOFTSYNC, simulated


def older(path: Path, **special: Any) -> Path:
    simulated(path, **{"protocol": SOFTSYNC, "epochs": 0.1, "evaluation": {"every_epochs": 0.03}, **special})
    contents = tomllib.loads((path / schema.CONFIG).read_text())
    assert contents["environment"].pop("rules") == schema.RULES
    contents["environment"]["batch_norm_policy"] = "as it was said then"
    (path / schema.CONFIG).write_text(tomli_w.dumps(contents))
    for log in path.glob("shard-*.h5"):
        with h5py.File(log, "r+") as file:
            forge(file)
            events = file["events"][:]
            kept = events[events["kind"] != Event.GOODBYE]
            file["events"].resize((len(kept),))
            file["events"][:] = kept
            file["committed"][list(schema.TABLES).index("events")] = len(kept)
    return path


def test_it_is_replayed_and_what_is_on_trust_is_said(tmp_path: Path) -> None:
    proof = replay.replay(older(tmp_path / "run"))
    assert proof.holds, proof.reason
    assert proof.evaluations > 2
    assert any("written by an earlier mpisgd" in line for line in proof.lines())


def test_its_batch_norm_is_not_evaluated_again(tmp_path: Path) -> None:
    proof = replay.replay(older(tmp_path / "run", model={"name": "mlp", "hidden": [12], "batch_norm": True}))
    assert proof.holds, proof.reason
    assert (proof.evaluations, proof.which) == (0, "none")
    assert any("other batch-norm statistics" in line for line in proof.lines())


@pytest.mark.parametrize(
    "special",
    [
        {"schedule": {"name": "constant", "warmup_epochs": 0.02}},
        {"protocol": {"name": "ssp", "get_model_frequency": 3}, "schedule": "linear"},
    ],
)
def test_rates_that_were_others_are_refused_by_name(tmp_path: Path, special: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="an earlier mpisgd began a warm-up with a rate of 0"):
        replay.replay(older(tmp_path / "run", **special))
