"""What an interrupted run says of itself, and with which status it is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from mpisgd.base.errors import EXIT_INTERRUPTED, CheckpointError, RunInterrupted
from mpisgd.job import interruption
from mpisgd.liveness.guard import failing_fast
from mpisgd.records.checkpoint import checkpoint as disk
from tests.unit.fakes import Threads
from tests.unit.records.test_checkpoint import checkpoints, go_on, make_update, take
from tests.unit.update.give import give


def test_the_last_line_names_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    writers = [checkpoints(tmp_path, make_update(), shard, 2) for shard in (0, 1)]
    for writer in writers:
        take(writer, 1200)
    take(writers[0], 1234)  # the other shard came to 1236 only
    take(writers[1], 1236)
    line = interruption.farewell(tmp_path, signal.SIGUSR1, (1234, 1236), "mpirun mpisgd train --resume run")
    assert line == (
        "mpisgd: interrupted by SIGUSR1 at clock 1,236, checkpoint at clock 1,200 (36 updates are lost);"
        " go on with: mpirun mpisgd train --resume run"
    )
    for writer in writers:
        take(writer, 1240)
    line = interruption.farewell(tmp_path, signal.SIGTERM, (1240, 1240), "")
    assert "interrupted by SIGTERM at clock 1,240, checkpoint at clock 1,240 (nothing is lost)" in line


def test_where_nothing_is_complete_it_is_a_failure(tmp_path: Path) -> None:
    take(checkpoints(tmp_path, make_update(), 0, 2), 30)
    with pytest.raises(CheckpointError, match=r"interrupted by SIGTERM at clock 31, and .* has no complete checkpoint"):
        interruption.farewell(tmp_path, signal.SIGTERM, (30, 31), "")


def test_where_nodes_may_hold_a_state_the_run_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[checkpoint]\npartner_updates = 5\n")
    with pytest.raises(CheckpointError, match="go on from the newest state held by nodes with: mpirun again"):
        interruption.farewell(tmp_path, signal.SIGTERM, (30, 31), "mpirun again")
    said = interruption.last_words(tmp_path, signal.SIGTERM, "mpirun again")
    assert said.endswith("and " + f"{tmp_path} has no checkpoint: go on from the newest state held by nodes with: mpirun again")


def test_it_passes_to_whoever_started_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    comm = Threads(1)
    with pytest.raises(SystemExit) as left, failing_fast(comm, lambda: "shard 0"):  # type: ignore[arg-type]
        raise RunInterrupted("at clock 3")
    assert left.value.code == EXIT_INTERRUPTED == 85
    assert str(left.value) == "at clock 3"
    assert (comm.aborted, capsys.readouterr().err) == ([], "")


def test_the_last_checkpoint_is_written_without_a_copy(tmp_path: Path) -> None:
    """Nor had there been any room for one, where only a signal asks for a checkpoint."""
    update = make_update()
    writer = checkpoints(tmp_path, update)
    writer._every = 0
    assert not any(writer.due(clock) for clock in range(30))
    assert writer._thread is None
    assert writer._copies == {}
    go_on(update, 0, 3)
    account = {"received": 1, "applied_seq": [0], "next_seq": [1], "rows": [0] * 4, "snapshots": [], "diverged": False}
    writer.take(clock=3, now_s=1.0, last=True, **account)  # type: ignore[arg-type]
    writer.wait()
    saved = disk.newest(tmp_path).tensors(0)
    assert saved.keys() == update.state().keys()
    for name, tensor in update.state().items():
        assert torch.equal(torch.from_numpy(saved[name]), tensor)
        assert tensor.dim() == 0 or writer._copies[name].ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("more", [1, 2, 3])
def test_the_state_is_that_of_the_last_update_whatever_was_summed_since(more: int) -> None:
    """DC-ASGD-a remembers every gradient that it corrects, also of a sum that will not be finished."""
    update = make_update(dc=0.5)
    go_on(update, 0, 4)
    before = {name: tensor.clone() for name, tensor in update.state().items()}
    assert "compensation" in before
    update.compensation.given(0, 4)  # type: ignore[union-attr]
    for _ in range(more):
        give(update, 1.0, 1.0, 4, timestamp=4)
    for name, tensor in update.state().items():
        assert torch.equal(tensor, before[name]), name
    update.step()
    assert not torch.equal(update.state()["compensation"], before["compensation"])


def test_the_last_words_say_what_there_is_already(tmp_path: Path) -> None:
    """The launcher leaves a quarter of a second: nothing may come after this line."""
    said = interruption.last_words(tmp_path, signal.SIGTERM, "mpirun mpisgd train --resume run")
    assert "writing a checkpoint" in said and f"{tmp_path} has no checkpoint: begin anew with --overwrite" in said
    writer = checkpoints(tmp_path, make_update())
    take(writer, 1230)
    said = interruption.last_words(tmp_path, signal.SIGTERM, "mpirun mpisgd train --resume run")
    assert "the newest checkpoint is of clock 1,230; go on with: mpirun mpisgd train --resume run" in said
