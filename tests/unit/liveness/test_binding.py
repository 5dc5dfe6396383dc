"""Ranks that are bound to too few cores while others are idle: told at the start of a run, and by the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpisgd.liveness import ranks
from mpisgd.liveness.ranks import look_around
from mpisgd.site import doctor
from mpisgd.site.facts import HostFacts, RankFacts, Survey
from tests.unit.fakes import Threads

CASES = [
    ("a core for each", "aaaa", ["0", "1", "2", "3"], 4, ""),
    ("bound to nothing", "aaaa", ["0123"] * 4, 4, ""),
    ("more ranks than the job has cores", "aaa", ["01"] * 3, 2, ""),
    ("each alone on its host", "ab", ["0", "0"], 64, ""),
    ("all on core 0", "aaaa", ["0"] * 4, 64, "rank 0-3: all 4 are bound to core 0 of a, where 64 may be used"),
    ("all on two", "bbaaa", ["0", "1", "01", "01", "01"], 8, "rank 2-4: all 3 are bound to cores 0-1 of a, where 8 may be used"),
    ("two on one", "aaa", ["0", "0", "123"], 4, "rank 0-1 are bound to core 0 of a, where 3 ranks have 4 cores"),
    ("three on two", "aaaa", ["01", "01", "23", "01"], 4, "rank 0-1, 3 are bound to cores 0-1 of a, where 4 ranks have 4 cores"),
]


@pytest.mark.parametrize(("hosts", "cores", "granted", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_who_is_bound_badly(hosts: str, cores: list[str], granted: int, said: str) -> None:
    sets = [frozenset(map(int, each)) for each in cores]
    assert ranks.complaint(list(hosts), sets, [granted] * len(hosts)) == said
    facts = tuple(RankFacts(host=host, cores=each, granted=granted) for host, each in zip(hosts, sets, strict=True))
    found = doctor.check_binding(Survey(facts, {host: HostFacts(machine_cores=64) for host in hosts}))
    assert (found.level, found.mend) == (("warning", ranks.MEND) if said else ("ok", ""))
    assert found.text.startswith(said)
    assert f"{hosts[0]}: rank 0" in found.text, "the map is there all the same"


def test_all_ranks_know_it_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Threads(3)
    monkeypatch.setattr(ranks.socket, "gethostname", lambda: "n1")
    monkeypatch.setattr(ranks, "own_cores", lambda: frozenset({0}))
    monkeypatch.setattr(ranks, "granted_cores", lambda: 16)
    found = comm.everywhere(lambda rank: look_around(comm))  # type: ignore[arg-type]
    assert {each.badly_bound for each in found} == {"rank 0-2: all 3 are bound to core 0 of n1, where 16 may be used"}


@pytest.mark.parametrize(("text", "count"), [("0-3,8\n", 5), ("7", 1), ("", None), ("x", None)])
def test_what_the_job_may_use_is_what_its_control_group_says(tmp_path: Path, text: str, count: int | None) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpuset.cpus.effective").write_text(text)
    (tmp_path / "membership").write_text("0::/job\n")
    assert ranks.granted_cores(tmp_path, tmp_path / "membership") == (count or ranks.os.cpu_count())
    assert ranks.granted_cores(tmp_path, tmp_path / "nowhere") == ranks.os.cpu_count()
