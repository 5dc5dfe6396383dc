"""Cores of a node, dealt by role: what each rank has, from a machine's own files to the system's answer."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.exchange.roles import assign
from mpisgd.liveness import cores
from mpisgd.liveness.ranks import look_around
from tests.unit.fakes import Threads


def machine(root: Path, *domains: str, threads: int = 1) -> Path:
    """/sys/devices/system of a machine: the cores of each domain; of hardware threads, core c has c, c + cores, ..."""
    numbers = [[int(each) for each in domain.split()] for domain in domains]
    count = sum(map(len, numbers))
    for number, own in enumerate(numbers):
        folder = root / "node" / f"node{number}"
        folder.mkdir(parents=True)
        every = [core + count * each for each in range(threads) for core in own]
        (folder / "cpulist").write_text(",".join(map(str, every)) + "\n")
        for cpu in every:
            topology = root / "cpu" / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            siblings = [cpu % count + count * each for each in range(threads)]
            (topology / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
    return root


def dealt(places: tuple[cores.Domain, ...], roles: str) -> str:
    """`s` serves, `l` computes: "0 | 1 2" is what two ranks have."""
    shares = cores.deal(places, [role == "l" for role in roles])
    return " | ".join(" ".join(str(cpu) for core in share for cpu in sorted(core)) for share in shares)


CASES = [
    ("a shard and two learners", ["0 1 2 3 4"], "sll", "0 | 1 2 | 3 4"),
    ("shards among learners", ["0 1 2 3 4 5"], "lsls", "2 3 | 0 | 4 5 | 1"),
    ("as many cores as ranks", ["0 1 2"], "sll", "0 | 1 | 2"),
    ("fewer cores than ranks: nobody is bound", ["0 1"], "sll", " |  | "),
    ("what does not divide stays free", ["0 1 2 3 4 5"], "sll", "0 | 1 2 | 3 4"),
    ("no learner crosses a domain", ["0 1 2 3", "4 5 6 7"], "slll", "0 | 1 2 | 4 5 | 6 7"),
    ("two shards, each in a domain of its own", ["0 1 2 3", "4 5 6 7"], "ssll", "0 | 4 | 1 2 3 | 5 6 7"),
    ("one learner has all domains", ["0 1 2 3", "4 5 6 7"], "sl", "0 | 1 2 3 4 5 6 7"),
    ("shards alone", ["0 1 2 3"], "ss", "0 | 1"),
    ("learners alone", ["0 1 2 3"], "ll", "0 1 | 2 3"),
]


@pytest.mark.parametrize(("domains", "roles", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_each_rank_has(domains: list[str], roles: str, expected: str, tmp_path: Path) -> None:
    allowed = frozenset(int(core) for domain in domains for core in domain.split())
    assert dealt(cores.domains(allowed, machine(tmp_path, *domains)), roles) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.booleans(), min_size=1, max_size=12))
def test_no_core_is_dealt_twice_and_who_computes_has_as_much_as_the_others(sizes: list[int], computes: list[bool]) -> None:
    numbers = iter(range(100))
    places = tuple(tuple(frozenset({next(numbers)}) for _ in range(size)) for size in sizes)
    shares = cores.deal(places, computes)
    given_out = [core for share in shares for core in share]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= {core for place in places for core in place}
    if sum(sizes) < len(computes):
        assert not given_out
        return
    assert all(len(share) == 1 for share, computing in zip(shares, computes, strict=True) if not computing)
    working = [share for share, computing in zip(shares, computes, strict=True) if computing]
    assert len(set(map(len, working))) <= 1
    assert all(working)
    if len(working) >= len(sizes):
        assert all(any(set(share) <= set(place) for place in places) for share in working)


def test_hardware_threads_of_a_core_go_together(tmp_path: Path) -> None:
    root = machine(tmp_path, "0 1 2", "3 4 5", threads=2)
    found = cores.domains(frozenset(range(12)), root)
    assert found == (
        (frozenset({0, 6}), frozenset({1, 7}), frozenset({2, 8})),
        (frozenset({3, 9}), frozenset({4, 10}), frozenset({5, 11})),
    )
    assert cores.domains(frozenset({1, 3, 9}), root) == ((frozenset({1}),), (frozenset({3, 9}),)), (
        "what the job may use, and no more"
    )


def test_a_system_that_does_not_say_has_one_domain(tmp_path: Path) -> None:
    assert cores.domains(frozenset({4, 2}), tmp_path) == ((frozenset({2}), frozenset({4})),)


def bound(monkeypatch: pytest.MonkeyPatch, size: int, allowed: set[int], take=lambda share: "") -> list:
    """Ranks that share a node, each as it is after it was bound, and what is told."""
    comm = Threads(size)
    for module in ("cores", "ranks"):
        monkeypatch.setattr(f"mpisgd.liveness.{module}.own_cores", lambda: frozenset(allowed))
    monkeypatch.setattr(cores, "domains", lambda cpus: (tuple(frozenset({each}) for each in sorted(cpus)),))
    monkeypatch.setattr(cores, "take", take)
    roles = assign(size, shards=1, evaluator=False, placement="packed", hosts=["here"] * size)
    return comm.everywhere(lambda rank: cores.bind(comm, dataclasses.replace(look_around(comm), rank=rank), roles))  # type: ignore[arg-type]


def test_a_learner_has_a_thread_for_each_of_its_cores_and_a_shard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bound(monkeypatch, 3, {0, 1, 2, 3, 4})
    assert [told for _, told in found] == ["", "", ""]
    assert [ranks.threads for ranks, _ in found] == [1, 2, 2]
    assert [ranks.threads_of(2) for ranks, _ in found] == [2, 2, 2]


def test_more_ranks_than_cores_are_left_as_they_were_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bound(monkeypatch, 3, {0, 1}, take=lambda share: pytest.fail("nothing is to be bound"))
    (told,) = {told for _, told in found}
    assert told.startswith("binding = 'roles': ")
    assert told.endswith(" has 2 core(s) for 3 ranks: all ranks share all cores")
    assert [ranks.threads for ranks, _ in found] == [1, 1, 1]


def test_what_cannot_be_bound_is_told_and_has_its_fair_part_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bound(monkeypatch, 3, {0, 1, 2, 3, 4, 5, 6}, take=lambda share: "no" if len(share) > 1 else "")
    assert {told for _, told in found} == {"binding = 'roles': no"}
    assert [ranks.threads for ranks, _ in found] == [1, 2, 2]


BINDS = """
import os, threading
from pathlib import Path
from mpisgd.liveness import cores
stays, known = threading.Event(), threading.Event()
threading.Thread(target=lambda: (known.set(), stays.wait()), daemon=True).start()
known.wait()
first = min(os.sched_getaffinity(0))
print(repr(cores.take((frozenset({first}),))))
print({tuple(os.sched_getaffinity(int(each.name))) for each in Path("/proc/self/task").iterdir()} == {(first,)})
print(cores.take((frozenset({4095}),)).partition(" could ")[2])
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no such call here")
def test_a_process_binds_all_its_threads_and_says_what_the_system_refuses() -> None:
    done = subprocess.run([sys.executable, "-c", BINDS], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == ["''", "True", "not be bound to core 4095: Invalid argument"]
