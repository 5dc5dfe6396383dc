"""The scripts of jobs/ on a real SLURM of four virtual nodes (slurm.py): submitted, cancelled, queued again, robbed of a node.

Skipped, with the reason, where there is no SLURM. The MPI is that of this environment: Open MPI's ranks are started by mpirun,
MPICH's by srun. Starting ranks is what takes long, so only what needs a real training has one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpisgd import config_file, roles
from mpisgd.errors import ConfigError
from mpisgd.launch import environment, mpirun
from tests.jobs import slurm
from tests.jobs.golden import JOBS

NODES = ("n1", "n2", "n3", "n4")

REASON = slurm.missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "a SLURM is here")


@pytest.fixture(scope="module")
def mpi() -> str:
    try:
        launcher = mpirun(1)[0]
    except ConfigError as error:
        pytest.skip(str(error))
    told = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    return "openmpi" if "Open MPI" in told else "mpich"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), NODES) as running:
        yield running


class Checkout:
    """A copy of jobs/ beside an environment in which there is an `mpisgd`, and the cluster that it is submitted to."""

    def __init__(self, directory: Path, cluster: slurm.Slurm, mpi: str) -> None:
        self.directory, self.cluster, self.mpi = directory, cluster, mpi
        shutil.copytree(JOBS, directory / "jobs")
        programs = directory / ".venv" / "bin"
        programs.mkdir(parents=True)
        path = f"{programs}:{Path(sys.executable).parent}"
        (programs / "activate").write_text(f'export PATH="{path}:$PATH" PYTHONPATH="{JOBS.parent}"\n')
        self.programs = programs
        self.install(f'exec "{sys.executable}" -m mpisgd "$@"\n')

    def install(self, mpisgd: str) -> None:
        """What the ranks run."""
        (self.programs / "mpisgd").write_text(f"#!/bin/bash\n{mpisgd}")
        (self.programs / "mpisgd").chmod(0o755)

    def configure(self, more: str) -> None:
        """Keys before those of jobs/job.toml."""
        file = self.directory / "jobs" / "job.toml"
        lines = [line for line in file.read_text().splitlines() if not line.startswith("epochs")]
        file.write_text("\n".join([more, *lines, ""]))

    @property
    def environment(self) -> dict[str, str]:
        return environment() | self.cluster.environment

    def edit(self, script: str, **settings: object) -> None:
        """Edit a script's block, as a user would: directives by their names with `_` for `-`, settings by theirs."""
        file = self.directory / "jobs" / script
        text = file.read_text()
        for name, value in ({"MPI": self.mpi} | settings).items():
            before = f"#SBATCH --{name.replace('_', '-')}=" if name.islower() else f"{name}="
            lines = text.splitlines(keepends=True)
            found = [at for at, line in enumerate(lines) if line.startswith(before)]
            assert len(found) == 1, f"{script}: {before}"
            lines[found[0]] = f"{before}{value}\n"
            text = "".join(lines)
        file.write_text(text)

    def submit(self, script: str) -> str:
        """`sbatch`; the job's number."""
        words = ["sbatch", "--parsable", f"jobs/{script}"]
        return subprocess.run(
            words, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    def output(self, job: str) -> str:
        file = self.directory / f"mpisgd-{job}.out"
        return file.read_text() if file.exists() else ""

    def run(self, job: str) -> Path:
        return self.directory / "results" / f"mpisgd-{job}"


@pytest.fixture
def checkout(tmp_path: Path, cluster: slurm.Slurm, mpi: str) -> Iterator[Checkout]:
    """And, whatever became of the test, an idle cluster for the next."""
    yield Checkout(tmp_path, cluster, mpi)
    cluster.call("scancel", "--user=root")
    slurm.wait_for(lambda: cluster.states() == {"idle"}, 30, "nodes that are idle", cluster.told)


def hosts_of(run: Path) -> tuple[tuple[str, ...], roles.Roles]:
    """The host of each rank, and the roles, as the run wrote them down."""
    hosts = tomllib.loads((run / "config.toml").read_text())["environment"]["hosts"]
    return tuple(hosts), roles.of_job(config_file.read(run / "config.toml"), hosts)


FOUR_NODES = {"nodes": 4, "ntasks": 8, "ntasks_per_node": 2, "SHARDS": 4, "EVALUATOR": 0}
HOSTS = ("n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4")


def test_the_shipped_script_trains_on_four_nodes_with_a_shard_on_each(checkout: Checkout) -> None:
    checkout.configure('epochs = 1\nplacement = "spread"')
    checkout.edit("slurm-cpu.sbatch", **FOUR_NODES)
    job = checkout.submit("slurm-cpu.sbatch")
    state = checkout.cluster.wait_until(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", within_s=60)
    said = checkout.output(job)
    assert state == "COMPLETED", said
    assert f"done; look at it with: mpisgd report results/mpisgd-{job}" in said
    assert "8 ranks = 4 shards + 4 learners + 0 evaluators" in said
    assert (checkout.run(job) / "DONE").exists()
    hosts, assigned = hosts_of(checkout.run(job))
    assert hosts == HOSTS
    assert [hosts[rank] for rank in assigned.shard_ranks] == list(NODES)


def test_submit_submits_an_array_whose_elements_run_side_by_side(checkout: Checkout) -> None:
    # Each ends when both have begun.
    checkout.install(
        'mkdir -p "$4"; echo "$@" >"$4/words"; until (($(ls results | wc -l) == 2)); do sleep 0.1; done; touch "$4/DONE"'
    )
    words = ["--learners", "2", "--venv", ".venv", "--mpi", checkout.mpi, "--array", "hardsync", "allreduce"]
    command = [sys.executable, "-m", "mpisgd", "submit", "jobs/job.toml", *words]
    env = checkout.environment | {"PYTHONPATH": str(JOBS.parent)}
    told = subprocess.run(command, cwd=checkout.directory, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    job = told.split()[1].rstrip(":")
    assert told == f"job {job}: 3 ranks on 1 nodes; runs go to results/mpisgd-{job}-*\n"
    for element, name in enumerate(["hardsync", "allreduce"], start=1):
        state = checkout.cluster.wait_until(f"{job}_{element}", "COMPLETED", "FAILED", within_s=60)
        assert state == "COMPLETED", checkout.output(f"{job}-{element}")
        run = f"results/mpisgd-{job}-{element}-{name}"
        words = f"train jobs/job.toml --out {run}{' --shards 1' * (name != 'allreduce')} --protocol {name}\n"
        assert (checkout.directory / run / "words").read_text() == words


# ------------------------------------------------------------------------------------------------ jobs that do not end well


def start_endless(checkout: Checkout) -> str:
    """A run that would take for ever, on four nodes, as soon as it trains; its number."""
    checkout.configure('epochs = 1000000\nplacement = "spread"')
    checkout.edit("slurm-cpu.sbatch", **FOUR_NODES | {"ntasks": 4, "ntasks_per_node": 1, "SHARDS": 2})
    job = checkout.submit("slurm-cpu.sbatch")
    slurm.wait_for(lambda: list(checkout.run(job).glob("shard-001*.h5")), 60, "training", lambda: checkout.output(job))
    return job


def ranks(checkout: Checkout) -> list[str]:
    """The commands of all ranks on all nodes that are up."""
    found = []
    for pid in [
        pid for node in checkout.cluster.nodes if node in checkout.cluster.daemons for pid in checkout.cluster.processes(node)
    ]:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"mpisgd" in words:
            found.append(b" ".join(words).decode())
    return found


def test_scancel_ends_all_ranks_and_there_is_no_done(checkout: Checkout) -> None:
    job = start_endless(checkout)
    assert ranks(checkout)
    checkout.cluster.call("scancel", job)
    assert checkout.cluster.wait_until(job, "CANCELLED", within_s=20)
    slurm.wait_for(lambda: not ranks(checkout), 20, "end of the ranks")
    assert not (checkout.run(job) / "DONE").exists()
    assert "done; look" not in checkout.output(job)


def test_a_job_that_loses_a_node_fails_and_ends(checkout: Checkout) -> None:
    """Open MPI's mpirun sees it first, and says 0: SLURM alone would have said COMPLETED. srun waits for SLURM to see it."""
    job = start_endless(checkout)
    try:
        checkout.cluster.power_off("n3")
        end = {"openmpi": "DONE: the run did not end well", "mpich": "DUE TO NODE FAILURE"}[checkout.mpi]
        slurm.wait_for(lambda: end in checkout.output(job), 60, "end of the job", lambda: checkout.output(job))
        slurm.wait_for(lambda: not ranks(checkout), 20, "end of the ranks")
        assert not (checkout.run(job) / "DONE").exists()
    finally:
        checkout.cluster.power_on("n3")
    state = checkout.cluster.wait_until(job, "FAILED", "NODE_FAIL", "COMPLETED", within_s=30)
    assert state == {"openmpi": "FAILED", "mpich": "NODE_FAIL"}[checkout.mpi], checkout.output(job)


# ----------------------------------------------------------------------------------------------------------- the chain

#: Stands for a run that takes three links: the first is warned, saves what it has and leaves with status 85; the second saves and
#: goes on until its node is lost; the third ends.
THREE_LINKS = """\
rank=${OMPI_COMM_WORLD_RANK-${PMI_RANK}} link=${SLURM_RESTART_COUNT:-0}
run=$(ls -d results/*.links); run=${run%.links}
mkdir -p "$run/checkpoint"
echo "$@" >"$run/words.$link.$rank"
case $link in
  0) trap 'hostname >"$run/checkpoint/rank-$rank"; exit 85' USR1 ;;
  1) touch "$run/checkpoint/rank-$rank" ;;
  2) touch "$run/DONE"; exit 0 ;;
esac
touch "$run/running.$link.$rank"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""


def wait_for_link(checkout: Checkout, job: str, link: int) -> None:
    """Until its ranks run, on all nodes."""
    running = f"running.{link}.*"
    slurm.wait_for(
        lambda: len(list(checkout.run(job).glob(running))) == len(HOSTS), 60, f"link {link}", lambda: checkout.output(job)
    )


def test_a_chain_that_is_warned_and_loses_a_node_is_queued_again_until_done(checkout: Checkout) -> None:
    checkout.install(THREE_LINKS)
    checkout.edit("slurm-chain.sbatch", **FOUR_NODES)
    job = checkout.submit("slurm-chain.sbatch")
    wait_for_link(checkout, job, 0)
    checkout.cluster.call("scancel", "--batch", "--signal=USR1", job)  # what SLURM does 120 s before the time limit
    wait_for_link(checkout, job, 1)
    saved = {file.read_text().strip() for file in (checkout.run(job) / "checkpoint").iterdir()}
    assert saved == set(NODES)
    said = checkout.output(job)
    assert "warned: the time is nearly over" in said
    assert "link 1 of the chain has ended: the job is queued again" in said

    checkout.cluster.power_off("n3")
    slurm.wait_for(lambda: checkout.cluster.show(job)["Restarts"] == "2", 60, "restart", lambda: checkout.output(job))
    checkout.cluster.power_on("n3")
    state = checkout.cluster.wait_until(job, "COMPLETED", "FAILED", "CANCELLED", within_s=60)
    assert state == "COMPLETED", checkout.output(job) + checkout.cluster.told()
    assert len((checkout.directory / "results" / f"mpisgd-{job}.links").read_text().splitlines()) == 3
    words = {file.name.split(".")[1]: file.read_text() for file in checkout.run(job).glob("words.*")}
    assert words["0"].startswith("train jobs/job.toml --out")
    assert words["1"] == words["2"] == f"train --resume results/mpisgd-{job}\n"


def test_a_cancelled_chain_does_not_come_back(checkout: Checkout) -> None:
    """Although it has saved, and scontrol would queue a cancelled job again."""
    checkout.install(THREE_LINKS.replace("link=${SLURM_RESTART_COUNT:-0}", "link=1"))
    checkout.edit("slurm-chain.sbatch", **FOUR_NODES)
    job = checkout.submit("slurm-chain.sbatch")
    wait_for_link(checkout, job, 1)
    checkout.cluster.call("scancel", job)
    slurm.wait_for(lambda: checkout.cluster.states() == {"idle"}, 20, "nodes that are idle", checkout.cluster.told)
    assert checkout.cluster.show(job)["JobState"] == "CANCELLED", checkout.output(job)
    assert checkout.cluster.show(job)["Restarts"] == "0"
