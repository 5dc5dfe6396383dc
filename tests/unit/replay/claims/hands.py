"""How a value of a run is changed, by the least bit or by much, and whether replay refuses it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tomli_w

from mpisgd import replay
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.records.log import schema
from mpisgd.replay.checks.trust_table import CLAIMS, Standing
from tests import forge

REPOSITORY = Path(__file__).parents[4]


def environment(path: Path, **changes: Any) -> None:
    """Other entries of [environment]; None takes one away."""
    contents = tomllib.loads((path / "config.toml").read_text())
    contents["environment"] |= {name: value for name, value in changes.items() if value is not None}
    (path / "config.toml").write_text(tomli_w.dumps(contents))


def configuration(path: Path, **changes: Any) -> None:
    """Other options of tables of config.toml."""
    contents = tomllib.loads((path / "config.toml").read_text())
    for name, values in changes.items():
        contents[name] |= values
    (path / "config.toml").write_text(tomli_w.dumps(contents))


def refused(path: Path, **options: Any) -> str:
    """Why, or ""."""
    try:
        return replay.replay(path, **options).reason
    except (DataError, ConfigError) as error:
        return str(error)


def files(path: Path, table: str) -> list[Path]:
    return [path / schema.evaluator_file()] if table == "evaluations" else sorted(path.glob("shard-*.h5"))


def change(path: Path, table: str, edit: Callable[[np.ndarray], Any], every: bool = False) -> None:
    """Edit a table, in place or for another, in the file of the last shard, or of every one."""
    for each in files(path, table) if every else files(path, table)[-1:]:
        if table != "summary":
            forge.rewrite(each, table, edit)
            continue
        with h5py.File(each, "r+") as file:
            forge.forge(file)
            rows = file["summary"][:]
            edit(rows)
            file["summary"][:] = rows


def a_row(rows: np.ndarray, column: str) -> int:
    """One in the middle that has a number there."""
    numbers = np.flatnonzero(~np.isnan(rows[column].astype(float)))
    return int(numbers[len(numbers) // 2])


def little(column: str, value: Any) -> Any:
    """The least that makes it another."""
    if column in ("gradient_sq", "sum_sq") or (column == "rounded" and value):
        return value * 1.01
    if column in ("averaged", "train", "diverged"):
        return 1 - value
    return np.nextafter(value, np.inf) if isinstance(value, np.floating) else value + 1


def much(value: Any) -> list[Any]:
    return [value + 10**6, -1 - value] if not isinstance(value, np.floating) else [value + 1e6, np.float64(-1.0)]


def of_tables(standing: Standing) -> list[tuple[str, str]]:
    return [
        (claim.where, column)
        for claim in CLAIMS
        for column in claim.names
        if (claim.where in schema.TABLES or claim.where == "summary") and not claim.of and claim.standing is standing
    ]


def named(where: str) -> list[str]:
    return [name for claim in CLAIMS if claim.where == where for name in claim.names]
