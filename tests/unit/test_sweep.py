"""Sweeps: what a file's [sweep] means, what is refused before anything begins, and what became of each run."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from mpisgd.__main__ import main
from mpisgd.base.errors import ConfigError
from mpisgd.cli import run, simulate, submit
from mpisgd.launching import under_way
from mpisgd.liveness.guard import SIZE_VARIABLES
from mpisgd.protocols import BackupOptions, SoftsyncOptions
from mpisgd.records.lock import Lock
from mpisgd.sweep import elements, outcomes
from tests.unit.fabricate import Log, write_run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write(text: str) -> Path:
    Path("sweep.toml").write_text(text)
    return Path("sweep.toml")


def names(text: str) -> list[str]:
    return [each.name for each in elements.read(write(text)).elements]


# ---------------------------------------------------------------------------------------------------------- the file


def test_a_grid_is_every_combination() -> None:
    text = 'epochs = 2\n[sweep]\nseed = [0, 1]\nprotocol = ["hardsync", {name = "softsync", n = 4}]\nalpha0 = [0.1, 1e-3]\n'
    assert names(text) == [
        "hardsync,alpha0=0.1,seed=0",
        "hardsync,alpha0=0.001,seed=0",
        "softsync,n=4,alpha0=0.1,seed=0",
        "softsync,n=4,alpha0=0.001,seed=0",
        "hardsync,alpha0=0.1,seed=1",
        "hardsync,alpha0=0.001,seed=1",
        "softsync,n=4,alpha0=0.1,seed=1",
        "softsync,n=4,alpha0=0.001,seed=1",
    ]
    last = elements.read(Path("sweep.toml")).elements[-1].config
    assert (last.epochs, last.alpha0, last.seed, last.protocol) == (2, 0.001, 1, SoftsyncOptions(n=4))


def test_a_list_is_its_tables_with_or_without_names() -> None:
    text = '[protocol]\nname = "backup"\nb = 2\n[[sweep]]\nprotocol.b = 1\n[[sweep]]\nname = "slow"\nmu = 4\n'
    text += "checkpoint.every_updates = 7\n"
    first, second = elements.read(write(text)).elements
    assert (first.name, second.name) == ("protocol.b=1", "slow")
    assert (first.config.protocol, second.config.protocol) == (BackupOptions(b=1), BackupOptions(b=2))
    assert (second.config.mu, second.config.checkpoint.every_updates) == (4, 7)


def test_a_kind_that_the_file_has_already_keeps_its_options() -> None:
    text = '[protocol]\nname = "backup"\nb = 2\n[sweep]\nprotocol = ["backup", "hardsync"]\n'
    assert elements.read(write(text)).elements[0].config.protocol == BackupOptions(b=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sweep = 3", r"expected a table \[sweep\] of lists"),
        ("[sweep]", r"expected a table \[sweep\] of lists"),
        ("[sweep]\nmu = 4", r"sweep.mu = 4: expected a list of values, e.g. mu = \[4\]"),
        ("[sweep]\nmu = []", r"sweep.mu = \[\]: expected a list"),
        ("[sweep]\nseed = [1, 1]", "runs 1 and 2 are both 'seed=1': a value stands twice"),
        ('[[sweep]]\nloss = "a b"\n[[sweep]]\nloss = "a/b"', "runs 1 and 2 are both 'loss=a_b': give them names"),
        ('[[sweep]]\nname = "../x"', r"run 1: name = '\.\./x': expected letters, digits"),
        ('[[sweep]]\nname = "a.out"', "name = 'a.out': expected"),
        ("[[sweep]]\nname = 3", "name = 3: expected"),
        (f'[sweep]\nloss = ["{"x" * 200}"]', "expected at most 150 letters"),
        ('[sweep]\nout = ["a", "b"]', "out: expected none: each run has a directory of its own"),
        ("mu = 4\n[sweep]\nmu.x = [1]", "sweep.mu.x: mu = 4 is no table"),
        (f"[sweep]\nseed = {list(range(200))}\nmu = {list(range(1, 200))}", "39,800 combinations: expected at most 10,000"),
        ("[sweep\n", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        elements.read(write(text))


def test_every_run_that_cannot_be_is_told_at_once() -> None:
    """A misspelt field, a protocol that does not go with so many learners, two things that do not go together."""
    write('[sweep]\nprotocol = ["hardsync", {name = "softsync", n = 9}]\nalpha = [1]\n')
    with pytest.raises(ConfigError, match=r"(?s)2 of 2 runs .*hardsync,alpha=1: .*the learning rate is alpha0"):
        submit.main(["sweep.toml", "--learners", "4", "--dry-run"])
    write('[sweep]\nprotocol = ["hardsync", {name = "softsync", n = 9}, "async"]\ncompensation = [0.0, 1.0]\n')
    with pytest.raises(ConfigError, match="cannot be") as refused:
        submit.main(["sweep.toml", "--learners", "4", "--dry-run"])
    first, *lines = str(refused.value).splitlines()
    assert first == "3 of 6 runs of the sweep cannot be:"
    assert [line.partition(": ")[0] for line in lines] == [
        "hardsync,compensation=1.0",
        "softsync,n=9,compensation=0.0",
        "softsync,n=9,compensation=1.0",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep.toml"], "sweep.toml is a sweep of 2 runs: .*--element with mu=4, mu=8"),
        (["sweep.toml", "--element", "mu=5"], "--element 'mu=5': the sweep has none; did you mean 'mu=8'"),
        (["job.toml", "--element", "mu=4"], "job.toml is no sweep"),
        (["--element", "mu=4"], "expected the file of a sweep before it"),
    ],
)
def test_train_takes_one_of_them_by_its_name(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("[sweep]\nmu = [4, 8]\n")
    Path("job.toml").write_text("mu = 2\n")
    assert main(["train", *words, "--print-config"]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert main(["train", "sweep.toml", "--element", "mu=8", "--print-config"]) == 0
    assert "\nmu = 8\n" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- a batch job


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert submit.main(["sweep.toml", "--learners", "4", "--nodes", "1", *words, "--dry-run"]) == 0
    return capsys.readouterr().out.splitlines()


def test_an_array_has_the_shards_of_each_and_the_learners_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    write('[sweep]\nprotocol = ["hardsync", "allreduce"]\n')
    lines = printed(capsys, "--shards", "2")
    assert {'  "hardsync 2"', '  "allreduce 0"', "#SBATCH --array=1-2", "#SBATCH --ntasks=6"} <= set(lines)
    write("[sweep]\nshards = [1, 3]\n")
    assert {'  "shards=1 1"', '  "shards=3 3"', "#SBATCH --ntasks=7"} <= set(printed(capsys))


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("mu = [1]", ["--array", "hardsync"], r"array = \('hardsync',\): expected none beside a sweep"),
        ("evaluator = [true, false]", [], r"evaluator = \[0, 1\]: expected the same for all runs"),
        ("mu = [1, 2]", ["--system", "pbs", "--chain"], "chain = True: expected false with a sweep and pbs"),
        ("mu = [1, 2]", ["--template", "sweep.toml"], "template = 'sweep.toml': expected none with --array or a sweep"),
        ("mu = [1, 2]", ["--resume", "nowhere"], "nowhere is no directory of a sweep: it has no sweep.toml"),
    ],
)
def test_what_cannot_be_queued(text: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(f"[sweep]\n{text}\n")
    with pytest.raises(ConfigError, match=said):
        printed(capsys, *words)


def test_only_what_is_not_done_is_queued_again(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes.begin(write("[sweep]\nmu = [1, 2, 3]\n"), Path("results/s"))
    finished("mu=1")
    lines = printed(capsys, "--resume", "results/s", "--system", "pbs")
    assert {'  "mu=2 1"', '  "mu=3 1"', "#PBS -J 1-2"} <= set(lines)
    assert '  "mu=1 1"' not in lines
    finished("mu=2")
    lines = printed(capsys, "--resume", "results/s", "--system", "pbs")
    assert not any(line.startswith("#PBS -J") for line in lines), "PBS has no arrays of one"
    finished("mu=3")
    with pytest.raises(ConfigError, match="expected a sweep with runs to go on with: all are done"):
        printed(capsys, "--resume", "results/s")
    write("[sweep]\nmu = [1, 2]\n")
    with pytest.raises(ConfigError, match=r"sweep\.toml is not the sweep that was begun there"):
        printed(capsys, "--resume", "results/s")
    Path("sweep.toml").write_text("mu = 1\n")
    with pytest.raises(ConfigError, match=r"resume = 'results/s': expected the file of a sweep beside it"):
        printed(capsys, "--resume", "results/s")


# --------------------------------------------------------------------------------------------------- what became of them

CONFIG = "shards = 1\n[environment]\nlearners = 2\n"


def finished(name: str) -> None:
    run = Path("results/s") / name
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text(CONFIG)
    whole = {"clock": 1, "samples": 1, "diverged": False, "seconds": 1.0, "books_balanced": True}
    (run / "DONE").write_text(json.dumps(whole))


def test_each_is_told_by_its_own_marks(capsys: pytest.CaptureFixture[str]) -> None:
    place = Path("results/s")
    outcomes.begin(write("[sweep]\nmu = [1, 2, 3, 4, 5, 6]\n"), place)
    for name in ("mu=1", "mu=2"):
        write_run(place / name, Log(), {"name": "hardsync"}, 2, diverged=name == "mu=2")
    (place / "mu=3").mkdir()
    (place / "mu=3.out").write_text("epoch 1\nDataError: no file x.npz\nmpirun has ended\n")
    (place / "mu=4.out").write_text("command not found\n")
    (place / "mu=5").mkdir()
    held = Lock(place / "mu=5")
    found = {each.name: each for each in outcomes.of(place)[1]}
    assert {name: each.state for name, each in found.items()} == {
        "mu=1": "done",
        "mu=2": "diverged",
        "mu=3": "failed",
        "mu=4": "failed",
        "mu=5": "under way",
        "mu=6": "not begun",
    }
    assert found["mu=3"].reason == "DataError: no file x.npz"
    assert found["mu=4"].reason == "command not found"
    assert outcomes.left(Path("sweep.toml"), place)[0] == ["mu=3", "mu=4", "mu=6"]
    assert main(["compare", "--sweep", "results/s"]) == 1
    out = capsys.readouterr().out
    assert "2 of 6 runs of the sweep are done" in out
    assert "  mu=3: failed: DataError: no file x.npz\n  mu=4: failed: command not found\n  mu=5: under way: " in out
    assert (place / "compare" / "sweep.csv").read_text().splitlines()[3] == "mu=3,3,failed,,DataError: no file x.npz"
    held.release()
    assert outcomes.outcome(place, "mu=5").reason == "killed: there is no DONE, and nobody works on it"


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nowhere"], "no directory of a sweep"), (["results/s", "results/a"], "expected one or the other")],
)
def test_compare_refuses_what_is_no_sweep(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main_compare(words)


def main_compare(words: list[str]) -> None:
    from mpisgd.cli.reading import compare

    compare.main([*words[1:], "--sweep", words[0]])


# ------------------------------------------------------------------------------------------------- one after the other

VIRTUAL = """\
epochs = 0.05
out = "results/s"
model = "softmax"
virtual.learners = 3
[sweep]
protocol = ["hardsync", {name = "softsync", n = 3}]
seed = [0, 1]
"""


@pytest.mark.usefixtures("nothing_drawn")
def test_a_sweep_of_virtual_runs_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    write(VIRTUAL)
    assert main(["simulate", "sweep.toml"]) == 0
    assert main(["compare", "--sweep", "results/s"]) == 0
    assert "4 of 4 runs of the sweep are done" in capsys.readouterr().out
    rows = [line.split(",") for line in Path("results/s/compare/seeds.csv").read_text().splitlines()[1:]]
    assert len(rows) == 2
    assert Path("results/s/compare/error_epochs.png").exists()
    with pytest.raises(ConfigError, match="'results/s' exists: choose another, go on with it by --resume"):
        simulate.main(["sweep.toml"])


def test_what_fails_in_virtual_time_leaves_its_reason_and_goes_on_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Data that are not there, of one of two."""
    write(VIRTUAL.partition("[sweep]")[0] + 'data_dir = "nowhere"\n[sweep]\ndata = ["digits", "mnist"]\n')
    assert main(["simulate", "sweep.toml"]) == 1
    found = outcomes.of(Path("results/s"))[1]
    assert [each.state for each in found] == ["done", "failed"]
    assert found[1].reason.startswith("mpisgd simulate: DataError: mnist: ")
    before = {each.name: (Path("results/s") / each.name / "DONE").stat().st_mtime_ns for each in found if each.is_done}
    assert main(["simulate", "sweep.toml", "--resume", "results/s"]) == 1
    after = {name: (Path("results/s") / name / "DONE").stat().st_mtime_ns for name in before}
    assert before == after, "what is done is not done again"
    assert "digits" not in capsys.readouterr().err.rpartition("mpisgd simulate: mnist\n")[2]


#: Makes a run where its plan says so, speaks, and leaves with the status that it says.
STUB = """
import json, sys
from pathlib import Path
words = sys.argv[sys.argv.index("train") + 1:]
with Path("starts").open("a") as starts:
    starts.write(json.dumps(words) + "\\n")
name, run = words[2], Path(words[words.index("--out" if "--out" in words else "--resume") + 1])
status = json.loads(Path("plan").read_text())[name]
run.mkdir(exist_ok=True)
(run / "config.toml").write_text(json.dumps(words))
print(f"RuntimeError: boom of {name}" if status else "fine", flush=True)
if not status:
    (run / "DONE").touch()
sys.exit(status)
"""


def test_real_ranks_begin_one_run_after_the_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And only what has failed again, with --resume."""
    Path("stub.py").write_text(STUB)
    monkeypatch.setattr(under_way, "mpirun", lambda ranks: [sys.executable, "-IS", str(Path("stub.py").resolve())])
    write("[sweep]\nmu = [4, 8, 16]\n")
    Path("plan").write_text(json.dumps({"mu=4": 0, "mu=8": 3, "mu=16": 0}))
    words = ["-n", "3", "sweep.toml", "--epochs", "1", "--out", "results/s"]
    assert run.main(words) == 1
    told = capsys.readouterr()
    assert "2 of 3 runs are done" in told.out
    assert "mu=8: failed: RuntimeError: boom of mu=8" in told.err
    started = [json.loads(line) for line in Path("starts").read_text().splitlines()]
    assert started[1] == ["sweep.toml", "--element", "mu=8", "--epochs", "1", "--out", "results/s/mu=8"]
    Path("plan").write_text(json.dumps({"mu=8": 0}))
    Path("results/s/mu=4/DONE").write_text("{}")
    with pytest.raises(ConfigError, match="'results/s' exists"):
        run.main(words)
    for name in ("mu=4", "mu=16"):
        finished(name)
    assert run.main(["-n", "3", "sweep.toml", "--resume", "results/s", "--epochs", "1"]) == 0
    (again,) = [json.loads(line) for line in Path("starts").read_text().splitlines()][3:]
    assert again == ["sweep.toml", "--element", "mu=8", "--epochs", "1", "--out", "results/s/mu=8", "--overwrite"]


def test_who_is_told_to_stop_begins_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import os, signal, time\nopen('starts', 'a').write('x')\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n"
    Path("stub.py").write_text(text)
    monkeypatch.setattr(under_way, "mpirun", lambda ranks: [sys.executable, "-IS", str(Path("stub.py").resolve())])
    write("[sweep]\nmu = [4, 8]\n")
    assert run.main(["-n", "3", "sweep.toml", "--out", "results/s"]) == 128 + signal.SIGTERM
    assert Path("starts").read_text() == "x"
    assert "the others go on by: mpisgd run -n 3 sweep.toml --resume results/s" in capsys.readouterr().err


def test_a_protocol_that_does_not_fit_so_many_ranks_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "mpirun", lambda ranks: pytest.fail("a rank was started"))
    write('[sweep]\nprotocol = ["hardsync", {name = "softsync", n = 5}]\n')
    with pytest.raises(ConfigError, match=r"(?s)1 of 2 runs of the sweep cannot be:.*softsync,n=5: protocol.n = 5"):
        run.main(["-n", "4", "sweep.toml"])
    assert not Path("results").exists()
