"""What ranks say goes to standard error as it is, or where the embedding program wants it (logger `mpisgd`)."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler

import pytest

from mpisgd.base.terminal import LOGGER, last_words, say, warn
from mpisgd.records.log.progress import Progress


@pytest.fixture(autouse=True)
def _as_at_first() -> Iterator[None]:
    before = LOGGER.handlers[:], LOGGER.propagate, LOGGER.level
    LOGGER.handlers[:], LOGGER.propagate = [], True
    LOGGER.setLevel(logging.NOTSET)
    yield
    LOGGER.handlers[:], LOGGER.propagate = before[:2]
    LOGGER.setLevel(before[2])


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelno, record.getMessage()))


def speak() -> None:
    Progress("plain", total_epochs=2.0, every_s=0.0).update(1, 0.5, 0.25, 1.0)
    warn("100 % of it")
    last_words("the job\nis ended")


PROGRESS = "epoch 0.50/2: loss 0.2500, 1.0 updates/s, mean staleness 0.00, 3 s left"


def test_nothing_configured_it_is_what_print_would_have_written(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    speak()
    assert capsys.readouterr() == ("", f"{PROGRESS}\n100 % of it\nthe job\nis ended\n")
    assert (root.handlers, root.level) == before


def test_a_level_quiets_it(capsys: pytest.CaptureFixture[str]) -> None:
    LOGGER.setLevel(logging.WARNING)
    speak()
    assert capsys.readouterr().err == "100 % of it\nthe job\nis ended\n"


def test_a_handler_takes_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    LOGGER.addHandler(kept)
    LOGGER.setLevel(logging.INFO)
    speak()
    assert kept.seen == [(logging.INFO, PROGRESS), (logging.WARNING, "100 % of it"), (logging.CRITICAL, "the job\nis ended")]
    assert capsys.readouterr().err == ""


def test_last_words_are_not_kept_back() -> None:
    kept = Kept()
    LOGGER.addHandler(MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, target=kept))
    say("a", logging.WARNING)
    assert kept.seen == []
    last_words("b")
    assert [text for _, text in kept.seen] == ["a", "b"]


@pytest.mark.parametrize("leave", ["os._exit(3)", "sys.exit(3)", "raise SystemExit(3)"])
def test_last_words_come_out_as_the_interpreter_dies(leave: str) -> None:
    """Also from what runs after logging has shut down, and over a pipe."""
    code = "import atexit, logging, os, sys\nfrom mpisgd.base.terminal import last_words\n"
    code += f"atexit.register(lambda: (logging.shutdown(), last_words('at exit')))\nlast_words('before')\n{leave}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "before\n" + ("" if "_exit" in leave else "at exit\n")
