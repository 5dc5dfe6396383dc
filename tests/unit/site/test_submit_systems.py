"""`mpisgd submit` in the words of each batch system; and what cannot be, which is refused before anything is queued."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.cli import submit
from mpisgd.site import launchers
from mpisgd.site.scripts import render, submission
from mpisgd.site.scripts.job_options import Request
from mpisgd.site.scripts.systems import SYSTEMS, SystemName

PROGRAMS = ("sbatch", "bsub", "qsub", "flux")


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration, and batch systems that note that they were called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("shards = 2\n")
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        (tmp_path / "bin" / name).write_text('#!/bin/sh\ncat >/dev/null; echo "$@" >>"$0.called"; echo 17\n')
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(launchers, "library_of", lambda python: "Open MPI v5.0.11, package: Open MPI user@host Distribution")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert submit.main(["job.toml", *words, "--dry-run"]) == 0
    return capsys.readouterr().out.splitlines()


# ------------------------------------------------------------------------------------------------------ what each says

ASKED = {
    "account": "mine",
    "queue": "long",
    "memory": "64G",
    "qos": "high",
    "constraint": "fast",
    "reservation": "mine7",
    "exclusive": "",
    "mail": "me@site.org",
    "dependency": "afterok:17:18",
}
SAID = {
    "slurm": {
        "account": "#SBATCH --account=mine",
        "queue": "#SBATCH --partition=long",
        "memory": "#SBATCH --mem=64G",
        "qos": "#SBATCH --qos=high",
        "constraint": "#SBATCH --constraint=fast",
        "reservation": "#SBATCH --reservation=mine7",
        "exclusive": "#SBATCH --exclusive",
        "mail": "#SBATCH --mail-user=me@site.org\n#SBATCH --mail-type=END,FAIL",
        "dependency": "#SBATCH --dependency=afterok:17,afterok:18",
    },
    "lsf": {
        "account": "#BSUB -P mine",
        "queue": "#BSUB -q long",
        "memory": '#BSUB -R "rusage[mem=64GB]"',
        "constraint": '#BSUB -R "select[fast]"',
        "reservation": "#BSUB -U mine7",
        "exclusive": "#BSUB -x",
        "mail": "#BSUB -u me@site.org\n#BSUB -N",
        "dependency": '#BSUB -w "done(17) && done(18)"',
    },
    "pbs": {
        "account": "#PBS -A mine",
        "queue": "#PBS -q long",
        "memory": "#PBS -l select=1:ncpus=6:mpiprocs=6:ompthreads=1:mem=64gb",
        "constraint": "#PBS -l select=1:ncpus=6:mpiprocs=6:ompthreads=1:mem=64gb:fast",
        "exclusive": "#PBS -l place=scatter:excl",
        "mail": "#PBS -M me@site.org\n#PBS -m ea",
        "dependency": "#PBS -W depend=afterok:17,afterok:18",
    },
    "flux": {
        "account": "#flux: --bank=mine",
        "queue": "#flux: --queue=long",
        "constraint": "#flux: --requires=fast",
        "exclusive": "#flux: --exclusive",
        "dependency": "#flux: --dependency=afterok:17\n#flux: --dependency=afterok:18",
    },
}


@pytest.mark.parametrize("system", SAID)
def test_each_system_is_told_in_its_own_words_or_the_option_is_refused_by_name(
    system: SystemName, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {option: [f"--{option}", *([value] if value else [])] for option, value in ASKED.items()}
    own, others = ["--system", system, "--learners", "4"], ASKED.keys() - SAID[system].keys()
    text = "\n".join(printed(capsys, *own, *(word for option in SAID[system] for word in words[option])))
    assert [said for said in SAID[system].values() if said not in text] == []
    assert SAID[system].keys() <= SYSTEMS[system].says.keys()
    for option in others:
        title = SYSTEMS[system].title
        with pytest.raises(ConfigError, match=f"^{option} = .*: expected none with {title}: "):
            submit.main(["job.toml", *own, *words[option]])


def test_every_system_says_or_lacks_each_of_them() -> None:
    names = {*ASKED, "mail_when", "array", "chain"}
    assert names <= {field.name for field in fields(Request)}
    for system in get_args(SystemName):
        of = SYSTEMS[system]
        more = {"mail_when"} - of.says.keys()  # goes with mail
        assert of.says.keys() | of.lacks.keys() | more == names, system
        assert not of.says.keys() & of.lacks.keys()
        if "mail" in of.says:
            assert of.mails("a@b.org", ["begin", "end", "fail"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("after", {"lsf": '-w "started(7)"', "flux": "--dependency=afterstart:7", "slurm": "--dependency=after:7"}),
        ("afterany", {"lsf": '-w "ended(7)"', "flux": "--dependency=afterany:7", "pbs": "-W depend=afterany:7"}),
        ("afternotok", {"lsf": '-w "exit(7)"', "flux": "--dependency=afternotok:7", "pbs": "-W depend=afternotok:7"}),
    ],
)
def test_dependencies(kind: str, said: dict[SystemName, str], capsys: pytest.CaptureFixture[str]) -> None:
    for system, line in said.items():
        lines = printed(capsys, "--system", system, "--learners", "4", "--dependency", f"{kind}:7")
        assert f"{SYSTEMS[system].keyword}{line}" in lines


@pytest.mark.parametrize(
    ("system", "line"),
    [
        ("slurm", "--time=30:00:00"),
        ("lsf", "-W 30:00"),
        ("jsrun", "-W 30:00"),
        ("pbs", "-l walltime=30:00:00"),
        ("flux", "--time-limit=1800m"),
    ],
)
def test_one_time_in_the_form_of_each(system: SystemName, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--system", system, "--nodes", "2", "--gpus-per-node", "2", "--time", "1-06:00")
    assert f"{SYSTEMS[system].keyword}{line}" in lines


@pytest.mark.parametrize("system", get_args(SystemName))
def test_directives_and_lines_of_bash_stand_where_they_count(system: SystemName, capsys: pytest.CaptureFixture[str]) -> None:
    setup = ["export A=1", 'module use "/a b"']
    words = [word for line in setup for word in ("--setup", line)]
    size = ["--nodes", "2", "--gpus-per-node", "2", "--modules", "gcc", "--venv", "/v"]
    lines = printed(capsys, "--system", system, *size, *words, "--directive", "--one=1", "--directive", "-y 2 3")
    keyword = SYSTEMS[system].keyword
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert {f"{keyword}--one=1", f"{keyword}-y 2 3"} <= set(lines[:first])
    where = {line: index for index, line in enumerate(lines)}
    loaded, strict = (where[line] for line in ("if [[ -n $MODULES ]]; then module load $MODULES; fi", "set -u"))
    activated = where['if [[ -n $VENV ]]; then source "$VENV/bin/activate"; fi']
    assert loaded < where[setup[0]] < where[setup[1]] < activated < strict


def test_pbs_has_a_smaller_chunk_for_the_last_node(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--system", "pbs", "--nodes", "2", "--learners", "5", "--threads", "4")
    assert "#PBS -l select=1:ncpus=16:mpiprocs=4:ompthreads=4+1:ncpus=12:mpiprocs=3:ompthreads=4" in lines


# ------------------------------------------------------------------------------------------------- what cannot be asked

FOUR = ("--learners", "4")
WRONG = [
    (["--gpus-per-node", "4", "--nodes", "1", "--learners", "5"], "gpus_per_node = 4: expected at least 5, a GPU for each learner"),
    ([*FOUR, "--time", "tomorrow"], "time = 'tomorrow': expected hours:minutes, .* 90m"),
    ([*FOUR, "--time", "2-25:00"], "time = '2-25:00': expected fewer than 24 hours beside days"),
    ([*FOUR, "--time", "100s"], "time = '100s': expected more than 180 s: the job is warned"),
    ([*FOUR, "--time", "90", "--system", "pbs"], "time = '90': expected a unit with pbs \\(a bare number: seconds"),
    ([*FOUR, "--queue", "long\n#SBATCH --wrap=x"], "queue = 'long.*: expected one word without quotes"),
    ([*FOUR, "--qos", "$(touch ran)"], r"qos = '\$\(touch ran\)': expected one word without quotes"),
    ([*FOUR, "--constraint", "a b"], "constraint = 'a b': expected one word without quotes"),
    ([*FOUR, "--reservation", "`touch ran`"], "reservation = .*: expected one word without quotes"),
    ([*FOUR, "--memory", "64 gigabytes"], "memory = '64 gigabytes': expected a number with K, M, G or T: 64G"),
    ([*FOUR, "--mail", "me"], "mail = 'me': expected an address"),
    ([*FOUR, "--mail", "me@site.org\ntouch ran"], "mail = .*: expected an address"),
    ([*FOUR, "--mail-when", "end"], r"mail_when = \('end',\): expected none without --mail"),
    ([*FOUR, "--dependency", "4711"], "dependency = '4711': expected KIND:JOB, .* afterok:4711"),
    ([*FOUR, "--dependency", "afterok:"], "dependency = 'afterok:': expected KIND:JOB"),
    ([*FOUR, "--dependency", "whenever:17"], "dependency = 'whenever:17': expected KIND:JOB, .* one of after, afterany"),
    ([*FOUR, "--dependency", 'afterok:1" && touch ran "'], "dependency = .*: expected KIND:JOB"),
    ([*FOUR, "--setup", "export A=1\ntouch ran"], "setup = .*: expected one line without control characters"),
    ([*FOUR, "--directive", "--gres=x\ntouch ran"], "directive = .*: expected one line without control characters"),
    ([*FOUR, "--directive", "gres=x"], "directive = 'gres=x': expected an option of the batch system"),
    ([*FOUR, "--directive", "--nodes=3"], "directive = '--nodes=3': expected an option that the script does not set"),
    (
        [*FOUR, "--system", "pbs", "--directive", "-l walltime=9:00"],
        "directive = '-l walltime=9:00': expected an option that the script",
    ),
    (
        [*FOUR, "--time", "2:00"],
        "time = '2:00': expected .* '2:00:00' for 2 h 0 min, or '0:2:00' for 2 min 0 s: SLURM itself reads",
    ),
    ([*FOUR, "--system", "pbs", "--time", "02:30"], "time = '02:30': expected .*'02:30:00' for 2 h 30 min, .*: PBS itself reads"),
    ([*FOUR, "--system", "lsf", "--qos", "high"], "qos = 'high': expected none with LSF: service classes"),
    ([*FOUR, "--system", "pbs", "--reservation", "R17"], "reservation = 'R17': expected none with PBS: a reservation is a queue"),
    ([*FOUR, "--system", "flux", "--memory", "64G"], "memory = '64G': expected none with Flux"),
    ([*FOUR, "--system", "flux", "--chain"], "chain = True: expected none with Flux: a job cannot be queued again"),
    ([*FOUR, "--system", "pbs", "--array", "hardsync"], "array = .*: expected at least 2 with pbs"),
    ([*FOUR, "--system", "pbs", "--chain", "--array", "hardsync", "async"], "chain = True: expected false with --array and pbs"),
    (
        ["--system", "flux", "--nodes", "2", "--gpus-per-node", "2", "--learners", "3"],
        "tasks_per_node = 3: expected ranks in equal numbers on each node with flux and GPUs: 5 on 2 nodes",
    ),
    ([*FOUR, "--system", "flux", "--fault-tolerant"], "fault_tolerant = True: expected false: only Open MPI 5, started by mpirun"),
    ([*FOUR, "--launcher", "jsrun"], "launcher = 'jsrun': expected one of mpirun, srun-pmix, .* with slurm"),
    (
        [*FOUR, "--launcher", "srun-pmi2"],
        "launcher = 'srun-pmi2': expected one of mpirun, .* for Open MPI: Open MPI 5 speaks PMIx alone",
    ),
    ([*FOUR, "--launcher", "mpirun", "--mpi", "mpich"], "launcher = 'mpirun': .* for MPICH: this is Open MPI's"),
    ([*FOUR, "--launcher", "srun-pmix", "--fault-tolerant"], "fault_tolerant = True: expected false"),
    ([*FOUR, "--template", "nowhere.sh"], "template = 'nowhere.sh': cannot be read"),
    ([*FOUR, "--template", "job.toml"], r"template = 'job.toml': expected @\{directives\} in it: all lines"),
    ([*FOUR, "--template", "job.toml", "--chain"], "template = 'job.toml': expected "),
    ([*FOUR, "--site", "nowhere"], "site = 'nowhere': there is no .*/settings/mpisgd/sites/nowhere.toml; expected a file there"),
    ([*FOUR, "--walltime", "1:00"], "unknown option --walltime: the time limit is --time"),
]


@pytest.mark.parametrize(("words", "text"), WRONG, ids=[" ".join(words[2 * (words[:2] == [*FOUR]) :])[:40] for words, _ in WRONG])
def test_what_is_wrong_is_refused_by_name_before_anything_is_queued(words: list[str], text: str, job: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        submit.main(["job.toml", *words])
    assert not list(job.glob("bin/*.called"))
    assert not (job / "ran").exists()


def test_what_is_right_is_queued(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the test above would see nothing."""
    assert submit.main(["job.toml", *FOUR]) == 0
    assert (job / "bin" / "sbatch.called").read_text() == "--parsable\n"


@pytest.mark.parametrize(
    ("system", "told", "number"),
    [
        ("slurm", "17;cluster\n", "17"),
        ("lsf", "Job <17> is submitted to queue <a>.\n", "17"),
        ("pbs", "17.server\n", "17"),
        ("pbs", "17[].server\n", "17"),
        ("flux", "ƒ3XyZ\n", "f3XyZ"),
        ("flux", "f3XyZ\n", "f3XyZ"),
    ],
)
def test_the_number_of_the_job(system: SystemName, told: str, number: str) -> None:
    assert submission._number(system, told) == number
    assert submission._number(system, "queued\n") is None


# ----------------------------------------------------------------------------------------------- the user's own template

OWN = """\
#!/bin/bash
@{directives}
set -e
@{setup}
%% if shards > 1
echo "@{shards} shards of @{name} in @{run}"
%% endif
@{launch} @{train}
"""


def test_a_template_of_the_users_own(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "own.sh").write_text(OWN)
    lines = printed(
        capsys, *FOUR, "--template", "own.sh", "--venv", "/a b", "--modules", "gcc x", "--launcher", "srun-pmix", "--qos", "q"
    )
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --ntasks=6", "#SBATCH --qos=q", "#SBATCH --signal=B:USR1@120"} <= set(lines)
    assert lines[-5:] == [
        "set -e",
        "module load gcc x",
        "source '/a b/bin/activate'",
        'echo "2 shards of mpisgd in results/mpisgd-$SLURM_JOB_ID"',
        "srun --mpi=pmix --kill-on-bad-exit=1 --ntasks=6 --cpus-per-task=1"
        ' mpisgd train job.toml --out "results/mpisgd-$SLURM_JOB_ID" --shards 2',
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OWN + "@{wall}", r"the variable @\{wall\} is unknown; expected one of: config, directives"),
        (OWN + "@{node}", r"the variable @\{node\} is unknown; did you mean 'nodes'\?"),
        (OWN.replace("@{train}", ""), r"expected @\{train\} in it: the program"),
        (OWN.replace("@{launch}", ""), r"expected @\{launch\} in it: the launcher's command"),
        (OWN + "%% if\n", r"line \d+: "),
        (OWN + "%% include 'other.sh'\n", "'other.sh' not found"),
    ],
)
def test_a_template_that_names_what_is_not_there_or_lacks_what_must_be(text: str, said: str, job: Path) -> None:
    (job / "own.sh").write_text(text)
    with pytest.raises(ConfigError, match=f"template = 'own.sh': {said}"):
        submit.main(["job.toml", *FOUR, "--template", "own.sh"])
    assert not list(job.glob("bin/*.called"))


@pytest.mark.parametrize("more", [["--chain"], ["--array", "hardsync", "async"]])
def test_a_template_has_neither_chain_nor_array(more: list[str], job: Path) -> None:
    (job / "own.sh").write_text(OWN)
    with pytest.raises(ConfigError, match=rf"template = 'own.sh': expected none with {more[0]}"):
        submit.main(["job.toml", *FOUR, "--template", "own.sh", *more])


@pytest.mark.parametrize("system", get_args(SystemName))
def test_its_variables_are_there_on_each_system(system: SystemName, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = " ".join(f"@{{{name}}}" for name in render.VARIABLES if name not in ("directives", "setup"))
    (job / "own.sh").write_text(f"#!/bin/bash\n@{{directives}}\n: {used}\n")
    text = "\n".join(printed(capsys, "--system", system, "--nodes", "2", "--gpus-per-node", "2", "--template", "own.sh"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=300)
    assert SYSTEMS[system].keyword in text


# --------------------------------------------------------------------------------------------------------------- sites


def site(job: Path, text: str) -> None:
    path = job / "settings" / "mpisgd" / "sites" / "here.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_site_has_defaults_which_the_command_line_overrides(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site(job, 'system = "pbs"\nqueue = "long"\naccount = "mine"\nsetup = ["module use /x"]\n')
    lines = printed(capsys, *FOUR, "--site", "here", "--queue", "short")
    assert {"#PBS -q short", "#PBS -A mine", "module use /x"} <= set(lines)
    assert printed(capsys, *FOUR, "--site=here")[7:] == printed(capsys, *FOUR, "--site", "here")[7:]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("queue = ", "here.toml cannot be read: "),
        ('que = "long"', "unknown option 'que'; did you mean 'queue'"),
        ('nodes = "2"', "nodes = '2': expected int"),
        ('system = "sge"', "system = 'sge': expected one of: slurm, lsf, jsrun, pbs, flux"),
        ('queue = "a b"', "queue = 'a b': expected one word"),
        ('config = "job.toml"', "config: expected none"),
        ('setup = "export A=1"', "setup = 'export A=1': expected array"),
    ],
)
def test_a_site_that_cannot_be_is_refused_by_its_name(text: str, said: str, job: Path) -> None:
    site(job, text)
    with pytest.raises(ConfigError, match=f"site = 'here': .*{said}"):
        submit.main(["job.toml", *FOUR, "--site", "here"])
    with pytest.raises(ConfigError, match=r"site = 'there': .*; expected one of: here"):
        submit.main(["job.toml", *FOUR, "--site", "there"])


EXAMPLES = sorted((Path(__file__).parents[3] / "jobs" / "sites").glob("*.toml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_sites_and_say_that_they_were_not_tried(
    example: Path, job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "library_of", lambda python: "")
    site(job, example.read_text())
    assert "not tried there" in example.read_text().splitlines()[0]
    text = "\n".join(printed(capsys, "--site", "here", "--nodes", "2"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=300)


def test_there_are_three_examples() -> None:
    assert len(EXAMPLES) == 3


# ------------------------------------------------------------------------------------------------------- documentation

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "batch-systems.md").read_text()


def test_the_page_has_all_variables_launchers_and_options() -> None:
    section = PAGE.split("## A template of your own")[1].split("\n## ")[0]
    table = section.split("| variable | |\n")[1]
    assert set(re.findall(r"`(\w+)`", "\n".join(line.split(" | ")[0] for line in table.splitlines()))) == set(render.VARIABLES)
    named = re.findall(r"^\| `([\w.-]+)` \| `", PAGE.split("## Launchers")[1].split("\n## ")[0], re.MULTILINE)
    assert named == list(launchers.LAUNCHERS)
    assert all(f"`--{option}" in PAGE for option in ASKED)


def test_the_pages_template_is_one(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (template,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (job / "own.sh").write_text(template)
    lines = printed(capsys, "--gpus-per-node", "2", "--nodes", "3", "--template", "own.sh")
    assert "nvidia-smi" in lines
    assert "srun --ntasks=3 --ntasks-per-node=1 hostname" in lines
    assert lines[-1].startswith("exec mpirun -n 8 -x OMP_NUM_THREADS --bind-to none mpisgd train job.toml --out ")
