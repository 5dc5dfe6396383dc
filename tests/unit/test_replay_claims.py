"""What `replay` says it proves, checks, and takes on trust, held to its word: each value is changed, with checksums made anew.

A value that is proved cannot be another by the least bit (norms by 1 %); one that is checked cannot be another by much; one on
trust can. Real runs are played by virtual ones that say they are real: their seconds are those of a job, and nothing simulates
them again.
"""

from __future__ import annotations

import math
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tomli_w
import torch
from torch import nn

from mpisgd import replay
from mpisgd.__main__ import main
from mpisgd.base.errors import ConfigError, DataError
from mpisgd.job.parts import Brought
from mpisgd.records.log import schema, sums
from mpisgd.records.log.reader import Run
from mpisgd.records.log.schema import Event, Verdict
from mpisgd.replay import claims
from mpisgd.replay.claims import CLAIMS, Claim, Standing
from tests.forge import forge
from tests.unit.test_replay import Sometimes, believed, simulated

REPOSITORY = Path(__file__).parents[2]
LEARNERS = 4
SOFTSYNC = {"name": "softsync", "n": 2}
LATE = {"delay": "exponential", "delay_mean_s": 0.05, "slowdown": {"1": 1.5}}
EVALUATED = {"every_epochs": 0.03, "train": True}
#: What each run is for: the events and entries that no other has.
RUNS: dict[str, dict[str, Any]] = {
    "all": {"protocol": SOFTSYNC, "shards": 2, "averaging": 0.9, "straggler": LATE,
            "evaluation": {**EVALUATED, "best": "error"}, "evaluator": True},
    "bfloat16": {"protocol": SOFTSYNC, "push_format": "bfloat16", "pull_format": "bfloat16"},
    "topk": {"protocol": SOFTSYNC, "push_format": "topk", "topk_share": 0.2},
    "norms": {"protocol": SOFTSYNC, "model": {"name": "mlp", "hidden": [12], "batch_norm": True}, "evaluation": EVALUATED},
    "nonfinite": {"protocol": SOFTSYNC, "nonfinite": "continue", "alpha0": 1e30},
    "leaving": {"protocol": SOFTSYNC, "failures": {"at_s": {"1": 0.25}}},
    "timeout": {"protocol": {"name": "timeout", "N_min": 2, "timeout_s": 0.09}},
    "giving-up": {"protocol": {"name": "backup", "b": 2, "abort": True}, "straggler": LATE},
    "layers": {"protocol": SOFTSYNC, "shards": 2, "exchange": "layerwise", "straggler": LATE},
    "teams": {
        "protocol": "hardsync", "aggregation": "node", "team_size": 2, "virtual": {"learners": LEARNERS, "ranks_per_node": 9},
        "straggler": LATE,
    },
    "groups": {"protocol": SOFTSYNC, "group_size": 2, "shards": 2, "micro_batches": 2, "mu": 4, "straggler": LATE},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run twice: as it is, and, in a folder `real`, as if it had been one of real ranks."""
    directory = tmp_path_factory.mktemp("claims")
    for name, special in RUNS.items():
        simulated(directory / name, learners=LEARNERS, **special)
        shutil.copytree(directory / name, directory / "real" / name)
        environment(directory / "real" / name, virtual=False, cores_per_node=[2])
    return directory


@pytest.fixture
def run_of(runs: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run, to be tampered with."""

    def copy(name: str, *, real: bool) -> Path:
        path = tmp_path / "copy"
        shutil.rmtree(path, ignore_errors=True)
        return shutil.copytree(runs / ("real" if real else "") / name, path)

    return copy


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
        return replay.replay(path, at_first=True, **options).reason
    except (DataError, ConfigError) as error:
        return str(error)


def files(path: Path, table: str) -> list[Path]:
    return [path / schema.evaluator_file()] if table == "evaluations" else sorted(path.glob("shard-*.h5"))


def change(path: Path, table: str, edit: Callable[[np.ndarray], Any], every: bool = False) -> None:
    """Edit a table, in place or for another, in the file of the last shard, or of every one."""
    for each in files(path, table) if every else files(path, table)[-1:]:
        with h5py.File(each, "r+") as file:
            forge(file)
            if table == "summary":
                rows = file["summary"][:]
                edit(rows)
                file["summary"][:] = rows
                continue
            at = list(schema.TABLES).index(table)
            rows = file[table][: file["committed"][at]]
            changed = edit(rows)
            rows = rows if changed is None else changed
            file[table].resize(len(rows), axis=0)
            file[table][:] = rows
            file["committed"][at] = len(rows)


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


def of_tables(standing: Standing) -> list[Any]:
    return [
        pytest.param(claim.where, column, id=f"{claim.where}.{column}")
        for claim in CLAIMS
        for column in claim.names
        if (claim.where in schema.TABLES or claim.where == "summary") and not claim.of and claim.standing is standing
    ]


# ------------------------------------------------------------------------------------------------------------ the list itself


def named(where: str) -> list[str]:
    return [name for claim in CLAIMS if claim.where == where for name in claim.names]


def test_the_list_has_everything(runs: Path) -> None:
    for table, dtype in {**schema.TABLES, "summary": schema.SUMMARY}.items():
        assert set(named(table)) == set(dtype.names or ()), table
        assert table == "events" or len(named(table)) == len(dtype), "each once"
    assert sorted(named("DONE")) == sorted([*schema.DONE_ENTRIES, "weights", "best"])
    assert sorted(kind for claim in CLAIMS for kind in claim.of) == sorted(event.name for event in Event)
    written = {
        name for path in (*runs.glob("*/config.toml"), *runs.glob("real/*/config.toml")) for name in Run(path.parent).environment
    }
    assert set(named("[environment]")) == written | {"attempts"}


def test_the_documentation_has_the_table() -> None:
    text = (REPOSITORY / "docs" / "explanation" / "log-is-a-proof.md").read_text()
    rows = [f"| {where} | {' | '.join(', '.join(names) for names in columns)} |" for where, *columns in claims.table()]
    assert "\n".join(["| | proved | checked | on trust |", "|---|---|---|---|", *rows]) in text


def test_honest_runs_hold(runs: Path) -> None:
    for path in (*runs.iterdir(), *(runs / "real").iterdir()):
        if path.name != "real":
            assert refused(path) == "", path


def test_what_is_printed_is_the_list(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(runs / "real" / "all")]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    for where, *columns in claims.table():
        assert {where, *(name for names in columns for name in names)} <= set(words)
    assert main(["replay", str(runs / "all"), "--evaluations", "last"]) == 0
    told = capsys.readouterr().out
    assert "simulated again: the whole virtual job" in told
    assert "loss of the others, error of the others" in told
    assert claims.table(simulated=True)[1][2:] == ([], [])


# ------------------------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(("table", "column"), of_tables(Standing.PROVED))
def test_what_is_proved(table: str, column: str, run_of: Callable[..., Path]) -> None:
    for name in ("bfloat16", "all") if column == "rounded" else ("all",):
        path = run_of(name, real=True)

        def edit(rows: np.ndarray) -> None:
            row = 0 if table == "summary" else a_row(rows, column)
            rows[column][row] = little(column, rows[column][row])

        change(path, table, edit)
        assert refused(path), name


@pytest.mark.parametrize(("table", "column"), of_tables(Standing.CHECKED))
def test_what_is_checked(table: str, column: str, run_of: Callable[..., Path]) -> None:
    for which in range(2):
        path = run_of("all", real=True)

        def edit(rows: np.ndarray, which: int = which) -> None:
            row = 0 if table == "summary" else a_row(rows, column)
            rows[column][row] = much(rows[column][row])[which]

        change(path, table, edit)
        assert refused(path)


def test_waiting_for_neighbours_is_checked(run_of: Callable[..., Path]) -> None:
    """A column that only runs of groups have."""
    column = "neighbour_s"
    assert claims.SOME[column].standing is Standing.CHECKED
    assert column in claims.table(columns=(column,))[0][2] and column not in claims.table()[0][2]
    for which in range(2):
        path = run_of("groups", real=True)

        def much_more(rows: np.ndarray, which: int = which) -> None:
            rows[column][a_row(rows, column)] = much(rows[column][0])[which]

        change(path, "pushes", much_more)
        assert refused(path)
    path = run_of("groups", real=False)

    def a_little(rows: np.ndarray) -> None:
        rows[column][a_row(rows, column)] = little(column, rows[column][a_row(rows, column)])

    change(path, "pushes", a_little)
    assert f"{column} " in refused(path)


@pytest.mark.parametrize(("table", "column"), of_tables(Standing.TRUST))
def test_what_is_on_trust(table: str, column: str, run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=True)

    def edit(rows: np.ndarray) -> None:
        rows[column][a_row(rows, column)] += 1.0

    change(path, table, edit)
    assert refused(path) == ""


@pytest.mark.parametrize(("table", "column"), [each for standing in Standing for each in of_tables(standing)])
def test_of_a_virtual_run_all_is_proved(table: str, column: str, run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=False)

    def edit(rows: np.ndarray) -> None:
        row = 0 if table == "summary" else a_row(rows, column)
        rows[column][row] = little(column, rows[column][row])

    change(path, table, edit)
    assert refused(path)


# ------------------------------------------------------------------------------------------------------------------ events

WHERE = {
    "NONFINITE": "nonfinite", "DEPARTED": "leaving", "TIMEOUT": "timeout", "GAVE_UP": "giving-up",
    "STARTED": "all", "STOPPED": "all", "SNAPSHOT": "all", "GOODBYE": "all",
}  # fmt: skip
"""Those that virtual runs have; of the others (of lost learners, of continued runs) tests of real ranks have honest ones."""


def of_events(*standings: Standing) -> list[Any]:
    found = [(kind, column) for claim in CLAIMS if claim.standing in standings for kind in claim.of for column in claim.names]
    return [pytest.param(kind, column, id=f"{kind}.{column}") for kind, column in found if kind in WHERE]


@pytest.mark.parametrize(("kind", "column"), of_events(Standing.PROVED, Standing.CHECKED))
def test_events(kind: str, column: str, run_of: Callable[..., Path]) -> None:
    path = run_of(WHERE[kind], real=True)

    def edit(events: np.ndarray) -> None:
        row = np.flatnonzero(events["kind"] == Event[kind])[-1]
        old = events[column][row]
        other = {"kind": Event.STOPPED if kind != "STOPPED" else Event.SNAPSHOT, "learner_id": old + 1, "value": 1e6}
        if column == "value" and kind == "NONFINITE":
            other["value"] = 0.5
        events[column][row] = other[column]

    change(path, "events", edit)
    assert refused(path)


def test_an_event_that_is_missing(run_of: Callable[..., Path]) -> None:
    for kind, name in WHERE.items():
        path = run_of(name, real=True)
        change(path, "events", lambda rows, kind=kind: np.delete(rows, np.flatnonzero(rows["kind"] == Event[kind])[-1]))
        if kind != "GAVE_UP":  # of which, without delays that it shifts, nobody else tells
            assert refused(path), kind


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.of and claim.standing is Standing.TRUST])
def test_events_on_trust(claim: Claim, run_of: Callable[..., Path]) -> None:
    """They may be there, or not."""
    for kind in claim.of:
        path = run_of("leaving", real=True)

        def add(events: np.ndarray, kind: str = kind) -> np.ndarray:
            more = events[-1:].copy()
            valued = kind not in ("SKIPPED", "STUCK")
            more["kind"], more["learner_id"], more["value"] = Event[kind], 0 if kind == "STUCK" else -1, 1.0 if valued else math.nan
            return np.concatenate([events, more])

        change(path, "events", add)
        assert refused(path) == "", kind


# -------------------------------------------------------------------------------------------- DONE, [environment], weights


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case list():
            return [*value, value[-1]] if value else [1]
        case dict():
            return {**value, "mpisgd": "9.9"}
        case str():
            return f"{value} "
    return value + 1


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("name", [*schema.DONE_ENTRIES, "weights", "best"])
def test_done(name: str, real: bool, run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=real)
    done = dict(Run(path).done or {})
    done[name] = other(done[name])
    (path / "DONE").write_text(sums.sealed_json(done))
    assert f"{name} " in refused(path) or name in ("books_balanced", "weights", "best")
    assert "DONE is damaged" not in refused(path) != ""


@pytest.mark.parametrize("name", [name for name in named("[environment]") if name not in ("attempts", "hosts")])
def test_the_environment(name: str, run_of: Callable[..., Path]) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.where == "[environment]" and name in claim.names)
    path = run_of({"teams": "teams", "layers": "layers", "groups": "groups", "stages": "groups"}.get(name, "all"), real=True)
    environment(path, **{name: other(Run(path).environment[name])})
    assert bool(refused(path)) == (claim.standing is not Standing.TRUST)


@pytest.mark.parametrize("real", [True, False])
def test_hosts(real: bool, run_of: Callable[..., Path]) -> None:
    """Their names are on trust, in a real run; their number is not."""
    path = run_of("all", real=real)
    hosts = Run(path).environment["hosts"]
    environment(path, hosts=[f"{host}-x" for host in hosts])
    assert bool(refused(path)) == (not real)
    environment(path, hosts=hosts[:-1])
    assert refused(path)


def test_attempts(run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=True)
    told = {"attempt": 0, "learners": LEARNERS, "shards": 2}
    environment(path, attempts=[told])
    assert refused(path) == ""
    for name in ("learners", "shards"):
        environment(path, attempts=[{**told, name: told[name] + 1}])
        assert refused(path)


def test_buffers(run_of: Callable[..., Path]) -> None:
    path = run_of("norms", real=True)
    states = torch.load(path / "weights.pt", weights_only=True)
    (name,) = (name for name in states["theta"] if name.endswith("running_mean"))
    states["theta"][name][3] += 1e-3
    torch.save(states, path / "weights.pt")
    believed(path)
    assert refused(path).endswith(f"theta: the buffer {name} is not that of these weights")


# --------------------------------------------------------------------------------------------------- what was accepted before


@pytest.mark.parametrize("real", [True, False])
def test_an_error_of_one_per_cent(real: bool, run_of: Callable[..., Path]) -> None:
    """Of the last evaluation, or of one in between; where these are left out, it is said."""
    for row in (-1, 5):
        path = run_of("all", real=real)

        def edit(rows: np.ndarray, row: int = row) -> None:
            assert rows["error"][row] > 0.05
            rows["error"][row] = 0.01

        change(path, "evaluations", edit)
        assert "evaluated again 0." in refused(path)
        assert bool(refused(path, evaluations="last")) == (row == -1)
        proof = replay.replay(path, evaluations="none")
        assert proof.holds
        assert "loss" in dict((where, trust) for where, _, _, trust in proof.claims)["evaluations"]


def test_evaluations_that_are_missing_or_too_many(run_of: Callable[..., Path]) -> None:
    for edit in (lambda rows: rows[:-1], lambda rows: rows[4:], lambda rows: np.concatenate([rows, rows[-1:]])):
        path = run_of("all", real=True)
        change(path, "evaluations", edit)
        assert "evaluations, row" in refused(path)


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_late_rows_deleted_with_their_counts(says_goodbye: bool, run_of: Callable[..., Path]) -> None:
    """By what learners say that they pushed; and, in the log of an earlier mpisgd, by the weights that they were given."""
    path = run_of("all", real=True)
    deleted: dict[int, int] = {}

    def delete(rows: np.ndarray) -> np.ndarray:
        late = rows["verdict"] == Verdict.LATE
        deleted[int(rows["shard"][0])] = int(late.sum())
        return rows[~late]

    def count(rows: np.ndarray) -> None:
        for name in ("received", "pushed"):
            rows[name] -= deleted[int(rows["shard"][0])]

    change(path, "pushes", delete, every=True)
    change(path, "summary", count, every=True)
    assert min(deleted.values()) > 0
    if not says_goodbye:
        change(path, "events", lambda rows: rows[rows["kind"] != Event.GOODBYE], every=True)
    assert ("was given weights after it" if not says_goodbye else "it says that it pushed") in refused(path)


def halve(path: Path) -> None:
    """All seconds, wherever they are."""
    for table, dtype in schema.TABLES.items():
        seconds = [name for name in dtype.names or () if name.endswith("_s")]

        def edit(rows: np.ndarray, seconds: list[str] = seconds) -> None:
            for name in seconds:
                rows[name] /= 2

        change(path, table, edit, every=True)
    done = dict(Run(path).done or {})
    (path / "DONE").write_text(sums.sealed_json({**done, "seconds": done["seconds"] / 2}))


def test_all_seconds_halved(run_of: Callable[..., Path]) -> None:
    """By the delays, which were drawn; by the simulation; else it is as the table says."""
    path = run_of("all", real=True)
    halve(path)
    assert "s were put in" in refused(path)
    path = run_of("bfloat16", real=False)
    halve(path)
    assert "simulated again" in refused(path)
    path = run_of("bfloat16", real=True)
    halve(path)
    assert refused(path) == ""


def test_what_was_rounded_off(run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=True)
    change(path, "pushes", lambda rows: rows["rounded"].__setitem__(slice(None), 0.25), every=True)
    assert "gradients were pushed as float32" in refused(path)
    path = run_of("bfloat16", real=True)
    change(path, "pushes", lambda rows: rows["rounded"].__setitem__(slice(None), 0.25), every=True)
    assert "rounded 0.25, recomputed 0.00" in refused(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"network": {"bandwidth": 6e9}},
        {"network": {"latency_s": 3e-6}},
        {"service": {"update_s": 1e-3}},
        {"compute": {"mean_s": 0.11}},
        {"straggler": {"slowdown": {"1": 1.6}}},
        {"virtual": {"ranks_per_node": 2}},
        {"failures": {"at_s": {"1": 0.3}}},
    ],
)
def test_the_costs_of_a_virtual_run(changes: dict[str, Any], run_of: Callable[..., Path]) -> None:
    path = run_of("all", real=False)
    configuration(path, **changes)
    assert refused(path)


# ------------------------------------------------------------------------------------------------- what cannot be done again


def test_a_model_with_buffers_of_its_own(tmp_path: Path) -> None:
    """All virtual learners share one model: only the simulation, which does so too, can evaluate it again."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.calls += 1
            output: torch.Tensor = self.layers(inputs) * (1 + 0.01 * self.calls)
            return output if not self.training else self.layers(inputs)

    brought = Brought(model=Counting)
    path = simulated(tmp_path / "run", brought, protocol=SOFTSYNC, evaluation=EVALUATED)
    assert replay.check(path, brought) == ""
    change_all = lambda rows: rows["loss"].__setitem__(-1, 0.1)  # noqa: E731
    change(path, "evaluations", change_all)
    assert "loss 0.1, simulated again" in replay.check(path, brought)


def test_costs_that_are_not_here_any_more(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "bfloat16", tmp_path / "measured")
    path = simulated(tmp_path / "run", protocol=SOFTSYNC, compute={"name": "empirical", "run": str(tmp_path / "measured")})
    assert replay.replay(path).simulated
    shutil.rmtree(tmp_path / "measured")
    proof = replay.replay(path)
    assert proof.holds
    assert not proof.simulated
    assert any("which is not here" in line for line in proof.lines())
    assert proof.claims[0][2], "seconds are only checked, then"


def test_gradients_that_are_not_finite(tmp_path: Path) -> None:
    brought = Brought(model=Sometimes)
    path = simulated(tmp_path / "run", brought, protocol=SOFTSYNC, nonfinite="drop", shards=2)
    assert (Run(path).events["kind"] == Event.NONFINITE).any()
    assert replay.check(path, brought) == ""
    environment(path, virtual=False)
    assert replay.check(path, brought) == ""
    change(path, "events", lambda rows: rows[rows["kind"] != Event.NONFINITE])
    assert "NONFINITE: 0 times, recomputed" in replay.check(path, brought)
