"""A run's directory: claimed once, never replaced unless it is a run and that was asked for, and DONE only when it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpisgd.base.errors import ConfigError, DataError, StorageError
from mpisgd.config import config_file
from mpisgd.records import directory
from mpisgd.records.lock import Lock
from mpisgd.records.log import schema
from mpisgd.records.log.reader import Run
from tests.unit.fabricate import run_of


def test_done_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    run_of(tmp_path / "run")
    run = Run(tmp_path / "run")
    with (
        monkeypatch.context() as patched,
        pytest.raises(StorageError, match="DONE cannot be written: No space left on device: make room"),
    ):
        patched.setattr("mpisgd.base.durable.os.fsync", full)
        directory.mark_done(run.path, {"clock": [30]})
    assert run.done is None
    directory.mark_done(run.path, {"clock": [30], "diverged": False})
    assert run.done == {"clock": [30], "diverged": False}
    assert json.loads((run.path / schema.DONE).read_text()).items() > run.done.items()
    assert not list(run.path.glob(".DONE*"))
    (run.path / schema.DONE).write_text('{"clock": [30')
    with pytest.raises(DataError, match="DONE is damaged"):
        _ = run.done


def test_a_directory_is_claimed_once(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    directory.claim(path, overwrite=False)
    assert path.is_dir()
    with pytest.raises(ConfigError, match=r"out = '.*/a/b' exists: choose another, or replace the directory by --overwrite"):
        directory.claim(path, overwrite=False)


def test_only_a_run_is_overwritten(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    (tmp_path / "run" / "report").mkdir()
    with pytest.raises(ConfigError, match="is being written by another job"):
        directory.claim(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / schema.CONFIG).exists(), "before anything of it is removed"
    (tmp_path / "run" / schema.LOCK).unlink()
    directory.claim(tmp_path / "run", overwrite=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [schema.LOCK]


def test_a_run_that_was_killed_before_its_config_toml(tmp_path: Path) -> None:
    """At any moment between mkdir and then; what resumes it is told to begin anew."""
    run = tmp_path / "run"
    for left in ([], [".LOCK.host.7"], [schema.LOCK, ".LOCK.host.7", ".config.toml.host.7"]):
        run.mkdir()
        for name in left:
            (run / name).write_text("")
        if schema.LOCK in left:  # of a process that is no more
            pid = os.fork()
            if pid == 0:
                (run / schema.LOCK).unlink()
                Lock(run)
                os._exit(0)
            os.waitpid(pid, 0)
            with pytest.raises(ConfigError, match="the run was killed before writing the file: begin anew with --overwrite"):
                config_file.of_run(run)
        with pytest.raises(ConfigError, match="replace the directory by --overwrite"):
            directory.claim(run, overwrite=False)
        directory.claim(run, overwrite=True).release()
        assert not list(run.iterdir())
        run.rmdir()


@pytest.mark.parametrize("config", [None, "", "mu = 4\nshards = 2\n", "not TOML"])
def test_a_folder_that_is_no_run_is_never_removed(config: str | None, tmp_path: Path) -> None:
    """Also not one in which the user keeps a job file that happens to be called config.toml."""
    path = tmp_path / "experiments"
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    if config is not None:
        (path / schema.CONFIG).write_text(config)
    with pytest.raises(ConfigError, match="is no run directory of mpisgd: not replaced"):
        directory.claim(path, overwrite=True)
    assert (path / "thesis.tex").read_text() == "years of work"


def test_a_run_that_another_is_replacing_is_named_as_his(tmp_path: Path) -> None:
    """Meanwhile it has no config.toml; where nobody holds the lock, it is not ours to replace, and is left as it was."""
    (tmp_path / "mine.txt").write_text("")
    other = Lock(tmp_path)
    with pytest.raises(ConfigError, match="is being written by another job"):
        directory.claim(tmp_path, overwrite=True)
    other.release()
    with pytest.raises(ConfigError, match="is no run directory of mpisgd: not replaced"):
        directory.claim(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("place", ["file", "file/run"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_way(place: str, overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=f"out = '{tmp_path}/{place}'"):
        directory.claim(tmp_path / place, overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_configuration_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out = '.*nowhere' cannot be written: .*No such file"):
        directory.write_config(tmp_path / "nowhere", "mu = 4\n")
