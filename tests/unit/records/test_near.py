"""States on nodes: what is kept, what is whole, whose it is, and which is the newest of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpisgd.job.run import partners
from mpisgd.job.run.partners import partner_of
from mpisgd.records.checkpoint.checkpoint import Account, seal, way_on
from mpisgd.records.checkpoint.checkpoint import newest as newest_checkpoint
from mpisgd.records.checkpoint.near import Held, Near, newest
from mpisgd.records.log import schema
from tests.unit.fakes import Threads

TOLD = {"schema_version": schema.SCHEMA_VERSION, "attempt": 0, "learners": 2, "model": "mine"}


def account(shard: int, clock: int) -> Account:
    return Account(shard, (4 * shard, 4 * shard + 4), clock, 16 * clock, 1.0, clock, [0, 0], [1, 1], [[0, 1, 1, 1, 1]], [])


def keep(near: Near, shard: int, clock: int, attempt: int = 0) -> None:
    near.write(account(shard, clock), 2, {**TOLD, "attempt": attempt}, {"weights": np.full(4, clock, np.float32)})


@pytest.fixture
def near(tmp_path: Path) -> Near:
    (tmp_path / "root").mkdir()
    return Near(tmp_path / "run", "2026-11-28T00:00:00+00:00", "node1", tmp_path / "root")


def test_the_newest_two_of_each_shard_are_kept(near: Near) -> None:
    for clock in (10, 20, 30):
        keep(near, 0, clock)
    keep(near, 1, 20)
    assert {(each.clock, each.shard) for each in near.held(0)} == {(20, 0), (30, 0), (20, 1)}
    assert not (near.path / "clock-000010").exists()
    near.forget()
    assert near.held(0) == []


def test_what_nodes_hold_of_a_run_that_was_replaced_goes(near: Near, tmp_path: Path) -> None:
    """Else the memory of a node fills with states that nobody asks for any more."""
    root, begun = tmp_path / "root", "2026-11-29T00:00:00+00:00"
    beside = [Near(tmp_path / "run", begun, "a-node1", root), Near(tmp_path / "another", begun, "node1", root)]
    for each in (near, *beside):
        keep(each, 0, 10)
    again = Near(tmp_path / "run", begun, "node1", root)
    keep(again, 0, 2)
    again.forget_replaced()
    assert near.held(0) == []
    assert all(each.held(0) for each in (again, *beside))


def test_what_another_node_sends_is_the_same(near: Near, tmp_path: Path) -> None:
    keep(near, 0, 10)
    other = Near(tmp_path / "run", "2026-11-28T00:00:00+00:00", "node2", tmp_path / "root")
    part, told = (np.array_split(np.fromfile(path, np.uint8), 3) for path in near.files(10, 0))
    other.take(10, 0, part, told)
    assert other.held(0) == near.held(0) == [Held(10, 0, 2, 0)]


def _flip(near: Near) -> None:
    path = near.files(10, 0)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut(near: Near) -> None:
    near.files(10, 0)[0].write_bytes(near.files(10, 0)[0].read_bytes()[:-3])


def _lose(near: Near) -> None:
    near.files(10, 0)[0].unlink()


def _other_account(near: Near) -> None:
    path = near.files(10, 0)[1]
    path.write_text(path.read_text().replace('"clock": 10', '"clock": 11'))


def _other_clock(near: Near) -> None:
    (near.path / "clock-000010").rename(near.path / "clock-000011")


def _open_to_others(near: Near) -> None:
    near.path.chmod(0o755)


def _another_directory(near: Near) -> None:
    near.path.rename(near.path.with_name("elsewhere"))
    near.path.symlink_to(near.path.with_name("elsewhere"))


@pytest.mark.parametrize("spoil", [_flip, _cut, _lose, _other_account, _other_clock, _open_to_others, _another_directory])
def test_what_is_not_whole_or_not_ours_is_not_there(spoil: object, near: Near) -> None:
    keep(near, 0, 10)
    assert near.held(0)
    spoil(near)  # type: ignore[operator]
    assert near.held(0) == []


def test_another_run_in_the_same_directory_and_another_attempt_have_states_of_their_own(near: Near, tmp_path: Path) -> None:
    keep(near, 0, 10)
    assert near.held(1) == []
    later = Near(tmp_path / "run", "2026-11-28T00:00:01+00:00", "node1", tmp_path / "root")
    assert later.path != near.path and later.held(0) == []


def test_a_state_is_refused_where_another_user_could_read_it(near: Near) -> None:
    near.path.mkdir(mode=0o755)
    near.path.chmod(0o777)
    with pytest.raises(PermissionError, match="open to others"):
        keep(near, 0, 10)


def test_states_of_two_nodes_become_a_checkpoint(near: Near, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for shard in (0, 1):
        keep(near, shard, 10)
        near.copy_to(run, 10, shard)
    assert seal(run / "checkpoint" / "clock-000010", 10, 2, 0)
    found = newest_checkpoint(run)
    assert [dataclasses.replace(part.account) for part in found.parts] == [account(0, 10), account(1, 10)]
    assert found.tensors(1)["weights"].tolist() == found.tensors_at(near.files(10, 1)[0], 1)["weights"].tolist() == [10.0] * 4


def test_the_newest_clock_at_which_some_node_has_each_shards_state() -> None:
    one, two = [Held(20, 0, 2, 0), Held(30, 0, 2, 0)], [Held(20, 1, 2, 0), Held(10, 1, 2, 0), Held(10, 0, 2, 0)]
    assert newest([one, [], two], -1) == [(20, [0, 2]), (10, [2, 2])]
    assert newest([one, two], 10) == [(20, [0, 1])]
    assert newest([one, two], 20) == newest([], -1) == []


@pytest.mark.parametrize(
    ("hosts", "shard_ranks", "partners"),
    [
        ("abab", (0, 1), [1, 0]),
        ("aabb", (0, 1), [2, 3]),
        ("aabbcc", (0, 2, 4), [2, 4, 0]),
        ("aaaa", (0, 1), [-1, -1]),
        ("aab", (0, 1), [2, 2]),
        ("abb", (0,), [1]),
    ],
)
def test_a_partner_is_on_another_node(hosts: str, shard_ranks: tuple[int, ...], partners: list[int]) -> None:
    assert [partner_of(shard, shard_ranks, list(hosts)) for shard in range(len(shard_ranks))] == partners


def test_a_run_whose_state_nodes_hold_is_not_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / schema.CONFIG).touch()
    assert way_on(tmp_path).endswith("has no complete checkpoint to go on from: begin anew with --overwrite")
    assert way_on(tmp_path, 7, "again", near=True) == f"to go on from the newest state on the nodes, or {tmp_path}: again"
    (tmp_path / schema.DONE).touch()
    assert way_on(tmp_path, 7, "again", near=True) == ""


def test_a_state_that_cannot_be_written_to_the_directory_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two nodes one cannot write; all ranks go on, to an older state or without."""
    run = tmp_path / "run"
    run.mkdir()
    (run / schema.CONFIG).write_text('shards = 2\n[environment]\nlearners = 2\nstarted = "then"\n')
    (tmp_path / "root").mkdir()
    nears = [Near(run, "then", f"node{rank}", tmp_path / "root") for rank in (0, 1)]
    for clock in (10, 20):
        for shard, near in enumerate(nears):
            keep(near, shard, clock)
    comm = Threads(2)
    copy_to = Near.copy_to

    def full(near: Near, run: Path, clock: int, shard: int) -> None:
        if (clock, shard) == (20, 1):
            raise OSError("no space left")
        copy_to(near, run, clock, shard)

    monkeypatch.setattr(Near, "copy_to", full)
    found = comm.everywhere(lambda rank: partners.bring_home(comm, nears[rank], run, ["node0", "node1"], (0, 1)))  # type: ignore[arg-type]
    assert [clock for clock, _ in found] == [10, 10]
    assert newest_checkpoint(run).clock == 10
    assert "cannot be written to the run's directory: no space left" in capsys.readouterr().err


def test_a_clock_that_goes_while_states_are_listed_is_not_there(near: Near, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of an attempt before may still live: an exception on one rank would leave the others waiting."""
    for clock in (10, 20):
        keep(near, 0, clock)
    listed = Path.iterdir

    def going(path: Path) -> Iterator[Path]:
        if path.name == "clock-000020":
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", going)
    assert [each.clock for each in near.held(0)] == [10]
