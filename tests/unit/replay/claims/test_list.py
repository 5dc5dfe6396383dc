"""The list of claims has everything that a run keeps, and honest runs hold."""

from __future__ import annotations

import itertools

import pytest

from mpisgd.__main__ import main
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event
from mpisgd.replay.checks import trust_table
from mpisgd.replay.checks.trust_table import CLAIMS
from tests.effort import spread
from tests.unit.replay.claims.conftest import RUNS, Runs
from tests.unit.replay.claims.hands import REPOSITORY, named, refused


def test_the_list_has_everything(runs: Runs) -> None:
    for table, dtype in {**schema.TABLES, "summary": schema.SUMMARY}.items():
        assert set(named(table)) == set(dtype.names or ()), table
        assert table == "events" or len(named(table)) == len(dtype), "each once"
    assert sorted(named("DONE")) == sorted([*schema.DONE_ENTRIES, *schema.SUMMED, "files"])
    assert sorted(kind for claim in CLAIMS for kind in claim.of) == sorted(event.name for event in Event)
    written = {name for run in ("all", "layers", "teams", "groups", "slices") for name in Run(runs(run, real=True)).environment}
    assert set(named("[environment]")) == written | {"attempts"}


def test_the_documentation_has_the_table() -> None:
    text = (REPOSITORY / "docs" / "explanation" / "log-is-a-proof.md").read_text()
    rows = [f"| {where} | {' | '.join(', '.join(names) for names in columns)} |" for where, *columns in trust_table.table()]
    assert "\n".join(["| | proved | checked | on trust |", "|---|---|---|---|", *rows]) in text


@pytest.mark.parametrize(("name", "real"), spread(itertools.product(RUNS, [True, False]), 5, unpack=True))
def test_an_honest_run_holds(name: str, real: bool, runs: Runs) -> None:
    assert refused(runs(name, real=real)) == ""


def test_what_is_printed_is_the_list(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(runs("all", real=True))]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    for where, *columns in trust_table.table():
        assert {where, *(name for names in columns for name in names)} <= set(words)
    assert main(["replay", str(runs("all", real=False)), "--evaluations", "last"]) == 0
    told = capsys.readouterr().out
    assert "simulated again: the whole virtual job" in told
    assert "loss of the others, error of the others" in told
    assert trust_table.table(simulated=True)[1][2:] == ([], [])
