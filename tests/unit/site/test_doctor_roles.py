"""What the doctor says of a configuration: the role of each rank, which ranks are one learner together, and who stands by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mpisgd.cli import doctor as cli
from mpisgd.config import Config, FaultOptions
from mpisgd.liveness import cores
from mpisgd.site import rolemap
from mpisgd.site.facts import Finding, HostFacts, RankFacts, Survey


def survey(hosts: str, count: int = 8, gpus: int = 0) -> Survey:
    facts = tuple(RankFacts(host=host, cores=frozenset(range(count)), granted=count, gpus=gpus) for host in hosts)
    return Survey(facts, {host: HostFacts(machine_cores=count) for host in hosts})


def found(check: Any, hosts: str, config: Config, count: int = 8, gpus: int = 0) -> Finding:
    finding = check(rolemap.with_job(survey(hosts, count, gpus), config))
    assert isinstance(finding, Finding)
    return finding


@pytest.fixture(autouse=True)
def one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "domains", lambda cpus: (tuple(frozenset({each}) for each in sorted(cpus)),))


def test_the_map_of_ranks_to_cores_and_gpus() -> None:
    config = Config(shards=2, binding="roles", device="cuda")
    bound = found(rolemap.check_roles, "aaabbb", config, 5, gpus=2)
    assert bound.level == "ok"
    assert bound.text == (
        "a: rank 0, shard 0, core 0; rank 1, learner 0, core 1-2, GPU 0; rank 2, learner 1, core 3-4, GPU 1"
        " | b: rank 3, shard 1, core 0; rank 4, learner 2, core 1-2, GPU 0; rank 5, learner 3, core 3-4, GPU 1"
    )
    unbound = found(rolemap.check_roles, "aaa", dataclasses.replace(config, binding="none", shards=1, device="cpu"), 5)
    assert unbound.text == "a: rank 0, shard 0, core 0-4; rank 1, learner 0, core 0-4; rank 2, learner 1, core 0-4"


def test_shards_that_stay_on_the_host_take_no_gpu() -> None:
    config = Config(shards=1, shard_device="cuda")
    taken = found(rolemap.check_roles, "aaa", config, gpus=2)
    assert taken.text.count("GPU") == 1
    assert "GPU" not in found(rolemap.check_roles, "aaa", dataclasses.replace(config, pull_format="bfloat16"), gpus=2).text


def test_a_node_with_fewer_cores_than_ranks_and_a_job_that_cannot_be() -> None:
    crowded = found(rolemap.check_roles, "aaa", Config(binding="roles"), 2)
    assert crowded.level == "warning"
    assert crowded.text.startswith(
        "binding = 'roles', but a has fewer cores than ranks: the ranks share all cores; a: rank 0, shard 0, core 0-1;"
    )
    refused = found(rolemap.check_roles, "aaa", Config(shards=3), 2)
    assert refused.level == "fault"
    assert "too few ranks: found 3, needed at least 4" in refused.text


def test_without_a_configuration_it_says_how_to_ask() -> None:
    alone = [each for check in rolemap.CHECKS if (each := check(survey("a"))) is not None]
    assert [each.text for each in alone] == ["not asked: mpisgd doctor job.toml shows the role, the cores and the GPU of each rank"]


# ---------------------------------------------------------------------------------------------------------------- groups


def test_the_map_has_the_stages_of_each_learner() -> None:
    config = Config(shards=2, group_size=2, evaluator=True, binding="roles", placement="packed")
    assert found(rolemap.check_roles, "aaaaaab", config).text == (
        "a: rank 0, shard 0, core 0; rank 1, shard 1, core 1; rank 2, stage 0 of learner 0, core 2;"
        " rank 3, stage 1 of learner 0, core 3; rank 4, stage 0 of learner 1, core 4; rank 5, stage 1 of learner 1, core 5"
        " | b: rank 6, evaluator, core 0-7"
    )


@pytest.mark.parametrize(
    ("hosts", "size", "text", "mend"),
    [
        ("aabbcc", 2, "2 of 2 ranks, each on one node: learner 0 = rank 2-3 on b; learner 1 = rank 4-5 on c", ""),
        # Not neighbours, but on one node, each.
        ("ababab", 2, "2 of 2 ranks, each on one node: learner 0 = rank 2, 4 on a; learner 1 = rank 3, 5 on b", ""),
        (
            "aaaaabbb",
            2,
            "3 of 2 ranks, 1 on several nodes, with passes across the network: learner 0 = rank 2-3 on a;"
            " learner 1 = rank 4 on a, 7 on b; learner 2 = rank 5-6 on b",
            "let each node have 2 ranks that compute, or a multiple: found 3, 3",
        ),
        (
            "aaaabb",
            3,
            "1 of 3 ranks, 1 on several nodes, with passes across the network: learner 0 = rank 3 on a, 4-5 on b",
            "let each node have 3 ranks that compute, or a multiple: found 1, 2",
        ),
    ],
)
def test_which_ranks_are_a_learner_and_whether_on_one_node(hosts: str, size: int, text: str, mend: str) -> None:
    said = found(rolemap.check_groups, hosts, Config(shards=size, group_size=size, placement="packed"))
    assert (said.level, said.text, said.mend) == ("warning" if mend else "ok", text, mend)


def test_of_many_groups_those_that_are_apart_are_told() -> None:
    hosts = "aa" + "a" * 39 + "b"  # the last group alone is on both
    text = found(rolemap.check_groups, hosts, Config(shards=2, group_size=2, placement="packed")).text
    assert text.startswith("20 of 2 ranks, 1 on several nodes")
    assert "learner 7 = rank 16-17 on a; learner 19 = rank 40 on a, 41 on b; and 11 more" in text
    assert "learner 8 =" not in text


def test_ranks_that_do_not_divide_into_groups_are_refused() -> None:
    said = found(rolemap.check_roles, "aaaaa", Config(shards=2, group_size=2))
    assert said.level == "fault"
    assert "3 computing ranks do not divide into groups of 2" in said.text


@pytest.mark.parametrize("config", [Config(), Config(shards=3, group_size=2)])  # no groups; none that can be
def test_where_there_are_no_groups_nothing_is_said_of_them(config: Config) -> None:
    assert rolemap.check_groups(rolemap.with_job(survey("aaaa"), config)) is None


def test_a_launcher_that_tells_of_no_failures_is_a_fault_where_they_are_to_be_survived() -> None:
    said = found(rolemap.check_failures, "aaaa", Config(faults=FaultOptions(mode="tolerant")))
    assert said.level == "fault"
    assert "mpirun --with-ft ulfm" in said.mend
    assert said.text.startswith("faults.mode = 'tolerant': expected 'auto'")


def test_otherwise_it_says_what_becomes_of_the_run() -> None:
    said = found(rolemap.check_failures, "aaaa", Config())
    assert (said.level, said.text) == ("ok", "fail-fast: ends when a rank dies")


# ------------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the doctor prints when it is asked with these words about six ranks of two nodes; and where it would try files."""
    import mpisgd.site.doctor
    import mpisgd.site.survey

    def examine(directory: Path, timeout_s: float) -> tuple[Survey, int]:
        return dataclasses.replace(survey("aaabbb"), directory=f"{directory} {timeout_s:g}"), 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mpisgd.site.survey, "examine", examine)
    monkeypatch.setattr(mpisgd.site.doctor, "CHECKS", (*rolemap.CHECKS, lambda seen: Finding("files", "ok", seen.directory)))
    (tmp_path / "job.toml").write_text("shards = 2\nplacement = 'packed'\n")

    def run(*words: str) -> str:
        cli.main(list(words))
        return capsys.readouterr().out

    return run


def test_options_of_a_run_follow_its_file_or_stand_for_it(asked: Any) -> None:
    groups = "2 of 2 ranks, 1 on several nodes"
    assert groups not in asked("job.toml")
    assert groups in asked("job.toml", "--group-size", "2")
    assert groups in asked("--shards=2", "--timeout-s", "7", "--group-size", "2", "--dir=runs", "--placement", "packed")
    assert "  files     runs 7\n" in asked("--dir", "runs", "--timeout-s=7", "job.toml")
    assert "not asked" in asked()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--directory", "x"], "--dir"),
        (["job.toml", "--time-out-s", "x"], "--timeout-s"),
        (["--timeout-s", "soon"], "soon"),
        (["job.toml", "--group-sizes", "2"], "--group-sizes"),
    ],
)
def test_an_option_that_nobody_has_is_refused(asked: Any, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        asked(*words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
