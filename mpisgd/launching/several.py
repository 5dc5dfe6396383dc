"""The runs of a sweep on this machine's ranks, one after the other: each a job; what fails is told, and the next begins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpisgd.base.errors import EXIT_FAILED, EXIT_OK, ConfigError
from mpisgd.job.interruption import newest
from mpisgd.launching.job import Attempts, Job
from mpisgd.records.log import schema
from mpisgd.sweep import outcomes
from mpisgd.sweep.outcomes import WORDS


@dataclass(frozen=True)
class Several:
    """What is begun, or gone on with.

    Args:
        file: that of the sweep.
        names: the runs.
        directory: of the sweep; each run's is below it.
        words: of `mpisgd train`, for all of them.
        job: ranks and launcher.
        restarts: so many for each.
    """

    file: Path
    names: Sequence[str]
    directory: Path
    words: Sequence[str]
    job: Job
    restarts: int = 0

    def run(self) -> int:
        """0 if, and only if, all are DONE; the status of the job that was told to stop, where one was."""
        if not self.names:
            print(f"nothing is left to do in {self.directory}; mpisgd compare --sweep {self.directory}", flush=True)
            return EXIT_OK
        done = 0
        for place, name in enumerate(self.names, 1):
            attempts = Attempts(self._job(name), self.restarts)
            print(f"mpisgd run: {place} of {len(self.names)}: {name}", file=sys.stderr, flush=True)
            status = attempts.run()
            done += status == EXIT_OK
            if status != EXIT_OK:
                found = outcomes.outcome(self.directory, name)
                print(f"mpisgd run: {name}: {found.state}: {found.reason}", file=sys.stderr, flush=True)
            if attempts.told:
                print(f"mpisgd run: {self.way_on}", file=sys.stderr, flush=True)
                return status
        print(f"{done} of {len(self.names)} runs are done; look at them with: mpisgd compare --sweep {self.directory}", flush=True)
        if done == len(self.names):
            return EXIT_OK
        print(f"mpisgd run: {self.way_on}", file=sys.stderr, flush=True)
        return EXIT_FAILED

    @property
    def way_on(self) -> str:
        return f"the others go on by: mpisgd run -n {self.job.ranks} {self.file} --resume {self.directory}"

    def _job(self, name: str) -> Job:
        """One run, as `train` is told of it: gone on with where it has saved, begun anew where it has not."""
        run = self.directory / name
        if (run / schema.CONFIG).is_file() and newest(run) is not None and "--overwrite" not in self.words:
            words = [str(self.file), "--element", name, "--resume", str(run), *self.words]
            resumed = True
        else:
            anew = ["--overwrite"] if run.exists() and "--overwrite" not in self.words else []
            words = [str(self.file), "--element", name, *self.words, "--out", str(run), *anew]
            resumed = False
        return replace(self.job, words=words, path=run, resumed=resumed, words_to=self.directory / f"{name}{WORDS}")


def begun(file: Path, directory: Path, *, resume: bool, overwrite: bool) -> Sequence[str] | None:
    """Make the directory of a sweep, or, to go on with, look which runs of it are left; None for all.

    Raises ConfigError where it is there and is not to be gone on with or replaced; on resuming, where it is another sweep's.
    """
    if resume:
        names, busy = outcomes.left(file, directory)
        for each in busy:
            print(f"left out: {each.reason}", file=sys.stderr, flush=True)
        return names
    if directory.exists() and not overwrite:
        raise ConfigError(
            f"out = {str(directory)!r} exists: choose another, go on with it by --resume, or say --overwrite to replace it"
        )
    outcomes.begin(file, directory)
    return None
