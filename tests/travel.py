"""Jobs of tests that say which way vectors travel: a `way` of `mpisgd/exchange/ways.py`, which is no option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpisgd.config import Config, replace
from mpisgd.config.config_file import from_mapping

VARIABLE = "MPISGD_TRAVEL"
"""The same of a launch."""


def apart(job: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job's options, and its `way` where it has one."""
    options = dict(job)
    return options, {"way": options.pop("way")} if "way" in options else {}


def configured(job: Mapping[str, Any]) -> Config:
    options, way = apart(job)
    return replace(from_mapping(options), **way)


def launched(job: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A job's options, and the environment variables of its launch."""
    options, way = apart(job)
    return options, {VARIABLE: way["way"]} if way else {}
