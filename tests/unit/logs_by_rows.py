"""Logs of rows that mean nothing, of which every byte matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.writer import TableFile


def random_rows(table: str, count: int, seed: int = 0) -> np.ndarray:
    """Rows of which every byte matters; floats are finite, so that they compare equal."""
    random = np.random.default_rng(seed)
    rows = np.zeros(count, schema.TABLES[table])
    for name in schema.TABLES[table].names or ():
        whole = rows.dtype[name].kind != "f"
        rows[name] = random.integers(0, 100, count) if whole else random.normal(size=count)
    return rows


def table_file(path: Path | None, *, flush_rows: int = 1000, flush_s: float = 1e9, shard: int = 0) -> TableFile:
    return TableFile(path, shard=shard, flush_rows=flush_rows, flush_s=flush_s)


def run_of(path: Path, shards: int = 3) -> dict[str, list[np.ndarray]]:
    """A directory as a run leaves it, but for log.h5; returns its tables, file by file."""
    directory.claim(path, overwrite=False)
    directory.write_config(path, f"shards = {shards}\n[environment]\nlearners = 2\n")
    tables: dict[str, list[np.ndarray]] = {table: [] for table in schema.TABLES}
    for place, name in enumerate([*map(schema.shard_file, range(shards)), schema.evaluator_file()]):
        last = place == shards
        file = table_file(path / name, shard=-1 if last else place)
        for table in schema.TABLES:
            count = ((table == "evaluations") is last and (3 + place) * 10) or 0
            rows = random_rows(table, count, seed=place)
            rows[(rows.dtype.names or ("shard",))[0]] = place
            for row in rows:
                file.append(table, tuple(row.tolist()))
            tables[table].append(rows)
        file.close(None if last else (place, 30, 120, 30, 30, 0))
    return tables
