"""`mpisgd submit`: the counts for the roles, what is refused and how, and what reaches sbatch and bsub."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from mpisgd.__main__ import main
from mpisgd.base.errors import ConfigError
from mpisgd.cli import submit
from mpisgd.config import Config
from mpisgd.protocols import AllreduceOptions, BackupOptions, SoftsyncOptions
from mpisgd.site.layout import Layout, Wishes, fit
from tests.effort import spread

# -------------------------------------------------------------------------------------------------------------- counts

PLAIN = Config()
CASES = [
    # what, configuration, wishes, (nodes, tasks per node, shards, learners)
    ("all that is left", Config(shards=2), Wishes(nodes=4, tasks_per_node=16), (4, 16, 2, 62)),
    ("an evaluator too", Config(shards=2, evaluator=True), Wishes(nodes=4, tasks_per_node=16), (4, 16, 2, 61)),
    ("nodes that hold them", PLAIN, Wishes(learners=64, tasks_per_node=16), (5, 16, 1, 64)),
    ("evenly", PLAIN, Wishes(learners=16, nodes=2), (2, 9, 1, 16)),
    ("one node", PLAIN, Wishes(learners=3), (1, 4, 1, 3)),
    ("all three", PLAIN, Wishes(learners=16, nodes=2, tasks_per_node=9), (2, 9, 1, 16)),
    ("a GPU for each", Config(shards=2), Wishes(nodes=2, gpus_per_node=4), (2, 5, 2, 8)),
    ("an evaluator beside GPUs", Config(shards=1, evaluator=True), Wishes(nodes=2, gpus_per_node=4), (2, 5, 1, 8)),
    ("nodes for the GPUs", Config(shards=4), Wishes(learners=16, gpus_per_node=4), (4, 5, 4, 16)),
    ("learners are shards", Config(protocol=AllreduceOptions()), Wishes(nodes=2, tasks_per_node=8), (2, 8, 0, 16)),
    ("teams", Config(aggregation="node", shards=2), Wishes(nodes=2, tasks_per_node=9), (2, 9, 2, 16)),
    (
        "a team for each node",
        Config(aggregation="node", protocol=BackupOptions(b=1)),
        Wishes(nodes=3, tasks_per_node=9),
        (3, 9, 1, 26),
    ),
]


@pytest.mark.parametrize(("config", "wishes", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_counts(config: Config, wishes: Wishes, expected: tuple[int, ...]) -> None:
    layout = fit(config, wishes)
    assert (layout.nodes, layout.tasks_per_node, layout.shards, layout.learners) == expected
    assert layout.ranks == layout.shards + layout.learners + config.evaluator
    assert len(set(layout.hosts)) == layout.nodes


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(2, 9, 1, 16, True), "ranks = shards + learners (+ 1 evaluator), here 1 + 16 + 1 = 18"),
        (Layout(1, 4, 1, 3, False), "ranks = shards + learners (+ 1 evaluator), here 1 + 3 = 4"),
        (Layout(1, 4, 0, 4, False), "ranks = learners, also the shards (+ 1 evaluator), here 4"),
    ],
)
def test_the_equation_is_shown_with_its_numbers(layout: Layout, text: str) -> None:
    assert layout.equation == text


REFUSED = [
    ("nothing", PLAIN, {}, "learners = None: expected --learners, --tasks-per-node or --gpus-per-node"),
    ("no nodes", PLAIN, {"nodes": 0, "learners": 1}, "nodes = 0: expected a number >= 1"),
    ("no learner", Config(shards=4), {"nodes": 2, "tasks_per_node": 2}, "tasks_per_node = 2: expected at least 3: 4 shards"),
    (
        "too many",
        PLAIN,
        {"nodes": 2, "tasks_per_node": 4, "learners": 8},
        r"tasks_per_node = 4: expected at least 5: 9 ranks = 1 shards \+ 8 learners \+ 0 evaluators on 2 nodes",
    ),
    ("an empty node", PLAIN, {"nodes": 4, "tasks_per_node": 4, "learners": 8}, "nodes = 4: expected 3: 9 ranks"),
    ("no even deal", PLAIN, {"nodes": 4, "learners": 4}, "nodes = 4: expected 3: 5 ranks .* 2 on a node, need no more"),
    ("learners on no GPU", Config(device="cuda"), {"learners": 4}, "device = 'cuda': expected 'cpu' where no --gpus-per-node"),
    ("shards on no GPU", Config(shard_device="cuda"), {"learners": 4}, "shard_device = 'cuda': expected 'cpu' where no --gpus-per"),
    ("five on four GPUs", PLAIN, {"nodes": 2, "gpus_per_node": 4, "learners": 9}, "gpus_per_node = 4: expected at least 5"),
    (
        "shards that lie unevenly",
        Config(shards=2, evaluator=True),
        {"nodes": 2, "gpus_per_node": 4},
        "gpus_per_node = 4: expected at least 5, .* of node 0; .* their number, 3, is a multiple of nodes = 2",
    ),
    ("the protocol", Config(protocol=SoftsyncOptions(n=9)), {"learners": 8}, "protocol.n = 9: expected 1 <= n <= lambda = 8"),
    ("teams are fewer", Config(aggregation="node", protocol=BackupOptions(N=4)), {"nodes": 2, "tasks_per_node": 8}, "N = 4"),
    ("teams of stale ones", Config(aggregation="node", protocol=SoftsyncOptions()), {"learners": 8}, "aggregation = 'node'"),
    ("shards of allreduce", Config(protocol=AllreduceOptions(), shards=3), {"learners": 8}, "shards = 3: allreduce"),
]


@pytest.mark.parametrize(("config", "wishes", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_counts_that_cannot_be_are_refused(config: Config, wishes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fit(config, Wishes(**wishes))


# ------------------------------------------------------------------------------------------------------------- scripts


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('shards = 2\n[protocol]\nname = "softsync"\n')
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert submit.main(["job.toml", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_what_is_said_reaches_the_script(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--nodes 3 --tasks-per-node 7 --threads 2 --time 100:30:00 --partition long --project mine --name a.b --mpi mpich"
    lines = printed(capsys, *words.split(), "--modules", "gcc openmpi", "--venv", "/a b/venv").splitlines()
    assert set(lines) >= {
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks=21",
        "#SBATCH --ntasks-per-node=7",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --time=100:30:00",
        "#SBATCH --partition=long",
        "#SBATCH --account=mine",
        "#SBATCH --job-name=a.b",
        "CONFIG=job.toml",
        "SHARDS=2",
    }
    assert [line.split("  ")[0] for line in lines if line.startswith(("MODULES=", "VENV=", "MPI="))] == [
        'MODULES="gcc openmpi"',
        "VENV='/a b/venv'",
        "MPI=mpich",
    ]


def test_lsf_is_told_minutes_queue_project_and_cores(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--system lsf --nodes 2 --learners 6 --threads 4 --time 1:00:30 --queue long --account mine"
    lines = printed(capsys, *words.split()).splitlines()
    assert {'#BSUB -R "span[ptile=4] affinity[core(4)]"', "#BSUB -W 01:01", "#BSUB -q long", "#BSUB -P mine"} <= set(lines)


MORE = [["--chain", "--array", "async"], [], ["--chain"], ["--array", "hardsync", "softsync --protocol.n 2"]]


@pytest.mark.parametrize(("system", "more"), spread(itertools.product(["slurm", "lsf", "jsrun"], MORE), 5, unpack=True))
def test_every_combination_is_a_script(job: Path, capsys: pytest.CaptureFixture[str], system: str, more: list[str]) -> None:
    text = printed(capsys, "--system", system, "--nodes", "2", "--gpus-per-node", "2", *more)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=300)
    assert ("LINKS=20" in text) == ("--chain" in more)
    assert ("PROTOCOLS=(" in text) == ("--array" in more)


def test_the_virtual_environment_is_this_one(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (job / "bin").mkdir()
    monkeypatch.setattr("sys.prefix", str(job))
    assert "\nVENV= " in printed(capsys, "--learners", "3")
    (job / "bin" / "activate").touch()
    assert f"\nVENV={job} " in printed(capsys, "--learners", "3")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--learners", "4", "--time", "3m"], "time = '3m': expected more than 180 s"),
        (["--learners", "4", "--chain", "--links", "0"], "links = 0: expected a finite number >= 1"),
        (["--learners", "4", "--time", "an hour"], "time = 'an hour': expected hours:minutes"),
        (["--learners", "4", "--name", "a b"], "name = 'a b': expected letters"),
        (["--learners", "4", "--queue", "a\n#SBATCH --x"], "queue = .*: expected one word"),
        (["--learners", "4", "--array", "softsync --protocol.n 5"], "protocol.n = 5: expected"),
        (["--learners", "4", "--array", "hardsink"], "protocol = 'hardsink' is unknown; did you mean 'hardsync'?"),
        (["--learners", "4", "--array", " "], "array = ' ': expected a protocol"),
        (["--learners", "4", "--mpi", "mpich", "--fault-tolerant"], "fault_tolerant = True: expected false: only Open MPI 5"),
        (["--system", "jsrun", "--learners", "4", "--fault-tolerant"], "fault_tolerant = True: expected false: only Open MPI 5"),
        (["--system", "jsrun", "--learners", "4"], "gpus_per_node = 0: expected at least 1 with jsrun"),
        (
            ["--system", "jsrun", "--nodes", "2", "--gpus-per-node", "6", "--shards", "3"],
            "shards = 3: expected a multiple of nodes = 2",
        ),
        (["--system", "jsrun", "--nodes", "2", "--gpus-per-node", "6", "--learners", "11"], "learners = 11: expected 12"),
        (["--system", "jsrun", "--gpus-per-node", "6", "--cores-per-node", "7"], "cores_per_node = 7: expected at least"),
        (["--system", "jsrun", "--nodes", "1", "--gpus-per-node", "2", "--evaluator"], "evaluator = True: expected false"),
    ],
)
def test_what_cannot_be_submitted_is_refused_by_name(
    job: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        submit.main(["job.toml", *words, "--dry-run"])
    assert capsys.readouterr().out == ""


LINES = {
    "--queue": "long\ntouch ran",
    "--account": "mine\n touch ran",
    "--name": "a\ntouch ran",
    "--time": "1:00\ntouch ran",
    "--modules": "gcc\ntouch ran\n",
    "--venv": "/a\ntouch ran",
    "--array": "hardsync\ntouch ran",
    "--modules=": "gcc\rtouch ran",
}


@pytest.mark.parametrize("option", LINES)
@pytest.mark.parametrize("system", ["slurm", "lsf"])
def test_a_second_line_in_an_argument_is_never_run(job: Path, capsys: pytest.CaptureFixture[str], option: str, system: str) -> None:
    """Also not that of the command in the head of the script, a comment."""
    words = [f"{option}{LINES[option]}"] if option.endswith("=") else [option, LINES[option]]
    with pytest.raises(ConfigError, match=r" = .*: expected "):
        submit.main(["job.toml", "--system", system, "--learners", "4", *words, "--dry-run"])
    assert capsys.readouterr().out == ""


def test_a_second_line_in_the_path_of_the_configuration(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job / "a\ntouch ran\n.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"config = .*: expected one line without control characters"):
        submit.main([str(path), "--learners", "4", "--dry-run"])


def test_whatever_else_is_said_is_kept_from_the_shell(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the settings too: the script, up to its first command, sets variables, and nothing else."""
    nasty = """a $(touch ran) `touch ran` "; touch ran; ' # x"""
    (job / "job $(touch ran).toml").write_text("")
    argv = ["job $(touch ran).toml", "--learners", "4", "--modules", nasty, "--venv", nasty, "--dry-run"]
    assert submit.main(argv) == 0
    head, _ = capsys.readouterr().out.split("# ======== nothing below")
    done = subprocess.run(
        ["bash", "-c", f'{head}\nprintf "%s\\n" "$MODULES" "$VENV" "$CONFIG"'], cwd=job, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [nasty, nasty, argv[0]]
    assert not (job / "ran").exists()


def test_an_array_with_allreduce_asks_for_the_ranks_of_the_others(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "job.toml").write_text("")
    text = printed(capsys, "--learners", "4", "--nodes", "1", "--shards", "2", "--array", "hardsync", "allreduce")
    assert "#SBATCH --ntasks=6\n" in text
    assert "\nSHARDS=2\n" in text
    with pytest.raises(ConfigError, match=r"array = .*: expected as many learners for all: give --learners"):
        submit.main(["job.toml", "--tasks-per-node", "8", "--array", "hardsync", "allreduce", "--dry-run"])
    (job / "job.toml").write_text("shards = 2")  # which the job of allreduce would read, too
    with pytest.raises(ConfigError, match="shards = 2: allreduce has as many shards as learners"):
        submit.main(["job.toml", "--learners", "4", "--array", "hardsync", "allreduce", "--dry-run"])


# ---------------------------------------------------------------------------------------------------------- submission

SBATCH = '#!/bin/sh\ncat >"$0.script"; echo "$@" >"$0.words"; echo "17;cluster"\n'
BSUB = '#!/bin/sh\ncat >"$0.script"; echo "$@" >"$0.words"; echo "Job <17> is submitted to default queue <normal>."\n'


def pretend(job: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> Path:
    program = job / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/usr/bin:/bin")
    return program


@pytest.mark.parametrize(
    ("system", "name", "text", "words"),
    [("slurm", "sbatch", SBATCH, "--parsable"), ("lsf", "bsub", BSUB, ""), ("jsrun", "bsub", BSUB, "")],
)
def test_the_script_is_handed_over_and_the_number_told(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, system: str, name: str, text: str, words: str
) -> None:
    program = pretend(job, monkeypatch, name, text)
    asked = ["--system", system, "--gpus-per-node", "4", "--nodes", "2"]
    script = printed(capsys, *asked)
    assert submit.main(["job.toml", *asked]) == 0
    assert capsys.readouterr().out == "job 17: 10 ranks on 2 nodes; runs go to results/mpisgd-17\n"
    assert Path(f"{program}.script").read_text() == script
    assert Path(f"{program}.words").read_text().strip() == words


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("#!/bin/sh\necho 'invalid partition specified: long' >&2; exit 1\n", "sbatch refuses: invalid partition specified: long"),
        ("#!/bin/sh\necho queued\n", "sbatch took the job, but gave no number: 'queued'"),
    ],
)
def test_a_batch_system_that_refuses_is_quoted(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    pretend(job, monkeypatch, "sbatch", text)
    assert main(["submit", "job.toml", "--learners", "4"]) == 2
    assert capsys.readouterr().err == f"mpisgd submit: ConfigError: {error}\n"


def test_without_a_batch_system_dry_run_is_named(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(job))
    with pytest.raises(ConfigError, match=r"sbatch cannot be started .* --dry-run prints the script"):
        submit.main(["job.toml", "--learners", "4"])
