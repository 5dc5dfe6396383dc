"""`mpisgd.submit`: a run that is handed to a batch system from Python, and the handle of the job that comes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpisgd.base.checks import require
from mpisgd.base.errors import ConfigError, LaunchError
from mpisgd.config import Config, compatibility, config_file
from mpisgd.records.log import schema
from mpisgd.site.scripts import sites, submission
from mpisgd.site.scripts.options import Request
from mpisgd.site.scripts.queues import QUEUES
from mpisgd.site.scripts.systems import SystemName

if TYPE_CHECKING:
    from mpisgd.analysis.opened import OpenRun

State = Literal["pending", "running", "done", "failed", "cancelled"]

_FIRST_S, _MOST_S, _GROWS = 1.0, 60.0, 1.5
"""Seconds from one question to the next: a batch system's controller is everybody's."""
_PATIENCE = 5
"""So many questions in a row may fail: controllers are restarted."""
_LAST_LINES = 40


@dataclass(frozen=True)
class SubmittedJob:
    """A job of a batch system that trains one run.

    Attributes:
        system: which batch system has it.
        number: its number there.
        run: the run's directory, which is there when the ranks have begun.
        output: the file with what the job prints.
    """

    system: SystemName
    number: str
    run: Path
    output: Path

    @property
    def state(self) -> State:
        """Where the job is now: "done" if, and only if, its run is DONE; "failed" where it has ended without.

        Raises ConfigError: the batch system cannot be asked.
        """
        told = QUEUES[self.system].state(self.number)
        if (self.run / schema.DONE).is_file():
            return "done"
        return "failed" if told == "ended" else told

    def cancel(self) -> None:
        """End the job. Raises ConfigError: the batch system refuses, in its own words."""
        submission.call([*QUEUES[self.system].cancel, self.number])

    def wait(self, timeout_s: float | None = None) -> State:
        """Wait until the job has ended, and say how. It is asked for after 1 s, then less and less often, down to once a minute.

        Raises TimeoutError when it has not ended within `timeout_s`; the job goes on. ConfigError where the batch system could not
        be asked five times in a row.
        """
        begun_s, pause_s, failed = time.monotonic(), _FIRST_S, 0
        while True:
            try:
                state, failed = self.state, 0
            except ConfigError:
                failed += 1
                if failed == _PATIENCE:
                    raise
            else:
                if state not in ("pending", "running"):
                    return state
            left_s = float("inf") if timeout_s is None else begun_s + timeout_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"job {self.number} has not ended within {timeout_s:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(_GROWS * pause_s, _MOST_S)

    def result(self, timeout_s: float | None = None) -> OpenRun:
        """Wait for the run, and open it as `mpisgd.open_run` does.

        Raises LaunchError where the job has ended without, with its last lines; TimeoutError, ConfigError: as `wait`.
        """
        from mpisgd.analysis.opened import open_run

        state = self.wait(timeout_s)
        if state != "done":
            raise LaunchError(f"job {self.number}: {state}; {self.run} is not DONE{self._last_lines()}")
        return open_run(self.run)

    def _last_lines(self) -> str:
        try:
            lines = self.output.read_text("utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        except OSError:
            return f", and there is no {self.output}"
        return "; its last words:\n" + "\n".join(lines)


def submit(config: str | Path | Mapping[str, Any] | Config, *, site: str = "", **options: Any) -> SubmittedJob:
    """Submit a run to a batch system, as `mpisgd submit` does.

    Args:
        config: a TOML file, which the job will see by this path; or a nested mapping of the same shape, or a `Config`: a file
            is made of these, below results/.
        site: defaults from ~/.config/mpisgd/sites/NAME.toml.
        options: those of `mpisgd submit`, by their names with `_`: learners=16, time="2h". Not `array`: call it for each.

    Returns:
        The job's handle.

    Raises:
        ConfigError: what cannot be, before anything is queued; a batch system that is not here, or refuses, in its own words.
    """
    table = {**(sites.defaults(site) if site else {}), **options}
    table = {name: list(value) if isinstance(value, tuple) else value for name, value in table.items()}
    table = {name: str(value) if isinstance(value, Path) else value for name, value in table.items()}
    request = sites.request(Request, {**table, "config": ""})
    require(not request.array, "array", request.array, "none from Python: submit once for each")
    own = not (request.chain and request.system == "pbs")
    require(own, "chain", True, "false with pbs from Python, since each link is a job of its own: mpisgd submit")
    request = dataclasses.replace(request, config=_file(config, request.name))
    said = "".join(f", {name}={value!r}" for name, value in options.items())
    script = submission.make(request, _read, f"mpisgd.submit({str(request.config)!r}{said})")
    number = submission.submit(script)[0]  # one: no array
    names = {"name": request.name, "number": number.replace("f", "ƒ", 1) if request.system == "flux" else number}
    here, output = Path.cwd(), QUEUES[request.system].output.format(**names)
    return SubmittedJob(request.system, number, here / "results" / f"{request.name}-{number}", here / output)


def _file(config: str | Path | Mapping[str, Any] | Config, name: str) -> Path:
    if isinstance(config, str | Path):
        return Path(config)
    text = config_file.dumps(config_file.from_objects(config))
    path = Path("results") / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"  # the same for the same
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def _read(words: Sequence[str]) -> Config:
    (path,) = words
    config = config_file.read(path)
    compatibility.check(config)
    return config
