"""Columns of the log: units and meanings in every file, those of metrics, and tables of attempts that differ."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from mpisgd.records import directory
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.writer import TableFile
from tests.unit.fabricate import run_of


def test_evaluations_may_have_columns_of_metrics_and_other_tables_may_not() -> None:
    """And attempts with other metrics make one table: what one lacks is NaN there."""
    one, other = (np.zeros(2, schema.wider("evaluations", names)) for names in (("accuracy",), ("accuracy", "bleu")))
    one["accuracy"], other["bleu"] = 0.5, 3.0
    assert schema.fits("evaluations", one.dtype)
    assert schema.fits("evaluations", schema.EVALUATIONS)
    assert not schema.fits("evaluations", np.dtype([*schema.EVALUATIONS.descr, ("n", np.int64)]))
    assert not schema.fits("evaluations", np.dtype([("n", np.float64), *schema.EVALUATIONS.descr]))
    assert not schema.fits("updates", np.dtype([*schema.UPDATES.descr, ("n", np.float64)]))
    rows = schema.joined("evaluations", [np.empty(0, schema.EVALUATIONS), one, other])
    assert schema.extra("evaluations", rows.dtype) == ("accuracy", "bleu")
    assert rows["accuracy"].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert np.isnan(rows["bleu"][:2]).all()
    assert rows["bleu"][2:].tolist() == [3.0, 3.0]
    assert schema.joined("evaluations", [np.empty(0, schema.EVALUATIONS)]).dtype == schema.EVALUATIONS


def described(data: h5py.Dataset) -> dict[str, tuple[str, str]]:
    """Unit and meaning of each column, as a user reads them."""
    texts = ([text.decode() for text in data.attrs[name]] for name in ("units", "meanings"))
    return dict(zip(data.dtype.names, zip(*texts, strict=True), strict=True))


def test_each_column_says_its_unit_and_meaning_in_every_file(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    bleu = schema.TABLES | {"evaluations": schema.wider("evaluations", ["bleu"])}
    evaluator, coordinator = tmp_path / "evaluator.h5", tmp_path / "coordinator.h5"
    TableFile(evaluator, shard=-1, flush_rows=1, flush_s=1e9, tables=bleu).close()
    TableFile(coordinator, shard=-1, flush_rows=1, flush_s=1e9, tables=schema.COORDINATOR).close()
    directory.join(Run(tmp_path / "run"))
    for path in (*(tmp_path / "run").glob("*.h5"), evaluator, coordinator):
        with h5py.File(path) as file:
            tables = [name for name in schema.ABOUT if name in file]
            assert set(schema.COORDINATOR if path == coordinator else schema.TABLES) <= set(tables), path
            for table in tables:
                columns = described(file[table])
                assert all(meaning for _, meaning in columns.values()), (path, table)
                assert all((unit == "s") == name.endswith("_s") for name, (unit, _) in columns.items()), (path, table)
            if path != coordinator:
                assert described(file["pushes"])["staleness"] == ("updates", "clock - timestamp")
    with h5py.File(evaluator) as file:
        assert described(file["evaluations"])["bleu"] == ("", "metric of an own step")


def test_meanings_are_ascii() -> None:
    """HDF5's texts of a fixed length, which everything reads."""
    assert list(schema.COLUMNS) == [*schema.TABLES, *schema.COORDINATOR, "summary"] == list(schema.ABOUT)
    for columns in schema.COLUMNS.values():
        assert all((each.unit + each.meaning).isascii() and each.meaning for each in columns)


def test_pushes_of_groups_and_others_are_joined() -> None:
    """A run of groups that an earlier mpisgd has begun has rows without `neighbour_s`."""
    one, other = np.zeros(2, schema.PUSHES), np.ones(1, schema.wider("pushes", ["neighbour_s"]))
    assert schema.fits("pushes", one.dtype) and schema.fits("pushes", other.dtype)
    rows = schema.joined("pushes", [one, other])
    assert rows.dtype == schema.wider("pushes", ["neighbour_s"])
    assert np.isnan(rows["neighbour_s"]).tolist() == [True, True, False] and rows["seq"].tolist() == [0, 0, 1]
    assert schema.joined("pushes", [one, one]).dtype == schema.joined("pushes", []).dtype == schema.PUSHES
    assert schema.joined("pushes", [one, other[:0]]).dtype == rows.dtype, "the newest attempt has no row yet"
    foreign = np.dtype([("n", np.float64), *other.dtype.descr])
    assert schema.common("pushes", [one.dtype, foreign, other.dtype]) == rows.dtype
