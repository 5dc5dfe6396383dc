"""Runs and job files of earlier versions, with `exchange` and `receive` (`config/older.py`), are read, reported and replayed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from mpisgd import replay
from mpisgd.base.errors import ConfigError
from mpisgd.config.config_file import from_mapping
from mpisgd.records.log.reader import Run
from mpisgd.report import single

from .jobs import SIZES, TENSORS, simulated

ONE_NODE: dict[str, Any] = {"virtual": {"ranks_per_node": 9}}
#: Today's options of a run, those of the file then, and the entry `exchange` of [environment].
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "whole": ({"protocol": "hardsync"}, {"exchange": "auto"}, "whole"),
    "in-place": ({"protocol": "hardsync", **ONE_NODE}, {"exchange": "auto"}, "in-place"),
    "streamed": ({"protocol": "hardsync", "way": "streamed", "shards": 2}, {"exchange": "streamed"}, "streamed"),
    "gathered": ({"protocol": "softsync", "way": "gathered"}, {"exchange": "whole", "receive": "gathered"}, "whole"),
    "duplex": ({"protocol": "async", "ahead": 1}, {"exchange": "duplex"}, "duplex"),
    "prefetch": ({"protocol": "async", "ahead": 2}, {"exchange": "prefetch"}, "prefetch"),
    "layerwise": ({"protocol": "async", "per_layer": True, "shards": 2}, {"exchange": "layerwise"}, "layerwise"),
    "buckets": ({"protocol": "allreduce", "way": "buckets"}, {"exchange": "layerwise"}, "layerwise"),
    "in memory": ({"protocol": "allreduce", **ONE_NODE}, {"exchange": "auto", "aggregation": "node"}, "whole"),
}


@pytest.mark.parametrize("base", [TENSORS, SIZES], ids=["tensors", "sizes"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_then_is_as_one_of_today(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    changes, options, exchange = RUNS[name]
    today = simulated(tmp_path / "run", base, **changes)
    path = tmp_path / "run" / "config.toml"
    table = tomllib.loads(path.read_text())
    environment = {key: value for key, value in table.pop("environment").items() if key != "way"}
    old = {key: value for key, value in table.items() if key not in ("ahead", "per_layer")}
    path.write_text(tomli_w.dumps({"receive": "in-turn", **old, **options, "environment": environment | {"exchange": exchange}}))
    then = Run(today.path)
    assert then.environment["way"] == today.environment["way"]
    assert from_mapping(then.config) == from_mapping(today.config)
    assert replay.check(then.path) == ""
    assert single.report(then.path, tmp_path / "report").exit_status == 0


def test_where_there_is_no_entry_the_option_tells(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", TENSORS, protocol="hardsync", way="streamed")
    path = run.path / "config.toml"
    table = tomllib.loads(path.read_text())
    del table["environment"]["way"]
    path.write_text(tomli_w.dumps({**table, "exchange": "streamed"}))
    assert Run(run.path).environment["way"] == "streamed"
    assert replay.check(run.path) == ""


@pytest.mark.parametrize(
    ("then", "today"),
    [
        ({"exchange": "duplex", "receive": "gathered", "protocol": "async"}, {"protocol": "async", "ahead": 1}),
        ({"exchange": "streamed"}, {}),
        ({"exchange": "layerwise", "protocol": {"name": "allreduce"}, "aggregation": "node"}, {"protocol": "allreduce"}),
        ({"exchange": "layerwise", "shards": 2}, {"per_layer": True, "shards": 2}),
        ({"exchange": "duplex", "ahead": 2, "protocol": "async"}, {"ahead": 2, "protocol": "async"}),
    ],
    ids=str,
)
def test_job_files(then: dict[str, Any], today: dict[str, Any]) -> None:
    assert from_mapping(then) == from_mapping(today)


@pytest.mark.parametrize("given", [{"exchange": "duplexed"}, {"exchange": ["duplex"]}, {"receive": 3}, {"way": "whole"}], ids=str)
def test_others_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{next(iter(given))}'"):
        from_mapping(given)
