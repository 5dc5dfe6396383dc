"""What ranks know of their nodes: threads, politeness, and jobs of one rank that were meant to be one of many (TRAPS 4, 7)."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpisgd.base.errors import ConfigError
from mpisgd.comm.mpi import ulfm
from mpisgd.job.run import start
from mpisgd.liveness import guard, ranks
from mpisgd.liveness.ranks import Ranks, connections, look_around, place_to_speak, refuse_singletons
from tests.unit.fakes import Threads

VARIABLES = guard.SIZE_VARIABLES


@pytest.mark.parametrize(
    ("hosts", "cores", "own_cores", "oversubscribed", "threads"),
    [
        ("a", 8, 8, False, 8),
        ("aaaa", 8, 8, False, 2),
        ("aabbbb", 8, 8, False, 4),
        ("aaaaa", 8, 8, False, 1),
        ("aaaa", 4, 4, False, 1),
        ("aaaaa", 4, 4, True, 1),
        ("aabbb", 2, 2, False, 1),
        ("aaaa", 8, 1, False, 1),  # bound to one core each
        ("aab", 64, 4, False, 4),
    ],
)
def test_threads_are_shared_fairly(hosts: str, cores: int, own_cores: int, oversubscribed: bool, threads: int) -> None:
    some = Ranks(size=len(hosts), rank=0, hosts=tuple(hosts), cores=cores, own_cores=own_cores, pids=())
    assert some.ranks_on_node == hosts.count("a")
    assert some.ranks_per_core == hosts.count("a") / cores
    assert (some.oversubscribed, some.threads) == (oversubscribed, threads)


@pytest.mark.parametrize(
    ("hosts", "cores", "own_cores", "servers", "threads"),
    [
        ("aaa", 16, 16, (0,), 14),
        ("aaabbb", 16, 16, (0, 3), 14),
        ("aaaa", 16, 16, (0, 1), 7),
        ("aaaa", 8, 2, (0,), 2),  # bound to its cores
        ("aaaaa", 4, 4, (0,), 1),
        ("aaaa", 16, 16, (0, 1, 2, 3), 4),  # an allreduce: each rank is a shard
    ],
)
def test_host_shards_beside_gpus_have_the_free_cores(
    hosts: str, cores: int, own_cores: int, servers: tuple[int, ...], threads: int
) -> None:
    some = Ranks(size=len(hosts), rank=0, hosts=tuple(hosts), cores=cores, own_cores=own_cores, pids=())
    assert some.threads_beside_gpus(servers) == threads


def test_ranks_tell_each_other_their_hosts_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores of a node are the union of what its ranks may use: bound ranks see but their own."""
    comm = Threads(4)
    monkeypatch.setattr(ranks.socket, "gethostname", lambda: "aabb"[comm.Get_rank()])
    monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda _: [{0, 1}, {2, 3}, {0}, {0}][comm.Get_rank()])
    found = comm.everywhere(lambda rank: look_around(comm))  # type: ignore[arg-type]
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert {each.hosts for each in found} == {("a", "a", "b", "b")}
    assert [(each.size, each.cores, each.own_cores) for each in found] == [(4, 4, 2), (4, 4, 2), (4, 1, 1), (4, 1, 1)]
    assert [each.oversubscribed for each in found] == [False, False, True, True]


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize(
    ("size", "launched", "refused"), [(1, "8", True), (1, "1", False), (8, "8", False), (1, "", False), (1, "x", False)]
)
def test_a_job_of_one_rank_that_was_started_as_many_is_refused(
    name: str, size: int, launched: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (*VARIABLES, *guard.RANK_VARIABLES):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, launched)
    some = Ranks(size=size, rank=0, hosts=("a",) * size, cores=1, own_cores=1, pids=())
    if not refused:
        refuse_singletons(some)
        return
    with pytest.raises(ConfigError, match=f"this MPI sees 1 rank, but {name} = 8: the launcher and the MPI .* do not belong"):
        refuse_singletons(some)


ALONE = Ranks(size=1, rank=0, hosts=("a",), cores=1, own_cores=1, pids=())
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "18", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (BATCH_SCRIPT, ""),
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, ""),  # the shell of salloc
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "18"}, "SLURM_STEP_NUM_TASKS = 18"),
        (BATCH_SCRIPT | {"SLURM_PROCID": "3"}, "SLURM_PROCID = 3"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, ""),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "x"}, "PMIX_RANK = 2"),
        ({"ALPS_APP_PE": "5"}, "ALPS_APP_PE = 5"),
        ({"ALPS_APP_PE": "0", "MPISGD_RANKS": "6"}, "MPISGD_RANKS = 6"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE = 4"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "14"}, "JSM_NAMESPACE_SIZE = 14"),
        ({"PALS_RANKID": "0", "PMI_SIZE": "4"}, "PMI_SIZE = 4"),
        ({"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "18"}, ""),
        ({"PBS_JOBID": "7.server", "NCPUS": "9"}, ""),
        ({"FLUX_URI": "local:///x"}, ""),
    ],
)
def test_a_batch_script_is_no_rank_and_a_rank_that_is_alone_is_told_by_each_launcher(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (*VARIABLES, *guard.RANK_VARIABLES):
        monkeypatch.delenv(each, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if said:
        with pytest.raises(ConfigError, match=f"this MPI sees 1 rank, but {said}: .* mpisgd doctor names the launchers that fit"):
            refuse_singletons(ALONE)
    else:
        refuse_singletons(ALONE)
        assert guard.launched_size() == 1


def test_torchrun_starts_processes_of_which_mpi_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    alone = Ranks(size=1, rank=0, hosts=("a",), cores=1, own_cores=1, pids=())
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 4: torchrun, .*; start the ranks by mpirun .*-n 4 mpisgd train"):
        refuse_singletons(alone)
    monkeypatch.delenv("LOCAL_RANK")  # somebody's own variable, without torchrun's others
    refuse_singletons(alone)


@pytest.mark.parametrize("per_node", [1, 2, 32])
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_one_rank_speaks_of_a_node_that_is_gone(nodes: int, per_node: int) -> None:
    """Turns a second apart for the first, which end the job; the job waits for a dead node's turns on no other."""
    hosts = [f"node{rank // per_node}" for rank in range(nodes * per_node)]
    node_0 = set(range(per_node)) if nodes > 1 else set()
    others = set(range(1, len(hosts)))
    for alive in (others, others - node_0):
        turns = sorted(ulfm.turn_s(place_to_speak(rank, hosts, {0}), 1.0) for rank in alive)
        assert len(set(turns)) == len(turns)
        assert not turns or turns[0] == 0.0
        assert sum(turn < 1.0 for turn in turns) <= 1
        assert all(turn <= 12.0 for turn in turns)


def test_nodes_take_turns_to_speak() -> None:
    hosts = "aabbcc"
    order = lambda silent: sorted(  # noqa: E731
        (rank for rank in range(6) if rank not in silent), key=lambda rank: place_to_speak(rank, hosts, silent)
    )
    assert order({0}) == [2, 4, 3, 5, 1]
    assert order({2, 3}) == [0, 4, 1, 5]
    assert order({5}) == [0, 2, 1, 3, 4]


def test_a_rank_has_as_many_connections_as_ranks_elsewhere_may_make() -> None:
    hosts = [f"node{rank // 64}" for rank in range(4096)]
    shards = range(0, 4096, 64)
    assert [connections(rank, hosts, shards) for rank in (0, 64, 1, 4095)] == [4032, 4032, 1 + 64 + 26, 91]
    assert connections(1, ["a", "a"], [0]) == 0
    assert connections(1, ["a", "b"], [0]) == 1


LIMITED = """
import resource, sys
from mpisgd.liveness.ranks import make_room
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(make_room(connections) or "enough", resource.getrlimit(resource.RLIMIT_NOFILE)[0], sep="|")
"""


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "said"),
    [
        (256, 4096, 0, "enough|256"),
        (256, 4096, 10, "enough|256"),
        (256, 4096, 1000, r"enough|11\d\d"),
        (256, 512, 1000, r"may need 1,1\d\d open files and connections, and may have 512|512"),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(soft: int, hard: int, connections: int, said: str) -> None:
    words = [sys.executable, "-c", LIMITED, *map(str, (soft, hard, connections))]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    assert re.fullmatch(said.replace("|", r"\|"), found), found


def test_who_has_too_few_is_told_by_rank_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    comm = Threads(4)
    monkeypatch.setattr(start, "make_room", lambda count: f"may need {count}" if comm.Get_rank() != 2 else "")

    def make_room(rank: int) -> None:
        begun = SimpleNamespace(comm=comm, _rank=rank, ranks=_four(rank), roles=SimpleNamespace(shard_ranks=(0, 2)))
        start.Start._make_room(begun)  # type: ignore[arg-type]

    comm.everywhere(make_room)
    assert "rank 0-1, 3 may need 3: over TCP, connections would fail; raise the hard limit" in capsys.readouterr().err


def _four(rank: int) -> Ranks:
    return Ranks(size=4, rank=rank, hosts=tuple("abcd"), cores=1, own_cores=1, pids=())
