"""The scripts of jobs/ on a real SLURM of four virtual nodes (slurm.py): submitted, cancelled, warned, requeued, robbed of a node.

Skipped, with the reason, where there is no SLURM. The MPI is that of this environment: Open MPI's ranks are started by mpirun,
MPICH's by srun. Starting ranks is what takes long, so only what needs a real training has one.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import slurm
from tests.jobs.checkout import hosts_of
from tests.jobs.submitting import FOUR_NODES, NODES, ONE_EACH, Submitting

REASON = slurm.missing()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON or "a SLURM is here"), pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), NODES) as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path, cluster: slurm.Slurm, mpi: str) -> Iterator[Submitting]:
    """And, whatever became of the test, an idle cluster for the next."""
    yield Submitting(tmp_path, cluster, mpi)
    cluster.call("scancel", "--user=root")
    cluster.heal()


HOSTS = ("n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4")


def test_the_shipped_script_trains_on_four_nodes_with_a_shard_on_each(checkout: Submitting) -> None:
    checkout.configure('epochs = 1\nplacement = "spread"')
    checkout.edit("slurm-cpu.sbatch", **FOUR_NODES)
    job = checkout.submit("slurm-cpu.sbatch")
    state = checkout.cluster.wait_until(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", within_s=300)
    said = checkout.output(job)
    assert state == "COMPLETED", said
    assert f"done; look at it with: mpisgd report results/mpisgd-{job}" in said
    assert "8 ranks = 4 shards + 4 learners + 0 evaluators" in said
    assert (checkout.run(job) / "DONE").exists()
    hosts, assigned = hosts_of(checkout.run(job))
    assert hosts == HOSTS
    assert [hosts[rank] for rank in assigned.shard_ranks] == list(NODES)


def test_submit_submits_an_array_whose_elements_run_side_by_side(checkout: Submitting) -> None:
    # Each ends when both have begun.
    checkout.install(
        'mkdir -p "$4"; echo "$@" >"$4/words"; until (($(ls results | wc -l) == 2)); do sleep 0.1; done; touch "$4/DONE"'
    )
    words = ["--learners", "2", "--venv", ".venv", "--mpi", checkout.mpi, "--array", "hardsync", "allreduce"]
    told = checkout.mpisgd("submit", "jobs/job.toml", *words).stdout
    job = told.split()[1].rstrip(":")
    assert told == f"job {job}: 3 ranks on 1 nodes; runs go to results/mpisgd-{job}-*\n"
    for element, name in enumerate(["hardsync", "allreduce"], start=1):
        state = checkout.cluster.wait_until(f"{job}_{element}", "COMPLETED", "FAILED", within_s=200)
        assert state == "COMPLETED", checkout.output(f"{job}-{element}")
        run = f"results/mpisgd-{job}-{element}-{name}"
        words = f"train jobs/job.toml --out {run}{' --shards 1' * (name != 'allreduce')} --protocol {name}\n"
        assert (checkout.directory / run / "words").read_text() == words


#: What this cluster does not have, and SLURM's own words of it.
UNKNOWN = {
    "--constraint": ("unheard", "Invalid feature specification"),
    "--queue": ("nowhere", "invalid partition specified: nowhere"),
    "--reservation": ("nobodys", "Requested reservation is invalid"),
}


def test_what_this_slurm_does_not_know_is_refused_in_its_own_words_and_nothing_is_queued(checkout: Submitting) -> None:
    checkout.configure("epochs = 0.2")
    for option, (value, words) in UNKNOWN.items():
        told = checkout.mpisgd("submit", "jobs/job.toml", "--learners", "17", "--venv", ".venv", option, value, status=2).stderr
        assert re.match(rf"mpisgd submit: ConfigError: sbatch refuses: .*({words})", told, re.DOTALL), told
        assert "Traceback" not in told
    assert checkout.cluster.call("squeue", "--noheader").strip() == ""


def test_srun_with_pmix_starts_open_mpis_ranks_which_share_out_the_cores_of_their_nodes(checkout: Submitting) -> None:
    """By Debian's plugin, which wants libpmix-dev besides; as the launcher of a job that `submit` has queued."""
    if checkout.mpi != "openmpi":
        pytest.skip("this MPICH is built for PMI-1 and PMI-2")
    asked = ["srun", "--mpi=pmix", "true"]
    tried = subprocess.run(asked, env=checkout.environment, capture_output=True, text=True, check=False, timeout=300)
    if tried.returncode != 0:
        pytest.skip(f"srun has no PMIx here (Debian: libpmix-dev): {tried.stderr.splitlines()[0]}")
    checkout.configure("epochs = 0.2")
    words = ["--nodes", "2", "--tasks-per-node", "2", "--venv", ".venv", "--launcher", "srun-pmix", "--binding", "roles"]
    job = checkout.mpisgd("submit", "jobs/job.toml", *words).stdout.split()[1].rstrip(":")
    state = checkout.cluster.wait_until(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", within_s=300)
    said = checkout.output(job)
    assert state == "COMPLETED", said
    assert (checkout.run(job) / "DONE").exists()
    told = tomllib.loads((checkout.run(job) / "config.toml").read_text())["environment"]
    assert told["hosts"] == ["n1", "n1", "n2", "n2"]
    if len(os.sched_getaffinity(0)) > 1:
        assert told["cores"][0] != told["cores"][1]
        assert told["cores"][2] != told["cores"][3]


# ------------------------------------------------------------------------------------------------ jobs that do not end well


def test_scancel_ends_all_ranks_and_there_is_no_done(checkout: Submitting) -> None:
    job = checkout.start_endless()
    assert checkout.ranks()
    checkout.cluster.call("scancel", job)
    assert checkout.cluster.wait_until(job, "CANCELLED", within_s=120)
    slurm.wait_for(lambda: not checkout.ranks(), 120, "end of the ranks")
    assert not (checkout.run(job) / "DONE").exists()
    assert "done; look" not in checkout.output(job)


def test_a_job_that_loses_a_node_fails_and_ends(checkout: Submitting) -> None:
    """Open MPI's mpirun sees it first, and says 0: SLURM alone would have said COMPLETED. srun waits for SLURM to see it."""
    job = checkout.start_endless()
    try:
        checkout.cluster.power_off("n3")
        end = {"openmpi": "DONE: the run did not end well", "mpich": "DUE TO NODE FAILURE"}[checkout.mpi]
        slurm.wait_for(lambda: end in checkout.output(job), 200, "end of the job", lambda: checkout.output(job))
        slurm.wait_for(lambda: not checkout.ranks(), 120, "end of the ranks")
        assert not (checkout.run(job) / "DONE").exists()
    finally:
        checkout.cluster.power_on("n3")
    state = checkout.cluster.wait_until(job, "FAILED", "NODE_FAIL", "COMPLETED", within_s=120)
    assert state == {"openmpi": "FAILED", "mpich": "NODE_FAIL"}[checkout.mpi], checkout.output(job)


# ----------------------------------------------------------------------------------------------------------- the chain

#: Stands for a run that takes three links: the first is warned, saves what it has and leaves with status 85; the second saves and
#: goes on until its node is lost; the third ends.
THREE_LINKS = """\
rank=${OMPI_COMM_WORLD_RANK-${PMI_RANK}} ranks=${OMPI_COMM_WORLD_SIZE-${PMI_SIZE}} link=${SLURM_RESTART_COUNT:-0}
save() {  # all leave together, as mpisgd's ranks do: the launcher ends the others when the first goes
  hostname >"$run/saving-$rank"
  mv "$run/saving-$rank" "$run/checkpoint/rank-$rank"
  until (($(ls "$run/checkpoint" | wc -l) == ranks)); do sleep 0.1; done
  exit 85
}
run=$(ls -d results/*.links); run=${run%.links}
mkdir -p "$run/checkpoint"
echo "$@" >"$run/words.$link.$rank"
case $link in
  0) trap save USR1 ;;
  1) touch "$run/checkpoint/rank-$rank" ;;
  2) touch "$run/DONE"; exit 0 ;;
esac
touch "$run/running.$link.$rank"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""


def wait_for_link(checkout: Submitting, job: str, link: int) -> None:
    """Until its ranks run, on all nodes."""
    running = f"running.{link}.*"
    slurm.wait_for(
        lambda: len(list(checkout.run(job).glob(running))) == len(HOSTS),
        120,
        f"link {link}",
        lambda: checkout.output(job) + checkout.cluster.told(),
    )


def test_a_chain_that_is_warned_and_loses_a_node_is_queued_again_until_done(checkout: Submitting) -> None:
    checkout.stand_in(THREE_LINKS)
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
    slurm.wait_for(
        lambda: checkout.cluster.show(job)["Restarts"] == "2",
        200,
        "restart",
        lambda: checkout.output(job) + checkout.cluster.told(),
    )
    checkout.cluster.power_on("n3")
    state = checkout.cluster.wait_until(job, "COMPLETED", "FAILED", "CANCELLED", within_s=120)
    assert state == "COMPLETED", checkout.output(job) + checkout.cluster.told()
    assert len((checkout.directory / "results" / f"mpisgd-{job}.links").read_text().splitlines()) == 3
    words = {file.name.split(".")[1]: file.read_text() for file in checkout.run(job).glob("words.*")}
    assert words["0"].startswith("train jobs/job.toml --out")
    assert words["1"] == words["2"] == f"train jobs/job.toml --resume results/mpisgd-{job}\n"


def test_a_cancelled_chain_does_not_come_back(checkout: Submitting) -> None:
    """Although it has saved, and scontrol would queue a cancelled job again."""
    checkout.stand_in(THREE_LINKS.replace("link=${SLURM_RESTART_COUNT:-0}", "link=1"))
    checkout.edit("slurm-chain.sbatch", **FOUR_NODES)
    job = checkout.submit("slurm-chain.sbatch")
    wait_for_link(checkout, job, 1)
    checkout.cluster.call("scancel", job)
    checkout.cluster.heal()
    assert checkout.cluster.show(job)["JobState"] == "CANCELLED", checkout.output(job)
    assert checkout.cluster.show(job)["Restarts"] == "0"


@pytest.mark.rare
def test_the_time_limits_own_warning_leads_to_a_checkpoint_and_the_next_link_finishes(checkout: Submitting) -> None:
    """Real training, longer than the time limit of three minutes: SLURM warns it after one to two; five in all."""
    checkout.configure("epochs = 0.75\nplacement = 'spread'\nstraggler = {delay = 'constant', delay_mean_s = 1.0}")
    checkout.edit("slurm-chain.sbatch", **ONE_EACH, time="00:03:00", signal="B:USR1@60")
    job = checkout.submit("slurm-chain.sbatch")
    state = checkout.cluster.wait_until(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", within_s=600)
    said = checkout.output(job)
    assert state == "COMPLETED", said + checkout.cluster.told()
    assert "warned: the time is nearly over" in said
    assert "mpisgd: interrupted by SIGUSR1 at clock" in said
    assert f"interrupted, with a checkpoint in results/mpisgd-{job}: it can go on" in said
    assert "link 1 of the chain has ended: the job is queued again" in said
    assert int(checkout.cluster.show(job)["Restarts"]) >= 1
    attempts = tomllib.loads((checkout.run(job) / "config.toml").read_text())["environment"]["attempts"]
    assert len(attempts) == 1 + int(checkout.cluster.show(job)["Restarts"])
    assert (checkout.run(job) / "DONE").exists()
